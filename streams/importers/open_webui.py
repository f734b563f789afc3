"""Open WebUI's feedback export (Admin, Evaluations, Export) as turns and feedback. Pure.

The export is a JSON array. Each rating carries a snapshot of its whole chat, so a chat that was
rated three times is in the file three times; turns are told apart by message id, and of two
snapshots of one message the later one counts.

Every id is made from Open WebUI's own, so importing a file twice, or the next export of the same
chats, adds nothing that the aligner still remembers (``align.horizon_ms``); an edited rating
supersedes its first form. What cannot be used is left out with its reason; a file in which items
are no ratings at all is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streams.contracts import DialogueTurn, FeedbackEvent, FeedbackKind, Role
from streams.errors import ImportFormatError, RequestRefusedError
from streams.foreign import finite_number, writable
from streams.gateway.ids import usable_id

SOURCE = "open-webui"

_ROLES = {
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "system": Role.SYSTEM,
    "tool": Role.TOOL,
}
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
    turns: dict[tuple[str, str], DialogueTurn] = {}
    feedback: dict[str, FeedbackEvent] = {}
    skipped: list[str] = []
    for index, item in sorted(enumerate(_items(data)), key=lambda pair: _updated(*pair)):
        chat = _chat_of(index, item)
        for message_id, message in chat.messages.items():
            if isinstance(turn := _turn(index, chat, message_id, message, policy), str):
                skipped.append(turn)
            else:
                turns[turn.session_id, turn.turn_id] = turn
        if isinstance(rating := _rating(index, item, chat, policy), str):
            skipped.append(rating)
        else:
            feedback[rating.event_id] = rating
        if not chat.messages:
            skipped.append(f"[{index}]: the rating has no snapshot of its chat")
    return Imported(
        tuple(sorted(turns.values(), key=lambda t: (t.event_time, t.session_id))),
        tuple(sorted(feedback.values(), key=lambda f: (f.event_time, f.event_id))),
        tuple(skipped),
    )


def _items(data: bytes) -> list[Any]:
    try:
        items = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ImportFormatError(f"not valid JSON, perhaps cut short: {error}") from error
    if not isinstance(items, list):
        raise ImportFormatError("expected a JSON array of ratings, as Open WebUI exports them")
    return items


def _updated(index: int, item: Any) -> int:
    if not isinstance(item, dict):
        raise ImportFormatError(f"[{index}]: must be an object")
    return _ms(index, item, "updated_at")


def _ms(index: int, item: Mapping[str, Any], key: str) -> int:
    value = finite_number(item.get(key, item.get("created_at")))
    if value is None or value < 0:
        raise ImportFormatError(f"[{index}].{key} must be a time in seconds")
    return _to_ms(value)


def _to_ms(value: float) -> int:
    # Versions differ between seconds, milliseconds, microseconds and nanoseconds.
    scaled = value
    while scaled >= _LARGEST_SECONDS:
        scaled /= 1000
    return round(scaled * 1000)


def _chat_of(index: int, item: Mapping[str, Any]) -> _Chat:
    session_id = _id(index, "meta.chat_id", _dict(item.get("meta")).get("chat_id"))
    if session_id is None:
        raise ImportFormatError(f"[{index}].meta.chat_id is missing")
    snapshot = _dict(_dict(item.get("snapshot")).get("chat"))
    inner = _dict(snapshot.get("chat")) or snapshot
    messages = _dict(inner.get("history")).get("messages")
    if isinstance(messages, list):
        messages = {str(_dict(m).get("id") or ""): m for m in messages}
    return _Chat(
        session_id=session_id,
        user_id=_id(index, "user_id", snapshot.get("user_id") or item.get("user_id")),
        fallback_ms=_ms(index, item, "created_at"),
        messages={key: _dict(message) for key, message in _dict(messages).items()},
    )


def _turn(
    index: int, chat: _Chat, message_id: str, message: Mapping[str, Any], policy: str
) -> DialogueTurn | str:
    try:
        turn_id = _id(index, "message id", message_id)
        parent_id = _id(index, "parentId", message.get("parentId"))
    except ImportFormatError as error:
        return str(error)
    if turn_id is None or not message:
        return f"[{index}]: message {message_id!r} is empty or has no id"
    return DialogueTurn(
        event_id=f"{SOURCE}-{turn_id}",
        policy=policy,
        session_id=chat.session_id,
        turn_id=turn_id,
        parent_turn_id=parent_id,
        role=_ROLES.get(str(message.get("role")), Role.UNKNOWN),
        content=_content(message.get("content")),
        event_time=_message_ms(chat, message_id),
        source=SOURCE,
        user_id=chat.user_id,
        model=_text(message.get("model")) or None,
    )


def _content(given: Any) -> str:
    parts = given if isinstance(given, list) else [{"text": given}]
    texts = [_text(_dict(part).get("text")) for part in parts]
    return "\n".join(text for text in texts if text)


def _message_ms(chat: _Chat, message_id: str) -> int:
    """The message's time, else the nearest earlier one's that has one, else the rating's."""
    seen: set[str] = set()
    current: str | None = message_id
    while current is not None and current in chat.messages and current not in seen:
        seen.add(current)
        stamp = finite_number(chat.messages[current].get("timestamp"))
        if stamp is not None and stamp >= 0:
            # A millisecond a link keeps the order among messages without a time.
            return _to_ms(stamp) + len(seen) - 1
        current = _text(chat.messages[current].get("parentId")) or None
    return chat.fallback_ms


def _rating(index: int, item: Mapping[str, Any], chat: _Chat, policy: str) -> FeedbackEvent | str:
    data, given_id = item.get("data"), _id(index, "id", item.get("id"))
    if not isinstance(data, dict) or given_id is None:
        raise ImportFormatError(f"[{index}]: id and data are needed")
    value = finite_number(data.get("rating"))
    if value is None:
        return f"[{index}]: rating {given_id} has no value ({data.get('rating')!r})"
    # Turns and ratings of a session share the name space of event ids.
    first_id = f"{SOURCE}-rating-{given_id}"
    created_ms, updated_ms = _ms(index, item, "created_at"), _ms(index, item, "updated_at")
    edited = updated_ms > created_ms
    tags = data.get("tags")
    return FeedbackEvent(
        event_id=f"{first_id}-{updated_ms}" if edited else first_id,
        policy=policy,
        session_id=chat.session_id,
        turn_id=_id(index, "meta.message_id", _dict(item.get("meta")).get("message_id")),
        event_time=updated_ms if edited else created_ms,
        kind=FeedbackKind.THUMB,
        value=max(-1.0, min(1.0, value)),
        text=_text(data.get("comment")) or None,
        tags=tuple(_text(str(tag)) for tag in tags) if isinstance(tags, list) else (),
        supersedes=first_id if edited else None,
        source=SOURCE,
        user_id=_id(index, "user_id", item.get("user_id")),
        attributes=_attributes(data),
    )


def _attributes(data: Mapping[str, Any]) -> dict[str, str]:
    details = _dict(data.get("details")).get("rating")
    kept = {"reason": data.get("reason"), "details_rating": details, "model": data.get("model_id")}
    return {key: _text(str(value)) for key, value in kept.items() if value}


def _id(index: int, name: str, value: Any) -> str | None:
    try:
        return usable_id(name, _text(str(value)) if isinstance(value, int | str) else None)
    except RequestRefusedError as error:
        raise ImportFormatError(f"[{index}]: {error}") from error


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return writable(value) if isinstance(value, str) else ""
