from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from processors.feedback_align import bodies as module
from processors.feedback_align.bodies import CachedBodies
from processors.feedback_align.codec import content_of
from processors.feedback_align.machine import (
    Advance,
    Arrival,
    content_due,
    new_state,
    restore_state,
    step,
)
from processors.feedback_align.machine import take_changes as changes_of
from processors.feedback_align.model import EntryKey, PartitionState, Source
from streams.contracts import (
    DialogueTurn,
    FeedbackEvent,
    ToolCall,
    TrajectorySegment,
    TurnType,
)
from streams.errors import StateError
from streams.topics import FEEDBACK, TURNS
from tests.unit.processors.feedback_align.logs import (
    HOUR,
    MINUTE,
    SETTINGS,
    START,
    make_feedback,
    make_turn,
    segments,
)


class AgingLog:
    """Turns and feedback in topics that forget; nothing of it is in memory."""

    def __init__(self, ahead: int = 0) -> None:
        self.reads: list[list[int]] = []
        self.ahead = ahead
        self.turns: dict[int, DialogueTurn] = {}
        self.notes: dict[int, FeedbackEvent] = {}
        self.gone: set[int] = set()
        self.body_bytes = 1
        self.kept: dict[EntryKey, bytes] = {}
        self.state = self._new_state()

    def restart(self, clock_ms: int) -> None:
        for key, value in changes_of(self.state).items():
            if value is None:
                self.kept.pop(key, None)
            else:
                self.kept[key] = value
        self.state = restore_state(self._new_state(), self.kept.items(), clock_ms)

    def turn(self, name: str, at_ms: int, **fields: Any) -> None:
        record, offset = make_turn(name, at_ms, **fields), len(self.turns)
        self.turns[offset] = record
        self.state, _ = step(self.state, Arrival(TURNS, 0, offset, at_ms, record), SETTINGS)

    def thumb(self, name: str, at_ms: int, turn_id: str, **fields: Any) -> None:
        record, offset = make_feedback(name, at_ms, turn_id=turn_id, **fields), len(self.notes)
        self.notes[offset] = record
        self.state, _ = step(self.state, Arrival(FEEDBACK, 0, offset, at_ms, record), SETTINGS)

    def until(self, at_ms: int) -> list[TrajectorySegment]:
        self.state, effects = step(self.state, Advance(at_ms), SETTINGS)
        return segments(effects)

    def age_out(self, *offsets: int) -> None:
        self.gone = set(offsets)

    def _new_state(self) -> PartitionState:
        bodies = CachedBodies(
            (TURNS, FEEDBACK),
            self._read_turns,
            self._read_notes,
            self.body_bytes,
            lambda: content_due(self.state, self.ahead),
        )
        return new_state(Source(), bodies)

    def _read_turns(self, offsets: Sequence[int]) -> Iterator[tuple[int, DialogueTurn]]:
        self.reads.append(list(offsets))
        return ((o, self.turns[o]) for o in offsets if o not in self.gone)

    def _read_notes(self, offsets: Sequence[int]) -> Iterator[tuple[int, FeedbackEvent]]:
        self.reads.append(list(offsets))
        return ((o, self.notes[o]) for o in offsets)


def context(segment: TrajectorySegment) -> list[str]:
    return [item.turn_id for item in segment.steps[0].context]


def talk(log: AgingLog, number: int, at_ms: int) -> TrajectorySegment:
    log.turn(f"u{number}", at_ms)
    log.turn(f"a{number}", at_ms + 1_000)
    (segment,) = log.until(at_ms + 10 * MINUTE)
    return segment


def test_carried_content_that_is_gone_from_the_log_is_left_out() -> None:
    """A session that goes on for months carries its first message longer than any topic does."""
    log = AgingLog()
    log.turn("s0", START)
    assert context(talk(log, 1, START + 1)) == ["s0", "u1"]
    assert context(talk(log, 2, START + 20 * HOUR)) == ["s0", "u1", "a1", "u2"]
    log.age_out(0, 1)
    log.restart(START + 39 * HOUR)
    assert context(talk(log, 3, START + 40 * HOUR)) == ["a1", "u2", "a2", "u3"]
    log.thumb("f", START + 41 * HOUR, "a3")
    (revision,) = log.until(START + 42 * HOUR)
    assert (revision.revision, context(revision)) == (1, ["a1", "u2", "a2", "u3"])
    log.age_out(0, 1, 2, 3)
    log.restart(START + 43 * HOUR)
    log.thumb("g", START + 44 * HOUR, "a3")
    (revision,) = log.until(START + 45 * HOUR)
    assert (revision.revision, context(revision)) == (2, ["a2", "u3"])


def test_content_of_a_segments_own_that_is_gone_is_an_error() -> None:
    log = AgingLog()
    talk(log, 1, START)
    log.age_out(1)
    log.restart(START + HOUR)
    log.thumb("f", START + 2 * HOUR, "a1")
    with pytest.raises(StateError, match="retention"):
        log.until(START + 3 * HOUR)


