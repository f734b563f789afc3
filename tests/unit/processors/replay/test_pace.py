from __future__ import annotations

import pytest

from processors.replay import shadow
from processors.replay.shadow import APPLIED_RECORDS, BATCH_RECORDS, _Pace


class Time:
    """A clock that sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(shadow, "time", made)
    return made


def test_a_rate_is_kept_in_small_portions(clock: Time) -> None:
    pace = _Pace(1_000.0)
    assert (pace.portion, pace.applied) == (50, 50)
    for _ in range(100):
        clock.now_s += 0.01
        pace.wait(pace.portion)
    assert clock.now_s - 100.0 == pytest.approx(5.0)
    assert max(clock.slept) <= 0.05


def test_lost_time_is_not_made_up_for(clock: Time) -> None:
    pace = _Pace(1_000.0)
    pace.wait(50)
    clock.now_s += 60.0
    began_s = clock.now_s
    for _ in range(100):
        pace.wait(50)
    # But for the slack, in which it may be late.
    assert 4.8 <= clock.now_s - began_s + 1e-9 <= 5.0 + 1e-9


def test_without_a_rate_nothing_waits(clock: Time) -> None:
    pace = _Pace(None)
    assert (pace.portion, pace.applied) == (BATCH_RECORDS, APPLIED_RECORDS)
    pace.wait(1_000_000)
    assert clock.slept == []


@pytest.mark.parametrize(("rate", "portion"), [(1.0, 1), (40.0, 2), (1e9, BATCH_RECORDS)])
def test_portions_have_bounds(rate: float, portion: int) -> None:
    assert _Pace(rate).portion == portion
