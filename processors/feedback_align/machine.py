"""The aligner: turns and feedback in, closed segments out (ALIGNMENT.md).

Theory of operation
-------------------
One :class:`PartitionState` holds the sessions of one input partition. :func:`step` takes it
and one input, an :class:`Arrival` (one record; both topics already merged by ``watermark``)
or an :class:`Advance` (the clock), and returns it with the effects, in order. A session
skips records that it has already. There is no
wall clock, no randomness and no I/O; the clock is the arrival time in the log.

An arriving record is judged (``identity``) and becomes a *fact*. A turn joins the *run* of
open turns between two boundaries, or waits as *pending* for the closed segment it is too
late for. Feedback is given a target (``attribution``); it is open with its reply, pending
with its segment, or an orphan. What follows later is a *due action*: closing the first piece
of a run (``cuts``), revising a segment, expiring an orphan, forgetting a session. Before an
arrival at ``a`` everything due before ``a`` happens, so that records come first at equal
times; an advance to ``w`` does everything due at or before ``w``. Actions of one session run
one at a time in the order of (due, kind, subject), each computed anew after the one before;
nothing is due before the session's last change. Sessions do not know of each other.

Work is proportional to what changes. A turn at the end of its run is folded into the running
sums of the first piece; anything else marks the run (or the pending sums of a segment) stale
and has it summed anew, once, when the session's next due time is computed. The partition
keeps one heap entry per session and moves it only when it is reached or comes earlier.

A session has an entry of its own in the kept state and one for each closed segment
(``codec``); only what changed is written. What nobody has asked for lately is *packed*: held as
those bytes alone, and unpacked by the next record or due action. Content is not state: it is
asked of ``bodies``, which reads it back from the input log if it is not at hand.

A closed segment stays while something that arrived, or may arrive, can see it: *visible* to
what is yet to come, then *fading*, for feedback that came earlier or is pending, then
dropped; of a dropped one only the boundary and the ids that are still known remain. A
session is forgotten at the due time last_change + horizon, with nothing open or pending:
any later record would find it past its horizon and start afresh, so nothing can tell whether
it was forgotten then or on arrival. A session whose only events died is blank and dropped at
once, for the same reason.

Split by topic, all pure: ``model`` (state), ``identity`` (facts and checks), ``attribution``
(targets), ``cuts`` (pieces and due times), ``assemble`` (what a segment shows). Transitions
happen only here, by the table below.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heappop, heappush
from itertools import takewhile

import msgspec

from processors.feedback_align import assemble, attribution, codec, cuts, identity
from processors.feedback_align.bodies import Bodies
from processors.feedback_align.model import (
    HEAD,
    HOT_SESSIONS,
    Action,
    EntryKey,
    Fact,
    Feedback,
    Key,
    Life,
    Packed,
    PartitionState,
    Pending,
    Run,
    Segment,
    Session,
    SessionKey,
    Source,
    Turn,
    order,
)
from streams.contracts import (
    ClosedBy,
    DeadLetterReason,
    DialogueTurn,
    FeedbackEvent,
    Role,
    TrajectorySegment,
)
from streams.errors import StateError, TransitionError
from streams.settings import AlignSettings

_FEW = 100
"""Void entries of an index that are never worth making it anew for."""


class Trigger(StrEnum):
    """What moves an event on in its life."""

    ACCEPT = "accept"
    DUPLICATE = "duplicate"
    REJECT = "reject"
    LATE = "late"
    RETARGET = "retarget"
    CLOSE = "close"
    REVISE = "revise"
    EXPIRE = "expire"
    FORGET = "forget"


TRANSITIONS: dict[tuple[Life, Trigger], Life] = {
    (Life.NEW, Trigger.DUPLICATE): Life.DROPPED,
    (Life.NEW, Trigger.REJECT): Life.DEAD,
    (Life.NEW, Trigger.ACCEPT): Life.OPEN,
    (Life.OPEN, Trigger.LATE): Life.PENDING,
    (Life.PENDING, Trigger.RETARGET): Life.OPEN,
    (Life.OPEN, Trigger.CLOSE): Life.PUBLISHED,
    (Life.PENDING, Trigger.REVISE): Life.PUBLISHED,
    (Life.OPEN, Trigger.EXPIRE): Life.DEAD,
    (Life.PUBLISHED, Trigger.FORGET): Life.FORGOTTEN,
}
"""The life of an event. What is not here is a bug of the aligner."""


def render_diagram() -> str:
    """The transition table as the text of a Mermaid state diagram."""
    left = {life for life, _ in TRANSITIONS}
    lines = ["stateDiagram-v2", f"    [*] --> {Life.NEW}"]
    lines += [f"    {a} --> {b}: {trigger}" for (a, trigger), b in TRANSITIONS.items()]
    lines += [f"    {life} --> [*]" for life in Life if life not in left]
    return "\n".join(lines) + "\n"


def _move(fact: Fact, trigger: Trigger) -> None:
    after = TRANSITIONS.get((fact.life, trigger))
    if after is None:
        raise TransitionError(
            f"event {fact.event_id} (topic={fact.topic} partition={fact.partition} "
            f"offset={fact.offset}) is {fact.life} and cannot {trigger}: this is a bug of the "
            "aligner; keep the log and report it"
        )
    fact.life = after


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """One record, where it is in the log.

    Attributes:
        arrival_ms: The running maximum of the Kafka timestamp in its topic partition.
    """

    topic: str
    partition: int
    offset: int
    arrival_ms: int
    record: DialogueTurn | FeedbackEvent


@dataclass(frozen=True, slots=True)
class Advance:
    """No record with an arrival at or before ``clock_ms`` can come any more."""

    clock_ms: int


Input = Arrival | Advance


@dataclass(frozen=True, slots=True)
class EmitSegment:
    """Publish a segment, or a revision of one, under this record key."""

    segment: TrajectorySegment
    key: str


@dataclass(frozen=True, slots=True)
class Reject:
    """Send a record to the dead letters, with its own coordinates and bytes.

    Attributes:
        time_ms: The arrival of a record rejected at once; else the due time.
    """

    arrival: Arrival
    reason: DeadLetterReason
    message: str
    time_ms: int


@dataclass(frozen=True, slots=True)
class DropDuplicate:
    """A record equal to a known one was dropped; count it."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Late:
    """An event arrived that is pending for a segment already closed; count it."""

    topic: str


