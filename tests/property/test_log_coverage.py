"""The random logs meet every situation that alignment must get right, and often enough.

A comparison of two aligners proves nothing about what no log contains. Each situation here is
looked for in what a log holds and in what the oracle makes of it.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from streams.contracts import (
    AttributedBy,
    ClosedBy,
    DeadLetterReason,
    DialogueTurn,
    FeedbackEvent,
    FeedbackKind,
    Role,
    StepFeedback,
    TrajectorySegment,
    TurnType,
)
from streams.settings import AlignSettings
from tests.oracle.aligner import OracleResult, run_oracle
from tests.oracle.logs import (
    FEEDBACK_TOPIC,
    SETTINGS_VARIANTS,
    TURNS_TOPIC,
    YEAR_2099_MS,
    Log,
    LogRecord,
    is_reply,
    random_log,
)

LOGS = 800
AT_LEAST = 4
"""How many of them must meet each situation: one in two hundred."""

Session = tuple[str, str]
Place = tuple[str, int]


@dataclass(frozen=True)
class Event:
    """An event where it stands in the log."""

    topic: str
    offset: int
    arrival_ms: int
    record: DialogueTurn | FeedbackEvent

    @property
    def session(self) -> Session:
        return self.record.policy, self.record.session_id

    @property
    def stamp_ms(self) -> int:
        return max(self.record.event_time, self.arrival_ms)

    @property
    def delay_ms(self) -> int:
        return self.arrival_ms - self.record.event_time


@dataclass(frozen=True)
class Case:
    """A log, and what the oracle makes of it."""

    log: Log
    align: AlignSettings
    result: OracleResult

    @cached_property
    def events(self) -> list[Event]:
        """All events up to the final clock, merged."""
        found = [
            (at, topic == FEEDBACK_TOPIC, one)
            for topic, records in (
                (TURNS_TOPIC, self.log.turns),
                (FEEDBACK_TOPIC, self.log.feedback),
            )
            for at, one in arrivals(records)
            if at <= self.log.final_clock_ms
        ]
        found.sort(key=lambda item: (item[0], item[1], item[2].offset))
        return [
            Event(one.topic, one.offset, at, one.record)
            for at, _, one in found
            if one.record is not None
        ]

    @cached_property
    def at(self) -> dict[Place, Event]:
        return {(event.topic, event.offset): event for event in self.events}

    @cached_property
    def sessions(self) -> dict[Session, list[Event]]:
        found: dict[Session, list[Event]] = defaultdict(list)
        for event in self.events:
            found[event.session].append(event)
        return found

    @cached_property
    def dead(self) -> set[tuple[DeadLetterReason, Place]]:
        return {(reason, (topic, offset)) for topic, _, offset, reason in self.result.dead_letters}

    def members(self, segment: TrajectorySegment) -> list[Event]:
        """The events in a segment's lineage."""
        return [self.at[ref.topic, ref.offset] for ref in segment.lineage]

    def turns(self, segment: TrajectorySegment) -> list[DialogueTurn]:
        """The turns in a segment's lineage, in order."""
        events = [e for e in self.members(segment) if isinstance(e.record, DialogueTurn)]
        events.sort(key=lambda e: (e.record.event_time, e.arrival_ms, e.offset))
        return [e.record for e in events if isinstance(e.record, DialogueTurn)]

    def revisions(self) -> Iterator[tuple[TrajectorySegment, list[TrajectorySegment]]]:
        """Each segment's revision 0, and its later ones."""
        by_id: dict[str, list[TrajectorySegment]] = defaultdict(list)
        for segment in self.result.segments:
            by_id[segment.segment_id].append(segment)
        for found in by_id.values():
            first, *later = sorted(found, key=lambda s: s.revision)
            yield first, later


def arrivals(records: tuple[LogRecord, ...]) -> Iterator[tuple[int, LogRecord]]:
    """Each record with the running maximum of the timestamps."""
    maximum = 0
    for record in records:
        maximum = max(maximum, record.timestamp_ms)
        yield maximum, record


def shown(segment: TrajectorySegment) -> Iterator[StepFeedback]:
    for step in segment.steps:
        yield from step.feedback
        for reply in step.alternatives:
            yield from reply.feedback
    for reply in segment.off_branch:
        yield from reply.feedback


