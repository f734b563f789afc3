"""What a replay has done so far, on disk: one SQLite file for each partition.

State, outputs and positions of an outcome are written in one transaction of SQLite's, so a
replay that was killed goes on where it stood and puts nothing out twice.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from processors.runtime.records import Outcome

# Values are large and keys come in no order: rows kept by key would split pages all the time.
_TABLES = """
CREATE TABLE IF NOT EXISTS state (key BLOB PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS made (
    segment_id TEXT, revision INTEGER, session TEXT, ordinal INTEGER, closed_at INTEGER,
    value BLOB NOT NULL, PRIMARY KEY (segment_id, revision)
);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""


class Made(msgspec.Struct, frozen=True, gc=False):
    """One output that can be compared.

    Attributes:
        segment_id: Of the segment.
        revision: Its revision.
        session: Policy and session id.
        ordinal: Of the segment in its session.
        closed_at: Of this revision.
        value: The record's bytes.
    """

    segment_id: str
    revision: int
    session: str
    ordinal: int
    closed_at: int
    value: bytes


class PartitionStore:
    """The file of one partition.

    Args:
        path: The file; made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        # Survives a killed process; a machine that loses power may begin again.
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=OFF")
        self._db.executescript(_TABLES)

    def close(self) -> None:
        self._db.close()

    def save(
        self, outcome: Outcome, made: Iterable[Made], counts: Mapping[str, int], *, done: bool
    ) -> None:
        """Keep what an outcome came to.

        Args:
            outcome: Its state changes, meta and positions.
            made: Its outputs.
            counts: What the whole partition has come to so far, by name.
            done: Whether this was the last of the partition.
        """
        db = self._db
        db.execute("BEGIN")
        changes = outcome.changes
        gone = [(key,) for key, value in changes.items() if value is None]
        kept = [(key, value) for key, value in changes.items() if value is not None]
        db.executemany("DELETE FROM state WHERE key = ?", gone)
        db.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", kept)
        db.executemany(
            "INSERT OR REPLACE INTO made VALUES (?, ?, ?, ?, ?, ?)",
            map(msgspec.structs.astuple, made),
        )
        facts = {
            "meta": outcome.meta.hex(),
            "applied": json.dumps(dict(outcome.applied)),
            "counts": json.dumps(dict(counts)),
            "done": json.dumps(done),
        }
        db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts.items())
        db.execute("COMMIT")

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        """The state as it was kept."""
        yield from self._db.execute("SELECT key, value FROM state")

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

    def made(self) -> Iterator[Made]:
        """All outputs."""
        for row in self._db.execute("SELECT * FROM made"):
            yield Made(*row)

    def _fact(self, name: str) -> str | None:
        row = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])


__all__ = ["Made", "PartitionStore"]
