"""A reward processor over topics under a prefix, as a process that tests can kill."""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path

from processors.reward.agent import RewardTopics
from processors.reward.app import build_spec
from processors.runtime.apart import apart
from processors.runtime.process import run_worker
from streams.metrics import ProcessorMetrics
from streams.settings import load_settings


def topics_of(prefix: str) -> RewardTopics:
    """The reward processor's topics under a prefix."""
    return RewardTopics(
        segments=f"{prefix}.segments",
        scored=f"{prefix}.scored",
        reviews=f"{prefix}.reviews",
        dead_letters=f"{prefix}.dead",
    )


def main(prefix: str, config: str) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    metrics = ProcessorMetrics("reward")
    settings = load_settings(Path(config))
    build = partial(
        build_spec, app_id=prefix, topics=topics_of(prefix), changelog=f"{prefix}.state"
    )
    with apart(build, settings, metrics) as spec:
        return run_worker(spec, settings, metrics)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2]))
