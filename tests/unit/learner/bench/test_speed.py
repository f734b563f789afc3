from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from learner.bench.ours import OurUpdate, samples_of
from learner.bench.rollouts import FIRST_TOKEN, SpeedJob, rollouts_of
from learner.bench.speed import SpeedPlan, goals_of
from learner.bench.speed_worker import main

JOB = SpeedJob(
    subject="ours", base="tiny-random", data_dir=".", rollouts=6, prompt_tokens=8,
    reply_tokens=6, micro_batch=3, threads=0,
)  # fmt: skip


def test_rollouts_are_the_same_in_every_process_and_of_different_lengths() -> None:
    made = rollouts_of(JOB, 100)
    assert made == rollouts_of(JOB, 100)
    assert made != rollouts_of(replace(JOB, seed=2), 100)
    assert all(4 <= len(one.prompt) <= 12 and 3 <= len(one.reply) <= 9 for one in made)
    assert len({len(one) for one in made}) > 1
    ids = {token for one in made for token in (*one.prompt, *one.reply)}
    assert min(ids) >= FIRST_TOKEN
    assert max(ids) < 100


def test_our_update_trains_on_replies_alone_and_moves_the_policy() -> None:
    rollouts = rollouts_of(JOB, 200)
    update = OurUpdate(JOB)
    before = update.updater.network.adapter_tensors()
    result = update.prepared(rollouts)()
    assert result.metrics["batch/tokens"] == sum(len(one.reply) for one in rollouts)
    assert result.metrics["batch/epochs"] == 2
    after = update.updater.network.adapter_tensors()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_samples_are_the_rollouts() -> None:
    rollout = rollouts_of(JOB, 200)[0]
    (sample,) = samples_of([rollout])
    assert sample.token_ids == (*rollout.prompt, *rollout.reply)
    assert sample.rewards[-1] == rollout.reward


@pytest.mark.parametrize("subject", ["ours", "ceiling"])
def test_a_worker_reports_one_measurement(
    subject: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.json"
    file.write_text(json.dumps({**asdict(JOB), "subject": subject}))
    assert main([str(file)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    tokens = sum(map(len, rollouts_of(JOB, 259)))
    assert found["tokens_per_s"] == pytest.approx(tokens / found["seconds"])
    assert found["peak_mb"] > 50


def test_goals_are_judged_by_what_was_measured() -> None:
    measured = {
        "ours": {"tokens_per_s": [20.0, 30.0], "peak_mb": [50.0, 50.0]},
        "trl_ppo": {"tokens_per_s": [10.0, 10.0], "peak_mb": [100.0, 100.0]},
        "ceiling": {"tokens_per_s": [40.0, 50.0], "peak_mb": [50.0, 50.0]},
    }
    goals = {goal.name: (goal.goal, goal.value, goal.met) for goal in goals_of(measured)}
    assert goals == {
        "ours/trl_ppo": (2.0, 2.5, True),
        "ours/ceiling": (0.7, pytest.approx(0.55), False),
        "ours/trl_ppo peak_mb": (0.6, 0.5, True),
    }


def test_every_subject_gets_the_same_job() -> None:
    plan = SpeedPlan(rollouts=12, epochs=3)
    ours, theirs = plan.job("ours", Path("/d")), plan.job("trl_ppo", Path("/d"))
    assert replace(theirs, subject="ours") == ours
    assert (ours.rollouts, ours.epochs, ours.data_dir) == (12, 3, "/d")
