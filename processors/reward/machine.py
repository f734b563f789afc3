"""The reward processor's decisions: segments in, scored segments and review requests out.

Theory of operation. ``step`` takes one segment of one partition of ``trajectory.segments``
and returns what to do about it. Per (policy, record key) it remembers which revision of which
segment it scored, and the rating history that credibility needs::

    revision known or lower   nothing
    revision new              history amended -> new feedback counted in the crowd -> reviews
                              -> credibility -> EmitScored, and an EmitReview for each row or
                              anomaly nobody was asked about yet, and what was Observed

Time is the segments' own ``closed_at``; there is no wall clock. Of a key's own history, what
closed more than ``history_ms`` before its newest segment is dropped at its next segment. A key
is forgotten once the partition's newest ``closed_at`` is ``FORGET_AFTER`` histories ahead of
it. By then nothing of it could count any more, as long as two users' segments in one partition
are at most one history (30 days) out of order; so, with the filters over many users off
(``processors.reward.crowd``), a user's output depends on their own segments alone. With them on
it depends on the partition's log up to there.

Pure: no clock, no randomness, no I/O.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from processors.reward import crowd
from processors.reward.credibility import (
    History,
    amend,
    judge,
    mark_anomalies,
    new_feedback,
    request_reviews,
    shown,
    suspend,
    trim,
    turned_negative,
)
from processors.reward.crowd import RATING, Crowd, CrowdKey, NewFeedback
from processors.reward.formulas import Credibility, score_segment
from processors.reward.plugins import NO_PLUGINS, Plugins
from processors.reward.signals import words
from processors.reward.users import (
    Mark,
    Note,
    NoteKey,
    UserHistory,
    UserKey,
    joined,
    mark_order,
    note_of,
    segments_of,
    touched,
)
from streams.contracts import ReviewRequest, ScoredSegment, TrajectorySegment
from streams.settings import RewardSettings

FORGET_AFTER = 2
"""Multiples of ``history_ms`` after which a silent key is forgotten."""

SWEEPS_PER_HISTORY = 16
"""How often, per ``history_ms`` of closing time, silent keys are looked for."""


class EmitScored(Struct, frozen=True, gc=False):
    """Produce ``scored`` to ``trajectory.scored`` under ``key``."""

    scored: ScoredSegment
    key: str


class EmitReview(Struct, frozen=True, gc=False):
    """Produce ``review`` to ``reward.reviews`` under ``key``."""

    review: ReviewRequest
    key: str


class Observed(Struct, frozen=True, gc=False):
    """What monitoring should see of a segment, before any filter.

    Args:
        policy: Whose replies were rated.
        ratings: Of each new rating, its sign (-1, 0, 1) and its source.
        held: The filter of each new rating that does not count in full.
        held_claims: The filter and the kind of other new feedback that is held.
        alarm: Why the filters of single users were suspended just now; None if they were not.
    """

    policy: str
    ratings: tuple[tuple[int, str], ...]
    held: tuple[str, ...]
    held_claims: tuple[tuple[str, str], ...] = ()
    alarm: str | None = None


Effect = EmitScored | EmitReview | Observed
StateKey = UserKey | NoteKey | CrowdKey
StateEntry = UserHistory | Note | crowd.Entry


@dataclass(slots=True)
class RewardState:
    """The state of one partition. Only ``step`` and ``take_changes`` change it.

    Args:
        users: What is remembered of users, by key.
        crowd: What is remembered of all of them together.
        clock_ms: The largest ``closed_at`` seen in the partition.
    """

    users: dict[UserKey, UserHistory] = field(default_factory=dict)
    crowd: Crowd = field(default_factory=Crowd)
    clock_ms: int = 0
    _touched: dict[UserKey, set[str]] = field(default_factory=dict, repr=False)
    _forgotten: set[StateKey] = field(default_factory=set, repr=False)
    _whole: set[UserKey] = field(default_factory=set, repr=False)
    """Users of whom an earlier version wrote the whole history as one entry."""


def restore(entries: Iterable[tuple[StateKey, StateEntry]]) -> RewardState:
    """The state that these entries, the last one for each key, make up."""
    state = RewardState()
    notes: dict[UserKey, dict[str, Note]] = {}
    for key, entry in entries:
        match key, entry:
            case NoteKey(policy, who, segment_id), Note():
                notes.setdefault(UserKey(policy, who), {})[segment_id] = entry
            case UserKey(), UserHistory():
                state.users[key] = entry
                state._whole.add(key)
            case CrowdKey(), _ if not isinstance(entry, UserHistory | Note):
                state.crowd.entries[key] = entry
    state.users.update((who, joined(of_user)) for who, of_user in notes.items())
    state.clock_ms = max((user.clock_ms for user in state.users.values()), default=0)
    return state


def record_key(segment: TrajectorySegment) -> str:
    """The key of the segment's records, in and out: its user, else its session."""
    return segment.user_id or segment.session_id


