"""``python -m learner``: the learner as a process of its own, or as several.

``accelerate launch`` (or torchrun) starts the several; only the first of them listens to what
stops the learner, the others end when it says so.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from learner.examples import read_examples
from streams.errors import ClawstreamError
from streams.process import argument_parser, command_line, configure_logging, report
from streams.settings import load_settings

_EXIT_SIGNAL = 128


def main(argv: Sequence[str] | None = None) -> int:
    """Learn until SIGTERM or SIGINT, or for ``learner.max_updates`` updates.

    Returns:
        0 after an orderly end, 2 if the settings cannot be used, 1 for any other error of
        ours; the error is on standard error.
    """
    parser = argument_parser("learn", "Train the policy on scored segments.")
    parser.add_argument(
        "--warm-start",
        type=Path,
        default=None,
        metavar="FILE",
        help="learn from labelled preferences and demonstrations (JSON lines) first, once a file",
    )
    parser.add_argument("--warm-start-only", action="store_true", help="end after the warm start")
    arguments = parser.parse_args(command_line(argv))
    if arguments.warm_start_only and arguments.warm_start is None:
        parser.error("--warm-start-only needs --warm-start FILE")
    configure_logging()
    logging.getLogger("alembic").setLevel(logging.WARNING)
    try:
        settings = load_settings(arguments.config)
        path = arguments.warm_start
        examples = None if path is None else read_examples(path)
        # Torch takes seconds to load: a mistake in the settings or the file shows before.
        from learner.loop import run
        from learner.processes import run_together
        from learner.trainer import make_trainer

        stopping = stop_on_signals()
        run_together(
            settings,
            partial(make_trainer, sharded=_is_sharded()),
            lambda make: run(
                settings,
                make,
                stopping=stopping,
                warm_start=examples,
                warm_start_only=arguments.warm_start_only,
            ),
            launched=int(os.environ.get("WORLD_SIZE", "1")) > 1,
        )
    except ClawstreamError as error:
        return report(error)
    return 0


def _is_sharded() -> bool:
    """Whether ``accelerate launch`` was given a configuration with FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def stop_on_signals() -> threading.Event:
    """An event that the first SIGTERM or SIGINT sets; the second ends the process at once.

    A thread hears of them through a pipe: a handler would run inside the main thread, possibly
    while that holds the event's own lock.
    """
    stopping = threading.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writer)

    def watch() -> None:
        os.read(reader, 1)
        stopping.set()
        os._exit(_EXIT_SIGNAL + os.read(reader, 1)[0])

    threading.Thread(target=watch, name="learner-signals", daemon=True).start()
    return stopping


if __name__ == "__main__":
    sys.exit(main())
