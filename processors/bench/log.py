"""A finished log of turns and feedback: what every subject reads, record by record.

Arrivals are the log's own: the topics are CreateTime and carry them, as topics restored from
an archive do. A tick at the end of each partition of each topic moves the clock past
everything that is due, so that all subjects come to the same end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from processors.bench.dialogue import DialoguePlan, conversations
from streams.contracts import TICK_HEADER, DialogueTurn
from streams.kafka.clients import partition_for
from streams.serde import Codec
from streams.settings import AlignSettings

Side = Literal["turns", "feedback"]
TICK_KEY = b"tick"
"""Of ticks, which need none; but some frameworks keep no state for records without a key."""

SIDES: tuple[Side, Side] = ("turns", "feedback")


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One record of the log; a tick if it has no value.

    Attributes:
        side: Which of the two topics.
        offset: In its partition of that topic.
        arrival_ms: Its Kafka timestamp.
    """

    side: Side
    partition: int
    offset: int
    arrival_ms: int
    key: bytes
    value: bytes | None

    @property
    def headers(self) -> list[tuple[str, str | bytes | None]]:
        """A tick's header; none otherwise."""
        return [(TICK_HEADER, b"")] if self.value is None else []


def make_log(
    plan: DialoguePlan, records: int, partitions: int, codec: Codec, settings: AlignSettings
) -> list[LogRecord]:
    """The first ``records`` events of the plan's dialogue, then the ticks.

    Args:
        plan: The dialogue.
        records: How many events; duplicates count.
        partitions: How many partitions each topic has.
        codec: Writes them.
        settings: The aligner's, to know what its clock must pass.
    """
    log: list[LogRecord] = []
    ends = dict.fromkeys(((side, p) for side in SIDES for p in range(partitions)), 0)
    for event in islice(conversations(plan), records):
        record = event.record
        side: Side = "turns" if isinstance(record, DialogueTurn) else "feedback"
        key = record.session_id.encode()
        partition = partition_for(key, partitions)
        offset = ends[side, partition]
        ends[side, partition] += 1
        value = codec.encode(record)
        log.append(LogRecord(side, partition, offset, event.arrival_ms, key, value))
    last_ms = log[-1].arrival_ms if log else plan.begin_ms
    log.extend(_ticks(ends, last_ms + settings.max_open_ms + settings.settle_ms + 60_000))
    return log


def _ticks(ends: dict[tuple[Side, int], int], at_ms: int) -> Iterator[LogRecord]:
    for (side, partition), offset in ends.items():
        yield LogRecord(side, partition, offset, at_ms, TICK_KEY, None)


__all__ = ["SIDES", "LogRecord", "Side", "make_log"]
