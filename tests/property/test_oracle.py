"""The oracle itself: the examples of the alignment page, single rules, and its invariants."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streams.contracts import (
    AttributedBy,
    BranchReply,
    ClosedBy,
    DeadLetterReason,
    DialogueTurn,
    FeedbackEvent,
    FeedbackKind,
    Role,
    SourceRef,
    Step,
    TrajectorySegment,
    TurnType,
)
from streams.settings import AlignSettings
from tests.oracle.aligner import OracleResult, merged, run_oracle
from tests.oracle.logs import (
    BASE_MS,
    FEEDBACK_TOPIC,
    PARTITION,
    SETTINGS_VARIANTS,
    TURNS_TOPIC,
    Log,
    LogRecord,
    dense_settings,
    logs,
    random_log,
)

SECOND = 1_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
MIDNIGHT = 20_000 * 24 * HOUR
"""0:00 of the examples."""

DEFAULTS = AlignSettings()
DENSE = dense_settings()
LONG_AFTER = 10**9
BULK_LOGS = 270

RELAXED = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@dataclass
class Script:
    """A log written by hand: times count from ``start_ms``, arrival = event time unless said."""

    align: AlignSettings
    start_ms: int
    turns: list[LogRecord] = field(default_factory=list)
    feedback: list[LogRecord] = field(default_factory=list)

    def turn(
        self, turn_id: str, role: Role, happened: int, arrives: int | None = None, **more: Any
    ) -> None:
        fields: dict[str, Any] = {
            "event_id": f"e-{turn_id}",
            "session_id": "s",
            "turn_id": turn_id,
            "role": role,
            "content": turn_id,
            "event_time": self.start_ms + happened,
            "source": "test",
        }
        self.add(DialogueTurn(**(fields | more)), happened if arrives is None else arrives)

    def user(self, turn_id: str, happened: int, arrives: int | None = None, **more: Any) -> None:
        self.turn(turn_id, Role.USER, happened, arrives, **more)

    def reply(self, turn_id: str, happened: int, arrives: int | None = None, **more: Any) -> None:
        self.turn(turn_id, Role.ASSISTANT, happened, arrives, **more)

    def thumb(self, event_id: str, happened: int, arrives: int | None = None, **more: Any) -> None:
        fields: dict[str, Any] = {
            "event_id": event_id,
            "session_id": "s",
            "event_time": self.start_ms + happened,
            "kind": FeedbackKind.THUMB,
            "source": "test",
            "value": 1.0,
        }
        self.add(FeedbackEvent(**(fields | more)), happened if arrives is None else arrives)

    def add(self, record: DialogueTurn | FeedbackEvent | None, arrives: int) -> None:
        is_turn = record is None or isinstance(record, DialogueTurn)
        log, topic = (self.turns, TURNS_TOPIC) if is_turn else (self.feedback, FEEDBACK_TOPIC)
        log.append(LogRecord(topic, PARTITION, len(log), self.start_ms + arrives, record))

    def run(self, until: int = LONG_AFTER) -> OracleResult:
        return run_oracle(self.turns, self.feedback, self.align, self.start_ms + until)

    def closings(self, until: int = LONG_AFTER) -> list[tuple[int, int, int, ClosedBy]]:
        """(ordinal, revision, closed_at from the start, closed_by) of all that was emitted."""
        return [
            (one.ordinal, one.revision, one.closed_at - self.start_ms, one.closed_by)
            for one in self.run(until).segments
        ]

    def reasons(self, until: int = LONG_AFTER) -> list[tuple[str, int, DeadLetterReason]]:
        return [
            (topic, offset, reason) for topic, _, offset, reason in self.run(until).dead_letters
        ]


@pytest.fixture
def story() -> Script:
    """An empty log under the default settings."""
    return Script(DEFAULTS, MIDNIGHT)


@pytest.fixture
def dense() -> Script:
    """An empty log under the dense settings (settle 5, gap 20, max_open 60, horizon 150)."""
    return Script(DENSE, BASE_MS)


def feedback_ids(segment: TrajectorySegment) -> dict[str, list[str]]:
    """The shown feedback's ids by the turn id of the step they are on."""
    return {step.turn_id: [one.event_id for one in step.feedback] for step in segment.steps}


