"""What the gateway does with a chat request, apart from HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from streams.clock import Clock
from streams.contracts import DialogueTurn, FeedbackEvent, Role, Sampling, TurnType
from streams.errors import ClawstreamError, OversizedError, RequestRefusedError, SpoolError
from streams.gateway.conversation import (
    ChatMessage,
    Conversations,
    NewTurn,
    Placed,
    parse_messages,
)
from streams.gateway.ids import header_text, usable_id
from streams.gateway.publisher import Publisher
from streams.gateway.reply import ReplyBuilder, sampling_of
from streams.gateway.spool import Envelope
from streams.serde import Codec
from streams.topics import FEEDBACK, TURNS

SESSION_HEADERS = ("x-session-id", "x-openwebui-chat-id")
USER_HEADERS = ("x-user-id", "x-openwebui-user-id")
REQUEST_HEADERS = ("x-request-id", "idempotency-key")
MESSAGE_ID_HEADER = "x-feedback-message-id"
TURN_TYPE_HEADER = "x-turn-type"
SESSION_DONE_HEADER = "x-session-done"
CLIENT_KEYS = ("session_id", "turn_type", "session_done")
"""Body fields that speak to the gateway and do not go upstream."""


class Ending(StrEnum):
    """How a reply ended. All but ``DONE`` mark its turn.

    Attributes:
        DONE: The policy server said all, and the client was there to take it.
        HUNG_UP: The client left before the end.
        BROKEN: The policy server broke off, or the gateway had to stop.
    """

    DONE = "done"
    HUNG_UP = "client_disconnected"
    BROKEN = "broken_off"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request.

    Attributes:
        source: The front end, by its API key or the configured default.
        origin: Where the request comes from; tells callers apart who name no user.
    """

    source: str
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One chat request, placed in its conversation.

    Attributes:
        turn_id: The id the reply will have.
        event_id: The id of the reply's event.
        placed: Session, new turns and parent.
        messages: The request's history.
    """

    turn_id: str
    event_id: str
    placed: Placed
    messages: tuple[ChatMessage, ...]
    owner: str
    source: str
    user_id: str | None
    request_id: str | None
    turn_type: TurnType
    session_done: bool
    sampling: Sampling
    model: str | None

    @property
    def session_id(self) -> str:
        """The conversation."""
        return self.placed.session_id


class GatewayService:
    """Turns chat requests and replies into events and makes them durable.

    Args:
        codec: Writes the events.
        publisher: Makes them durable.
        clock: Tells when things happen.
        policy: The policy whose conversations these are.
        largest: Bytes of key and value that each topic takes, where it has a limit.
        conversations: What was seen before; nothing if None.
    """

    def __init__(
        self,
        codec: Codec,
        publisher: Publisher,
        clock: Clock,
        policy: str,
        largest: Mapping[str, int] | None = None,
        conversations: Conversations | None = None,
    ) -> None:
        self._codec = codec
        self._publisher = publisher
        self._clock = clock
        self._policy = policy
        self._largest = largest or {}
        self._conversations = conversations or Conversations()
        self._prompts: dict[str, asyncio.Future[bool]] = {}

    def open(self, body: Mapping[str, Any], headers: Mapping[str, str], caller: Caller) -> Exchange:
        """Read a chat request and find its conversation.

        Raises:
            RequestRefusedError: Its messages or ids cannot be used.
        """
        if body.get("n") not in (None, 1):
            raise RequestRefusedError("n must be 1: a turn has one reply", param="n")
        messages = parse_messages(body.get("messages"))
        user_id = _id(headers, USER_HEADERS) or usable_id("user", body.get("user"))
        request_id = _id(headers, REQUEST_HEADERS)
        wanted_id = _id(headers, (MESSAGE_ID_HEADER,))
        owner = _owner(caller, user_id)
        placed = self._conversations.place(
            messages,
            session_id=_id(headers, SESSION_HEADERS)
            or usable_id("session_id", body.get("session_id")),
            owner=owner,
            fresh_session_id=_fresh_session_id(request_id, owner, messages),
        )
        turn_id = event_id = f"turn-{secrets.token_hex(12)}"
        if wanted_id and self._conversations.claim_reply_id(placed.session_id, wanted_id):
            # Turns and feedback share the name space of event ids: a front end that names a
            # reply may name its feedback alike.
            turn_id, event_id = wanted_id, f"reply-{wanted_id}"
        return Exchange(
            turn_id=turn_id,
            event_id=event_id,
            placed=placed,
            messages=messages,
            owner=owner,
            source=caller.source,
            user_id=user_id,
            request_id=request_id,
            turn_type=_turn_type(body, headers),
            session_done=_flag(headers.get(SESSION_DONE_HEADER) or body.get("session_done")),
            sampling=sampling_of(body),
            model=_text(body.get("model")),
        )

    def encode_prompt(self, exchange: Exchange) -> list[Envelope]:
        """The request's new turns, for :meth:`publish_prompt`.

        Raises:
            RecordError: One of them cannot be recorded; the request must not go on.
        """
        try:
            return [
                self._envelope(self._prompt_turn(exchange, new))
                for new in exchange.placed.new_turns
            ]
        except ClawstreamError:
            self.abandon(exchange)
            raise

    async def publish_prompt(self, exchange: Exchange, envelopes: Sequence[Envelope]) -> None:
        """Make the request's new turns durable, after those of the session's earlier requests.

        Raises:
            SpoolError: They, or earlier ones that they follow, cannot be kept.
        """
        before = self._prompts.get(exchange.session_id)
        kept: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._prompts[exchange.session_id] = kept
        try:
            # A request may follow on turns of one that is still on its way to Kafka.
            if before is not None and not await asyncio.shield(before):
                raise SpoolError("an earlier message of the session could not be kept")
            if envelopes:
                await self._publisher.publish(envelopes)
            kept.set_result(True)
        except BaseException:
            kept.set_result(False)
            self.abandon(exchange)
            raise
        finally:
            if self._prompts.get(exchange.session_id) is kept:
                del self._prompts[exchange.session_id]

    def abandon(self, exchange: Exchange) -> None:
        """Forget what could not be recorded, so that a retry records it."""
        self._conversations.forget(exchange.placed.new_turns)
        self.abandon_reply(exchange)

    def abandon_reply(self, exchange: Exchange) -> None:
        """No reply will come: its id is free again."""
        self._conversations.release_reply_id(exchange.session_id, exchange.turn_id)

    async def publish_reply(
        self, exchange: Exchange, reply: ReplyBuilder, end: Ending = Ending.DONE
    ) -> None:
        """Make the reply durable, as far as it came, and remember it.

        Raises:
            RecordError: It cannot be recorded.
            SpoolError: Neither Kafka nor the disk takes it.
        """
        await self.publish([self._reply_turn(exchange, reply, end)])
        self._conversations.replied(
            exchange.placed, exchange.messages, reply.message, exchange.turn_id, exchange.owner
        )

    async def publish(self, records: Sequence[DialogueTurn | FeedbackEvent]) -> None:
        """Make ``records`` durable, those of one session in order.

        Raises:
            OversizedError: One is larger than its topic takes; nothing was published.
            SpoolError: Neither Kafka nor the disk takes them.
        """
        await self._publisher.publish([self._envelope(record) for record in records])

    def _envelope(self, record: DialogueTurn | FeedbackEvent) -> Envelope:
        topic = TURNS if isinstance(record, DialogueTurn) else FEEDBACK
        key, value = record.session_id.encode(), self._codec.encode(record, topic)
        size, limit = len(key) + len(value), self._largest.get(topic)
        if limit is not None and size > limit:
            raise OversizedError(f"the record has {size} bytes, {topic} takes at most {limit}")
        return Envelope(topic, key, value)

    def _prompt_turn(self, exchange: Exchange, new: NewTurn) -> DialogueTurn:
        return DialogueTurn(
            event_id=new.turn_id,
            policy=self._policy,
            session_id=exchange.session_id,
            turn_id=new.turn_id,
            parent_turn_id=new.parent_turn_id,
            request_id=exchange.request_id,
            role=new.message.role,
            content=new.message.content,
            tool_calls=new.message.tool_calls,
            tool_call_id=new.message.tool_call_id,
            event_time=self._clock.now_ms(),
            source=exchange.source,
            user_id=exchange.user_id,
            turn_type=exchange.turn_type,
        )

    def _reply_turn(self, exchange: Exchange, reply: ReplyBuilder, end: Ending) -> DialogueTurn:
        is_done = end is Ending.DONE
        return DialogueTurn(
            event_id=exchange.event_id,
            policy=self._policy,
            session_id=exchange.session_id,
            turn_id=exchange.turn_id,
            parent_turn_id=exchange.placed.parent_turn_id,
            request_id=exchange.request_id,
            role=Role.ASSISTANT,
            content=reply.content,
            tool_calls=reply.tool_calls,
            event_time=self._clock.now_ms(),
            source=exchange.source,
            user_id=exchange.user_id,
            turn_type=exchange.turn_type,
            session_done=exchange.session_done and is_done,
            model=reply.model or exchange.model,
            policy_version=reply.policy_version,
            token_ids=reply.token_ids,
            behaviour_logprobs=reply.behaviour_logprobs,
            prompt_token_ids=reply.prompt_token_ids,
            sampling=exchange.sampling,
            finish_reason=reply.finish_reason or (None if is_done else end.value),
            tokenizer_digest=reply.tokenizer_digest,
            template_digest=reply.template_digest,
            attributes={} if is_done else {end.value: "true"},
        )


def _owner(caller: Caller, user_id: str | None) -> str:
    return f"{caller.source}\nuser {user_id}" if user_id else f"{caller.source}\n{caller.origin}"


def _fresh_session_id(request_id: str | None, owner: str, messages: Sequence[ChatMessage]) -> str:
    if request_id is None:
        return f"session-{secrets.token_hex(12)}"
    # A retry must find the session of the request that it repeats.
    told = repr((request_id, owner, messages)).encode()
    return f"session-{hashlib.sha256(told).hexdigest()[:24]}"


def _turn_type(body: Mapping[str, Any], headers: Mapping[str, str]) -> TurnType:
    said = headers.get(TURN_TYPE_HEADER) or str(body.get("turn_type") or "")
    if said.strip():
        return TurnType.SIDE if said.strip().lower() == "side" else TurnType.MAIN
    # Open WebUI sends the header empty on its title, tag and follow-up calls.
    return TurnType.SIDE if headers.get(MESSAGE_ID_HEADER) == "" else TurnType.MAIN


def _id(headers: Mapping[str, str], names: Sequence[str]) -> str | None:
    found = (usable_id(name, header_text(headers, name)) for name in names)
    return next((given for given in found if given), None)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _flag(value: Any) -> bool:
    return value is True or str(value).lower() in ("true", "1", "yes")
