"""Single records of an archive, by offset."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from streams.archive.columns import Row, rows_of
from streams.archive.files import FileReader
from streams.archive.layout import FileName
from streams.archive.reading import Archive

UNPACKED_BYTES = 128 * 1024 * 1024
"""About so much of what was unpacked is kept: files are read a row group at a time, and what is
asked for next mostly lies in the same ones."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A row group in memory.

    Attributes:
        offsets: Of its rows.
        table: Its raw columns.
    """

    offsets: list[int]
    table: Any


class Picker:
    """Reads records of an archive by their offsets. Used by one thread.

    Args:
        archive: The archive.
        max_bytes: About how much of it to keep in memory.
    """

    def __init__(self, archive: Archive, max_bytes: int = UNPACKED_BYTES) -> None:
        self._archive = archive
        self._max_bytes = max_bytes
        self._bytes = 0
        self._groups: dict[tuple[FileName, int], _Group] = {}
        self._lasts: dict[FileName, list[int]] = {}

    def read(self, topic: str, partition: int, offsets: Sequence[int]) -> Iterator[Row]:
        """The records at these rising offsets, those that it does not have left out.

        Raises:
            ArchiveError: There is no such topic in the archive, or a file is gone.
            DamagedArchiveError: A file cannot be read.
        """
        files = [footer.name for footer in self._archive.footers(topic).get(partition, [])]
        starts = [name.start for name in files]
        for place, wanted in groupby(offsets, lambda offset: bisect_right(starts, offset) - 1):
            if place >= 0:
                yield from self._of_file(files[place], wanted)

    def _of_file(self, name: FileName, offsets: Iterator[int]) -> Iterator[Row]:
        if name not in self._lasts:
            with FileReader(self._archive.store, name) as reader:
                self._lasts[name] = reader.last_offsets()
        lasts = self._lasts[name]
        for number, wanted in groupby(offsets, lambda offset: bisect_left(lasts, offset)):
            if number < len(lasts):
                yield from self._of_group(name, number, wanted)

    def _of_group(self, name: FileName, number: int, wanted: Iterator[int]) -> Iterator[Row]:
        group = self._group(name, number)
        found = [(bisect_left(group.offsets, offset), offset) for offset in wanted]
        places = [place for place, offset in found if group.offsets[place] == offset]
        if places:
            yield from rows_of(group.table.take(places), name.topic, name.partition)

    def _group(self, name: FileName, number: int) -> _Group:
        # What was used last stands last, and goes last.
        group = self._groups.pop((name, number), None)
        if group is None:
            with FileReader(self._archive.store, name) as reader:
                table = reader.group(number)
            group = _Group(table.column("offset").to_pylist(), table)
            self._bytes += table.nbytes
        self._groups[name, number] = group
        while self._bytes > self._max_bytes and len(self._groups) > 1:
            self._bytes -= self._groups.pop(next(iter(self._groups))).table.nbytes
        return group


__all__ = ["Picker"]
