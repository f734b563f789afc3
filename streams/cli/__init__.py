"""``clawstream``: one command for everything.

Commands are imported when they are run, so that ``clawstream --help`` answers at once and never
loads torch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from streams.errors import ClawstreamError
from streams.process import report

# A command's one message is its error. Processes configure logging themselves; without that
# Python would print warnings, such as each broken connection, in between.
logging.getLogger("streams").addHandler(logging.NullHandler())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Its arguments; the process's own if None.

    Returns:
        One of our errors, shown as one message: 2 if it is about settings, else 1.

    Raises:
        SystemExit: Otherwise; with 0 if it is done, 2 if the usage was wrong.
    """
    from streams.cli.root import build_root

    try:
        build_root()(list(sys.argv[1:] if argv is None else argv), "clawstream")
    except ClawstreamError as error:
        return report(error)
    return 0


__all__ = ["main"]
