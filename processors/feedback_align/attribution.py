"""Which reply feedback is about (ALIGNMENT §3). Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from processors.feedback_align.model import Fact, Feedback, Key, Life, Session, Turn, order
from streams.contracts import AttributedBy
from streams.settings import AlignSettings

_HELD = (Life.OPEN, Life.PENDING)


@dataclass(frozen=True, slots=True)
class Target:
    """A reply, and how it was found."""

    turn: Turn
    attributed_by: AttributedBy


def sees(feedback: Feedback, turn: Turn, horizon_ms: int) -> bool:
    """Whether a turn is held, and visible to this feedback by its arrival."""
    if turn.life is Life.PUBLISHED:
        assert turn.segment is not None
        return turn.segment.visible_at(feedback.key[1], horizon_ms)
    return turn.life in _HELD


Memo = dict[int, Target | None]
"""Targets already computed, by offset, of feedback that stands in no circle."""


def resolve(
    session: Session, feedback: Feedback, settings: AlignSettings, memo: Memo | None = None
) -> Target | None:
    """The target of unpublished feedback, computed from what is held now.

    ``supersedes`` is followed from original to original until one is published (its target
    is fixed), has no original itself, or closes a circle; then back, each link taking the
    target of its original if it can see it, else its own. A circle counts as no original.

    Args:
        session: The session it belongs to.
        feedback: Open or pending.
        settings: The aligner's.
        memo: Shared by calls between which no event is accepted, published or dies.
    """
    memo = {} if memo is None else memo
    chain, found, circle = _chain(session, feedback, settings, memo)
    for index in range(len(chain) - 1, -1, -1):
        link = chain[index]
        if found is None or not sees(link, found.turn, settings.horizon_ms):
            found = _own_target(session, link, settings)
        if index < circle:
            memo[link.offset] = found
    return found


def resolve_new(session: Session, feedback: Feedback, settings: AlignSettings) -> Target | None:
    """As :func:`resolve`, for feedback just accepted: all others have their targets.

    What nothing waits for changes nobody's target, and stands in no circle.
    """
    if feedback.supersedes is None or feedback.event_id in session.superseders:
        return resolve(session, feedback, settings)
    original = _original(session, feedback)
    if original is None or original.life is Life.PUBLISHED:
        return resolve(session, feedback, settings)
    return resolve(session, feedback, settings, {original.offset: _stored(original)})


def _stored(feedback: Feedback) -> Target | None:
    if feedback.target is None or feedback.attributed_by is None:
        return None
    return Target(feedback.target, feedback.attributed_by)


def _chain(
    session: Session, feedback: Feedback, settings: AlignSettings, memo: Memo
) -> tuple[list[Feedback], Target | None, int]:
    """From feedback to original, what the last one's original gives, and where a circle begins.

    Results from the circle on depend on where it was entered, so only those before are kept.
    """
    chain = [feedback]
    seen = {feedback.offset: 0}
    while chain[-1].supersedes is not None:
        original = _original(session, chain[-1])
        if original is None:
            break
        if original.offset in seen:
            return chain, None, seen[original.offset]
        if original.life is Life.PUBLISHED:
            return chain, _stored(original), len(chain)
        if original.offset in memo:
            return chain, memo[original.offset], len(chain)
        seen[original.offset] = len(chain)
        chain.append(original)
    return chain, None, len(chain)


def _original(session: Session, feedback: Feedback) -> Feedback | None:
    """What ``supersedes`` names; the newest, if an id was used again after its horizon."""
    assert feedback.supersedes is not None
    named = session.events.get(feedback.supersedes)
    if isinstance(named, Feedback):
        return named if named.life in _HELD or named.life is Life.PUBLISHED else None
    return max(
        (item for item in _all_feedback(session) if item.event_id == feedback.supersedes),
        key=_log_order,
        default=None,
    )


def _all_feedback(session: Session) -> Iterator[Feedback]:
    """Feedback that is open, pending or published, and not forgotten."""
    yield from session.unpublished.values()
    for segment in (*session.fading, *session.segments):
        yield from segment.feedback


def _own_target(session: Session, feedback: Feedback, settings: AlignSettings) -> Target | None:
    if feedback.turn_id is not None:
        turn = _named(session, feedback, settings.horizon_ms)
        return Target(turn, AttributedBy.TURN_ID) if turn is not None else None
    if feedback.supersedes is not None:
        return None
    turn = _latest_before(session, feedback, settings)
    return Target(turn, AttributedBy.TIME) if turn is not None else None


def _named(session: Session, feedback: Feedback, horizon_ms: int) -> Turn | None:
    """The visible reply its turn id names; the newest, if an id was used again."""
    turn = session.turn_ids.get(feedback.turn_id or "")
    if turn is not None and turn.reply and sees(feedback, turn, horizon_ms):
        return turn
    return max(
        (
            turn
            for turn in session.turns
            if turn.turn_id == feedback.turn_id and turn.reply and sees(feedback, turn, horizon_ms)
        ),
        key=_log_order,
        default=None,
    )


def _log_order(fact: Fact) -> Key:
    return fact.key[1:]


def _latest_before(session: Session, feedback: Feedback, settings: AlignSettings) -> Turn | None:
    event_time = feedback.key[0]
    earliest = event_time - settings.attribution_window_ms
    turns = session.turns
    later: Key = (event_time + 1,)
    for index in range(bisect_left(turns, later, key=order) - 1, -1, -1):
        turn = turns[index]
        if turn.key[0] < earliest:
            return None
        if turn.reply and sees(feedback, turn, settings.horizon_ms):
            return turn
    return None


def touched_by_reply(session: Session, reply: Turn, settings: AlignSettings) -> list[Feedback]:
    """Unpublished feedback whose target a new reply may change."""
    event_time = reply.key[0]
    window = settings.attribution_window_ms
    found = []
    for feedback in session.unpublished.values():
        if feedback.turn_id is not None:
            if feedback.turn_id == reply.turn_id:
                found.append(feedback)
        elif feedback.supersedes is None and 0 <= feedback.key[0] - event_time <= window:
            found.append(feedback)
    return with_superseders(session, found) if found else found


def with_superseders(session: Session, feedback: Iterable[Feedback]) -> list[Feedback]:
    """These and all unpublished feedback that supersedes them, at any remove."""
    found = {item.offset: item for item in feedback}
    todo = list(found.values())
    while todo:
        for follower in session.superseders.get(todo.pop().event_id, {}).values():
            if follower.offset not in found:
                found[follower.offset] = follower
                todo.append(follower)
    return list(found.values())
