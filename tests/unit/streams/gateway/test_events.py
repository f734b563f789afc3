from __future__ import annotations

from typing import Any

import pytest

from streams.contracts import DialogueTurn, FeedbackEvent, FeedbackKind
from streams.errors import InvalidRecordError
from streams.gateway.events import parse_events

NOW_MS = 1_700_000_000_000


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
        [{"event_id": "e", "session_id": "s", "kind": "copy", "source": "x", "event_time": 10**12}]
    )
    assert (event.event_id, event.source, event.event_time) == ("e", "x", 10**12)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ([], "empty"),
        ({"session_id": "s", "kind": "thumbs_up"}, "kind must be one of thumb, rating"),
        ({"session_id": "s", "kind": "retraction"}, "needs supersedes"),
        (["x"], r"\[0\]: must be an object"),
        ({"kind": "thumb"}, r"\[0\]: .*session_id"),
        ({"session_id": "s", "kind": "thumb", "vlaue": 1}, "field vlaue; known are .*value"),
        ({"session_id": "s", "kind": "thumb", "value": "up"}, "value"),
        ({"session_id": "", "kind": "thumb"}, "must not be empty"),
        ([{"session_id": "s", "kind": "thumb"}, {}], r"\[1\]"),
        ({"session_id": "s", "kind": "thumb", "event_time": NOW_MS + 61}, "max_skew_ms"),
        ({"session_id": "s", "kind": "thumb", "event_time": NOW_MS // 1_000}, "look like seconds"),
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


def test_a_proven_source_can_not_be_exchanged() -> None:
    body = {"session_id": "s", "kind": "copy", "source": "app"}
    with pytest.raises(InvalidRecordError, match=r"\[0\]: source 'app'"):
        parse_events(
            body, FeedbackEvent, source="web", policy="p", now_ms=5, max_skew_ms=0,
            own_source_only=True,
        )  # fmt: skip


@pytest.mark.parametrize("field", ["event_id", "session_id", "turn_id", "supersedes", "user_id"])
@pytest.mark.parametrize("value", ["a\nb", " a", "x" * 513])
def test_an_odd_id_is_named(field: str, value: str) -> None:
    with pytest.raises(InvalidRecordError, match=field):
        feedback({"session_id": "s", "kind": "copy", field: value})


def test_a_turn_of_nobody_is_refused() -> None:
    body = {"session_id": "s", "turn_id": "t", "role": "narrator", "content": "x"}
    with pytest.raises(InvalidRecordError, match="role must be one of system, user"):
        parse_events(body, DialogueTurn, source="w", policy="p", now_ms=NOW_MS, max_skew_ms=60)