def step(
    state: RewardState,
    segment: TrajectorySegment,
    settings: RewardSettings,
    plugins: Plugins = NO_PLUGINS,
) -> tuple[RewardState, tuple[Effect, ...]]:
    """Score ``segment`` unless this revision of it, or a later one, was scored before.

    Args:
        state: The partition's state; it is changed in place and must not be used otherwise.
        segment: The next record of the partition.
        settings: The weights and filters.
        plugins: Signals and components of other packages.

    Returns:
        The state, and what to do: one ``EmitScored``, then any ``EmitReview``, then an
        ``Observed`` if there are new ratings or something new is held; or nothing.
    """
    who = UserKey(segment.policy, record_key(segment))
    user = state.users.get(who, UserHistory())
    if _is_known(user, segment):
        return state, ()
    clock_ms = max(user.clock_ms, segment.closed_at)
    since_ms = clock_ms - settings.history_ms
    at_most = settings.history_ratings
    marks = _marks(user, segment, since_ms, settings)
    known = {mark.segment_id for mark in marks}
    before = trim(user.history, since_ms=since_ms, at_most=at_most, recalled=known)
    replies = shown(segment)
    new = new_feedback(before, segment, replies, settings)
    history = amend(before, segment, replies)
    history, alarm = _look_around(state.crowd, history, segment, new, settings)
    history, requests = request_reviews(history, segment, settings)
    beliefs = judge(history, segment.segment_id, settings)
    repeated = _repeated(state.crowd, segment, settings)
    scored = score_segment(segment, settings, beliefs, repeated, plugins)
    remembered = UserHistory(
        clock_ms=clock_ms,
        marks=marks,
        history=trim(history, since_ms=since_ms, at_most=at_most, recalled=known),
    )
    _remember(state, who, user, remembered)
    _advance(state, segment.closed_at, settings)
    effects: list[Effect] = [EmitScored(scored, who.key)]
    effects += [EmitReview(request, who.key) for request in requests]
    seen = _observed(segment.policy, new, beliefs, alarm)
    if seen is not None:
        effects.append(seen)
    return state, tuple(effects)


def _observed(
    policy: str,
    new: Sequence[NewFeedback],
    beliefs: Mapping[str, Credibility],
    alarm: str | None,
) -> Observed | None:
    if not new:
        return None
    held = [
        (item, belief.filter)
        for item in new
        if (belief := beliefs.get(item.feedback.event_id)) is not None and belief.weight < 1.0
    ]
    seen = Observed(
        policy,
        tuple(((r.value > 0) - (r.value < 0), r.feedback.source) for r in new if r.sort == RATING),
        tuple(name for item, name in held if item.sort == RATING),
        tuple((name, item.feedback.kind.value) for item, name in held if item.sort != RATING),
        alarm,
    )
    return seen if seen.ratings or seen.held_claims else None


