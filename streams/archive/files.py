"""One file of an archive: written row by row, read, and checked.

What a file covers stands in its footer. Offsets that are missing within ``[start, end)`` were no
records when they were read: a transaction's markers, records of aborted ones, records a compaction
took. What is missing between files was lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streams.archive.columns import RAW, Digest, Row, Table, check_raw, pyarrow_or_raise, rows_of
from streams.archive.layout import FileName
from streams.errors import ArchiveError, DamagedArchiveError

if TYPE_CHECKING:
    from streams.archive.store import Store

FORMAT = 1
GROUP_BYTES = 8 * 1024 * 1024
"""A row group is written when it has so much."""
GROUP_ROWS = 20_000
_BATCH_ROWS = 2_000
_PREFIX = "clawstream."


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The topic that a file's records come from.

    Attributes:
        partitions: How many it had.
        max_message_bytes: The largest record it took.
        topic_id: Kafka's own id of it; another one is another topic of the same name.
    """

    partitions: int
    max_message_bytes: int
    topic_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """What a file says about itself.

    Attributes:
        name: What its name should be.
        end: The offset at which the next file starts.
        rows: How many records it holds.
        sha256: Over all rows (``columns.Digest``).
        min_timestamp: The smallest of Kafka's timestamps in it.
        max_timestamp: The largest.
        source: The topic.
        aged_out_from: If Kafka had deleted records before they were archived: the first
            offset that is missing before ``name.start``.
    """

    name: FileName
    end: int
    rows: int
    sha256: str
    min_timestamp: int
    max_timestamp: int
    source: Source
    aged_out_from: int | None = None

    @property
    def holes(self) -> int:
        """Offsets within it that were no records."""
        return self.end - self.name.start - self.rows

    def to_metadata(self) -> dict[str, str]:
        """As key-value pairs of a Parquet footer."""
        values = {
            "format": FORMAT,
            "topic": self.name.topic,
            "partition": self.name.partition,
            "start_offset": self.name.start,
            "end_offset": self.end,
            "rows": self.rows,
            "sha256": self.sha256,
            "min_timestamp": self.min_timestamp,
            "max_timestamp": self.max_timestamp,
            "partitions": self.source.partitions,
            "max_message_bytes": self.source.max_message_bytes,
            "topic_id": self.source.topic_id,
        }
        if self.aged_out_from is not None:
            values["aged_out_from"] = self.aged_out_from
        return {f"{_PREFIX}{name}": str(value) for name, value in values.items()}

    @classmethod
    def from_metadata(cls, metadata: Mapping[bytes, bytes]) -> Footer:
        """From a Parquet footer.

        Raises:
            ValueError: Something is missing or no number.
            KeyError: Something is missing.
        """
        found = {
            key.decode().removeprefix(_PREFIX): value.decode()
            for key, value in metadata.items()
            if key.startswith(_PREFIX.encode())
        }
        if "format" not in found:
            raise ValueError("it is no file of an archive: its footer does not say what it holds")
        if int(found["format"]) != FORMAT:
            raise ValueError(f"its format is {found['format']}, this version reads {FORMAT}")
        aged_out = found.get("aged_out_from")
        return cls(
            name=FileName(found["topic"], int(found["partition"]), int(found["start_offset"])),
            end=int(found["end_offset"]),
            rows=int(found["rows"]),
            sha256=found["sha256"],
            min_timestamp=int(found["min_timestamp"]),
            max_timestamp=int(found["max_timestamp"]),
            source=Source(
                partitions=int(found["partitions"]),
                max_message_bytes=int(found["max_message_bytes"]),
                topic_id=found["topic_id"],
            ),
            aged_out_from=None if aged_out is None else int(aged_out),
        )


@dataclass(slots=True)
class FileWriter:
    """Writes one file, at most a row group of it in memory.

    Args:
        path: In a workspace.
        name: What it will be called.
        source: The topic.
        columns: Makes batches of rows.
        aged_out_from: See ``Footer``.
    """

    path: Path
    name: FileName
    source: Source
    columns: Table
    aged_out_from: int | None = None
    size_bytes: int = 0
    _rows: int = 0
    _waiting: list[Row] = field(default_factory=list)
    _waiting_bytes: int = 0
    _digest: Digest = field(default_factory=Digest)
    _stamps: tuple[int, int] | None = None
    _next: int = -1
    _writer: Any = None

    def __post_init__(self) -> None:
        self._next = self.name.start

    @property
    def end(self) -> int:
        """The offset after the last row."""
        return self._next

    def add(self, row: Row) -> None:
        """Take the next row.

        Raises:
            ArchiveError: It does not come after the last, or the disk does not take it.
        """
        if row.offset < self._next:
            raise ArchiveError(f"offset {row.offset} of {self.name} came after {self._next - 1}")
        self._next = row.offset + 1
        self._rows += 1
        least, most = self._stamps or (row.timestamp, row.timestamp)
        self._stamps = (min(least, row.timestamp), max(most, row.timestamp))
        self._digest.add(row)
        self._waiting.append(row)
        size = row.size_bytes
        self.size_bytes += size
        self._waiting_bytes += size
        if self._waiting_bytes >= GROUP_BYTES or len(self._waiting) >= GROUP_ROWS:
            self._write_group()

    def finish(self, end: int) -> Footer:
        """Write the rest and the footer.

        Args:
            end: The offset up to which everything was read, exclusive.
        """
        assert self._stamps is not None, "a file has at least one row"
        assert end >= self._next
        self._write_group()
        footer = Footer(
            name=self.name,
            end=end,
            rows=self._rows,
            sha256=self._digest.hex(),
            min_timestamp=self._stamps[0],
            max_timestamp=self._stamps[1],
            source=self.source,
            aged_out_from=self.aged_out_from,
        )
        with _writing(self.path):
            self._writer.add_key_value_metadata(footer.to_metadata())
            self._writer.close()
        return footer

    def abandon(self) -> None:
        """Leave nothing behind."""
        if self._writer is not None:
            self._writer.close()
        self.path.unlink(missing_ok=True)

    def _write_group(self) -> None:
        if not self._waiting:
            return
        batch = self.columns.batch(self._waiting)
        with _writing(self.path):
            if self._writer is None:
                self._writer = _parquet().ParquetWriter(
                    str(self.path),
                    self.columns.schema,
                    compression="zstd",
                    write_page_checksum=True,
                )
            self._writer.write_batch(batch)
        self._waiting, self._waiting_bytes = [], 0


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ArchiveError(f"cannot write {path}: {error.strerror or error}") from error