@dataclass(frozen=True, slots=True)
class HeldBack:
    """So many events were not settled enough for this revision (decision 0001.18)."""

    session: SessionKey
    segment_id: str
    revision: int
    count: int


@dataclass(frozen=True, slots=True)
class SessionForgotten:
    """A session left the state."""

    session: SessionKey


Effect = EmitSegment | Reject | DropDuplicate | Late | HeldBack | SessionForgotten


def new_state(
    source: Source | None = None, bodies: Bodies | None = None, hot_sessions: int = HOT_SESSIONS
) -> PartitionState:
    """The state of a partition of which nothing was read yet.

    Args:
        source: Where its events stand.
        bodies: Where their content is; all of it is held in memory if None.
        hot_sessions: How many sessions stay objects.
    """
    state = PartitionState(hot_sessions=hot_sessions)
    state.source = source or state.source
    state.bodies = bodies or state.bodies
    return state


def restore_state(
    state: PartitionState, entries: Iterable[tuple[EntryKey, bytes]], clock_ms: int
) -> PartitionState:
    """A partition's state from what was kept of it.

    Args:
        state: A new one; used and returned.
        entries: What ``take_changes`` gave, the latest of each key.
        clock_ms: Of the partition when they were kept.

    Raises:
        StateError: An entry cannot be decoded, or belongs to no session.
    """
    heads: dict[SessionKey, bytes] = {}
    closed: dict[SessionKey, dict[int, bytes]] = {}
    for (policy, session_id, ordinal), data in entries:
        if ordinal == HEAD:
            heads[policy, session_id] = data
        else:
            closed.setdefault((policy, session_id), {})[ordinal] = data
    for name, head in heads.items():
        session = codec.pack(head, closed.pop(name, {}))
        state.packed[name] = session
        _count(state, session, 1)
        _count_head(state, session, 1)
        if session.open_since_ms is not None:
            state.open_sessions += 1
            state.opened.append((session.open_since_ms, name))
        if session.due_ms is not None:
            session.scheduled_ms = session.due_ms
            state.due.append((session.due_ms, name))
    if closed:
        raise StateError(
            f"{len(closed)} sessions have closed segments and no entry of their own (first: "
            f"{next(iter(closed))}): the changelog lost records; rebuild the state from the input "
            "topics (another application id and an empty changelog)"
        )
    heapify(state.due)
    heapify(state.opened)
    state.clock_ms = clock_ms
    return state


def step(
    state: PartitionState, event: Input, settings: AlignSettings
) -> tuple[PartitionState, tuple[Effect, ...]]:
    """Apply one input.

    The state is changed in place and returned: use the returned one only.

    Args:
        state: The partition's.
        event: A record or the clock; never one that the clock has passed.
        settings: The aligner's; the same for the whole life of the state.

    Returns:
        The state, and what must be done about it, in order.

    Raises:
        TransitionError: A record arrives at or before the clock, or an event is asked for a
            step that its life does not allow. The state must not be used any more.
        StateError: An entry of the state is damaged, or content is gone from the log. The
            state must not be used any more.
    """
    effects: list[Effect] = []
    if isinstance(event, Advance):
        _run_due(state, event.clock_ms, settings, effects)
        return state, tuple(effects)
    if event.arrival_ms <= state.clock_ms:
        raise TransitionError(
            f"a record arrives at {event.arrival_ms} ms, but the clock stands at "
            f"{state.clock_ms} ms (topic={event.topic} partition={event.partition} "
            f"offset={event.offset}): records must be merged before they are applied"
        )
    _run_due(state, event.arrival_ms - 1, settings, effects)
    _arrive(state, event, settings, effects)
    return state, tuple(effects)


