"""What the gateway does with a chat request, apart from HTTP."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from streams.clock import Clock
from streams.contracts import DialogueTurn, FeedbackEvent, Role, Sampling, TurnType
from streams.gateway.conversation import (
    ChatMessage,
    Conversations,
    NewTurn,
    Placed,
    parse_messages,
)
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

_FINISHED_BY_HANG_UP = "client_disconnected"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request.

    Attributes:
        source: The front end, by its API key or the configured default.
    """

    source: str


@dataclass(frozen=True, slots=True)
class Exchange:
    """One chat request, placed in its conversation.

    Attributes:
        turn_id: The id the reply will have.
        placed: Session, new turns and parent.
        messages: The request's history.
    """

    turn_id: str
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
    """

    def __init__(
        self,
        codec: Codec,
        publisher: Publisher,
        clock: Clock,
        policy: str,
        conversations: Conversations | None = None,
    ) -> None:
        self._codec = codec
        self._publisher = publisher
        self._clock = clock
        self._policy = policy
        self._conversations = conversations or Conversations()

    def open(self, body: Mapping[str, Any], headers: Mapping[str, str], caller: Caller) -> Exchange:
        """Read a chat request and find its conversation.

        Raises:
            BadMessageError: Its messages cannot be used.
        """
        messages = parse_messages(body.get("messages"))
        user_id = _first(headers, USER_HEADERS) or _text(body.get("user"))
        owner = f"{caller.source}\n{user_id or ''}"
        turn_type = _turn_type(body, headers)
        placed = self._conversations.place(
            messages,
            session_id=_first(headers, SESSION_HEADERS) or _text(body.get("session_id")),
            owner=owner,
            fresh_session_id=f"session-{secrets.token_hex(12)}",
        )
        return Exchange(
            turn_id=headers.get(MESSAGE_ID_HEADER) or f"turn-{secrets.token_hex(12)}",
            placed=placed,
            messages=messages,
            owner=owner,
            source=caller.source,
            user_id=user_id,
            request_id=_first(headers, REQUEST_HEADERS),
            turn_type=turn_type,
            session_done=_flag(headers.get(SESSION_DONE_HEADER) or body.get("session_done")),
            sampling=sampling_of(dict(body)),
            model=_text(body.get("model")),
        )

    async def publish_prompt(self, exchange: Exchange) -> None:
        """Make the request's new turns durable."""
        turns = [self._prompt_turn(exchange, new) for new in exchange.placed.new_turns]
        try:
            await self.publish(turns)
        except BaseException:
            self._conversations.forget(exchange.placed.new_turns)
            raise

    async def publish_reply(
        self, exchange: Exchange, reply: ReplyBuilder, *, hung_up: bool = False
    ) -> None:
        """Make the reply durable, as far as it came, and remember it."""
        await self.publish([self._reply_turn(exchange, reply, hung_up=hung_up)])
        self._conversations.replied(
            exchange.placed, exchange.messages, reply.message, exchange.turn_id, exchange.owner
        )

    async def publish(self, records: Sequence[DialogueTurn | FeedbackEvent]) -> None:
        """Make ``records`` durable, in order.

        Raises:
            OversizedError: One is larger than Kafka takes; nothing was published.
        """
        if records:
            await self._publisher.publish([self._envelope(record) for record in records])

    def _envelope(self, record: DialogueTurn | FeedbackEvent) -> Envelope:
        topic = TURNS if isinstance(record, DialogueTurn) else FEEDBACK
        return Envelope(topic, record.session_id.encode(), self._codec.encode(record, topic))

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

    def _reply_turn(
        self, exchange: Exchange, reply: ReplyBuilder, *, hung_up: bool
    ) -> DialogueTurn:
        return DialogueTurn(
            event_id=exchange.turn_id,
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
            session_done=exchange.session_done,
            model=reply.model or exchange.model,
            policy_version=reply.policy_version,
            token_ids=tuple(reply.token_ids) or None,
            behaviour_logprobs=reply.behaviour_logprobs,
            prompt_token_ids=reply.prompt_token_ids,
            sampling=exchange.sampling,
            finish_reason=reply.finish_reason or (_FINISHED_BY_HANG_UP if hung_up else None),
            tokenizer_digest=reply.tokenizer_digest,
            template_digest=reply.template_digest,
            attributes={_FINISHED_BY_HANG_UP: "true"} if hung_up else {},
        )


def _turn_type(body: Mapping[str, Any], headers: Mapping[str, str]) -> TurnType:
    said: Literal["main", "side"] | str = headers.get(TURN_TYPE_HEADER) or str(
        body.get("turn_type") or ""
    )
    if said:
        return TurnType.SIDE if said.lower() == "side" else TurnType.MAIN
    # Open WebUI sends the header empty on its title, tag and follow-up calls.
    return TurnType.SIDE if headers.get(MESSAGE_ID_HEADER) == "" else TurnType.MAIN


def _first(headers: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((headers[name] for name in names if headers.get(name)), None)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _flag(value: Any) -> bool:
    return value is True or str(value).lower() in ("true", "1", "yes")
