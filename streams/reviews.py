"""Requests for review and the decisions about them, as records.

A request (``ReviewRequest``, topic ``reward.reviews``) names feedback that counts nothing. It is
decided by feedback of kind ``review`` on the replies it is about, with the request's id in
its attributes: that makes a revision of each segment concerned, which is scored anew.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from streams.contracts import FeedbackEvent, FeedbackKind, ReviewRequest

REVIEW_ATTRIBUTE = "review"
"""Attribute of a ``review``: the event id of the request that it decides."""

FILTER_ATTRIBUTE = "filter"
"""Attribute of a request: the filter that held the feedback."""

RATER_ATTRIBUTE = "rater"
"""Attribute of a request: who gave it."""

REPLIES_ATTRIBUTE = "replies"
"""Attribute of a request: every reply concerned, a JSON list of [session, segment, turn]."""

UNTIL_DECIDED = "; they count nothing until"
"""How the end of a request's reason begins, which says the same in all of them."""

ACTOR_ATTRIBUTE = "actor"
"""Attribute of a ``review``: who decided."""

SOURCE = "clawstream-reviews"

State = Literal["open", "upheld", "rejected"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request and what became of it.

    Args:
        request: What was asked.
        state: Whether it was decided, and how.
        decided_at: When, ms; None while it is open.
        actor: Who decided, if they said.
    """

    request: ReviewRequest
    state: State = "open"
    decided_at: int | None = None
    actor: str | None = None

    @property
    def filter(self) -> str:
        """The filter that held the feedback."""
        return self.request.attributes.get(FILTER_ATTRIBUTE, "row")


def cases(requests: Iterable[ReviewRequest], feedback: Iterable[FeedbackEvent]) -> list[Case]:
    """Each request once, oldest first, with the latest decision about it.

    A decision names the request, or names none and stands on the request's reply: the reward goes
    by both. Decisions that were withdrawn (a retraction that supersedes them) do not count.
    """
    events = sorted(feedback, key=lambda event: (event.event_time, event.event_id))
    gone = {e.supersedes for e in events if e.kind is FeedbackKind.RETRACTION}
    decided = {
        _decides(event): event
        for event in events
        if event.kind is FeedbackKind.REVIEW
        and event.value is not None
        and math.isfinite(event.value)
        and event.event_id not in gone
    }
    unique = {request.event_id: request for request in requests}
    ordered = sorted(unique.values(), key=lambda request: (request.event_time, request.event_id))
    return [_case(request, _latest(request, decided)) for request in ordered]


Place = tuple[str, str, str | None]
"""Policy, session and turn of a reply."""


def _decides(event: FeedbackEvent) -> str | Place:
    """The request that a review names, else the reply it stands on."""
    named = event.attributes.get(REVIEW_ATTRIBUTE)
    return (event.policy, event.session_id, event.turn_id) if named is None else named


def _latest(
    request: ReviewRequest, decided: Mapping[str | Place, FeedbackEvent]
) -> FeedbackEvent | None:
    on_its_reply = (request.policy, request.session_id, request.turn_id)
    found = [decided[by] for by in (request.event_id, on_its_reply) if by in decided]
    return max(found, key=lambda event: (event.event_time, event.event_id), default=None)


def _case(request: ReviewRequest, decision: FeedbackEvent | None) -> Case:
    if decision is None:
        return Case(request=request)
    return Case(
        request=request,
        state="upheld" if (decision.value or 0) > 0 else "rejected",
        decided_at=decision.event_time,
        actor=decision.attributes.get(ACTOR_ATTRIBUTE),
    )


def replies_of(request: ReviewRequest) -> tuple[tuple[str, str], ...]:
    """Session and turn of every reply that the request is about."""
    try:
        listed = json.loads(request.attributes.get(REPLIES_ATTRIBUTE, "[]"))
        found = {(str(session), str(turn)) for session, _, turn in listed}
    except (ValueError, TypeError):
        found = set()
    return tuple(sorted(found | {(request.session_id, request.turn_id)}))


def decide(
    request: ReviewRequest, *, uphold: bool, now_ms: int, actor: str | None = None
) -> tuple[FeedbackEvent, ...]:
    """The feedback that decides ``request``: one event on each reply it is about.

    It may be decided again, one way or the other; the latest decision counts.
    """
    attributes = {REVIEW_ATTRIBUTE: request.event_id}
    if actor:
        attributes[ACTOR_ATTRIBUTE] = actor
    return tuple(
        FeedbackEvent(
            event_id=_event_id(request, turn_id, uphold, now_ms),
            session_id=session_id,
            turn_id=turn_id,
            policy=request.policy,
            event_time=now_ms,
            kind=FeedbackKind.REVIEW,
            source=SOURCE,
            value=1.0 if uphold else -1.0,
            attributes=attributes,
        )
        for session_id, turn_id in replies_of(request)
    )


def _event_id(request: ReviewRequest, turn_id: str, uphold: bool, now_ms: int) -> str:
    identity = json.dumps([request.event_id, turn_id, uphold, now_ms])
    return f"review-{hashlib.sha256(identity.encode()).hexdigest()[:24]}"


def find(known: Sequence[Case], prefix: str) -> list[Case]:
    """The cases whose request's id starts with ``prefix``."""
    return [case for case in known if case.request.event_id.startswith(prefix)]


__all__ = [
    "ACTOR_ATTRIBUTE",
    "FILTER_ATTRIBUTE",
    "RATER_ATTRIBUTE",
    "REPLIES_ATTRIBUTE",
    "REVIEW_ATTRIBUTE",
    "UNTIL_DECIDED",
    "Case",
    "cases",
    "decide",
    "find",
    "replies_of",
]