def next_due_ms(state: PartitionState) -> int | None:
    """When the next action is due; None if nothing is."""
    while state.due:
        due_ms, key = state.due[0]
        session = _known(state, key)
        if session is None or session.scheduled_ms != due_ms:
            heappop(state.due)
            continue
        if session.due_ms == due_ms:
            return due_ms
        heappop(state.due)
        session.scheduled_ms = None
        _schedule(state, key, session)
    return None


def content_due(state: PartitionState, sessions: int) -> tuple[list[int], list[int]]:
    """The offsets of turns and of feedback whose content is needed next.

    Args:
        state: The partition's.
        sessions: Of about so many, those that are due first.
    """
    turns: list[int] = []
    feedback: list[int] = []
    for due_ms, key in _first(state.due, sessions):
        session = _known(state, key)
        if session is None or session.scheduled_ms != due_ms:
            continue
        content = codec.content_of(session) if isinstance(session, Packed) else session.content()
        turns.extend(content[0])
        feedback.extend(content[1])
    return turns, feedback


def _first(heap: list[tuple[int, SessionKey]], count: int) -> Iterator[tuple[int, SessionKey]]:
    """The least of a heap, in order, without looking at all of it."""
    next_ones = [(heap[0], 0)] if heap else []
    while next_ones and count:
        least, place = heappop(next_ones)
        yield least
        count -= 1
        for below in (2 * place + 1, 2 * place + 2):
            if below < len(heap):
                heappush(next_ones, (heap[below], below))


def take_changes(state: PartitionState) -> dict[EntryKey, bytes | None]:
    """The entries that must be written since the last call; None is one to forget.

    Sessions of which nothing is open, and those not touched longest beyond
    ``hot_sessions``, are packed.
    """
    changes: dict[EntryKey, bytes | None] = {}
    for key, ordinals in state.forgotten.items():
        changes.update(((*key, ordinal), None) for ordinal in (HEAD, *sorted(ordinals)))
    state.forgotten = {}
    sessions = state.sessions
    for key, session in state.changed.items():
        policy, session_id = key
        if session.touched:
            _count(state, session, -1)
            for ordinal, data in codec.encode_touched(session).items():
                changes[policy, session_id, ordinal] = data
            _count(state, session, 1)
        if session.has_acted or session.open_since_ms is None:
            _note_open(state, session)
        _count_head(state, session, -1)
        session.head = changes[policy, session_id, HEAD] = codec.encode_head(session)
        _count_head(state, session, 1)
        del sessions[key]
        if session.open_since_ms is None:
            state.packed[key] = codec.pack_session(session)
        else:
            sessions[key] = session
    state.changed = {}
    while len(sessions) > state.hot_sessions:
        key = next(iter(sessions))
        state.packed[key] = codec.pack_session(sessions.pop(key))
    _trim(state)
    return changes


def _trim(state: PartitionState) -> None:
    """Make the indexes anew where most of what is in them is void."""
    if len(state.due) > 4 * (len(state.sessions) + len(state.packed)) + _FEW:
        state.due = [
            (at, key) for key, item in _all(state) if (at := item.scheduled_ms) is not None
        ]
        heapify(state.due)
    if len(state.opened) > 4 * state.open_sessions + _FEW:
        state.opened = [
            (since, key) for key, item in _all(state) if (since := item.open_since_ms) is not None
        ]
        heapify(state.opened)


def _all(state: PartitionState) -> Iterator[tuple[SessionKey, Session | Packed]]:
    yield from state.sessions.items()
    yield from state.packed.items()


def _count(state: PartitionState, session: Session | Packed, sign: int) -> None:
    """Let the entries of a session's closed segments into the sums, or out of them."""
    state.entries += sign * len(session.entries)
    state.entry_bytes += sign * sum(map(len, session.entries.values()))


def _count_head(state: PartitionState, session: Session | Packed, sign: int) -> None:
    if session.head:
        state.entries += sign
        state.entry_bytes += sign * len(session.head)


def _note_open(state: PartitionState, session: Session) -> None:
    """Arrivals only rise: what is open longest changes only when something was done."""
    session.has_acted = False
    since, before = session.earliest_open(), session.open_since_ms
    state.open_sessions += (since is not None) - (before is not None)
    session.open_since_ms = since
    if since is not None and since != before:
        heappush(state.opened, (since, session.key))


def oldest_open(state: PartitionState) -> tuple[int, SessionKey] | None:
    """Since when the session is open that is open longest, as of the last ``take_changes``."""
    while state.opened:
        since, key = state.opened[0]
        session = _known(state, key)
        if session is not None and session.open_since_ms == since:
            return since, key
        heappop(state.opened)
    return None


