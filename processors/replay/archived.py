"""A replay's input from an archive: records in order, single ones again, and what topics were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from processors.replay.stages import Stage
from processors.runtime.records import RawRecord, Record
from processors.runtime.topics import Cluster
from streams.archive.picking import Picker
from streams.archive.reading import Archive
from streams.settings import Settings


def cluster_of(archive: Archive, stage: Stage, settings: Settings) -> Cluster:
    """What the stage's topics were like when they were archived last.

    Raises:
        ArchiveError: An input is not in the archive.
    """
    there = set(archive.topics())
    names = (*stage.inputs, stage.output, *stage.others)
    most = settings.kafka.max_message_bytes
    max_bytes = {name: _max_bytes(archive, name) if name in there else most for name in names}
    return Cluster(archive.partitions(stage.inputs[0]), max_bytes, settings.kafka)


def _max_bytes(archive: Archive, topic: str) -> int:
    """What the topic took at last; archivers write all partitions of a topic at the same time."""
    last = max(
        (footers[-1] for footers in archive.footers(topic).values()),
        key=lambda footer: footer.max_timestamp,
    )
    return last.source.max_message_bytes


class ArchivedLog:
    """Reads single records of an archive again (``records.LogReader``).

    Args:
        archive: The archive.
    """

    def __init__(self, archive: Archive) -> None:
        self._picker = Picker(archive)

    def read(self, topic: str, partition: int, offsets: Sequence[int]) -> Iterator[Record]:
        """See ``LogReader``.

        Raises:
            ArchiveError: A file is gone or damaged.
        """
        for row in self._picker.read(topic, partition, offsets):
            yield Record(
                topic=row.topic,
                partition=row.partition,
                offset=row.offset,
                timestamp=row.timestamp,
                key=row.key,
                value=row.value,
                headers=row.headers,
            )


class ArchiveReader:
    """Reads ranges of one partition of several topics, side by side (``shadow.Reader``).

    Args:
        archive: The archive.
        partition: The partition.
        left: From and to of each topic.
        buffered: How many records of a topic wait.
        portion: How many records of a topic to take at a time.
        most_buffered: A topic of which more wait is left alone while there are others.

    Raises:
        ArchiveError: It does not have all of these ranges.
    """

    def __init__(
        self,
        archive: Archive,
        partition: int,
        left: Mapping[str, tuple[int, int]],
        buffered: Callable[[str], int],
        *,
        portion: int,
        most_buffered: int,
    ) -> None:
        for topic, (start, end) in left.items():
            archive.require(topic, partition, start, end)
        self._rows = {
            topic: archive.rows(topic, partition, start, end)
            for topic, (start, end) in left.items()
            if start < end
        }
        self._buffered = buffered
        self._portion = portion
        self._most_buffered = most_buffered

    def close(self) -> None:
        """Close the files."""
        self._rows.clear()

    def batches(self) -> Iterator[Mapping[str, Sequence[RawRecord]]]:
        """What is read, by topic, until every range is at its end.

        Raises:
            ArchiveError: A file is gone or damaged.
        """
        while self._rows:
            yield {topic: self._next(topic) for topic in self._wanted()}

    def _wanted(self) -> list[str]:
        topics = list(self._rows)
        behind = [t for t in topics if self._buffered(t) <= self._most_buffered]
        return behind or topics

    def _next(self, topic: str) -> list[RawRecord]:
        found: list[RawRecord] = list(islice(self._rows[topic], self._portion))
        if len(found) < self._portion:
            del self._rows[topic]
        return found


__all__ = ["ArchiveReader", "ArchivedLog", "cluster_of"]
