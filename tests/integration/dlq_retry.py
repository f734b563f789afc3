"""``dlq retry --all`` on a topic of a test's own, in small transactions, to be killed."""

from __future__ import annotations

import sys

from streams.dlq import acting
from streams.dlq.model import Selector
from streams.serde import build_codec
from streams.settings import KafkaSettings, Settings


def main(bootstrap: str, topic: str) -> int:
    acting.CHUNK_LETTERS = 3
    settings = Settings(kafka=KafkaSettings(bootstrap_servers=bootstrap))
    desk = acting.Desk(settings, build_codec(), topic)
    desk.retry(
        Selector(),
        acting.Author(at_ms=1),
        on_commit=lambda marks: print("committed", len(marks), flush=True),
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