def due_of(state: PartitionState, key: SessionKey) -> int | None:
    """When the next action of a session is due."""
    session = _known(state, key)
    return None if session is None else session.due_ms


def _known(state: PartitionState, key: SessionKey) -> Session | Packed | None:
    return state.sessions.get(key) or state.packed.get(key)


def _hot(state: PartitionState, key: SessionKey, settings: AlignSettings) -> Session | None:
    """The session as an object, unpacked if need be."""
    session = state.sessions.get(key)
    if session is None:
        packed = state.packed.pop(key, None)
        if packed is None:
            return None
        session = state.sessions[key] = codec.unpack(packed, state.source)
        _reckon(session, settings)
    return session


# The clock


def _run_due(
    state: PartitionState, until_ms: int, settings: AlignSettings, effects: list[Effect]
) -> None:
    due = state.due
    while due and due[0][0] <= until_ms:
        due_ms, key = heappop(due)
        known = _known(state, key)
        if known is None or known.scheduled_ms != due_ms:
            continue
        known.scheduled_ms = None
        if known.due_ms is not None and known.due_ms <= until_ms:
            session = known if isinstance(known, Session) else _hot(state, key, settings)
            assert session is not None
            while session.due_ms is not None and session.due_ms <= until_ms:
                _act(state, session, settings, effects)
            if key not in state.sessions:
                continue
            known = session
        _schedule(state, key, known)
    state.clock_ms = max(state.clock_ms, until_ms)


def _schedule(state: PartitionState, key: SessionKey, session: Session | Packed) -> None:
    """Let the heap know of a due time; a later one waits for the entry there is."""
    due_ms = session.due_ms
    scheduled_ms = session.scheduled_ms
    if due_ms is not None and (scheduled_ms is None or due_ms < scheduled_ms):
        heappush(state.due, (due_ms, key))
        session.scheduled_ms = due_ms


def _reckon(session: Session, settings: AlignSettings) -> None:
    """Compute what is due next in a session, and when."""
    now = session.now_ms
    runs = session.runs
    if len(runs) == 1 and not session.revisable and not session.orphans:
        # By far the most frequent case, and the same as below.
        due_ms = max(_close_due(session, runs[0], settings), now)
        session.due_ms, session.due_subject = due_ms, runs[0]
        return
    found: list[tuple[int, Action, Key, Run | Segment | Feedback]] = [
        (_close_due(session, run, settings), Action.CLOSE, run.turns[0].key, run) for run in runs
    ]
    for segment in session.revisable.values():
        due_ms = _revise_due(segment, settings)
        found.append((due_ms, Action.REVISE, (segment.ordinal,), segment))
    for orphan in session.orphans.values():
        due_ms = orphan.key[1] + settings.orphan_wait_ms
        found.append((due_ms, Action.EXPIRE, orphan.key[1:], orphan))
        break  # The others arrived later.
    if found:
        due_ms, _, _, subject = min(found, key=lambda item: (max(item[0], now), *item[1:3]))
        session.due_ms, session.due_subject = max(due_ms, now), subject
        return
    last = max(session.last_accepted_ms, session.last_closed_ms)
    session.due_ms, session.due_subject = last + settings.horizon_ms, None


def _close_due(session: Session, run: Run, settings: AlignSettings) -> int:
    if run.stale:
        cuts.refold(run, session.unpublished.values(), settings)
    return cuts.close_due(run.piece, settings)


def _revise_due(segment: Segment, settings: AlignSettings) -> int:
    if segment.pending.stale:
        cuts.recount_pending(segment.pending, settings)
    return cuts.revise_due(segment.pending, settings)


def _act(
    state: PartitionState, session: Session, settings: AlignSettings, effects: list[Effect]
) -> None:
    """Do what is due next in a session."""
    assert session.due_ms is not None
    at = session.now_ms = session.due_ms
    session.has_acted = True
    subject = session.due_subject
    bodies = state.bodies
    if isinstance(subject, Run):
        _close(session, subject, at, bodies, settings, effects)
    elif isinstance(subject, Segment):
        _revise(session, subject, at, bodies, settings, effects)
    elif isinstance(subject, Feedback):
        _expire(session, subject, at, bodies, settings, effects)
    if subject is None or _is_blank(session):
        _forget(state, session, effects)
        return
    _reckon(session, settings)
    state.changed[session.key] = session


def _is_blank(session: Session) -> bool:
    """Nothing ever came of it: no record to come can tell it from a new session."""
    return session.ordinal == 0 and not session.events


def _forget(state: PartitionState, session: Session, effects: list[Effect]) -> None:
    key = session.key
    session.due_ms = None
    del state.sessions[key]
    state.changed.pop(key, None)
    state.open_sessions -= session.open_since_ms is not None
    _count(state, session, -1)
    _count_head(state, session, -1)
    state.forgotten.setdefault(key, set()).update(session.entries, session.touched)
    session.dissolve()
    effects.append(SessionForgotten(key))