# What happens between sessions and in the topics


def sessions_interleave(case: Case) -> bool:
    order = [event.session for event in case.events]
    runs = Counter(b for a, b in pairwise([None, *order]) if a != b)
    return sum(1 for count in runs.values() if count > 1) > 1


def a_timestamp_steps_back(case: Case) -> bool:
    return any(
        b.timestamp_ms < a.timestamp_ms
        for log in (case.log.turns, case.log.feedback)
        for a, b in pairwise(log)
    )


def a_partition_is_idle_until_ticks_come(case: Case) -> bool:
    """Something closes in a time that only a tick, or nothing, stands in."""
    times = [e.arrival_ms for e in case.events]
    ticks = [
        at
        for log in (case.log.turns, case.log.feedback)
        for at, record in arrivals(log)
        if record.record is None
    ]
    return any(
        a < s.closed_at < tick < b
        for a, b in pairwise(times)
        for s in case.result.segments
        for tick in ticks
    )


def a_partition_is_idle_for_longer_than_anything_may_stay_open(case: Case) -> bool:
    return any(
        b.arrival_ms - a.arrival_ms > case.align.max_open_ms + case.align.orphan_wait_ms
        for a, b in pairwise(case.events)
    )


def only_one_topic_has_a_backlog(case: Case) -> bool:
    """Many records of one topic arrive over longer than a gap, none of the other."""
    return any(
        len(run) >= 8 and run[-1].arrival_ms - run[0].arrival_ms > case.align.gap_ms
        for run in runs_of_one_topic(case.events)
    )


def runs_of_one_topic(events: list[Event]) -> Iterator[list[Event]]:
    run: list[Event] = []
    for event in events:
        if run and run[-1].topic != event.topic:
            yield run
            run = []
        run.append(event)
    yield run


# Order and identity


def turns_arrive_out_of_order(case: Case) -> bool:
    """And are put right within one segment."""
    for segment in case.result.segments:
        turns = [e for e in case.members(segment) if e.topic == TURNS_TOPIC]
        by_arrival = sorted(turns, key=lambda e: (e.arrival_ms, e.offset))
        if any(a.record.event_time > b.record.event_time for a, b in pairwise(by_arrival)):
            return True
    return False


def feedback_arrives_out_of_order(case: Case) -> bool:
    for segment in case.result.segments:
        notes = [e for e in case.members(segment) if e.topic == FEEDBACK_TOPIC]
        by_arrival = sorted(notes, key=lambda e: (e.arrival_ms, e.offset))
        if any(a.record.event_time > b.record.event_time for a, b in pairwise(by_arrival)):
            return True
    return False


def duplicates(topic: str) -> Callable[[Case], bool]:
    return lambda case: any(where[0] == topic for where in case.result.duplicates)


def a_duplicate_of_what_is_published(case: Case) -> bool:
    closed_at = {
        (ref.topic, ref.offset): first.closed_at
        for first, _ in case.revisions()
        for ref in first.lineage
    }
    known = {
        (e.session, e.record.event_id): closed_at[place]
        for place, e in case.at.items()
        if place in closed_at
    }
    again = [case.at[topic, offset] for topic, _, offset in case.result.duplicates]
    return any(e.arrival_ms > known.get((e.session, e.record.event_id), 1 << 62) for e in again)


def conflicts(with_topic: str, of_topic: str) -> Callable[[Case], bool]:
    """An id that an event of one topic has comes again with other content, on the other."""

    def found(case: Case) -> bool:
        known = {
            (e.session, e.record.event_id): e.topic for e in reversed(case.events)
        }  # The first of each id.
        return any(
            reason is DeadLetterReason.CONFLICTING_DUPLICATE
            and place[0] == of_topic
            and known[case.at[place].session, case.at[place].record.event_id] == with_topic
            and case.at[place] != first_of(case, case.at[place])
            for reason, place in case.dead
        )

    return found


def first_of(case: Case, event: Event) -> Event:
    return next(
        e for e in case.sessions[event.session] if e.record.event_id == event.record.event_id
    )


