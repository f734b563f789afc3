"""The aligner against the naive oracle: equal output as bytes, however the log is cut.

The oracle (``tests/oracle``) was written from ALIGNMENT.md alone, without sight of the machine,
and shares nothing with it but the record types.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from processors.feedback_align.bodies import CachedBodies
from processors.feedback_align.codec import decode_partition, encode_partition
from processors.feedback_align.machine import (
    DropDuplicate,
    Effect,
    EmitSegment,
    HeldBack,
    Reject,
    new_state,
    restore_state,
    step,
    take_changes,
)
from processors.feedback_align.model import EntryKey, PartitionState, Source
from processors.feedback_align.watermark import Merger
from streams.contracts import DialogueTurn, FeedbackEvent, TrajectorySegment
from streams.serde import build_codec
from streams.settings import AlignSettings
from tests.oracle.aligner import OracleResult, run_oracle
from tests.oracle.logs import (
    FEEDBACK_TOPIC,
    PARTITION,
    SETTINGS_VARIANTS,
    TURNS_TOPIC,
    Log,
    LogRecord,
    dense_settings,
    logs,
    random_log,
)

CODEC = build_codec()

Coordinates = tuple[str, int, int]


@dataclass
class Seen:
    """What a run put out, duplicates included."""

    segments: Counter[bytes] = field(default_factory=Counter)
    keys: dict[tuple[str, int], str] = field(default_factory=dict)
    dead: Counter[tuple[str, int, int, str]] = field(default_factory=Counter)
    duplicates: Counter[Coordinates] = field(default_factory=Counter)
    held_back: int = 0

    def add(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case EmitSegment(segment, key):
                    self.segments[CODEC.encode(segment)] += 1
                    self.keys[segment.segment_id, segment.revision] = key
                case Reject(arrival, reason, message, _):
                    assert message
                    place = (arrival.topic, arrival.partition, arrival.offset, str(reason))
                    self.dead[place] += 1
                case DropDuplicate(topic, partition, offset):
                    self.duplicates[topic, partition, offset] += 1
                case HeldBack():
                    self.held_back += effect.count
                case _:
                    pass


def expected(oracle: OracleResult) -> Seen:
    seen = Seen(held_back=oracle.held_back, keys=dict(oracle.record_keys))
    seen.segments.update(CODEC.encode(segment) for segment in oracle.segments)
    seen.dead.update((t, p, o, str(reason)) for t, p, o, reason in oracle.dead_letters)
    seen.duplicates.update(oracle.duplicates)
    return seen


def read_order(log: Log, rng: random.Random) -> list[LogRecord]:
    """Both topics, each in its order, interleaved as a consumer may get them."""
    end = log.final_clock_ms + 1
    queues = [
        [r for r in records if _arrives_by(records, r, log.final_clock_ms)]
        + [LogRecord(topic, PARTITION, 10**9, end, None)]
        for topic, records in ((TURNS_TOPIC, log.turns), (FEEDBACK_TOPIC, log.feedback))
    ]
    order: list[LogRecord] = []
    # Now and then a topic has a backlog: all of the other is read before the rest of it.
    largest = rng.choice((6, 6, 6, 1_000))
    while any(queues):
        queue = rng.choice([q for q in queues if q])
        batch = rng.randint(1, largest)
        order.extend(queue[:batch])
        del queue[:batch]
    return order


def _arrives_by(records: Sequence[LogRecord], record: LogRecord, clock_ms: int) -> bool:
    before = (r.timestamp_ms for r in records if r.offset <= record.offset)
    return max(before) <= clock_ms


def fresh_state(log: Log, body_bytes: int, hot_sessions: int) -> PartitionState:
    """A new state whose content can be read back from the log."""
    turns = {r.offset: r.record for r in log.turns if isinstance(r.record, DialogueTurn)}
    notes = {r.offset: r.record for r in log.feedback if isinstance(r.record, FeedbackEvent)}
    bodies = CachedBodies(
        (TURNS_TOPIC, FEEDBACK_TOPIC),
        lambda offsets: ((offset, turns[offset]) for offset in offsets),
        lambda offsets: ((offset, notes[offset]) for offset in offsets),
        body_bytes,
    )
    return new_state(Source(TURNS_TOPIC, FEEDBACK_TOPIC, PARTITION), bodies, hot_sessions)


def run_machine(log: Log, config: AlignSettings, rng: random.Random, *, restart: float) -> Seen:
    """The machine over ``log``, restarted with probability ``restart`` after each batch.

    Restarts go on from bytes, and the records that were offered but not applied come again.
    """
    seen = Seen()
    # From nothing at hand to everything: what is not must be read back.
    limits = (rng.choice((1, 3_000, 1 << 20)), rng.choice((0, 1, 100)))
    state, merger = fresh_state(log, *limits), Merger(PARTITION)
    stored: dict[EntryKey, bytes] = {}
    order = read_order(log, rng)
    at = 0
    while at < len(order):
        batch = rng.randint(1, 5)
        for record in order[at : at + batch]:
            merger.offer(record.topic, record.offset, record.timestamp_ms, record.record)
        at += batch
        for event in merger.drain(rng.choice([None, None, 1, 3])):
            state, effects = step(state, event, config)
            seen.add(effects)
        for key, data in take_changes(state).items():
            if data is None:
                stored.pop(key, None)
            else:
                stored[key] = data
        if rng.random() < restart:
            meta = encode_partition(state.clock_ms, merger.positions())
            clock_ms, positions = decode_partition(meta)
            state = restore_state(fresh_state(log, *limits), stored.items(), clock_ms)
            merger = Merger(PARTITION, positions)
            for record in order[: min(at, len(order))]:
                if record.offset > positions[record.topic].offset:
                    merger.offer(record.topic, record.offset, record.timestamp_ms, record.record)
    while inputs := merger.drain():
        for event in inputs:
            state, effects = step(state, event, config)
            seen.add(effects)
    return seen


def assert_equal(log: Log, config: AlignSettings, rng: random.Random, restart: float) -> None:
    oracle = expected(run_oracle(log.turns, log.feedback, config, log.final_clock_ms))
    machine = run_machine(log, config, rng, restart=restart)
    assert _readable(machine.segments) == _readable(oracle.segments)
    assert machine == oracle


def _readable(segments: Counter[bytes]) -> list[TrajectorySegment]:
    decoded = (CODEC.decode(data, TrajectorySegment) for data in segments.elements())
    return sorted(decoded, key=lambda s: (s.segment_id, s.revision))


@settings(max_examples=200, deadline=None)
@given(log=logs(dense_settings()), rng=st.randoms(use_true_random=False))
def test_the_machine_equals_the_oracle(log: Log, rng: random.Random) -> None:
    assert_equal(log, dense_settings(), rng, restart=0.0)


@settings(max_examples=200, deadline=None)
@given(log=logs(dense_settings()), rng=st.randoms(use_true_random=False))
def test_a_restart_between_any_two_inputs_changes_nothing(log: Log, rng: random.Random) -> None:
    assert_equal(log, dense_settings(), rng, restart=0.5)


@pytest.mark.parametrize("variant", range(len(SETTINGS_VARIANTS)))
def test_many_random_logs_under_settings_at_their_edges(variant: int) -> None:
    config = SETTINGS_VARIANTS[variant]
    for seed in range(150):
        rng = random.Random(f"{variant}-{seed}")
        log = random_log(rng, config, rng.randint(1, 60))
        assert_equal(log, config, rng, restart=0.3)
