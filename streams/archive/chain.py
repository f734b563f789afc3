"""What an archive has of a partition: files end to end, and where they are not. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from streams.archive.files import Footer


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """Two files that do not meet.

    Attributes:
        topic: Of both.
        partition: Of both.
        start: The first offset that is missing, or there twice.
        end: The offset after the last one.
        kind: ``gap`` (missing, nobody knows why), ``aged_out`` (Kafka had deleted them before they
            were archived, as the next file says) or ``overlap``.
    """

    topic: str
    partition: int
    start: int
    end: int
    kind: str

    def __str__(self) -> str:
        what = {
            "gap": "are missing between two files: one was lost",
            "aged_out": "are missing: Kafka had deleted them before they were archived",
            "overlap": "are in two files",
        }[self.kind]
        where = f"{self.topic} partition {self.partition}"
        return f"{where}: offsets {self.start} to {self.end - 1} {what}"


def breaks(footers: Iterable[Footer]) -> Iterator[Break]:
    """Where a partition's files, in the order of their offsets, do not meet."""
    end: int | None = None
    for footer in footers:
        start = footer.name.start
        if end is not None and start != end:
            low, high = sorted((start, end))
            kind = "overlap" if start < end else "gap"
            if kind == "gap" and footer.aged_out_from == end:
                kind = "aged_out"
            yield Break(
                topic=footer.name.topic,
                partition=footer.name.partition,
                start=low,
                end=min(high, footer.end),
                kind=kind,
            )
        end = footer.end if end is None else max(end, footer.end)


def next_offset(footers: Sequence[Footer]) -> int | None:
    """Where the next file starts; None before the first."""
    return max((footer.end for footer in footers), default=None)


__all__ = ["Break", "breaks", "next_offset"]