class TestExamples:
    def test_1_a_thumb_does_not_move_the_gap(self, story: Script) -> None:
        story.user("u1", 0)
        story.reply("a1", 10 * SECOND)
        story.thumb("f1", 3 * MINUTE, turn_id="a1")
        assert story.closings() == [(0, 0, 5 * MINUTE + 10 * SECOND, ClosedBy.GAP)]
        assert feedback_ids(story.run().segments[0]) == {"a1": ["f1"]}

    def test_2_a_thumb_moves_an_ended_piece(self, story: Script) -> None:
        story.user("u1", 0)
        story.reply("a1", 10 * SECOND, session_done=True)
        assert story.closings() == [(0, 0, 40 * SECOND, ClosedBy.END)]
        story.thumb("f1", 35 * SECOND, turn_id="a1")
        assert story.closings() == [(0, 0, 65 * SECOND, ClosedBy.END)]

    def test_3_a_late_thumb_makes_a_revision(self, story: Script) -> None:
        story.user("u1", 0)
        story.reply("a1", 10 * SECOND, session_done=True)
        story.thumb("f1", 35 * SECOND, turn_id="a1")
        story.thumb("f2", 2 * MINUTE, turn_id="a1")
        assert story.closings() == [
            (0, 0, 65 * SECOND, ClosedBy.END),
            (0, 1, 150 * SECOND, ClosedBy.END),
        ]
        before, after = story.run().segments
        assert feedback_ids(before) == {"a1": ["f1"]}
        assert feedback_ids(after) == {"a1": ["f1", "f2"]}
        assert after.segment_id == before.segment_id
        assert after.first_closed_at == before.closed_at

    def test_4_a_spool_is_not_torn(self, story: Script) -> None:
        story.user("u1", 0, arrives=3 * HOUR)
        story.reply("a1", 10 * SECOND, arrives=3 * HOUR + 20 * SECOND)
        assert story.closings() == [(0, 0, 3 * HOUR + 320 * SECOND, ClosedBy.GAP)]
        story.user("u2", 20 * SECOND, arrives=3 * HOUR + 3 * MINUTE)
        assert story.closings() == [(0, 0, 3 * HOUR + 30 * MINUTE, ClosedBy.DURATION)]
        assert len(story.run().segments[0].lineage) == 3

    def test_5_a_late_turn_joins_and_a_much_earlier_one_strays(self, story: Script) -> None:
        story.user("u1", 0)
        story.reply("a1", 10 * SECOND)
        first = (0, 0, 310 * SECOND, ClosedBy.GAP)
        story.user("u2", 5 * SECOND, arrives=9 * MINUTE)
        assert story.closings() == [first, (0, 1, 9 * MINUTE + 30 * SECOND, ClosedBy.GAP)]
        story.turns.pop()
        story.reply("a0", -9 * MINUTE, arrives=9 * MINUTE)
        assert story.closings() == [first, (1, 0, 14 * MINUTE, ClosedBy.GAP)]

    def test_6_an_edit_inherits_its_originals_target(self, story: Script) -> None:
        story.user("u1", 0)
        story.reply("a1", 10 * SECOND)
        story.thumb("f1", 30 * SECOND)
        story.thumb("f2", 20 * MINUTE, supersedes="f1", kind=FeedbackKind.RATING)
        before, after = story.run().segments
        assert feedback_ids(before) == {"a1": ["f1"]}
        (shown,) = after.steps[0].feedback
        assert (shown.event_id, shown.attributed_by) == ("f2", AttributedBy.TIME)
        assert len(after.lineage) == 4


class TestIdentity:
    def test_the_future_is_refused_before_all_else(self, dense: Script) -> None:
        dense.user("u1", 10, arrives=0)
        dense.user("u2", 12, arrives=1)
        dense.user("u2", 10, arrives=1)
        assert dense.reasons() == [(TURNS_TOPIC, 1, DeadLetterReason.FUTURE_TIMESTAMP)]
        assert len(dense.run().segments[0].lineage) == 2

    def test_equal_content_is_dropped_and_other_content_conflicts(self, dense: Script) -> None:
        dense.user("u1", 0)
        dense.user("u1", 0, arrives=1)
        dense.user("u1", 0, arrives=1, content="other")
        dense.thumb("e-u1", 0, arrives=1)
        assert dense.run().duplicates == [(TURNS_TOPIC, PARTITION, 1)]
        assert dense.reasons() == [
            (TURNS_TOPIC, 2, DeadLetterReason.CONFLICTING_DUPLICATE),
            (FEEDBACK_TOPIC, 0, DeadLetterReason.CONFLICTING_DUPLICATE),
        ]

    @pytest.mark.parametrize(("arrives", "known"), [(55 + 150, True), (55 + 151, False)])
    def test_an_id_is_known_while_its_event_is_held(
        self, dense: Script, arrives: int, known: bool
    ) -> None:
        dense.user("u1", 0)
        dense.reply("a1", 50, session_done=True)
        dense.add(dense.turns[0].record, arrives)
        assert dense.closings(55) == [(0, 0, 55, ClosedBy.END)]
        assert bool(dense.run().duplicates) is known

    def test_feedback_that_died_is_new_when_sent_again(self, dense: Script) -> None:
        dense.thumb("f1", 0, turn_id="a1")
        dense.reply("a1", 41)
        dense.thumb("f1", 0, arrives=42, turn_id="a1")
        assert dense.reasons() == [(FEEDBACK_TOPIC, 0, DeadLetterReason.UNMATCHED_FEEDBACK)]
        assert feedback_ids(dense.run().segments[0]) == {"a1": ["f1"]}

    def test_a_retraction_needs_something_to_retract(self, dense: Script) -> None:
        dense.reply("a1", 0)
        dense.thumb("f1", 1, kind=FeedbackKind.RETRACTION, turn_id="a1")
        assert dense.reasons() == [(FEEDBACK_TOPIC, 0, DeadLetterReason.INVALID)]

    def test_a_turn_id_belongs_to_one_held_turn(self, dense: Script) -> None:
        dense.user("u1", 0)
        dense.user("u1", 1, event_id="e2")
        assert dense.reasons() == [(TURNS_TOPIC, 1, DeadLetterReason.CONFLICTING_DUPLICATE)]

    @pytest.mark.parametrize(("arrives", "known"), [(20 + 150, True), (20 + 151, False)])
    def test_a_turn_id_is_free_when_its_turn_is_forgotten(
        self, dense: Script, arrives: int, known: bool
    ) -> None:
        dense.reply("a1", 0)
        dense.reply("a2", 100)
        dense.reply("a1", 101, arrives=arrives, event_id="e-new")
        assert bool(dense.reasons()) is known

    @pytest.mark.parametrize(("arrives", "late"), [(25 + 150, False), (25 + 151, True)])
    def test_beyond_the_horizon(self, dense: Script, arrives: int, late: bool) -> None:
        dense.reply("a1", 5)
        dense.reply("a2", 100)
        dense.user("u0", 4, arrives=arrives)
        dense.thumb("f0", 5, arrives=arrives)
        dense.thumb("f1", 6, arrives=arrives)
        dense.thumb("f2", 5, arrives=arrives, turn_id="a1")
        assert dense.closings(25) == [(0, 0, 25, ClosedBy.GAP)]
        beyond = [
            (topic, offset)
            for topic, offset, reason in dense.reasons()
            if reason is DeadLetterReason.BEYOND_HORIZON
        ]
        assert beyond == ([(TURNS_TOPIC, 2), (FEEDBACK_TOPIC, 0)] if late else [])
        unmatched = [offset for _, offset, reason in dense.reasons() if "unmatched" in reason]
        assert unmatched == ([1, 2] if late else [])


