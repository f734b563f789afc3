"""Checks an archive: every file's footer and content, and that files meet end to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from streams.archive.chain import Break, breaks
from streams.archive.files import FileReader, Footer
from streams.archive.layout import Stored, of_topic
from streams.archive.store import Store
from streams.errors import ArchiveError, DamagedArchiveError


@dataclass(slots=True)
class TopicReport:
    """What was found of one topic.

    Attributes:
        files: How many files it has.
        rows: Records in them.
        holes: Offsets within files that were no records when they were read.
        problems: What is wrong, in words; nothing if it is sound.
        aged_out: Ranges that Kafka had deleted before they were archived.
    """

    topic: str
    files: int = 0
    rows: int = 0
    holes: int = 0
    problems: list[str] = field(default_factory=list)
    aged_out: list[str] = field(default_factory=list)


OnFile = Callable[[Stored], None]


def verify(
    store: Store,
    topics: tuple[str, ...] = (),
    *,
    footers_only: bool = False,
    on_file: OnFile = lambda file: None,
) -> list[TopicReport]:
    """Check topics of an archive, all if none is named.

    Args:
        store: Where it is.
        topics: Which.
        footers_only: Leave the files' content out; gaps and overlaps are found all the same.
        on_file: Told of each file before it is read.

    Raises:
        ArchiveError: The place cannot be read, or there is nothing of a topic that was named.
    """
    files = store.files()
    known = sorted({file.name.topic for file in files})
    missing = sorted(set(topics) - set(known))
    if missing or not known:
        what = f"topic {', '.join(missing)}" if missing else "file"
        raise ArchiveError(f"there is no {what} in the archive {store.address}")
    check = _Check(store, footers_only, on_file)
    return [check.topic(topic, files) for topic in topics or known]


class _Check:
    def __init__(self, store: Store, footers_only: bool, on_file: OnFile) -> None:
        self._store = store
        self._footers_only = footers_only
        self._on_file = on_file

    def topic(self, topic: str, files: list[Stored]) -> TopicReport:
        report = TopicReport(topic)
        for stored in of_topic(files, topic).values():
            footers = [footer for file in stored if (footer := self._file(file, report))]
            for found in self._breaks(footers, complete=len(footers) == len(stored)):
                (report.aged_out if found.kind == "aged_out" else report.problems).append(
                    str(found)
                )
        return report

    def _breaks(self, footers: list[Footer], *, complete: bool) -> Iterator[Break]:
        """Where files do not meet; without one that cannot be read there is a gap, of course."""
        return (b for b in breaks(footers) if complete or b.kind != "gap")

    def _file(self, file: Stored, report: TopicReport) -> Footer | None:
        self._on_file(file)
        report.files += 1
        try:
            with FileReader(self._store, file.name) as reader:
                footer = reader.footer
                wrong = [] if self._footers_only else reader.check()
        except DamagedArchiveError as error:
            report.problems.append(str(error))
            return None
        report.problems += [f"{file.name}: {problem}" for problem in wrong]
        report.rows += footer.rows
        report.holes += footer.holes
        return footer


__all__ = ["TopicReport", "verify"]
