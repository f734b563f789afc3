from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise, takewhile

import pytest

from processors.bench.dialogue import (
    PAUSED,
    WITH_FEEDBACK,
    WITH_TOKENS,
    DialoguePlan,
    conversations,
    talking_for,
)
from streams.contracts import DialogueTurn, FeedbackEvent, Role

PLAN = DialoguePlan(talking=40, begin_ms=1_000_000)
EVENTS = list(islice(conversations(PLAN), 20_000))


def test_equal_plans_make_equal_dialogue() -> None:
    assert list(islice(conversations(PLAN), 500)) == EVENTS[:500]
    other = DialoguePlan(talking=40, begin_ms=1_000_000, seed=2)
    assert list(islice(conversations(other), 500)) != EVENTS[:500]


def test_events_come_in_the_order_of_their_arrival() -> None:
    arrivals = [event.arrival_ms for event in EVENTS]
    assert arrivals == sorted(arrivals)
    assert all(event.arrival_ms > event.record.event_time for event in EVENTS)


def test_shares_are_those_that_are_written_down() -> None:
    once = {event.record.event_id: event.record for event in EVENTS}
    replies = [
        record
        for record in once.values()
        if isinstance(record, DialogueTurn) and record.role is Role.ASSISTANT
    ]
    rated = [record for record in once.values() if isinstance(record, FeedbackEvent)]
    with_tokens = sum(reply.token_ids is not None for reply in replies)
    assert with_tokens / len(replies) == pytest.approx(WITH_TOKENS, abs=0.02)
    first = [record for record in rated if record.supersedes is None]
    assert len(first) / len(replies) == pytest.approx(WITH_FEEDBACK, abs=0.02)
    assert all(200 <= len(record.content.encode()) <= 400 for record in replies)


def test_some_records_come_twice_and_some_late() -> None:
    seen = Counter(event.record.event_id for event in EVENTS)
    assert 0.002 < sum(count > 1 for count in seen.values()) / len(seen) < 0.01
    times = [event.record.event_time for event in EVENTS]
    disorder = sum(before > after for before, after in pairwise(times))
    assert disorder > 100


def test_feedback_follows_its_reply() -> None:
    said: dict[str, int] = {}
    for event in EVENTS:
        if isinstance(event.record, DialogueTurn):
            said[event.record.turn_id] = event.record.event_time
    named = [
        event.record
        for event in EVENTS
        if isinstance(event.record, FeedbackEvent) and event.record.turn_id is not None
    ]
    assert named
    for record in named:
        if record.turn_id in said:
            assert record.event_time >= said[record.turn_id] + 2_000


def test_the_rate_is_about_the_one_asked_for() -> None:
    plan = DialoguePlan(
        talking=talking_for(100, 12_000, 30_000), begin_ms=0, ramp_ms=12_000, pause_ms=30_000
    )
    upto = takewhile(lambda event: event.arrival_ms < 120_000, conversations(plan))
    turns = [e for e in upto if isinstance(e.record, DialogueTurn) and e.arrival_ms >= 60_000]
    assert len(turns) / 60 == pytest.approx(100, rel=0.1)
    assert PAUSED > 0
