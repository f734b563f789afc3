"""The naive aligner: reads a whole log and says what a right machine has to put out.

It is written from the rules alone and shares nothing with the machine but the record types.
Per session it keeps only facts that never change once they are there: the accepted events,
the segments closed so far with what is published in them, and for a late turn the segment it
was given to on arrival.
Everything else (runs, pieces, targets, due times) is computed from these lists again each
time somebody asks. Comments name the rule of the alignment page that a function follows;
"bytes n" is point n of decision 0001.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import msgspec

from streams.contracts import (
    AttributedBy,
    BranchReply,
    ClosedBy,
    DeadLetterReason,
    DialogueTurn,
    FeedbackEvent,
    FeedbackKind,
    Message,
    Role,
    SourceRef,
    Step,
    StepFeedback,
    TrajectorySegment,
    TurnType,
)
from streams.settings import AlignSettings
from tests.oracle.logs import LogRecord

Coordinates = tuple[str, int, int]
"""Topic, partition and offset of a record."""

Key = tuple[int, int, int]
"""Event time, arrival and offset: the order of turns, and of feedback."""

BYTES_PER_TOKEN = 8
ID_LENGTH = 32
CLOSE, REVISE, EXPIRE = range(3)


@dataclass(frozen=True)
class OracleResult:
    """What one partition's log leads to, up to a clock.

    ``segments`` holds every revision that was emitted; ``record_keys`` its Kafka key by
    (segment_id, revision). ``held_back`` is the total over all closings and revisions.
    ``still_open`` are the accepted events that are open or pending at the end.
    """

    segments: list[TrajectorySegment] = field(default_factory=list)
    record_keys: dict[tuple[str, int], str] = field(default_factory=dict)
    dead_letters: list[tuple[str, int, int, DeadLetterReason]] = field(default_factory=list)
    duplicates: list[Coordinates] = field(default_factory=list)
    held_back: int = 0
    still_open: set[Coordinates] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class Turn:
    """An accepted turn, with the arrival that its topic partition gave it."""

    record: DialogueTurn
    place: Coordinates
    arrival: int

    @property
    def key(self) -> Key:
        return (self.record.event_time, self.arrival, self.place[2])

    @property
    def stamp(self) -> int:
        return max(self.record.event_time, self.arrival)

    @property
    def is_main(self) -> bool:
        return self.record.turn_type is TurnType.MAIN

    @property
    def is_reply(self) -> bool:
        return self.is_main and self.record.role is Role.ASSISTANT

    @property
    def is_main_user(self) -> bool:
        return self.is_main and self.record.role is Role.USER

    @property
    def size(self) -> int:
        """Bytes towards ``max_bytes`` (rule 5)."""
        numbers = (
            self.record.token_ids or (),
            self.record.behaviour_logprobs or (),
            self.record.prompt_token_ids or (),
        )
        return utf8(self.record.content) + BYTES_PER_TOKEN * sum(map(len, numbers))


@dataclass(frozen=True, eq=False)
class Feedback:
    """An accepted feedback event, with the arrival that its topic partition gave it."""

    record: FeedbackEvent
    place: Coordinates
    arrival: int

    @property
    def key(self) -> Key:
        return (self.record.event_time, self.arrival, self.place[2])

    @property
    def stamp(self) -> int:
        return max(self.record.event_time, self.arrival)


Event = Turn | Feedback


class Target(NamedTuple):
    """The reply a feedback belongs to, and how that was found."""

    turn: Turn
    attributed_by: AttributedBy


@dataclass(eq=False)
class Closed:
    """A closed segment: what revision 0 froze, and what its latest revision holds."""

    ordinal: int
    segment_id: str
    closed_by: ClosedBy
    first_closed_at: int
    first: Turn
    boundary: Key
    user_id: str | None
    carried: tuple[Message, ...]
    turns: list[Turn]
    feedback: dict[Feedback, Target]
    revisions: list[TrajectorySegment] = field(default_factory=list)

    def visible_at(self, time: int, settings: AlignSettings) -> bool:
        return time <= self.first_closed_at + settings.horizon_ms


class Piece(NamedTuple):
    """The first piece of a run; ``ended_by`` is None for an open-ended one."""

    turns: list[Turn]
    ended_by: ClosedBy | None


class Action(NamedTuple):
    """Something to do at ``due``; actions compare in the order in which they run."""

    due: int
    kind: int
    order: tuple[int, ...]
    subject: Piece | Closed | Feedback


class Decision(NamedTuple):
    """What identity (rule 2) says about a record: dropped, rejected, or (both no) accepted."""

    duplicate: bool = False
    reason: DeadLetterReason | None = None


def run_oracle(
    turns: Sequence[LogRecord],
    feedback: Sequence[LogRecord],
    settings: AlignSettings,
    final_clock_ms: int,
) -> OracleResult:
    """What the log of one partition leads to.

    All records that arrive by ``final_clock_ms`` are applied and all actions due by then run.
    """
    by_session: dict[tuple[str, str], list[tuple[int, LogRecord]]] = {}
    for arrival, entry in merged(turns, feedback):
        if entry.record is not None and arrival <= final_clock_ms:
            session = (entry.record.policy, entry.record.session_id)
            by_session.setdefault(session, []).append((arrival, entry))
    outcomes = [Session(*name, settings) for name in by_session]
    for session_run, entries in zip(outcomes, by_session.values(), strict=True):
        session_run.replay(entries, final_clock_ms)
    return OracleResult(
        segments=[segment for run in outcomes for segment in run.segments],
        record_keys={
            (segment.segment_id, segment.revision): segment.user_id
            if segment.user_id is not None
            else segment.session_id
            for run in outcomes
            for segment in run.segments
        },
        dead_letters=[letter for run in outcomes for letter in run.dead_letters],
        duplicates=[place for run in outcomes for place in run.duplicates],
        held_back=sum(run.held_back for run in outcomes),
        still_open={event.place for run in outcomes for event in run.unpublished()},
    )


def merged(
    turns: Sequence[LogRecord], feedback: Sequence[LogRecord]
) -> list[tuple[int, LogRecord]]:
    """Both topics by (arrival, turns before feedback, offset), with the arrivals (rule 1)."""
    both = [
        (arrival, rank, entry.offset, entry)
        for rank, log in enumerate((turns, feedback))
        for arrival, entry in zip(
            accumulate((entry.timestamp_ms for entry in log), max), log, strict=True
        )
    ]
    both.sort(key=lambda item: item[:3])
    return [(arrival, entry) for arrival, _, _, entry in both]


class Session:
    """One session's life, read record by record."""

    def __init__(self, policy: str, session_id: str, settings: AlignSettings) -> None:
        self.policy = policy
        self.session_id = session_id
        self.settings = settings
        self.segments: list[TrajectorySegment] = []
        self.dead_letters: list[tuple[str, int, int, DeadLetterReason]] = []
        self.duplicates: list[Coordinates] = []
        self.held_back = 0
        self.now = 0
        self.forget()

    def forget(self) -> None:
        """Start as if nothing of this session had ever come (rule 9)."""
        self.turns: list[Turn] = []
        self.feedback: list[Feedback] = []
        self.died: list[Feedback] = []
        self.closed: list[Closed] = []
        self.late_for: dict[Turn, Closed] = {}
        self.published_in: dict[Event, Closed] = {}

    # Rule 1: the clock.

    def replay(self, entries: Iterable[tuple[int, LogRecord]], final_clock_ms: int) -> None:
        """Apply the session's records in order, each action at its due time in between."""
        for arrival, entry in entries:
            self.run_actions(before=arrival)
            self.now = arrival
            self.apply(entry, arrival)
        self.run_actions(before=final_clock_ms + 1)

    def run_actions(self, before: int) -> None:
        """Run what is due earlier than ``before``, each computed anew after the last."""
        while True:
            action = min(self.actions(), key=lambda action: action[:3], default=None)
            if action is None or action.due >= before:
                return
            self.now = action.due
            if isinstance(action.subject, Piece):
                self.close(action.subject)
            elif isinstance(action.subject, Closed):
                self.revise(action.subject)
            else:
                self.expire(action.subject)

    def actions(self) -> Iterator[Action]:
        """All that waits, with due times; none is due before what made it possible."""
        targets = self.targets()
        for piece in self.first_pieces():
            due = min(self.natural(piece, targets), self.forced(piece))
            yield Action(max(due, self.now), CLOSE, piece.turns[0].key, piece)
        for closed in self.closed:
            revision_due = self.revision_due(closed, targets)
            if revision_due is not None:
                yield Action(max(revision_due, self.now), REVISE, (closed.ordinal,), closed)
        for event in self.open_feedback():
            if event not in targets:
                due = event.arrival + self.settings.orphan_wait_ms
                yield Action(max(due, self.now), EXPIRE, (event.arrival, event.place[2]), event)

    def apply(self, entry: LogRecord, arrival: int) -> None:
        """Judge one record and, if it is accepted, remember it."""
        if self.is_forgotten_at(arrival):
            self.forget()
        event = as_event(entry, arrival)
        decision = self.judge(event)
        if decision.reason is not None:
            self.dead_letters.append((*event.place, decision.reason))
        elif decision.duplicate:
            self.duplicates.append(event.place)
        elif isinstance(event, Turn):
            owner = self.owner_of(event)
            if owner is not None:
                self.late_for[event] = owner
            self.turns.append(event)
        else:
            self.feedback.append(event)

    # Words: what is open, published, held.

    def owner_of(self, turn: Turn) -> Closed | None:
        """The closed segment a late turn belongs to; None: it is open (rule 7)."""
        at_or_above = [closed for closed in self.closed if turn.key <= closed.boundary]
        if not at_or_above:
            return None
        nearest = min(at_or_above, key=lambda closed: closed.boundary)
        early_by = nearest.first.record.event_time - turn.record.event_time
        return nearest if early_by <= self.settings.gap_ms else None

    def open_turns(self) -> list[Turn]:
        """Turns in no closed segment and pending for none, by key."""
        return sorted(
            (
                turn
                for turn in self.turns
                if turn not in self.late_for and turn not in self.published_in
            ),
            key=by_key,
        )

    def pending_turns(self, closed: Closed) -> list[Turn]:
        """Late turns given to a segment that are not in it yet, by key."""
        return sorted(
            (
                turn
                for turn, owner in self.late_for.items()
                if owner is closed and turn not in self.published_in
            ),
            key=by_key,
        )

    def open_feedback(self) -> list[Feedback]:
        """Feedback that is not published and has not died: open or pending."""
        return [
            event
            for event in self.feedback
            if event not in self.died and event not in self.published_in
        ]

    def accepted(self) -> list[Event]:
        """All accepted events, those that died among them."""
        return [*self.turns, *self.feedback]

    def unpublished(self) -> list[Event]:
        """All accepted events that are open or pending."""
        turns = (turn for turn in self.turns if turn not in self.published_in)
        return [*turns, *self.open_feedback()]

    def is_held(self, event: Event, at: int) -> bool:
        """Open, pending, or in a segment visible at ``at`` (the arrival of whoever asks)."""
        if event in self.died:
            return False
        closed = self.published_in.get(event)
        return closed is None or closed.visible_at(at, self.settings)

    def ripe_from(self, event: Event) -> int:
        return event.stamp + self.settings.settle_ms

    # Rule 2: identity.

    def judge(self, event: Event) -> Decision:
        record = event.record
        if record.event_time > event.arrival + self.settings.max_skew_ms:
            return Decision(reason=DeadLetterReason.FUTURE_TIMESTAMP)
        known = self.known_by_event_id(event)
        if known is not None:
            if known.record == record:
                return Decision(duplicate=True)
            return Decision(reason=DeadLetterReason.CONFLICTING_DUPLICATE)
        if (
            isinstance(record, FeedbackEvent)
            and record.kind is FeedbackKind.RETRACTION
            and record.supersedes is None
        ):
            return Decision(reason=DeadLetterReason.INVALID)
        if isinstance(event, Turn) and any(
            turn.record.turn_id == event.record.turn_id and self.is_held(turn, event.arrival)
            for turn in self.turns
        ):
            return Decision(reason=DeadLetterReason.CONFLICTING_DUPLICATE)
        if self.is_beyond_horizon(event):
            return Decision(reason=DeadLetterReason.BEYOND_HORIZON)
        return Decision()

    def known_by_event_id(self, event: Event) -> Event | None:
        """The remembered event of that id: held, or first arrived within the horizon."""
        for other in self.accepted():
            young = event.arrival <= other.arrival + self.settings.horizon_ms
            if (
                other.record.event_id == event.record.event_id
                and other not in self.died
                and (young or self.is_held(other, event.arrival))
            ):
                return other
        return None

    def is_beyond_horizon(self, event: Event) -> bool:
        gone = [
            closed.boundary
            for closed in self.closed
            if not closed.visible_at(event.arrival, self.settings)
        ]
        if isinstance(event, Turn):
            return any(event.key <= boundary for boundary in gone)
        if event.record.turn_id is not None or event.record.supersedes is not None:
            return False
        return any(event.record.event_time <= boundary[0] for boundary in gone)

    # Rule 3: attribution.

    def targets(self) -> dict[Feedback, Target]:
        """The target of each unpublished feedback that has one."""
        found = {event: self.target_of(event, ()) for event in self.open_feedback()}
        return {event: target for event, target in found.items() if target is not None}

    def target_of(self, event: Feedback, asking: tuple[Feedback, ...]) -> Target | None:
        """The target of a feedback; ``asking`` are those whose originals led here."""
        if event in self.published_in:
            return self.published_in[event].feedback[event]
        if event.record.supersedes is not None:
            original = self.original_of(event)
            if original is not None and original is not event and original not in asking:
                inherited = self.target_of(original, (*asking, event))
                if inherited is not None and self.is_held(inherited.turn, event.arrival):
                    return inherited
        if event.record.turn_id is not None:
            return self.target_by_turn_id(event)
        if event.record.supersedes is not None:
            return None
        return self.target_by_time(event)

    def original_of(self, event: Feedback) -> Feedback | None:
        """The feedback that an edit or retraction replaces, the newest if ids were reused."""
        named = [
            other
            for other in self.feedback
            if other.record.event_id == event.record.supersedes and other not in self.died
        ]
        return named[-1] if named else None

    def target_by_turn_id(self, event: Feedback) -> Target | None:
        named = [
            turn
            for turn in self.turns
            if turn.is_reply
            and turn.record.turn_id == event.record.turn_id
            and self.is_held(turn, event.arrival)
        ]
        return Target(named[-1], AttributedBy.TURN_ID) if named else None

    def target_by_time(self, event: Feedback) -> Target | None:
        within = [
            turn
            for turn in self.turns
            if turn.is_reply
            and 0
            <= event.record.event_time - turn.record.event_time
            <= self.settings.attribution_window_ms
            and self.is_held(turn, event.arrival)
        ]
        return Target(max(within, key=by_key), AttributedBy.TIME) if within else None

    def expire(self, event: Feedback) -> None:
        self.died.append(event)
        self.dead_letters.append((*event.place, DeadLetterReason.UNMATCHED_FEEDBACK))

    # Rule 5: runs and pieces.

    def runs(self) -> list[list[Turn]]:
        """Open turns by key, split wherever a boundary lies between two of them."""
        by_boundaries_below: dict[int, list[Turn]] = {}
        for turn in self.open_turns():
            below = sum(closed.boundary < turn.key for closed in self.closed)
            by_boundaries_below.setdefault(below, []).append(turn)
        return list(by_boundaries_below.values())

    def first_pieces(self) -> list[Piece]:
        return [self.first_piece(run) for run in self.runs()]

    def first_piece(self, run: list[Turn]) -> Piece:
        for count in range(1, len(run) + 1):
            piece = run[:count]
            ended_by = self.ends_after(piece)
            if ended_by is None and count < len(run):
                ended_by = self.ends_before(run[count], piece)
            if ended_by is not None:
                return Piece(piece, ended_by)
        return Piece(run, None)

    def ends_after(self, piece: list[Turn]) -> ClosedBy | None:
        last = piece[-1]
        if last.record.session_done:
            return ClosedBy.END
        replies = sum(turn.is_reply for turn in piece)
        size = sum(turn.size for turn in piece if turn.is_main)
        full = replies >= self.settings.max_steps or size >= self.settings.max_bytes
        return ClosedBy.SIZE if last.is_reply and full else None

    def ends_before(self, turn: Turn, piece: list[Turn]) -> ClosedBy | None:
        answers = turn.is_main and turn.record.role in (Role.ASSISTANT, Role.TOOL)
        pause = turn.record.event_time - piece[-1].record.event_time
        if pause > self.settings.gap_ms and not answers:
            return ClosedBy.GAP
        age = turn.record.event_time - piece[0].record.event_time
        return ClosedBy.DURATION if age > self.settings.max_open_ms else None

    # Rule 6: closing.

    def natural(self, piece: Piece, targets: dict[Feedback, Target]) -> int:
        turn_stamps = [turn.stamp for turn in piece.turns]
        stamps = turn_stamps + [
            event.stamp for event, target in targets.items() if target.turn in piece.turns
        ]
        due = max(stamps) + self.settings.settle_ms
        if piece.ended_by is None and self.is_unanswered(piece.turns):
            return max(due, max(turn_stamps) + self.settings.max_open_ms)
        if piece.ended_by in (None, ClosedBy.GAP):
            return max(due, max(turn_stamps) + self.settings.gap_ms)
        return due

    def is_unanswered(self, turns: list[Turn]) -> bool:
        main = [turn for turn in turns if turn.is_main]
        return bool(main) and not main[-1].is_reply

    def forced(self, piece: Piece) -> int:
        first_arrival = min(turn.arrival for turn in piece.turns)
        return max(first_arrival + self.settings.max_open_ms, self.ripe_from(piece.turns[0]))

    def close(self, piece: Piece) -> None:
        """Close the piece at ``self.now`` as a new segment, revision 0."""
        targets = self.targets()
        if self.natural(piece, targets) <= self.now:
            turns = piece.turns
            closed_by = piece.ended_by or ClosedBy.GAP
        else:
            turns = self.ripe_beginning(piece.turns)
            stays_out = len(turns) < len(piece.turns)
            closed_by = ClosedBy.DURATION if stays_out or piece.ended_by is None else piece.ended_by
        concerned = {
            event: target for event, target in targets.items() if target.turn in piece.turns
        }
        feedback = {
            event: target
            for event, target in concerned.items()
            if target.turn in turns and self.ripe_from(event) <= self.now
        }
        self.held_back += len(piece.turns) - len(turns) + len(concerned) - len(feedback)
        closed = self.new_segment(closed_by, turns, feedback)
        self.closed.append(closed)
        self.emit(closed)

    def ripe_beginning(self, turns: list[Turn]) -> list[Turn]:
        """The turns before the first unripe one."""
        for count, turn in enumerate(turns):
            if self.ripe_from(turn) > self.now:
                return turns[:count]
        return turns

    def new_segment(
        self, closed_by: ClosedBy, turns: list[Turn], feedback: dict[Feedback, Target]
    ) -> Closed:
        """What revision 0 freezes (rules 7 and 8, bytes 3, 4, 10)."""
        first = turns[0]
        ordinal = len(self.closed)
        named = [turn.record.user_id for turn in turns if turn.record.user_id is not None]
        before = self.closed[-1].user_id if self.closed else None
        return Closed(
            ordinal=ordinal,
            segment_id=segment_id_of(self.policy, self.session_id, ordinal, first),
            closed_by=closed_by,
            first_closed_at=self.now,
            first=first,
            boundary=turns[-1].key,
            user_id=named[-1] if named else before,
            carried=self.carried_into(first),
            turns=list(turns),
            feedback=dict(feedback),
        )

    # Rule 7: revisions.

    def pending_feedback(
        self, closed: Closed, targets: dict[Feedback, Target]
    ) -> dict[Feedback, Target]:
        """Unpublished feedback whose target is in, or pending for, a closed segment."""
        turns = closed.turns + self.pending_turns(closed)
        return {event: target for event, target in targets.items() if target.turn in turns}

    def revision_due(self, closed: Closed, targets: dict[Feedback, Target]) -> int | None:
        """When the next revision of a segment is due; None: nothing is pending."""
        turns = self.pending_turns(closed)
        feedback = self.pending_feedback(closed, targets)
        pending: list[Event] = [*turns, *feedback]
        if not pending:
            return None
        all_ripe = max(self.ripe_from(event) for event in pending)
        patience = min(event.arrival for event in pending) + self.settings.max_open_ms
        can_go_in = [self.ripe_from(turn) for turn in turns] + [
            self.ripe_from(event)
            if target.turn in closed.turns
            else max(self.ripe_from(event), self.ripe_from(target.turn))
            for event, target in feedback.items()
        ]
        return max(min(all_ripe, patience), min(can_go_in))

    def revise(self, closed: Closed) -> None:
        """Take what is ripe at ``self.now`` into the segment and emit it again."""
        turns = self.pending_turns(closed)
        feedback = self.pending_feedback(closed, self.targets())
        ripe_turns = [turn for turn in turns if self.ripe_from(turn) <= self.now]
        closed.turns = sorted(closed.turns + ripe_turns, key=by_key)
        ripe_feedback = {
            event: target
            for event, target in feedback.items()
            if target.turn in closed.turns and self.ripe_from(event) <= self.now
        }
        closed.feedback = closed.feedback | ripe_feedback
        self.held_back += len(turns) - len(ripe_turns) + len(feedback) - len(ripe_feedback)
        self.emit(closed)

    # Rule 4 and bytes 5 to 15: what a segment shows.

    def emit(self, closed: Closed) -> None:
        """Build the segment as it stands at ``self.now`` and emit it."""
        self.published_in.update(dict.fromkeys([*closed.turns, *closed.feedback], closed))
        branch = Branch(closed.turns)
        shown = self.shown_feedback(closed)
        steps = tuple(self.steps(closed, branch, shown))
        listed = [turn for turn in branch.kept if turn.is_reply]
        listed += [other for step in listed for other in branch.alternatives_to(step)]
        event_times = [turn.record.event_time for turn in closed.turns]
        segment = TrajectorySegment(
            segment_id=closed.segment_id,
            revision=len(closed.revisions),
            policy=self.policy,
            session_id=self.session_id,
            user_id=closed.user_id,
            source=closed.first.record.source,
            ordinal=closed.ordinal,
            closed_by=closed.closed_by,
            closed_at=self.now,
            first_closed_at=closed.first_closed_at,
            settle_ms=self.settings.settle_ms,
            first_event_time=min(event_times),
            last_event_time=max(event_times),
            steps=steps,
            off_branch=tuple(
                branch_reply(turn, shown.get(turn, ()))
                for turn in closed.turns
                if turn.is_reply and turn not in listed and turn in shown
            ),
            lineage=tuple(
                SourceRef(topic=topic, partition=partition, offset=offset)
                for topic, partition, offset in sorted(
                    [turn.place for turn in closed.turns]
                    + [event.place for event in closed.feedback]
                )
            ),
            digest=hashlib.sha256(msgspec.json.encode(steps)).hexdigest(),
        )
        closed.revisions.append(segment)
        self.segments.append(segment)

    def steps(
        self, closed: Closed, branch: Branch, shown: dict[Turn, tuple[StepFeedback, ...]]
    ) -> Iterator[Step]:
        context: list[Message] = list(closed.carried)
        is_first = True
        for place, turn in enumerate(branch.kept):
            if not turn.is_reply:
                context.append(message(turn))
                continue
            record = turn.record
            yield Step(
                turn_id=record.turn_id,
                reply=record.content,
                event_time=record.event_time,
                context=tuple(context),
                tool_calls=record.tool_calls,
                model=record.model,
                policy_version=record.policy_version,
                token_ids=record.token_ids,
                behaviour_logprobs=record.behaviour_logprobs,
                prompt_token_ids=record.prompt_token_ids if is_first else None,
                sampling=record.sampling,
                finish_reason=record.finish_reason,
                tokenizer_digest=record.tokenizer_digest,
                template_digest=record.template_digest,
                feedback=shown.get(turn, ()),
                alternatives=tuple(
                    branch_reply(other, shown.get(other, ()))
                    for other in branch.alternatives_to(turn)
                ),
                next_user_turn=self.next_user_turn(closed, branch.kept[place + 1 :]),
                attributes=record.attributes,
            )
            context = []
            is_first = False

    def next_user_turn(self, closed: Closed, after: list[Turn]) -> Message | None:
        """The user's answer to a step: in the segment, else past its cut (bytes 13)."""
        inside = [turn for turn in after if turn.is_main_user]
        if inside:
            return message(inside[0])
        if closed.closed_by not in (ClosedBy.SIZE, ClosedBy.DURATION):
            return None
        outside = [
            turn
            for turn in self.turns
            if turn.is_main_user
            and turn.key > closed.boundary
            and turn not in closed.turns
            and self.is_held(turn, self.now)
        ]
        if not outside:
            return None
        nearest = min(outside, key=by_key)
        return message(nearest) if self.ripe_from(nearest) <= self.now else None

    def shown_feedback(self, closed: Closed) -> dict[Turn, tuple[StepFeedback, ...]]:
        """Per reply the feedback that shows: of each thread the last, unless it retracts."""
        known = [event for event in self.feedback if self.is_held(event, self.now)]
        linked = [*known, *(event for event in closed.feedback if event not in known)]
        shown: dict[Turn, tuple[StepFeedback, ...]] = {}
        for event in sorted(closed.feedback, key=by_key):
            thread = thread_of(event, linked)
            last = max((other for other in closed.feedback if other in thread), key=by_key)
            if event is last and event.record.kind is not FeedbackKind.RETRACTION:
                target = closed.feedback[event]
                shown[target.turn] = (*shown.get(target.turn, ()), step_feedback(event, target))
        return shown

    def carried_into(self, first: Turn) -> tuple[Message, ...]:
        """What came before a segment that begins with ``first`` (bytes 10)."""
        below = [closed for closed in self.closed if closed.boundary < first.key]
        if not below:
            return ()
        previous = max(below, key=lambda closed: closed.boundary)
        if not previous.visible_at(self.now, self.settings):
            return ()
        kept = Branch(previous.turns).kept
        return self.bounded([*previous.carried, *(message(turn, carried=True) for turn in kept)])

    def bounded(self, conversation: list[Message]) -> tuple[Message, ...]:
        """The conversation without its oldest messages, a leading system message last."""
        led = bool(conversation) and conversation[0].role is Role.SYSTEM
        while sum(utf8(one.content) for one in conversation) > self.settings.max_context_bytes:
            oldest_other = 1 if led and len(conversation) > 1 else 0
            conversation = conversation[:oldest_other] + conversation[oldest_other + 1 :]
        return tuple(conversation)

    # Rule 9: forgetting.

    def is_forgotten_at(self, arrival: int) -> bool:
        lasting = [event.arrival for event in self.accepted()]
        lasting += [segment.closed_at for one in self.closed for segment in one.revisions]
        return (
            bool(lasting)
            and not self.unpublished()
            and arrival > max(lasting) + self.settings.horizon_ms
        )