class TestAttribution:
    @pytest.mark.parametrize(("happened", "expected"), [(10, "a1"), (40, "a1"), (41, None)])
    def test_by_time_within_the_window(
        self, dense: Script, happened: int, expected: str | None
    ) -> None:
        dense.reply("a1", 10)
        dense.thumb("f1", happened)
        assert bool(dense.reasons()) is (expected is None)

    def test_by_time_the_latest_reply_counts_even_a_later_arrival(self, dense: Script) -> None:
        dense.reply("a1", 0)
        dense.thumb("f1", 8)
        dense.reply("a2", 4, arrives=12)
        dense.turn("side", Role.ASSISTANT, 6, arrives=12, turn_type=TurnType.SIDE)
        assert feedback_ids(dense.run().segments[0]) == {"a1": [], "a2": ["f1"]}

    def test_by_time_an_earlier_reply_that_arrives_later_changes_nothing(
        self, dense: Script
    ) -> None:
        dense.reply("a1", 4)
        dense.thumb("f1", 8)
        dense.reply("a0", 2, arrives=12)
        assert feedback_ids(dense.run().segments[0]) == {"a0": [], "a1": ["f1"]}

    @pytest.mark.parametrize(("arrives", "visible"), [(20 + 150, True), (20 + 151, False)])
    def test_an_inherited_target_must_be_visible(
        self, dense: Script, arrives: int, visible: bool
    ) -> None:
        dense.reply("a1", 0)
        dense.thumb("f1", 1, turn_id="a1")
        dense.reply("a2", 100)
        dense.thumb("f2", arrives, supersedes="f1")
        assert bool(dense.reasons()) is not visible

    def test_a_thread_holds_together_through_a_member_that_is_not_in_yet(
        self, dense: Script
    ) -> None:
        dense.reply("a1", 0, session_done=True)
        dense.thumb("first", 1, turn_id="a1")
        dense.thumb("last", 10, supersedes="middle", turn_id="a1")
        for happened in range(14, 66, 4):
            dense.thumb(f"f{happened}", happened, turn_id="a1", kind=FeedbackKind.DWELL)
        dense.thumb("middle", 66, supersedes="first")
        _, revision, *_ = dense.run().segments
        assert revision.closed_at == BASE_MS + 70
        shown = feedback_ids(revision)["a1"]
        assert shown[:2] == ["last", "f14"]
        assert len(revision.lineage) == 1 + 2 + 13

    def test_a_turn_id_is_never_replaced_by_time(self, dense: Script) -> None:
        dense.reply("a1", 0)
        dense.thumb("f1", 1, turn_id="a9")
        dense.thumb("f2", 1, supersedes="f9")
        assert {reason for _, _, reason in dense.reasons()} == {DeadLetterReason.UNMATCHED_FEEDBACK}

    def test_a_turn_at_the_last_moment_saves_feedback(self, dense: Script) -> None:
        dense.thumb("f1", 0, turn_id="a1")
        dense.reply("a1", 40)
        assert dense.reasons() == []
        assert feedback_ids(dense.run().segments[0]) == {"a1": ["f1"]}

    def test_an_edit_falls_back_to_its_own_turn_id(self, dense: Script) -> None:
        dense.reply("a1", 0)
        dense.thumb("f2", 1, supersedes="f1", turn_id="a1")
        assert feedback_ids(dense.run(25).segments[0]) == {"a1": ["f2"]}
        (shown,) = dense.run().segments[0].steps[0].feedback
        assert shown.attributed_by is AttributedBy.TURN_ID

    def test_of_a_thread_the_last_shows(self, dense: Script) -> None:
        dense.reply("a1", 0)
        dense.reply("a2", 1)
        dense.thumb("f1", 1, turn_id="a1", supersedes="missing")
        dense.thumb("f2", 2, turn_id="a2", supersedes="missing")
        dense.thumb("f3", 3, turn_id="a1")
        (segment,) = dense.run().segments
        assert feedback_ids(segment) == {"a1": ["f3"], "a2": ["f2"]}
        assert len(segment.lineage) == 5

    def test_a_retraction_hides_its_whole_thread(self, dense: Script) -> None:
        dense.reply("a1", 0)
        dense.thumb("f1", 1, turn_id="a1")
        dense.thumb("f2", 2, supersedes="f1")
        dense.thumb("f3", 3, supersedes="f2", kind=FeedbackKind.RETRACTION)
        (segment,) = dense.run().segments
        assert feedback_ids(segment) == {"a1": []}
        assert len(segment.lineage) == 4


