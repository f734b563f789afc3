"""Runs a reward worker: ``python -m processors.reward --config FILE``."""

from __future__ import annotations

from collections.abc import Sequence

from processors.reward.agent import STAGE
from processors.reward.app import build_spec
from processors.runtime.process import main_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT.

    Returns:
        The exit code: 0 after a clean stop, 1 after a failure, 2 for wrong settings.
    """
    return main_of("reward", STAGE, build_spec, argv)


if __name__ == "__main__":
    raise SystemExit(main())
