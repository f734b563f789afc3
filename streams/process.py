"""What every long-running process of ours does at its start."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from streams.errors import ClawstreamError, SettingsError

if TYPE_CHECKING:
    import uvicorn

READY = "ready"
"""The event of the line that a process prints when it is ready."""

WRONG_SETTINGS = 2
"""The exit status of a process that cannot use its settings, as for wrong arguments."""


def argument_parser(
    name: str, description: str, more: str | None = None
) -> argparse.ArgumentParser:
    """A parser that knows ``--config``, and ends its help with ``more`` as it stands."""
    parser = argparse.ArgumentParser(
        prog=f"clawstream {name}",
        description=description,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", "-c", type=Path, default=None, help="settings file (YAML)")
    return parser


def configure_logging(level: int = logging.INFO) -> None:
    """One line a record on standard error, with time, level and origin."""
    logging.basicConfig(
        level=level,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    # Their request lines would drown ours.
    for chatty in ("httpx", "httpx2", "httpcore", "httpcore2", "uvicorn.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def ready_line(**facts: object) -> str:
    """The line of JSON that tells a supervisor that requests are taken."""
    return json.dumps({"event": READY, **facts})


def announce_ready(**facts: object) -> None:
    """Print the :func:`ready_line`."""
    print(ready_line(**facts), flush=True)


def report(error: ClawstreamError) -> int:
    """Show one of our errors as one message, for people.

    Returns:
        The exit status: ``WRONG_SETTINGS`` if the settings cannot be used, else 1.
    """
    print(f"error: {error}", file=sys.stderr)
    return WRONG_SETTINGS if isinstance(error, SettingsError) else 1


def command_line(argv: Sequence[str] | None) -> list[str]:
    """``argv``, or the process's own arguments if it is None."""
    return list(sys.argv[1:] if argv is None else argv)


def stop_at_signals(server: uvicorn.Server) -> None:
    """Let SIGTERM and SIGINT end a server through the process's own clean-up, from now on.

    To be called before anything says that the process is ready: whoever reads that may stop it.
    uvicorn hears signals only while it runs, and raises them again after that: with the default
    handlers the first would end the process at once, the second before anything is closed.
    """

    def stop(_number: int, _frame: object) -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
