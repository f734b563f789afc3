"""Which turns of a request are new, and which conversation it belongs to. Pure.

A chat client sends the whole conversation with each request. The gateway publishes each
message once: it follows the chain of digests from the first message on, and remembers, for a
bounded number of conversations, which links it has seen and which turn each one became.

A request without a session id continues a session only if its history ends in a reply that this
gateway gave to exactly this history, to this user, in one session only. Otherwise it begins a new
session: a stranger's message must never become another user's next turn.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from streams.contracts import Role, ToolCall
from streams.errors import RequestRefusedError

_ROLES: Mapping[str, Role] = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
    "function": Role.TOOL,
}


class BadMessageError(RequestRefusedError):
    """A message of a chat request cannot be used; the text names its index and field."""

    def __init__(self, message: str, *, param: str = "messages") -> None:
        super().__init__(message, param=param)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat request.

    Attributes:
        role: Who speaks.
        content: Its text; the text parts of a multi-part message, joined by newlines.
        tool_calls: Tools an assistant message asks for.
        tool_call_id: The call a tool message answers.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] | None = None
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class NewTurn:
    """A message to publish, with the turn it follows and its link in the chain."""

    turn_id: str
    parent_turn_id: str | None
    message: ChatMessage
    link: str


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a request stands.

    Attributes:
        session_id: Its conversation.
        new_turns: Messages not published before, in order.
        parent_turn_id: The turn the reply will follow; None if there is no message.
        chain: Digest of the whole history; the reply is remembered under it.
    """

    session_id: str
    new_turns: tuple[NewTurn, ...]
    parent_turn_id: str | None
    chain: str


def parse_messages(messages: Any) -> tuple[ChatMessage, ...]:
    """Read the ``messages`` of a chat request.

    Raises:
        BadMessageError: It is no list of messages, or one of them is malformed.
    """
    if not isinstance(messages, list) or not messages:
        raise BadMessageError("messages must be a list with at least one message")
    return tuple(_parse(index, message) for index, message in enumerate(messages))


class Conversations:
    """What this gateway has seen, bounded.

    Args:
        capacity: Links (messages) remembered; the least recently used is forgotten first.
            A forgotten message that is sent again is published again and becomes a dead
            letter ``conflicting_duplicate`` in the aligner; nothing else is harmed.
    """

    def __init__(self, capacity: int = 200_000) -> None:
        self._capacity = capacity
        self._turns: OrderedDict[str, str] = OrderedDict()
        self._sessions: OrderedDict[str, str | None] = OrderedDict()
        self._reply_ids: OrderedDict[tuple[str, str], None] = OrderedDict()

    def place(
        self,
        messages: Sequence[ChatMessage],
        *,
        session_id: str | None,
        owner: str,
        fresh_session_id: str,
    ) -> Placed:
        """Find the conversation of a request and its new turns, and remember those.

        Args:
            messages: The request's history.
            session_id: The session the client named, if any.
            owner: Who may continue an unnamed session: source and user, or for want of a user
                where the request came from.
            fresh_session_id: Id to use if a new session begins.
        """
        session = session_id or self._continued(messages, owner) or fresh_session_id
        chain = _link("session", session)
        parent: str | None = None
        new: list[NewTurn] = []
        first_new = _after_last_reply(messages)
        for index, message in enumerate(messages):
            chain = _link(chain, _canonical(message))
            known = self._recall(chain)
            if known is None and index >= first_new:
                known = f"turn-{chain[:24]}"
                new.append(NewTurn(known, parent, message, chain))
                self._remember(chain, known)
            parent = known or parent
        return Placed(session, tuple(new), parent, chain)

    def forget(self, turns: Sequence[NewTurn]) -> None:
        """Take back turns that could not be published, so that a retry publishes them."""
        for turn in turns:
            self._turns.pop(turn.link, None)

    def claim_reply_id(self, session_id: str, turn_id: str) -> bool:
        """Take an id that the front end chose for a reply; False if it was used before.

        A retry or a continued reply may come under the id of the first one; the aligner would
        refuse the second.
        """
        key = (session_id, turn_id)
        is_new = key not in self._reply_ids
        self._reply_ids[key] = None
        self._reply_ids.move_to_end(key)
        _trim(self._reply_ids, self._capacity)
        return is_new

    def release_reply_id(self, session_id: str, turn_id: str) -> None:
        """Give an id back under which no reply was recorded."""
        self._reply_ids.pop((session_id, turn_id), None)

    def replied(
        self,
        placed: Placed,
        messages: Sequence[ChatMessage],
        reply: ChatMessage,
        turn_id: str,
        owner: str,
    ) -> None:
        """Remember a reply, so that the next request is recognised."""
        self._remember(_link(placed.chain, _canonical(reply)), turn_id)
        key = _history_key([*messages, reply], owner)
        seen = self._sessions.get(key, placed.session_id)
        # Two sessions with the same words: from now on nobody can tell which one goes on.
        self._sessions[key] = placed.session_id if seen == placed.session_id else None
        self._sessions.move_to_end(key)
        _trim(self._sessions, self._capacity)

    def _continued(self, messages: Sequence[ChatMessage], owner: str) -> str | None:
        end = _after_last_reply(messages)
        if end == 0:
            return None
        return self._sessions.get(_history_key(messages[:end], owner))

    def _recall(self, chain: str) -> str | None:
        if chain in self._turns:
            self._turns.move_to_end(chain)
        return self._turns.get(chain)

    def _remember(self, chain: str, turn_id: str) -> None:
        self._turns[chain] = turn_id
        self._turns.move_to_end(chain)
        _trim(self._turns, self._capacity)