class Branch:
    """The continued branch of a segment (rule 4) without retries (rule 2)."""

    def __init__(self, turns: list[Turn]) -> None:
        self.main = [turn for turn in turns if turn.is_main]
        self.turns: list[Turn] = []
        turn = self.main[-1] if self.main else None
        while turn is not None:
            self.turns.insert(0, turn)
            turn = self.parent_of(turn)
        self.kept = [turn for turn in self.turns if not self.is_dropped(turn)]

    def parent_of(self, turn: Turn) -> Turn | None:
        earlier = self.main[: self.main.index(turn)]
        for other in earlier:
            if other.record.turn_id == turn.record.parent_turn_id:
                return other
        return earlier[-1] if earlier else None

    def is_dropped(self, turn: Turn) -> bool:
        """Whether a branch turn is a retry of which another one counts."""
        if turn.record.request_id is None:
            return False
        same = [
            other
            for other in self.turns
            if other.record.request_id == turn.record.request_id and other.is_reply == turn.is_reply
        ]
        if turn.is_reply:
            return turn is not same[-1]
        equal = [
            other
            for other in same
            if (other.record.role, other.record.content) == (turn.record.role, turn.record.content)
        ]
        return turn is not equal[0]

    def alternatives_to(self, step: Turn) -> list[Turn]:
        request_id = step.record.request_id
        return [
            turn
            for turn in self.main
            if turn.is_reply
            and turn not in self.turns
            and self.parent_of(turn) is self.parent_of(step)
            and (request_id is None or turn.record.request_id != request_id)
        ]


