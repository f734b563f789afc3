"""The learner over topics of a test's own, as one of the processes of ``accelerate launch``.

Arguments: the settings file, the topics of scored segments, versions and dead letters.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from learner.__main__ import stop_on_signals
from learner.loop import Topics, run
from learner.processes import run_together
from learner.trainer import make_trainer
from streams.settings import load_settings


def main(config: str, scored: str, versions: str, dead_letters: str) -> None:
    logging.basicConfig(level=logging.INFO)
    settings = load_settings(Path(config))
    names = Topics(scored=scored, versions=versions, dead_letters=dead_letters)
    stopping = stop_on_signals()
    run_together(
        settings,
        make_trainer,
        lambda make: run(settings, make, stopping=stopping, names=names),
        launched=int(os.environ["WORLD_SIZE"]) > 1,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