def _after_last_reply(messages: Sequence[ChatMessage]) -> int:
    replies = [i for i, message in enumerate(messages) if message.role is Role.ASSISTANT]
    return replies[-1] + 1 if replies else 0


def _history_key(messages: Sequence[ChatMessage], owner: str) -> str:
    chain = _link("owner", owner)
    for message in messages:
        chain = _link(chain, _canonical(message))
    return chain


def _canonical(message: ChatMessage) -> str:
    # Clients trim what they show and send back what they show.
    return msgspec.json.encode(replace(message, content=message.content.strip())).decode()


def _link(chain: str, item: str) -> str:
    return hashlib.sha256(f"{chain}\n{item}".encode(errors="surrogatepass")).hexdigest()


def _trim(entries: OrderedDict[Any, Any], capacity: int) -> None:
    while len(entries) > capacity:
        entries.popitem(last=False)


def _parse(index: int, message: Any) -> ChatMessage:
    if not isinstance(message, dict):
        raise BadMessageError(f"messages[{index}] must be an object")
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        raise BadMessageError(
            f"messages[{index}].role is {message.get('role')!r}; use one of {', '.join(_ROLES)}"
        )
    return ChatMessage(
        role=role,
        content=_text(index, message.get("content")),
        tool_calls=_tool_calls(index, message.get("tool_calls")),
        tool_call_id=_tool_call_id(index, message.get("tool_call_id")),
    )


def _text(index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [p.get("text") for p in content if isinstance(p, dict) and p.get("type") == "text"]
        return "\n".join(part for part in parts if isinstance(part, str))
    raise BadMessageError(f"messages[{index}].content must be text or a list of parts")


def _tool_calls(index: int, calls: Any) -> tuple[ToolCall, ...] | None:
    if not calls:
        return None
    try:
        return tuple(
            ToolCall(
                id=str(call["id"]),
                name=str(call["function"]["name"]),
                arguments=_arguments(call["function"]["arguments"]),
            )
            for call in calls
        )
    except (KeyError, TypeError) as error:
        raise BadMessageError(f"messages[{index}].tool_calls is malformed: {error!r}") from error


def _arguments(given: Any) -> str:
    return given if isinstance(given, str) else msgspec.json.encode(given).decode()


def _tool_call_id(index: int, given: Any) -> str | None:
    if given is None or isinstance(given, str):
        return given
    raise BadMessageError(f"messages[{index}].tool_call_id must be text")
