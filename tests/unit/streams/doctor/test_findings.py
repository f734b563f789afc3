from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from streams.contracts import (
    AttributedBy,
    ClosedBy,
    FeedbackKind,
    ScoredSegment,
    Step,
    StepFeedback,
    TrajectorySegment,
)
from streams.doctor import findings
from streams.doctor.findings import GIB, Finding, Level, Seen
from streams.lag.burrow import State
from streams.lag.groups import PartitionLag
from streams.lag.watch import LagStatus
from streams.topics import Change, ChangeKind, Inventory, TopicPlan

NOW_MS = 1_000_000_000


def seen(partition: int, right: int | None, **more: Any) -> Seen:
    return Seen("dialogue.turns", partition, right, NOW_MS, **more)


def levels(found: list[Finding]) -> list[Level]:
    return [item.level for item in found]


def test_records_where_their_keys_belong_are_fine() -> None:
    (found,) = findings.of_partitioning([seen(0, 0), seen(1, 1)])
    assert (found.level, "last 2 records" in found.what) == (Level.OK, True)


def test_a_producer_with_another_partitioner_is_named() -> None:
    (found,) = findings.of_partitioning([seen(0, 0), seen(0, 1, source="shop"), seen(0, None)])
    assert found.level is Level.WARN
    assert "1 are on another" in found.what
    assert "1 have no key" in found.what
    assert "shop" in found.what
    assert "murmur2_random" in found.advice


def test_clocks() -> None:
    fine = [seen(0, 0, event_ms=NOW_MS - 5)]
    assert levels(findings.of_clocks(fine, NOW_MS)) == [Level.OK]
    assert levels(findings.of_clocks(fine, NOW_MS - 2_001)) == [Level.FAIL]
    assert findings.of_clocks([], NOW_MS) == []
    ahead = [*fine, seen(0, 0, event_ms=NOW_MS + 2_001, source="phone")]
    (found,) = findings.of_clocks(ahead, NOW_MS)
    assert (found.level, "phone" in found.what) == (Level.WARN, True)


@pytest.mark.parametrize(
    ("free", "level"),
    [(GIB - 1, Level.FAIL), (GIB, Level.WARN), (5 * GIB - 1, Level.WARN), (5 * GIB, Level.OK)],
)
def test_disk(free: int, level: Level) -> None:
    assert findings.of_disk(free, 100 * GIB, "/x").level is level


def test_topics() -> None:
    def of(*changes: Change) -> list[Finding]:
        return findings.of_topics(TopicPlan(Inventory(()), changes))

    assert levels(of()) == [Level.OK]
    kinds = {
        ChangeKind.CREATE: Level.FAIL,
        ChangeKind.ALTER: Level.WARN,
        ChangeKind.REFUSE: Level.FAIL,
        ChangeKind.NOTICE: Level.NOTE,
    }
    for kind, level in kinds.items():
        change = Change(topic="t", kind=kind, setting="s", before="1", after="2", reason="why")
        (found,) = of(change)
        assert (found.level, found.what.startswith("t: s")) == (level, True)


def test_where_the_flow_ends() -> None:
    newest = {
        "dialogue.turns": NOW_MS - 1_000,
        "dialogue.feedback": None,
        "trajectory.segments": NOW_MS - 3 * 3_600_000,
    }
    turns, feedback, segments = findings.of_flow(newest, NOW_MS)
    assert (turns.level, turns.what) == (
        Level.OK, "the newest record of dialogue.turns came 1 s ago",
    )  # fmt: skip
    assert (feedback.level, "nothing trains" in feedback.advice) == (Level.WARN, True)
    assert (segments.level, "3 hours ago" in segments.what) == (Level.NOTE, True)


def status(
    stage: str, partition: int, state: State, lag: int, members: int | None = 1
) -> LagStatus:
    place = PartitionLag(stage, "t", partition, 0, lag, lag)
    return LagStatus(place, state, f"{state} in words", None, None, None, None, members)


def test_a_flow_that_gets_on() -> None:
    (found,) = findings.of_lag(
        [
            status("align", 0, State.OK, 3),
            status("align", 1, State.UNKNOWN, 4),
            status("learn", 0, State.UNKNOWN, 99, members=None),
        ]
    )
    assert (found.level, "7 records" in found.what) == (Level.OK, True)


