"""The filters over many users against a slow reading of their rules, over random logs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from processors.reward.codec import decode_entry, decode_key, encode_entry, encode_key
from processors.reward.formulas import REPEATED_ATTRIBUTE
from processors.reward.machine import (
    EmitReview,
    EmitScored,
    Observed,
    RewardState,
    restore,
    step,
    take_changes,
)
from streams.contracts import (
    AttributedBy,
    ClosedBy,
    FeedbackKind,
    Step,
    StepFeedback,
    TrajectorySegment,
)
from streams.settings import RewardSettings
from tests.oracle.crowd import CrowdOracle
from tests.oracle.reward import Asked
from tests.property.test_reward import CROWDED, MINUTE_MS

WIDE: RewardSettings = CROWDED.model_copy(
    update={"history_ratings": 1_000, "history_segments": 1_000, "history_ms": 10**12}
)
"""Bounds that short logs reach, and a history that holds all there is."""

CALM: RewardSettings = WIDE.model_copy(
    update={"filter_flood": False, "verified_sources": ("gateway", "script")}
)
"""Without the filter that finds most in short logs, before the others do; names are believed."""

REPLIES = (
    "Yes.",
    "one two three four five six seven",
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi",
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu omicron pi",
)
MOST_REPLIES = 8
VALUED = (FeedbackKind.RATING, FeedbackKind.OUTCOME)
TEXTS = (None, "spam", "the same words from many people")
SOURCES = ("gateway", "script")


@dataclass(frozen=True)
class Given:
    """Feedback on a reply.

    Args:
        rater: Who gave it; None is the segment's user.
        again: Whether they sent it twice.
    """

    value: float
    reply: int
    source: int
    text: int
    rater: int | None
    kind: FeedbackKind
    again: bool


@dataclass(frozen=True)
class Plan:
    """One record of a log.

    Args:
        wait: Minutes that the log's clock moves on.
        late: Whether it closed a window before that clock's.
        goes_on: Whether it shows what the record of its segment before showed, and more.
    """

    user: int
    segment: int
    revision: int
    given: tuple[Given, ...]
    reviewed: float | None
    wait: int
    late: bool
    policy: str
    goes_on: bool


RATED = [FeedbackKind.RATING]
MIXED = [
    FeedbackKind.RATING,
    FeedbackKind.RATING,
    FeedbackKind.COPY,
    FeedbackKind.COPY,
    FeedbackKind.ABANDON,
    FeedbackKind.CORRECTION,
    FeedbackKind.OUTCOME,
    FeedbackKind.DWELL,
]


def plans_of(kinds: Sequence[FeedbackKind], least: int = 0) -> st.SearchStrategy[list[Plan]]:
    """Logs with feedback of these kinds; where there are more than one, of fewer users."""
    given = st.builds(
        Given,
        value=st.sampled_from([-1.0, -1.0, -1.0, -0.2, 0.0, 1.0, 1.0]),
        reply=st.integers(0, len(REPLIES) - 1),
        source=st.sampled_from([0, 0, 1]),
        text=st.integers(0, len(TEXTS) - 1),
        rater=st.sampled_from([None, None, None, 0, 1, 2]),
        kind=st.sampled_from(kinds),
        again=st.sampled_from([*[False] * 5, True]) if kinds is MIXED else st.just(False),
    )
    plan = st.builds(
        Plan,
        user=st.integers(0, 4 if kinds is RATED else 2),
        segment=st.integers(0, 3 if kinds is RATED else 2),
        revision=st.integers(0, 2),
        given=st.lists(given, max_size=4).map(tuple),
        reviewed=st.sampled_from([None, None, None, None, 1.0, -1.0]),
        wait=st.sampled_from([0, 0, 0, 1, 1, 2, 4, 9, 20]),
        late=st.sampled_from([False, False, False, True]),
        policy=st.sampled_from(["default", "default", "default", "other"]),
        goes_on=st.booleans(),
    )
    return st.lists(plan, min_size=least, max_size=40)


def _feedback(name: str, item: Given, time: int) -> StepFeedback:
    return StepFeedback(
        event_id=name,
        kind=item.kind,
        event_time=time,
        delay_ms=0,
        attributed_by=AttributedBy.TURN_ID,
        source=SOURCES[item.source],
        value=item.value if item.kind in VALUED else None,
        text=TEXTS[item.text],
        user_id=None if item.rater is None else f"u{item.rater}",
    )


def _review(value: float, time: int) -> StepFeedback:
    return StepFeedback(
        event_id=f"review-{time}",
        kind=FeedbackKind.REVIEW,
        event_time=time,
        delay_ms=0,
        attributed_by=AttributedBy.TURN_ID,
        source="people",
        value=value,
    )


def _record(item: Plan, position: int, minute: int) -> TrajectorySegment:
    name = f"{item.policy}-{item.user}-{item.segment}"
    steps = [
        Step(
            turn_id=f"{name}-{n}",
            reply=REPLIES[given.reply],
            event_time=0,
            feedback=tuple(
                _feedback(
                    f"{name}-{n}-{given.kind.value}{time}",
                    given,
                    20_000 * (10 * item.segment + n) + time,
                )
                for time in range(1 + given.again)
            ),
        )
        for n, given in enumerate(item.given)
    ]
    if steps and item.reviewed is not None:
        last = steps[-1]
        reviewed = (*last.feedback, _review(item.reviewed, 10**9 + position))
        steps[-1] = Step(turn_id=last.turn_id, reply=last.reply, event_time=0, feedback=reviewed)
    closed_at = MINUTE_MS * minute
    return TrajectorySegment(
        segment_id=name,
        revision=item.revision,
        session_id=f"session-{item.user}-{item.segment}",
        user_id=f"u{item.user}" if item.user else None,
        policy=item.policy,
        source="test",
        ordinal=0,
        closed_by=ClosedBy.GAP,
        closed_at=closed_at - WIDE.crowd_window_ms * item.late,
        first_closed_at=0,
        settle_ms=0,
        first_event_time=0,
        last_event_time=0,
        digest="",
        steps=tuple(steps),
    )


def log_of(plans: Sequence[Plan]) -> list[TrajectorySegment]:
    minute, log = 100, []
    shown: dict[tuple[str, int, int], tuple[Given, ...]] = {}
    for position, item in enumerate(plans):
        minute += item.wait
        name = item.policy, item.user, item.segment
        if item.goes_on:
            item = replace(item, given=(*shown.get(name, ()), *item.given)[:MOST_REPLIES])
        shown[name] = item.given
        log.append(_record(item, position, minute))
    return log


logs = plans_of(RATED) | plans_of(RATED, 15) | plans_of(MIXED) | plans_of(MIXED, 15)


@settings(max_examples=500)
@given(plans=logs, stops=st.sets(st.integers(0, 39)), filters=st.sampled_from([WIDE, CALM]))
def test_the_filters_find_what_the_rules_say_restarted_or_not(
    plans: list[Plan], stops: set[int], filters: RewardSettings
) -> None:
    oracle, state = CrowdOracle(filters), RewardState()
    written: dict[bytes, bytes] = {}
    for number, segment in enumerate(log_of(plans)):
        accepted = oracle.accepts(segment)
        state, effects = step(state, segment, filters)
        assert bool(effects) is accepted
        if not accepted:
            continue
        (scored,) = [effect.scored for effect in effects if isinstance(effect, EmitScored)]
        reviews = [effect.review for effect in effects if isinstance(effect, EmitReview)]
        alarms = [effect.alarm for effect in effects if isinstance(effect, Observed)]
        weights, asked = oracle.apply(segment)
        found = {w.event_id: (w.weight, w.filter) for r in scored.rewards for w in r.weighed}
        assert found == weights
        assert [Asked(r.segment_id, r.turn_id, r.feedback_event_ids) for r in reviews] == asked
        assert any(alarm is not None for alarm in alarms) is oracle.alarm
        repeated = json.loads(scored.attributes.get(REPEATED_ATTRIBUTE, "{}"))
        assert repeated == oracle.repeated(segment)
        for request, wanted in zip(reviews, asked, strict=True):
            oracle.asked_as(segment, wanted, request.event_id)
        changed, forgotten = take_changes(state)
        written |= {encode_key(key): encode_entry(entry) for key, entry in changed.items()}
        for key in forgotten:
            written.pop(encode_key(key), None)
        for name in {found for _, found in weights.values()}:
            event(name)
        if number in stops:
            state = restore((decode_key(k), decode_entry(v)) for k, v in written.items())


@pytest.mark.parametrize(
    ("kinds", "filters", "names"),
    [
        (RATED, CALM, ["contradiction", "cohort", "row", "departure", "burst", "alarm"]),
        (MIXED, WIDE, ["claim flood", "claim burst", "claim review", "flood", "row", "review"]),
    ],
)
def test_the_logs_reach_every_filter(
    kinds: Sequence[FeedbackKind], filters: RewardSettings, names: list[str]
) -> None:
    """Of logs drawn at random some show each of them; otherwise the test above shows nothing."""
    seen: Counter[str] = Counter()

    @settings(max_examples=250, database=None, derandomize=True)
    @given(plans=plans_of(kinds, 15))
    def look(plans: list[Plan]) -> None:
        oracle = CrowdOracle(filters)
        for segment in log_of(plans):
            if oracle.accepts(segment):
                weights, _ = oracle.apply(segment)
                seen.update(
                    name if "-rating" in event_id else f"claim {name}"
                    for event_id, (_, name) in weights.items()
                )
                seen.update(["alarm"] if oracle.alarm else [])

    look()
    assert {name for name in names if seen[name] >= 5} == set(names), seen
