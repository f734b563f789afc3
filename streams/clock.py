"""Wall time, injected, so that no decision reads it behind a test's back."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Tells the time to whoever needs it."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch, UTC."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000


@dataclass(slots=True)
class ManualClock:
    """A clock that moves only when told to."""

    time_ms: int = 0

    def now_ms(self) -> int:
        return self.time_ms

    def advance(self, by_ms: int) -> None:
        """Move forward by ``by_ms`` milliseconds."""
        self.time_ms += by_ms
