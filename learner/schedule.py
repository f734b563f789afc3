"""When the next update is due. Pure.

An update is due as soon as one of these holds, provided that the window holds enough to
sample from (``min_sample_size``) and anything new at all:

1. ``update_segments`` new segments have come and ``update_interval_ms`` have passed;
2. ``update_max_interval_ms`` have passed.

Time counts from the moment the last update's snapshot was sealed; before the first, from the
learner's start; if the clock was set back before that moment, from when this is noticed.
Without one new segment nothing is due: training again on the same data
would not be learning from feedback.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from streams.clock import Clock
from streams.settings import LearnerSettings


class Trigger(StrEnum):
    """Why an update is due."""

    ENOUGH_SEGMENTS = "enough_segments"
    MAX_INTERVAL = "max_interval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The schedule's numbers; see ``LearnerSettings``."""

    update_segments: int
    update_interval_ms: int
    update_max_interval_ms: int
    min_sample_size: int

    @classmethod
    def of(cls, settings: LearnerSettings) -> Rules:
        """The rules that the settings name."""
        return cls(
            update_segments=settings.update_segments,
            update_interval_ms=settings.update_interval_ms,
            update_max_interval_ms=settings.update_max_interval_ms,
            min_sample_size=settings.min_sample_size,
        )


def due(
    rules: Rules, *, new_segments: int, available_segments: int, elapsed_ms: int
) -> Trigger | None:
    """The reason an update is due now, or None.

    Args:
        rules: The schedule.
        new_segments: Usable segments that came since the last seal.
        available_segments: Usable segments, old and new.
        elapsed_ms: Since the last seal, or the start.
    """
    if new_segments < 1 or available_segments < rules.min_sample_size:
        return None
    if new_segments >= rules.update_segments and elapsed_ms >= rules.update_interval_ms:
        return Trigger.ENOUGH_SEGMENTS
    if elapsed_ms >= rules.update_max_interval_ms:
        return Trigger.MAX_INTERVAL
    return None


class Schedule:
    """``due`` with a clock.

    Args:
        rules: The schedule's numbers.
        clock: Tells the time.
        sealed_at_ms: When the last version's snapshot was sealed; None starts counting now.
    """

    def __init__(self, rules: Rules, clock: Clock, sealed_at_ms: int | None = None) -> None:
        self._rules = rules
        self._clock = clock
        self._since_ms = clock.now_ms() if sealed_at_ms is None else sealed_at_ms

    def due(self, *, new_segments: int, available_segments: int) -> Trigger | None:
        """The reason an update is due now, or None."""
        now_ms = self._clock.now_ms()
        # A sealing in the future would keep the learner waiting until that future comes.
        self._since_ms = min(self._since_ms, now_ms)
        return due(
            self._rules,
            new_segments=new_segments,
            available_segments=available_segments,
            elapsed_ms=now_ms - self._since_ms,
        )

    def restart(self) -> int:
        """A snapshot was sealed: count from now. Returns the time, in ms."""
        self._since_ms = self._clock.now_ms()
        return self._since_ms
