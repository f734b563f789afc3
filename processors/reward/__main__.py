"""Runs a reward worker: ``python -m processors.reward --config FILE``."""

from __future__ import annotations

from processors.reward.agent import STAGE
from processors.reward.app import build_spec
from processors.runtime.process import main_of


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT.

    Returns:
        The exit code: 0 after a clean stop, 1 after a failure, 2 for wrong arguments or
        settings.
    """
    return main_of(STAGE, build_spec, argv)


if __name__ == "__main__":
    raise SystemExit(main())
