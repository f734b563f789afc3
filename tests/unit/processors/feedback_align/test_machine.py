"""The table of lives, the diagram, the order of inputs, and what is kept."""

from __future__ import annotations

import pytest

from processors.feedback_align.machine import (
    TRANSITIONS,
    Advance,
    Trigger,
    new_state,
    next_due_ms,
    oldest_open,
    render_diagram,
    step,
    take_changes,
)
from processors.feedback_align.model import HEAD, Life
from streams.errors import TransitionError
from tests.unit.processors.feedback_align.logs import (
    MINUTE,
    SECOND,
    SETTINGS,
    START,
    Log,
    at,
    make_turn,
)


def test_every_life_is_reached_and_only_ends_have_no_way_out() -> None:
    reached = {Life.NEW} | set(TRANSITIONS.values())
    left = {life for life, _ in TRANSITIONS}
    assert reached == set(Life)
    assert set(Life) - left == {Life.DEAD, Life.DROPPED, Life.FORGOTTEN}
    assert {trigger for _, trigger in TRANSITIONS} == set(Trigger)


def test_diagram_has_every_transition() -> None:
    diagram = render_diagram()
    assert diagram.startswith("stateDiagram-v2\n    [*] --> new\n")
    for (before, trigger), after in TRANSITIONS.items():
        assert f"    {before} --> {after}: {trigger}\n" in diagram
    assert "    forgotten --> [*]\n" in diagram


def test_an_illegal_transition_names_event_and_life() -> None:
    log = Log()
    log.turn("u1", "0:00")
    log.session.turns[0].life = Life.DEAD
    with pytest.raises(
        TransitionError,
        match=r"event e-u1 \(topic=dialogue.turns partition=0 offset=0\) is dead and cannot close",
    ):
        log.until("1:00:00")


def test_a_record_that_the_clock_has_passed_is_refused() -> None:
    log = Log()
    log.until("1:00")
    with pytest.raises(TransitionError, match="records must be merged"):
        log.turn("u1", "1:00")


def test_the_clock_never_goes_back() -> None:
    state, effects = step(new_state(), Advance(10), SETTINGS)
    assert effects == ()
    state, _ = step(state, Advance(5), SETTINGS)
    assert state.clock_ms == 10


def test_next_due() -> None:
    log = Log()
    assert next_due_ms(log.state) is None
    log.turn("u1", "0:00", session_id="one")
    assert next_due_ms(log.state) == at("30:00")
    log.turn("a1", "0:10", session_id="one")
    assert next_due_ms(log.state) == at("5:10")
    log.turn("a2", "0:20", session_id="two", session_done=True)
    assert next_due_ms(log.state) == at("0:50")
    log.until("0:50")
    assert next_due_ms(log.state) == at("5:10")
    log.feedback("f", "5:00", turn_id="a1", session_id="one")
    assert next_due_ms(log.state) == at("5:30")
    log.until("5:30")
    assert next_due_ms(log.state) == at("24:00:50")


def test_changes_since_the_last_time() -> None:
    log = Log()
    log.turn("u1", "0:00", session_id="one")
    log.turn("u1", "0:00", session_id="two", session_done=True)
    assert written(log) == {("one", HEAD), ("two", HEAD)}
    log.until("0:20")
    assert written(log) == set()
    log.turn("u1", "0:00", "0:21", session_id="one")
    assert written(log) == {("one", HEAD)}
    log.turn("u9", "9:00", "0:22", session_id="three")
    assert written(log) == set()
    log.until("0:30")
    assert written(log) == {("two", HEAD), ("two", 0)}
    log.turn("u2", "0:40", session_id="two")
    assert written(log) == {("two", HEAD)}
    log.until("50:00:00")
    forgotten = {("one", HEAD), ("one", 0), ("two", HEAD), ("two", 0), ("two", 1)}
    assert take_changes(log.state) == {("default", *key): None for key in forgotten}


def written(log: Log) -> set[tuple[str, int]]:
    changes = take_changes(log.state)
    assert None not in changes.values()
    return {(session_id, ordinal) for _, session_id, ordinal in changes}


def test_a_session_that_comes_back_is_changed_not_forgotten() -> None:
    log = Log()
    log.feedback("f", "0:00", turn_id="a1")
    log.until("1:00:00")
    assert take_changes(log.state) == {("default", "s", HEAD): None}
    log.feedback("f", "0:00", "1:00:01", turn_id="a1")
    log.until("2:00:01")
    log.turn("u1", "2:00:02")
    assert written(log) == {("s", HEAD)}


def test_idle_sessions_leave_nothing_behind() -> None:
    log = Log()
    for number in range(50):
        log.turn("u1", "0:00", session_id=f"s{number}")
    take_changes(log.state)
    log.until("72:00:00")
    assert (log.state.sessions, log.state.packed) == ({}, {})
    assert log.state.due == []
    assert len(log.segments) == 50


def test_a_session_that_goes_on_for_weeks_stays_small() -> None:
    log = Log()
    for hour in range(24 * 21):
        log.turn(f"u{hour}", f"{hour}:00:00")
        log.turn(f"a{hour}", f"{hour}:00:10", session_done=True)
        log.feedback(f"f{hour}", f"{hour}:10:00", turn_id=f"a{hour}")
        take_changes(log.state)
    session = log.session
    sizes = {
        len(session.turns) // 2,
        len(session.events) // 3,
        len(session.turn_ids) // 2,
        len(session.entries),
        len(session.segments),
        len(session.boundaries),
        len(session.owners),
    }
    assert max(sizes) <= 26
    assert len(session.ghosts) + len(session.fading) <= 2


def test_the_indexes_hold_about_as_much_as_there_are_sessions() -> None:
    """Each pause puts its end into them, and each record that ends a pause makes that void."""
    log = Log()
    for number in range(1_000):
        time_ms = START + number * MINUTE
        log.put(make_turn(f"u{number}", time_ms, session_done=True), time_ms)
        log.apply(Advance(time_ms + 30 * SECOND))
        take_changes(log.state)
    state = log.state
    assert len(log.segments) == 1_000
    assert (len(state.due) < 150, len(state.opened) < 150) == (True, True)
    (kept,) = state.packed.values()
    assert next_due_ms(state) == kept.due_ms == kept.scheduled_ms
    time_ms = START + 1_000 * MINUTE
    log.put(make_turn("u", time_ms), time_ms)
    take_changes(state)
    assert oldest_open(state) == (time_ms, log.session.key)
    assert next_due_ms(state) == log.session.due_ms
