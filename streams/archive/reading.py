"""An archive read as one reads a topic: partitions, ranges of offsets, records in order."""

from __future__ import annotations

from collections.abc import Iterator

from streams.archive.chain import Break, breaks
from streams.archive.columns import Row
from streams.archive.files import FileReader, Footer, read_footer
from streams.archive.layout import of_topic
from streams.archive.store import Store, open_store
from streams.errors import ArchiveError, DamagedArchiveError
from streams.settings import Settings


class Archive:
    """The topics of one archive. Footers are read once, when a topic is first asked for.

    Args:
        store: Where its files are.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._footers: dict[str, dict[int, list[Footer]]] = {}

    @property
    def address(self) -> str:
        """Where it is, for people."""
        return self._store.address

    @property
    def store(self) -> Store:
        """Where its files are."""
        return self._store

    def topics(self) -> list[str]:
        """The names of its topics.

        Raises:
            ArchiveError: The place cannot be read.
        """
        return sorted({file.name.topic for file in self._store.files()})

    def footers(self, topic: str) -> dict[int, list[Footer]]:
        """What each file of a topic says about itself, by partition, in order.

        Raises:
            ArchiveError: There is no such topic in the archive.
            DamagedArchiveError: A file is cut short or altered.
        """
        if topic not in self._footers:
            by_partition = of_topic(self._store.files(topic), topic)
            if not by_partition:
                raise ArchiveError(
                    f"there is no topic {topic} in the archive {self.address}; see `clawstream "
                    "archive ls`"
                )
            self._footers[topic] = {
                partition: [read_footer(self._store, file.name) for file in files]
                for partition, files in by_partition.items()
            }
        return self._footers[topic]

    def partitions(self, topic: str) -> int:
        """How many partitions the topic had when it was archived last."""
        return max(
            max(footer.source.partitions, partition + 1)
            for partition, footers in self.footers(topic).items()
            for footer in footers
        )

    def range(self, topic: str, partition: int) -> tuple[int, int]:
        """The offsets it covers of a partition, the end exclusive; (0, 0) if none."""
        footers = self.footers(topic).get(partition, [])
        return (footers[0].name.start, footers[-1].end) if footers else (0, 0)

    def breaks(self, topic: str) -> list[Break]:
        """Where files of a topic do not meet."""
        return [b for footers in self.footers(topic).values() for b in breaks(footers)]

    def check(self, topic: str) -> None:
        """Read every record of a topic once, and hold its files to what their footers say.

        Raises:
            DamagedArchiveError: A file is cut short or altered.
        """
        for footers in self.footers(topic).values():
            for footer in footers:
                with FileReader(self._store, footer.name) as reader:
                    for problem in reader.check(decoded=False):
                        raise DamagedArchiveError(
                            f"{footer.name} in {self.address} is damaged: {problem}. Put a good "
                            "copy in its place"
                        )

    def require(self, topic: str, partition: int, start: int, end: int) -> None:
        """Make sure that it has all there was of a range of offsets.

        Raises:
            ArchiveError: Some of it is missing, or there twice.
        """
        if start >= end:
            return
        low, high = self.range(topic, partition)
        if start < low or end > high:
            raise ArchiveError(
                f"the archive {self.address} has offsets {low} to {high - 1} of {topic} partition "
                f"{partition}, and not all of {start} to {end - 1}"
            )
        for found in breaks(self.footers(topic)[partition]):
            if found.end > start and found.start < end:
                raise ArchiveError(
                    f"{found}. Begin behind them, or see `clawstream archive verify`"
                )

    def offset_at(self, topic: str, partition: int, time_ms: int) -> int:
        """The first offset whose timestamp is at or after a time; the end if there is none.

        As Kafka's own answer: timestamps need not rise, the first that is late enough counts.
        """
        for footer in self.footers(topic).get(partition, []):
            if footer.max_timestamp >= time_ms:
                for row in self._rows(footer, 0):
                    if row.timestamp >= time_ms:
                        return row.offset
        return self.range(topic, partition)[1]

    def rows(
        self, topic: str, partition: int, start: int = 0, end: int | None = None
    ) -> Iterator[Row]:
        """The records of a partition from ``start`` up to ``end`` (exclusive), in order.

        Raises:
            ArchiveError: Files within the range do not meet.
            DamagedArchiveError: A file cannot be read.
        """
        footers = self.footers(topic).get(partition, [])
        for found in breaks(footers):
            inside = found.end > start and (end is None or found.start < end)
            if inside and found.kind != "aged_out":
                raise ArchiveError(f"{found}; see `clawstream archive verify`")
        for footer in footers:
            if footer.end <= start:
                continue
            if end is not None and footer.name.start >= end:
                return
            for row in self._rows(footer, start):
                if end is not None and row.offset >= end:
                    return
                yield row

    def all_rows(self, topic: str, partition: int) -> Iterator[Row]:
        """Every record there is of a partition, whatever is missing between them.

        Raises:
            DamagedArchiveError: A file cannot be read.
        """
        for footer in self.footers(topic).get(partition, []):
            yield from self._rows(footer, 0)

    def _rows(self, footer: Footer, start: int) -> Iterator[Row]:
        with FileReader(self._store, footer.name) as reader:
            yield from reader.rows(start)


def open_archive(address: str, settings: Settings) -> Archive:
    """The archive at an address.

    Raises:
        ArchiveError: No file system is known for it here.
    """
    return Archive(open_store(address, settings.archive.options))


__all__ = ["Archive", "open_archive"]