class TestBranch:
    def test_a_regenerated_reply_is_an_alternative(self, dense: Script) -> None:
        dense.user("u1", 0)
        dense.reply("a1", 1)
        dense.reply("a2", 2, parent_turn_id="u1")
        dense.user("u2", 3)
        dense.thumb("f1", 4, turn_id="a1")
        (segment,) = dense.run().segments
        (step,) = segment.steps
        (other,) = step.alternatives
        assert (step.turn_id, other.turn_id, other.feedback[0].event_id) == ("a2", "a1", "f1")
        assert [one.turn_id for one in step.context] == ["u1"]
        assert step.next_user_turn is not None
        assert step.next_user_turn.turn_id == "u2"
        assert segment.off_branch == ()

    def test_a_retry_is_no_alternative(self, dense: Script) -> None:
        dense.user("u1", 0, request_id="r")
        dense.reply("a1", 1, request_id="r")
        dense.user("u1-again", 2, request_id="r", content="u1")
        dense.reply("a2", 3, request_id="r")
        dense.thumb("f1", 4, turn_id="a1")
        (segment,) = dense.run().segments
        (step,) = segment.steps
        assert (step.turn_id, [one.turn_id for one in step.context]) == ("a2", ["u1"])
        assert step.alternatives == ()
        (off,) = segment.off_branch
        assert (off.turn_id, off.feedback[0].event_id) == ("a1", "f1")

    def test_a_retry_off_the_branch_is_no_alternative_either(self, dense: Script) -> None:
        dense.user("u1", 0)
        dense.reply("a1", 1, request_id="r")
        dense.reply("a2", 2, request_id="r", parent_turn_id="u1")
        (segment,) = dense.run().segments
        assert segment.steps[0].alternatives == ()
        assert segment.off_branch == ()

    def test_a_reply_to_something_else_is_off_the_branch(self, dense: Script) -> None:
        dense.user("u1", 0)
        dense.reply("a1", 1)
        dense.user("u2", 2)
        dense.reply("a2", 3)
        dense.user("u3", 4, parent_turn_id="a1")
        dense.reply("a3", 5)
        dense.thumb("f1", 6, turn_id="a2")
        (segment,) = dense.run().segments
        assert [step.turn_id for step in segment.steps] == ["a1", "a3"]
        assert [step.alternatives for step in segment.steps] == [(), ()]
        assert [one.turn_id for one in segment.off_branch] == ["a2"]

    def test_a_parent_must_stand_earlier(self, dense: Script) -> None:
        dense.user("u1", 0, parent_turn_id="a1")
        dense.reply("a1", 1, parent_turn_id="nobody")
        (segment,) = dense.run().segments
        assert [one.turn_id for one in segment.steps[0].context] == ["u1"]


