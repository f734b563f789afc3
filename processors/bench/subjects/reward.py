"""The reward worker as users run it, over topics of a bench."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from processors.bench.subjects.ours import replay_spec
from processors.reward.agent import RewardTopics
from processors.reward.app import build_spec
from processors.runtime.apart import apart
from processors.runtime.process import run_worker
from streams.metrics import ProcessorMetrics
from streams.process import configure_logging
from streams.settings import load_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardJob:
    """One worker to run.

    Attributes:
        name: Its group and transactional ids.
        config: The settings file.
        segments: Where segments are read.
        scored: Where scored ones go.
        reviews: Where review requests go.
        dead_letters: Where dead letters go.
        changelog: Its state.
    """

    name: str
    config: str
    segments: str
    scored: str
    reviews: str
    dead_letters: str
    changelog: str


def main(arguments: Sequence[str]) -> int:
    """Run the worker until it is killed; its first batch is marked."""
    configure_logging()
    job = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=RewardJob)
    settings = load_settings(Path(job.config))
    metrics = ProcessorMetrics("reward")
    topics = RewardTopics(
        segments=job.segments,
        scored=job.scored,
        reviews=job.reviews,
        dead_letters=job.dead_letters,
    )
    build = partial(build_spec, app_id=job.name, topics=topics, changelog=job.changelog)
    with apart(build, settings, metrics) as spec:
        return run_worker(replay_spec(spec), settings, metrics)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
