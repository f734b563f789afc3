"""The reward processor's decisions: segments in, scored segments and review requests out.

Theory of operation. ``step`` takes one segment of one partition of ``trajectory.segments``
and returns what to do about it. Per (policy, record key) it remembers which revision of which
segment it scored, and the rating history that credibility needs::

    revision known or lower   nothing
    revision new              history amended -> rows to review -> credibility -> EmitScored
                              and an EmitReview for each row nobody was asked about yet

Time is the segments' own ``closed_at``; there is no wall clock. Of a key's own history, what
closed more than ``history_ms`` before its newest segment is dropped at its next segment. A key
is forgotten once the partition's newest ``closed_at`` is ``FORGET_AFTER`` histories ahead of
it. By then nothing of it could count any more, as long as two users' segments in one partition
are at most one history (30 days) out of order; so a user's output depends on their own segments
alone.

Pure: no clock, no randomness, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from processors.reward.credibility import History, amend, judge, request_reviews, trim
from processors.reward.formulas import score_segment
from streams.contracts import ReviewRequest, ScoredSegment, TrajectorySegment
from streams.settings import RewardSettings

FORGET_AFTER = 2
"""Multiples of ``history_ms`` after which a silent key is forgotten."""

SWEEPS_PER_HISTORY = 16
"""How often, per ``history_ms`` of closing time, silent keys are looked for."""


@dataclass(frozen=True, slots=True, order=True)
class UserKey:
    """Whose history: the policy and the record key (a user id, else a session id)."""

    policy: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The latest revision of a segment that was scored, and when it closed."""

    segment_id: str
    revision: int
    closed_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UserHistory:
    """What is remembered of one key.

    Args:
        clock_ms: The largest ``closed_at`` seen under this key.
        marks: Scored segments, by closing time, oldest first.
        history: Ratings and decisions.
    """

    clock_ms: int = 0
    marks: tuple[Mark, ...] = ()
    history: History = field(default_factory=History)


@dataclass(frozen=True, slots=True)
class EmitScored:
    """Produce ``scored`` to ``trajectory.scored`` under ``key``."""

    scored: ScoredSegment
    key: str


@dataclass(frozen=True, slots=True)
class EmitReview:
    """Produce ``review`` to ``reward.reviews`` under ``key``."""

    review: ReviewRequest
    key: str


Effect = EmitScored | EmitReview


@dataclass(slots=True)
class RewardState:
    """The state of one partition. Only ``step`` and ``take_changes`` change it.

    Args:
        users: What is remembered, by key.
        clock_ms: The largest ``closed_at`` seen in the partition.
    """

    users: dict[UserKey, UserHistory] = field(default_factory=dict)
    clock_ms: int = 0
    _changed: set[UserKey] = field(default_factory=set, repr=False)
    _forgotten: set[UserKey] = field(default_factory=set, repr=False)


def restore(entries: Iterable[tuple[UserKey, UserHistory]]) -> RewardState:
    """The state that these entries, the last one for each key, make up."""
    users = dict(entries)
    return RewardState(
        users=users, clock_ms=max((user.clock_ms for user in users.values()), default=0)
    )


def record_key(segment: TrajectorySegment) -> str:
    """The key of the segment's records, in and out: its user, else its session."""
    return segment.user_id or segment.session_id


def step(
    state: RewardState, segment: TrajectorySegment, settings: RewardSettings
) -> tuple[RewardState, tuple[Effect, ...]]:
    """Score ``segment`` unless this revision of it, or a later one, was scored before.

    Args:
        state: The partition's state; it is changed in place and must not be used otherwise.
        segment: The next record of the partition.
        settings: The weights and filters.

    Returns:
        The state, and what to produce: one ``EmitScored`` before any ``EmitReview``, or nothing.
    """
    who = UserKey(segment.policy, record_key(segment))
    user = state.users.get(who, UserHistory())
    if _is_known(user, segment):
        return state, ()
    clock_ms = max(user.clock_ms, segment.closed_at)
    since_ms = clock_ms - settings.history_ms
    at_most = settings.history_ratings
    amended = amend(trim(user.history, since_ms=since_ms, at_most=at_most), segment)
    history, requests = request_reviews(amended, segment, settings)
    scored = score_segment(segment, settings, judge(history, segment.segment_id, settings))
    remembered = UserHistory(
        clock_ms=clock_ms,
        marks=_marks(user, segment, since_ms, settings),
        history=trim(history, since_ms=since_ms, at_most=at_most),
    )
    _remember(state, who, remembered)
    _advance(state, segment.closed_at, settings)
    emitted = EmitScored(scored, who.key)
    return state, (emitted, *(EmitReview(request, who.key) for request in requests))


def take_changes(state: RewardState) -> tuple[dict[UserKey, UserHistory], frozenset[UserKey]]:
    """What changed since the last call: entries to write, and keys to delete.

    Together with what was written before, they restore the state (``restore``).
    """
    changed = {who: state.users[who] for who in sorted(state._changed, key=_order)}
    forgotten = frozenset(state._forgotten)
    state._changed.clear()
    state._forgotten.clear()
    return changed, forgotten


def _order(who: UserKey) -> tuple[str, str]:
    return who.policy, who.key


def _is_known(user: UserHistory, segment: TrajectorySegment) -> bool:
    return any(
        mark.segment_id == segment.segment_id and mark.revision >= segment.revision
        for mark in user.marks
    )


def _marks(
    user: UserHistory, segment: TrajectorySegment, since_ms: int, settings: RewardSettings
) -> tuple[Mark, ...]:
    new = Mark(
        segment_id=segment.segment_id, revision=segment.revision, closed_at=segment.closed_at
    )
    kept = [
        mark
        for mark in user.marks
        if mark.segment_id != segment.segment_id and mark.closed_at >= since_ms
    ]
    ordered = sorted((*kept, new), key=lambda mark: (mark.closed_at, mark.segment_id))
    return tuple(ordered[-settings.history_segments :])


def _remember(state: RewardState, who: UserKey, user: UserHistory) -> None:
    state.users[who] = user
    state._changed.add(who)
    state._forgotten.discard(who)


def _advance(state: RewardState, closed_at: int, settings: RewardSettings) -> None:
    """Move the partition's clock, and forget silent keys whenever a sweep falls due."""
    before, state.clock_ms = state.clock_ms, max(state.clock_ms, closed_at)
    interval_ms = max(1, settings.history_ms // SWEEPS_PER_HISTORY)
    if before // interval_ms == state.clock_ms // interval_ms:
        return
    oldest_ms = state.clock_ms - FORGET_AFTER * settings.history_ms
    for who in [who for who, user in state.users.items() if user.clock_ms < oldest_ms]:
        del state.users[who]
        state._changed.discard(who)
        state._forgotten.add(who)


__all__ = [
    "Effect",
    "EmitReview",
    "EmitScored",
    "Mark",
    "RewardState",
    "UserHistory",
    "UserKey",
    "record_key",
    "restore",
    "step",
    "take_changes",
]
