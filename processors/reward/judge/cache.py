"""Verdicts that were given once, on disk: what is asked again is not paid for again."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from types import TracebackType

from processors.reward.judge.verdicts import Verdict
from streams.errors import JudgeError


class VerdictCache:
    """Votes by the digest of the question (``Question.key``), in one SQLite file.

    Raises:
        JudgeError: The file cannot be opened, read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, votes TEXT NOT NULL)"
            )
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from error

    def get(self, key: str) -> Verdict | None:
        """The verdict that was given to this question, if one was."""
        try:
            found = self._db.execute("SELECT votes FROM verdicts WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            raise self._unusable(error) from error
        return None if found is None else Verdict(tuple(map(int, found[0].split(","))))

    def put(self, key: str, verdict: Verdict) -> None:
        """Keep a verdict; it is on disk when this returns."""
        votes = ",".join(map(str, verdict.votes))
        try:
            self._db.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", (key, votes))
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def __enter__(self) -> VerdictCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _unusable(self, error: Exception) -> JudgeError:
        return JudgeError(
            f"the judge's cache {self._path} cannot be used: {error}; see to the disk, or delete "
            "the file (verdicts in it would be asked for again)"
        )


__all__ = ["VerdictCache"]
