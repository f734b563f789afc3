"""Where a live output stands to what a replay read."""

from __future__ import annotations

import pytest

from processors.replay.compare import Head
from processors.replay.report import _where
from processors.replay.shadow import Job
from streams.contracts import SourceRef
from streams.kafka.places import Range
from streams.serde import build_codec
from tests.unit.processors.reward.builders import segment

CODEC = build_codec()


@pytest.mark.parametrize(
    ("offsets", "closed_at", "stands"),
    [
        ((5, 6), 100, "read"),
        ((5, 6), 101, "after"),
        ((5, 9), 100, "after"),
        ((4, 6), 100, "before"),
        # Somebody else wrote it.
        ((), 100, "after"),
    ],
)
def test_an_output_is_of_what_was_read_or_stands_before_or_after_it(
    offsets: tuple[int, ...], closed_at: int, stands: str
) -> None:
    job = Job(stage="align", ranges=(Range("turns", 0, 5, 9),), read_from_ms=0, compare_from_ms=0)
    lineage = tuple(SourceRef(topic="turns", partition=0, offset=offset) for offset in offsets)
    value = CODEC.encode(segment(lineage=lineage))
    where = _where(job, {0: 100}, CODEC)
    assert where(Head("s1", 0, "default/s", 0, closed_at), value) == stands