class TestCuts:
    @pytest.mark.parametrize(
        ("role", "kind", "happened", "pieces"),
        [
            (Role.USER, TurnType.MAIN, 20, 1),
            (Role.USER, TurnType.MAIN, 21, 2),
            (Role.ASSISTANT, TurnType.SIDE, 21, 2),
            (Role.ASSISTANT, TurnType.MAIN, 60, 1),
            (Role.TOOL, TurnType.MAIN, 60, 1),
            (Role.ASSISTANT, TurnType.MAIN, 61, 2),
        ],
    )
    def test_gap_and_duration(
        self, dense: Script, role: Role, kind: TurnType, happened: int, pieces: int
    ) -> None:
        dense.user("u1", 0, arrives=61)
        dense.turn("x", role, happened, arrives=61, turn_type=kind)
        assert len(dense.run().segments) == pieces

    def test_a_side_turn_ends_a_session(self, dense: Script) -> None:
        dense.user("u1", 0)
        dense.turn("x", Role.SYSTEM, 1, turn_type=TurnType.SIDE, session_done=True)
        dense.user("u2", 2)
        assert dense.closings(6) == [(0, 0, 6, ClosedBy.END)]

    def test_an_end_stays_an_end_when_a_pause_follows(self, dense: Script) -> None:
        dense.reply("a1", 0, arrives=30, session_done=True)
        dense.reply("a2", 21, arrives=30)
        dense.user("u2", 30, arrives=30)
        assert dense.closings(35) == [(0, 0, 35, ClosedBy.END)]

    def test_size_by_steps_takes_the_next_user_turn(self, dense: Script) -> None:
        for place in range(3):
            dense.reply(f"a{place}", place)
        dense.user("u9", 3)
        dense.turn("x", Role.TOOL, 4)
        assert dense.closings(7) == [(0, 0, 7, ClosedBy.SIZE)]
        (segment,) = dense.run(7).segments
        assert [step.next_user_turn for step in segment.steps] == [None] * 3
        dense.thumb("f1", 5, turn_id="a2")
        (segment,) = dense.run(10).segments
        answers = [step.next_user_turn for step in segment.steps]
        assert [one.turn_id for one in answers if one is not None] == ["u9"] * 3

    def test_size_by_bytes_counts_tokens_of_main_turns(self, dense: Script) -> None:
        dense.user("u1", 0, content="ü" * 10)
        dense.user("side", 0, content="z" * 50, turn_type=TurnType.SIDE)
        dense.reply("a1", 1, content="", token_ids=(1,), behaviour_logprobs=(-0.1,))
        dense.reply("a2", 2, content="123", prompt_token_ids=(1, 2))
        assert dense.closings(7) == []
        dense.reply("a3", 3, content="12345")
        assert dense.closings(8) == [(0, 0, 8, ClosedBy.SIZE)]

    def test_size_cuts_after_a_reply_only(self, dense: Script) -> None:
        dense.user("u1", 0, content="x" * 70)
        dense.reply("a1", 1)
        dense.user("u2", 2)
        assert dense.closings(6) == [(0, 0, 6, ClosedBy.SIZE)]
        assert len(dense.run(6).segments[0].lineage) == 2

    @pytest.mark.parametrize(("arrives", "visible"), [(70 + 145, True), (70 + 146, False)])
    def test_an_answer_from_a_forgotten_segment_is_not_shown(
        self, dense: Script, arrives: int, visible: bool
    ) -> None:
        dense.user("u5", 50)
        dense.reply("a5", 50)
        dense.reply("a0", 0, arrives=arrives, content="x" * 60)
        answers = [step.next_user_turn for step in dense.run().segments[1].steps]
        assert [one is not None for one in answers] == [visible]


class TestClosing:
    def test_an_unanswered_prompt_waits_longer(self, dense: Script) -> None:
        dense.user("u1", 0)
        dense.turn("side", Role.ASSISTANT, 1, turn_type=TurnType.SIDE)
        assert dense.closings() == [(0, 0, 60, ClosedBy.DURATION)]

    def test_side_turns_alone_wait_for_the_gap(self, dense: Script) -> None:
        dense.turn("side", Role.USER, 1, turn_type=TurnType.SIDE)
        assert dense.closings() == [(0, 0, 21, ClosedBy.GAP)]

    def test_forced_closing_holds_back_what_is_unripe(self, dense: Script) -> None:
        for happened in range(0, 60, 15):
            dense.user(f"u{happened}", happened)
        dense.reply("a1", 54)
        dense.thumb("f1", 57, turn_id="a1")
        dense.user("u9", 58)
        dense.reply("a9", 59)
        dense.thumb("f9", 59, turn_id="a9")
        assert dense.closings(62) == [
            (0, 0, 60, ClosedBy.DURATION),
            (0, 1, 62, ClosedBy.DURATION),
        ]
        result = dense.run(60)
        assert result.held_back == 4
        assert [len(one.lineage) for one in result.segments] == [5]
        assert {place[2] for place in result.still_open} == {0, 1, 5, 6}
        assert dense.closings() == [
            (0, 0, 60, ClosedBy.DURATION),
            (0, 1, 62, ClosedBy.DURATION),
            (1, 0, 79, ClosedBy.GAP),
        ]

    def test_closing_waits_for_the_first_turn_to_be_ripe(self, dense: Script) -> None:
        for happened in range(0, 60, 15):
            dense.user(f"u{happened}", happened + 1)
        dense.user("u0-late", 0, arrives=58)
        assert dense.closings() == [
            (0, 0, 63, ClosedBy.DURATION),
        ]

    def test_records_of_the_due_millisecond_come_first(self, dense: Script) -> None:
        dense.reply("a1", 0, session_done=True)
        dense.thumb("f1", 5, turn_id="a1")
        assert dense.closings() == [(0, 0, 10, ClosedBy.END)]

    def test_a_condition_met_late_is_due_when_it_is_met(self, dense: Script) -> None:
        dense.user("u1", 0, arrives=0)
        dense.reply("a1", 30, arrives=30)
        dense.user("u2", 31, arrives=31)
        dense.user("end", 2, arrives=45, session_done=True, turn_type=TurnType.SIDE)
        # a1 and u2 become a run of their own when the end closes at 50.
        assert dense.closings(50) == [(0, 0, 50, ClosedBy.END)]
        assert dense.closings()[1:] == [(1, 0, 90, ClosedBy.DURATION)]

    def test_two_actions_in_one_millisecond_each_computed_anew(self, dense: Script) -> None:
        dense.reply("a1", 0, arrives=50, session_done=True)
        dense.reply("a2", 1, arrives=50, session_done=True)
        assert dense.closings() == [(0, 0, 55, ClosedBy.END), (1, 0, 55, ClosedBy.END)]

    def test_a_piece_waits_for_the_one_before_it(self, dense: Script) -> None:
        dense.reply("a1", 1, session_done=True)
        dense.reply("a2", 2, session_done=True)
        dense.thumb("f1", 4, turn_id="a1")
        assert dense.closings() == [(0, 0, 9, ClosedBy.END), (1, 0, 9, ClosedBy.END)]

    def test_user_id_is_the_last_one_known(self, dense: Script) -> None:
        dense.user("u1", 0, user_id="bob")
        dense.reply("a1", 1, user_id="alice")
        dense.turn("side", Role.TOOL, 1, turn_type=TurnType.SIDE, session_done=True)
        dense.user("u2", 2)
        dense.reply("a2", 3, session_done=True)
        result = dense.run()
        assert [one.user_id for one in result.segments] == ["alice", "alice"]
        assert set(result.record_keys.values()) == {"alice"}