# Arrivals


def _arrive(
    state: PartitionState, event: Arrival, settings: AlignSettings, effects: list[Effect]
) -> None:
    record = event.record
    key = (record.policy, record.session_id)
    known = _hot(state, key, settings)
    session = known or Session(*key)
    place = (event.arrival_ms, int(isinstance(record, FeedbackEvent)), event.offset)
    if place <= session.applied:
        return
    session.applied = place
    if session.segments or session.fading:
        _age(session, event.arrival_ms, settings)
    fact = _fact(event)
    verdict = identity.judge(session, fact, settings)
    if verdict is not None:
        _turn_away(event, fact, verdict, effects)
        if known is not None:
            state.changed[key] = session
        return
    session.now_ms = session.last_accepted_ms = event.arrival_ms
    session.events[fact.event_id] = fact
    if isinstance(fact, Turn):
        assert isinstance(record, DialogueTurn)
        state.bodies.keep_turn(fact.offset, record)
        _accept_turn(session, fact, settings)
    else:
        assert isinstance(record, FeedbackEvent)
        state.bodies.keep_feedback(fact.offset, record)
        _accept_feedback(session, fact, settings)
    if fact.life is Life.PENDING:
        effects.append(Late(event.topic))
    _reckon(session, settings)
    state.sessions[key] = state.changed[key] = session
    _schedule(state, key, session)


def _fact(event: Arrival) -> Fact:
    record = event.record
    if isinstance(record, DialogueTurn):
        return identity.turn_fact(
            record, event.topic, event.partition, event.offset, event.arrival_ms
        )
    return identity.feedback_fact(
        record, event.topic, event.partition, event.offset, event.arrival_ms
    )


def _turn_away(
    event: Arrival, fact: Fact, verdict: identity.Verdict, effects: list[Effect]
) -> None:
    if verdict.reason is None:
        _move(fact, Trigger.DUPLICATE)
        effects.append(DropDuplicate(event.topic, event.partition, event.offset))
    else:
        _move(fact, Trigger.REJECT)
        effects.append(Reject(event, verdict.reason, verdict.message, event.arrival_ms))


def _accept_turn(session: Session, turn: Turn, settings: AlignSettings) -> None:
    _move(turn, Trigger.ACCEPT)
    session.turn_ids[turn.turn_id] = turn
    _insert(session.turns, turn)
    boundaries = session.boundaries
    place = bisect_left(boundaries, turn.key)
    owner = session.owners[boundaries[place]] if place < len(boundaries) else None
    if owner is not None and owner.first_event_time - turn.key[0] <= settings.gap_ms:
        _move(turn, Trigger.LATE)
        _await_revision(session, owner, turn, settings)
    else:
        _join_run(session, turn, boundaries[place - 1] if place else None, settings)
    if turn.reply and session.unpublished:
        touched = attribution.touched_by_reply(session, turn, settings)
        _retarget(session, touched, settings)


def _insert(turns: list[Turn], turn: Turn) -> None:
    if not turns or turns[-1].key < turn.key:
        turns.append(turn)
    else:
        insort(turns, turn, key=order)


def _join_run(session: Session, turn: Turn, floor: Key | None, settings: AlignSettings) -> None:
    for run in session.runs:
        if run.floor == floor:
            break
    else:
        run = Run(floor)
        session.runs.append(run)
    at_end = not run.turns or run.turns[-1].key < turn.key
    _insert(run.turns, turn)
    if not at_end:
        run.stale = True
    elif not run.stale and run.piece.ended_by is None:
        cuts.fold(run.piece, turn, settings)


def _await_revision(
    session: Session, segment: Segment, fact: Fact, settings: AlignSettings
) -> None:
    fact.segment = segment
    pending = segment.pending
    if isinstance(fact, Turn):
        pending.turns[fact.offset] = fact
    else:
        pending.feedback[fact.offset] = fact
    if not pending.stale:
        cuts.count_pending(pending, fact, settings)
    session.revisable[segment.ordinal] = segment


def _accept_feedback(session: Session, feedback: Feedback, settings: AlignSettings) -> None:
    _move(feedback, Trigger.ACCEPT)
    session.unpublished[feedback.offset] = feedback
    if feedback.supersedes is not None:
        session.superseders.setdefault(feedback.supersedes, {})[feedback.offset] = feedback
    _place(session, feedback, attribution.resolve_new(session, feedback, settings), settings)
    if feedback.event_id in session.superseders:
        followers = attribution.with_superseders(session, [feedback])[1:]
        _retarget(session, followers, settings)


# Where unpublished feedback waits


