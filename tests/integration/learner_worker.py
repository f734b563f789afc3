"""The learner with a tiny trainer, as a process: ``python -m tests.integration.learner_worker``.

Arguments: the settings file, the topics of scored segments, versions and dead letters, and a file
of labelled examples if there is to be a warm start.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch

from learner.__main__ import stop_on_signals
from learner.examples import read_examples
from learner.loop import Topics, run
from streams.settings import Settings, load_settings
from tests.unit.learner.fakes import FakeTrainer


def _make_trainer(_: Settings) -> FakeTrainer:
    torch.set_num_threads(1)
    return FakeTrainer()


def main(
    config: str, scored: str, versions: str, dead_letters: str, examples: str | None = None
) -> int:
    logging.basicConfig(level=logging.INFO)
    names = Topics(scored=scored, versions=versions, dead_letters=dead_letters)
    run(
        load_settings(Path(config)),
        _make_trainer,
        stopping=stop_on_signals(),
        names=names,
        warm_start=None if examples is None else read_examples(Path(examples)),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
