"""ALIGNMENT §2: what may enter, and in which order the checks decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from processors.feedback_align.identity import content_digest, turn_size
from processors.feedback_align.machine import DropDuplicate, Effect, SessionForgotten
from streams.contracts import FeedbackKind, TurnType
from tests.unit.processors.feedback_align.logs import Log, at, make_feedback, make_turn

Play = Callable[[Log], Any]


def closed_once(log: Log) -> tuple[Effect, ...]:
    """u1 and a1 in a segment closed at 0:40, published with a thumb on a1."""
    log.turn("u1", "0:00")
    log.turn("a1", "0:10", session_done=True)
    return log.feedback("f1", "0:10", turn_id="a1")


REJECTED: dict[str, tuple[Play, str | None]] = {
    "a minute ahead is taken": (lambda log: log.turn("u9", "1:00", "0:00"), None),
    "more is not": (lambda log: log.turn("u9", "1:01", "0:00"), "future_timestamp"),
    "nor for feedback": (
        lambda log: log.feedback("f", "1:01", "0:00", turn_id="a1"),
        "future_timestamp",
    ),
    "future before duplicate": (
        lambda log: (log.turn("u1", "0:00"), log.turn("u1", "5:00", "0:01")),
        "future_timestamp",
    ),
    "same id, other content": (
        lambda log: (log.turn("u1", "0:00"), log.turn("u1", "0:00", "0:01", content="other")),
        "conflicting_duplicate",
    ),
    "same id, other topic": (
        lambda log: (log.turn("u1", "0:00"), log.feedback("e-u1", "0:00", "0:01", turn_id="u1")),
        "conflicting_duplicate",
    ),
    "duplicate before invalid": (
        lambda log: (
            log.turn("u1", "0:00"),
            log.feedback("e-u1", "0:01", kind=FeedbackKind.RETRACTION),
        ),
        "conflicting_duplicate",
    ),
    "retraction of nothing": (
        lambda log: log.feedback("f", "0:00", kind=FeedbackKind.RETRACTION, turn_id="a1"),
        "invalid",
    ),
    "turn id taken": (
        lambda log: (log.turn("u1", "0:00"), log.turn("u1", "0:00", "0:01", event_id="e-other")),
        "conflicting_duplicate",
    ),
    "turn id taken by a published turn": (
        lambda log: (closed_once(log), log.turn("u1", "2:00", event_id="e-other")),
        "conflicting_duplicate",
    ),
    "turn id free again after the horizon": (
        lambda log: (
            closed_once(log),
            log.turn("u2", "23:00:00"),
            log.turn("u1", "24:00:41", event_id="e-other"),
        ),
        None,
    ),
    "before a boundary beyond the horizon": (
        lambda log: (
            closed_once(log),
            log.turn("u2", "23:00:00"),
            log.turn("u9", "0:09", "24:00:41"),
        ),
        "beyond_horizon",
    ),
    "at the horizon it is still visible": (
        lambda log: (
            closed_once(log),
            log.turn("u2", "23:00:00"),
            log.turn("u9", "0:09", "24:00:40"),
        ),
        None,
    ),
    "also if a later visible boundary follows": (
        lambda log: (
            closed_once(log),
            log.turn("u2", "23:00:00", session_done=True),
            log.turn("u9", "0:09", "24:00:41"),
        ),
        "beyond_horizon",
    ),
    "after that boundary but before the visible one is late, not beyond": (
        lambda log: (
            closed_once(log),
            log.turn("u2", "23:00:00", session_done=True),
            log.turn("u9", "22:59:00", "24:00:41"),
        ),
        None,
    ),
    "feedback by time beyond the horizon": (
        lambda log: (
            closed_once(log),
            log.turn("u2", "23:00:00"),
            log.feedback("f9", "0:10", "24:00:41"),
        ),
        "beyond_horizon",
    ),
    "feedback by time right after that boundary": (
        lambda log: (
            closed_once(log),
            log.turn("u2", "23:00:00"),
            log.feedback("f9", "0:11", "24:00:41"),
        ),
        None,
    ),
    "feedback with a turn id is never beyond": (
        lambda log: (
            closed_once(log),
            log.turn("u2", "23:00:00"),
            log.feedback("f9", "0:05", "24:00:41", turn_id="a1"),
        ),
        None,
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_checks(name: str) -> None:
    play, reason = REJECTED[name]
    log = Log()
    play(log)
    assert [why for _, why, _ in log.rejects] == ([reason] if reason else [])


def test_a_rejected_record_carries_its_arrival_and_names_what_to_do() -> None:
    log = Log()
    log.turn("u1", "9:00", "0:00")
    assert log.rejects == [("e-u1", "future_timestamp", at("0:00"))]
    assert log.state.sessions == {}


def test_equal_content_is_dropped_and_counted() -> None:
    log = Log()
    log.turn("u1", "0:00")
    effects = log.turn("u1", "0:00", "0:05")
    assert effects == (DropDuplicate("dialogue.turns", 0, 1),)
    assert log.session.last_accepted_ms == at("0:00")


def test_a_rejected_event_is_not_remembered() -> None:
    log = Log()
    log.turn("u1", "9:00", "0:00")
    log.turn("u1", "9:00", "9:00")
    assert len(log.rejects) == 1
    assert log.session.turns[0].arrival_ms == at("9:00")


def test_feedback_that_died_is_not_remembered() -> None:
    log = Log()
    log.turn("u1", "0:00")
    log.feedback("f1", "0:00", turn_id="a1")
    log.until("1:00:00")
    log.turn("a1", "1:00:01")
    log.feedback("f1", "0:00", "1:00:02", turn_id="a1")
    log.until("2:00:00")
    assert log.rejects == [("f1", "unmatched_feedback", at("1:00:00"))]
    assert log.segments[-1].steps[0].feedback[0].event_id == "f1"


@pytest.mark.parametrize(
    ("again", "reason"),
    [
        ("24:00:40", "conflicting_duplicate"),
        ("24:01:40", "conflicting_duplicate"),
        ("24:01:41", ""),
    ],
)
def test_an_event_id_is_known_until_horizon_after_its_arrival(again: str, reason: str) -> None:
    """f2 arrives late, at 1:40; its segment, closed at 0:40, is visible until 24:00:40."""
    log = Log()
    closed_once(log)
    log.feedback("f2", "1:40", turn_id="a1")
    log.turn("u2", "23:00:00")
    log.feedback("f2", "1:40", again, turn_id="a1", value=-1.0)
    assert [why for _, why, _ in log.rejects] == ([reason] if reason else [])


def test_an_event_id_is_known_while_its_segment_is_visible() -> None:
    """u1 arrives at 0:00; its segment closes at 30:00, so it is known until 24:30:00."""
    log = Log()
    log.turn("u1", "0:00")
    log.until("1:00:00")
    assert [s.closed_at for s in log.segments] == [at("30:00")]
    log.turn("u2", "23:00:00")
    log.turn("u1", "0:00", "24:30:00")
    assert isinstance(log.effects[-1], DropDuplicate)
    log.turn("u1", "0:00", "24:30:01")
    assert log.rejects == []
    # The same event time with a later arrival stands after the old boundary.
    assert [turn.life for turn in log.session.turns] == ["open", "published"]


@pytest.mark.parametrize("key", [("other", "s"), ("default", "s2")])
def test_sessions_are_apart_by_policy_and_id(key: tuple[str, str]) -> None:
    log = Log()
    policy, session_id = key
    log.turn("u1", "0:00")
    log.turn("u1", "0:01", policy=policy, session_id=session_id)
    assert log.rejects == []
    assert set(log.state.sessions) == {("default", "s"), key}


def test_a_session_is_forgotten_after_the_horizon_with_its_ordinal() -> None:
    log = Log()
    closed_once(log)
    log.until("24:00:39")
    assert len(log.state.sessions) == 1
    log.until("24:00:40")
    assert isinstance(log.effects[-1], SessionForgotten)
    assert log.state.sessions == {}
    log.turn("u1", "48:00:00", session_done=True)
    log.until("49:00:00")
    assert [s.ordinal for s in log.segments] == [0, 0]


def test_a_record_at_the_horizon_keeps_the_session() -> None:
    log = Log()
    closed_once(log)
    log.turn("u2", "24:00:40", session_done=True)
    log.until("25:00:00")
    assert [s.ordinal for s in log.segments] == [0, 1]


def test_feedback_that_died_keeps_the_session() -> None:
    log = Log()
    closed_once(log)
    log.feedback("f9", "10:00:00", turn_id="unknown")
    log.until("34:00:00")
    assert isinstance(log.effects[-1], SessionForgotten)
    log.feedback("f8", "34:00:01", turn_id="a1")
    log.until("35:00:01")
    assert log.rejects[-1] == ("f8", "unmatched_feedback", at("35:00:01"))
    assert log.state.sessions == {}


def test_digest_equals_for_equal_content() -> None:
    one = make_feedback("f", 0, value=1, attributes={"a": "1", "b": "2"})
    two = make_feedback("f", 0, value=1.0, attributes={"b": "2", "a": "1"})
    assert one == two
    assert content_digest(one) == content_digest(two)
    zeros = (make_feedback("f", 0, value=0.0), make_feedback("f", 0, value=-0.0))
    assert content_digest(zeros[0]) == content_digest(zeros[1])
    assert content_digest(one) != content_digest(make_feedback("f", 0, value=None))


def test_size_counts_bytes_and_numbers() -> None:
    turn = make_turn(
        "a1", 0, content="äb", token_ids=(1, 2), behaviour_logprobs=(0.1,), prompt_token_ids=(3,)
    )
    assert turn_size(turn) == 3 + 8 * 4


def test_a_side_assistant_turn_is_no_reply() -> None:
    log = Log()
    log.turn("a1", "0:00", turn_type=TurnType.SIDE)
    log.feedback("f", "0:01", turn_id="a1")
    log.until("1:00:01")
    assert log.rejects == [("f", "unmatched_feedback", at("1:00:01"))]
