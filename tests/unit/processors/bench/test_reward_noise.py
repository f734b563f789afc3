"""The noise bench at a small size: its arithmetic, its truth, and that filters help."""

from __future__ import annotations

import pytest

from processors.bench.reward_noise import OFF, Conversations, NoisePlan, run, score, spearman
from streams.settings import RewardSettings

PLAN = NoisePlan(users=16, hours=6, levels=(0.2,), seeds=(1,))


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(1.0, 10.0), (2.0, 20.0), (3.0, 21.0)], 1.0),
        ([(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)], -1.0),
        ([(1.0, 1.0), (1.0, 2.0), (2.0, 3.0)], 0.8660254),
        ([(1.0, 1.0), (1.0, 2.0)], 0.0),
        ([], 0.0),
    ],
)
def test_rank_correlation_by_hand(pairs: list[tuple[float, float]], expected: float) -> None:
    assert spearman(pairs) == pytest.approx(expected)


def test_the_same_conversations_are_spoilt_at_every_level() -> None:
    clean, spoilt = Conversations(PLAN, 1, None), Conversations(PLAN, 1, 0.4)
    before, after = list(clean.segments()), list(spoilt.segments())
    honest = {segment.segment_id for segment in before}
    assert honest < {segment.segment_id for segment in after}
    assert clean.truth.quality.items() <= spoilt.truth.quality.items()
    assert clean.truth.bad == clean.truth.malicious == set()
    own = spoilt.truth.given & clean.truth.given
    turned = len(spoilt.truth.bad & own) / len(own)
    assert 0.25 < turned < 0.55
    volume = sum(segment.user_id == "malicious" for segment in after)
    assert volume == PLAN.volume * PLAN.hours


def test_no_filter_finds_what_one_by_one_was_turned_round_at_random() -> None:
    made = Conversations(PLAN, 1, 0.2, "none")
    off = RewardSettings().model_copy(update=OFF)
    assert score(made, off).bad_let_through == 1.0
    assert made.truth.malicious == set()


def test_filters_keep_the_malicious_user_out() -> None:
    report = run(PLAN, RewardSettings())
    on, off = (report.subjects[f"filters_{name}_20%"] for name in ("on", "off"))
    assert off["malicious_weight"][0] > 0.3
    assert on["malicious_weight"][0] < 0.25
    assert on["rank_correlation"][0] > off["rank_correlation"][0] + 0.1
    assert off["bad_let_through"] == [1.0]
    # What is held back is not trained on: among all replies it stands with a reward of 0.
    assert off["rank_correlation_all"][0] < on["rank_correlation_all"][0]
    assert on["rank_correlation_all"][0] < on["rank_correlation"][0]
    assert report.subjects["clean"]["rank_correlation_all"][0] > on["rank_correlation_all"][0]
    assert [goal.at_most for goal in report.goals] == [True, True, True]
    assert run(PLAN, RewardSettings()).subjects == report.subjects


def test_filters_keep_a_flood_of_events_out() -> None:
    plan = NoisePlan(users=60, hours=3)
    off = RewardSettings().model_copy(update=OFF)
    held = score(Conversations(plan, 1, 0.2, "events"), RewardSettings())
    believed = score(Conversations(plan, 1, 0.2, "events"), off)
    assert held.malicious_weight < 0.35 < 0.6 < believed.malicious_weight
    assert held.bad_let_through < 0.25 < believed.bad_let_through == 1.0
    assert held.rank_correlation > believed.rank_correlation + 0.1


def test_other_levels_have_no_goals() -> None:
    plan = NoisePlan(users=10, hours=1, levels=(0.1,), seeds=(1,))
    assert run(plan, RewardSettings()).goals == []
