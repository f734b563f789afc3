"""Runs a reward worker: ``python -m processors.reward --config FILE``.

``explain SEGMENT_ID`` prints where the rewards of a segment come from instead; ``shadow NAME``
runs another formula beside the real one, and ``compare NAME`` says how they differ.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from typer.main import get_command

from processors.reward.agent import STAGE
from processors.reward.app import build_spec
from processors.runtime.process import main_of
from streams.errors import ClawstreamError
from streams.process import report

SHADOW = "shadow"
SUBCOMMANDS = {
    "explain": "processors.reward.explain",
    "compare": "processors.reward.compare",
}
"""Commands of the reward besides the worker itself: the module that has each."""


MORE = """\
other commands:
  explain SEGMENT_ID   where the rewards of a segment come from
  shadow NAME          run another formula beside the real one
  compare NAME         how the shadow's rewards differ from the real ones
each of them has --help of its own
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; or run a subcommand.

    Returns:
        The exit code: 0 after a clean stop, 1 after a failure, 2 for wrong settings.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    for name in SUBCOMMANDS:
        if name in given:
            given.remove(name)
            return run_subcommand(name, given)
    if SHADOW in given:
        given.remove(SHADOW)
        from processors.reward import shadow

        return shadow.main(given)
    return main_of("reward", STAGE, build_spec, argv, more=MORE)


def run_subcommand(name: str, arguments: Sequence[str]) -> int:
    """Run one of ``SUBCOMMANDS``; errors of ours are one message on standard error."""
    command = get_command(importlib.import_module(SUBCOMMANDS[name]).app)
    try:
        command.main([*arguments], f"clawstream reward {name}")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except ClawstreamError as error:
        return report(error)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
