"""Open WebUI's feedback export (Admin, Evaluations, Export) as turns and feedback. Pure.

The export is a JSON array. Each rating carries a snapshot of its whole chat, so a chat that was
rated three times is in the file three times; turns are told apart by message id, and of two
snapshots of one message the later one counts.

Every id is made from Open WebUI's own, so importing a file twice, or the next export of the same
chats, adds nothing that the aligner still remembers (``align.horizon_ms``); an edited rating
supersedes its first form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from streams.contracts import DialogueTurn, FeedbackEvent, FeedbackKind, Role
from streams.errors import ImportFormatError

SOURCE = "open-webui"

_ROLES = {"user": Role.USER, "assistant": Role.ASSISTANT, "system": Role.SYSTEM}
_LARGEST_SECONDS = 10**11


@dataclass(frozen=True, slots=True)
class Imported:
    """What a file holds.

    Attributes:
        turns: Each message once, by time.
        feedback: Each rating, by time.
        skipped: What was left out, with the reason, for people to read.
    """

    turns: tuple[DialogueTurn, ...]
    feedback: tuple[FeedbackEvent, ...]
    skipped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Chat:
    session_id: str
    user_id: str | None
    fallback_ms: int
    messages: Mapping[str, Mapping[str, Any]]


def read_open_webui(data: bytes, *, policy: str = "default") -> Imported:
    """Read an export.

    Args:
        data: The file.
        policy: The policy these conversations belong to.

    Raises:
        ImportFormatError: It is no such export; names the item and field.
    """
    try:
        items = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ImportFormatError(f"not valid JSON, perhaps cut short: {error}") from error
    if not isinstance(items, list):
        raise ImportFormatError("expected a JSON array of ratings, as Open WebUI exports them")
    turns: dict[tuple[str, str], DialogueTurn] = {}
    feedback: list[FeedbackEvent] = []
    skipped: list[str] = []
    for index, item in sorted(enumerate(items), key=lambda pair: _updated(*pair)):
        chat = _chat_of(index, item)
        for turn in _turns(chat, policy):
            turns[turn.session_id, turn.turn_id] = turn
        if isinstance(rating := _rating(index, item, chat, policy), str):
            skipped.append(rating)
        else:
            feedback.append(rating)
        if not chat.messages:
            skipped.append(f"[{index}]: the rating has no snapshot of its chat")
    return Imported(
        tuple(sorted(turns.values(), key=lambda t: (t.event_time, t.session_id))),
        tuple(sorted(feedback, key=lambda f: (f.event_time, f.event_id))),
        tuple(skipped),
    )


def _updated(index: int, item: Any) -> int:
    if not isinstance(item, dict):
        raise ImportFormatError(f"[{index}]: must be an object")
    return _ms(index, item, "updated_at")


def _ms(index: int, item: Mapping[str, Any], key: str) -> int:
    value = item.get(key, item.get("created_at"))
    if not isinstance(value, int | float):
        raise ImportFormatError(f"[{index}].{key} must be a time in seconds")
    return _to_ms(value)


def _to_ms(value: float) -> int:
    # Versions differ between seconds, milliseconds, microseconds and nanoseconds.
    scaled = float(value)
    while scaled >= _LARGEST_SECONDS:
        scaled /= 1000
    return round(scaled * 1000)


def _chat_of(index: int, item: Mapping[str, Any]) -> _Chat:
    meta = item.get("meta")
    if not isinstance(meta, dict) or not meta.get("chat_id"):
        raise ImportFormatError(f"[{index}].meta.chat_id is missing")
    snapshot = (item.get("snapshot") or {}).get("chat") or {}
    inner = snapshot.get("chat") or snapshot
    messages = (inner.get("history") or {}).get("messages") or {}
    if isinstance(messages, list):
        messages = {str(m.get("id")): m for m in messages}
    return _Chat(
        session_id=str(meta["chat_id"]),
        user_id=snapshot.get("user_id") or item.get("user_id"),
        fallback_ms=_ms(index, item, "created_at"),
        messages=messages,
    )


def _turns(chat: _Chat, policy: str) -> Iterator[DialogueTurn]:
    for message_id, message in chat.messages.items():
        yield DialogueTurn(
            event_id=f"{SOURCE}-{message_id}",
            policy=policy,
            session_id=chat.session_id,
            turn_id=message_id,
            parent_turn_id=message.get("parentId"),
            role=_ROLES.get(str(message.get("role")), Role.UNKNOWN),
            content=str(message.get("content") or ""),
            event_time=_message_ms(chat, message_id),
            source=SOURCE,
            user_id=chat.user_id,
            model=message.get("model"),
        )


def _message_ms(chat: _Chat, message_id: str) -> int:
    """The message's time, else the nearest earlier one's that has one, else the rating's."""
    seen: set[str] = set()
    current: str | None = message_id
    while current is not None and current in chat.messages and current not in seen:
        seen.add(current)
        stamp = chat.messages[current].get("timestamp")
        if isinstance(stamp, int | float):
            # A millisecond a link keeps the order among messages without a time.
            return _to_ms(stamp) + len(seen) - 1
        current = chat.messages[current].get("parentId")
    return chat.fallback_ms


def _rating(index: int, item: Mapping[str, Any], chat: _Chat, policy: str) -> FeedbackEvent | str:
    data = item.get("data")
    if not isinstance(data, dict) or not item.get("id"):
        raise ImportFormatError(f"[{index}]: id and data are needed")
    value = data.get("rating")
    if not isinstance(value, int | float):
        return f"[{index}]: rating {item['id']} has no value ({value!r})"
    first_id = f"{SOURCE}-{item['id']}"
    created_ms, updated_ms = _ms(index, item, "created_at"), _ms(index, item, "updated_at")
    edited = updated_ms > created_ms
    return FeedbackEvent(
        event_id=f"{first_id}-{updated_ms}" if edited else first_id,
        policy=policy,
        session_id=chat.session_id,
        turn_id=(item.get("meta") or {}).get("message_id"),
        event_time=updated_ms if edited else created_ms,
        kind=FeedbackKind.THUMB,
        value=max(-1.0, min(1.0, float(value))),
        text=data.get("comment") or None,
        tags=tuple(str(tag) for tag in data.get("tags") or ()),
        supersedes=first_id if edited else None,
        source=SOURCE,
        user_id=item.get("user_id"),
        attributes=_attributes(data),
    )


def _attributes(data: Mapping[str, Any]) -> dict[str, str]:
    details = (data.get("details") or {}).get("rating")
    kept = {"reason": data.get("reason"), "details_rating": details, "model": data.get("model_id")}
    return {key: str(value) for key, value in kept.items() if value}
