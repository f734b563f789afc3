from __future__ import annotations

from typing import Any

import pytest

from streams.contracts import DialogueTurn, FeedbackEvent, FeedbackKind
from streams.errors import InvalidRecordError
from streams.gateway.events import parse_events

NOW_MS = 1_000_000


def feedback(body: Any) -> list[FeedbackEvent]:
    return parse_events(
        body, FeedbackEvent, source="web", policy="p", now_ms=NOW_MS, max_skew_ms=60
    )


def test_defaults_are_filled_in() -> None:
    (event,) = feedback({"session_id": "s", "kind": "thumb", "value": 1})
    assert event.event_id
    assert (event.event_time, event.source, event.policy) == (NOW_MS, "web", "p")
    assert event.kind is FeedbackKind.THUMB


def test_what_is_given_is_kept() -> None:
    (event,) = feedback(
        [{"event_id": "e", "session_id": "s", "kind": "rating", "source": "x", "event_time": 5}]
    )
    assert (event.event_id, event.source, event.event_time) == ("e", "x", 5)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ([], "empty"),
        (["x"], r"\[0\]: must be an object"),
        ({"kind": "thumb"}, r"\[0\]: .*session_id"),
        ({"session_id": "s", "kind": "thumb", "vlaue": 1}, "unknown field vlaue"),
        ({"session_id": "s", "kind": "thumb", "value": "up"}, "value"),
        ({"session_id": "", "kind": "thumb"}, "must not be empty"),
        ([{"session_id": "s", "kind": "thumb"}, {}], r"\[1\]"),
        ({"session_id": "s", "kind": "thumb", "event_time": NOW_MS + 61}, "max_skew_ms"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(body: Any, says: str) -> None:
    with pytest.raises(InvalidRecordError, match=says):
        feedback(body)


def test_turns_are_checked_too() -> None:
    body = {"session_id": "s", "turn_id": "t", "role": "assistant", "content": "x"}
    body_with_ids = {**body, "behaviour_logprobs": [-1.0], "token_ids": [1, 2]}
    with pytest.raises(InvalidRecordError, match="one entry per"):
        parse_events(
            body_with_ids, DialogueTurn, source="w", policy="p", now_ms=NOW_MS, max_skew_ms=60
        )
