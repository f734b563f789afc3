"""Short ways to build segments for tests of the reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streams.contracts import (
    AttributedBy,
    ClosedBy,
    FeedbackKind,
    Message,
    Role,
    Step,
    StepFeedback,
    TrajectorySegment,
)

HOUR_MS = 3_600_000


def feedback(
    event_id: str, kind: FeedbackKind, value: float | None = None, **more: Any
) -> StepFeedback:
    """Feedback ``event_id``, given at ``event_time`` (1,000 unless said)."""
    fields: dict[str, Any] = {
        "event_time": 1_000,
        "delay_ms": 0,
        "attributed_by": AttributedBy.TURN_ID,
        "source": "test",
    }
    return StepFeedback(event_id=event_id, kind=kind, value=value, **(fields | more))


def thumb(event_id: str, value: float, **more: Any) -> StepFeedback:
    return feedback(event_id, FeedbackKind.THUMB, value, **more)


def rating(event_id: str, value: float, **more: Any) -> StepFeedback:
    return feedback(event_id, FeedbackKind.RATING, value, **more)


def review(event_id: str, value: float, **more: Any) -> StepFeedback:
    return feedback(event_id, FeedbackKind.REVIEW, value, **more)


def said(turn_id: str, content: str, event_time: int = 0, **more: Any) -> Message:
    """A user's turn."""
    return Message(turn_id=turn_id, role=Role.USER, content=content, event_time=event_time, **more)


def reply(turn_id: str, *given: StepFeedback, **more: Any) -> Step:
    """A step with this feedback."""
    fields: dict[str, Any] = {"reply": "An answer.", "event_time": 0}
    return Step(turn_id=turn_id, feedback=given, **(fields | more))


def segment(steps: Sequence[Step] = (), **more: Any) -> TrajectorySegment:
    """Segment ``s1``, revision 0, of user ``u1`` unless said otherwise."""
    fields: dict[str, Any] = {
        "segment_id": "s1",
        "revision": 0,
        "session_id": "session-1",
        "user_id": "u1",
        "source": "test",
        "ordinal": 0,
        "closed_by": ClosedBy.END,
        "closed_at": HOUR_MS,
        "first_closed_at": HOUR_MS,
        "settle_ms": 30_000,
        "first_event_time": 0,
        "last_event_time": 1_000,
        "digest": "d",
    }
    return TrajectorySegment(steps=tuple(steps), **(fields | more))


def conversation(*texts: str) -> TrajectorySegment:
    """User turns ``texts``, each but the last answered; the last one is what follows."""
    turns = [said(f"u{i}", text, event_time=10 * i) for i, text in enumerate(texts)]
    return segment(
        [
            reply(f"a{i}", context=(turns[i],), next_user_turn=turns[i + 1], event_time=10 * i + 5)
            for i in range(len(texts) - 1)
        ]
    )
