"""``clawstream bench learner``: tokens a second and memory of one update, next to TRL's.

Every subject gets the same rollouts, the same base model and an adapter of the same shape on
all layers, and makes the same number of passes over them. Subjects take turns, each
measurement in a process of its own, for its memory is measured as well.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from learner.bench.child import Children, Starter
from learner.bench.rollouts import SPEED_SUBJECTS, SpeedJob, SpeedSubject
from learner.bench.trl_env import starters_of
from learner.model import SMOLLM2, smollm2_folder
from streams.bench.environment import OnStep
from streams.bench.machine import describe_machine
from streams.bench.report import Goal, Metrics, Report, Spread, ratios_to
from streams.bench.turns import measure_in_turn
from streams.errors import BenchError
from streams.settings import Settings

OURS: SpeedSubject = "ours"
SPEED, MEMORY = "tokens_per_s", "peak_mb"
GOALS: Mapping[str, float] = {"trl_ppo": 2.0, "trl_grpo": 1.3, "ceiling": 0.7}
"""What the speed of ``ours`` is to reach, in times of each other subject's, on two processors."""

MEMORY_GOAL = 0.6
"""What the memory of ``ours`` may be at most, in times of ``trl_ppo``'s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedPlan:
    """What is measured.

    Attributes:
        subjects: In the order of their turns.
        repetitions: How often each is measured.
        rollouts: In one update.
        prompt_tokens: Mean length of prompts.
        reply_tokens: Mean length of replies.
        epochs: Passes over them.
        threads: Of torch.
        base: The base model.
    """

    subjects: Sequence[SpeedSubject] = SPEED_SUBJECTS
    repetitions: int = 3
    rollouts: int = 8
    prompt_tokens: int = 128
    reply_tokens: int = 128
    epochs: int = 2
    threads: int = 2
    base: str = SMOLLM2

    def job(self, subject: SpeedSubject, data_dir: Path) -> SpeedJob:
        """What one process measures."""
        return SpeedJob(
            subject=subject,
            base=self.base,
            data_dir=str(data_dir),
            rollouts=self.rollouts,
            prompt_tokens=self.prompt_tokens,
            reply_tokens=self.reply_tokens,
            epochs=self.epochs,
            threads=self.threads,
        )


def run(settings: Settings, plan: SpeedPlan, on_step: OnStep) -> Report:
    """Measure everything.

    Raises:
        BenchError: A subject cannot be run.
        ModelError: There is no base model.
    """
    machine = describe_machine()
    data_dir = settings.data_dir.absolute()
    if plan.base == SMOLLM2:
        on_step("preparing the base model")
        smollm2_folder(data_dir)
    starters = starters_of(plan.subjects, data_dir, on_step)
    with tempfile.TemporaryDirectory() as folder:
        children = Children(Path(folder), plan.threads)
        measures = {
            str(subject): partial(
                _measure, children, starters[subject], plan.job(subject, data_dir)
            )
            for subject in plan.subjects
        }
        measured = measure_in_turn(measures, plan.repetitions, on_step)
    return Report(
        bench="learner",
        machine=machine,
        subjects=measured,
        ratios=_ratios(measured),
        goals=goals_of(measured),
    )


def _measure(children: Children, starter: Starter, job: SpeedJob) -> dict[str, float]:
    results: list[dict[str, Any]] = []
    children.run(starter, "learner.bench.speed_worker", job.subject, job, results.append)
    if len(results) != 1:
        raise BenchError(f"{job.subject} reported {len(results)} measurements instead of one")
    return results[0]


def _ratios(measured: Mapping[str, Metrics]) -> dict[str, Spread]:
    others = [name for name in measured if name != OURS]
    memory = ratios_to(measured, OURS, MEMORY, others)
    return {
        **ratios_to(measured, OURS, SPEED, others),
        **{f"{name} {MEMORY}": ratio for name, ratio in memory.items()},
    }


def goals_of(measured: Mapping[str, Metrics]) -> list[Goal]:
    """The goals that can be judged by what was measured."""
    speed = ratios_to(measured, OURS, SPEED, list(GOALS))
    memory = ratios_to(measured, OURS, MEMORY, ["trl_ppo"])
    return [
        *(
            Goal(name, goal, speed[name].median)
            for other, goal in GOALS.items()
            if (name := f"{OURS}/{other}") in speed
        ),
        *(
            Goal(f"{name} {MEMORY}", MEMORY_GOAL, ratio.median, at_most=True)
            for name, ratio in memory.items()
        ),
    ]


__all__ = ["GOALS", "MEMORY_GOAL", "SpeedPlan", "goals_of", "run"]
