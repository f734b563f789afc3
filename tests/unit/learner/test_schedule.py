from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from learner.schedule import Rules, Schedule, Trigger, due
from streams.clock import ManualClock
from streams.settings import LearnerSettings

RULES = Rules(
    update_segments=256,
    update_interval_ms=300_000,
    update_max_interval_ms=1_800_000,
    min_sample_size=64,
)


@pytest.mark.parametrize(
    ("new", "available", "elapsed_ms", "expected"),
    [
        (256, 256, 300_000, Trigger.ENOUGH_SEGMENTS),
        (255, 255, 300_000, None),
        (256, 256, 299_999, None),
        (1_000, 3_000, 5_000_000, Trigger.ENOUGH_SEGMENTS),
        (255, 255, 1_799_999, None),
        (255, 255, 1_800_000, Trigger.MAX_INTERVAL),
        (1, 64, 1_800_000, Trigger.MAX_INTERVAL),
        (1, 63, 1_800_000, None),
        (63, 63, 10**12, None),
        (0, 3_000, 10**12, None),
        (256, 63, 10**12, None),
    ],
)
def test_due(new: int, available: int, elapsed_ms: int, expected: Trigger | None) -> None:
    assert (
        due(RULES, new_segments=new, available_segments=available, elapsed_ms=elapsed_ms)
        is expected
    )


def test_time_counts_from_the_start_and_then_from_the_last_seal() -> None:
    clock = ManualClock(1_000)
    schedule = Schedule(RULES, clock)
    clock.advance(299_999)
    assert schedule.due(new_segments=256, available_segments=256) is None
    clock.advance(1)
    assert schedule.due(new_segments=256, available_segments=256) is Trigger.ENOUGH_SEGMENTS
    assert schedule.restart() == 301_000
    assert schedule.due(new_segments=256, available_segments=256) is None


def test_a_restart_of_the_process_does_not_restart_the_interval() -> None:
    clock = ManualClock(400_000)
    schedule = Schedule(RULES, clock, sealed_at_ms=100_000)
    assert schedule.due(new_segments=256, available_segments=256) is Trigger.ENOUGH_SEGMENTS


def test_rules_are_the_settings() -> None:
    assert Rules.of(LearnerSettings()) == RULES


def test_a_clock_set_back_does_not_hold_the_learner_up() -> None:
    clock = ManualClock(1_000_000_000)
    schedule = Schedule(RULES, clock, sealed_at_ms=2_000_000_000)
    assert schedule.due(new_segments=1, available_segments=100) is None
    clock.advance(RULES.update_max_interval_ms)
    assert schedule.due(new_segments=1, available_segments=100) is Trigger.MAX_INTERVAL


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_sample_size": 11, "window_segments": 10}, "no update would ever be due"),
        (
            {"stale_objective": "behaviour", "importance_weight_cap": 0.9},
            "nothing would be learned from bad replies",
        ),
    ],
)
def test_settings_under_which_nothing_is_learned_are_refused(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        LearnerSettings(**values)


def test_settings_at_these_bounds_are_taken() -> None:
    assert LearnerSettings(min_sample_size=10, window_segments=10).min_sample_size == 10
    # Where the cap weighs tokens only, less than 1 is less of everything.
    assert LearnerSettings(importance_weight_cap=0.9).importance_weight_cap == 0.9