class TestLate:
    def test_a_revision_waits_for_all_but_not_for_ever(self, dense: Script) -> None:
        dense.reply("a1", 0, session_done=True)
        for happened in range(10, 80, 4):
            dense.thumb(f"f{happened}", happened, turn_id="a1")
        assert dense.closings()[:3] == [
            (0, 0, 5, ClosedBy.END),
            (0, 1, 70, ClosedBy.END),
            (0, 2, 83, ClosedBy.END),
        ]
        # Those of 66 and 70 are too young for revision 1.
        assert dense.run(70).held_back == 2

    def test_feedback_does_not_go_in_before_its_turn(self, dense: Script) -> None:
        dense.user("u1", 0)
        dense.reply("a9", 20, session_done=True)
        dense.thumb("f1", 30, turn_id="a1")
        dense.reply("a1", 10, arrives=34)
        segments = dense.run().segments
        assert [(one.revision, one.closed_at - BASE_MS) for one in segments] == [(0, 25), (1, 39)]
        assert feedback_ids(segments[1]) == {"a1": ["f1"], "a9": []}

    @pytest.mark.parametrize(("happened", "ordinal"), [(-20, 0), (-21, 1)])
    def test_a_turn_a_gap_before_the_segment_strays(
        self, dense: Script, happened: int, ordinal: int
    ) -> None:
        dense.reply("a1", 0, session_done=True)
        dense.reply("a0", happened, arrives=10)
        assert dense.closings()[1][0] == ordinal

    def test_a_late_turn_belongs_to_the_nearest_boundary_above(self, dense: Script) -> None:
        dense.reply("a1", 0, session_done=True)
        dense.reply("a2", 5, session_done=True)
        dense.user("u2", 2, arrives=20)
        dense.user("u0", -1, arrives=30)
        assert [one[:2] for one in dense.closings()] == [(0, 0), (1, 0), (1, 1), (0, 1)]

    def test_a_late_turn_keeps_its_early_feedback_waiting(self) -> None:
        script = Script(dense_settings(orphan_wait_ms=90), BASE_MS)
        script.reply("a9", 0, session_done=True)
        script.thumb("f1", 1, turn_id="a1")
        script.reply("a1", -1, arrives=80)
        assert script.closings() == [(0, 0, 5, ClosedBy.END), (0, 1, 85, ClosedBy.END)]


class TestContext:
    def test_carried_context_is_bounded_and_keeps_the_system_message(self, dense: Script) -> None:
        dense.turn("y1", Role.SYSTEM, 0, content="s" * 10)
        dense.user("u1", 1, content="a" * 16)
        dense.reply("a1", 2, content="b" * 16, session_done=True)
        dense.user("u2", 3, content="c")
        dense.reply("a2", 4, content="d", session_done=True)
        dense.turn("side", Role.USER, 5, turn_type=TurnType.SIDE, session_done=True)
        dense.reply("a4", 6, content="e")
        first, second, third, fourth = dense.run().segments
        assert not any(one.carried for one in first.steps[0].context)
        assert [(one.turn_id, one.carried) for one in second.steps[0].context] == [
            ("y1", True),
            ("a1", True),
            ("u2", False),
        ]
        assert third.steps == ()
        # The side segment shows nothing and hands on what it carried.
        assert [one.turn_id for one in fourth.steps[0].context] == ["y1", "a1", "u2", "a2"]

    def test_context_comes_from_the_segment_below_not_the_last_closed(self, dense: Script) -> None:
        dense.reply("a1", 0)
        dense.reply("a2", 100)
        dense.reply("a0", -30, arrives=125)
        dense.reply("a3", 130)
        segments = dense.run().segments
        assert [one.steps[0].turn_id for one in segments] == ["a1", "a2", "a0", "a3"]
        carried = [[one.turn_id for one in each.steps[0].context] for each in segments]
        assert carried == [[], ["a1"], [], ["a1", "a2"]]

    @pytest.mark.parametrize(("happened", "visible"), [(150, True), (151, False)])
    def test_context_comes_from_a_visible_segment(
        self, dense: Script, happened: int, visible: bool
    ) -> None:
        dense.reply("a1", 0)
        dense.reply("a2", happened)
        assert bool(dense.run().segments[1].steps[0].context) is visible

    def test_carried_context_has_no_retries(self, dense: Script) -> None:
        dense.user("u1", 0)
        dense.reply("a1", 1, request_id="r")
        dense.reply("a2", 2, request_id="r", session_done=True)
        dense.reply("a3", 3)
        context = dense.run().segments[1].steps[0].context
        assert [one.turn_id for one in context] == ["u1", "a2"]

    def test_a_system_message_that_is_too_large_goes_too(self, dense: Script) -> None:
        dense.turn("y1", Role.SYSTEM, 0, content="s" * 41)
        dense.reply("a1", 1, session_done=True)
        dense.reply("a2", 2)
        assert dense.run().segments[1].steps[0].context == ()

    def test_prompt_token_ids_stay_on_the_first_step(self, dense: Script) -> None:
        dense.reply("a1", 0, prompt_token_ids=(1,))
        dense.reply("a2", 1, prompt_token_ids=(1, 2))
        (segment,) = dense.run().segments
        assert [step.prompt_token_ids for step in segment.steps] == [(1,), None]

    def test_id_and_digest_are_the_stated_ones(self, dense: Script) -> None:
        dense.reply("a1", 0)
        (segment,) = dense.run().segments
        name = b'["default","s",0,"a1","e-a1",%d]' % segment.first_event_time
        assert segment.segment_id == hashlib.sha256(name).hexdigest()[:32]
        steps = msgspec.json.encode(segment.steps)
        assert segment.digest == hashlib.sha256(steps).hexdigest()
        assert b'"turn_id":"a1"' in steps


