"""Where events wait on disk while Kafka is away."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from streams.errors import SpoolError

_BATCH_BYTES = 16 * 1024 * 1024
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS spool ("
    "id INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT, key BLOB, value BLOB)",
    "CREATE TABLE IF NOT EXISTS refused (topic TEXT, key BLOB, value BLOB, reason TEXT)",
)


@dataclass(frozen=True, slots=True)
class Envelope:
    """One record on its way to Kafka."""

    topic: str
    key: bytes
    value: bytes


class Spool:
    """A first-in first-out queue on disk; what ``append`` returned from survives a crash.

    Every method raises :class:`SpoolError` if the file cannot be read or written; callers
    answer with an error rather than accept what they cannot keep.

    Args:
        path: The SQLite file; its folder is made. It is this process's alone until ``close``:
            two that send from one file would break the order.

    Raises:
        SpoolError: The file cannot be opened, or another process has it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        with self._readable():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, check_same_thread=False, timeout=0)
            try:
                self._waiting = self._prepare()
            except sqlite3.Error:
                self._db.close()
                raise

    def __len__(self) -> int:
        return self._waiting

    def append(self, envelopes: Sequence[Envelope]) -> None:
        """Keep ``envelopes``, all or none, synced to disk."""
        with self._readable(), self._lock, self._db:
            self._db.executemany(
                "INSERT INTO spool (topic, key, value) VALUES (?, ?, ?)",
                [(e.topic, e.key, e.value) for e in envelopes],
            )
            self._db.commit()
            self._waiting += len(envelopes)

    def first(self, limit: int) -> tuple[int, list[Envelope]]:
        """The oldest envelopes and the id of the last of them (0 if empty).

        At most ``limit``, and fewer if they are large: what is read must fit in memory.
        """
        size = 0
        found: list[tuple[int, Envelope]] = []
        with self._readable(), self._lock:
            rows = self._db.execute(
                "SELECT id, topic, key, value FROM spool ORDER BY id LIMIT ?", (limit,)
            )
            for row_id, topic, key, value in rows:
                found.append((row_id, Envelope(topic, key, value)))
                size += len(value)
                if size >= _BATCH_BYTES:
                    break
            rows.close()
        return (found[-1][0] if found else 0), [envelope for _, envelope in found]

    def drop_through(self, last_id: int, refused: Sequence[tuple[Envelope, str]] = ()) -> None:
        """Forget everything up to ``last_id``: Kafka has it.

        Args:
            last_id: From ``first``.
            refused: What Kafka will never take, and why; kept in the table ``refused``.
        """
        with self._readable(), self._lock, self._db:
            self._db.executemany(
                "INSERT INTO refused (topic, key, value, reason) VALUES (?, ?, ?, ?)",
                [(e.topic, e.key, e.value, reason) for e, reason in refused],
            )
            dropped = self._db.execute("DELETE FROM spool WHERE id <= ?", (last_id,)).rowcount
            self._db.commit()
            self._waiting -= dropped

    def close(self) -> None:
        """Close the file; what waits stays in it."""
        with self._lock:
            self._db.close()

    def _prepare(self) -> int:
        self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        with self._db:
            for statement in _SCHEMA:
                self._db.execute(statement)
        count: int = self._db.execute("SELECT count(*) FROM spool").fetchone()[0]
        return count

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Map what the disk and SQLite say."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            advice = (
                "another gateway has it, give each a gateway.spool_dir of its own"
                if "locked" in str(error)
                else "make room or set gateway.spool_dir"
            )
            raise SpoolError(f"the spool {self._path} cannot be used: {error}; {advice}") from error