def read_alone(log: AgingLog, sessions: int) -> list[list[int]]:
    """What is read back at a time while that many sessions of two turns close after a restart."""
    for number in range(sessions):
        name = {"session_id": f"s{number}"}
        log.turn(f"u{number}", START + number, **name)
        log.turn(f"a{number}", START + number, **name)
    log.restart(START + sessions)
    log.reads.clear()
    log.until(START + 10 * MINUTE)
    return log.reads


def test_what_is_due_next_is_read_back_with_what_is_due() -> None:
    log = AgingLog()
    assert read_alone(log, 10) == [[2 * number, 2 * number + 1] for number in range(10)]
    log = AgingLog(ahead=4)
    reads = read_alone(log, 10)
    assert reads == [list(range(10)), list(range(10, 20))]


def test_a_continued_segment_finds_what_it_carries_with_its_own() -> None:
    log = AgingLog(ahead=4)
    log.turn("s0", START, session_id="other")
    for hour in range(3):
        for number in range(3):
            name = {"session_id": f"s{number}"}
            log.turn(f"u{hour}{number}", START + hour * HOUR + number, **name)
            log.turn(f"a{hour}{number}", START + hour * HOUR + number, **name)
        if hour < 2:
            log.until(START + hour * HOUR + 10 * MINUTE)
    log.restart(START + 2 * HOUR + 10)
    log.reads.clear()
    closed = log.until(START + 2 * HOUR + 10 * MINUTE)
    assert [context(segment) for segment in closed] == [
        [f"u0{n}", f"a0{n}", f"u1{n}", f"a1{n}", f"u2{n}"] for n in range(3)
    ]
    assert log.reads == [list(range(1, 19))]


def test_a_revision_finds_its_whole_segment() -> None:
    log = AgingLog(ahead=4)
    for number in range(3):
        log.turn(f"u{number}", START + number, session_id=f"s{number}")
        log.turn(f"a{number}", START + number, session_id=f"s{number}")
    log.until(START + 10 * MINUTE)
    for number in range(3):
        name = {"session_id": f"s{number}"}
        log.thumb(f"f{number}", START + HOUR + number, f"a{number}", **name)
    log.restart(START + HOUR + 10)
    log.reads.clear()
    revised = log.until(START + 2 * HOUR)
    assert [segment.revision for segment in revised] == [1, 1, 1]
    assert log.reads == [list(range(6)), [0, 1, 2]]


def test_hot_sessions_are_looked_ahead_for_as_packed_ones_are() -> None:
    """What does not fit in memory any more, with the sessions still there as objects."""
    log = AgingLog(ahead=4)
    names = [f"s{number}" for number in range(3)]
    for hour in range(2):
        for name in names:
            log.turn(f"u{hour}{name}", START + hour * HOUR, session_id=name)
            log.turn(f"a{hour}{name}", START + hour * HOUR, session_id=name)
            log.thumb(f"f{hour}{name}", START + hour * HOUR, f"a{hour}{name}", session_id=name)
        log.until(START + hour * HOUR + (1 - hour) * 10 * MINUTE)
    for name in names[1:]:
        log.thumb(f"l{name}", START + HOUR + 1, f"a0{name}", session_id=name)
    hot = [log.state.sessions["default", name].content() for name in names]
    assert [sorted(turns) for turns, _ in hot] == [
        [2 * n, 2 * n + 1, 6 + 2 * n, 7 + 2 * n] for n in range(3)
    ]
    log.restart(START + HOUR + 1)
    cold = [content_of(log.state.packed["default", name]) for name in names]
    for warm, cool in zip(hot, cold, strict=True):
        assert [sorted(warm[0]), sorted(warm[1])] == [sorted(cool[0]), sorted(cool[1])]


def test_what_was_read_ahead_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AHEAD_BYTES", 20_000)
    log = AgingLog(ahead=100)
    for number in range(20):
        log.turn(f"u{number}", START + number, session_id=f"s{number}", content="x" * 4_000)
    log.restart(START + 20)
    log.reads.clear()
    assert len(log.until(START + 10 * HOUR)) == 20
    assert 3 <= len(log.reads) <= 10


LARGE: dict[str, dict[str, Any]] = {
    "side turn": {"content": "x" * 50_000, "turn_type": TurnType.SIDE},
    "characters of four bytes": {"content": "\N{GRINNING FACE}" * 12_500},
    "tokens": {"token_ids": tuple(range(1_000, 2_500))},
    "prompt": {"prompt_token_ids": tuple(range(1_000, 2_500))},
    "tools": {"tool_calls": (ToolCall(id="1", name="t", arguments="x" * 50_000),)},
    "attributes": {"attributes": {"a": "x" * 50_000}},
}


@pytest.mark.parametrize("what", LARGE)
def test_content_in_memory_is_bounded_whatever_makes_it_large(what: str) -> None:
    """Each record takes 50 KB or more; there is room for some."""
    log = AgingLog()
    log.body_bytes = 5 * 50_000
    log.restart(START - 1)
    for number in range(20):
        log.turn(f"s{number}", START + number, **LARGE[what])
    bodies = log.state.bodies
    assert isinstance(bodies, CachedBodies)
    before = bodies.fetched
    for offset in reversed(range(20)):
        assert bodies.turn(offset).turn_id == f"s{offset}"
    assert 15 <= bodies.fetched - before < 20
