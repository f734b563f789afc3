from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.rates import RateSchedule, rate_factor
from streams.errors import SettingsError
from streams.settings import LearnerSettings, load_settings

SCHEDULES: tuple[RateSchedule, ...] = ("constant", "linear", "quadratic")


def factor(updates: int, **changes: Any) -> float:
    values: dict[str, Any] = {
        "schedule": "linear",
        "decay_updates": 4,
        "warmup_updates": 0,
        "floor": 0.1,
    }
    return rate_factor(updates, **{**values, **changes})


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.75, 0.5, 0.25, 0.1, 0.1]),
        ("quadratic", [1.0, 0.5625, 0.25, 0.1, 0.1, 0.1]),
    ],
)
def test_the_rate_falls_as_the_schedule_says(schedule: str, expected: list[float]) -> None:
    got = [factor(updates, schedule=schedule) for updates in range(6)]
    assert got == pytest.approx(expected, abs=1e-12)


def test_the_rate_warms_up_from_the_first_update() -> None:
    got = [factor(updates, schedule="constant", warmup_updates=3) for updates in range(5)]
    assert got == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0], abs=1e-12)
    both = [factor(updates, warmup_updates=1, floor=0.01) for updates in range(3)]
    assert both == pytest.approx([0.5, 0.75, 0.5], abs=1e-12)


@given(
    st.integers(0, 10**9),
    st.sampled_from(SCHEDULES),
    st.integers(1, 10**6),
    st.integers(0, 10**6),
    st.floats(1e-9, 5.0),
)
def test_no_schedule_ends_in_a_silent_zero(
    updates: int, schedule: RateSchedule, decay: int, warmup: int, floor: float
) -> None:
    got = rate_factor(
        updates, schedule=schedule, decay_updates=decay, warmup_updates=warmup, floor=floor
    )
    assert min(floor, 1.0) <= got <= 1.0


def test_a_floor_above_the_rate_keeps_the_rate() -> None:
    assert factor(500, floor=3.0) == 1.0


@pytest.mark.parametrize("floor", ["0", "-1e-6"])
def test_a_floor_of_nothing_is_refused(floor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAWSTREAM_LEARNER__LEARNING_RATE_FLOOR", floor)
    with pytest.raises(SettingsError, match="learning_rate_floor"):
        load_settings()
    assert LearnerSettings().learning_rate_floor > 0