def _place(
    session: Session,
    feedback: Feedback,
    target: attribution.Target | None,
    settings: AlignSettings,
) -> None:
    """Put open feedback where its target is: an orphan, in a run, or pending."""
    if target is None:
        feedback.target = feedback.attributed_by = None
        _add_orphan(session, feedback)
        return
    feedback.target, feedback.attributed_by = target.turn, target.attributed_by
    segment = target.turn.segment
    if segment is not None:
        _move(feedback, Trigger.LATE)
        _await_revision(session, segment, feedback, settings)
        return
    for run in session.runs:
        if not run.stale:
            cuts.note_feedback(run, feedback)


def _add_orphan(session: Session, feedback: Feedback) -> None:
    orphans = session.orphans
    last = next(reversed(orphans.values())) if orphans else None
    orphans[feedback.offset] = feedback
    if last is not None and last.key[1:] > feedback.key[1:]:
        by_arrival = sorted(orphans.values(), key=lambda item: item.key[1:])
        session.orphans = {item.offset: item for item in by_arrival}


def _displace(session: Session, feedback: Feedback) -> None:
    """Take unpublished feedback from where it waits; it is open afterwards."""
    if session.orphans.pop(feedback.offset, None) is not None:
        return
    segment = feedback.segment
    if segment is None:
        for run in session.runs:
            run.stale = True
        return
    _move(feedback, Trigger.RETARGET)
    feedback.segment = None
    del segment.pending.feedback[feedback.offset]
    segment.pending.stale = True
    if not segment.pending:
        del session.revisable[segment.ordinal]


def _retarget(session: Session, feedback: Iterable[Feedback], settings: AlignSettings) -> None:
    """Compute targets anew, and move what has another one."""
    memo: attribution.Memo = {}
    for item in feedback:
        target = attribution.resolve(session, item, settings, memo)
        if target is not None and target.turn is item.target:
            item.attributed_by = target.attributed_by
        elif target is not None or item.target is not None:
            _displace(session, item)
            _place(session, item, target, settings)


def _publish(session: Session, feedback: Feedback, segment: Segment, trigger: Trigger) -> None:
    _move(feedback, trigger)
    feedback.segment = segment
    insort(segment.feedback, feedback, key=order)
    session.touched.add(segment.ordinal)
    _take_out(session, feedback)


def _take_out(session: Session, feedback: Feedback) -> None:
    """It is unpublished no more."""
    del session.unpublished[feedback.offset]
    if feedback.supersedes is not None:
        siblings = session.superseders[feedback.supersedes]
        del siblings[feedback.offset]
        if not siblings:
            del session.superseders[feedback.supersedes]


def _ripple(session: Session, gone: Iterable[Feedback], settings: AlignSettings) -> None:
    """Retarget what supersedes feedback that is unpublished no more."""
    if session.superseders:
        followers = attribution.with_superseders(session, gone)
        unpublished = (item for item in followers if item.offset in session.unpublished)
        _retarget(session, unpublished, settings)


# Due actions


def _ripe(fact: Fact, at: int, settings: AlignSettings) -> bool:
    return fact.stamp + settings.settle_ms <= at


def _close(
    session: Session,
    run: Run,
    at: int,
    bodies: Bodies,
    settings: AlignSettings,
    effects: list[Effect],
) -> None:
    """Close the first piece of a run (ALIGNMENT §6)."""
    piece = run.piece
    members = run.turns[: piece.count]
    natural = cuts.natural_due(piece, settings) <= at
    taken = members if natural else list(takewhile(lambda turn: _ripe(turn, at, settings), members))
    aimed = _feedback_about(session, members)
    closed_by = _closed_by(piece.ended_by, natural, torn=len(taken) < len(members))
    before = _segment_before(session, taken[0], at, settings)
    _want(bodies, taken, aimed, before)
    segment = _new_segment(session, taken, closed_by, at, bodies)
    if before is not None:
        segment.carried = assemble.carried_from(before, bodies, settings.max_context_bytes)
    _part(session, run, segment)
    gone = [item for item in aimed if _enter(session, segment, item, at, settings)]
    _ripple(session, gone, settings)
    held = len(members) - len(taken) + len(aimed) - len(gone)
    _emit(session, segment, at, held, bodies, settings, effects)


def _want(
    bodies: Bodies, turns: Iterable[Turn], feedback: Iterable[Feedback], *also: Segment | None
) -> None:
    """Have content fetched together that is needed now."""
    offsets = [turn.offset for turn in turns]
    carried: list[int] = []
    for segment in also:
        if segment is not None:
            offsets.extend(turn.offset for turn in segment.turns)
            carried.extend(segment.carried)
    bodies.want(offsets, [item.offset for item in feedback], carried)


def _feedback_about(session: Session, members: list[Turn]) -> list[Feedback]:
    """Unpublished feedback that targets one of these open turns."""
    first, last = members[0].key, members[-1].key
    return [
        feedback
        for feedback in session.unpublished.values()
        if feedback.target is not None
        and feedback.target.life is Life.OPEN
        and first <= feedback.target.key <= last
    ]


