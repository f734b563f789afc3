"""What a replay has done so far, on disk: one SQLite file for each partition.

State, outputs and positions are written together, in one transaction of SQLite's, of as many
outcomes as came within a moment. A replay that was killed goes on where it stood at the last of
these, and puts nothing out twice.

State is written as a log: its keys come in no order, and to find each would take more time, the
more state there is, than to write it. Only who goes on reads it. What later entries replaced is
taken out once it is most of the log.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from processors.runtime.records import Outcome
from streams.errors import ReplayError

KEPT_S = 2.0
"""At most about so much work is lost when a replay is killed. What the state becomes and then
becomes again within that time is written once."""

KEPT_BYTES = 64 * 1024 * 1024
"""About so much waits in memory at most."""

COMPACT_BYTES = 256 * 1024 * 1024
"""State is left as it is until so much was written, and as much as what was left of it the
last time."""

_VERSION = 2
_BUSY_S = 60.0

# Rows are some kilobytes: pages hold several.
_PAGE_BYTES = 16 * 1024
_TABLES = """
CREATE TABLE IF NOT EXISTS state (number INTEGER PRIMARY KEY, key BLOB NOT NULL, value BLOB);
CREATE TABLE IF NOT EXISTS made (number INTEGER PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""
_COMPACT = """
DELETE FROM state WHERE number NOT IN (SELECT max(number) FROM state GROUP BY key);
DELETE FROM state WHERE value IS NULL;
"""
_FOUND = "SELECT user_version, (SELECT count(*) FROM sqlite_master) FROM pragma_user_version"


class PartitionStore:
    """The file of one partition.

    Args:
        path: The file; made if it is not there.
        now_s: A clock that only goes forward.

    Raises:
        ReplayError: Another version of the code made it.
    """

    def __init__(self, path: Path, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._written_s = now_s()
        self._changes: dict[bytes, bytes | None] = {}
        self._made: list[bytes] = []
        self._bytes = 0
        self._compact_at = COMPACT_BYTES
        self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
        self._db.execute(f"PRAGMA page_size={_PAGE_BYTES}")
        # Survives a killed process; a machine that loses power may begin again. What is only
        # ever added needs no journal, and a log of it (WAL) would be written twice.
        self._db.execute("PRAGMA journal_mode=TRUNCATE")
        self._db.execute("PRAGMA synchronous=OFF")
        self._make_tables(path)

    def _make_tables(self, path: Path) -> None:
        version, tables = self._db.execute(_FOUND).fetchone()
        if version == _VERSION:
            return
        if tables:
            self._db.close()
            raise ReplayError(
                f"{path} was begun by another version of clawstream: remove its folder, or choose "
                "another --name, and begin again"
            )
        self._db.executescript(
            f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version={_VERSION}; COMMIT;"
        )

    def close(self) -> None:
        """Close the file. What waits to be written is lost."""
        self._db.close()

    def save(
        self, outcome: Outcome, made: Sequence[bytes], counts: Mapping[str, int], *, done: bool
    ) -> None:
        """Keep what an outcome came to. It is on disk a moment later, or at once if ``done``.

        Args:
            outcome: Its state changes, meta and positions.
            made: Its outputs, those that can be compared.
            counts: What the whole partition has come to so far, by name.
            done: Whether this was the last of the partition.
        """
        self._changes.update(outcome.changes)
        self._made += made
        self._bytes += sum(map(len, made))
        self._bytes += sum(len(value) for value in outcome.changes.values() if value)
        waited_s = self._now_s() - self._written_s
        if done or waited_s >= KEPT_S or self._bytes >= KEPT_BYTES:
            facts = {
                "meta": outcome.meta.hex(),
                "applied": json.dumps(dict(outcome.applied)),
                "counts": json.dumps(dict(counts)),
                "done": json.dumps(done),
            }
            self._write(facts)

    def _write(self, facts: Mapping[str, str]) -> None:
        db, changes = self._db, self._changes
        db.execute("BEGIN")
        db.executemany("INSERT INTO state (key, value) VALUES (?, ?)", changes.items())
        db.executemany("INSERT INTO made (value) VALUES (?)", zip(self._made, strict=True))
        db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts.items())
        db.execute("COMMIT")
        self._compact_at -= sum(len(value) for value in changes.values() if value)
        if self._compact_at <= 0:
            self._compact()
        self._changes, self._made, self._bytes = {}, [], 0
        self._written_s = self._now_s()

    def _compact(self) -> None:
        self._db.executescript(f"BEGIN IMMEDIATE; {_COMPACT} COMMIT;")
        (left,) = self._db.execute("SELECT sum(length(value)) FROM state").fetchone()
        self._compact_at = max(COMPACT_BYTES, left or 0)

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        """The state as it was kept."""
        latest = dict(self._db.execute("SELECT key, value FROM state ORDER BY number"))
        yield from ((key, value) for key, value in latest.items() if value is not None)

    def meta(self) -> bytes | None:
        """The processor's own state of the whole partition; None before the first outcome."""
        found = self._fact("meta")
        return None if found is None else bytes.fromhex(found)

    def applied(self) -> dict[str, int]:
        """The last offset applied of each topic."""
        found: dict[str, int] = json.loads(self._fact("applied") or "{}")
        return found

    def counts(self) -> dict[str, int]:
        """What was kept of the counts."""
        found: dict[str, int] = json.loads(self._fact("counts") or "{}")
        return found

    def is_done(self) -> bool:
        """Whether the whole range was applied."""
        return bool(json.loads(self._fact("done") or "false"))

    def made(self) -> Iterator[tuple[int, bytes]]:
        """All outputs with their numbers, in the order in which they were made."""
        yield from self._db.execute("SELECT number, value FROM made ORDER BY number")

    def output(self, number: int) -> bytes:
        """The output of a number that ``made`` gave."""
        (value,) = self._db.execute("SELECT value FROM made WHERE number = ?", (number,)).fetchone()
        found: bytes = value
        return found

    def _fact(self, name: str) -> str | None:
        row = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])


__all__ = ["KEPT_BYTES", "KEPT_S", "PartitionStore"]