def _look_around(
    around: Crowd,
    history: History,
    segment: TrajectorySegment,
    new: Sequence[NewFeedback],
    settings: RewardSettings,
) -> tuple[History, str | None]:
    """Note on new feedback what it is in the light of all other; and whether to raise alarm."""
    if not new:
        return history, None
    policy, closed_at = segment.policy, segment.closed_at
    held = crowd.observe(around, policy, closed_at, new, settings)
    history = mark_anomalies(history, segment.segment_id, held)
    raters = {
        item.feedback.event_id: item.rater for item in new if item.sort == RATING and not item.guest
    }
    if not raters:
        return history, None
    turned = turned_negative(history, segment.segment_id, raters, settings)
    who = dict.fromkeys(raters[event_id] for event_id in turned)
    cohort = crowd.turn(around, policy, closed_at, who, settings)
    if cohort.suspended:
        fresh = [event_id for event_id in raters if event_id not in held]
        history = suspend(history, segment.segment_id, fresh, cohort.reason)
    return history, cohort.reason if cohort.raised else None


def _repeated(
    around: Crowd, segment: TrajectorySegment, settings: RewardSettings
) -> dict[str, int]:
    if settings.weight_diversity <= 0:
        return {}
    replies = {step.turn_id: words(step.reply) for step in segment.steps}
    return crowd.repeated(
        around, segment.policy, segment.session_id, segment.closed_at, replies, settings
    )


def take_changes(state: RewardState) -> tuple[dict[StateKey, StateEntry], frozenset[StateKey]]:
    """What changed since the last call: entries to write, and keys to delete.

    Together with what was written before, they restore the state (``restore``).
    """
    around = state.crowd
    changed: dict[StateKey, StateEntry] = {}
    forgotten: set[StateKey] = state._forgotten | around.forgotten
    for who in sorted(state._touched):
        user = state.users[who]
        for segment_id in sorted(state._touched[who]):
            key, note = NoteKey(who.policy, who.key, segment_id), note_of(user, segment_id)
            if note is None:
                forgotten.add(key)
            else:
                changed[key] = note
                forgotten.discard(key)
    changed.update((key, around.entries[key]) for key in sorted(around.changed))
    for changes in (state._touched, state._forgotten, around.changed, around.forgotten):
        changes.clear()
    return changed, frozenset(forgotten)


def _is_known(user: UserHistory, segment: TrajectorySegment) -> bool:
    for mark in user.marks:
        if mark.segment_id == segment.segment_id and mark.revision >= segment.revision:
            return True
    return False


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
    insort(kept, new, key=mark_order)
    return tuple(kept[-settings.history_segments :])


def _remember(state: RewardState, who: UserKey, before: UserHistory, user: UserHistory) -> None:
    state.users[who] = user
    changed = touched(before, user)
    if _drop_whole(state, who):
        changed |= segments_of(before) | segments_of(user)
    state._touched.setdefault(who, set()).update(changed)


def _forget(state: RewardState, who: UserKey) -> None:
    user = state.users.pop(who)
    gone = segments_of(user) | state._touched.pop(who, set())
    state._forgotten.update(NoteKey(who.policy, who.key, segment_id) for segment_id in gone)
    _drop_whole(state, who)


def _drop_whole(state: RewardState, who: UserKey) -> bool:
    """Delete what an earlier version wrote of a user as one entry; whether there is any."""
    if who not in state._whole:
        return False
    state._whole.discard(who)
    state._forgotten.add(who)
    return True


def _advance(state: RewardState, closed_at: int, settings: RewardSettings) -> None:
    """Move the partition's clock, and forget silent keys whenever a sweep falls due."""
    before, state.clock_ms = state.clock_ms, max(state.clock_ms, closed_at)
    if before // settings.crowd_window_ms != state.clock_ms // settings.crowd_window_ms:
        crowd.sweep(state.crowd, state.clock_ms, settings)
    interval_ms = max(1, settings.history_ms // SWEEPS_PER_HISTORY)
    if before // interval_ms == state.clock_ms // interval_ms:
        return
    oldest_ms = state.clock_ms - FORGET_AFTER * settings.history_ms
    for who in [who for who, user in state.users.items() if user.clock_ms < oldest_ms]:
        _forget(state, who)


__all__ = [
    "Effect",
    "EmitReview",
    "EmitScored",
    "Observed",
    "RewardState",
    "StateEntry",
    "StateKey",
    "record_key",
    "restore",
    "step",
    "take_changes",
]