def a_turn_id_conflicts(case: Case) -> bool:
    """Under an event id of its own."""
    return any(
        reason is DeadLetterReason.CONFLICTING_DUPLICATE
        and place[0] == TURNS_TOPIC
        and first_of(case, case.at[place]) == case.at[place]
        for reason, place in case.dead
    )


def what_was_rejected_is_accepted_when_sent_again(case: Case) -> bool:
    accepted = {
        (e.session, e.record.event_id)
        for segment in case.result.segments
        for e in case.members(segment)
    }
    return any(
        (event.session, event.record.event_id) in accepted
        and not any(
            e.record.event_id == event.record.event_id and e.arrival_ms < event.arrival_ms
            for e in case.sessions[event.session]
        )
        for _, place in case.dead
        for event in [case.at[place]]
    )


# Feedback and its reply


def feedback_comes_before_its_turn(case: Case) -> bool:
    """By arrival, and finds it."""
    for segment in case.result.segments:
        arrived = {
            e.record.turn_id: e.arrival_ms
            for e in case.members(segment)
            if isinstance(e.record, DialogueTurn)
        }
        if any(
            e.arrival_ms < arrived.get(e.record.turn_id, 0)
            for e in case.members(segment)
            if isinstance(e.record, FeedbackEvent) and e.record.turn_id is not None
        ):
            return True
    return False


def feedback_is_attributed(by: AttributedBy) -> Callable[[Case], bool]:
    return lambda case: any(
        note.attributed_by is by for segment in case.result.segments for note in shown(segment)
    )


def feedback_has_no_turn(with_turn_id: bool) -> Callable[[Case], bool]:
    def found(case: Case) -> bool:
        died = [case.at[place].record for reason, place in case.dead if "unmatched" in reason]
        return any(
            isinstance(record, FeedbackEvent)
            and record.supersedes is None
            and (record.turn_id is not None) is with_turn_id
            for record in died
        )

    return found


def a_session_has_feedback_alone(case: Case) -> bool:
    return any(all(e.topic == FEEDBACK_TOPIC for e in events) for events in case.sessions.values())


def feedback_is_edited(case: Case) -> bool:
    """Original and edit are in one segment, the edit is shown."""
    return any(
        e.record.event_id in visible
        and e.record.supersedes in ids
        and e.record.supersedes not in visible
        for segment in case.result.segments
        for visible in [{note.event_id for note in shown(segment)}]
        for ids in [{e.record.event_id for e in case.members(segment)}]
        for e in case.members(segment)
        if isinstance(e.record, FeedbackEvent)
    )


def feedback_is_retracted(case: Case) -> bool:
    """Original and retraction are in one segment, nothing is shown."""
    return any(
        e.record.kind is FeedbackKind.RETRACTION
        and e.record.supersedes in ids
        and not {e.record.event_id, e.record.supersedes} & visible
        for segment in case.result.segments
        for visible in [{note.event_id for note in shown(segment)}]
        for ids in [{e.record.event_id for e in case.members(segment)}]
        for e in case.members(segment)
        if isinstance(e.record, FeedbackEvent)
    )


def an_edit_or_retraction_comes_after_the_original_was_published(case: Case) -> bool:
    for first, later in case.revisions():
        before = {e.record.event_id for e in case.members(first)}
        for revision in later:
            if any(
                isinstance(e.record, FeedbackEvent)
                and e.record.event_id not in before
                and e.record.supersedes in before
                for e in case.members(revision)
            ):
                return True
    return False


# Branches, tools, side turns


def a_reply_is_regenerated(case: Case) -> bool:
    return any(step.alternatives for s in case.result.segments for step in s.steps)


def an_abandoned_branch_has_feedback(case: Case) -> bool:
    return any(segment.off_branch for segment in case.result.segments)


def a_reply_is_retried(case: Case) -> bool:
    """Of two replies with one request id the later is the step, the earlier is nothing."""
    for segment in case.result.segments:
        steps = {step.turn_id for step in segment.steps}
        others = {reply.turn_id for step in segment.steps for reply in step.alternatives}
        replies = [turn for turn in case.turns(segment) if is_reply(turn)]
        requests = {turn.request_id for turn in replies if turn.turn_id in steps} - {None}
        if any(
            turn.request_id in requests and turn.turn_id not in steps | others for turn in replies
        ):
            return True
    return False


