from __future__ import annotations

import math
import random
from statistics import fmean

import pytest

from learner.bench.figures import goals_of, in_words, metrics_of, noise_of_rise, rise
from learner.bench.preset import Round


def rounds(*rewards: float, kl: float | None = 1.0) -> list[Round]:
    return [Round(update=n, reward=r, kl=kl, seconds=2.0) for n, r in enumerate(rewards)]


def test_a_rise_compares_the_last_third_with_the_first() -> None:
    assert rise([0.0, 0.2, 9.0, 9.0, 0.5, 0.9]) == pytest.approx(0.6)
    assert rise([-1.0, 1.0]) == 2.0
    with pytest.raises(ValueError, match="two updates"):
        rise([1.0])


def test_metrics_are_means_over_seeds_and_keep_each_seed() -> None:
    metrics = metrics_of({2: rounds(0.0, 1.0, kl=3.0), 1: rounds(0.5, 0.5, kl=None)})
    assert metrics["reward"] == [0.25, 0.75]
    assert metrics["rise"] == [0.0, 1.0]
    assert metrics["reward_seed_2"] == [0.0, 1.0]
    assert metrics["kl"] == [3.0, 3.0]
    assert metrics["seconds"] == [2.0] * 4


def test_a_kl_that_nobody_measured_is_no_number() -> None:
    assert all(math.isnan(kl) for kl in metrics_of({1: rounds(0.0, 0.0, kl=None)})["kl"])


def test_a_policy_that_does_not_change_stays_within_the_noise() -> None:
    rng = random.Random(5)
    noise = noise_of_rise(updates=9, replies=32, seeds=3)
    beyond = 0
    for _ in range(400):
        rewards = [[fmean(rng.choices([-1, 1], k=32)) for _ in range(9)] for _ in range(3)]
        beyond += fmean(map(rise, rewards)) > noise
    # 2.5 standard errors to one side: 0.6%.
    assert beyond <= 12
    assert noise < 0.25


def test_goals_ask_ours_to_rise_and_controls_not_to() -> None:
    up, flat = metrics_of({1: rounds(-1.0, 1.0)}), metrics_of({1: rounds(0.0, 0.0)})
    goals = goals_of({"clean": up, "flipped20": flat, "frozen": flat, "shuffled": up}, replies=300)
    met = {goal.name: goal.met for goal in goals}
    assert met == {
        "rise of clean": True,
        "rise of flipped20": False,
        "rise of frozen": True,
        "rise of shuffled": False,
    }
    assert goals_of({"trl_ppo": up}, replies=300) == []


def test_chance_is_that_of_a_subject_s_own_updates() -> None:
    short, long = metrics_of({1: rounds(*[0.0] * 8)}), metrics_of({1: rounds(*[0.0] * 24)})
    least = {goal.name: goal.goal for goal in goals_of({"flipped20": short, "sparse": long}, 24)}
    assert least["rise of flipped20"] == noise_of_rise(8, 24, 1)
    assert least["rise of sparse"] == pytest.approx(least["rise of flipped20"] / 2)


def test_words_name_the_spread_and_the_better_rival() -> None:
    clean = metrics_of({1: rounds(-1.0, 0.0), 2: rounds(-1.0, 0.5)})
    better, same = metrics_of({1: rounds(-1.0, 1.0)}), metrics_of({1: rounds(-1.0, 0.3)})
    lines = in_words({"clean": clean, "trl_grpo": better, "trl_ppo": same}, replies=300)
    chance = f"by chance alone up to {noise_of_rise(2, 300, 2):.2f}"
    assert f"clean: rises by +1.25 (seeds +1.00 to +1.50, deviation 0.35); {chance}" in lines
    assert any("trl_grpo is better" in line for line in lines)
    assert any("trl_ppo against" in line and "no telling difference" in line for line in lines)
