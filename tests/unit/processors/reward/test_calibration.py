"""How far the judge says what people say."""

from __future__ import annotations

import pytest

from processors.reward.agent import RewardProcessor, RewardTopics
from processors.reward.calibration import (
    Pair,
    agreement,
    as_data,
    as_lines,
    by_judge,
    newest,
    pairs,
)
from processors.reward.formulas import Credibility, score_segment
from processors.runtime.records import Record
from streams import metrics as names
from streams.contracts import FeedbackKind, StepFeedback
from streams.metrics import ProcessorMetrics
from streams.serde import build_codec
from streams.settings import RewardSettings
from streams.topics import SEGMENTS
from tests.unit.processors.reward.builders import feedback, reply, segment, thumb

JUDGED = segment(
    [
        reply("a1", thumb("f1", 1), feedback("j1", FeedbackKind.JUDGEMENT, -1.0)),
        reply("a2", thumb("f2", 1), feedback("j2", FeedbackKind.JUDGEMENT)),
        reply("a3", feedback("j3", FeedbackKind.JUDGEMENT, 1.0)),
        reply("a4", thumb("f4", -1), feedback("j4", FeedbackKind.JUDGEMENT, -1.0)),
    ]
)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_replies_with_both_are_compared_whatever_the_judge_weighs(weight: float) -> None:
    scored = score_segment(JUDGED, RewardSettings(weight_judge=weight))
    assert pairs(scored) == [Pair(1, -1), Pair(-1, -1)]


def test_ratings_that_are_not_believed_are_left_out() -> None:
    held = {"f1": Credibility(weight=0.0, filter="row", reason="x")}
    assert pairs(score_segment(JUDGED, RewardSettings(), held)) == [Pair(-1, -1)]


def test_each_judge_is_compared_by_itself() -> None:
    def verdict(name: str, judge: str, value: float, at: int) -> StepFeedback:
        attributes = {"judge": judge}
        return feedback(name, FeedbackKind.JUDGEMENT, value, event_time=at, attributes=attributes)

    steps = [
        reply("a1", thumb("f1", 1), verdict("j1", "old", -1.0, 1), verdict("j2", "new", 1.0, 2)),
        reply("a2", thumb("f2", 1), verdict("j3", "old", -1.0, 1)),
    ]
    found = pairs(score_segment(segment(steps), RewardSettings()))
    assert by_judge(found) == {"new": [Pair(1, 1, "new")], "old": [Pair(1, -1, "old")]}
    assert as_lines("old", agreement(by_judge(found)["old"]))[0].startswith("old: 1 replies")


def test_agreement_by_hand() -> None:
    found = [Pair(1, 1)] * 6 + [Pair(-1, -1)] * 2 + [Pair(1, -1)] + [Pair(-1, 0)]
    result = agreement(found)
    assert (result.steps, result.same, result.opposite) == (10, 0.8, 0.1)
    # By chance: 7/10 * 6/10 + 3/10 * 3/10 = 0.51.
    assert result.kappa == pytest.approx((0.8 - 0.51) / 0.49)
    assert result.confusion[-1, 0] == 1
    assert sum(row["steps"] for row in as_data("m", result)["confusion"]) == 10
    assert as_lines("m", result)[-1].split() == ["positive", "1", "0", "6"]


def test_nothing_to_compare() -> None:
    result = agreement([])
    assert (result.steps, result.kappa) == (0, None)
    assert agreement([Pair(1, 1)]).kappa is None


def test_each_segment_counts_with_its_newest_revision() -> None:
    old, new = (score_segment(segment(revision=n), RewardSettings()) for n in (0, 1))
    assert newest([new, old]) == {"s1": new}


def test_the_reward_worker_counts_agreement() -> None:
    metrics = ProcessorMetrics("reward")
    processor = RewardProcessor(RewardSettings(), build_codec(), metrics, 1_000_000, RewardTopics())
    processor.restore((), None)
    value = build_codec().encode(JUDGED)
    processor.feed(
        SEGMENTS,
        [Record(topic=SEGMENTS, partition=0, offset=0, timestamp=1, key=b"u1", value=value)],
    )
    processor.drain(1)
    shown = metrics.value(names.JUDGE_AGREEMENT, explicit="positive", judged="negative")
    assert shown == 1
