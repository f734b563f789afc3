"""The environment of its own that Quix Streams needs: it does not run with our Kafka client.

``quix.lock`` beside this file holds Quix Streams with what it needs, and the little that the
aligner's pure parts need.
"""

from __future__ import annotations

from pathlib import Path

import processors
import streams
from streams.bench.environment import Environment

LOCK = Path(__file__).with_name("quix.lock")
_INSTALL_S = 600


def quix_environment(folder: Path) -> Environment:
    """The environment in a bench's folder."""
    return Environment(
        what="Quix Streams",
        folder=folder / "quix",
        lock=LOCK,
        packages=(processors, streams),
        without="leave out the quix subjects with --subjects",
        install_s=_INSTALL_S,
    )


__all__ = ["LOCK", "quix_environment"]
