"""Facts of an arriving record, and whether it may enter (ALIGNMENT §2). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import msgspec
from msgspec.structs import replace

from processors.feedback_align.model import Fact, Feedback, Life, Session, Turn
from streams.contracts import (
    DeadLetterReason,
    DialogueTurn,
    FeedbackEvent,
    FeedbackKind,
    Role,
    TurnType,
)
from streams.settings import AlignSettings

_DIGEST_BYTES = 16
_BYTES_PER_NUMBER = 8
_encode = msgspec.msgpack.Encoder(order="deterministic").encode


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a record does not enter; a duplicate has no reason."""

    reason: DeadLetterReason | None
    message: str = ""


DUPLICATE = Verdict(None)


def content_digest(record: DialogueTurn | FeedbackEvent) -> bytes:
    """A digest that two records share if and only if their decoded content is equal."""
    if isinstance(record, FeedbackEvent) and (record.value == 0 or type(record.value) is int):
        # 1 equals 1.0, and 0.0 equals -0.0; their encodings differ.
        record = replace(record, value=record.value + 0.0)
    return blake2b(_encode(record), digest_size=_DIGEST_BYTES).digest()


def turn_size(record: DialogueTurn) -> int:
    """UTF-8 bytes of the content plus 8 per token id and log-probability (ALIGNMENT §5)."""
    numbers = (
        len(record.token_ids or ())
        + len(record.behaviour_logprobs or ())
        + len(record.prompt_token_ids or ())
    )
    content = record.content
    length = len(content) if content.isascii() else len(content.encode())
    return length + _BYTES_PER_NUMBER * numbers


def turn_fact(
    record: DialogueTurn, topic: str, partition: int, offset: int, arrival_ms: int
) -> Turn:
    """The facts of a turn that arrives."""
    event_time = record.event_time
    main = record.turn_type is TurnType.MAIN
    return Turn(
        topic,
        partition,
        offset,
        record.event_id,
        record.turn_id,
        (event_time, arrival_ms, offset),
        max(event_time, arrival_ms),
        record.role,
        main,
        main and record.role is Role.ASSISTANT,
        record.session_done,
        turn_size(record) if main else 0,
        content_digest(record),
    )


def feedback_fact(
    record: FeedbackEvent, topic: str, partition: int, offset: int, arrival_ms: int
) -> Feedback:
    """The facts of feedback that arrives."""
    event_time = record.event_time
    return Feedback(
        topic,
        partition,
        offset,
        record.event_id,
        (event_time, arrival_ms, offset),
        max(event_time, arrival_ms),
        record.turn_id,
        record.supersedes,
        record.kind is FeedbackKind.RETRACTION,
        content_digest(record),
    )


def judge(session: Session, fact: Fact, settings: AlignSettings) -> Verdict | None:
    """Apply the five checks in their order; None lets the event in.

    Args:
        session: As of the event's arrival (aged to it).
        fact: The event.
        settings: The aligner's.
    """
    event_time, arrival = fact.key[0], fact.key[1]
    if event_time > arrival + settings.max_skew_ms:
        return Verdict(
            DeadLetterReason.FUTURE_TIMESTAMP,
            f"event_time is {event_time - arrival} ms after its arrival, more than "
            f"max_skew_ms={settings.max_skew_ms}: set the source's clock and send it again",
        )
    known = session.events.get(fact.event_id)
    if known is not None and is_known(known, arrival, settings.horizon_ms):
        return _judge_known(known, fact)
    if isinstance(fact, Turn):
        return _judge_turn(session, fact, settings)
    return _judge_feedback(session, fact)


def is_known(event: Fact, arrival_ms: int, horizon_ms: int) -> bool:
    """Whether an event id is known to an event with this arrival."""
    return arrival_ms <= event.key[1] + horizon_ms or is_held(event, arrival_ms, horizon_ms)


def is_held(event: Fact, arrival_ms: int, horizon_ms: int) -> bool:
    """Whether an event is open, pending, or in a segment visible to this arrival."""
    if event.life is Life.PUBLISHED:
        assert event.segment is not None
        return event.segment.visible_at(arrival_ms, horizon_ms)
    return event.life is Life.OPEN or event.life is Life.PENDING


def _judge_known(known: Fact, fact: Fact) -> Verdict:
    if type(known) is type(fact) and known.digest == fact.digest:
        return DUPLICATE
    return Verdict(
        DeadLetterReason.CONFLICTING_DUPLICATE,
        f"event_id {fact.event_id} is known with other content "
        f"(topic={known.topic} partition={known.partition} offset={known.offset}): "
        "give each event an id of its own",
    )


def _judge_turn(session: Session, fact: Turn, settings: AlignSettings) -> Verdict | None:
    namesake = session.turn_ids.get(fact.turn_id)
    if namesake is not None and is_held(namesake, fact.key[1], settings.horizon_ms):
        return Verdict(
            DeadLetterReason.CONFLICTING_DUPLICATE,
            f"turn_id {fact.turn_id} is taken by another event "
            f"(topic={namesake.topic} partition={namesake.partition} offset={namesake.offset}): "
            "give each turn an id of its own",
        )
    if session.lost is not None and fact.key <= session.lost:
        return _beyond(session.lost[0])
    return None


def _judge_feedback(session: Session, fact: Feedback) -> Verdict | None:
    if fact.retraction and fact.supersedes is None:
        return Verdict(
            DeadLetterReason.INVALID,
            "a retraction must name in supersedes the feedback that it takes back",
        )
    by_time = fact.turn_id is None and fact.supersedes is None
    if by_time and session.lost is not None and fact.key[0] <= session.lost[0]:
        return _beyond(session.lost[0])
    return None


def _beyond(boundary_ms: int) -> Verdict:
    return Verdict(
        DeadLetterReason.BEYOND_HORIZON,
        f"its session was closed up to {boundary_ms} ms longer than horizon_ms ago: "
        "raise horizon_ms to take events that late",
    )
