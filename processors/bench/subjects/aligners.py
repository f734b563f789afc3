"""The aligners that a rival runs, one per partition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from processors.bench.plain import PlainAligner
from processors.bench.subjects.job import Job
from streams.serde import build_codec
from streams.settings import load_settings

Aligners = Callable[[int], PlainAligner]
"""The aligner of a partition, made when it is asked for first."""


def aligners_of(job: Job) -> Aligners:
    """The aligners of a job's partitions."""
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


__all__ = ["Aligners", "aligners_of"]
