"""Where a replay begins and ends: times, durations and offsets, as Kafka's own tools take them."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from streams.errors import ReplayError
from streams.kafka.reading import offset_range

if TYPE_CHECKING:
    from confluent_kafka import Consumer

EARLIEST = "earliest"
LATEST = "latest"

FORMS = (
    "earliest, latest, a time (2026-11-01, 2026-11-01T08:30:00Z, 2026-11-01T08:30:00+02:00), a "
    "duration before now (PT24H, P7D, 90m, 24h, 7d), or a CSV file of topic,partition,offset"
)
_TIMEOUT_S = 30.0
_SHORT = re.compile(r"(\d+)([smhd])")
_ISO = re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+)S)?)?")
_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

Offsets = Mapping[tuple[str, int], int]
"""An offset for each (topic, partition)."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the log.

    Attributes:
        text: As it was given.
        time_ms: The Kafka timestamp at which it lies; None for an end of the log or offsets.
        offsets: Given one by one; None if they follow from the rest.
    """

    text: str
    time_ms: int | None = None
    offsets: Offsets | None = None


def parse_place(text: str, now_ms: int) -> Place:
    """Read a place.

    Args:
        text: In one of ``FORMS``.
        now_ms: What durations count back from.

    Raises:
        ReplayError: It is in none of them.
    """
    if text in (EARLIEST, LATEST):
        return Place(text)
    if text.endswith(".csv"):
        return Place(text, offsets=_read_offsets(Path(text)))
    if (ago_ms := duration_ms(text)) is not None:
        return Place(text, time_ms=now_ms - ago_ms)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ReplayError(f"{text!r} is no place in the log: give {FORMS}") from None
    if moment.tzinfo is None:
        if len(text) > len("2026-11-01"):
            raise ReplayError(f"{text!r} does not say which time zone: add Z for UTC, or +02:00")
        moment = moment.replace(tzinfo=UTC)
    return Place(text, time_ms=int(moment.timestamp() * 1000))


def duration_ms(text: str) -> int | None:
    """A duration in milliseconds; None if the text is none."""
    if short := _SHORT.fullmatch(text):
        return int(short[1]) * _MS[short[2]]
    iso = _ISO.fullmatch(text)
    if iso is None or not any(iso.groups()):
        return None
    return sum(int(n or 0) * _MS[unit] for n, unit in zip(iso.groups(), "dhms", strict=True))


def _read_offsets(path: Path) -> Offsets:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError) as error:
        raise ReplayError(f"cannot read {path}: {error}") from error
    found: dict[tuple[str, int], int] = {}
    for number, row in enumerate(rows, 1):
        if len(row) != 3 or not row[1].strip().isdecimal() or not row[2].strip().isdecimal():
            raise ReplayError(
                f"{path}, line {number}: {','.join(row)!r} is not topic,partition,offset, the form "
                "that kafka-consumer-groups --export writes"
            )
        found[row[0].strip(), int(row[1])] = int(row[2])
    return found


class Log(Protocol):
    """What knows where records are: Kafka, or an archive."""

    def range(self, topic: str, partition: int) -> tuple[int, int]:
        """The first offset there is of a partition, and the one after its last."""
        ...

    def offset_at(self, topic: str, partition: int, time_ms: int) -> int:
        """The first offset whose timestamp is at or after a time; the end if there is none."""
        ...


class KafkaLog:
    """The topics in Kafka (``Log``).

    Args:
        consumer: A read_committed consumer; only asked, not assigned.
    """

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def range(self, topic: str, partition: int) -> tuple[int, int]:
        """See ``Log``."""
        return offset_range(self._consumer, topic, partition)

    def offset_at(self, topic: str, partition: int, time_ms: int) -> int:
        """See ``Log``."""
        from confluent_kafka import TopicPartition

        asked = TopicPartition(topic, partition, max(0, time_ms))
        (at,) = self._consumer.offsets_for_times([asked], timeout=_TIMEOUT_S)
        return at.offset if at.offset >= 0 else self.range(topic, partition)[1]


def resolve(
    log: Log, topics: Mapping[str, int], place: Place, *, is_end: bool
) -> dict[tuple[str, int], int]:
    """The offset that a place has in each partition.

    Args:
        log: Where the records are.
        topics: How many partitions each topic has.
        place: Which place.
        is_end: Whether it is one behind the last record wanted.

    Raises:
        ReplayError: Offsets are missing, or none of the log's.
    """
    found: dict[tuple[str, int], int] = {}
    for key in ((t, p) for t, count in topics.items() for p in range(count)):
        low, high = log.range(*key)
        if place.offsets is not None:
            found[key] = _given(place, key, low, high, is_end=is_end)
        elif place.time_ms is not None:
            found[key] = log.offset_at(*key, place.time_ms)
        else:
            found[key] = low if place.text == EARLIEST else high
    return found


def _given(place: Place, key: tuple[str, int], low: int, high: int, *, is_end: bool) -> int:
    assert place.offsets is not None
    offset = place.offsets.get(key)
    if offset is None:
        if is_end:
            return high
        raise ReplayError(f"{place.text} has no offset for {key[0]} partition {key[1]}")
    if offset < low:
        raise ReplayError(
            f"{key[0]} partition {key[1]} begins at offset {low}: {offset} has been deleted, or "
            "was never archived. Replay from later on, or from an archive that has it"
        )
    if offset > high:
        raise ReplayError(f"{key[0]} partition {key[1]} ends at offset {high}, before {offset}")
    return offset


@dataclass(frozen=True, slots=True)
class Range:
    """A part of one partition: from ``start`` on, ``end`` not included."""

    topic: str
    partition: int
    start: int
    end: int

    @property
    def records(self) -> int:
        """How many there are at most: markers of transactions have offsets too."""
        return max(0, self.end - self.start)


def ranges_between(
    starts: Mapping[tuple[str, int], int], ends: Mapping[tuple[str, int], int]
) -> Sequence[Range]:
    """The parts between two places.

    Raises:
        ReplayError: There is nothing between them.
    """
    found = [Range(t, p, starts[t, p], max(starts[t, p], ends[t, p])) for t, p in sorted(starts)]
    if not any(item.records for item in found):
        raise ReplayError(
            "no record lies between these two places: `clawstream lag` shows where topics end, "
            "a topic's retention.ms says how far back they go, and `clawstream archive ls` what an "
            "archive has"
        )
    return found
