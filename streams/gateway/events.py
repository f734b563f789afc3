"""Events that front ends post, from JSON to records."""

from __future__ import annotations

import secrets
from typing import Any, TypeVar

import msgspec

from streams.contracts import DialogueTurn, FeedbackEvent
from streams.errors import InvalidRecordError, RecordError
from streams.serde.validation import validate

T = TypeVar("T", DialogueTurn, FeedbackEvent)


def parse_events(
    body: Any, record_type: type[T], *, source: str, policy: str, now_ms: int, max_skew_ms: int
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

    Raises:
        InvalidRecordError: One of them breaks the contract; names its index and field. None of
            them is accepted then.
    """
    items = body if isinstance(body, list) else [body]
    if not items:
        raise InvalidRecordError("the list is empty")
    defaults = {"source": source, "policy": policy, "event_time": now_ms}
    return [
        _parse(index, item, record_type, defaults, now_ms + max_skew_ms)
        for index, item in enumerate(items)
    ]


def _parse(
    index: int, item: Any, record_type: type[T], defaults: dict[str, Any], latest_ms: int
) -> T:
    if not isinstance(item, dict):
        raise InvalidRecordError(f"[{index}]: must be an object")
    unknown = sorted(set(item) - set(record_type.__dataclass_fields__))
    if unknown:
        raise InvalidRecordError(f"[{index}]: unknown field {', '.join(unknown)}")
    fields = {"event_id": f"event-{secrets.token_hex(12)}", **defaults, **item}
    try:
        record = msgspec.convert(fields, record_type)
        validate(record)
    except (msgspec.ValidationError, RecordError) as error:
        raise InvalidRecordError(f"[{index}]: {error}") from error
    if record.event_time > latest_ms:
        raise InvalidRecordError(
            f"[{index}]: event_time {record.event_time} is more than align.max_skew_ms ahead of "
            "the gateway's clock; send milliseconds since 1970, UTC"
        )
    return record