def a_user_turn_is_retried(case: Case) -> bool:
    return any(
        (a.request_id, a.role, a.content) == (b.request_id, b.role, b.content)
        and a.request_id is not None
        and a.role is Role.USER
        for segment in case.result.segments
        for turns in [[t for t in case.turns(segment) if t.turn_type is TurnType.MAIN]]
        for index, a in enumerate(turns)
        for b in turns[index + 1 :]
    )


def a_tool_turn_is_in_a_context(case: Case) -> bool:
    return any(
        message.role is Role.TOOL and not message.carried
        for segment in case.result.segments
        for step in segment.steps
        for message in step.context
    )


def a_side_turn_is_in_a_segment(case: Case) -> bool:
    return any(
        turn.turn_type is TurnType.SIDE
        for segment in case.result.segments
        for turn in case.turns(segment)
    )


# Cuts and closings


def closed(by: ClosedBy) -> Callable[[Case], bool]:
    return lambda case: any(segment.closed_by is by for segment in case.result.segments)


def a_pause_is_exactly_the_gap(case: Case) -> bool:
    """And tears nothing."""
    return any(
        b.event_time - a.event_time == case.align.gap_ms
        and a.role not in (Role.ASSISTANT, Role.TOOL)
        for segment in case.result.segments
        for a, b in pairwise(case.turns(segment))
    )


def a_pause_is_a_millisecond_more_than_the_gap(case: Case) -> bool:
    """And tears."""
    ends: dict[Session, set[int]] = defaultdict(set)
    starts: dict[Session, set[int]] = defaultdict(set)
    for first, _ in case.revisions():
        session = (first.policy, first.session_id)
        starts[session].add(first.first_event_time)
        if first.closed_by is ClosedBy.GAP:
            ends[session].add(first.last_event_time)
    more = case.align.gap_ms + 1
    return any(end + more in starts[session] for session in ends for end in ends[session])


def a_slow_reply_is_not_torn_from_its_prompt(case: Case) -> bool:
    return any(
        b.event_time - a.event_time > case.align.gap_ms and is_reply(b)
        for segment in case.result.segments
        for a, b in pairwise(case.turns(segment))
    )


def a_record_arrives_at_the_very_due_time(case: Case) -> bool:
    """It is applied before what is due, and may put it off."""
    return any(
        e.arrival_ms == segment.closed_at
        for segment in case.result.segments
        for e in case.sessions[segment.policy, segment.session_id]
    )


def a_record_is_settled_to_the_millisecond(case: Case) -> bool:
    return any(
        e.stamp_ms + case.align.settle_ms == segment.closed_at
        for segment in case.result.segments
        for e in case.members(segment)
    )


def a_record_lacks_a_millisecond_to_be_settled(case: Case) -> bool:
    return case.result.held_back > 0 and any(
        e.stamp_ms + case.align.settle_ms == segment.closed_at + 1
        for segment in case.result.segments
        for e in case.sessions[segment.policy, segment.session_id]
        if e.arrival_ms <= segment.closed_at
    )


def a_size_cut_falls_before_the_feedback(case: Case) -> bool:
    """A reply before the cut has feedback that came after turns behind the cut."""
    for segment in case.result.segments:
        if segment.closed_by is not ClosedBy.SIZE:
            continue
        session = case.sessions[segment.policy, segment.session_id]
        behind = [
            e.arrival_ms
            for e in session
            if e.topic == TURNS_TOPIC and e.record.event_time > segment.last_event_time
        ]
        notes = [e.arrival_ms for e in case.members(segment) if e.topic == FEEDBACK_TOPIC]
        if behind and notes and max(notes) > min(behind):
            return True
    return False


# Strange times


def an_event_of_1970_is_accepted(case: Case) -> bool:
    return any(e.record.event_time == 0 for s in case.result.segments for e in case.members(s))


def an_event_of_2099_is_refused(case: Case) -> bool:
    return any(
        reason is DeadLetterReason.FUTURE_TIMESTAMP
        and case.at[place].record.event_time == YEAR_2099_MS
        for reason, place in case.dead
    )


def an_event_is_as_far_ahead_as_it_may(case: Case) -> bool:
    return any(
        e.record.event_time == e.arrival_ms + case.align.max_skew_ms
        for segment in case.result.segments
        for e in case.members(segment)
    )


