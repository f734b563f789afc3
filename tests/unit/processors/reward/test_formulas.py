"""The reward's arithmetic, on numbers worked out by hand, and the reasons it gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from processors.reward import formulas
from processors.reward.formulas import (
    COMPONENTS,
    FORMULA_ID,
    MAX_TURNS_BETWEEN,
    Credibility,
    composite,
    config_hash,
    contexts,
    read,
    score_segment,
)
from processors.reward.repetition import repeats
from streams.contracts import (
    FeedbackKind,
    Message,
    RewardComponent,
    Role,
    StepFeedback,
    StepReward,
    ToolCall,
    TrajectorySegment,
)
from streams.settings import RewardSettings
from tests.unit.processors.reward.builders import (
    conversation,
    feedback,
    rating,
    reply,
    review,
    said,
    segment,
    thumb,
)

SETTINGS = RewardSettings()


def score(*given: StepFeedback, settings: RewardSettings = SETTINGS, **more: Any) -> StepReward:
    """The reward of one step with this feedback."""
    (reward,) = score_segment(segment([reply("a1", *given, **more)]), settings).rewards
    return reward


def value_of(reward: StepReward, name: str) -> float | None:
    return {c.name: c.value for c in reward.components}[name]


# --- Judge and diversity ----------------------------------------------------------------------

JUDGED = RewardSettings(weight_judge=0.5)


def judged(event_id: str, value: float | None, **more: Any) -> StepFeedback:
    return feedback(event_id, FeedbackKind.JUDGEMENT, value, **more)


def test_the_latest_verdict_is_the_judges_component() -> None:
    reward = score(
        judged("j2", 1.0, event_time=20, text="3 of 3 votes good"),
        judged("j1", -1.0, event_time=10),
        settings=JUDGED,
    )
    assert value_of(reward, "judge") == 1.0
    assert reward.reward == pytest.approx(0.5)
    assert "judge: judgement j2: +1 (3 of 3 votes good)" in reward.reasons


def test_a_judge_that_failed_or_has_not_spoken_shows_on_the_record() -> None:
    silent = score(thumb("f1", 1), settings=JUDGED)
    assert value_of(silent, "judge") is None
    assert "judge: no verdict yet" in silent.reasons
    failed = score(judged("j1", None, text="timeout after 3 tries"), settings=JUDGED)
    assert failed.reward == 0.0
    assert "judge: no verdict, j1: timeout after 3 tries" in failed.reasons
    assert "no verdict" not in " ".join(score(thumb("f1", 1)).reasons)


@pytest.mark.parametrize(
    ("sessions", "value"), [(0, None), (3, None), (4, -1 / 9), (12, -1.0), (100, -1.0)]
)
def test_words_used_again_and_again_cost(sessions: int, value: float | None) -> None:
    (reward,) = score_segment(segment([reply("a1")]), SETTINGS, repeated={"a1": sessions}).rewards
    assert value_of(reward, "diversity") == (None if value is None else pytest.approx(value))
    assert reward.reward == pytest.approx(0.2 * (value or 0.0))


# --- Reading ----------------------------------------------------------------------------------

PERCENT = {"scale_min": "0", "scale_max": "100"}
LIKERT = {"scale_min": "1", "scale_max": "5"}


@pytest.mark.parametrize(
    ("item", "value"),
    [
        (thumb("f", 1), 1.0),
        (thumb("f", -1), -1.0),
        (thumb("f", 0.2), 1.0),
        (rating("f", 0.25), 0.25),
        (rating("f", 5, attributes=LIKERT), 1.0),
        (rating("f", 3, attributes=LIKERT), 0.0),
        (rating("f", 2, attributes=LIKERT), -0.5),
        (feedback("f", FeedbackKind.OUTCOME, 50, attributes=PERCENT), 0.0),
        (feedback("f", FeedbackKind.DWELL, 1_500), 1_500.0),
        (feedback("f", FeedbackKind.COPY), 1.0),
        (feedback("f", FeedbackKind.ABANDON, 1), 1.0),
        (review("f", 2), 1.0),
        (review("f", 0), -1.0),
    ],
)
def test_reads_each_kind_on_its_scale(item: StepFeedback, value: float) -> None:
    assert read(item).value == value
    assert read(item).problem is None


@pytest.mark.parametrize(
    ("item", "why"),
    [
        (feedback("f", FeedbackKind.UNKNOWN, 1), "kind unknown says nothing"),
        (feedback("f", FeedbackKind.RETRACTION), "kind retraction says nothing"),
        (thumb("f", 0), "above 0 for up"),
        (feedback("f", FeedbackKind.THUMB), "above 0 for up"),
        (feedback("f", FeedbackKind.RATING), "it has no value"),
        (rating("f", 4), "outside [-1, 1]"),
        (rating("f", 6, attributes=LIKERT), "outside [1, 5]"),
        (rating("f", 4, attributes={"scale_min": "five"}), "two numbers, rising"),
        (rating("f", 4, attributes={"scale_min": "5", "scale_max": "1"}), "two numbers, rising"),
        (rating("f", 4, attributes={"scale_max": "nan"}), "two numbers, rising"),
        (rating("f", math.nan), "not a finite number"),
        (feedback("f", FeedbackKind.DWELL, math.inf), "not a finite number"),
        (feedback("f", FeedbackKind.DWELL, -5), "not negative"),
        (feedback("f", FeedbackKind.COPY, 0), "did not happen"),
        (feedback("f", FeedbackKind.REVIEW), "a review is above 0"),
    ],
)
def test_what_cannot_be_read_is_ignored_with_a_reason(item: StepFeedback, why: str) -> None:
    assert read(item).value is None
    reward = score(item)
    assert reward.reward == 0.0
    assert any(
        line.startswith("ignored") and "f" in line and why in line for line in reward.reasons
    )


# --- Components -------------------------------------------------------------------------------


def test_explicit_takes_each_raters_latest_and_the_mean_over_raters() -> None:
    reward = score(
        thumb("f1", 1, event_time=10),
        rating("f2", -0.5, event_time=20),
        thumb("f3", 1, event_time=15, user_id="u2"),
    )
    assert value_of(reward, "explicit") == 0.25
    assert reward.reward == pytest.approx(0.1)
    assert "ignored thumb f1: the same rater gave a later one" in reward.reasons


def test_feedback_without_a_user_is_the_segments_users() -> None:
    reward = score(thumb("f1", 1, event_time=10), thumb("f2", -1, event_time=20, user_id="u1"))
    assert value_of(reward, "explicit") == -1.0


def test_credibility_multiplies_the_rating_and_says_why() -> None:
    steps = [reply("a1", rating("f1", 0.8), thumb("f2", -1, user_id="u2"))]
    beliefs = {"f1": Credibility(weight=0.5, filter="row", reason="credibility: because")}
    (reward,) = score_segment(segment(steps), SETTINGS, beliefs).rewards
    assert value_of(reward, "explicit") == pytest.approx((0.4 - 1.0) / 2)
    assert reward.credibility == 0.75
    assert "credibility: because" in reward.reasons


@pytest.mark.parametrize("renormalise", [False, True])
def test_a_rating_that_is_held_has_no_part_in_the_mean(renormalise: bool) -> None:
    settings = RewardSettings(renormalise=renormalise)
    beliefs = {"f2": Credibility(weight=0.0, filter="flood", reason="credibility: held")}
    both = [reply("a1", thumb("f1", 1), thumb("f2", -1, user_id="u2"))]
    held = [reply("a1", thumb("f2", -1, user_id="u2"), feedback("f3", FeedbackKind.COPY))]
    (of_both,) = score_segment(segment(both), settings, beliefs).rewards
    (of_held,) = score_segment(segment(held), settings, beliefs).rewards
    assert value_of(of_both, "explicit") == 1.0
    assert value_of(of_held, "explicit") is None
    assert of_held.reward == pytest.approx(0.8 if renormalise else 0.3 * 0.8)
    assert "explicit: thumb f2 by user u2: -1, counts 0" in of_held.reasons


def test_words_of_others_take_a_bounded_part_of_the_record() -> None:
    long = "words " * 50_000
    given = [
        feedback("o1", FeedbackKind.OUTCOME, 1.0, attributes={"outcome": long}),
        judged("j1", 1.0, text=long),
        feedback("j2", FeedbackKind.JUDGEMENT, text=long),
        feedback("d1", FeedbackKind.DIRECTIVE, text=long),
    ]
    reward = score(*given, settings=JUDGED)
    written = [*reward.reasons, *(line for c in reward.components for line in c.evidence)]
    assert sum(map(len, written)) < 3_000
    assert (
        sum("words words" in line and line.endswith(("…)", "…): +1", "…")) for line in written) >= 3
    )
    assert [len(text) for text in reward.directives] == [4_000]


@pytest.mark.parametrize(
    ("item", "value"),
    [
        (feedback("f", FeedbackKind.DWELL, 30_000), 0.25),
        (feedback("f", FeedbackKind.DWELL, 60_000), 0.5),
        (feedback("f", FeedbackKind.DWELL, 9e9), 0.5),
        (feedback("f", FeedbackKind.DWELL, 0), 0.0),
        (feedback("f", FeedbackKind.FOLLOW_UP), 0.3),
        (feedback("f", FeedbackKind.COPY), 0.8),
        (feedback("f", FeedbackKind.REGENERATE), -0.8),
        (feedback("f", FeedbackKind.ABANDON), -1.0),
        (feedback("f", FeedbackKind.REPETITION), -0.8),
        (feedback("f", FeedbackKind.CORRECTION), -1.0),
        (feedback("f", FeedbackKind.CONFIRMATION), 0.5),
        (feedback("f", FeedbackKind.DIRECTIVE, text="Use less"), None),
    ],
)
def test_each_implicit_sign_alone(item: StepFeedback, value: float | None) -> None:
    reward = score(item)
    assert value_of(reward, "implicit") == (None if value is None else pytest.approx(value))
    assert reward.reward == pytest.approx(0.3 * (value or 0.0))


def test_an_event_counts_once_and_dwell_adds_up() -> None:
    reward = score(
        feedback("f1", FeedbackKind.COPY),
        feedback("f2", FeedbackKind.COPY),
        feedback("f3", FeedbackKind.DWELL, 12_000),
        feedback("f4", FeedbackKind.DWELL, 12_000),
    )
    assert value_of(reward, "implicit") == pytest.approx(0.8 + 0.5 * 24 / 60)


@pytest.mark.parametrize(("count", "points"), [(1, 0.3), (2, 0.6), (3, 0.6), (9, 0.6)])
def test_follow_ups_count_up_to_their_saturation(count: int, points: float) -> None:
    sent = [feedback(f"f{n}", FeedbackKind.FOLLOW_UP) for n in range(count)]
    assert value_of(score(*sent), "implicit") == pytest.approx(points)


@pytest.mark.parametrize(
    ("seen_ms", "points"), [(0, 0.0), (30_000, 0.25), (60_000, 0.5), (90_000, 0.5)]
)
def test_dwell_counts_up_to_its_saturation(seen_ms: int, points: float) -> None:
    assert value_of(score(feedback("f", FeedbackKind.DWELL, seen_ms)), "implicit") == points


def test_business_is_the_latest_outcome() -> None:
    reward = score(
        feedback("f2", FeedbackKind.OUTCOME, -1, event_time=20),
        feedback("f1", FeedbackKind.OUTCOME, 1, event_time=10),
    )
    assert value_of(reward, "business") == -1.0
    assert reward.reward == pytest.approx(-0.3)


def test_the_composite_of_all_three_by_hand() -> None:
    reward = score(
        thumb("f1", 1),
        feedback("f2", FeedbackKind.COPY),
        feedback("f3", FeedbackKind.OUTCOME, -0.5),
    )
    assert reward.reward == pytest.approx(0.4 * 1 + 0.3 * 0.8 + 0.3 * -0.5)
    assert reward.reasons[0] == (
        "reward +0.49 = explicit 0.4 x +1 + implicit 0.3 x +0.8 + business 0.3 x -0.5"
    )


def test_a_missing_component_counts_zero_or_gives_its_weight_away() -> None:
    given = (thumb("f1", 1), feedback("f2", FeedbackKind.COPY))
    assert score(*given).reward == pytest.approx(0.4 + 0.24)
    renormalised = score(*given, settings=RewardSettings(renormalise=True))
    assert renormalised.reward == pytest.approx((0.4 + 0.24) / 0.7)
    assert score(settings=RewardSettings(renormalise=True)).reward == 0.0


def test_the_composite_is_clipped() -> None:
    settings = RewardSettings(process_continued=1.0)
    components = [
        RewardComponent(name="explicit", weight=0.4, value=1.0),
        RewardComponent(name="process", weight=1.0, value=1.0),
    ]
    assert composite(components, renormalise=False) == 1.0
    after = said("u2", "And the next thing?")
    reward = score(thumb("f1", 1), settings=settings, next_user_turn=after)
    assert reward.reward == 1.0


def test_process_rewards_count_only_with_a_weight() -> None:
    after = said("u2", "Can you explain that in more detail?")
    assert "process" not in {c.name for c in score(next_user_turn=after).components}
    settings = RewardSettings(process_continued=0.1, process_details=0.3)
    assert score(next_user_turn=after, settings=settings).reward == pytest.approx(0.4)
    other = score(next_user_turn=said("u2", "What is next?"), settings=settings)
    assert other.reward == pytest.approx(0.1)
    assert score(settings=settings).reward == 0.0


def test_every_component_is_bounded_named_and_registered() -> None:
    reward = score(thumb("f1", 1), settings=RewardSettings(process_continued=0.1, weight_judge=0.1))
    assert [c.name for c in reward.components] == list(COMPONENTS)


# --- Text signals -----------------------------------------------------------------------------


def called(*answers: Message, calls: tuple[str, ...] = ("c1",)) -> TrajectorySegment:
    """A reply that calls tools, and one that goes on with what they answered."""
    wanted = tuple(ToolCall(id=name, name="run", arguments="{}") for name in calls)
    return segment([reply("a1", tool_calls=wanted), reply("a2", context=answers)])


def answered(content: str, call: str | None = "c1", **more: Any) -> Message:
    return Message(
        turn_id=f"t-{call}",
        role=Role.TOOL,
        content=content,
        event_time=1,
        tool_call_id=call,
        **more,
    )


def test_a_tool_that_failed_counts_against_the_reply_that_called_it() -> None:
    called_it, went_on = score_segment(called(answered("main.c:3:1: error: x")), SETTINGS).rewards
    assert value_of(called_it, "implicit") == -0.5
    assert value_of(went_on, "implicit") is None
    assert any('tool_error in turn t-c1 ("main.c:3:1: error")' in r for r in called_it.reasons)


@pytest.mark.parametrize(
    "answer",
    [
        answered("0 errors"),
        answered("main.c:3:1: error: x", call="another"),
        answered("main.c:3:1: error: x", carried=True),
    ],
)
def test_other_answers_of_tools_say_nothing(answer: Message) -> None:
    assert value_of(score_segment(called(answer), SETTINGS).rewards[0], "implicit") is None


def test_tool_errors_add_up_and_can_be_turned_off() -> None:
    two = called(answered("fatal: x", "c1"), answered("fatal: y", "c2"), calls=("c1", "c2"))
    assert value_of(score_segment(two, SETTINGS).rewards[0], "implicit") == -1.0
    off = RewardSettings(tool_errors=False)
    assert value_of(score_segment(two, off).rewards[0], "implicit") is None


def test_the_next_turns_words_score_the_reply() -> None:
    right, wrong = score_segment(
        conversation("Where is Rome?", "Thanks, that works", "No, that's wrong"), SETTINGS
    ).rewards
    assert value_of(right, "implicit") == pytest.approx(0.5)
    assert value_of(wrong, "implicit") == -1.0
    assert right.reward == pytest.approx(0.15)
    assert any('confirmation in turn u1 ("thanks")' in line for line in right.reasons)


@pytest.mark.parametrize(("between", "charged"), [(50, True), (51, False)])
def test_a_repetition_is_looked_for_in_so_many_turns(between: int, charged: bool) -> None:
    fillers = [f"{'abcdefgh'[n % 8]}{'ijklmnop'[n // 8]} is what I see" for n in range(between)]
    question = "How do I reset my password?"
    rewards = score_segment(conversation(question, *fillers, question), SETTINGS).rewards
    assert any("repetition" in line for line in rewards[0].reasons) is charged


def test_comparing_turns_takes_no_longer_the_longer_a_segment_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = 0

    def counting(text: str, earlier: Sequence[str], *more: Any) -> float | None:
        nonlocal compared
        compared += len(earlier)
        return repeats(text, earlier, *more)

    monkeypatch.setattr(formulas, "repeats", counting)
    score_segment(conversation(*(f"question {n}" for n in range(501))), SETTINGS)
    assert 500 <= compared <= 500 * (MAX_TURNS_BETWEEN + 1)
    compared = 0
    asked = tuple(said(f"u{n}", f"question {n}") for n in range(500))
    told = tuple(said(f"v{n}", f"answer {n}") for n in range(500))
    score_segment(segment([reply("a", context=asked), reply("b", context=told)]), SETTINGS)
    assert 0 < compared <= MAX_TURNS_BETWEEN * (MAX_TURNS_BETWEEN + 1)


def test_what_follows_a_reply_is_each_turn_once() -> None:
    steps = [
        reply("a1", context=(said("u1", "one"),), next_user_turn=said("u2", "two")),
        reply("a2", context=(said("u2", "two, again"), said("u3", "three"))),
        reply("a3", context=(said("u3", "three, again"),), next_user_turn=said("u4", "four")),
    ]
    seen = [
        [turn.content for turn in context.later_user_turns]
        for context in contexts(segment(steps), SETTINGS, {}, {})
    ]
    assert seen == [["two", "three", "four"], ["three, again", "four"], ["four"]]


def test_a_repetition_is_charged_to_the_reply_that_had_answered_it() -> None:
    rewards = score_segment(
        conversation(
            "How do I reset my password?",
            "And where is the settings page?",
            "how can i reset my password",
        ),
        SETTINGS,
    ).rewards
    assert value_of(rewards[0], "implicit") == pytest.approx(-0.8 * 0.9)
    assert value_of(rewards[1], "implicit") is None
    assert any("user turns between: 1" in line for line in rewards[0].reasons)


def test_signals_add_up_before_they_are_clipped() -> None:
    settings = RewardSettings(correction=-0.1)
    texts = ("How do I reset my password?", "That's wrong, how do I reset my password?")
    (reward,) = score_segment(conversation(*texts), settings).rewards
    assert value_of(reward, "implicit") == pytest.approx(-0.9)
    (reward,) = score_segment(conversation(*texts), SETTINGS).rewards
    assert value_of(reward, "implicit") == -1.0


@pytest.mark.parametrize("turns_between", [0, 1, 2, 3])
def test_a_signal_the_front_end_sends_decays_with_the_turns_in_between(turns_between: int) -> None:
    talk = conversation("q0", "q1", "q2", "q3")
    # User turns stand at 10, 20, 30; the signal is sent with the turn after those in between.
    signal = feedback("f1", FeedbackKind.CONFIRMATION, event_time=10 * (turns_between + 1))
    steps = (reply("a0", signal, event_time=5, context=talk.steps[0].context,
                   next_user_turn=talk.steps[0].next_user_turn), *talk.steps[1:])  # fmt: skip
    rewards = score_segment(segment(steps), SETTINGS).rewards
    assert value_of(rewards[0], "implicit") == pytest.approx(0.5 * 0.9**turns_between)


def test_signals_the_front_end_sends_replace_the_words() -> None:
    after = said("u2", "No, that's wrong. Use the second column instead.", 10)
    reward = score(feedback("f1", FeedbackKind.CONFIRMATION, event_time=10), next_user_turn=after)
    assert value_of(reward, "implicit") == pytest.approx(0.5)
    assert reward.directives == ()
    ignored = [line for line in reward.reasons if line.startswith("ignored")]
    assert [line.split()[1] for line in ignored] == ["correction", "directive"]
    assert all("in turn u2" in line and "front end" in line for line in ignored)
    off = score(next_user_turn=after, settings=RewardSettings(text_signals=False))
    assert value_of(off, "implicit") is None


def test_directives_are_kept_as_text_and_score_nothing() -> None:
    heard = score(next_user_turn=said("u2", "请用中文回答"))
    assert heard.directives == ("请用中文回答",)
    assert heard.reward == 0.0
    sent = score(feedback("f1", FeedbackKind.DIRECTIVE, text=" Be brief "))
    assert sent.directives == ("Be brief",)


def test_what_was_answered_before_is_not_what_a_reply_answers() -> None:
    before = said("u0", "How do I reset my password?", carried=True)
    answer = Message(
        turn_id="a0", role=Role.ASSISTANT, content="Like so.", event_time=0, carried=True
    )
    asked = said("u1", "Where is the settings page?")
    again = said("u2", "How do I reset my password?")
    answered = score(context=(before, answer, asked), next_user_turn=again)
    assert value_of(answered, "implicit") is None
    open_still = score(context=(before, asked), next_user_turn=again)
    assert value_of(open_still, "implicit") == pytest.approx(-0.8)


def test_a_reply_after_a_tool_call_answers_what_the_call_did() -> None:
    asked, again = said("u1", "Find my red suitcase"), said("u2", "find my red suitcase")
    found = Message(turn_id="t1", role=Role.TOOL, content="{}", event_time=0)
    steps = [
        reply("a1", context=(asked,), next_user_turn=again),
        reply("a2", context=(found,), next_user_turn=again),
    ]
    rewards = score_segment(segment(steps), SETTINGS).rewards
    assert [value_of(r, "implicit") for r in rewards] == pytest.approx([-0.8, -0.8])


# --- Segments ---------------------------------------------------------------------------------


def test_one_reward_for_each_step_in_order() -> None:
    steps = [reply("a1", thumb("f1", 1)), reply("a2"), reply("a3", thumb("f3", -1))]
    scored = score_segment(segment(steps), SETTINGS)
    assert [r.turn_id for r in scored.rewards] == ["a1", "a2", "a3"]
    assert [r.reward for r in scored.rewards] == pytest.approx([0.4, 0.0, -0.4])
    assert all(r.reasons for r in scored.rewards)
    assert scored.trainable
    assert scored.untrainable_reason is None
    assert scored.formula_id == FORMULA_ID


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (segment([]), "the segment has no reply"),
        (segment([reply("a1")]), "there is no feedback"),
        (segment([reply("a1", rating("f1", 0.0))]), "adds up to nothing"),
        (segment([reply("a1", thumb("f1", 1), reply=" ")]), "no reply has any text"),
    ],
)
def test_an_untrainable_segment_says_why(what: TrajectorySegment, why: str) -> None:
    scored = score_segment(what, SETTINGS)
    assert not scored.trainable
    assert why in (scored.untrainable_reason or "")


def test_ratings_held_back_are_the_reason_if_nothing_else_counts() -> None:
    steps = [reply("a1", thumb("f1", -1))]
    scored = score_segment(
        segment(steps),
        SETTINGS,
        {"f1": Credibility(weight=0.0, filter="row", reason="credibility: x")},
    )
    assert scored.untrainable_reason == (
        "all rewards are zero: feedback is held back, see the rewards' reasons"
    )


def test_a_reply_that_only_calls_a_tool_can_be_trained() -> None:
    call = ToolCall(id="c1", name="search", arguments="{}")
    steps = [reply("a1", thumb("f1", 1), reply="", tool_calls=(call,))]
    assert score_segment(segment(steps), SETTINGS).trainable


def test_config_hash_follows_the_weights() -> None:
    assert len(config_hash(SETTINGS)) == 64
    assert config_hash(SETTINGS) == config_hash(RewardSettings())
    assert config_hash(SETTINGS) != config_hash(RewardSettings(decay=0.8))
    one, two = ({"a": amount} for amount in (0.1, 0.2))
    plugged = RewardSettings(plugin_components=one)
    assert config_hash(plugged) == config_hash(RewardSettings(plugin_components=dict(one)))
    assert config_hash(plugged) != config_hash(RewardSettings(plugin_components=two))
