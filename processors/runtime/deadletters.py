"""Dead letters as outputs that can always be written.

A dead letter keeps the record as it was. Where that would exceed what its topic takes, the
value is cut, and so are a key, headers and a message of unusual size; ``attributes`` say so.
"""

from __future__ import annotations

from msgspec.structs import replace

from processors.runtime.records import Output, RawRecord
from streams.contracts import DeadLetter, DeadLetterReason, RecordHeader
from streams.errors import RecordError
from streams.serde import Codec
from streams.topics import DEAD_LETTERS

OVERHEAD_BYTES = 16 * 1024
"""Kept free for the fields around key, value and headers, and for Kafka's own framing."""

SMALL_BYTES = 64 * 1024
"""Keys and headers up to this size are always kept."""

MESSAGE_CHARACTERS = 2_000
"""Of a longer message (it may quote an id) this much is kept."""


def of_record(record: RawRecord, error: RecordError, stage: str) -> DeadLetter:
    """The dead letter of a record that cannot be decoded or used. Its time is the arrival."""
    return letter(record, error.reason, error.detail, stage, record.timestamp)


def letter(
    record: RawRecord, reason: DeadLetterReason, message: str, stage: str, time_ms: int
) -> DeadLetter:
    """A dead letter with a record's coordinates and bytes."""
    return DeadLetter(
        stage=stage,
        reason=reason,
        message=message,
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        time=time_ms,
        key=record.key,
        value=record.value,
        headers=tuple(RecordHeader(key=k, value=v) for k, v in record.headers),
        timestamp=record.timestamp,
    )


def fit(dead: DeadLetter, max_bytes: int) -> DeadLetter:
    """``dead`` small enough for a topic that takes records of ``max_bytes``."""
    attributes: dict[str, str] = {}
    headers, key, value, message = dead.headers, dead.key, dead.value, dead.message
    if len(message) > MESSAGE_CHARACTERS:
        attributes["message_characters"] = str(len(message))
        message = message[:MESSAGE_CHARACTERS]
    headers_bytes = sum(len(h.key.encode()) + len(h.value or b"") for h in headers)
    if headers_bytes > SMALL_BYTES:
        attributes["headers_left_out"] = str(len(headers))
        headers, headers_bytes = (), 0
    if key is not None and len(key) > SMALL_BYTES:
        attributes["key_bytes"] = str(len(key))
        key = key[:SMALL_BYTES]
    # The key is in the letter and is the letter's key, too.
    room = max(0, max_bytes - OVERHEAD_BYTES - headers_bytes - 2 * len(key or b""))
    if value is not None and len(value) > room:
        attributes["value_bytes"] = str(len(value))
        value = value[:room]
    if not attributes:
        return dead
    kept = {**dead.attributes, **attributes, "truncated": "true"}
    return replace(dead, headers=headers, key=key, value=value, message=message, attributes=kept)


def to_output(dead: DeadLetter, codec: Codec, max_bytes: int, topic: str = DEAD_LETTERS) -> Output:
    """The record to produce; it has the key of the record it is about."""
    fitted = fit(dead, max_bytes)
    return Output(topic=topic, key=fitted.key, value=codec.encode(fitted, topic))


__all__ = ["fit", "letter", "of_record", "to_output"]