def a_session_comes_late_from_a_spool(case: Case) -> bool:
    """A segment of several turns, all of which arrived longer after than one may be open."""
    return any(
        len(turns) >= 3 and min(e.delay_ms for e in turns) > case.align.max_open_ms
        for segment in case.result.segments
        for turns in [[e for e in case.members(segment) if e.topic == TURNS_TOPIC]]
    )


def a_spool_is_flushed_at_once(case: Case) -> bool:
    """What happened over longer than a gap arrives within the settle window."""
    return any(
        len(turns) >= 4
        and times[-1] - times[0] > case.align.gap_ms
        and max(came) - min(came) <= case.align.settle_ms
        for segment in case.result.segments
        for turns in [[e for e in case.members(segment) if e.topic == TURNS_TOPIC]]
        for times in [sorted(e.record.event_time for e in turns)]
        for came in [[e.arrival_ms for e in turns]]
    )


# Revisions and the horizon


def a_segment_is_revised_more_than_once(case: Case) -> bool:
    return any(len(later) > 1 for _, later in case.revisions())


def a_late_turn_makes_a_revision(case: Case) -> bool:
    return any(
        len(case.turns(later[-1])) > len(case.turns(first))
        for first, later in case.revisions()
        if later
    )


def a_revision_holds_something_back(case: Case) -> bool:
    """Something of a later revision had arrived when an earlier one was made."""
    return any(
        e.arrival_ms <= a.closed_at and e not in case.members(a)
        for first, later in case.revisions()
        for a, b in pairwise([first, *later])
        if a.revision > 0
        for e in case.members(b)
    )


def something_arrives_at_the_very_horizon(case: Case) -> bool:
    """And is taken in."""
    return any(
        e.arrival_ms == first.closed_at + case.align.horizon_ms
        for first, later in case.revisions()
        for revision in later
        for e in case.members(revision)
    )


def a_revision_is_made_after_the_horizon(case: Case) -> bool:
    """Of what arrived before it."""
    return any(
        revision.closed_at > first.closed_at + case.align.horizon_ms
        for first, later in case.revisions()
        for revision in later
    )


def something_comes_beyond_the_horizon(case: Case) -> bool:
    return any(reason is DeadLetterReason.BEYOND_HORIZON for reason, _ in case.dead)


def feedback_finds_its_segment_gone(case: Case) -> bool:
    """By turn id, of a segment that was there."""
    published: dict[Session, set[str]] = defaultdict(set)
    for segment in case.result.segments:
        published[segment.policy, segment.session_id] |= {
            turn.turn_id for turn in case.turns(segment)
        }
    return any(
        "unmatched" in reason and case.at[place].record.turn_id in published[case.at[place].session]
        for reason, place in case.dead
    )


def a_session_begins_again_after_it_was_forgotten(case: Case) -> bool:
    firsts = Counter(
        (s.policy, s.session_id) for s in case.result.segments if (s.ordinal, s.revision) == (0, 0)
    )
    return any(count > 1 for count in firsts.values())


def a_stray_gets_a_segment_of_its_own(case: Case) -> bool:
    """A later ordinal, an earlier time."""
    latest: dict[Session, int] = {}
    for first in sorted((f for f, _ in case.revisions()), key=lambda s: (s.closed_at, s.ordinal)):
        session = (first.policy, first.session_id)
        if first.last_event_time < latest.get(session, 0):
            return True
        latest[session] = max(latest.get(session, 0), first.first_event_time)
    return False


