"""Events that front ends post, from JSON to records."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from streams.contracts import DialogueTurn, FeedbackEvent, FeedbackKind, Role
from streams.errors import ForbiddenError, InvalidRecordError, RecordError, RequestRefusedError
from streams.gateway.ids import usable_id
from streams.outcomes import Defaults, read_outcome
from streams.serde.validation import validate
from streams.times import check_event_time

_IDS = (
    "event_id",
    "session_id",
    "turn_id",
    "parent_turn_id",
    "request_id",
    "supersedes",
    "user_id",
)

DECIDING_KINDS = frozenset({FeedbackKind.REVIEW, FeedbackKind.JUDGEMENT})
"""Feedback that says what other feedback, or a reply, is worth."""

T = TypeVar("T", DialogueTurn, FeedbackEvent)


def parse_events(
    body: Any,
    record_type: type[T],
    *,
    source: str,
    policy: str,
    now_ms: int,
    max_skew_ms: int,
    own_source_only: bool = False,
) -> list[T]:
    """Read one event or a list of them.

    ``event_id``, ``event_time``, ``source`` and ``policy`` may be left out; a client that may
    send twice should set its own ``event_id``.

    Args:
        body: The decoded JSON of the request.
        record_type: What it holds.
        source: Used where the event names none.
        policy: Used where the event names none.
        now_ms: Used where the event has no time.
        max_skew_ms: How far an event's time may lie ahead of ``now_ms``.
        own_source_only: Whether ``source`` is proven by a key, so that no event may name another.

    Raises:
        InvalidRecordError: One of them breaks the contract; names its index and field. None of
            them is accepted then.
    """
    items = body if isinstance(body, list) else [body]
    if not items:
        raise InvalidRecordError("the list is empty")
    defaults = {"source": source, "policy": policy, "event_time": now_ms}
    events = [
        _parse(index, item, record_type, defaults, now_ms + max_skew_ms)
        for index, item in enumerate(items)
    ]
    if own_source_only:
        _check_sources(events, source)
    return events


def parse_outcomes(body: Any, defaults: Defaults, *, own_source_only: bool) -> list[FeedbackEvent]:
    """Read one outcome or a list of them (``streams.outcomes``).

    Args:
        body: The decoded JSON of the request.
        defaults: What is left out.
        own_source_only: As for ``parse_events``.

    Raises:
        InvalidRecordError: One of them cannot be used; names its index and field. None of them is
            accepted then.
    """
    items = body if isinstance(body, list) else [body]
    if not items:
        raise InvalidRecordError("the list is empty")
    events: list[FeedbackEvent] = []
    for index, item in enumerate(items):
        try:
            event = read_outcome(item, defaults)
            _check_ids(event)
        except (RecordError, RequestRefusedError) as error:
            raise InvalidRecordError(f"[{index}]: {error}") from error
        events.append(event)
    if own_source_only:
        _check_sources(events, defaults.source)
    return events


def _check_sources(events: Sequence[DialogueTurn | FeedbackEvent], source: str) -> None:
    for index, event in enumerate(events):
        if event.source != source:
            raise InvalidRecordError(
                f"[{index}]: source {event.source!r} is not the one of this API key, {source!r}"
            )


def refuse_decisions(events: Sequence[DialogueTurn | FeedbackEvent], source: str) -> None:
    """Let nothing pass that decides about the rewards of others.

    Args:
        events: What a front end sent.
        source: The front end.

    Raises:
        ForbiddenError: One of them is a review or a judgement; names its index.
    """
    for index, event in enumerate(events):
        if isinstance(event, FeedbackEvent) and event.kind in DECIDING_KINDS:
            raise ForbiddenError(
                f"[{index}]: a {event.kind.value} decides about the rewards of others, and "
                f"{source!r} is not among gateway.deciding_sources"
            )


def _parse(
    index: int, item: Any, record_type: type[T], defaults: dict[str, Any], latest_ms: int
) -> T:
    if not isinstance(item, dict):
        raise InvalidRecordError(f"[{index}]: must be an object")
    unknown = sorted(set(item) - set(record_type.__struct_fields__))
    if unknown:
        known = ", ".join(sorted(record_type.__struct_fields__))
        raise InvalidRecordError(
            f"[{index}]: unknown field {', '.join(unknown)}; known are {known}"
        )
    fields = {"event_id": f"event-{secrets.token_hex(12)}", **defaults, **item}
    try:
        record = msgspec.convert(fields, record_type)
        validate(record)
        _check_ids(record)
        _check_meaning(record)
        if "event_time" in item:
            check_event_time(record.event_time, latest_ms)
    except (msgspec.ValidationError, RecordError, RequestRefusedError) as error:
        raise InvalidRecordError(f"[{index}]: {error}") from error
    return record


def _check_meaning(record: DialogueTurn | FeedbackEvent) -> None:
    """Refuse at the door what later stages could only pass over or give up."""
    if isinstance(record, DialogueTurn):
        if record.role is Role.UNKNOWN:
            raise InvalidRecordError(f"role must be one of {_known(Role)}")
    elif record.kind is FeedbackKind.UNKNOWN:
        raise InvalidRecordError(f"kind must be one of {_known(FeedbackKind)}")
    elif record.kind is FeedbackKind.RETRACTION and record.supersedes is None:
        raise InvalidRecordError("a retraction needs supersedes: the event_id it withdraws")


def _known(symbols: type[Role] | type[FeedbackKind]) -> str:
    return ", ".join(symbol for symbol in symbols if symbol is not symbols.UNKNOWN)


def _check_ids(record: DialogueTurn | FeedbackEvent) -> None:
    for name in _IDS:
        given = getattr(record, name, None)
        if given is not None and usable_id(name, given) != given:
            raise InvalidRecordError(f"{name} must not be blank or have blanks around it")
