from __future__ import annotations

from collections import Counter

import pytest

from processors.bench.dialogue import DialoguePlan
from processors.bench.log import LogRecord, Side, make_log
from processors.bench.plain import (
    PlainAligner,
    expected_outputs,
    fingerprint,
    run_in_batches,
)
from streams.contracts import ClosedBy, DialogueTurn, TrajectorySegment
from streams.errors import StateError
from streams.serde import build_codec
from streams.settings import AlignSettings

CODEC = build_codec()
SETTINGS = AlignSettings()
NAMES: dict[Side, str] = {"turns": "t", "feedback": "f"}
LOG = make_log(DialoguePlan(talking=5, begin_ms=1_000_000), 1_000, 2, CODEC, SETTINGS)


def in_batches(size: int) -> list[tuple[bytes, bytes]]:
    aligners = [PlainAligner(p, "t", "f", CODEC, SETTINGS) for p in range(2)]
    outputs: list[tuple[bytes, bytes]] = []
    for number, record in enumerate(LOG):
        aligner = aligners[record.partition]
        aligner.offer(NAMES[record.side], record.offset, record.arrival_ms, record.value)
        if number % size == 0:
            outputs += aligner.drain(advance=True)
    for aligner in aligners:
        outputs += aligner.drain(advance=True)
    return outputs


def test_offsets_count_up_in_each_partition_and_a_tick_ends_it() -> None:
    for side in ("turns", "feedback"):
        for partition in range(2):
            records = [r for r in LOG if r.side == side and r.partition == partition]
            assert [r.offset for r in records] == list(range(len(records)))
            assert [r.value is None for r in records] == [False] * (len(records) - 1) + [True]
            assert records[-1].headers == [("clawstream-tick", b"")]
            assert records[0].headers == []


def test_every_turn_of_the_log_comes_out() -> None:
    held: set[tuple[str, int, int]] = set()
    closed: Counter[str] = Counter()
    for _, value in in_batches(100):
        segment = CODEC.decode(value, TrajectorySegment)
        closed[segment.closed_by] += segment.revision == 0
        held.update((ref.topic, ref.partition, ref.offset) for ref in segment.lineage)
    turns = [r for r in LOG if r.side == "turns" and r.value is not None]
    once = {CODEC.decode(r.value, DialogueTurn).event_id: r for r in reversed(turns)}
    assert {("t", r.partition, r.offset) for r in once.values()} <= held
    assert {ClosedBy.END, ClosedBy.GAP} <= set(closed)


@pytest.mark.parametrize("size", [1, 37, 10_000])
def test_batches_change_nothing(size: int) -> None:
    found = Counter(fingerprint(key, value) for key, value in in_batches(size))
    assert found == expected_outputs(LOG, NAMES, CODEC, SETTINGS)
    assert found.total() > 50


def test_running_in_batches_takes_the_same_log() -> None:
    run_in_batches(LOG, NAMES, CODEC, SETTINGS)


def test_changes_are_told_once() -> None:
    aligner = PlainAligner(0, "t", "f", CODEC, SETTINGS)
    first = next(r for r in LOG if r.side == "turns" and r.partition == 0)
    aligner.offer("f", 0, first.arrival_ms, None)
    aligner.take("t", first.offset, first.arrival_ms, first.value)
    assert [value is not None for _, value in aligner.changes()] == [True]
    assert not list(aligner.changes())


def test_a_log_with_a_bad_record_is_refused() -> None:
    value = next(r.value for r in LOG if r.side == "turns")
    early = LogRecord("turns", 0, 0, 1, b"k", value)
    tick = LogRecord("feedback", 0, 0, 2, b"k", None)
    with pytest.raises(StateError, match="bad record"):
        expected_outputs([early, tick], NAMES, CODEC, SETTINGS)


def test_the_fingerprint_tells_key_and_value() -> None:
    assert fingerprint(b"a", b"b") != fingerprint(b"b", b"b")
    assert fingerprint(b"a", b"b") != fingerprint(b"a", b"c")