SITUATIONS: tuple[tuple[str, Callable[[Case], bool]], ...] = (
    ("interleaved sessions", sessions_interleave),
    ("a timestamp that steps back", a_timestamp_steps_back),
    ("idle until ticks come", a_partition_is_idle_until_ticks_come),
    ("idle for long", a_partition_is_idle_for_longer_than_anything_may_stay_open),
    ("a backlog on one topic only", only_one_topic_has_a_backlog),
    ("turns out of order", turns_arrive_out_of_order),
    ("feedback out of order", feedback_arrives_out_of_order),
    ("duplicated turn", duplicates(TURNS_TOPIC)),
    ("duplicated feedback", duplicates(FEEDBACK_TOPIC)),
    ("duplicate of what is published", a_duplicate_of_what_is_published),
    ("conflict of turns", conflicts(TURNS_TOPIC, TURNS_TOPIC)),
    ("conflict of feedback", conflicts(FEEDBACK_TOPIC, FEEDBACK_TOPIC)),
    ("feedback conflicts with a turn", conflicts(TURNS_TOPIC, FEEDBACK_TOPIC)),
    ("a turn conflicts with feedback", conflicts(FEEDBACK_TOPIC, TURNS_TOPIC)),
    ("conflict of turn ids", a_turn_id_conflicts),
    ("rejected, sent again, accepted", what_was_rejected_is_accepted_when_sent_again),
    ("feedback before its turn", feedback_comes_before_its_turn),
    ("feedback by turn id", feedback_is_attributed(AttributedBy.TURN_ID)),
    ("feedback without a turn id", feedback_is_attributed(AttributedBy.TIME)),
    ("feedback without any turn", feedback_has_no_turn(with_turn_id=False)),
    ("feedback for a turn that never comes", feedback_has_no_turn(with_turn_id=True)),
    ("a session of feedback alone", a_session_has_feedback_alone),
    ("edit", feedback_is_edited),
    ("retraction", feedback_is_retracted),
    ("late edit", an_edit_or_retraction_comes_after_the_original_was_published),
    ("regenerated branch", a_reply_is_regenerated),
    ("feedback off the branch", an_abandoned_branch_has_feedback),
    ("retried reply", a_reply_is_retried),
    ("retried user turn", a_user_turn_is_retried),
    ("tool turn", a_tool_turn_is_in_a_context),
    ("side turn", a_side_turn_is_in_a_segment),
    ("explicit end", closed(ClosedBy.END)),
    ("size cut", closed(ClosedBy.SIZE)),
    ("closed by duration", closed(ClosedBy.DURATION)),
    ("pause of exactly gap", a_pause_is_exactly_the_gap),
    ("pause of gap and a millisecond", a_pause_is_a_millisecond_more_than_the_gap),
    ("slow reply", a_slow_reply_is_not_torn_from_its_prompt),
    ("arrival at the due time", a_record_arrives_at_the_very_due_time),
    ("settled to the millisecond", a_record_is_settled_to_the_millisecond),
    ("a millisecond from settled", a_record_lacks_a_millisecond_to_be_settled),
    ("size cut in the middle of feedback", a_size_cut_falls_before_the_feedback),
    ("1970", an_event_of_1970_is_accepted),
    ("2099", an_event_of_2099_is_refused),
    ("as far ahead as allowed", an_event_is_as_far_ahead_as_it_may),
    ("late from a spool", a_session_comes_late_from_a_spool),
    ("a spool flushed at once", a_spool_is_flushed_at_once),
    ("revised twice", a_segment_is_revised_more_than_once),
    ("revised by a turn", a_late_turn_makes_a_revision),
    ("held back by a revision", a_revision_holds_something_back),
    ("at the very horizon", something_arrives_at_the_very_horizon),
    ("revised after the horizon", a_revision_is_made_after_the_horizon),
    ("beyond the horizon", something_comes_beyond_the_horizon),
    ("feedback for a segment that is gone", feedback_finds_its_segment_gone),
    ("forgotten and new", a_session_begins_again_after_it_was_forgotten),
    ("stray", a_stray_gets_a_segment_of_its_own),
)


def count(logs: int) -> dict[str, int]:
    """How many of so many logs meet each situation; the logs are always the same."""
    found = dict.fromkeys((name for name, _ in SITUATIONS), 0)
    for seed in range(logs):
        align = SETTINGS_VARIANTS[seed % len(SETTINGS_VARIANTS)]
        rng = random.Random(f"coverage-{seed}")
        log = random_log(rng, align, rng.randint(1, 60))
        result = run_oracle(log.turns, log.feedback, align, log.final_clock_ms)
        case = Case(log, align, result)
        for name, is_met in SITUATIONS:
            found[name] += is_met(case)
    return found


def test_every_situation_occurs() -> None:
    found = count(LOGS)
    assert {name: n for name, n in found.items() if n < AT_LEAST} == {}
