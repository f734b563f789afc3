"""Where scored segments are read: from Kafka or from an archive, each place as often as asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from streams.contracts import ScoredSegment
from streams.errors import RecordError
from streams.kafka.reading import read_messages
from streams.topics import SCORED

if TYPE_CHECKING:
    from streams.archive.reading import Archive
    from streams.serde import Codec
    from streams.settings import Settings

Place = tuple[int, int]
"""Partition and offset."""

Read = Callable[[], Iterator[tuple[Place, ScoredSegment]]]


def from_kafka(settings: Settings, codec: Codec, topic: str = SCORED) -> Read:
    """Reads the topic as far as it goes at each call; what cannot be decoded is passed over."""

    def read() -> Iterator[tuple[Place, ScoredSegment]]:
        for message in read_messages(settings, topic):
            place = (message.partition() or 0, message.offset() or 0)
            yield from _decoded(codec, place, message.value())

    return read


def from_archive(archive: Archive, codec: Codec, topic: str = SCORED) -> Read:
    """Reads the topic from an archive."""

    def read() -> Iterator[tuple[Place, ScoredSegment]]:
        for partition in range(archive.partitions(topic)):
            for row in archive.rows(topic, partition):
                yield from _decoded(codec, (partition, row.offset), row.value)

    return read


def _decoded(
    codec: Codec, place: Place, value: bytes | None
) -> Iterator[tuple[Place, ScoredSegment]]:
    if value is None:
        return
    try:
        yield place, codec.decode(value, ScoredSegment)
    except RecordError:
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which segments are meant.

    Attributes:
        policy: Policies share topics, never training data.
        since_ms: Closed from this time on.
        until_ms: Closed before it.
    """

    policy: str
    since_ms: int | None = None
    until_ms: int | None = None

    def means(self, scored: ScoredSegment) -> bool:
        """Whether this one is."""
        segment = scored.segment
        return (
            segment.policy == self.policy
            and (self.since_ms is None or segment.first_closed_at >= self.since_ms)
            and (self.until_ms is None or segment.first_closed_at < self.until_ms)
        )


@dataclass(slots=True)
class Latest:
    """The newest of each segment: its highest revision, of that the one scored last.

    Reading twice keeps places in memory and no segments.
    """

    _places: dict[str, tuple[int, Place]] = field(default_factory=dict)

    @classmethod
    def of(cls, read: Read, wanted: Wanted) -> Latest:
        """Find them."""
        found = cls()
        for place, scored in read():
            if wanted.means(scored):
                found._see(place, scored)
        return found

    def _see(self, place: Place, scored: ScoredSegment) -> None:
        segment = scored.segment
        known = self._places.get(segment.segment_id)
        if known is None or segment.revision >= known[0]:
            self._places[segment.segment_id] = (segment.revision, place)

    def __len__(self) -> int:
        return len(self._places)

    def segments(self, read: Read) -> Iterator[ScoredSegment]:
        """They, in the order of the log."""
        for place, scored in read():
            known = self._places.get(scored.segment.segment_id)
            if known is not None and known[1] == place:
                yield scored


__all__ = ["Latest", "Read", "Wanted", "from_archive", "from_kafka"]
