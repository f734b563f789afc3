"""Burrow's rules: what a window of a group's offsets says about it. Pure.

LinkedIn's Burrow judges a consumer by how its offsets and its lag move, not by a threshold
of records. Its rules, in the order of ``checkAndGetStatus`` in its evaluator, on samples
taken at equal distances in place of the commits themselves:

1. no lag now: OK, whatever was before;
2. nobody commits any more: STOP. Seen here by a group without members, or one that never was;
3. no lag at some time in the window: OK, the group gets to the end;
4. the offset went back: REWIND;
5. the offset stands and the lag does not shrink: STALL;
6. the offset moves and the lag never shrinks: WARN.

There is one difference: 4 goes before 3. A group that had read everything and was set back would
be OK for as long as the window remembers the time before, and by then the step back would be
out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise


class State(StrEnum):
    """What a partition of a group is in; the later, the worse. ``UNKNOWN`` is no judgement."""

    UNKNOWN = "UNKNOWN"
    OK = "OK"
    WARN = "WARN"
    REWIND = "REWIND"
    STALL = "STALL"
    STOP = "STOP"


@dataclass(frozen=True, slots=True)
class Sample:
    """Where a group stood in a partition at a time.

    Attributes:
        at_s: When, on a clock that only rises.
        current: Next offset to read; None if none was ever committed.
        end: Offset behind the newest record.
        lag: Records not read.
    """

    at_s: float
    current: int | None
    end: int
    lag: int


def judge(window: Sequence[Sample], members: int) -> tuple[State, str]:
    """The state of a partition of a group, and the reason in words.

    Args:
        window: Samples, at least one, the oldest first.
        members: How many consumers the group has now.
    """
    first, last = window[0], window[-1]
    seconds = last.at_s - first.at_s
    if last.lag == 0:
        return State.OK, "everything is read"
    if members == 0:
        if last.current is None:
            return State.STOP, "nobody runs it, and it has never committed an offset"
        return State.STOP, f"nobody runs it: the group has no members, and {last.lag} records wait"
    for before, after in pairwise(window):
        if (after.current or 0) < (before.current or 0):
            return State.REWIND, f"went back from offset {before.current} to {after.current}"
    if any(sample.lag == 0 for sample in window):
        return State.OK, "had read everything within the last seconds"
    if len(window) == 1:
        return State.UNKNOWN, "one look is not enough: it must be seen to move"
    if last.current == first.current:
        if last.lag >= first.lag:
            stands = "has committed nothing yet" if last.current is None else "does not move"
            return State.STALL, (
                f"has {members} members and {stands} for {seconds:.0f} s: it restores its "
                "state, is stuck on a record, or waits for another topic"
            )
        return State.OK, "stands, but records that it has not read have been deleted"
    if all(after.lag >= before.lag for before, after in pairwise(window)):
        return State.WARN, f"reads, but its lag grew by {last.lag - first.lag} in {seconds:.0f} s"
    return State.OK, _progress(first, last, seconds)


def _progress(first: Sample, last: Sample, seconds: float) -> str:
    gained = (first.lag - last.lag) / seconds if seconds > 0 else 0.0
    if gained <= 0:
        return "reads; its lag goes up and down"
    return f"catches up: done in about {last.lag / gained:.0f} s"


__all__ = ["Sample", "State", "judge"]
