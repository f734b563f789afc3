"""An aligner over topics under a prefix, as a process that tests can kill.

With a third argument it reads the inputs under that prefix, under an application id of its own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from processors.feedback_align.agent import AlignTopics
from processors.feedback_align.app import build_spec
from processors.runtime.apart import apart
from processors.runtime.process import run_worker
from streams.metrics import ProcessorMetrics
from streams.settings import load_settings


def topics_of(prefix: str, inputs: str | None = None) -> AlignTopics:
    """The aligner's topics under a prefix, its inputs perhaps under another."""
    return AlignTopics(
        turns=f"{inputs or prefix}.turns",
        feedback=f"{inputs or prefix}.feedback",
        segments=f"{prefix}.segments",
        dead_letters=f"{prefix}.dead",
    )


def configs_of(
    prefix: str, partitions: int, output: Mapping[str, str] | None = None
) -> dict[str, tuple[int, Mapping[str, str]]]:
    """What to create for an aligner under a prefix (``conftest.CreateTopics``).

    Args:
        prefix: Of all names.
        partitions: Of every topic.
        output: Configuration of segments and dead letters; the inputs take it, too.
    """
    outputs = dict(output or {})
    inputs = {"message.timestamp.type": "LogAppendTime"} | outputs
    names = topics_of(prefix)
    return {
        names.turns: (partitions, inputs),
        names.feedback: (partitions, inputs),
        names.segments: (partitions, outputs),
        names.dead_letters: (partitions, outputs),
        f"{prefix}.state": (partitions, {"cleanup.policy": "compact"}),
    }


def main(prefix: str, config: str, inputs: str | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    metrics = ProcessorMetrics("feedback_align")
    settings = load_settings(Path(config))
    build = partial(
        build_spec,
        app_id=prefix,
        topics=topics_of(prefix, inputs),
        changelog=f"{prefix}.state",
    )
    with apart(build, settings, metrics) as spec:
        return run_worker(spec, settings, metrics)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