def _closed_by(ended_by: ClosedBy | None, natural: bool, *, torn: bool) -> ClosedBy:
    if natural:
        return ended_by or ClosedBy.GAP
    return ClosedBy.DURATION if torn or ended_by is None else ended_by


def _new_segment(
    session: Session, taken: list[Turn], closed_by: ClosedBy, at: int, bodies: Bodies
) -> Segment:
    """Revision 0, with its turns, without feedback and what it carries."""
    first = taken[0]
    users = (bodies.turn(turn.offset).user_id for turn in reversed(taken))
    segment = Segment(
        ordinal=session.ordinal,
        segment_id=assemble.segment_id(session, session.ordinal, first),
        source=bodies.turn(first.offset).source,
        user_id=next((user for user in users if user is not None), session.user_id),
        closed_by=closed_by,
        first_closed_ms=at,
        first_event_time=first.key[0],
        boundary=taken[-1].key,
        turns=taken,
    )
    session.ordinal += 1
    session.user_id = segment.user_id
    session.touched.add(segment.ordinal)
    return segment


def _segment_before(
    session: Session, first: Turn, at: int, settings: AlignSettings
) -> Segment | None:
    """The segment that hands on its conversation, if it is visible (decision 0001.10)."""
    place = bisect_left(session.boundaries, first.key)
    before = session.owners.get(session.boundaries[place - 1]) if place else None
    if before is None or not before.visible_at(at, settings.horizon_ms):
        return None
    return before


def _part(session: Session, run: Run, segment: Segment) -> None:
    """Take a closed segment's turns from their run and put its boundary between."""
    for turn in segment.turns:
        _move(turn, Trigger.CLOSE)
        turn.segment = segment
    del run.turns[: len(segment.turns)]
    run.floor = segment.boundary
    run.stale = True
    if not run.turns:
        session.runs.remove(run)
    session.segments.append(segment)
    insort(session.boundaries, segment.boundary)
    session.owners[segment.boundary] = segment


def _enter(
    session: Session, segment: Segment, feedback: Feedback, at: int, settings: AlignSettings
) -> bool:
    """Let ripe feedback into a closing segment; what is unripe waits for a revision."""
    assert feedback.target is not None
    if feedback.target.segment is not segment:
        return False
    if _ripe(feedback, at, settings):
        _publish(session, feedback, segment, Trigger.CLOSE)
        return True
    _move(feedback, Trigger.LATE)
    _await_revision(session, segment, feedback, settings)
    return False


def _revise(
    session: Session,
    segment: Segment,
    at: int,
    bodies: Bodies,
    settings: AlignSettings,
    effects: list[Effect],
) -> None:
    """Rebuild a closed segment with what is ripe (ALIGNMENT §7)."""
    pending = segment.pending
    for turn in [turn for turn in pending.turns.values() if _ripe(turn, at, settings)]:
        _move(turn, Trigger.REVISE)
        del pending.turns[turn.offset]
        insort(segment.turns, turn, key=order)
    gone = [item for item in pending.feedback.values() if _can_enter(item, at, settings)]
    for feedback in gone:
        del pending.feedback[feedback.offset]
        _publish(session, feedback, segment, Trigger.REVISE)
    held = len(pending.turns) + len(pending.feedback)
    pending.stale = True
    if not pending:
        del session.revisable[segment.ordinal]
    segment.revision += 1
    session.touched.add(segment.ordinal)
    _look_again(session, pending, settings)
    _ripple(session, gone, settings)
    _want(bodies, (), segment.feedback, segment)
    _emit(session, segment, at, held, bodies, settings, effects)


def _can_enter(feedback: Feedback, at: int, settings: AlignSettings) -> bool:
    assert feedback.target is not None
    return feedback.target.life is Life.PUBLISHED and _ripe(feedback, at, settings)


def _look_again(session: Session, pending: Pending, settings: AlignSettings) -> None:
    """Retarget pending feedback whose reply went into a segment that it cannot see."""
    blind = [
        item
        for item in pending.feedback.values()
        if item.target is not None and not attribution.sees(item, item.target, settings.horizon_ms)
    ]
    if blind:
        _retarget(session, attribution.with_superseders(session, blind), settings)


def _emit(
    session: Session,
    segment: Segment,
    at: int,
    held: int,
    bodies: Bodies,
    settings: AlignSettings,
    effects: list[Effect],
) -> None:
    session.last_closed_ms = at
    next_user = _next_user(session, segment, at, settings)
    record = assemble.build(session, segment, at, next_user, bodies, settings)
    key = session.session_id if segment.user_id is None else segment.user_id
    effects.append(EmitSegment(record, key))
    if held:
        effects.append(HeldBack(session.key, segment.segment_id, segment.revision, held))


