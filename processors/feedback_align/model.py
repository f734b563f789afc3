"""The aligner's state: small facts about events, and what is derived from them.

A fact holds ids, times, sizes and digests, never content. Content is reached through
``bodies.Bodies`` alone, by offset: the input log keeps it, the state does not.

Everything here is mutable and owned by one :class:`PartitionState`; nothing is shared
between sessions. Times are milliseconds since the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

import msgspec

from processors.feedback_align.bodies import Bodies, HeldBodies
from streams.contracts import AttributedBy, ClosedBy, Role
from streams.topics import FEEDBACK, TURNS

Key = tuple[int, ...]
"""The order of events: (event time, arrival, offset)."""

SessionKey = tuple[str, str]
"""(policy, session_id)."""

NEVER = -(1 << 62)
"""Earlier than any time: the latest of nothing."""


class Life(StrEnum):
    """Where an event is in its life (the transition table of ``machine``)."""

    NEW = "new"
    OPEN = "open"
    PENDING = "pending"
    PUBLISHED = "published"
    DEAD = "dead"
    DROPPED = "dropped"
    FORGOTTEN = "forgotten"


class Action(IntEnum):
    """What can be due while something is open or pending; less goes first at equal times."""

    CLOSE = 0
    REVISE = 1
    EXPIRE = 2


@dataclass(slots=True, eq=False)
class Turn:
    """The facts of one turn.

    Attributes:
        key: Its order, (event time, arrival, offset).
        stamp: max(event time, arrival).
        main: It is of type main.
        reply: It is a main assistant turn.
        size: UTF-8 bytes of its content plus 8 per token id and log-probability.
        digest: Of its decoded content.
        segment: The closed segment it is pending for or published in.
        image: Its facts as ``codec`` writes them; they never change, so once is enough.
    """

    topic: str
    partition: int
    offset: int
    event_id: str
    turn_id: str
    key: Key
    stamp: int
    role: Role
    main: bool
    reply: bool
    session_done: bool
    size: int
    digest: bytes
    life: Life = Life.NEW
    segment: Segment | None = field(default=None, repr=False)
    image: msgspec.Raw | None = field(default=None, repr=False)

    @property
    def arrival_ms(self) -> int:
        return self.key[1]


@dataclass(slots=True, eq=False)
class Feedback:
    """The facts of one feedback event.

    Attributes:
        key: Its order, (event time, arrival, offset).
        stamp: max(event time, arrival).
        digest: Of its decoded content.
        target: The reply it is about, as things stand; fixed once it is published.
        attributed_by: How the target was found; None without one.
        segment: The closed segment it is pending for or published in.
    """

    topic: str
    partition: int
    offset: int
    event_id: str
    key: Key
    stamp: int
    turn_id: str | None
    supersedes: str | None
    retraction: bool
    digest: bytes
    life: Life = Life.NEW
    target: Turn | None = field(default=None, repr=False)
    attributed_by: AttributedBy | None = None
    segment: Segment | None = field(default=None, repr=False)

    @property
    def arrival_ms(self) -> int:
        return self.key[1]


Fact = Turn | Feedback


@dataclass(slots=True, eq=False)
class Piece:
    """The first piece of a run, folded turn by turn (``cuts.fold``).

    Attributes:
        count: How many of the run's first turns it has.
        ended_by: The rule that ended it; None while it is open-ended.
        latest_stamp: Of its turns.
        feedback_stamp: The latest of the unpublished feedback that targets its turns.
        first_stamp: Of its first turn in order.
        first_arrival: The earliest arrival of its turns.
        answered: Its last main turn is a reply, or it has no main turn.
    """

    count: int = 0
    ended_by: ClosedBy | None = None
    replies: int = 0
    size: int = 0
    first_event_time: int = 0
    last_event_time: int = 0
    latest_stamp: int = NEVER
    feedback_stamp: int = NEVER
    first_stamp: int = 0
    first_arrival: int = 0
    answered: bool = True


@dataclass(slots=True, eq=False)
class Run:
    """Open turns, in order, that no boundary separates.

    Attributes:
        floor: The greatest boundary before it; tells runs apart.
        piece: Its first piece.
        stale: The piece must be folded anew before it is used.
    """

    floor: Key | None
    turns: list[Turn] = field(default_factory=list)
    piece: Piece = field(default_factory=Piece)
    stale: bool = False


@dataclass(slots=True, eq=False)
class Pending:
    """What waits for a segment's next revision.

    Attributes:
        turns: By offset.
        feedback: By offset.
        latest_stamp: Of all of it.
        first_arrival: The earliest of all of it.
        ready_ms: When the first of it could go in.
        stale: The three sums must be computed anew before they are used.
    """

    turns: dict[int, Turn] = field(default_factory=dict)
    feedback: dict[int, Feedback] = field(default_factory=dict)
    latest_stamp: int = NEVER
    first_arrival: int = 0
    ready_ms: int = 0
    stale: bool = False

    def __bool__(self) -> bool:
        return bool(self.turns or self.feedback)


@dataclass(slots=True, eq=False)
class Segment:
    """A closed segment.

    Attributes:
        first_closed_ms: ``closed_at`` of revision 0; visibility counts from here.
        first_event_time: Of its turns at revision 0; frozen.
        boundary: The key of its last turn at revision 0; frozen.
        turns: In its lineage, in order.
        feedback: In its lineage, in order.
        carried: The offsets of the turns that came before it and are shown as its first
            context; frozen.
    """

    ordinal: int
    segment_id: str
    source: str
    user_id: str | None
    closed_by: ClosedBy
    first_closed_ms: int
    first_event_time: int
    boundary: Key
    turns: list[Turn]
    carried: tuple[int, ...] = ()
    feedback: list[Feedback] = field(default_factory=list)
    revision: int = 0
    pending: Pending = field(default_factory=Pending)

    def visible_at(self, arrival_ms: int, horizon_ms: int) -> bool:
        """Whether an event with this arrival can see it (ALIGNMENT, Words)."""
        return arrival_ms <= self.first_closed_ms + horizon_ms


@dataclass(slots=True, eq=False)
class Session:
    """All there is to know about one session.

    Attributes:
        applied: Where in the log its last record stands, (arrival, 0 for turns and 1 for
            feedback, offset). What is not later is skipped, so that a session that was kept
            after its partition's positions goes on right when its records are read again.
        now_ms: The time of the last record accepted or action done: nothing is due earlier.
        ordinal: That of the next segment.
        last_accepted_ms: The latest accepted arrival.
        last_closed_ms: The latest ``closed_at``; ``NEVER`` before the first.
        user_id: That of the segment closed last.
        turns: Every held turn, in order.
        turn_ids: The held turn of each turn id.
        events: Every known event by event id; FORGOTTEN ones are known by id alone.
        runs: Open turns, in order.
        segments: Closed and visible to what is yet to arrive, in order of closing.
        fading: Closed, visible only to feedback that has already arrived.
        boundaries: Of closed segments, sorted; those of dropped ones while they matter.
        owners: The segment of each boundary whose segment is still here.
        lost: The greatest boundary that is no longer visible.
        ghosts: FORGOTTEN events that are still known by id, by the ordinal of their segment.
        unpublished: Feedback open or pending, by offset.
        orphans: The part of it that has no target, by offset, in order of arrival.
        superseders: Unpublished feedback by the id it supersedes.
        revisable: Segments with something pending, by ordinal.
        due_ms: When its next action is due.
        due_subject: The run to close, the segment to revise, the feedback to expire; None if
            the session is to be forgotten.
        scheduled_ms: The due time under which the partition's index knows the session.
        touched: Ordinals of the segments whose entry in the state must be written anew.
        entries: The entries of closed segments as last written, by ordinal.
        head: The session's own entry as last written.
        open_since_ms: As in ``Packed``, when last written.
        has_acted: Something due was done since then.
    """

    policy: str
    session_id: str
    applied: Key = ()
    now_ms: int = NEVER
    ordinal: int = 0
    last_accepted_ms: int = NEVER
    last_closed_ms: int = NEVER
    user_id: str | None = None
    turns: list[Turn] = field(default_factory=list)
    turn_ids: dict[str, Turn] = field(default_factory=dict)
    events: dict[str, Fact] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    fading: list[Segment] = field(default_factory=list)
    boundaries: list[Key] = field(default_factory=list)
    owners: dict[Key, Segment] = field(default_factory=dict)
    lost: Key | None = None
    ghosts: dict[int, list[Fact]] = field(default_factory=dict)
    unpublished: dict[int, Feedback] = field(default_factory=dict)
    orphans: dict[int, Feedback] = field(default_factory=dict)
    superseders: dict[str, dict[int, Feedback]] = field(default_factory=dict)
    revisable: dict[int, Segment] = field(default_factory=dict)
    due_ms: int | None = None
    due_subject: Run | Segment | Feedback | None = None
    scheduled_ms: int | None = None
    touched: set[int] = field(default_factory=set)
    entries: dict[int, bytes] = field(default_factory=dict)
    head: bytes = b""
    open_since_ms: int | None = None
    has_acted: bool = False

    @property
    def key(self) -> SessionKey:
        return (self.policy, self.session_id)

    def content(self) -> tuple[list[int], list[int]]:
        """Offsets of the turns and of the feedback whose content its next due actions need:
        what is open or pending, the segments it is pending for, and what is handed on.
        """
        turns = [turn.offset for run in self.runs for turn in run.turns]
        concerned = list(self.revisable.values())
        if turns and self.segments and self.segments[-1].ordinal not in self.revisable:
            concerned.append(self.segments[-1])
        for segment in concerned:
            turns.extend(segment.pending.turns)
            turns.extend(turn.offset for turn in segment.turns)
            turns.extend(segment.carried)
        feedback = [item.offset for segment in concerned for item in segment.feedback]
        return turns, [*self.unpublished, *feedback]

    def dissolve(self) -> None:
        """Take the objects apart. Facts and segments refer to each other, and Python's search
        for such circles comes seldom in a worker: what is let go must go by itself.
        """
        for segment in (*self.segments, *self.fading):
            segment.turns = []
            segment.feedback = []
            segment.pending = Pending()

    def earliest_open(self) -> int | None:
        """The earliest arrival of what is open or pending; None if nothing is."""
        arrivals = [turn.key[1] for run in self.runs for turn in run.turns]
        arrivals += [item.key[1] for item in self.unpublished.values()]
        for segment in self.revisable.values():
            arrivals += [turn.key[1] for turn in segment.pending.turns.values()]
        return min(arrivals, default=None)


@dataclass(slots=True, eq=False)
class Packed:
    """A session as its entries: what nobody asks for need not be objects.

    Attributes:
        head: The session's own entry.
        entries: The entries of its closed segments, by ordinal.
        due_ms: When its next action is due.
        scheduled_ms: The due time under which the partition's index knows it.
        open_since_ms: The earliest arrival of what is open or pending; None if nothing is.
    """

    head: bytes
    entries: dict[int, bytes]
    due_ms: int | None
    scheduled_ms: int | None
    open_since_ms: int | None


EntryKey = tuple[str, str, int]
"""(policy, session_id, ordinal) of a closed segment's entry, or ``HEAD`` for the session's."""

HEAD = -1


@dataclass(frozen=True, slots=True)
class Source:
    """Where a partition's events stand; facts are kept without it.

    Attributes:
        turns_topic: Topic of turns.
        feedback_topic: Topic of feedback.
        partition: The partition of both.
    """

    turns_topic: str = TURNS
    feedback_topic: str = FEEDBACK
    partition: int = 0


HOT_SESSIONS = 20_000
"""Sessions of a partition that are kept as objects; those not touched longest are packed."""


@dataclass(slots=True, eq=False)
class PartitionState:
    """The sessions of one input partition.

    Owned by one caller: :func:`machine.step` changes it in place and returns it.

    Attributes:
        source: Where its events stand.
        bodies: Where their content is.
        hot_sessions: At most so many sessions stay objects after ``take_changes``.
        clock_ms: Everything due at or before it has happened; no record at or before it
            can still come. ``NEVER`` at first.
        sessions: Sessions as objects, those changed last at the end.
        packed: All others.
        open_sessions: How many have anything open or pending, as of the last
            ``take_changes``.
        entries: How many entries all sessions have.
        entry_bytes: Their values.
        opened: A heap of (open_since_ms, session key); entries that are not so any more are
            void.
        due: A heap of (due time, session key); entries that no session's ``scheduled_ms``
            confirms are void.
        changed: Sessions since the last ``take_changes``.
        forgotten: The ordinals of entries of sessions forgotten since then.
    """

    source: Source = field(default_factory=Source)
    bodies: Bodies = field(default_factory=HeldBodies)
    hot_sessions: int = HOT_SESSIONS
    clock_ms: int = NEVER
    sessions: dict[SessionKey, Session] = field(default_factory=dict)
    packed: dict[SessionKey, Packed] = field(default_factory=dict)
    open_sessions: int = 0
    entries: int = 0
    entry_bytes: int = 0
    opened: list[tuple[int, SessionKey]] = field(default_factory=list)
    due: list[tuple[int, SessionKey]] = field(default_factory=list)
    changed: dict[SessionKey, Session] = field(default_factory=dict)
    forgotten: dict[SessionKey, set[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Position:
    """How far a topic partition is applied; what a restart goes on from.

    Attributes:
        offset: Of the last record handed out or passed; -1 before the first.
        maximum_ms: The running maximum of the timestamps up to there.
    """

    offset: int = -1
    maximum_ms: int = NEVER


def order(fact: Fact) -> Key:
    """The sort key of events."""
    return fact.key
