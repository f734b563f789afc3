"""What a retrain has read and done so far: one SQLite file and the learner's state beside it.

The range is read once; from then on the segments in this file are the input, whatever becomes
of the topic. Progress is kept after every update: first the state under a new name, then the row
of the update. A retrain that was killed in between makes that update again, with the same result.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from learner.checkpoint import LearnerState
from learner.retrain.batches import Usable
from learner.window import Candidate, Packed
from streams.contracts import SourceRef
from streams.errors import ReplayError
from streams.files import sync_folder

_DATABASE = "retrain.db"
_LOCK = ".lock"
_TABLES = """
CREATE TABLE IF NOT EXISTS segments (
    policy TEXT, segment_id TEXT, revision INTEGER NOT NULL, session_id TEXT NOT NULL,
    first_closed_at INTEGER NOT NULL, teaches INTEGER NOT NULL, topic TEXT NOT NULL,
    "partition" INTEGER NOT NULL, "offset" INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (policy, segment_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS updates (number INTEGER PRIMARY KEY, made TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""
_NEWER = """
INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET
    revision = excluded.revision, session_id = excluded.session_id,
    first_closed_at = excluded.first_closed_at, teaches = excluded.teaches,
    topic = excluded.topic, "partition" = excluded."partition", "offset" = excluded."offset",
    data = excluded.data
WHERE excluded.revision > segments.revision
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A record of the range, ready to be kept."""

    policy: str
    first_closed_at: int
    packed: Packed


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What became of one update.

    Attributes:
        number: Which, from 0.
        digest: Of its batch.
        used: Ids of the segments that were trained on; none if it was undone.
        metrics: Of the update.
        optimizer_step: After it.
        undone: Why it does not count; None if it does.
    """

    number: int
    digest: str
    used: tuple[str, ...]
    metrics: Mapping[str, float]
    optimizer_step: int
    undone: str | None = None


class Store:
    """See the module.

    Args:
        folder: Where it is kept, made if it is not there; None keeps the segments in a file
            that is gone when this is closed.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        name = "" if folder is None else str(folder / _DATABASE)
        self._db = sqlite3.connect(name, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.executescript(_TABLES)

    @staticmethod
    def exists(folder: Path) -> bool:
        """Whether a retrain was begun in this folder."""
        return (folder / _DATABASE).exists()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def claim(self) -> Iterator[None]:
        """Be the one process that works on this.

        Raises:
            ReplayError: Another process does.
        """
        with (self._kept_in() / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ReplayError(
                    f"another process is at work on {self._kept_in()}: wait until it has ended"
                ) from error
            yield

    # What was read

    def forget_segments(self) -> None:
        """Begin reading anew."""
        self._db.execute("DELETE FROM segments")

    def add(self, records: Sequence[Read]) -> None:
        """Keep these records, of each segment the newest revision; the first of equal ones."""
        self._db.execute("BEGIN")
        self._db.executemany(_NEWER, map(_row, records))
        self._db.execute("COMMIT")

    def counts(self) -> dict[str, tuple[int, int]]:
        """How many segments each policy has, and how many of them teach anything."""
        query = "SELECT policy, count(*), sum(teaches) FROM segments GROUP BY policy ORDER BY 1"
        return {policy: (count, teaching) for policy, count, teaching in self._db.execute(query)}

    def usable(self, policy: str) -> tuple[Usable, ...]:
        """The policy's segments that teach anything, ordered as in ``learner.retrain.batches``."""
        query = (
            "SELECT segment_id, revision, session_id FROM segments WHERE policy = ? AND teaches "
            "ORDER BY first_closed_at, segment_id"
        )
        return tuple(
            Usable(segment_id=i, revision=revision, session_id=session)
            for i, revision, session in self._db.execute(query, (policy,))
        )

    def open_segment(self, policy: str, segment_id: str) -> Candidate:
        """A segment, whole again."""
        query = (
            'SELECT revision, session_id, topic, "partition", "offset", data FROM segments '
            "WHERE policy = ? AND segment_id = ?"
        )
        revision, session, topic, partition, offset, data = self._db.execute(
            query, (policy, segment_id)
        ).fetchone()
        return Packed(
            ref=SourceRef(topic=topic, partition=partition, offset=offset),
            segment_id=segment_id,
            session_id=session,
            revision=revision,
            teaches=True,
            tokens=0,
            oldest_version=None,
            earned=b"",
            data=data,
        ).open()

    # What was done

    def fact(self, name: str) -> Any:
        """What was kept under a name; None if nothing was."""
        row = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def keep_fact(self, name: str, value: Any) -> None:
        """Keep what can be written as JSON."""
        self._db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(value)))

    def made(self) -> tuple[Made, ...]:
        """The updates so far, in order."""
        rows = self._db.execute("SELECT made FROM updates ORDER BY number")
        loaded = [json.loads(row[0]) for row in rows]
        return tuple(Made(**{**one, "used": tuple(one["used"])}) for one in loaded)

    def keep(self, made: Made, state: LearnerState) -> None:
        """Keep an update and the learner's state after it, durably."""
        path = self._state_path(made.number)
        hidden = path.with_name(f".{path.name}")
        with hidden.open("wb") as file:
            file.write(state.data)
            file.flush()
            os.fsync(file.fileno())
        hidden.replace(path)
        sync_folder(path.parent)
        self._db.execute(
            "INSERT OR REPLACE INTO updates VALUES (?, ?)", (made.number, json.dumps(asdict(made)))
        )
        self._state_path(made.number - 1).unlink(missing_ok=True)

    def state(self, number: int) -> LearnerState:
        """The learner's state after the last update that was kept.

        Raises:
            ReplayError: It cannot be read.
        """
        path = self._state_path(number)
        try:
            return LearnerState(path.read_bytes())
        except OSError as error:
            raise ReplayError(
                f"cannot read {path}: {error.strerror}; retrain under a new name"
            ) from error

    def drop_state(self, number: int) -> None:
        """The retrain is published: nothing goes on from its state."""
        self._state_path(number).unlink(missing_ok=True)

    def _state_path(self, number: int) -> Path:
        return self._kept_in() / f"state-{number}.pt"

    def _kept_in(self) -> Path:
        assert self._folder is not None, "a dry run has no folder"
        return self._folder


def _row(read: Read) -> tuple[Any, ...]:
    packed, ref = read.packed, read.packed.ref
    return (
        read.policy, packed.segment_id, packed.revision, packed.session_id, read.first_closed_at,
        packed.teaches, ref.topic, ref.partition, ref.offset, packed.data,
    )  # fmt: skip


__all__ = ["Made", "Read", "Store"]