def _next_user(session: Session, segment: Segment, at: int, settings: AlignSettings) -> Turn | None:
    """The user turn that follows a segment cut short, if it is ripe (decision 0001.13)."""
    if segment.closed_by is not ClosedBy.SIZE and segment.closed_by is not ClosedBy.DURATION:
        return None
    turns = session.turns
    for index in range(bisect_right(turns, segment.boundary, key=order), len(turns)):
        turn = turns[index]
        if not turn.main or turn.role is not Role.USER or turn.segment is segment:
            continue
        if identity.is_held(turn, at, settings.horizon_ms):
            return turn if _ripe(turn, at, settings) else None
    return None


def _expire(
    session: Session,
    feedback: Feedback,
    at: int,
    bodies: Bodies,
    settings: AlignSettings,
    effects: list[Effect],
) -> None:
    """Let feedback without a target die (ALIGNMENT §3)."""
    _move(feedback, Trigger.EXPIRE)
    del session.orphans[feedback.offset]
    _take_out(session, feedback)
    if session.events.get(feedback.event_id) is feedback:
        del session.events[feedback.event_id]
    record = bodies.feedback(feedback.offset)
    _ripple(session, [feedback], settings)
    arrival = Arrival(
        feedback.topic, feedback.partition, feedback.offset, feedback.arrival_ms, record
    )
    message = (
        f"no reply was found for it within orphan_wait_ms={settings.orphan_wait_ms} "
        f"(turn_id={feedback.turn_id} supersedes={feedback.supersedes}): "
        "check the ids that its source sends"
    )
    effects.append(Reject(arrival, DeadLetterReason.UNMATCHED_FEEDBACK, message, at))


# Forgetting closed segments


def _age(session: Session, arrival_ms: int, settings: AlignSettings) -> None:
    """Let go of what neither this arrival nor anything that came before can see."""
    horizon_ms = settings.horizon_ms
    while session.segments and not session.segments[0].visible_at(arrival_ms, horizon_ms):
        segment = session.segments.pop(0)
        session.fading.append(segment)
        if session.lost is None or segment.boundary > session.lost:
            session.lost = segment.boundary
    gone = [item for item in session.fading if not _is_needed(session, item, horizon_ms)]
    if gone:
        for segment in gone:
            session.fading.remove(segment)
            _drop(session, segment)
        _tidy(session, arrival_ms, horizon_ms)


def _is_needed(session: Session, segment: Segment, horizon_ms: int) -> bool:
    return bool(segment.pending) or any(
        segment.visible_at(feedback.key[1], horizon_ms) for feedback in session.unpublished.values()
    )


def _drop(session: Session, segment: Segment) -> None:
    facts: list[Fact] = [*segment.turns, *segment.feedback]
    for fact in facts:
        _move(fact, Trigger.FORGET)
        fact.segment = None
        if isinstance(fact, Feedback):
            fact.target = None
            continue
        del session.turns[bisect_left(session.turns, fact.key, key=order)]
        if session.turn_ids.get(fact.turn_id) is fact:
            del session.turn_ids[fact.turn_id]
    session.ghosts[segment.ordinal] = facts
    session.touched.add(segment.ordinal)
    del session.owners[segment.boundary]


def _tidy(session: Session, arrival_ms: int, horizon_ms: int) -> None:
    """Remove what dropped segments left and nothing needs any more."""
    for ordinal, ghosts in list(session.ghosts.items()):
        known = [
            ghost for ghost in ghosts if _is_still_known(session, ghost, arrival_ms, horizon_ms)
        ]
        if len(known) == len(ghosts):
            continue
        session.touched.add(ordinal)
        if known:
            session.ghosts[ordinal] = known
        else:
            del session.ghosts[ordinal]
    floors = {run.floor for run in session.runs}
    lost = session.lost
    assert lost is not None
    # Of dropped boundaries the greatest decides what is beyond the horizon; another one only
    # matters while it stands right before open turns.
    session.boundaries = [
        boundary
        for boundary in session.boundaries
        if boundary in session.owners or boundary in floors or boundary >= lost
    ]


def _is_still_known(session: Session, ghost: Fact, arrival_ms: int, horizon_ms: int) -> bool:
    """Whether an event that was dropped is known by id; if not, its id is free again."""
    if session.events.get(ghost.event_id) is not ghost:
        return False
    if identity.is_known(ghost, arrival_ms, horizon_ms):
        return True
    del session.events[ghost.event_id]
    return False


__all__ = [
    "Advance",
    "Arrival",
    "DropDuplicate",
    "Effect",
    "EmitSegment",
    "HeldBack",
    "Input",
    "Late",
    "PartitionState",
    "Reject",
    "SessionForgotten",
    "SessionKey",
    "TRANSITIONS",
    "Trigger",
    "content_due",
    "due_of",
    "new_state",
    "next_due_ms",
    "oldest_open",
    "render_diagram",
    "restore_state",
    "step",
    "take_changes",
]
