from __future__ import annotations

from msgspec.structs import replace

from streams.contracts import (
    AttributedBy,
    ClosedBy,
    DeadLetter,
    DeadLetterReason,
    DialogueTurn,
    FeedbackEvent,
    FeedbackKind,
    ModelVersion,
    Role,
    ScoredSegment,
    SourceRef,
    Step,
    StepFeedback,
    StepReward,
    TrajectorySegment,
    VersionStatus,
)
from streams.demo.tally import Tally, summarise
from streams.topics import FEEDBACK, SEGMENTS, TURNS

USER = DialogueTurn(
    event_id="u1",
    session_id="s",
    turn_id="u1",
    role=Role.USER,
    content="hi",
    event_time=1,
    source="t",
)
REPLY = replace(USER, event_id="a1", turn_id="a1", role=Role.ASSISTANT, policy_version=2)
THUMB = FeedbackEvent(
    event_id="f1", session_id="s", event_time=2, kind=FeedbackKind.THUMB, source="t", value=1.0
)


def ref(topic: str, offset: int) -> SourceRef:
    return SourceRef(topic=topic, partition=0, offset=offset)


SHOWN = StepFeedback(
    event_id="f1",
    kind=FeedbackKind.THUMB,
    event_time=2,
    delay_ms=1,
    attributed_by=AttributedBy.TURN_ID,
    source="t",
    value=1.0,
)
SEGMENT = TrajectorySegment(
    segment_id="g",
    revision=0,
    session_id="s",
    source="t",
    ordinal=0,
    closed_by=ClosedBy.END,
    closed_at=9,
    first_closed_at=9,
    settle_ms=1,
    first_event_time=1,
    last_event_time=1,
    digest="d",
    steps=(Step(turn_id="a1", reply="hello", event_time=1, policy_version=2),),
    lineage=(ref(TURNS, 0), ref(TURNS, 1)),
)
REVISED = replace(
    SEGMENT,
    revision=1,
    steps=(replace(SEGMENT.steps[0], feedback=(SHOWN,)),),
    lineage=(*SEGMENT.lineage, ref(FEEDBACK, 0)),
)


def scored(segment: TrajectorySegment, reward: float) -> ScoredSegment:
    return ScoredSegment(
        segment=segment,
        formula_id="f",
        config_hash="c",
        trainable=reward != 0,
        rewards=(StepReward(turn_id="a1", reward=reward),),
    )


def conversation() -> Tally:
    tally = Tally()
    tally.add(ref(TURNS, 0), USER)
    tally.add(ref(TURNS, 1), REPLY)
    tally.add(ref(FEEDBACK, 0), THUMB)
    return tally


def test_an_event_is_accounted_for_by_a_segment() -> None:
    tally = conversation()
    assert len(tally.unaccounted()) == 3
    tally.add(ref(SEGMENTS, 0), SEGMENT)
    assert tally.unaccounted() == [ref(FEEDBACK, 0)]
    tally.add(ref(SEGMENTS, 1), REVISED)
    assert tally.unaccounted() == []


def test_an_event_is_accounted_for_by_a_dead_letter() -> None:
    tally = conversation()
    tally.add(ref(SEGMENTS, 0), SEGMENT)
    letter = DeadLetter(
        stage="align",
        reason=DeadLetterReason.UNMATCHED_FEEDBACK,
        message="m",
        topic=FEEDBACK,
        partition=0,
        offset=0,
        time=5,
    )
    tally.add(ref("pipeline.dead_letters", 0), letter)
    assert tally.unaccounted() == []
    assert tally.dead_letters == {"unmatched_feedback": 1}


def test_a_copy_of_an_accounted_event_is_accounted_for() -> None:
    tally = conversation()
    tally.add(ref(SEGMENTS, 1), REVISED)
    tally.add(ref(FEEDBACK, 7), THUMB)
    assert tally.feedback == 2
    assert tally.unaccounted() == []


def test_a_revision_counts_once_and_replaces() -> None:
    tally = conversation()
    for offset, segment in enumerate((SEGMENT, REVISED, REVISED, SEGMENT)):
        tally.add(ref(SEGMENTS, offset), segment)
    assert (tally.segments, tally.revisions) == (1, 1)
    assert tally.unaccounted() == []
    assert tally.unscored() == ["g"]
    tally.add(ref("x", 0), scored(SEGMENT, 0.0))
    assert tally.unscored() == ["g"]
    assert tally.nonzero_share() == 0.0
    tally.add(ref("x", 1), scored(REVISED, 0.4))
    assert tally.unscored() == []
    assert tally.nonzero_share() == 1.0
    assert tally.rewards_by_version() == {2: [0.4]}
    assert tally.liked_by_version() == {2: [True]}


def test_the_summary_has_the_figures() -> None:
    tally = conversation()
    tally.add(ref(SEGMENTS, 0), SEGMENT)
    tally.add(ref("x", 1), scored(SEGMENT, -0.4))
    version = ModelVersion(
        event_id="v",
        version=1,
        status=VersionStatus.LIVE,
        base_model_id="b",
        base_model_digest="d",
        tokenizer_digest="t",
        template_digest="c",
        event_time=3,
        segment_count=8,
    )
    tally.add(ref("y", 0), version)
    summary = summarise(tally, held_back=4, refused=0, seconds=1.23)
    assert summary.turns == 2
    assert summary.feedback == 1
    assert summary.segments == {"end": 1}
    assert summary.held_back == 4
    assert summary.scored == 1
    assert summary.nonzero_share == 1.0
    assert summary.replies_by_version == {"2": 1}
    assert summary.mean_reward_by_version == {"2": -0.4}
    assert summary.versions[0]["status"] == "live"
    assert summary.open_events == 1
    assert summary.seconds == 1.2
