"""ALIGNMENT §3: which reply feedback is about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from streams.contracts import FeedbackKind
from tests.unit.processors.feedback_align.logs import Log, at, shown


def two_replies(log: Log) -> None:
    log.turn("u1", "0:00")
    log.turn("a1", "0:10")
    log.turn("u2", "0:20")
    log.turn("a2", "0:30")


CASES: dict[str, tuple[Callable[[Log], Any], dict[str, list[str]]]] = {
    "by turn id": (lambda log: log.feedback("f", "1:00", turn_id="a1"), {"a1": ["f"]}),
    "by time, the reply with the greatest key": (
        lambda log: log.feedback("f", "1:00"),
        {"a2": ["f"]},
    ),
    "by time, at the very time": (lambda log: log.feedback("f", "0:30", "1:00"), {"a2": ["f"]}),
    "by time, never a later reply": (
        lambda log: log.feedback("f", "0:29", "1:00"),
        {"a1": ["f"]},
    ),
    "a turn id beats time": (lambda log: log.feedback("f", "0:40", turn_id="a1"), {"a1": ["f"]}),
    "an unknown turn id is not tried by time": (
        lambda log: log.feedback("f", "0:40", turn_id="a9"),
        {},
    ),
    "a user turn is no target": (lambda log: log.feedback("f", "0:40", turn_id="u1"), {}),
    "supersedes beats the own turn id": (
        lambda log: (
            log.feedback("f", "0:40", turn_id="a1"),
            log.feedback("g", "0:50", supersedes="f", turn_id="a2"),
        ),
        {"a1": ["g"]},
    ),
    "supersedes of nothing known falls back to the own turn id": (
        lambda log: log.feedback("g", "0:50", supersedes="f", turn_id="a2"),
        {"a2": ["g"]},
    ),
    "supersedes of nothing known is not tried by time": (
        lambda log: log.feedback("g", "0:50", supersedes="f"),
        {},
    ),
    "the original may come later": (
        lambda log: (
            log.feedback("g", "0:50", supersedes="f", turn_id="a2"),
            log.feedback("f", "0:45", "0:55", turn_id="a1"),
        ),
        {"a1": ["g"]},
    ),
    "through two removes": (
        lambda log: (
            log.feedback("h", "0:55", supersedes="g"),
            log.feedback("g", "0:50", "0:56", supersedes="f"),
            log.feedback("f", "0:45", "0:57", turn_id="a1"),
        ),
        {"a1": ["h"]},
    ),
    "a circle counts as no original": (
        lambda log: (
            log.feedback("f", "0:45", supersedes="g", turn_id="a1"),
            log.feedback("g", "0:50", supersedes="f"),
        ),
        {"a1": ["g"]},
    ),
    "one that supersedes itself has its own target": (
        lambda log: log.feedback("f", "0:45", supersedes="f", turn_id="a1"),
        {"a1": ["f"]},
    ),
    "a retraction shows nothing": (
        lambda log: (
            log.feedback("f", "0:40", turn_id="a1"),
            log.feedback("g", "0:50", supersedes="f", kind=FeedbackKind.RETRACTION),
        ),
        {},
    ),
    "a retraction retracted by something later": (
        lambda log: (
            log.feedback("f", "0:40", turn_id="a1"),
            log.feedback("g", "0:50", supersedes="f", kind=FeedbackKind.RETRACTION),
            log.feedback("h", "0:55", supersedes="g"),
        ),
        {"a1": ["h"]},
    ),
    "two that supersede the same missing id": (
        lambda log: (
            log.feedback("f", "0:40", supersedes="x", turn_id="a1"),
            log.feedback("g", "0:50", supersedes="x", turn_id="a2"),
        ),
        {"a2": ["g"]},
    ),
    "listed by key, not by arrival": (
        lambda log: (
            log.feedback("f", "0:50", turn_id="a1"),
            log.feedback("g", "0:40", "0:51", turn_id="a1"),
        ),
        {"a1": ["g", "f"]},
    ),
    "the greatest key of a thread, not the last to supersede": (
        lambda log: (
            log.feedback("f", "0:50", turn_id="a1"),
            log.feedback("g", "0:40", "0:51", supersedes="f"),
        ),
        {"a1": ["f"]},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_shown_feedback(name: str) -> None:
    play, expected = CASES[name]
    log = Log()
    two_replies(log)
    play(log)
    (segment, *_) = log.until("10:00")
    assert shown(segment) == expected


@pytest.mark.parametrize(
    ("time", "expected"), [("10:10", {"a1": ["f"]}), ("10:11", {})], ids=["inside", "outside"]
)
def test_attribution_window_is_inclusive(time: str, expected: dict[str, list[str]]) -> None:
    log = Log()
    log.turn("u1", "0:00")
    log.turn("a1", "0:10")
    log.turn("u2", "5:00")
    log.turn("a2", "10:12")
    log.feedback("f", time, "10:13")
    (segment,) = log.until("20:00")
    assert shown(segment) == expected


@pytest.mark.parametrize(
    ("arrival", "died"), [("1:00:20", False), ("1:00:21", True)], ids=["in time", "too late"]
)
def test_orphans_wait_for_an_hour_inclusive(arrival: str, died: bool) -> None:
    log = Log()
    log.turn("u1", "0:00")
    log.feedback("f", "0:20", turn_id="a1")
    log.turn("a1", arrival)
    log.until("3:00:00")
    assert log.rejects == ([("f", "unmatched_feedback", at("1:00:20"))] if died else [])
    assert shown(log.segments[-1]) == ({} if died else {"a1": ["f"]})


def test_targets_are_computed_anew_until_published() -> None:
    log = Log()
    log.turn("u1", "0:00")
    log.turn("a1", "0:10")
    log.feedback("f", "0:40")
    log.turn("a2", "0:30", "0:50")
    (segment,) = log.until("6:00")
    assert shown(segment) == {"a2": ["f"]}


def test_a_published_target_is_fixed() -> None:
    log = Log()
    log.turn("u1", "0:00")
    log.turn("a1", "0:10", session_done=True)
    log.feedback("f", "0:40")
    log.turn("a2", "0:05", "2:00")
    log.turn("a3", "0:30", "2:00")
    log.until("1:00:00")
    assert shown(log.segments[0]) == {"a1": ["f"]}
    assert [shown(s) for s in log.segments[1:]] == [{"a1": ["f"]}, {}]


def test_superseding_published_feedback_of_any_age() -> None:
    log = Log()
    log.turn("u1", "0:00")
    log.turn("a1", "0:10", session_done=True)
    log.feedback("f", "0:20")
    log.turn("u2", "20:00:00")
    log.feedback("g", "24:00:50", supersedes="f")
    log.until("24:05:00")
    assert shown(log.segments[-1]) == {"a1": ["g"]}
    assert log.segments[-1].revision == 1


def test_a_target_beyond_the_horizon_is_none() -> None:
    log = Log()
    log.turn("u1", "0:00")
    log.turn("a1", "0:10", session_done=True)
    log.feedback("f", "0:20")
    log.turn("u2", "20:00:00")
    log.feedback("g", "24:00:51", supersedes="f")
    log.until("26:00:00")
    assert log.rejects == [("g", "unmatched_feedback", at("25:00:51"))]
