"""``ours``: the aligner's worker as users run it, changelog and transactions and all.

Settings are those of the user. One thing differs where the log is a finished one: its topics
are CreateTime and carry their arrivals, as for a replay, so the worker sends no ticks of its
own; those of the log are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from processors.bench.profile import Profile
from processors.bench.subjects.job import FirstRecord, Job, job_of_command_line
from processors.feedback_align.agent import AlignTopics
from processors.feedback_align.app import build_spec
from processors.runtime.apart import apart
from processors.runtime.process import run_worker
from processors.runtime.records import PartitionProcessor, RawRecord
from processors.runtime.spec import WorkerSpec
from processors.runtime.topics import Cluster
from streams.metrics import ProcessorMetrics
from streams.process import configure_logging
from streams.settings import load_settings


class _Marked:
    """A processor that marks the first batch it is fed."""

    def __init__(self, inner: PartitionProcessor, first: FirstRecord) -> None:
        self._inner = inner
        self._first = first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def feed(self, topic: str, records: Sequence[RawRecord]) -> None:
        self._first()
        self._inner.feed(topic, records)


def replay_spec(spec: WorkerSpec) -> WorkerSpec:
    """A worker's specification for a finished log, its first batch marked."""
    first = FirstRecord()

    def make(partition: int, cluster: Cluster) -> PartitionProcessor:
        return cast(PartitionProcessor, _Marked(spec.make_processor(partition, cluster), first))

    return replace(spec, ticks=False, make_processor=make)


def main(job: Job) -> int:
    """Run the worker until it is killed."""
    configure_logging()
    settings = load_settings(Path(job.config))
    metrics = ProcessorMetrics("feedback_align")
    topics = AlignTopics(
        turns=job.turns,
        feedback=job.feedback,
        segments=job.segments,
        dead_letters=job.dead_letters,
    )
    build = partial(build_spec, app_id=job.name, topics=topics, changelog=job.changelog)
    if job.profile is not None:
        Profile(Path(job.profile)).start()
    with apart(build, settings, metrics) as spec:
        return run_worker(replay_spec(spec) if job.replay else spec, settings, metrics)


if __name__ == "__main__":
    raise SystemExit(main(job_of_command_line()))
