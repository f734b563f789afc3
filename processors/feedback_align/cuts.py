"""Where runs are cut, and when what is cut is due (ALIGNMENT §5 to §7). Pure."""

from __future__ import annotations

from collections.abc import Iterable

from processors.feedback_align.model import NEVER, Feedback, Life, Pending, Piece, Run, Turn
from streams.contracts import ClosedBy, Role
from streams.settings import AlignSettings


def fold(piece: Piece, turn: Turn, settings: AlignSettings) -> bool:
    """Let the next turn of the run into an open-ended piece, or end the piece before it.

    Args:
        piece: Open-ended; changed in place.
        turn: The run's turn after the piece's last.
        settings: The aligner's.

    Returns:
        Whether the turn is part of the piece (which may end after it).
    """
    event_time = turn.key[0]
    if piece.count:
        piece.ended_by = _cut_before(piece, turn, event_time, settings)
        if piece.ended_by is not None:
            return False
    else:
        piece.first_event_time = event_time
        piece.first_stamp = turn.stamp
        piece.first_arrival = turn.key[1]
    _add(piece, turn, event_time)
    piece.ended_by = _cut_after(piece, turn, settings)
    return True


def _cut_before(
    piece: Piece, turn: Turn, event_time: int, settings: AlignSettings
) -> ClosedBy | None:
    answer = turn.main and (turn.role is Role.ASSISTANT or turn.role is Role.TOOL)
    if event_time - piece.last_event_time > settings.gap_ms and not answer:
        return ClosedBy.GAP
    if event_time - piece.first_event_time > settings.max_open_ms:
        return ClosedBy.DURATION
    return None


def _add(piece: Piece, turn: Turn, event_time: int) -> None:
    piece.count += 1
    piece.last_event_time = event_time
    piece.first_arrival = min(piece.first_arrival, turn.key[1])
    piece.latest_stamp = max(piece.latest_stamp, turn.stamp)
    if turn.main:
        piece.size += turn.size
        piece.replies += turn.reply
        piece.answered = turn.reply


def _cut_after(piece: Piece, turn: Turn, settings: AlignSettings) -> ClosedBy | None:
    if turn.session_done:
        return ClosedBy.END
    full = piece.replies >= settings.max_steps or piece.size >= settings.max_bytes
    return ClosedBy.SIZE if turn.reply and full else None


def first_piece(turns: Iterable[Turn], settings: AlignSettings) -> Piece:
    """The first piece of a run, without the feedback that targets it."""
    piece = Piece()
    for turn in turns:
        if not fold(piece, turn, settings) or piece.ended_by is not None:
            break
    return piece


def refold(run: Run, unpublished: Iterable[Feedback], settings: AlignSettings) -> None:
    """Compute a run's first piece anew, with the feedback that targets it."""
    run.piece = first_piece(run.turns, settings)
    run.stale = False
    for feedback in unpublished:
        note_feedback(run, feedback)


def note_feedback(run: Run, feedback: Feedback) -> None:
    """Count feedback in the run's first piece, if it targets a turn there."""
    target = feedback.target
    if target is None or target.life is not Life.OPEN:
        return
    if run.turns[0].key <= target.key <= run.turns[run.piece.count - 1].key:
        run.piece.feedback_stamp = max(run.piece.feedback_stamp, feedback.stamp)


def natural_due(piece: Piece, settings: AlignSettings) -> int:
    """When everything in the piece, and about it, has settled (ALIGNMENT §6, natural)."""
    due = max(piece.latest_stamp, piece.feedback_stamp) + settings.settle_ms
    if piece.ended_by is None:
        wait = settings.gap_ms if piece.answered else settings.max_open_ms
        return max(due, piece.latest_stamp + wait)
    if piece.ended_by is ClosedBy.GAP:
        return max(due, piece.latest_stamp + settings.gap_ms)
    return due


def close_due(piece: Piece, settings: AlignSettings) -> int:
    """When the piece closes: min(natural, forced) (ALIGNMENT §6)."""
    ripe = piece.first_stamp + settings.settle_ms
    forced = max(piece.first_arrival + settings.max_open_ms, ripe)
    return min(natural_due(piece, settings), forced)


def count_pending(pending: Pending, fact: Turn | Feedback, settings: AlignSettings) -> None:
    """Let one more pending event into the sums."""
    ready = fact.stamp
    if isinstance(fact, Feedback) and fact.target is not None:
        waits = fact.target.life is Life.PENDING
        ready = max(ready, fact.target.stamp) if waits else ready
    ready += settings.settle_ms
    arrival = fact.key[1]
    if pending.latest_stamp == NEVER:
        pending.first_arrival = arrival
        pending.ready_ms = ready
    pending.latest_stamp = max(pending.latest_stamp, fact.stamp)
    pending.first_arrival = min(pending.first_arrival, arrival)
    pending.ready_ms = min(pending.ready_ms, ready)


def recount_pending(pending: Pending, settings: AlignSettings) -> None:
    """Compute the sums of what is pending anew."""
    pending.latest_stamp = NEVER
    pending.stale = False
    for turn in pending.turns.values():
        count_pending(pending, turn, settings)
    for feedback in pending.feedback.values():
        count_pending(pending, feedback, settings)


def revise_due(pending: Pending, settings: AlignSettings) -> int:
    """When the next revision is due (ALIGNMENT §7)."""
    settled = pending.latest_stamp + settings.settle_ms
    return max(min(settled, pending.first_arrival + settings.max_open_ms), pending.ready_ms)
