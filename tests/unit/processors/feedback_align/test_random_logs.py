"""What must hold at every point of any log; derived state is checked by computing it anew."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import asdict
from random import Random

import pytest

from processors.feedback_align import attribution, codec, cuts
from processors.feedback_align.bodies import HeldBodies
from processors.feedback_align.codec import decode_partition, encode_partition
from processors.feedback_align.machine import (
    Advance,
    Arrival,
    DropDuplicate,
    Effect,
    EmitSegment,
    Input,
    PartitionState,
    Reject,
    new_state,
    next_due_ms,
    oldest_open,
    restore_state,
    step,
    take_changes,
)
from processors.feedback_align.model import (
    HEAD,
    EntryKey,
    Feedback,
    Life,
    Pending,
    Run,
    Segment,
    Session,
    SessionKey,
    Source,
    Turn,
)
from processors.feedback_align.watermark import Merger, Payload
from streams.contracts import SourceRef
from streams.topics import FEEDBACK, TURNS
from tests.unit.processors.feedback_align.random_logs import TINY, random_log

SEEDS = range(60)


def run(inputs: list[Input]) -> tuple[PartitionState, list[Effect]]:
    return play(new_state(), inputs)


def outputs(effects: list[Effect]) -> list[Effect]:
    """Effects in an order that does not depend on that of sessions."""
    return sorted(effects, key=repr)


@pytest.mark.parametrize("seed", SEEDS)
def test_derived_state_equals_what_a_fresh_computation_gives(seed: int) -> None:
    state = new_state()
    for item in random_log(seed):
        state, _ = step(state, item, TINY)
        for session in state.sessions.values():
            check_session(session)
        dues = [s.due_ms for s in state.sessions.values() if s.due_ms is not None]
        assert next_due_ms(state) == (min(dues) if dues else None)
        assert all(due > state.clock_ms for due in dues)
    assert not state.sessions


def check_session(session: Session) -> None:
    check_runs(session)
    check_feedback(session)
    for segment in (*session.segments, *session.fading):
        assert bool(segment.pending) == (segment.ordinal in session.revisable)
        if segment.pending:
            sums = pending_sums(segment.pending)
            assert not segment.pending.stale
            cuts.recount_pending(segment.pending, TINY)
            assert pending_sums(segment.pending) == sums
        assert segment.turns == sorted(segment.turns, key=lambda turn: turn.key)
        assert all(t.segment is segment and t.life is Life.PUBLISHED for t in segment.turns)
        assert all(f.segment is segment and f.target is not None for f in segment.feedback)


def pending_sums(pending: Pending) -> tuple[int, int, int]:
    return pending.latest_stamp, pending.first_arrival, pending.ready_ms


def check_runs(session: Session) -> None:
    turns = [turn for turn in session.turns if turn.life is Life.OPEN]
    runs: dict[object, list[object]] = {}
    for turn in turns:
        floor = max((b for b in session.boundaries if b < turn.key), default=None)
        runs.setdefault(floor, []).append(turn)
    assert {r.floor: r.turns for r in session.runs} == runs
    for open_run in session.runs:
        fresh = Run(open_run.floor, open_run.turns)
        cuts.refold(fresh, session.unpublished.values(), TINY)
        assert not open_run.stale
        assert asdict(open_run.piece) == asdict(fresh.piece)


def check_feedback(session: Session) -> None:
    for feedback in session.unpublished.values():
        target = attribution.resolve(session, feedback, TINY)
        assert feedback.target is (target.turn if target else None)
        assert feedback.attributed_by == (target.attributed_by if target else None)
        assert (feedback.offset in session.orphans) == (target is None)
        segment = target.turn.segment if target else None
        assert feedback.segment is segment
        assert (feedback.life is Life.PENDING) == (segment is not None)
        if segment is not None:
            assert feedback.offset in segment.pending.feedback


@pytest.mark.parametrize("seed", SEEDS)
def test_every_event_ends_once_and_settled(seed: int) -> None:
    inputs = random_log(seed)
    _, effects = run(inputs)
    # A forgotten session that gets the same first event again gives the same id again.
    latest: dict[tuple[str, int], EmitSegment] = {}
    stamps = {
        (i.topic, i.offset): max(i.arrival_ms, i.record.event_time)
        for i in inputs
        if isinstance(i, Arrival)
    }
    for effect in effects:
        if isinstance(effect, EmitSegment):
            segment = effect.segment
            name = (segment.segment_id, segment.first_closed_at)
            before = latest.get(name)
            assert segment.revision == (before.segment.revision + 1 if before else 0)
            assert before is None or set(before.segment.lineage) < set(segment.lineage)
            assert all(
                stamps[ref.topic, ref.offset] + TINY.settle_ms <= segment.closed_at
                for ref in segment.lineage
            )
            latest[name] = effect
    ends: Counter[tuple[str, int]] = Counter()
    for emitted in latest.values():
        ends.update((ref.topic, ref.offset) for ref in emitted.segment.lineage)
    for effect in effects:
        if isinstance(effect, Reject):
            ends[effect.arrival.topic, effect.arrival.offset] += 1
        elif isinstance(effect, DropDuplicate):
            ends[effect.topic, effect.offset] += 1
    assert ends == Counter(dict.fromkeys(stamps, 1))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_restart_after_every_input_changes_nothing(seed: int) -> None:
    inputs = random_log(seed)
    _, expected = run(inputs)
    kept: dict[EntryKey, bytes] = {}
    clock = new_state().clock_ms
    effects: list[Effect] = []
    bodies = HeldBodies()
    for item in inputs:
        state = restore_state(new_state(bodies=bodies), kept.items(), clock)
        state, more = step(state, item, TINY)
        effects.extend(more)
        keep(state, kept)
        clock = state.clock_ms
        assert {key[:2] for key in kept} == state.sessions.keys() | state.packed.keys()
    assert outputs(effects) == outputs(expected)
    assert not kept


@pytest.mark.parametrize("seed", SEEDS)
def test_records_read_again_change_nothing(seed: int) -> None:
    """Some sessions were kept after a batch of which the partition's positions know nothing.

    What the batch forgot is still there: a session's record is removed after its positions
    were kept.
    """
    inputs = random_log(seed, sessions=3)
    half = len(inputs) // 2
    batch, rest = inputs[half : half + 10], inputs[half + 10 :]
    before, _ = run(inputs[:half])
    bodies, clock = before.bodies, before.clock_ms
    kept: dict[EntryKey, bytes] = {}
    keep(before, kept)
    old = by_session(kept)
    after, expected = play(before, batch)
    keep(after, kept)
    rng = Random(seed)
    new = {name: own for name, own in by_session(kept).items() if rng.random() < 0.7}
    entries = [item for own in (old | new).values() for item in own.items()]
    state, again = play(restore_state(new_state(bodies=bodies), entries, clock), batch)
    assert [effect for effect in again if effect not in expected] == []
    assert outputs(play(state, rest)[1]) == outputs(play(after, rest)[1])


@pytest.mark.parametrize("seed", SEEDS)
def test_live_with_crashes_gives_what_a_replay_gives(seed: int) -> None:
    """The topics are read in any interleaving, and the worker dies now and then."""
    records = [item for item in random_log(seed) if isinstance(item, Arrival)]
    last = records[-1].arrival_ms + 5_000
    worker = Worker(topics_of(records, last + 1), Random(seed))
    for _ in range(4):
        worker.run_until_it_crashes()
    worker.run()
    expected = play(new_state(), [*records, Advance(last)])[1]
    assert worker.effects == set(map(repr, expected))


def topics_of(records: list[Arrival], end: int) -> dict[str, list[tuple[int, Payload]]]:
    """(timestamp, value) by offset, which count from 1 in these logs; a tick at either end."""
    own = {topic: [r for r in records if r.topic == topic] for topic in (TURNS, FEEDBACK)}
    return {
        topic: [(0, None), *((r.arrival_ms, r.record) for r in items), (end, None)]
        for topic, items in own.items()
    }


class Worker:
    """Reads topics in random portions; what it kept last is all that outlives a crash."""

    def __init__(self, topics: dict[str, list[tuple[int, Payload]]], rng: Random) -> None:
        self.topics = topics
        self.rng = rng
        self.effects: set[str] = set()
        self.kept: dict[EntryKey, bytes] = {}
        self.bodies = HeldBodies()
        self.partition = encode_partition(new_state().clock_ms, {})

    def run_until_it_crashes(self) -> None:
        self._start()
        while self._read():
            self._drain(self.rng.choice((None, 5)))
            if self.rng.random() < 0.2:
                return
            self._keep()

    def run(self) -> None:
        self._start()
        while self._read():
            self._drain(5)
            self._keep()
        self._drain(None)

    def _start(self) -> None:
        clock, positions = decode_partition(self.partition)
        self.merger = Merger(0, positions)
        self.state = restore_state(new_state(bodies=self.bodies), self.kept.items(), clock)
        self.next = {topic: at.offset + 1 for topic, at in self.merger.positions().items()}

    def _read(self) -> bool:
        topic = self.rng.choice([t for t in self.topics if self._left(t)] or [TURNS])
        portion = range(self.next[topic], self.next[topic] + min(8, self._left(topic)))
        for offset in portion:
            self.merger.offer(topic, offset, *self.topics[topic][offset])
        self.next[topic] = portion.stop
        return len(portion) > 0

    def _left(self, topic: str) -> int:
        return len(self.topics[topic]) - self.next[topic]

    def _drain(self, limit: int | None) -> None:
        self.state, effects = play(self.state, self.merger.drain(limit))
        self.effects |= set(map(repr, effects))

    def _keep(self) -> None:
        keep(self.state, self.kept)
        self.partition = encode_partition(self.state.clock_ms, self.merger.positions())


def keep(state: PartitionState, kept: dict[EntryKey, bytes]) -> None:
    for key, data in take_changes(state).items():
        if data is None:
            kept.pop(key, None)
        else:
            kept[key] = data


def by_session(kept: dict[EntryKey, bytes]) -> dict[SessionKey, dict[EntryKey, bytes]]:
    found: dict[SessionKey, dict[EntryKey, bytes]] = {}
    for key, data in kept.items():
        found.setdefault(key[:2], {})[key] = data
    return found


def play(state: PartitionState, inputs: list[Input]) -> tuple[PartitionState, list[Effect]]:
    effects: list[Effect] = []
    for item in inputs:
        state, more = step(state, item, TINY)
        effects.extend(more)
    return state, effects


@pytest.mark.parametrize("seed", SEEDS)
def test_encoding_is_stable(seed: int) -> None:
    state = new_state(hot_sessions=0)
    for item in random_log(seed):
        state, _ = step(state, item, TINY)
        take_changes(state)
        for packed in state.packed.values():
            session = codec.unpack(packed, Source())
            session.due_ms = packed.due_ms
            assert codec.encode_head(session) == packed.head
            session.touched = set(packed.entries)
            assert codec.encode_touched(session) == packed.entries


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_said_of_the_state_is_what_was_written(seed: int) -> None:
    rng = Random(seed)
    state, kept = new_state(hot_sessions=rng.choice((0, 1, 9))), dict[EntryKey, bytes]()
    for item in random_log(seed, sessions=3):
        state, _ = step(state, item, TINY)
        if rng.random() < 0.5:
            continue
        keep(state, kept)
        assert (state.entries, state.entry_bytes) == (len(kept), sum(map(len, kept.values())))
        heads = {key[:2]: codec.pack(head, {}) for key, head in kept.items() if key[2] == HEAD}
        since = {name: head.open_since_ms for name, head in heads.items()}
        opened = sorted((ms, name) for name, ms in since.items() if ms is not None)
        assert state.open_sessions == len(opened)
        assert oldest_open(state) == (opened[0] if opened else None)
        again = restore_state(new_state(), kept.items(), state.clock_ms)
        assert (again.entries, again.entry_bytes) == (state.entries, state.entry_bytes)
        assert (again.open_sessions, oldest_open(again)) == (len(opened), oldest_open(state))


def test_what_is_packed_or_forgotten_leaves_no_circles() -> None:
    """A worker searches for circles seldom: what it lets go must go by itself."""
    gc.collect()
    gc.disable()
    try:
        for seed in SEEDS:
            state = new_state(hot_sessions=0)
            for item in random_log(seed, sessions=3):
                state, _ = step(state, item, TINY)
                take_changes(state)
            del state, item
        kinds = (Session, Segment, Turn, Feedback, Run)
        left = [found for found in gc.get_objects() if type(found) in kinds]
    finally:
        gc.enable()
    assert left == []


@pytest.mark.parametrize("seed", SEEDS)
def test_open_since_is_the_earliest_arrival_of_what_is_open(seed: int) -> None:
    state = new_state()
    for item in random_log(seed):
        state, _ = step(state, item, TINY)
        take_changes(state)
        assert all(s.open_since_ms == s.earliest_open() for s in state.sessions.values())
        assert all(s.open_since_ms is None for s in state.packed.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_batches_and_neighbours_change_nothing(seed: int) -> None:
    inputs = random_log(seed, sessions=3)
    _, together = run(inputs)
    records = [item for item in inputs if isinstance(item, Arrival)]
    end = inputs[-1]
    assert isinstance(end, Advance)
    alone: list[Effect] = []
    for name in {item.record.session_id for item in records}:
        own: list[Input] = [item for item in records if item.record.session_id == name]
        alone.extend(run([*own, end])[1])
    assert outputs(alone) == outputs(together)


def test_the_logs_reach_everything() -> None:
    """Guards the generator: a log without these would prove little."""
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        for effect in run(random_log(seed))[1]:
            if isinstance(effect, EmitSegment):
                segment = effect.segment
                seen[segment.closed_by.value] += 1
                seen["revision"] += segment.revision > 0
                seen["off_branch"] += bool(segment.off_branch)
                seen["carried"] += any(m.carried for s in segment.steps for m in s.context)
                seen["alternatives"] += any(s.alternatives for s in segment.steps)
                seen["next"] += any(s.next_user_turn for s in segment.steps)
            elif isinstance(effect, Reject):
                seen[effect.reason.value] += 1
            else:
                seen[type(effect).__name__] += 1
    closings = ("end", "gap", "size", "duration", "revision")
    shapes = ("off_branch", "carried", "alternatives", "next")
    reasons = (
        "future_timestamp",
        "conflicting_duplicate",
        "beyond_horizon",
        "unmatched_feedback",
        "invalid",
    )
    others = ("DropDuplicate", "HeldBack", "SessionForgotten")
    expected = (*closings, *shapes, *reasons, *others)
    assert {name: seen[name] for name in expected if seen[name] < 5} == {}


def test_lineage_is_sorted() -> None:
    for effect in run(random_log(1))[1]:
        if isinstance(effect, EmitSegment):
            lineage = effect.segment.lineage
            assert list(lineage) == sorted(lineage)
            assert all(isinstance(ref, SourceRef) for ref in lineage)
