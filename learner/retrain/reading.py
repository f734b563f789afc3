"""Reads a range of ``trajectory.scored`` once, in no consumer group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from learner.retrain.store import Read, Store
from learner.window import pack
from streams.archive.columns import Row
from streams.archive.reading import Archive
from streams.contracts import TICK_HEADER, ScoredSegment, SourceRef
from streams.errors import BrokerError, RecordError, ReplayError
from streams.kafka import reading
from streams.kafka.places import KafkaLog, Log, Place, Range, ranges_between, resolve
from streams.serde import Codec
from streams.settings import Settings

_BATCH = 500
_POLL_S = 1.0
_TIMEOUT_S = 60.0
_GROUP = "clawstream-retrain"

ReadRange = Callable[[Range], Iterator[Sequence[Row]]]
"""Reads the records of a range, in order."""


@contextmanager
def connect(settings: Settings) -> Iterator[Consumer]:
    """A reader of committed records; what it raises becomes one of our errors.

    Raises:
        BrokerError: Kafka cannot be reached.
    """
    # A range that begins before what the topic still has must not begin elsewhere quietly.
    overrides = {"enable.partition.eof": True}
    with reading.connect(
        settings, _GROUP, auto_offset_reset="error", overrides=overrides
    ) as consumer:
        yield consumer


def find_ranges(consumer: Consumer, topic: str, first: Place, last: Place) -> tuple[Range, ...]:
    """The part of each partition that lies between two places.

    Raises:
        ReplayError: The topic or a place is not there, or nothing lies between them.
    """
    found = consumer.list_topics(topic, timeout=_TIMEOUT_S).topics[topic]
    if found.error is not None:
        raise ReplayError(f"there is no topic {topic}: run `clawstream topics apply`")
    return _between(KafkaLog(consumer), {topic: len(found.partitions)}, first, last)


def find_archived(archive: Archive, topic: str, first: Place, last: Place) -> tuple[Range, ...]:
    """As ``find_ranges``, of an archived topic.

    Raises:
        ReplayError: A place is not there, or nothing lies between them.
        ArchiveError: The topic is not in the archive, or a part of the range is missing there.
    """
    ranges = _between(archive, {topic: archive.partitions(topic)}, first, last)
    for one in ranges:
        archive.require(one.topic, one.partition, one.start, one.end)
    return ranges


def _between(log: Log, topics: Mapping[str, int], first: Place, last: Place) -> tuple[Range, ...]:
    if first.time_ms is not None and last.time_ms is not None and first.time_ms >= last.time_ms:
        raise ReplayError(f"--from {first.text} does not lie before --to {last.text}")
    starts = resolve(log, topics, first, is_end=False)
    ends = resolve(log, topics, last, is_end=True)
    return tuple(one for one in ranges_between(starts, ends) if one.records)


def read_into(
    store: Store,
    read: ReadRange,
    ranges: Sequence[Range],
    *,
    codec: Codec,
    teaches: Callable[[ScoredSegment], bool],
    policy: str | None,
    shown: Callable[[int], None],
) -> tuple[int, int]:
    """Keep the newest revision of every segment in these ranges.

    Args:
        store: Where they are kept.
        read: Of `from_topic` or `from_archive`.
        ranges: What to read, one partition after the other.
        codec: Decodes.
        teaches: Whether there is anything to learn from a segment.
        policy: Whose segments are kept with their content, if they teach; nobody's if None.
        shown: Told of each batch how many records it had.

    Returns:
        How many records were read, ticks not counted, and how many of them cannot be decoded:
        those are passed over, as the live learner does.

    Raises:
        ReplayError: A part was deleted before it was read.
        ArchiveError: A part is gone from the archive, or a file of it is damaged.
        BrokerError: Kafka does not answer.
        SchemaError: The schema registry cannot be reached.
    """
    records = broken = 0
    for one in ranges:
        for batch in read(one):
            found: list[Read] = []
            for row in batch:
                if _is_tick(row):
                    continue
                records += 1
                try:
                    found.append(_read(row, codec, teaches, policy))
                except RecordError:
                    broken += 1
            store.add(found)
            shown(len(batch))
    return records, broken


def _is_tick(row: Row) -> bool:
    return any(key == TICK_HEADER for key, _ in row.headers)


def _read(
    row: Row, codec: Codec, teaches: Callable[[ScoredSegment], bool], policy: str | None
) -> Read:
    scored = codec.decode(row.value, ScoredSegment)
    ref = SourceRef(topic=row.topic, partition=row.partition, offset=row.offset)
    packed = pack(ref, scored, teaches)
    return Read(
        policy=scored.segment.policy,
        first_closed_at=scored.segment.first_closed_at,
        packed=packed if scored.segment.policy == policy else replace(packed, data=b""),
    )


def from_archive(archive: Archive) -> ReadRange:
    """Reads an archive."""

    def batches(wanted: Range) -> Iterator[Sequence[Row]]:
        archive.require(wanted.topic, wanted.partition, wanted.start, wanted.end)
        rows = archive.rows(wanted.topic, wanted.partition, wanted.start, wanted.end)
        while batch := list(islice(rows, _BATCH)):
            yield batch

    return batches


def from_topic(consumer: Consumer) -> ReadRange:
    """Reads a topic; for the consumer see `connect`."""

    def batches(wanted: Range) -> Iterator[Sequence[Row]]:
        for messages in _messages(consumer, wanted):
            yield [_row(message) for message in messages]

    return batches


def _row(message: Any) -> Row:
    return Row(
        topic=message.topic(),
        partition=message.partition(),
        offset=message.offset(),
        timestamp=message.timestamp()[1],
        key=message.key(),
        value=message.value(),
        headers=tuple(message.headers() or ()),
    )


def _messages(consumer: Consumer, wanted: Range) -> Iterator[list[Message]]:
    """The messages of a range; the last may come before its end, which can be a marker."""
    consumer.assign([TopicPartition(wanted.topic, wanted.partition, wanted.start)])
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        batch: list[Message] = []
        for message in consumer.consume(_BATCH, _POLL_S):
            deadline = time.monotonic() + _TIMEOUT_S
            if _is_end(message, wanted):
                yield batch
                return
            if message.error() is None:
                batch.append(message)
        yield batch
        if time.monotonic() > deadline:
            raise BrokerError(
                f"cannot read {wanted.topic} partition {wanted.partition}: nothing came for "
                f"{_TIMEOUT_S:.0f} s"
            )


def _is_end(message: Any, wanted: Range) -> bool:
    error = message.error()
    if error is None:
        return bool(message.offset() >= wanted.end)
    if error.code() == KafkaError._PARTITION_EOF:
        return True
    if error.code() == KafkaError._AUTO_OFFSET_RESET:
        raise ReplayError(
            f"{wanted.topic} partition {wanted.partition} has no offset {wanted.start} any more: "
            "it was deleted. Retrain from later on, or from an archive"
        )
    if not error.retriable():
        raise KafkaException(error)
    return False


__all__ = [
    "ReadRange",
    "connect",
    "find_archived",
    "find_ranges",
    "from_archive",
    "from_topic",
    "read_into",
]
