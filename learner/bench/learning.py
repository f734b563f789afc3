"""``clawstream bench learning``: does the policy become what its users like?

Every subject starts from the same base model and is asked the same questions with the same
draws. Each (subject, seed) is a process of its own with one torch thread, as many at a time as
there are processors: two threads in one process gain less.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import IO

from learner.bench.figures import Runs, goals_of, metrics_of, noise_of_rise
from learner.bench.preset import FIRST_LAYER, RIVALS, SUBJECTS, Job, Round, Subject
from learner.model import SMOLLM2, smollm2_folder
from streams.bench.machine import describe_machine
from streams.bench.report import Report
from streams.errors import LearnerError
from streams.settings import ENV_PREFIX, Settings

OnStep = Callable[[str], None]

SEEDS, UPDATES = 3, 9
QUICK_SEEDS, QUICK_UPDATES = 1, 6

_TAIL_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningPlan:
    """What is run.

    Attributes:
        subjects: In the order of the report.
        seeds: How many, counted from 1.
        updates: Of each subject.
        replies: Before each update.
        base: The base model.
        first_layer: The first that has an adapter.
        processes: How many at a time; one per processor if None.
    """

    subjects: Sequence[Subject] = SUBJECTS
    seeds: int = SEEDS
    updates: int = UPDATES
    replies: int = 32
    base: str = SMOLLM2
    first_layer: int = FIRST_LAYER
    processes: int | None = None

    @property
    def noise(self) -> float:
        """See `noise_of_rise`."""
        return noise_of_rise(self.updates, self.replies, self.seeds)


def run(settings: Settings, plan: LearningPlan, on_step: OnStep) -> Report:
    """Run all of it.

    Raises:
        LearnerError: A run failed; what else runs is ended.
        ModelError: There is no base model.
    """
    machine = describe_machine()
    data_dir = settings.data_dir.absolute()
    if plan.base == SMOLLM2:
        on_step("preparing the base model")
        smollm2_folder(data_dir)
    pythons = _environments(plan, data_dir, on_step)
    runs = _play(_jobs(plan, data_dir), pythons, plan, on_step)
    subjects = {str(name): metrics_of(runs[name]) for name in plan.subjects}
    return Report(
        bench="learning",
        machine=machine,
        subjects=subjects,
        goals=goals_of(subjects, plan.noise),
    )


def _jobs(plan: LearningPlan, data_dir: Path) -> list[Job]:
    """All jobs, the longest first: then none is left running alone for long."""
    subjects = sorted(plan.subjects, key=lambda name: (name not in RIVALS, name == "frozen"))
    return [
        Job(
            subject=subject,
            seed=seed,
            updates=plan.updates,
            replies=plan.replies,
            base=plan.base,
            data_dir=str(data_dir),
            first_layer=plan.first_layer,
        )
        for subject in subjects
        for seed in range(1, plan.seeds + 1)
    ]


def _environments(
    plan: LearningPlan, data_dir: Path, on_step: OnStep
) -> Mapping[Subject, Sequence[str]]:
    """How Python is started for each subject."""
    del data_dir, on_step
    return {subject: [sys.executable] for subject in plan.subjects}


def _play(
    jobs: Sequence[Job],
    pythons: Mapping[Subject, Sequence[str]],
    plan: LearningPlan,
    on_step: OnStep,
) -> Runs:
    runs: dict[Subject, dict[int, list[Round]]] = {name: {} for name in plan.subjects}
    processes = _Processes()
    count = plan.processes or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(count) as pool:
        try:
            started = {
                pool.submit(processes.run, job, pythons[job.subject], Path(folder), on_step): job
                for job in jobs
            }
            for future in as_completed(started):
                job = started[future]
                runs[job.subject][job.seed] = future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            processes.end()
            raise
    return runs


class _Processes:
    """The jobs' processes, so that all can be ended."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = Lock()
        self._ended = False

    def run(self, job: Job, python: Sequence[str], folder: Path, on_step: OnStep) -> list[Round]:
        """Run one job to its end.

        Raises:
            LearnerError: It failed; shows the end of its log.
        """
        name = f"{job.subject}-{job.seed}"
        file, log = folder / f"{name}.json", folder / f"{name}.log"
        file.write_text(json.dumps(asdict(job)), encoding="utf-8")
        rounds: list[Round] = []
        with log.open("w", encoding="utf-8") as errors:
            process = self._start([*python, "-m", "learner.bench.worker", str(file)], errors)
            assert process.stdout is not None
            for line in process.stdout:
                rounds.append(Round(**json.loads(line)))
                on_step(_told(job, rounds[-1]))
            status = process.wait()
        with self._lock:
            self._running.discard(process)
        if status or len(rounds) != job.updates:
            tail = "\n".join(log.read_text(encoding="utf-8").splitlines()[-_TAIL_LINES:])
            raise LearnerError(
                f"{job.subject} with seed {job.seed} ended with status {status} after "
                f"{len(rounds)} of {job.updates} updates; its log ends with:\n{tail}"
            )
        return rounds

    def end(self) -> None:
        """End what runs; nothing new is started."""
        with self._lock:
            self._ended = True
            for process in self._running:
                process.terminate()

    def _start(self, command: Sequence[str], errors: IO[str]) -> subprocess.Popen[str]:
        kept = {name: v for name, v in os.environ.items() if not name.startswith(ENV_PREFIX)}
        with self._lock:
            if self._ended:
                raise LearnerError("the bench was ended")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )
            self._running.add(process)
        return process


def _told(job: Job, played: Round) -> str:
    kl = "" if played.kl is None else f", kl {played.kl:.1f}"
    return (
        f"{job.subject} seed {job.seed} update {played.update + 1}/{job.updates}: "
        f"reward {played.reward:+.2f}{kl} ({played.seconds:.0f} s)"
    )


__all__ = ["LearningPlan", "run"]
