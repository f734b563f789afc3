"""Which reply feedback is about (ALIGNMENT §3). Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from processors.feedback_align.model import Feedback, Key, Life, Session, Turn, order
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


def resolve(session: Session, feedback: Feedback, settings: AlignSettings) -> Target | None:
    """The target of unpublished feedback, computed from what is held now.

    ``supersedes`` is followed from original to original until one is published (its target
    is fixed), has no original itself, or closes a circle; then back, each link taking the
    target of its original if it can see it, else its own. A circle counts as no original.
    What ids were found to name is noted in the facts (``own``, ``original``).

    Args:
        session: The session it belongs to.
        feedback: Open or pending.
        settings: The aligner's.
    """
    chain, found = _chain(session, feedback, settings)
    for link in reversed(chain):
        if found is None or not sees(link, found.turn, settings.horizon_ms):
            found = _own_target(session, link, settings)
    return found


def _chain(
    session: Session, feedback: Feedback, settings: AlignSettings
) -> tuple[list[Feedback], Target | None]:
    chain = [feedback]
    seen = {feedback.offset}
    while chain[-1].supersedes is not None:
        original = _original(session, chain[-1], settings.horizon_ms)
        if original is None or original.offset in seen:
            break
        if original.life is Life.PUBLISHED:
            assert original.target is not None
            assert original.attributed_by is not None
            return chain, Target(original.target, original.attributed_by)
        chain.append(original)
        seen.add(original.offset)
    return chain, None


def _original(session: Session, feedback: Feedback, horizon_ms: int) -> Feedback | None:
    """What ``supersedes`` names; what it was found to name first, while that can be seen."""
    known = feedback.original
    if known is not None and _usable(feedback, known, horizon_ms):
        return known
    assert feedback.supersedes is not None
    named = session.events.get(feedback.supersedes)
    if isinstance(named, Feedback) and (named.life in _HELD or named.life is Life.PUBLISHED):
        feedback.original = named
        return named
    feedback.original = None
    return None


def _usable(feedback: Feedback, original: Feedback, horizon_ms: int) -> bool:
    if original.life is Life.PUBLISHED:
        return original.target is not None and sees(feedback, original.target, horizon_ms)
    return original.life in _HELD


def _own_target(session: Session, feedback: Feedback, settings: AlignSettings) -> Target | None:
    if feedback.turn_id is not None:
        turn = _named(session, feedback, settings.horizon_ms)
        return Target(turn, AttributedBy.TURN_ID) if turn is not None else None
    if feedback.supersedes is not None:
        return None
    turn = _latest_before(session, feedback, settings)
    return Target(turn, AttributedBy.TIME) if turn is not None else None


def _named(session: Session, feedback: Feedback, horizon_ms: int) -> Turn | None:
    """The reply its turn id names; the one it was found to name first, while visible."""
    if feedback.own is None or not sees(feedback, feedback.own, horizon_ms):
        assert feedback.turn_id is not None
        turn = session.turn_ids.get(feedback.turn_id)
        fits = turn is not None and turn.reply and sees(feedback, turn, horizon_ms)
        feedback.own = turn if fits else None
    return feedback.own


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