@pytest.mark.parametrize(
    ("state", "level", "advice"),
    [
        (State.STOP, Level.FAIL, "clawstream reward"),
        (State.STALL, Level.FAIL, "reward_web_port"),
        (State.WARN, Level.WARN, "more workers"),
        (State.REWIND, Level.WARN, "who reset"),
    ],
)
def test_a_stage_that_holds_records_back_is_named_once(
    state: State, level: Level, advice: str
) -> None:
    (found,) = findings.of_lag(
        [
            status("align", 0, State.OK, 0),
            status("reward", 0, state, 5),
            status("reward", 1, State.OK, 0),
            status("reward", 2, state, 7),
        ]
    )
    assert found.level is level
    assert found.what == (f"reward holds back 12 records of t/0,2 ({state}): {state} in words")
    assert advice in found.advice


def test_a_stage_that_nobody_runs_is_named_before_anything_waits() -> None:
    idle = status("align", 0, State.OK, 0, members=0)
    (found,) = findings.of_lag([idle, status("reward", 0, State.OK, 0)])
    assert (found.level, "nobody runs align" in found.what) == (Level.WARN, True)


# Why nothing trains

FEEDBACK = StepFeedback(
    event_id="f", kind=FeedbackKind.THUMB, event_time=1, delay_ms=1,
    attributed_by=AttributedBy.TURN_ID, source="x", value=1.0,
)  # fmt: skip


def scored(
    reason: str | None = None,
    *,
    policy: str = "default",
    version: int | None = 3,
    feedback: tuple[StepFeedback, ...] = (FEEDBACK,),
) -> ScoredSegment:
    step = Step(turn_id="a", reply="r", event_time=1, policy_version=version, feedback=feedback)
    segment = TrajectorySegment(
        segment_id="s", revision=0, session_id="s", source="x", ordinal=0, closed_by=ClosedBy.GAP,
        closed_at=9, first_closed_at=9, settle_ms=1, first_event_time=1, last_event_time=1,
        digest="d", policy=policy, steps=(step,),
    )  # fmt: skip
    return ScoredSegment(
        segment=segment, formula_id="f", config_hash="c", trainable=reason is None,
        untrainable_reason=reason,
    )  # fmt: skip


def trained(items: list[ScoredSegment], **options: Any) -> list[Finding]:
    defaults: dict[str, Any] = {
        "policy": "default", "newest_version": 3, "max_version_gap": 4, "min_segments": 1,
    }  # fmt: skip
    return findings.of_training(items, **defaults | options)


NOTHING = "all rewards are zero: there is no feedback and no signal on any reply"
HELD = "all rewards are zero: the ratings are held back, see the rewards' reasons"


def test_a_pipeline_that_trains() -> None:
    assert trained([scored()] * 10) == [
        Finding("training", Level.OK, "10 of the last 10 segments can be trained on")
    ]


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        (NOTHING, "POST /v1/feedback"),
        (HELD, "reviews list"),
        ("the segment has no reply", "gateway"),
        ("something new", "reward explain"),
    ],
)
def test_why_nothing_can_be_trained_on(reason: str, advice: str) -> None:
    (found,) = trained([scored(reason)] * 3)
    assert (found.level, reason in found.what, advice in found.advice) == (Level.FAIL, True, True)


def test_few_trainable_segments_are_a_warning() -> None:
    (found,) = trained([scored(), *[scored(HELD)] * 19])
    assert (found.level, "1 of the last 20" in found.what) == (Level.WARN, True)


def test_no_feedback_on_most_segments() -> None:
    found = trained([scored(), *[scored(NOTHING, feedback=())] * 2])
    assert any("2 of 3 segments have no feedback at all" in item.what for item in found)


def test_feedback_that_names_no_turn() -> None:
    by_time = replace(FEEDBACK, attributed_by=AttributedBy.TIME)
    found = trained([scored(feedback=(by_time, by_time, FEEDBACK))])
    assert any("2 of 3 feedback events name no turn" in item.what for item in found)


def test_replies_of_versions_too_old_to_train_on() -> None:
    found = trained([scored(version=3)] * 2, newest_version=8)
    assert any("more than 4 older than version 8" in item.what for item in found)
    assert len(trained([scored(version=4)] * 2, newest_version=8)) == 1
    assert len(trained([scored(version=None)] * 2, newest_version=8)) == 1


def test_a_learner_of_another_policy() -> None:
    (found,) = trained([scored(policy="shop")])
    assert (found.level, "there are: shop" in found.what) == (Level.WARN, True)


def test_too_few_for_an_update() -> None:
    found = trained([scored()] * 3, min_segments=64)
    assert any("an update needs 64" in item.what for item in found)
