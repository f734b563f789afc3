"""A shadow replay as ``clawstream replay --execute`` runs it, without the comparison."""

from __future__ import annotations

import gc
import json
import resource
import shutil
import sys
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec

from processors.bench.profile import Profile
from processors.replay.shadow import (
    GC_THRESHOLDS,
    Job,
    Progress,
    prepare,
    replay_partition,
    run,
)
from streams.settings import Settings, load_settings

BEGUN = "begun"
REACHED = "reached"
DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowJob:
    """What is replayed, and how.

    Attributes:
        config: The settings file.
        folder: For files of this measurement alone.
        job: The replay.
        rate_per_s: At most so many records a second.
        again: Whether it begins anew whenever it is through.
        keep: Whether what came of it stays in the folder; not if it begins anew.
        profile: A file for where the time goes; then one partition alone is replayed, once and in
            this process.
    """

    config: str
    folder: str
    job: Job
    rate_per_s: float | None
    again: bool
    keep: bool = False
    profile: str | None = None


def main(job: ShadowJob) -> int:
    """Replay, saying at each step when it was and how many records are done by then."""
    settings = load_settings(Path(job.config))
    if job.profile is not None:
        _profile(job, settings, Path(job.profile))
        return 0
    before = 0
    _say(BEGUN)
    for number in count():
        folder = Path(job.folder) / f"pass-{number}"
        prepare(folder, job.job, settings)
        reached: dict[int, Progress] = {}

        def show(
            progress: Progress, reached: dict[int, Progress] = reached, before: int = before
        ) -> None:
            reached[progress.partition] = progress
            _say(REACHED, records=before + sum(one.records for one in reached.values()))

        run(folder, show, rate_per_s=job.rate_per_s)
        before += sum(one.records for one in reached.values())
        if not job.again:
            outputs = sum(one.outputs for one in reached.values())
            _say(DONE, records=before, outputs=outputs, cpu_s=_cpu_s())
        if not job.keep:
            shutil.rmtree(folder)
        if not job.again:
            return 0
    return 1


def _profile(job: ShadowJob, settings: Settings, path: Path) -> None:
    folder = Path(job.folder) / "profiled"
    prepare(folder, job.job, settings)
    profile = Profile(path)
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    reached: list[Progress] = []
    profile.start()
    try:
        replay_partition(folder, min(item.partition for item in job.job.ranges), reached.append)
    finally:
        profile.stop()
    last = reached[-1]
    _say(DONE, records=last.records, outputs=last.outputs, cpu_s=_cpu_s())
    shutil.rmtree(folder)


def _cpu_s() -> float:
    """What it and its processes, which have ended, used, user and system."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _say(event: str, **facts: object) -> None:
    print(json.dumps({"event": event, "at_ms": time.time_ns() // 1_000_000, **facts}), flush=True)


if __name__ == "__main__":
    raise SystemExit(main(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=ShadowJob)))
