"""``clawstream``: one command for everything.

Commands are imported when they are run, so that ``clawstream --help`` answers at once and never
loads torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from streams.errors import ClawstreamError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Its arguments; the process's own if None.

    Returns:
        1: one of our errors, shown as one message.

    Raises:
        SystemExit: Otherwise; with 0 if it is done, 2 if the usage was wrong.
    """
    from streams.cli.root import build_root

    try:
        build_root()(list(sys.argv[1:] if argv is None else argv), "clawstream")
    except ClawstreamError as error:
        sys.stderr.write(f"error: {error}\n")
    return 1


__all__ = ["main"]
