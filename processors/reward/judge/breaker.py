"""A circuit breaker: a judge that is down is left alone for a while. Pure; time is given."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Breaker:
    """Counts failures in a row; from ``failures`` on it is open for ``pause_s``.

    Then one call may try (half open): if it succeeds the breaker closes, if it fails it is open
    for another pause. A judge that asks for a rest gets it in the same way (``rest``).

    Args:
        failures: Failures in a row that open it.
        pause_s: How long it stays open, seconds.
    """

    failures: int
    pause_s: float
    _in_a_row: int = 0
    _until_s: float | None = None
    _trying: bool = False

    def wait_s(self, now_s: float) -> float:
        """How long to wait before the next call; 0: it may be made, and must be reported.

        While one call tries whether the judge is back, others wait another second.
        """
        if self._until_s is None:
            return 0.0
        if now_s < self._until_s:
            return self._until_s - now_s
        if self._trying:
            return 1.0
        self._trying = True
        return 0.0

    def succeeded(self) -> None:
        """A call was answered."""
        self._in_a_row, self._until_s, self._trying = 0, None, False

    def failed(self, now_s: float) -> None:
        """A call was not answered."""
        self._in_a_row += 1
        if self._trying or self._in_a_row >= self.failures:
            self._until_s, self._trying = now_s + self.pause_s, False

    def rest(self, now_s: float, seconds: float) -> None:
        """Leave the judge alone for so long: it asked for it, which is no failure."""
        self._until_s, self._trying = now_s + seconds, False

    @property
    def open(self) -> bool:
        """Whether calls have to wait."""
        return self._until_s is not None


__all__ = ["Breaker"]