class TestForgetting:
    @pytest.mark.parametrize(("arrives", "ordinal"), [(20 + 150, 1), (20 + 151, 0)])
    def test_a_quiet_session_starts_again(self, dense: Script, arrives: int, ordinal: int) -> None:
        dense.reply("a1", 0, user_id="alice")
        dense.reply("a2", arrives)
        again = dense.run().segments[1]
        assert again.ordinal == ordinal
        assert again.user_id == ("alice" if ordinal else None)

    def test_feedback_that_died_counts_as_a_sign_of_life(self, dense: Script) -> None:
        dense.reply("a1", 0)
        dense.thumb("f1", 100, turn_id="nobody")
        dense.reply("a2", 250)
        assert dense.run().segments[1].ordinal == 1


class TestClock:
    def test_a_timestamp_that_steps_back_does_not_turn_the_clock(self, dense: Script) -> None:
        dense.add(None, 30)
        dense.reply("a1", 2, session_done=True)
        assert dense.closings() == [(0, 0, 35, ClosedBy.END)]

    def test_nothing_arrives_after_the_final_clock(self, dense: Script) -> None:
        dense.reply("a1", 0, session_done=True)
        dense.reply("a2", 5)
        assert dense.closings(4) == []
        assert dense.run(4).still_open == {(TURNS_TOPIC, PARTITION, 0)}
        assert dense.closings(5) == [(0, 0, 5, ClosedBy.END)]
        assert dense.run(5).still_open == {(TURNS_TOPIC, PARTITION, 1)}

    def test_turns_are_applied_before_feedback_of_the_same_arrival(self, dense: Script) -> None:
        dense.thumb("x", 0)
        dense.reply("a1", 0, event_id="x")
        assert dense.reasons() == [(FEEDBACK_TOPIC, 0, DeadLetterReason.CONFLICTING_DUPLICATE)]


# Invariants over any log.

ANY_CASE = st.sampled_from(SETTINGS_VARIANTS).flatmap(
    lambda align: st.tuples(st.just(align), logs(align))
)


def bulk_cases() -> Iterator[tuple[AlignSettings, Log]]:
    for seed in range(BULK_LOGS):
        align = SETTINGS_VARIANTS[seed % len(SETTINGS_VARIANTS)]
        yield align, random_log(random.Random(seed), align, 50)


def run_log(align: AlignSettings, log: Log) -> OracleResult:
    return run_oracle(log.turns, log.feedback, align, log.final_clock_ms)


def arrivals(log: Log) -> dict[SourceRef, tuple[int, LogRecord]]:
    """Arrival and record by coordinates, of all that arrives in time and can be read."""
    return {
        reference(entry.topic, entry.partition, entry.offset): (arrival, entry)
        for arrival, entry in merged(log.turns, log.feedback)
        if entry.record is not None and arrival <= log.final_clock_ms
    }


def reference(topic: str, partition: int, offset: int) -> SourceRef:
    return SourceRef(topic=topic, partition=partition, offset=offset)


def lives(result: OracleResult) -> list[list[TrajectorySegment]]:
    """The revisions of each segment; a forgotten session may use an id again."""
    grouped: dict[tuple[str, int], list[TrajectorySegment]] = defaultdict(list)
    for segment in result.segments:
        grouped[segment.segment_id, segment.first_closed_at].append(segment)
    return [sorted(life, key=lambda one: one.revision) for life in grouped.values()]


def check_each_event_is_in_one_place(log: Log, result: OracleResult) -> None:
    places = Counter(ref for life in lives(result) for ref in life[-1].lineage)
    places.update(reference(*place) for place in result.still_open)
    places.update(reference(*letter[:3]) for letter in result.dead_letters)
    places.update(reference(*place) for place in result.duplicates)
    assert places == Counter(list(arrivals(log)))


def check_all_is_ripe(align: AlignSettings, log: Log, result: OracleResult) -> None:
    known = arrivals(log)
    for segment in result.segments:
        for ref in segment.lineage:
            arrival, entry = known[ref]
            assert entry.record is not None
            stamp = max(arrival, entry.record.event_time)
            assert stamp + align.settle_ms <= segment.closed_at <= log.final_clock_ms