def as_event(entry: LogRecord, arrival: int) -> Event:
    place = (entry.topic, entry.partition, entry.offset)
    if isinstance(entry.record, DialogueTurn):
        return Turn(entry.record, place, arrival)
    assert entry.record is not None
    return Feedback(entry.record, place, arrival)


def by_key(event: Event) -> Key:
    return event.key


def utf8(text: str) -> int:
    return len(text.encode())


def segment_id_of(policy: str, session_id: str, ordinal: int, first: Turn) -> str:
    turn = first.record
    identity = [policy, session_id, ordinal, turn.turn_id, turn.event_id, first.arrival]
    return hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:ID_LENGTH]


def thread_of(event: Feedback, linked: list[Feedback]) -> list[Feedback]:
    """All of ``linked`` that ``supersedes`` ties to the event, directly or through others."""
    ids = {event.record.event_id, event.record.supersedes} - {None}
    thread = [event]
    grew = True
    while grew:
        grew = False
        for other in linked:
            names = {other.record.event_id, other.record.supersedes} - {None}
            if other not in thread and names & ids:
                thread.append(other)
                ids |= names
                grew = True
    return thread


def message(turn: Turn, carried: bool = False) -> Message:
    return Message(
        turn_id=turn.record.turn_id,
        role=turn.record.role,
        content=turn.record.content,
        event_time=turn.record.event_time,
        tool_calls=turn.record.tool_calls,
        tool_call_id=turn.record.tool_call_id,
        carried=carried,
    )


def branch_reply(turn: Turn, feedback: tuple[StepFeedback, ...]) -> BranchReply:
    return BranchReply(
        turn_id=turn.record.turn_id,
        reply=turn.record.content,
        event_time=turn.record.event_time,
        policy_version=turn.record.policy_version,
        feedback=feedback,
    )


def step_feedback(event: Feedback, target: Target) -> StepFeedback:
    record = event.record
    return StepFeedback(
        event_id=record.event_id,
        kind=record.kind,
        event_time=record.event_time,
        delay_ms=record.event_time - target.turn.record.event_time,
        attributed_by=target.attributed_by,
        source=record.source,
        value=record.value,
        text=record.text,
        tags=record.tags,
        supersedes=record.supersedes,
        user_id=record.user_id,
        attributes=record.attributes,
    )
