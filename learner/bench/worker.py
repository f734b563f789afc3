"""``python -m learner.bench.worker JOB.json``: one job of the learning bench in a process.

Writes each round to standard output as a line of JSON as soon as it is over.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from learner.bench.preset import RIVALS, Job, Round


def main(argv: list[str]) -> int:
    """Run the job in the file that is the only argument."""
    logging.basicConfig(level=logging.WARNING)
    job = Job(**json.loads(Path(argv[0]).read_text(encoding="utf-8")))
    for played in _rounds_of(job)(job):
        sys.stdout.write(json.dumps(asdict(played)) + "\n")
        sys.stdout.flush()
    return 0


def _rounds_of(job: Job) -> Callable[[Job], Iterator[Round]]:
    """What plays this job; a rival's code runs in the rival's environment alone."""
    if job.subject in RIVALS:
        rival: Callable[[Job], Iterator[Round]]
        rival = importlib.import_module(f"learner.bench.{job.subject}").learning_rounds
        return rival
    from learner.bench.course import Course

    return lambda job: Course(job).rounds()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