def check_revisions_follow(result: OracleResult) -> None:
    frozen = ("ordinal", "closed_by", "user_id", "source", "policy", "session_id")
    for life in lives(result):
        assert [one.revision for one in life] == list(range(len(life)))
        assert life[0].closed_at == life[0].first_closed_at
        for before, after in pairwise(life):
            assert set(before.lineage) < set(after.lineage)
            assert before.closed_at <= after.closed_at
            assert all(getattr(before, name) == getattr(after, name) for name in frozen)


def check_what_is_shown_is_in_the_lineage(log: Log, result: OracleResult) -> None:
    known = arrivals(log)
    for segment in result.segments:
        records = [known[ref][1].record for ref in segment.lineage]
        event_ids = {record.event_id for record in records if record is not None}
        turn_ids = [one.turn_id for one in records if isinstance(one, DialogueTurn)]
        replies: list[Step | BranchReply] = [*segment.steps, *segment.off_branch]
        replies_shown = [reply.turn_id for reply in replies]
        for step in segment.steps:
            replies_shown += [other.turn_id for other in step.alternatives]
        assert len(replies_shown) == len(set(replies_shown))
        assert set(replies_shown) <= set(turn_ids)
        feedback = [one.event_id for reply in replies for one in reply.feedback]
        assert len(feedback) == len(set(feedback))
        assert set(feedback) <= event_ids


def check_everything(align: AlignSettings, log: Log) -> OracleResult:
    result = run_log(align, log)
    check_each_event_is_in_one_place(log, result)
    check_all_is_ripe(align, log, result)
    check_revisions_follow(result)
    check_what_is_shown_is_in_the_lineage(log, result)
    return result


def only_session(log: Log, policy: str, session_id: str) -> Log:
    """The log as if the partition held one session: the others' records carry nothing."""

    def kept(entry: LogRecord) -> LogRecord:
        record = entry.record
        if record is not None and (record.policy, record.session_id) == (policy, session_id):
            return entry
        return replace(entry, record=None)

    return replace(log, turns=tuple(map(kept, log.turns)), feedback=tuple(map(kept, log.feedback)))


def as_bytes(segments: Iterable[TrajectorySegment]) -> Counter[bytes]:
    return Counter(map(msgspec.json.encode, segments))


def check_sessions_are_independent(align: AlignSettings, log: Log) -> None:
    whole = run_log(align, log)
    sessions = {
        (entry.record.policy, entry.record.session_id)
        for entry in (*log.turns, *log.feedback)
        if entry.record is not None
    }
    alone = [run_log(align, only_session(log, *session)) for session in sessions]
    assert as_bytes(one for run in alone for one in run.segments) == as_bytes(whole.segments)
    assert Counter(one for run in alone for one in run.dead_letters) == Counter(whole.dead_letters)
    assert {place for run in alone for place in run.still_open} == whole.still_open
    assert sum(run.held_back for run in alone) == whole.held_back


def check_an_earlier_look_sees_the_same(align: AlignSettings, log: Log, clock_ms: int) -> None:
    early = run_log(align, replace(log, final_clock_ms=clock_ms))
    whole = run_log(align, log)
    so_far = [one for one in whole.segments if one.closed_at <= clock_ms]
    assert as_bytes(early.segments) == as_bytes(so_far)


class TestInvariants:
    @RELAXED
    @given(case=ANY_CASE)
    def test_any_log(self, case: tuple[AlignSettings, Log]) -> None:
        check_everything(*case)

    @RELAXED
    @given(case=ANY_CASE, data=st.data())
    def test_sessions_and_clocks(
        self, case: tuple[AlignSettings, Log], data: st.DataObject
    ) -> None:
        align, log = case
        check_sessions_are_independent(align, log)
        first, last = BASE_MS, max(BASE_MS, log.final_clock_ms)
        clock = data.draw(st.integers(first, last))
        check_an_earlier_look_sees_the_same(align, log, min(clock, log.final_clock_ms))

    def test_many_logs_and_that_they_meet_the_rules(self) -> None:
        met: Counter[str] = Counter()
        for align, log in bulk_cases():
            result = check_everything(align, log)
            check_sessions_are_independent(align, log)
            met.update(reason for *_, reason in result.dead_letters)
            met.update(one.closed_by for one in result.segments)
            met["duplicate"] += len(result.duplicates)
            met["held back"] += result.held_back
            met["revision"] += sum(one.revision > 0 for one in result.segments)
            met["off branch"] += sum(len(one.off_branch) for one in result.segments)
            for step in (step for one in result.segments for step in one.steps):
                met["alternative"] += len(step.alternatives)
                met["carried"] += any(one.carried for one in step.context)
                met["answer"] += step.next_user_turn is not None
                met.update(f"by {one.attributed_by}" for one in step.feedback)
        rare = {name: count for name, count in met.items() if count < BULK_LOGS // 8}
        assert len(met) == 18
        assert not rare

    def test_random_logs_repeat(self) -> None:
        once, again = (random_log(random.Random(7), DENSE, 60) for _ in range(2))
        assert once == again
        assert as_bytes(run_log(DENSE, once).segments) == as_bytes(run_log(DENSE, again).segments)
