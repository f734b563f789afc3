"""The aligners that a rival runs, one per partition."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

from processors.bench.plain import PlainAligner
from processors.bench.subjects.job import Job
from streams.serde import build_codec
from streams.settings import load_settings

Aligners = Callable[[int], PlainAligner]
"""The aligner of a partition, made when it is asked for first."""


GC_THRESHOLDS = (50_000, 20, 100)
"""Our worker's: Python's own search a state of many small objects all the time."""


def aligners_of(job: Job) -> Aligners:
    """The aligners of a job's partitions; Python collects garbage as it does in our worker."""
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    settings = load_settings(Path(job.config)).align
    codec = build_codec()
    made: dict[int, PlainAligner] = {}

    def aligner(partition: int) -> PlainAligner:
        found = made.get(partition)
        if found is None:
            found = PlainAligner(partition, job.turns, job.feedback, codec, settings)
            made[partition] = found
        return found

    return aligner


__all__ = ["GC_THRESHOLDS", "Aligners", "aligners_of"]
