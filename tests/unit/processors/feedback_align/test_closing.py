"""ALIGNMENT §1, §6, §7: when pieces close, what stays out, and what comes later."""

from __future__ import annotations

import pytest

from processors.feedback_align.machine import Advance
from streams.contracts import TurnType
from streams.settings import AlignSettings
from tests.unit.processors.feedback_align.logs import SECOND, Log, at, shown, when

SIDE = TurnType.SIDE


def test_unanswered_waits_for_max_open() -> None:
    log = Log()
    log.turn("u1", "0:00")
    log.turn("a1", "0:10")
    log.turn("u2", "1:00")
    log.until("2:00:00")
    # Forced by the first arrival (30:00) before the unanswered turn's own limit (31:00).
    assert [when(s) for s in log.segments] == [(at("30:00"), "duration", 0)]


def test_a_trailing_side_turn_does_not_make_it_unanswered() -> None:
    log = Log()
    log.turn("u1", "0:00")
    log.turn("a1", "0:10")
    log.turn("u2", "1:00", turn_type=SIDE)
    assert [when(s) for s in log.until("2:00:00")] == [(at("6:00"), "gap", 0)]


def test_only_side_turns_close_by_gap() -> None:
    log = Log()
    log.turn("u1", "0:00", turn_type=SIDE)
    (segment,) = log.until("2:00:00")
    assert when(segment) == (at("5:00"), "gap", 0)
    assert segment.steps == ()
    assert len(segment.lineage) == 1


def test_what_is_due_already_happens_at_the_record_that_made_it_due() -> None:
    """A gap turns a piece that waited for an answer into one whose time has passed."""
    log = Log()
    log.turn("u1", "0:00")
    assert log.until("9:59") == []
    log.turn("u2", "10:00")
    assert [when(s) for s in log.until("10:00")] == [(at("10:00"), "gap", 0)]


def test_records_come_before_actions_at_the_same_time() -> None:
    log = Log()
    log.turn("u1", "0:00")
    log.turn("a1", "0:10", session_done=True)
    log.feedback("f", "0:40", turn_id="a1")
    assert [when(s) for s in log.until("2:00")] == [(at("1:10"), "end", 0)]


def test_only_the_first_piece_closes() -> None:
    log = Log()
    log.turn("a1", "0:00")
    log.turn("a2", "10:00", "10:00", turn_type=SIDE, session_done=True)
    log.turn("u3", "10:01", session_done=True)
    assert [when(s)[:2] for s in log.segments] == [(at("5:00"), "gap")]
    log.until("10:29")
    assert len(log.segments) == 1
    log.until("10:31")
    assert [(s.ordinal, when(s)[:2]) for s in log.segments[1:]] == [
        (1, (at("10:30"), "end")),
        (2, (at("10:31"), "end")),
    ]


def test_a_later_piece_waits_for_the_first() -> None:
    """The first piece is held up by feedback; the second is settled, but not first."""
    log = Log()
    log.turn("a1", "0:00", session_done=True)
    log.turn("a2", "0:01", session_done=True)
    for second in range(25, 175, 25):
        log.feedback(f"f{second}", f"{second // 60}:{second % 60:02}", turn_id="a1")
    log.until("10:00")
    assert [when(s) for s in log.segments] == [
        (at("3:00"), "end", 0),
        (at("3:00"), "end", 0),
    ]


def test_forced_closing_leaves_the_unripe_out_and_counts_it() -> None:
    log = Log()
    log.turn("u1", "0:00")
    log.turn("a1", "0:10")
    for minute in range(4, 29, 4):
        log.turn(f"u{minute}", f"{minute}:00")
        log.turn(f"a{minute}", f"{minute}:01")
    log.feedback("ripe", "29:00", turn_id="a28")
    log.turn("u30", "29:45")
    log.feedback("unripe", "29:50", turn_id="a28")
    log.until("30:00")
    (first,) = log.segments
    assert when(first) == (at("30:00"), "duration", 0)
    assert first.steps[-1].turn_id == "a28"
    assert shown(first) == {"a28": ["ripe"]}
    assert log.held_back == [2]
    log.until("30:20")
    revision = log.segments[-1]
    assert when(revision) == (at("30:20"), "duration", 1)
    assert shown(revision) == {"a28": ["ripe", "unripe"]}
    assert log.held_back == [2]
    log.until("1:30:00")
    last = log.segments[-1]
    assert (last.ordinal, when(last)) == (1, (at("59:45"), "gap", 0))


def test_forced_closing_stops_at_the_first_unripe_turn() -> None:
    """An earlier turn that has just come keeps later ripe ones out."""
    log = Log()
    log.turn("u1", "0:00")
    log.turn("u9", "1:00")
    log.turn("u5", "0:30", "29:50")
    (first,) = log.until("30:00")
    assert when(first) == (at("30:00"), "duration", 0)
    assert len(first.lineage) == 1
    assert log.held_back == [2]


def test_forced_closing_waits_until_the_first_turn_is_ripe() -> None:
    log = Log()
    log.turn("u2", "1:00")
    log.turn("u1", "0:30", "30:50")
    log.until("31:19")
    assert log.segments == []
    (first,) = log.until("31:20")
    assert when(first) == (at("31:20"), "duration", 0)
    assert len(first.lineage) == 2


