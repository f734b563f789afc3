"""What is remembered of one user, and how it is written: a note for each of their segments.

A user's history changes with each of their segments, and little of it: so it is not written as a
whole, but cut into *notes*, one for each segment that it still says something of. A note has what
its segment's latest revision showed, without what all of it has in common.

Pure: no clock, no randomness, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from processors.reward.credibility import (
    Decision,
    History,
    Opinion,
    RequestPlace,
    decision_order,
    opinion_order,
)
from streams.contracts import FeedbackKind


class UserKey(Struct, frozen=True, order=True, gc=False):
    """Whose history: the policy and the record key (a user id, else a session id)."""

    policy: str
    key: str


class NoteKey(Struct, frozen=True, order=True, gc=False):
    """A note: whose, and of which segment."""

    policy: str
    key: str
    segment_id: str


class Mark(Struct, frozen=True, kw_only=True, gc=False):
    """The latest revision of a segment that was scored, and when it closed."""

    segment_id: str
    revision: int
    closed_at: int


class UserHistory(Struct, frozen=True, kw_only=True, gc=False):
    """What is remembered of one key.

    Args:
        clock_ms: The largest ``closed_at`` seen under this key.
        marks: Scored segments, by closing time, oldest first.
        history: Ratings, decisions and claims.
    """

    clock_ms: int = 0
    marks: tuple[Mark, ...] = ()
    history: History = History()


class NotedOpinion(Struct, frozen=True, array_like=True, gc=False):
    """An ``Opinion`` without what its note says; ``request`` in the order of ``RequestPlace``."""

    event_id: str
    turn_id: str
    rater: str
    value: float
    event_time: int
    user_id: str | None
    request: tuple[str, str, str] | None
    anomaly: tuple[str, str] | None
    suspended: str | None
    kind: FeedbackKind | None = None


class NotedDecision(Struct, frozen=True, array_like=True, gc=False):
    """A ``Decision`` without what its note says."""

    event_id: str
    turn_id: str
    upheld: bool
    event_time: int
    request_id: str | None


class Note(Struct, frozen=True, array_like=True, gc=False):
    """What is remembered of one segment.

    Args:
        clock_ms: The key's clock when this was written. The newest note has the newest.
        closed_at: When the revision closed that is remembered, ms.
        revision: Its number; None if only ratings or decisions are remembered.
        session_id: The segment's session; empty if there are neither ratings nor claims.
        opinions: The ratings it showed, in order of event time.
        decisions: The reviews it showed, in order of event time.
        claims: Other feedback that it showed, in order of event time.
    """

    clock_ms: int
    closed_at: int
    revision: int | None
    session_id: str
    opinions: tuple[NotedOpinion, ...]
    decisions: tuple[NotedDecision, ...]
    claims: tuple[NotedOpinion, ...] = ()


def mark_order(mark: Mark) -> tuple[int, str]:
    """By closing time."""
    return mark.closed_at, mark.segment_id


def segments_of(user: UserHistory) -> set[str]:
    """The segments that ``user`` has notes of."""
    history = user.history
    return _segments((*user.marks, *history.opinions, *history.decisions, *history.claims))


def _segments(items: Iterable[Mark | Opinion | Decision]) -> set[str]:
    return {item.segment_id for item in items}


def touched(before: UserHistory, after: UserHistory) -> set[str]:
    """The segments whose notes differ between two histories of one key.

    What did not change must be the same object in both.
    """
    return (
        _differ(before.marks, after.marks)
        | _differ(before.history.opinions, after.history.opinions)
        | _differ(before.history.decisions, after.history.decisions)
        | _differ(before.history.claims, after.history.claims)
    )


def _differ(
    before: tuple[Mark | Opinion | Decision, ...], after: tuple[Mark | Opinion | Decision, ...]
) -> set[str]:
    if before is after:
        return set()
    old, new = set(map(id, before)), set(map(id, after))
    return _segments(item for item in before if id(item) not in new) | _segments(
        item for item in after if id(item) not in old
    )


def note_of(user: UserHistory, segment_id: str) -> Note | None:
    """What ``user`` remembers of a segment; None if that is nothing."""
    marks = [mark for mark in user.marks if mark.segment_id == segment_id]
    opinions = [o for o in user.history.opinions if o.segment_id == segment_id]
    decisions = [d for d in user.history.decisions if d.segment_id == segment_id]
    claims = [c for c in user.history.claims if c.segment_id == segment_id]
    # All of a segment is replaced with each revision, so one time is that of all.
    found: list[Mark | Opinion | Decision] = [*marks, *opinions, *decisions, *claims]
    if not found:
        return None
    return Note(
        clock_ms=user.clock_ms,
        closed_at=found[0].closed_at,
        revision=marks[0].revision if marks else None,
        session_id=next((o.session_id for o in (*opinions, *claims)), ""),
        opinions=tuple(map(_noted, opinions)),
        decisions=tuple(
            NotedDecision(d.event_id, d.turn_id, d.upheld, d.event_time, d.request_id)
            for d in decisions
        ),
        claims=tuple(map(_noted, claims)),
    )


def _noted(opinion: Opinion) -> NotedOpinion:
    place = opinion.request
    return NotedOpinion(
        event_id=opinion.event_id,
        turn_id=opinion.turn_id,
        rater=opinion.rater,
        value=opinion.value,
        event_time=opinion.event_time,
        user_id=opinion.user_id,
        request=None if place is None else (place.event_id, place.segment_id, place.turn_id),
        anomaly=opinion.anomaly,
        suspended=opinion.suspended,
        kind=opinion.kind,
    )


def joined(notes: Mapping[str, Note]) -> UserHistory:
    """The history of which these, by segment, are all the notes."""
    marks = [
        Mark(segment_id=segment_id, revision=note.revision, closed_at=note.closed_at)
        for segment_id, note in notes.items()
        if note.revision is not None
    ]
    opinions = [o for s, note in notes.items() for o in _opinions(s, note, note.opinions)]
    claims = [c for s, note in notes.items() for c in _opinions(s, note, note.claims)]
    decisions = [d for segment_id, note in notes.items() for d in _decisions(segment_id, note)]
    return UserHistory(
        clock_ms=max(note.clock_ms for note in notes.values()),
        marks=tuple(sorted(marks, key=mark_order)),
        history=History(
            opinions=tuple(sorted(opinions, key=opinion_order)),
            decisions=tuple(sorted(decisions, key=decision_order)),
            claims=tuple(sorted(claims, key=opinion_order)),
        ),
    )


def _opinions(segment_id: str, note: Note, of: Iterable[NotedOpinion]) -> Iterable[Opinion]:
    for noted in of:
        place = noted.request
        yield Opinion(
            event_id=noted.event_id,
            segment_id=segment_id,
            session_id=note.session_id,
            turn_id=noted.turn_id,
            rater=noted.rater,
            value=noted.value,
            event_time=noted.event_time,
            closed_at=note.closed_at,
            user_id=noted.user_id,
            request=None
            if place is None
            else RequestPlace(event_id=place[0], segment_id=place[1], turn_id=place[2]),
            anomaly=noted.anomaly,
            suspended=noted.suspended,
            kind=noted.kind,
        )


def _decisions(segment_id: str, note: Note) -> Iterable[Decision]:
    for noted in note.decisions:
        yield Decision(
            event_id=noted.event_id,
            segment_id=segment_id,
            turn_id=noted.turn_id,
            upheld=noted.upheld,
            event_time=noted.event_time,
            closed_at=note.closed_at,
            request_id=noted.request_id,
        )


__all__ = [
    "Mark",
    "Note",
    "NoteKey",
    "UserHistory",
    "UserKey",
    "joined",
    "mark_order",
    "note_of",
    "segments_of",
    "touched",
]
