"""Each rule, at its edges."""

from __future__ import annotations

import pytest

from streams.lag.burrow import Sample, State, judge

Window = list[tuple[int | None, int]]
"""(current, end) of each look, a second apart."""


def judged(window: Window, members: int = 1) -> tuple[State, str]:
    samples = [
        Sample(float(second), current, end, end - (current or 0))
        for second, (current, end) in enumerate(window)
    ]
    return judge(samples, members)


@pytest.mark.parametrize(
    ("window", "members", "state", "said"),
    [
        ([(5, 5)], 1, State.OK, "everything is read"),
        ([(5, 5)], 0, State.OK, "everything is read"),
        ([(9, 9), (2, 9), (9, 9)], 1, State.OK, "everything is read"),
        ([(4, 5)], 0, State.STOP, "no members, and 1 records wait"),
        ([(5, 5), (5, 6)], 0, State.STOP, "no members"),
        ([(None, 3)], 0, State.STOP, "never committed"),
        ([(4, 5)], 1, State.UNKNOWN, "one look"),
        ([(4, 5), (4, 5)], 1, State.STALL, "does not move for 1 s"),
        ([(4, 5), (4, 5), (4, 8)], 2, State.STALL, "2 members and does not move for 2 s"),
        ([(None, 5), (None, 5)], 1, State.STALL, "has committed nothing yet"),
        ([(5, 5), (5, 8), (5, 9)], 1, State.OK, "had read everything"),
        ([(4, 5), (6, 7), (6, 9)], 1, State.WARN, "grew by 2 in 2 s"),
        ([(4, 5), (6, 9), (8, 9)], 1, State.OK, "goes up and down"),
        ([(0, 100), (40, 100), (80, 100)], 1, State.OK, "catches up: done in about 0 s"),
        ([(0, 100), (20, 110), (40, 120)], 1, State.OK, "catches up: done in about 8 s"),
        ([(4, 9), (2, 9)], 1, State.REWIND, "from offset 4 to 2"),
        ([(9, 9), (2, 9), (3, 9)], 1, State.REWIND, "from offset 9 to 2"),
        ([(4, 9), (None, 9)], 1, State.REWIND, "from offset 4 to None"),
        ([(4, 9), (2, 9)], 0, State.STOP, "no members"),
    ],
)
def test_each_rule(window: Window, members: int, state: State, said: str) -> None:
    found, reason = judged(window, members)
    assert (found, said in reason) == (state, True), reason


def test_deleted_records_are_no_progress_of_the_group() -> None:
    samples = [Sample(0.0, 4, 90, 86), Sample(1.0, 4, 90, 20)]
    assert judge(samples, 1) == (
        State.OK, "stands, but records that it has not read have been deleted",
    )  # fmt: skip