def test_natural_wins_a_tie_with_forced() -> None:
    log = Log()
    log.turn("u1", "0:00")
    assert [when(s) for s in log.until("1:00:00")] == [(at("30:00"), "gap", 0)]


def test_late_storm_makes_few_revisions() -> None:
    log = Log()
    log.turn("u1", "0:00")
    log.turn("a1", "0:10", session_done=True)
    log.until("0:59")
    for second in range(3_600):
        log.put_feedback_at(second)
    log.until("3:00:00")
    revisions = log.segments[1:]
    # Twice at max_open after the first that is pending, then when all has settled.
    assert [when(s) for s in revisions] == [
        (at("31:00"), "end", 1),
        (at("1:00:31"), "end", 2),
        (at("1:01:29"), "end", 3),
    ]
    assert len(revisions[-1].lineage) == 3_602


def test_a_late_turn_belongs_to_the_segment_with_the_smallest_boundary() -> None:
    log = Log()
    log.turn("a1", "0:00", session_done=True)
    log.turn("a2", "4:00", session_done=True)
    log.until("5:00")
    log.turn("u1", "0:00", "6:00")
    log.turn("u2", "-0:01", "6:00")
    log.until("10:00")
    assert [(s.ordinal, s.revision, len(s.lineage)) for s in log.segments] == [
        (0, 0, 1),
        (1, 0, 1),
        (0, 1, 2),
        (1, 1, 2),
    ]


def test_late_at_most_gap_before_the_first_event_time() -> None:
    log = Log()
    log.turn("a1", "10:00", session_done=True)
    log.until("11:00")
    log.turn("a2", "5:00", "12:00")
    log.turn("a3", "4:59", "12:00")
    log.until("2:00:00")
    assert [(s.ordinal, s.revision) for s in log.segments] == [(0, 0), (0, 1), (1, 0)]


def test_revision_keeps_what_is_frozen() -> None:
    log = Log()
    log.turn("u1", "0:00", user_id="ann", source="web")
    log.turn("a1", "0:10", session_done=True)
    log.until("1:00")
    log.turn("u0", "-0:05", "2:00", user_id="bob", source="api")
    log.until("3:00")
    before, after = log.segments
    assert (after.segment_id, after.user_id, after.source) == (before.segment_id, "ann", "web")
    assert after.first_closed_at == before.closed_at
    assert (before.first_event_time, after.first_event_time) == (at("0:00"), at("-0:05"))
    assert after.closed_by == before.closed_by


def test_feedback_never_goes_in_before_its_turn() -> None:
    """A late reply that claims to be of the future ripens after the feedback about it."""
    log = Log()
    log.turn("u1", "0:00")
    log.turn("a1", "0:10", session_done=True)
    log.until("1:00")
    log.turn("a0", "0:05", "2:00")
    log.feedback("f0", "0:06", "2:10", turn_id="a0")
    log.until("10:00")
    assert [when(s) for s in log.segments[1:]] == [(at("2:40"), "end", 1)]


def test_revision_leaves_the_unripe_out_and_counts_it() -> None:
    log = Log()
    log.turn("u1", "0:00")
    log.turn("a1", "0:10", session_done=True)
    log.until("0:59")
    for number in range(91):
        log.put_feedback_at(number * 20)
    log.until("31:00")
    first = log.segments[1]
    assert when(first) == (at("31:00"), "end", 1)
    assert log.held_back == [2]


def test_user_id_of_the_last_turn_that_has_one_else_of_the_segment_before() -> None:
    log = Log()
    log.turn("u1", "0:00", user_id="ann")
    log.turn("a1", "0:01", user_id="bob")
    log.turn("a2", "0:02", session_done=True)
    log.turn("a3", "0:03", session_done=True)
    log.until("1:00")
    assert [s.user_id for s in log.segments] == ["bob", "bob"]


def test_key_is_the_user_else_the_session() -> None:
    log = Log()
    log.turn("a1", "0:00", session_done=True)
    log.turn("a2", "0:10", session_done=True, user_id="ann")
    log.until("1:00")
    keys = [effect.key for effect in log.effects if hasattr(effect, "key")]
    assert keys == ["s", "ann"]


@pytest.mark.parametrize("pause", [1, 7, 1_000])
def test_how_often_the_clock_is_moved_changes_nothing(pause: int) -> None:
    logs = [Log(), Log()]
    for log, busy in zip(logs, (False, True), strict=True):
        for second in range(0, 2_400, 60):
            log.turn(f"u{second}", f"0:{second}" if second < 60 else f"{second // 60}:00")
            log.turn(f"a{second}", f"{second // 60}:10")
            if busy:
                for moment in range(second + 10, second + 60, pause):
                    log.apply(Advance(at("0:00") + moment * SECOND - 1))
        log.until("3:00:00")
    assert logs[0].segments == logs[1].segments
    assert len(logs[0].segments) > 1


def test_settings_of_zero_settle_are_allowed() -> None:
    log = Log(AlignSettings(settle_ms=0))
    log.turn("a1", "0:00", session_done=True)
    assert [when(s) for s in log.until("0:00")] == [(at("0:00"), "end", 0)]