class FileReader:
    """Reads one file.

    Args:
        store: Where it is.
        name: Which one.

    Raises:
        DamagedArchiveError: It is cut short, altered, or no file of an archive.
        ArchiveError: It is gone.
    """

    def __init__(self, store: Store, name: FileName) -> None:
        self._name = name
        self._address = store.address
        self._handle = store.open(name)
        try:
            with self._damage():
                # The checksums of the pages are checked as they are read.
                self._file = _parquet().ParquetFile(self._handle, page_checksum_verification=True)
                self.footer = Footer.from_metadata(self._file.metadata.metadata or {})
                if self.footer.name != name:
                    raise ValueError(f"its footer says it is {self.footer.name}")
                check_raw(self._file.schema_arrow)
        except BaseException:
            self._handle.close()
            raise

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._handle.close()

    def rows(self, start: int = 0) -> Iterator[Row]:
        """Its rows from an offset on.

        Raises:
            DamagedArchiveError: A part cannot be read, or less comes of it than there should be.
        """
        groups = self._groups_from(start)
        batches = self._file.iter_batches(
            batch_size=_BATCH_ROWS, columns=list(RAW), row_groups=groups
        )
        missing = sum(self._rows_of(number) for number in groups)
        while True:
            with self._damage():
                batch = next(batches, None)
                rows = (
                    None
                    if batch is None
                    else list(rows_of(batch, self._name.topic, self._name.partition))
                )
            if rows is None:
                self._require_all(missing)
                return
            missing -= len(rows)
            yield from (row for row in rows if row.offset >= start)

    def _groups_from(self, start: int) -> list[int]:
        return [number for number, last in enumerate(self.last_offsets()) if last >= start]

    def last_offsets(self) -> list[int]:
        """The last offset of each row group.

        Raises:
            DamagedArchiveError: It cannot be told.
        """
        with self._damage():
            metadata = self._file.metadata
            groups = [metadata.row_group(n) for n in range(metadata.num_row_groups)]
            found = [group.column(0).statistics for group in groups]
            if any(statistics is None for statistics in found):
                raise ValueError("it does not say which offsets its row groups have")
            return [int(statistics.max) for statistics in found]

    def group(self, number: int) -> Any:
        """The columns ``RAW`` of a row group, as an Arrow table.

        Raises:
            DamagedArchiveError: It cannot be read.
        """
        with self._damage():
            table = self._file.read_row_group(number, columns=list(RAW))
        self._require_all(self._rows_of(number) - table.num_rows)
        return table

    def _rows_of(self, group: int) -> int:
        return int(self._file.metadata.row_group(group).num_rows)

    def _require_all(self, missing: int) -> None:
        """A page whose head is altered may pass for an empty one."""
        with self._damage():
            if missing:
                raise ValueError(f"{missing} of its rows do not come")

    def check(self, *, decoded: bool = True) -> list[str]:
        """What is wrong with its content; every byte of it is read.

        Args:
            decoded: The decoded columns too; otherwise only what a topic is made of.

        Raises:
            DamagedArchiveError: A part cannot be read.
        """
        if decoded:
            with self._damage():
                # They are no part of the digest: their pages' checksums are read.
                for batch in self._file.iter_batches(batch_size=_BATCH_ROWS):
                    del batch
        digest, rows, last = Digest(), 0, self.footer.name.start - 1
        problems: list[str] = []
        for row in self.rows():
            if not last < row.offset < self.footer.end:
                problems.append(f"offset {row.offset} is out of order or out of range")
            last = row.offset
            digest.add(row)
            rows += 1
        if rows != self.footer.rows:
            problems.append(f"it holds {rows} rows, its footer says {self.footer.rows}")
        if digest.hex() != self.footer.sha256:
            problems.append("its rows do not have the digest in its footer: they were altered")
        return problems

    @contextmanager
    def _damage(self) -> Iterator[None]:
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowException, OSError, ValueError, KeyError, EOFError) as error:
            raise DamagedArchiveError(
                f"{self._name} in {self._address} is damaged: "
                f"{_reason(error)}. Put a good copy in its place; or, while "
                "Kafka still has its records, move it and all later files of its partition away "
                "and run `clawstream archive run` again"
            ) from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def read_footer(store: Store, name: FileName) -> Footer:
    """What a file says about itself.

    Raises:
        DamagedArchiveError: It is cut short, altered, or no file of an archive.
        ArchiveError: It is gone.
    """
    with FileReader(store, name) as reader:
        return reader.footer


def _parquet() -> Any:
    pyarrow_or_raise()
    import pyarrow.parquet

    return pyarrow.parquet


__all__ = ["FileReader", "FileWriter", "Footer", "Source", "read_footer"]
