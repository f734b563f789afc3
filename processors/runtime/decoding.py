"""Raw records into records of ours, as long as they can be written again."""

from __future__ import annotations

from typing import TypeVar

from processors.runtime.records import RawRecord
from streams.contracts import DialogueTurn, FeedbackEvent, TrajectorySegment
from streams.errors import InvalidRecordError, OversizedError
from streams.serde import Codec

T = TypeVar("T", DialogueTurn, FeedbackEvent, TrajectorySegment)

MAX_KEY_BYTES = 4096
"""What the ids that records and state entries are keyed by may have together, in UTF-8."""


def decode(codec: Codec, record: RawRecord, expected: type[T], max_bytes: int) -> T:
    """The record in ``record``.

    Args:
        codec: Reads and writes.
        record: As it was consumed.
        expected: What its topic holds.
        max_bytes: The largest value that is read.

    Raises:
        RecordError: It is no such record, too large, cannot be written as Avro, or its ids
            are too long to key anything by.
        SchemaError: The schema registry cannot be reached.
    """
    value = record.value
    if value is not None and len(value) > max_bytes:
        raise OversizedError(
            f"the value has {len(value)} bytes; kafka.max_message_bytes, and what the topics "
            f"take, allow {max_bytes}"
        )
    decoded: T = codec.decode(value, expected)
    _check_key(decoded.policy, decoded.session_id, decoded.user_id or "")
    return decoded


def _check_key(*ids: str) -> None:
    characters = sum(map(len, ids))
    # No character has more than four bytes; most ids need not be encoded to be measured.
    if 4 * characters <= MAX_KEY_BYTES:
        return
    size = sum(len(part.encode()) for part in ids)
    if size > MAX_KEY_BYTES:
        raise InvalidRecordError(
            f"policy, session_id and user_id have {size} bytes together, more than {MAX_KEY_BYTES}"
        )


__all__ = ["MAX_KEY_BYTES", "decode"]
