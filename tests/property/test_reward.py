"""Properties of the reward: bounded, deterministic, one user apart from the next, monotone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from processors.reward import formulas
from processors.reward.codec import decode_entry, decode_key, encode_entry, encode_key
from processors.reward.credibility import RECALLED
from processors.reward.formulas import contexts, score_segment, score_step
from processors.reward.machine import (
    Effect,
    RewardState,
    record_key,
    restore,
    step,
    take_changes,
)
from processors.reward.plugins import NO_PLUGINS
from processors.reward.users import UserKey
from streams.contracts import (
    AttributedBy,
    BranchReply,
    ClosedBy,
    FeedbackKind,
    Message,
    Role,
    Step,
    StepFeedback,
    TrajectorySegment,
)
from streams.settings import RewardSettings

MINUTE_MS = 60_000
SMALL = RewardSettings(
    rate_window=2,
    rate_history_min=3,
    history_ratings=6,
    history_segments=8,
    history_ms=40 * MINUTE_MS,
)
"""Bounds so small that short logs reach them."""

ALONE = SMALL.model_copy(
    update={
        "filter_flood": False,
        "filter_burst": False,
        "filter_contradiction": False,
        "cohort_suspension": False,
        "weight_diversity": 0.0,
    }
)
"""No filter that looks at more than one user."""

CROWDED = SMALL.model_copy(
    update={
        "crowd_window_ms": 4 * MINUTE_MS,
        "flood_factor": 1.2,
        "flood_ratings_min": 3,
        "flood_claims_factor": 1.5,
        "flood_raters_min": 1,
        "flood_source_windows_min": 3,
        "burst_ratings": 3,
        "burst_texts": 2,
        "contradiction_ratings_min": 2,
        "contradiction_others_min": 2,
        "cohort_raters_min": 2,
        "diversity_free": 0,
        "diversity_full": 2,
        "diversity_replies": 5,
    }
)
"""Every filter over all users reached by short logs."""

SCALES = [{}, {}, {"scale_min": "1", "scale_max": "5"}, {"scale_min": "x"}, {"scale_max": "-inf"}]
TEXTS = [
    "How do I sort a list in Python?",
    "how can I sort a list in python",
    "Thanks, that works",
    "No, that's wrong",
    "请用中文回答",
    "不对",
    "",
]

any_value = st.none() | st.floats() | st.sampled_from([-1.0, 0.0, 1.0, 3.0])


@st.composite
def any_feedback(draw: st.DrawFn) -> StepFeedback:
    return StepFeedback(
        event_id=f"f{draw(st.integers(0, 10_000))}",
        kind=draw(st.sampled_from(FeedbackKind)),
        event_time=draw(st.integers(-5, 100)),
        delay_ms=draw(st.integers(-5, 100)),
        attributed_by=AttributedBy.TURN_ID,
        source="test",
        value=draw(any_value),
        text=draw(st.none() | st.sampled_from(TEXTS)),
        user_id=draw(st.sampled_from([None, None, "u1", "u2"])),
        attributes=draw(st.sampled_from(SCALES)),
    )


some_feedback = st.lists(any_feedback(), max_size=5).map(tuple)
user_turn = st.builds(
    Message,
    turn_id=st.sampled_from(["u0", "u1", "u2", "u3"]),
    role=st.sampled_from([Role.USER, Role.USER, Role.TOOL, Role.ASSISTANT]),
    content=st.sampled_from(TEXTS) | st.text(max_size=30),
    event_time=st.integers(0, 100),
    carried=st.booleans(),
)
branch_reply = st.builds(
    BranchReply,
    turn_id=st.sampled_from(["b1", "b2"]),
    reply=st.just("x"),
    event_time=st.integers(0, 100),
    feedback=some_feedback,
)
any_step = st.builds(
    Step,
    turn_id=st.sampled_from(["a1", "a2", "a3"]),
    reply=st.sampled_from(["", "An answer."]),
    event_time=st.integers(0, 100),
    context=st.lists(user_turn, max_size=3).map(tuple),
    feedback=some_feedback,
    alternatives=st.lists(branch_reply, max_size=1).map(tuple),
    next_user_turn=st.none() | user_turn,
)


def make_segment(
    steps: Sequence[Step],
    *,
    segment_id: str = "s1",
    revision: int = 0,
    user_id: str | None = "u1",
    closed_at: int = 0,
    policy: str = "default",
) -> TrajectorySegment:
    return TrajectorySegment(
        segment_id=segment_id,
        revision=revision,
        session_id="session",
        user_id=user_id,
        policy=policy,
        source="test",
        ordinal=0,
        closed_by=ClosedBy.GAP,
        closed_at=closed_at,
        first_closed_at=0,
        settle_ms=0,
        first_event_time=0,
        last_event_time=0,
        digest="",
        steps=tuple(steps),
    )


points = st.floats(-10, 10)
any_settings = st.builds(
    RewardSettings,
    renormalise=st.booleans(),
    process_continued=st.floats(0, 1),
    process_details=st.floats(0, 1),
    text_signals=st.booleans(),
    repetition=st.floats(-10, 0),
    correction=st.floats(-10, 0),
    confirmation=st.floats(0, 10),
    implicit_dwell=points,
    implicit_copy=points,
    negatives_in_a_row=st.integers(1, 3),
    decay=st.floats(0, 1),
)


@given(steps=st.lists(any_step, max_size=4), weights=any_settings)
def test_rewards_are_bounded_and_explained_for_any_feedback(
    steps: list[Step], weights: RewardSettings
) -> None:
    scored = score_segment(make_segment(steps), weights)
    assert [reward.turn_id for reward in scored.rewards] == [s.turn_id for s in steps]
    for reward in scored.rewards:
        assert math.isfinite(reward.reward)
        assert -1.0 <= reward.reward <= 1.0
        assert 0.0 <= reward.credibility <= 1.0
        assert reward.reasons
        values = [c.value for c in reward.components if c.value is not None]
        assert all(-1.0 <= value <= 1.0 for value in values)
        if not values:
            assert reward.reward == 0.0
    assert scored.trainable is (scored.untrainable_reason is None)
    if all(reward.reward == 0.0 for reward in scored.rewards):
        assert not scored.trainable


@given(
    steps=st.lists(any_step, min_size=1, max_size=3),
    index=st.integers(0, 2),
    values=st.tuples(st.floats(-1, 1), st.floats(-1, 1)),
    kind=st.sampled_from([FeedbackKind.RATING, FeedbackKind.OUTCOME]),
    weights=any_settings,
)
def test_a_worse_rating_never_raises_a_reward(
    steps: list[Step],
    index: int,
    values: tuple[float, float],
    kind: FeedbackKind,
    weights: RewardSettings,
) -> None:
    index %= len(steps)
    low, high = (
        score_segment(make_segment(_with_rating(steps, index, kind, value)), weights).rewards
        for value in (min(values), max(values))
    )
    for worse, better in zip(low, high, strict=True):
        assert worse.reward <= better.reward + 1e-12


@settings(max_examples=200)
@given(
    earlier=st.lists(st.sampled_from([-1.0, -0.5, 0.0, 1.0]), max_size=8),
    steps=st.lists(any_step, min_size=1, max_size=2),
    values=st.tuples(st.floats(-1, 1), st.floats(-1, 1)),
)
def test_a_worse_rating_never_raises_its_own_reward_whatever_credibility_says(
    earlier: list[float], steps: list[Step], values: tuple[float, float]
) -> None:
    rewards: list[float] = []
    quiet = [replace(s, feedback=(), alternatives=(), turn_id=f"a{i}") for i, s in enumerate(steps)]
    for value in (min(values), max(values)):
        state = RewardState()
        for number, before in enumerate(earlier):
            rated = _with_rating([_BLANK], 0, FeedbackKind.RATING, before, time=number)
            state, _ = step(state, make_segment(rated, segment_id=f"e{number}"), SMALL)
        rated = _with_rating(quiet, 0, FeedbackKind.RATING, value, time=50)
        _, effects = step(state, make_segment(rated), SMALL)
        rewards.append(effects[0].scored.rewards[0].reward)  # type: ignore[union-attr]
    assert rewards[0] <= rewards[1] + 1e-12


_BLANK = Step(turn_id="a", reply="one two three four five six seven", event_time=0)


def _with_rating(
    steps: Sequence[Step], index: int, kind: FeedbackKind, value: float, time: int = 1_000
) -> list[Step]:
    """``steps`` with a rating that is the latest of its rater on step ``index``."""
    item = StepFeedback(
        event_id=f"rating-{time}",
        kind=kind,
        event_time=time,
        delay_ms=0,
        attributed_by=AttributedBy.TURN_ID,
        source="test",
        value=value,
    )
    changed = list(steps)
    changed[index] = replace(steps[index], feedback=(*steps[index].feedback, item))
    return changed


# --- The machine ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """One record of a log, before times are given out."""

    user: int
    segment: int
    revision: int
    values: tuple[float, ...]
    reviewed: float | None


plan = st.builds(
    Plan,
    user=st.integers(0, 2),
    segment=st.integers(0, 4),
    revision=st.integers(0, 2),
    values=st.lists(st.sampled_from([-1.0, -1.0, -0.2, 0.0, 1.0]), max_size=3).map(tuple),
    reviewed=st.sampled_from([None, None, None, 1.0, -1.0]),
)
USERS = ("u1", "u2", None)


def _record(item: Plan, position: int) -> TrajectorySegment:
    """The plan's segment; its times follow from its user's part of the log alone."""
    name = f"{item.user}-{item.segment}"
    steps = [
        _with_rating(
            [replace(_BLANK, turn_id=f"{name}-{n}")], 0, FeedbackKind.RATING, value,
            time=100 * item.segment + n,
        )[0]
        for n, value in enumerate(item.values)
    ]  # fmt: skip
    if steps and item.reviewed is not None:
        steps = _with_rating(steps, -1, FeedbackKind.REVIEW, item.reviewed, time=1_000 + position)
    return make_segment(
        steps,
        segment_id=name,
        revision=item.revision,
        user_id=USERS[item.user],
        closed_at=MINUTE_MS * (position % 30),
        policy="other" if item.segment == 4 else "default",
    )


def log_of(plans: Sequence[Plan]) -> list[TrajectorySegment]:
    positions: dict[int, int] = defaultdict(int)
    log = []
    for item in plans:
        log.append(_record(item, positions[item.user]))
        positions[item.user] += 1
    return log


def _feed(
    log: Sequence[TrajectorySegment], weights: RewardSettings = SMALL
) -> tuple[RewardState, list[tuple[Effect, ...]]]:
    state, effects = RewardState(), []
    for item in log:
        state, new = step(state, item, weights)
        effects.append(new)
    return state, effects


@given(plans=st.lists(plan, max_size=25), data=st.data())
def test_users_interleaved_in_any_way_give_the_same_results(
    plans: list[Plan], data: st.DataObject
) -> None:
    log = log_of(plans)
    by_user: dict[str, list[TrajectorySegment]] = defaultdict(list)
    for item in log:
        by_user[record_key(item)].append(item)
    order = data.draw(st.permutations([record_key(item) for item in log]))
    rest = {key: iter(items) for key, items in by_user.items()}
    shuffled = [next(rest[key]) for key in order]

    state, effects = _feed(log, ALONE)
    other_state, other_effects = _feed(shuffled, ALONE)
    assert other_state.users == state.users
    for key in by_user:
        mine = [e for item, e in zip(log, effects, strict=True) if record_key(item) == key]
        other = [e for i, e in zip(shuffled, other_effects, strict=True) if record_key(i) == key]
        assert mine == other


@given(plans=st.lists(plan, max_size=25), stops=st.lists(st.booleans(), min_size=25, max_size=25))
def test_a_machine_restored_at_any_points_goes_on_as_if_nothing_happened(
    plans: list[Plan], stops: list[bool]
) -> None:
    log = log_of(plans)
    expected_state, expected = _feed(log, CROWDED)
    written: dict[bytes, bytes] = {}
    state, effects = RewardState(), []
    for item, stop in zip(log, stops, strict=False):
        state, new = step(state, item, CROWDED)
        effects.append(new)
        changed, forgotten = take_changes(state)
        written |= {encode_key(who): encode_entry(user) for who, user in changed.items()}
        for who in forgotten:
            written.pop(encode_key(who), None)
        if stop:
            state = restore((decode_key(k), decode_entry(v)) for k, v in written.items())
    assert effects == expected
    assert state.users == expected_state.users
    assert state.crowd.entries == expected_state.crowd.entries
    assert state.clock_ms == expected_state.clock_ms


@given(plans=st.lists(plan, max_size=25))
def test_each_record_is_scored_once_and_what_is_kept_is_bounded(plans: list[Plan]) -> None:
    log = log_of(plans)
    state, effects = _feed(log)
    newest: dict[str, int] = {}
    for item, new in zip(log, effects, strict=True):
        fresh = item.revision > newest.get(item.segment_id, -1)
        assert bool(new) is fresh
        newest[item.segment_id] = max(item.revision, newest.get(item.segment_id, -1))
    for user in state.users.values():
        known = {mark.segment_id for mark in user.marks}
        for items in (user.history.opinions, user.history.decisions):
            assert len(items) <= RECALLED * SMALL.history_ratings
            # More than the newest only of segments that may be revised.
            assert {o.segment_id for o in items[: -SMALL.history_ratings]} <= known
        assert len(known) == len(user.marks) <= SMALL.history_segments
        shown = [(o.segment_id, o.turn_id, o.rater) for o in user.history.opinions]
        assert len(shown) == len(set(shown))


@given(plans=st.lists(plan, max_size=12))
def test_a_final_history_holds_the_newest_revision_of_each_segment_only(plans: list[Plan]) -> None:
    wide = RewardSettings()
    state = RewardState()
    newest: dict[tuple[UserKey, str], TrajectorySegment] = {}
    for item in log_of(plans):
        where = UserKey(item.policy, record_key(item)), item.segment_id
        if where not in newest or newest[where].revision < item.revision:
            newest[where] = item
        state, _ = step(state, item, wide)
    expected = {
        (who, reply.turn_id, feedback.event_id)
        for (who, _), item in newest.items()
        for reply in item.steps
        for feedback in reply.feedback
        if feedback.kind is FeedbackKind.RATING
    }
    held = {
        (who, opinion.turn_id, opinion.event_id)
        for who, user in state.users.items()
        for opinion in user.history.opinions
    }
    assert held == expected


@settings(max_examples=200)
@given(steps=st.lists(any_step, min_size=1, max_size=3), weights=any_settings)
def test_steps_of_which_nothing_was_said_are_scored_as_others_are(
    steps: list[Step], weights: RewardSettings
) -> None:
    quiet = [replace(s, feedback=(), turn_id=f"a{n}") for n, s in enumerate(steps)]
    for item in (make_segment(quiet), make_segment(steps)):
        for one, context in zip(item.steps, contexts(item, weights, {}, {}), strict=True):
            fresh = formulas._Nothing(weights, {})
            expected = formulas._score(one, context, weights, NO_PLUGINS, fresh)
            assert score_step(one, context, weights) == expected
            again = replace(one, turn_id="another")
            assert score_step(again, context, weights) == replace(expected, turn_id="another")
