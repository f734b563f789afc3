"""The six examples of ALIGNMENT.md, with its times."""

from __future__ import annotations

from streams.contracts import AttributedBy, ClosedBy, FeedbackKind
from tests.unit.processors.feedback_align.logs import Log, at, shown, when


def test_example_1_open_ended_closes_by_gap() -> None:
    log = Log()
    log.turn("u1", "0:00")
    log.turn("a1", "0:10")
    log.feedback("thumb", "3:00", turn_id="a1")
    assert log.until("5:09") == []
    (segment,) = log.until("5:10")
    assert when(segment) == (at("5:10"), "gap", 0)
    assert shown(segment) == {"a1": ["thumb"]}
    assert segment.steps[0].feedback[0].delay_ms == 170_000


def test_example_2_end_waits_for_feedback() -> None:
    without, with_thumb = Log(), Log()
    for log in (without, with_thumb):
        log.turn("u1", "0:00")
        log.turn("a1", "0:10", session_done=True)
    with_thumb.feedback("thumb", "0:35", turn_id="a1")
    assert [when(s) for s in without.until("2:00")] == [(at("0:40"), "end", 0)]
    assert [when(s) for s in with_thumb.until("2:00")] == [(at("1:05"), "end", 0)]


def test_example_3_second_thumb_makes_a_revision() -> None:
    log = Log()
    log.turn("u1", "0:00")
    log.turn("a1", "0:10", session_done=True)
    log.feedback("one", "0:35", turn_id="a1")
    log.feedback("two", "2:00", turn_id="a1")
    log.until("10:00")
    assert [when(s) for s in log.segments] == [
        (at("1:05"), "end", 0),
        (at("2:30"), "end", 1),
    ]
    assert shown(log.segments[1]) == {"a1": ["one", "two"]}
    assert log.segments[0].segment_id == log.segments[1].segment_id
    assert len(log.segments[1].lineage) == 4


def test_example_4_spool() -> None:
    answered, waiting = Log(), Log()
    for log in (answered, waiting):
        log.turn("u1", "0:00", "3:00:00")
        log.turn("a1", "0:10", "3:00:20")
    waiting.turn("u2", "0:20", "3:03:00")
    assert [when(s) for s in answered.until("4:00:00")] == [(at("3:05:20"), "gap", 0)]
    (segment,) = waiting.until("4:00:00")
    assert when(segment) == (at("3:30:00"), "duration", 0)
    assert len(segment.lineage) == 3


def test_example_5_late_turn_and_stray() -> None:
    late, stray = Log(), Log()
    for log in (late, stray):
        log.turn("u1", "0:00")
        log.turn("a1", "0:10")
    late.turn("u0", "0:05", "9:00")
    stray.turn("u0", "-9:00", "9:00")
    assert [when(s) for s in late.until("9:30")] == [(at("9:30"), "gap", 1)]
    late_segment = late.segments[-1]
    assert [m.turn_id for m in late_segment.steps[0].context] == ["u1", "u0"]
    stray.until("2:00:00")
    first, second = stray.segments
    assert (first.ordinal, second.ordinal) == (0, 1)
    assert second.first_event_time == at("-9:00")
    assert second.revision == 0
    # Its only turn is unanswered, so it waits for max_open: natural and forced coincide.
    assert when(second) == (at("39:00"), ClosedBy.GAP.value, 0)


def test_example_6_superseding_takes_over_the_target() -> None:
    log = Log()
    log.turn("u1", "0:00")
    log.turn("a1", "0:10")
    log.feedback("thumb", "0:20")
    log.feedback("rating", "0:40", kind=FeedbackKind.RATING, supersedes="thumb", value=0.5)
    (segment,) = log.until("6:00")
    (item,) = segment.steps[0].feedback
    assert (item.event_id, item.attributed_by) == ("rating", AttributedBy.TIME)
    assert len(segment.lineage) == 4
