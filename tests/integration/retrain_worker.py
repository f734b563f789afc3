"""A retrain as a process: ``python -m tests.integration.retrain_worker``.

Arguments: the settings file, the topics of scored segments and versions, and the retrain's name.
It must have been begun.
"""

from __future__ import annotations

import sys
from pathlib import Path

from learner.loop import Topics
from learner.retrain.command import folder_of, go_on
from learner.trainer import make_trainer
from streams.settings import load_settings


def main(config: str, scored: str, versions: str, name: str) -> int:
    settings = load_settings(Path(config))
    names = Topics(scored=scored, versions=versions)
    folder = folder_of(settings, name)
    go_on(settings, folder, names, make_trainer, read=_ignore, updated=_ignore)
    return 0


def _ignore(_done: int, _total: int) -> None:
    """Nobody looks."""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
