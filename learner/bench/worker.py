"""``python -m learner.bench.worker JOB.json``: one job of the learning bench in a process.

Writes each round to standard output as a line of JSON as soon as it is over.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TextIO

from learner.bench.preset import RIVALS, Job, Round

Player = Callable[[Job, Callable[[Round], None]], None]
"""Plays a job's rounds and hands out each as soon as it is over."""


def main(argv: list[str]) -> int:
    """Run the job in the file that is the only argument."""
    logging.basicConfig(level=logging.WARNING)
    job = Job(**json.loads(Path(argv[0]).read_text(encoding="utf-8")))
    # Bound now: a rival's trainer gets another standard output, for what it prints itself.
    _player_of(job)(job, partial(_tell, sys.stdout))
    return 0


def _tell(results: TextIO, played: Round) -> None:
    results.write(json.dumps(asdict(played)) + "\n")
    results.flush()


def _player_of(job: Job) -> Player:
    """What plays this job; a rival's code runs in the rival's environment alone."""
    name = job.subject if job.subject in RIVALS else "course"
    player: Player = importlib.import_module(f"learner.bench.{name}").play
    return player


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
