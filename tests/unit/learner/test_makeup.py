from __future__ import annotations

import json
from typing import Any

import pytest

from learner.makeup import FEW_REPLIES, Limits, MakeUp, imbalances
from learner.ppo.diagnostics import METRICS
from streams.contracts import ClosedBy, ScoredSegment, Step, StepReward, TrajectorySegment

LIMITS = Limits(max_share=0.75, min_sign_share=0.25)


def segment(
    name: str,
    *rewards: float | None,
    source: str = "web",
    topic: str | None = None,
    version: int | None = 1,
    attributes: dict[str, str] | None = None,
) -> ScoredSegment:
    """A session of its own with one reply per reward; None is a reply nobody rated."""
    made: Any = {} if topic is None else {"topic": topic}
    steps = tuple(
        Step(
            turn_id=f"{name}-{number}",
            reply="x",
            event_time=0,
            policy_version=version,
            attributes=made,
        )
        for number in range(len(rewards))
    )
    return ScoredSegment(
        segment=TrajectorySegment(
            segment_id=name,
            revision=0,
            session_id=name,
            source=source,
            ordinal=0,
            closed_by=ClosedBy.END,
            closed_at=0,
            first_closed_at=0,
            settle_ms=0,
            first_event_time=0,
            last_event_time=0,
            digest="",
            steps=steps,
            attributes=attributes or {},
        ),
        formula_id="",
        config_hash="",
        trainable=True,
        rewards=tuple(
            StepReward(turn_id=step.turn_id, reward=reward)
            for step, reward in zip(steps, rewards, strict=True)
            if reward is not None
        ),
    )


MIXED = [
    segment("a", 1.0, -0.5, None, topic="billing"),
    segment("b", 0.0, source="app", version=2, attributes={"topic": "travel"}),
    segment("c", 0.25, source="app", version=None),
]


def test_counts_replies_by_source_topic_version_and_sign() -> None:
    made_up = MakeUp.of(MIXED)
    assert made_up.replies == 5
    assert made_up.source == {"web": 3, "app": 2}
    assert made_up.topic == {"billing": 3, "travel": 1, "none": 1}
    assert made_up.version == {"1": 3, "2": 1, "unknown": 1}
    assert made_up.sign == {"positive": 2, "negative": 1, "zero": 2}
    assert made_up.largest_session == 3


def test_a_reply_s_own_topic_goes_before_its_segment_s() -> None:
    one = segment("a", 1.0, topic="billing", attributes={"topic": "travel"})
    assert MakeUp.of([one]).topic == {"billing": 1}


def test_shares_are_of_all_replies_and_all_explained() -> None:
    metrics = MakeUp.of(MIXED).metrics(LIMITS)
    assert metrics == {
        "makeup/replies": 5.0,
        "makeup/sources": 2.0,
        "makeup/topics": 3.0,
        "makeup/versions": 3.0,
        "makeup/largest_source_share": 0.6,
        "makeup/largest_topic_share": 0.6,
        "makeup/largest_version_share": 0.6,
        "makeup/largest_session_share": 0.6,
        "makeup/unknown_version_share": 0.2,
        "makeup/positive_share": 0.4,
        "makeup/negative_share": 0.2,
        "makeup/zero_share": 0.4,
        "makeup/imbalances": 0.0,
    }
    assert metrics.keys() == {name for name in METRICS if name.startswith("makeup/")}


def test_attributes_are_counts_as_json_most_frequent_first() -> None:
    found = MakeUp.of(MIXED).attributes(LIMITS)
    assert found.keys() == {
        "make_up_source", "make_up_topic", "make_up_version", "make_up_sign",
    }  # fmt: skip
    assert list(json.loads(found["make_up_source"]).items()) == [("web", 3), ("app", 2)]
    assert json.loads(found["make_up_sign"]) == {"positive": 2, "zero": 2, "negative": 1}


def test_many_kinds_are_cut_off_behind_the_twentieth() -> None:
    some = [segment(f"s{n}", *[1.0] * (30 - n), source=f"f{n:02}") for n in range(25)]
    counts = json.loads(MakeUp.of(some).attributes(LIMITS)["make_up_source"])
    assert len(counts) == 21
    assert counts["(others)"] == sum(30 - n for n in range(20, 25))
    assert sum(counts.values()) == sum(30 - n for n in range(25))


def balanced(count: int, **fields: Any) -> list[ScoredSegment]:
    """So many replies, every other one good."""
    return [
        segment(f"{fields}{number}", (-1.0) ** number, **{"source": "web", **fields})
        for number in range(count)
    ]


@pytest.mark.parametrize("kind", ["source", "topic", "version"])
def test_one_of_several_kinds_may_not_outweigh_the_others(kind: str) -> None:
    names: tuple[Any, Any] = (7, 8) if kind == "version" else ("much", "little")
    within = balanced(12, **{kind: names[0]}) + balanced(4, **{kind: names[1]})
    beyond = balanced(14, **{kind: names[0]}) + balanced(4, **{kind: names[1]})
    assert imbalances(MakeUp.of(within), LIMITS) == ()
    made_up = MakeUp.of(beyond)
    assert imbalances(made_up, LIMITS) == (f"{kind} {names[0]}: 14 of 18 replies",)
    assert made_up.metrics(LIMITS)["makeup/imbalances"] == 1.0
    assert made_up.attributes(LIMITS)["imbalance"] == f"{kind} {names[0]}: 14 of 18 replies"


def test_a_kind_that_is_alone_is_balanced() -> None:
    assert imbalances(MakeUp.of(balanced(20)), LIMITS) == ()


@pytest.mark.parametrize("good", [True, False])
def test_a_sign_that_is_rare_among_rewards_is_told(good: bool) -> None:
    common, rare = (1.0, -1.0) if good else (-1.0, 1.0)
    name = "negative" if good else "positive"
    zeros = [segment(f"z{n}", None) for n in range(40)]

    def of(few: int) -> tuple[str, ...]:
        some = [segment(f"c{n}", common) for n in range(12)]
        return imbalances(
            MakeUp.of(some + [segment(f"r{n}", rare) for n in range(few)] + zeros), LIMITS
        )

    assert of(4) == ()
    assert of(3) == (f"sign {name}: 3 of 15 replies with a reward",)
    assert of(0) == (f"sign {name}: 0 of 12 replies with a reward",)


def test_few_replies_and_no_rewards_are_no_imbalance() -> None:
    few = MakeUp.of([segment(f"s{n}", 1.0) for n in range(FEW_REPLIES - 1)])
    assert imbalances(few, LIMITS) == ()
    assert imbalances(MakeUp.of([segment(f"s{n}", None) for n in range(30)]), LIMITS) == ()
    assert imbalances(MakeUp.of([]), LIMITS) == ()
    one_sign = MakeUp.of([segment(f"s{n}", 1.0) for n in range(30)])
    assert imbalances(one_sign, Limits(max_share=1.0, min_sign_share=0.0)) == ()
