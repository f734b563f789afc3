"""Requests for review, what decides them, and the feedback that does."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec

from processors.reward.machine import EmitReview, EmitScored, RewardState, step
from streams.contracts import (
    AttributedBy,
    FeedbackEvent,
    FeedbackKind,
    ReviewRequest,
    StepFeedback,
    TrajectorySegment,
)
from streams.reviews import cases, decide, find, replies_of
from streams.settings import RewardSettings
from tests.unit.processors.reward.builders import HOUR_MS, reply, segment, thumb


def rated(number: int, *more: StepFeedback, revision: int = 0) -> TrajectorySegment:
    """One angry reply of three, each in a session of its own."""
    given = thumb(f"f{number}", -1, event_time=number)
    return segment(
        [reply(f"a{number}", given, *more)],
        segment_id=f"s{number}",
        session_id=f"session-{number}",
        closed_at=HOUR_MS * (number + 10 * revision),
        revision=revision,
    )


def asked() -> tuple[RewardState, ReviewRequest]:
    state = RewardState()
    for number in (1, 2, 3):
        state, effects = step(state, rated(number), RewardSettings())
    (request,) = [effect.review for effect in effects if isinstance(effect, EmitReview)]
    return state, request


def shown(event: FeedbackEvent) -> StepFeedback:
    """``event`` as a segment shows it."""
    return StepFeedback(
        event_id=event.event_id,
        kind=event.kind,
        event_time=event.event_time,
        delay_ms=0,
        attributed_by=AttributedBy.TURN_ID,
        source=event.source,
        value=event.value,
        attributes=event.attributes,
    )


def event(kind: FeedbackKind, event_id: str, at: int, **more: Any) -> FeedbackEvent:
    return FeedbackEvent(
        event_id=event_id, session_id="s", event_time=at, kind=kind, source="t", **more
    )


def test_a_decision_reaches_every_reply_and_gives_each_its_rating_back() -> None:
    state, request = asked()
    events = decide(request, uphold=True, now_ms=HOUR_MS * 20, actor="ann")
    assert [(e.session_id, e.turn_id) for e in events] == [
        ("session-1", "a1"),
        ("session-2", "a2"),
        ("session-3", "a3"),
    ]
    rewards = []
    for number, decision in enumerate(events, start=1):
        state, effects = step(state, rated(number, shown(decision), revision=1), RewardSettings())
        rewards += [e.scored.rewards[0].reward for e in effects if isinstance(e, EmitScored)]
    assert rewards == [-0.4, -0.4, -0.4]


def test_a_request_is_open_until_decided_and_the_latest_decision_counts() -> None:
    _, request = asked()
    (case,) = cases([request, request], [])
    assert (case.state, case.filter, case.decided_at) == ("open", "row", None)
    no, yes = decide(request, uphold=False, now_ms=5)[0], decide(request, uphold=True, now_ms=9)[0]
    (case,) = cases([request], [yes, no])
    assert (case.state, case.decided_at) == ("upheld", 9)
    withdrawn = event(FeedbackKind.RETRACTION, "r", 10, supersedes=yes.event_id)
    assert cases([request], [yes, no, withdrawn])[0].state == "rejected"


def test_other_feedback_decides_nothing() -> None:
    _, request = asked()
    others = [
        event(FeedbackKind.REVIEW, "r1", 1, value=1.0),
        event(FeedbackKind.REVIEW, "r2", 1, value=1.0, attributes={"review": "another"}),
        event(FeedbackKind.REVIEW, "r3", 1, attributes={"review": request.event_id}),
        event(FeedbackKind.THUMB, "t", 1, value=1.0, attributes={"review": request.event_id}),
    ]
    assert cases([request], others)[0].state == "open"


def test_a_review_on_the_requests_reply_decides_it_as_it_does_for_the_reward() -> None:
    _, request = asked()
    by_hand = FeedbackEvent(
        event_id="r1", session_id=request.session_id, turn_id=request.turn_id, event_time=7,
        kind=FeedbackKind.REVIEW, source="front-end", value=-1.0,
    )  # fmt: skip
    (case,) = cases([request], [by_hand])
    assert (case.state, case.decided_at) == ("rejected", 7)
    named = decide(request, uphold=True, now_ms=9)[0]
    assert cases([request], [named, by_hand])[0].state == "upheld"
    assert cases([request], [msgspec.structs.replace(by_hand, event_time=11), named])[0].state == (
        "rejected"
    )
    for elsewhere in ({"turn_id": "a1"}, {"session_id": "other"}, {"policy": "other"}):
        assert cases([request], [msgspec.structs.replace(by_hand, **elsewhere)])[0].state == "open"
    unreadable = msgspec.structs.replace(by_hand, value=math.nan)
    assert cases([request], [unreadable])[0].state == "open"


def test_a_request_of_an_older_version_is_decided_on_its_own_reply() -> None:
    for attributes in ({}, {"replies": "no json"}, {"replies": json.dumps([["one"]])}):
        request = ReviewRequest(
            event_id="r", session_id="s", segment_id="g", turn_id="a", event_time=1,
            feedback_event_ids=("f",), reason="x", attributes=attributes,
        )  # fmt: skip
        assert replies_of(request) == (("s", "a"),)


def test_find_takes_the_beginning_of_an_id() -> None:
    _, request = asked()
    known = cases([request], [])
    assert find(known, request.event_id[:6]) == known
    assert find(known, "zz") == []
