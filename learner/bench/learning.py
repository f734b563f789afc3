"""``clawstream bench learning``: does the policy become what its users like?

Every subject starts from the same base model and is asked the same questions with the same
draws. Each (subject, seed) is a process of its own with one torch thread, as many at a time as
there are processors: two threads in one process gain less.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.bench.child import Children, Starter
from learner.bench.figures import Runs, goals_of, metrics_of
from learner.bench.preset import (
    FIRST_LAYER,
    RIVALS,
    SPARSE_ROUNDS,
    SUBJECTS,
    Job,
    Round,
    Subject,
)
from learner.bench.trl_env import starters_of
from learner.model import SMOLLM2, smollm2_folder
from streams.bench.environment import OnStep
from streams.bench.machine import describe_machine
from streams.bench.report import Report
from streams.errors import BenchError
from streams.settings import Mode, Settings

SEEDS, UPDATES = 3, 8
QUICK_SEEDS, QUICK_UPDATES = 1, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningPlan:
    """What is run.

    Attributes:
        subjects: In the order of the report.
        seeds: How many, counted from 1.
        updates: Of each subject; of ``sparse`` `SPARSE_ROUNDS` times as many.
        replies: Before each update.
        base: The base model.
        mode: Of our learner.
        first_layer: The first that has an adapter.
        processes: How many at a time; one per processor if None.
    """

    subjects: Sequence[Subject] = SUBJECTS
    seeds: int = SEEDS
    updates: int = UPDATES
    replies: int = 24
    base: str = SMOLLM2
    mode: Mode = "ppo"
    first_layer: int = FIRST_LAYER
    processes: int | None = None


def run(settings: Settings, plan: LearningPlan, on_step: OnStep) -> Report:
    """Run all of it.

    Raises:
        BenchError: A run failed; what else runs is ended.
        ModelError: There is no base model.
    """
    machine = describe_machine()
    data_dir = settings.data_dir.absolute()
    if plan.base == SMOLLM2:
        on_step("preparing the base model")
        smollm2_folder(data_dir)
    starters = starters_of(plan.subjects, data_dir, on_step)
    runs = _play(_jobs(plan, data_dir), starters, plan, on_step)
    subjects = {str(name): metrics_of(runs[name]) for name in plan.subjects}
    return Report(
        bench="learning",
        machine=machine,
        subjects=subjects,
        goals=goals_of(subjects, plan.replies),
    )


def _jobs(plan: LearningPlan, data_dir: Path) -> list[Job]:
    """All jobs, the longest first: then none is left running alone for long."""
    order: dict[Subject, int] = {"sparse": 0, "frozen": 3, **dict.fromkeys(RIVALS, 1)}
    subjects = sorted(plan.subjects, key=lambda name: order.get(name, 2))
    return [
        Job(
            subject=subject,
            seed=seed,
            updates=plan.updates * (SPARSE_ROUNDS if subject == "sparse" else 1),
            replies=plan.replies,
            base=plan.base,
            mode=plan.mode,
            data_dir=str(data_dir),
            first_layer=plan.first_layer,
        )
        for subject in subjects
        for seed in range(1, plan.seeds + 1)
    ]


def _play(
    jobs: Sequence[Job],
    starters: Mapping[str, Starter],
    plan: LearningPlan,
    on_step: OnStep,
) -> Runs:
    runs: dict[Subject, dict[int, list[Round]]] = {name: {} for name in plan.subjects}
    for job in jobs:
        runs[job.subject][job.seed] = []
    count = plan.processes or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(count) as pool:
        children = Children(Path(folder), threads=1)

        def play(job: Job) -> None:
            played = runs[job.subject][job.seed]

            def on_round(values: dict[str, Any]) -> None:
                played.append(Round(**values))
                on_step(_told(job, played[-1]))

            starter, name = starters[job.subject], f"{job.subject}-{job.seed}"
            children.run(starter, "learner.bench.worker", name, job, on_round)
            if len(played) != job.updates:
                raise BenchError(f"{name} made {len(played)} of {job.updates} updates")

        try:
            for future in as_completed([pool.submit(play, job) for job in jobs]):
                future.result()
        except BaseException:
            children.end()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return runs


def _told(job: Job, played: Round) -> str:
    kl = "" if played.kl is None else f", kl {played.kl:.1f}"
    return (
        f"{job.subject} seed {job.seed} update {played.update + 1}/{job.updates}: "
        f"reward {played.reward:+.2f}{kl} ({played.seconds:.0f} s)"
    )


__all__ = ["LearningPlan", "run"]
