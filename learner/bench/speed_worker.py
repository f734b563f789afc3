"""``python -m learner.bench.speed_worker JOB.json``: one measurement of the speed bench.

Makes one small update to warm up, then the measured one, and writes what it took to standard
output as a line of JSON.
"""

from __future__ import annotations

import gc
import importlib
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from learner.bench.rollouts import SpeedJob, SpeedRollout, rollouts_of

Prepared = Callable[[Sequence[SpeedRollout]], Callable[[], object]]
"""Makes an update on rollouts ready: what is called then is measured."""


def main(argv: list[str]) -> int:
    """Measure what the file that is the only argument says."""
    job = SpeedJob(**json.loads(Path(argv[0]).read_text(encoding="utf-8")))
    sys.stdout.write(json.dumps(measure(job)) + "\n")
    return 0


def measure(job: SpeedJob) -> dict[str, float]:
    """``tokens_per_s`` of one update, prompts included, and ``peak_mb`` of the whole process
    (of the device where there is one); ``cpu_s`` says how busy the processors were with it."""
    vocabulary, prepared = _subject(job)
    rollouts = rollouts_of(job, vocabulary)
    prepared(sorted(rollouts, key=len)[: job.micro_batch])()
    _forget(job)
    update = prepared(rollouts)
    _synchronise(job)
    began_s, cpu_s = time.perf_counter(), time.process_time()
    update()
    _synchronise(job)
    seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    return {
        "tokens_per_s": sum(map(len, rollouts)) / seconds,
        "peak_mb": _peak_mb(job),
        "seconds": seconds,
        "cpu_s": cpu_s,
    }


def _subject(job: SpeedJob) -> tuple[int, Prepared]:
    """Vocabulary and update; a rival's code runs in the rival's environment alone."""
    if job.subject in ("trl_ppo", "trl_grpo"):
        rival = importlib.import_module(f"learner.bench.{job.subject}").SpeedUpdate(job)
        return int(rival.vocabulary), rival.prepared
    from learner.bench.ours import Ceiling, OurUpdate
    from learner.bench.rivals import vocabulary_of

    ours = OurUpdate(job) if job.subject == "ours" else Ceiling(job)
    return vocabulary_of(ours.base), ours.prepared


def _forget(job: SpeedJob) -> None:
    """Let go of what warming up left, so that it is not counted."""
    gc.collect()
    if job.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _synchronise(job: SpeedJob) -> None:
    if job.device == "cuda":
        torch.cuda.synchronize()


def _peak_mb(job: SpeedJob) -> float:
    if job.device == "cuda":
        return torch.cuda.max_memory_reserved() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
