"""Where events wait on disk while Kafka is away."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock


@dataclass(frozen=True, slots=True)
class Envelope:
    """One record on its way to Kafka."""

    topic: str
    key: bytes
    value: bytes


class Spool:
    """A first-in first-out queue on disk; what ``append`` returned from survives a crash.

    Args:
        path: The SQLite file; its folder is made.

    Raises:
        sqlite3.Error: The file cannot be opened or written; callers answer with an error
            rather than accept what they cannot keep.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = Lock()
        self._db = sqlite3.connect(path, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        with self._db:
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS spool ("
                "id INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT, key BLOB, value BLOB)"
            )
        self._waiting: int = self._db.execute("SELECT count(*) FROM spool").fetchone()[0]

    def __len__(self) -> int:
        return self._waiting

    def append(self, envelopes: Sequence[Envelope]) -> None:
        """Keep ``envelopes``, all or none, synced to disk."""
        with self._lock, self._db:
            self._db.executemany(
                "INSERT INTO spool (topic, key, value) VALUES (?, ?, ?)",
                [(e.topic, e.key, e.value) for e in envelopes],
            )
            self._waiting += len(envelopes)

    def first(self, limit: int) -> tuple[int, list[Envelope]]:
        """The oldest ``limit`` envelopes and the id of the last of them (0 if empty)."""
        with self._lock:
            rows = self._db.execute(
                "SELECT id, topic, key, value FROM spool ORDER BY id LIMIT ?", (limit,)
            ).fetchall()
        return (rows[-1][0] if rows else 0), [Envelope(*row[1:]) for row in rows]

    def drop_through(self, last_id: int) -> None:
        """Forget everything up to ``last_id``: Kafka has it."""
        with self._lock, self._db:
            dropped = self._db.execute("DELETE FROM spool WHERE id <= ?", (last_id,)).rowcount
            self._waiting -= dropped

    def close(self) -> None:
        """Close the file; what waits stays in it."""
        self._db.close()
