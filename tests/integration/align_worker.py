"""An aligner over topics under a prefix, as a process that tests can kill.

With a third argument it reads the inputs under that prefix, under an application id of its own.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from processors.feedback_align.agent import AlignTopics
from processors.feedback_align.app import build_spec
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


def main(prefix: str, config: str, inputs: str | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    metrics = ProcessorMetrics("feedback_align")
    settings = load_settings(Path(config))
    spec = build_spec(
        settings,
        metrics,
        app_id=prefix,
        topics=topics_of(prefix, inputs),
        changelog=f"{prefix}.state",
    )
    return run_worker(spec, settings, metrics)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
