from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from processors.feedback_align import bodies as module
from processors.feedback_align.bodies import CachedBodies
from processors.feedback_align.machine import Advance, Arrival, new_state, restore_state, step
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

    def __init__(self) -> None:
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

    def thumb(self, name: str, at_ms: int, turn_id: str) -> None:
        record, offset = make_feedback(name, at_ms, turn_id=turn_id), len(self.notes)
        self.notes[offset] = record
        self.state, _ = step(self.state, Arrival(FEEDBACK, 0, offset, at_ms, record), SETTINGS)

    def until(self, at_ms: int) -> list[TrajectorySegment]:
        self.state, effects = step(self.state, Advance(at_ms), SETTINGS)
        return segments(effects)

    def age_out(self, *offsets: int) -> None:
        self.gone = set(offsets)

    def _new_state(self) -> PartitionState:
        bodies = CachedBodies(
            (TURNS, FEEDBACK), self._read_turns, self._read_notes, self.body_bytes
        )
        return new_state(Source(), bodies)

    def _read_turns(self, offsets: Sequence[int]) -> Iterator[tuple[int, DialogueTurn]]:
        return ((o, self.turns[o]) for o in offsets if o not in self.gone)

    def _read_notes(self, offsets: Sequence[int]) -> Iterator[tuple[int, FeedbackEvent]]:
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


@pytest.mark.parametrize(("room", "most"), [(1, 10), (30_000, 30), (1_000_000, 100)])
def test_after_a_restart_no_more_is_read_back_than_fits(
    room: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came last is at hand, in the order in which it came."""
    monkeypatch.setattr(module, "PRELOAD_RECORDS", 10)
    log = AgingLog()
    for number in range(100):
        log.turn(f"u{number}", START + number)
    log.body_bytes = room
    log.restart(START + 99)
    bodies = log.state.bodies
    assert isinstance(bodies, CachedBodies)
    bodies.preload(range(100), ())
    assert bodies.fetched == most
    assert bodies.turn(99).turn_id == "u99"
    assert bodies.fetched == most
    for number in range(100, 110):
        log.turn(f"u{number}", START + number)
    before = bodies.fetched
    assert [bodies.turn(offset).turn_id for offset in (0, 109)] == ["u0", "u109"]
    assert bodies.fetched == before + (room < 1_000_000)


LARGE: dict[str, dict[str, Any]] = {
    "side turn": {"content": "x" * 50_000, "turn_type": TurnType.SIDE},
    "characters of four bytes": {"content": "\N{GRINNING FACE}" * 12_500},
    "tokens": {"token_ids": tuple(range(1_000, 2_500))},
    "prompt": {"prompt_token_ids": tuple(range(1_000, 2_500))},
    "tools": {"tool_calls": (ToolCall(id="1", name="t", arguments="x" * 50_000),)},
    "attributes": {"attributes": {"a": "x" * 50_000}},
}


@pytest.mark.parametrize("what", LARGE)
@pytest.mark.parametrize("again", [False, True])
def test_content_in_memory_is_bounded_whatever_makes_it_large(what: str, again: bool) -> None:
    """Each record takes 50 KB or more; there is room for some, after a restart too."""
    log = AgingLog()
    log.body_bytes = 5 * 50_000
    log.restart(START - 1)
    for number in range(20):
        log.turn(f"s{number}", START + number, **LARGE[what])
    bodies = log.state.bodies
    assert isinstance(bodies, CachedBodies)
    if again:
        log.restart(START + 20)
        bodies = log.state.bodies
        assert isinstance(bodies, CachedBodies)
        bodies.preload(range(20), ())
    before = bodies.fetched
    for offset in reversed(range(20)):
        assert bodies.turn(offset).turn_id == f"s{offset}"
    assert 15 <= bodies.fetched - before < 20
