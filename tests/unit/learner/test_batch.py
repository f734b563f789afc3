from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner import tiny
from learner.batch import BuildRules, BuiltSamples, TrainingSample, Turn, build_samples
from learner.chat import Chat, template_digest, tokenizer_digest
from streams.contracts import ClosedBy, Role, Sampling, ScoredSegment, ToolCall
from streams.errors import LearnerError
from tests.unit.learner.builders import conversation, message, sample, scored, step

END = 2
"""The tiny tokenizer's end of turn."""


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(tiny.build_tokenizer())


def build(segment: ScoredSegment, chat: Chat, limit: int = 4_096, **options: Any) -> BuiltSamples:
    return build_samples(
        segment,
        chat,
        tokenizer_digest=tokenizer_digest(chat.tokenizer),
        template_digest=template_digest(chat.tokenizer),
        rules=BuildRules(max_sequence_tokens=limit, **options),
    )


def only(built: BuiltSamples) -> TrainingSample:
    assert built.skipped is None
    (one,) = built.samples
    return one


def text_of(one: TrainingSample, chat: Chat) -> str:
    return chat.decode(one.token_ids, skip_special_tokens=False)


def trained_text(one: TrainingSample, chat: Chat) -> list[str]:
    return [
        chat.decode(one.token_ids[turn.start : turn.end], skip_special_tokens=False)
        for turn in one.turns
    ]


# --- splicing ---------------------------------------------------------------------------------


def test_text_alone_gives_the_rendered_conversation(chat: Chat) -> None:
    segment = scored(
        step("Hello.", message("Be kind.", Role.SYSTEM), message("Hi")),
        step("Bye.", message("Go")),
        rewards={"r-Hello.": 0.5, "r-Bye.": -1.0},
    )
    one = only(build(segment, chat))
    assert text_of(one, chat) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nGo<|im_end|>\n"
        "<|im_start|>assistant\nBye.<|im_end|>"
    )
    assert trained_text(one, chat) == ["Hello.<|im_end|>", "Bye.<|im_end|>"]
    assert [turn.reward for turn in one.turns] == [0.5, -1.0]
    assert (one.sample_id, one.segment_id, one.revision) == ("seg-1", "seg-1", 2)


def test_sampled_ids_are_used_as_they_are(chat: Chat) -> None:
    # The recorded prompt and the last reply are not what the text would give, on purpose.
    prompt, first, second = (1, 50, 51), (60, 61, 62, END), (70, 71)
    segment = scored(
        step(
            chat.decode(first),
            message("Hi"),
            token_ids=first,
            behaviour_logprobs=(-0.1, -0.2, -0.3, -0.4),
            prompt_token_ids=prompt,
            policy_version=3,
            sampling=Sampling(temperature=0.7),
        ),
        step("nor these", message("Go"), token_ids=second, finish_reason="length"),
    )
    one = only(build(segment, chat))
    between = chat.encode("\n<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n")
    assert one.token_ids == (*prompt, *first, *between, *second)
    assert [(turn.start, turn.end) for turn in one.turns] == [
        (3, 7),
        (7 + len(between), len(one.token_ids)),
    ]
    assert one.turns[0].policy_version == 3
    assert one.turns[1].policy_version is None
    assert one.behaviour_logprobs == (-0.1, -0.2, -0.3, -0.4, 0.0, 0.0)
    assert one.behaviour_mask == (True, True, True, True, False, False)
    assert one.temperatures == (0.7, 0.7, 0.7, 0.7, 1.0, 1.0)


def test_an_end_that_was_not_sampled_is_context_not_training(chat: Chat) -> None:
    segment = scored(
        step("ab", message("Hi"), token_ids=chat.encode("ab"), finish_reason="length"),
        step("cd", message("Go")),
    )
    one = only(build(segment, chat))
    assert trained_text(one, chat) == ["ab", "cd<|im_end|>"]
    assert "ab<|im_end|>\n<|im_start|>user\nGo" in text_of(one, chat)


@pytest.mark.parametrize("reason", ["length", "client_disconnected", "cancelled", "abort"])
def test_a_cut_off_reply_without_ids_has_no_trained_end(reason: str, chat: Chat) -> None:
    segment = scored(step("ab", message("Hi"), finish_reason=reason))
    one = only(build(segment, chat, interrupted="train"))
    assert trained_text(one, chat) == ["ab"]


@pytest.mark.parametrize(
    ("reason", "interrupted"),
    [
        ("client_disconnected", "skip"),
        ("cancelled", "skip"),
        ("abort", "skip"),
        ("broken_off", "skip"),
        ("error", "skip"),
        ("broken_off", "train"),
        ("error", "train"),
    ],
)
def test_a_reply_that_somebody_else_ended_is_context_only(
    reason: str, interrupted: str, chat: Chat
) -> None:
    cut = step("ab", message("Hi"), finish_reason=reason, token_ids=chat.encode("ab"))
    after = step("cd", message("Go"))
    rewards = {"r-ab": -1.0, "r-cd": 1.0}
    built = build(scored(cut, after, rewards=rewards), chat, interrupted=interrupted)
    one = only(built)
    assert trained_text(one, chat) == ["cd<|im_end|>"]
    assert "ab<|im_end|>\n<|im_start|>user\nGo" in text_of(one, chat)
    assert (one.turns[0].reward, built.interrupted, built.too_long) == (1.0, 1, 0)
    alone = build(scored(cut), chat, interrupted=interrupted)
    assert (alone.samples, alone.skipped) == ((), "every reply was cut off")


def test_a_reply_after_other_ids_than_were_sampled_begins_a_sample(chat: Chat) -> None:
    # The first prompt holds more than the segment knows; the second reply was sampled after
    # it, and after the first reply's text, which is tokenized to other ids than were sampled.
    prompt, sampled = (9, 9, *chat.encode("earlier")), (60, 61, END)
    segment = scored(
        step("trimmed", message("Hi"), token_ids=sampled, prompt_token_ids=prompt),
        step("cd", message("Go"), token_ids=(70,), behaviour_logprobs=(-0.5,)),
        closed_by=ClosedBy.END,
    )
    first, second = build(segment, chat).samples
    assert first.token_ids == (*prompt, *sampled)
    tail = "trimmed<|im_end|>\n<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n"
    assert second.token_ids == (*prompt, *chat.encode(tail), 70)
    assert second.behaviour_logprobs == (-0.5,)
    assert not second.truncated
    assert (first.terminal, second.terminal) == (False, True)


def test_a_recorded_later_prompt_decides(chat: Chat) -> None:
    prompt, sampled, later = (1, 50, 51), (60, 61, END), (44, 45)
    steps = (
        step("x", message("Hi"), token_ids=sampled, prompt_token_ids=prompt),
        step("y", message("Go"), token_ids=(70,), prompt_token_ids=(*prompt, *sampled, *later)),
        step("z", message("On"), token_ids=(71,), prompt_token_ids=(*later, *prompt)),
    )
    first, second = build(scored(*steps), chat).samples
    assert first.token_ids == (*prompt, *sampled, *later, 70)
    assert [turn.turn_id for turn in first.turns] == ["r-x", "r-y"]
    assert second.token_ids == (*later, *prompt, 71)


def test_a_reply_without_a_token_is_context_and_nothing_else(chat: Chat) -> None:
    gone = step("", message("Hi"), token_ids=(), finish_reason="client_disconnected")
    answered = step("ab", message("Still there?"))
    one = only(build(scored(gone, answered, rewards={"r-": 1.0, "r-ab": -1.0}), chat))
    assert trained_text(one, chat) == ["ab<|im_end|>"]
    assert "assistant\n<|im_end|>\n<|im_start|>user\nStill there?" in text_of(one, chat)
    assert (one.rewards, one.terminal) == ((0.0, 0.0, -1.0), True)
    one = only(build(scored(answered, gone), chat))
    assert (trained_text(one, chat), one.terminal) == (["ab<|im_end|>"], True)
    built = build(scored(gone), chat)
    assert built.samples == ()
    assert built.skipped is not None
    assert "no reply has tokens" in built.skipped
    assert built.interrupted == 0


def test_a_reply_of_its_end_alone_is_trained_on(chat: Chat) -> None:
    silent = step("", message("Hi"), token_ids=(END,), behaviour_logprobs=(-3.0,))
    one = only(build(scored(silent, step("ab", message("Go"))), chat))
    assert trained_text(one, chat) == ["<|im_end|>", "ab<|im_end|>"]
    assert one.behaviour_logprobs[0] == -3.0


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e30])
def test_a_reward_that_would_break_every_update_is_skipped(reward: float, chat: Chat) -> None:
    built = build(scored(step("ab", message("Hi")), rewards={"r-ab": reward}), chat)
    assert built.samples == ()
    assert built.skipped == f"turn r-ab has the reward {reward}"


def test_spliced_ids_equal_the_whole_rendered_at_once(chat: Chat) -> None:
    segment = scored(
        step("Hello.", message("Hi")), step("世界", message("Go")), step("!", message("x\n\n y "))
    )
    one = only(build(segment, chat))
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "世界"},
        {"role": "user", "content": "x\n\n y "},
    ]
    assert one.token_ids == (*chat.render_prompt(messages), *chat.encode("!<|im_end|>"))


def test_an_assistant_message_in_the_context_is_not_trained_on(chat: Chat) -> None:
    carried = message("Earlier.", Role.ASSISTANT, carried=True)
    one = only(build(scored(step("Now.", message("a"), carried, message("b"))), chat))
    assert trained_text(one, chat) == ["Now.<|im_end|>"]
    assert "Earlier." in text_of(one, chat)


def test_tool_calls_are_trained_as_the_template_shows_them() -> None:
    tokenizer = tiny.build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
        "{% for c in m['tool_calls'] or [] %}[{{ c['function']['name'] }}"
        "({{ c['function']['arguments'] }})]{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = Chat(tokenizer)
    call = ToolCall(id="c1", name="lookup", arguments='{"n": 1}')
    segment = scored(
        step("", message("Hi"), tool_calls=(call,)),
        step("Found.", message("42", Role.TOOL, tool_call_id="c1")),
    )
    one = only(build(segment, chat))
    assert trained_text(one, chat) == ['[lookup({"n": 1})]<|im_end|>', "Found.<|im_end|>"]
    assert "<|im_start|>tool\n42<|im_end|>" in text_of(one, chat)


REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('~')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_rewrites_replies_cuts_the_segment() -> None:
    tokenizer = tiny.build_tokenizer()
    tokenizer.chat_template = REWRITING
    chat = Chat(tokenizer)
    segment = scored(
        step("plain", message("a")),
        step("why~because", message("b")),
        step("end", message("c")),
    )
    built = build(segment, chat)
    assert built.skipped is None
    first, second = built.samples
    assert trained_text(first, chat) == ["plain<|im_end|>", "why~because<|im_end|>"]
    assert trained_text(second, chat) == ["end<|im_end|>"]
    # What was sampled after the rewritten text is trained after the rewritten text.
    assert "because<|im_end|>\n<|im_start|>user\nc" in text_of(second, chat)
    assert "why~" not in text_of(second, chat)
    assert (first.sample_id, second.sample_id) == ("seg-1#0", "seg-1#1")
    assert (first.terminal, second.terminal) == (False, True)


# --- what a sample says -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("closed_by", "terminal"),
    [
        (ClosedBy.END, True),
        (ClosedBy.GAP, True),
        (ClosedBy.SIZE, False),
        (ClosedBy.DURATION, False),
        (ClosedBy.UNKNOWN, False),
    ],
)
def test_only_conversations_that_ended_are_terminal(
    closed_by: ClosedBy, terminal: bool, chat: Chat
) -> None:
    one = only(build(scored(step("a", message("Hi")), closed_by=closed_by), chat))
    assert one.terminal is terminal


def test_masks_and_rewards_follow_the_turns() -> None:
    one = conversation("c", [([5, 6], [7, 8], 0.5), ([9], [10, 11, 12], -1.0)])
    assert one.loss_mask == (False, False, True, True, False, True, True, True)
    assert one.positions == (2, 3, 5, 6, 7)
    assert one.rewards == (0.0, 0.5, 0.0, 0.0, -1.0)
    assert one.behaviour_mask == (False,) * 5


def test_a_step_without_reward_earns_nothing(chat: Chat) -> None:
    one = only(build(scored(step("a", message("Hi"))), chat))
    assert one.turns[0].reward == 0.0


@pytest.mark.parametrize(
    ("sampling", "temperature"),
    [
        (None, 1.0),
        (Sampling(), 1.0),
        (Sampling(temperature=0.0), 1.0),
        (Sampling(temperature=1e-6), 1.0),
        (Sampling(temperature=0.6), 0.6),
    ],
)
def test_temperature_of_greedy_and_unknown_sampling_is_one(
    sampling: Sampling | None, temperature: float, chat: Chat
) -> None:
    one = only(build(scored(step("a", message("Hi"), sampling=sampling)), chat))
    assert one.turns[0].temperature == temperature


@pytest.mark.parametrize(
    "logprobs",
    [(-1.0,), (), (math.nan, -1.0), (-math.inf, -1.0), (0.5, -1.0), (-9999.0, -1.0)],
)
def test_logprobs_that_cannot_be_right_count_as_not_given(
    logprobs: tuple[float, ...], chat: Chat
) -> None:
    segment = scored(step("ab", message("Hi"), token_ids=(40, 41), behaviour_logprobs=logprobs))
    assert only(build(segment, chat)).turns[0].behaviour_logprobs is None


def test_a_certain_token_is_given_and_rounding_is_forgiven(chat: Chat) -> None:
    segment = scored(step("ab", message("Hi"), token_ids=(40, 41), behaviour_logprobs=(0.0, 1e-7)))
    assert only(build(segment, chat)).turns[0].behaviour_logprobs == (0.0, 0.0)


# --- what is refused or skipped ---------------------------------------------------------------


def test_untrainable_segments_are_skipped_with_their_reason(chat: Chat) -> None:
    segment = scored(step("a", message("Hi")), trainable=False, reason="all rewards are 0")
    built = build(segment, chat)
    assert built.samples == ()
    assert built.skipped == "untrainable: all rewards are 0"


def test_segments_without_replies_are_skipped(chat: Chat) -> None:
    assert build(scored(), chat).skipped == "no replies on the continued branch"


def test_unknown_roles_are_skipped(chat: Chat) -> None:
    built = build(scored(step("a", message("Hi", Role.UNKNOWN))), chat)
    assert built.samples == ()
    assert built.skipped is not None
    assert "role" in built.skipped


@pytest.mark.parametrize("ids", [(40, 99_999), (-1, 40)])
def test_ids_beyond_the_vocabulary_are_skipped(ids: tuple[int, ...], chat: Chat) -> None:
    for fields in ({"token_ids": ids}, {"prompt_token_ids": ids}):
        built = build(scored(step("a", message("Hi"), **fields)), chat)
        assert built.samples == ()
        assert built.skipped is not None
        assert "another tokenizer" in built.skipped


@pytest.mark.parametrize("name", ["tokenizer_digest", "template_digest"])
def test_another_tokenizer_or_template_is_refused(name: str, chat: Chat) -> None:
    segment = scored(step("ab", message("Hi"), token_ids=(40, 41), **{name: "0" * 64}))
    with pytest.raises(LearnerError, match=r"turn r-ab .*000000000000"):
        build(segment, chat)


@pytest.mark.parametrize("name", ["tokenizer_digest", "template_digest"])
def test_or_rendered_again_from_its_text(name: str, chat: Chat) -> None:
    segment = scored(
        step(
            "ab",
            message("Hi"),
            token_ids=(40, 41),
            prompt_token_ids=(50,),
            behaviour_logprobs=(-1.0, -1.0),
            **{name: "0" * 64},
        )
    )
    one = only(build(segment, chat, on_mismatch="rerender"))
    assert trained_text(one, chat) == ["ab<|im_end|>"]
    assert text_of(one, chat).startswith("<|im_start|>user\nHi<|im_end|>")
    assert one.turns[0].behaviour_logprobs is None


def test_matching_digests_are_no_matter(chat: Chat) -> None:
    segment = scored(
        step(
            "ab",
            message("Hi"),
            token_ids=(40, 41),
            tokenizer_digest=tokenizer_digest(chat.tokenizer),
            template_digest=template_digest(chat.tokenizer),
        )
    )
    assert only(build(segment, chat)).token_ids[-2:] == (40, 41)


# --- truncation -------------------------------------------------------------------------------


def _long(chat: Chat) -> ScoredSegment:
    return scored(
        step("first", message("Be kind.", Role.SYSTEM), message("x" * 100)),
        step(
            "second",
            message("y" * 10),
            token_ids=(*chat.encode("second"), END),
            behaviour_logprobs=(-1.0,) * 7,
        ),
        rewards={"r-first": 1.0, "r-second": -1.0},
    )


def test_what_does_not_fit_into_one_sample_goes_on_in_another(chat: Chat) -> None:
    whole = only(build(_long(chat), chat))
    assert not whole.truncated
    built = build(_long(chat), chat, limit=len(whole.token_ids) - 1)
    first, second = built.samples
    # The first part is as it happened, and bootstraps from what came after.
    assert first.token_ids == whole.token_ids[: len(first.token_ids)]
    assert trained_text(first, chat) == ["first<|im_end|>"]
    assert (first.truncated, first.terminal) == (False, False)
    # The second loses its leading messages; the system message stays.
    assert text_of(second, chat) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nyyyyyyyyyy<|im_end|>\n"
        "<|im_start|>assistant\nsecond<|im_end|>"
    )
    assert (second.truncated, second.terminal) == (True, True)
    assert [turn.reward for one in built.samples for turn in one.turns] == [1.0, -1.0]
    assert [one.sample_id for one in built.samples] == ["seg-1#0", "seg-1#1"]
    assert built.too_long == 0


def test_recorded_logprobs_do_not_outlive_their_context(chat: Chat) -> None:
    whole = only(build(_long(chat), chat))
    assert whole.turns[1].behaviour_logprobs is not None
    _, second = build(_long(chat), chat, limit=len(whole.token_ids) - 1).samples
    assert second.turns[0].behaviour_logprobs is None


def test_a_later_part_begins_with_half_a_limit_of_what_was_said(chat: Chat) -> None:
    # Each turn is at most 62 tokens, with what the template puts around it.
    turns = [step(f"{n}" * 10, message(f"{n}" * 14)) for n in range(8)]
    limit = 200
    built = build(scored(*turns), chat, limit=limit)
    assert built.too_long == 0
    names = [[turn.turn_id for turn in one.turns] for one in built.samples]
    assert [name for part in names for name in part] == [f"r-{str(n) * 10}" for n in range(8)]
    for one in built.samples[1:]:
        before = one.turns[0].start
        # As much as half the limit holds, by whole messages, and no more.
        assert limit // 2 - 62 < before <= limit // 2
    assert [one.terminal for one in built.samples] == [False] * (len(names) - 1) + [True]
    assert [len(part) for part in names] == [4, 3, 1]


def test_a_question_of_more_than_half_the_limit_is_still_answered(chat: Chat) -> None:
    built = build(scored(step("a", message("b")), step("c", message("x" * 70))), chat, limit=110)
    assert [trained_text(one, chat) for one in built.samples] == [["a<|im_end|>"], ["c<|im_end|>"]]
    assert "b<|im_end|>" not in text_of(built.samples[1], chat)


def test_a_reply_that_does_not_fit_with_its_question_is_left_out(chat: Chat) -> None:
    built = build(scored(step("a" * 50, message("Hi"))), chat, limit=40)
    assert (built.samples, built.too_long) == ((), 1)
    assert built.skipped == "no reply fits, with the message it answers, into 40 tokens"


def test_a_late_giant_does_not_take_the_others_with_it(chat: Chat) -> None:
    steps = (
        step("one", message("z" * 70), message("a")),
        step("two" * 100, message("b")),
        step("three", message("c")),
    )
    built = build(scored(*steps), chat, limit=120)
    first, third = built.samples
    assert trained_text(first, chat) == ["one<|im_end|>"]
    assert trained_text(third, chat) == ["three<|im_end|>"]
    assert built.too_long == 1
    assert [(one.truncated, one.terminal) for one in built.samples] == [
        (False, False),
        (True, True),
    ]


texts = st.text(max_size=12)


@settings(deadline=None)
@given(
    st.lists(st.tuples(texts, texts), min_size=1, max_size=5),
    st.integers(10, 400),
    st.booleans(),
)
def test_no_reply_is_ever_cut_and_no_limit_exceeded(
    pairs: list[tuple[str, str]], limit: int, with_system: bool
) -> None:
    chat = Chat(tiny.build_tokenizer())
    first = (message("Be kind.", Role.SYSTEM),) if with_system else ()
    steps = [
        step(reply, *(first if number == 0 else ()), message(question))
        for number, (question, reply) in enumerate(pairs)
    ]
    built = build(scored(*steps), chat, limit=limit)
    replies = [f"{reply}<|im_end|>" for _, reply in pairs]
    for one in built.samples:
        assert len(one.token_ids) <= limit
        assert all(text in replies for text in trained_text(one, chat))
        assert one.token_ids[-1] == END
        if with_system:
            assert text_of(one, chat).startswith("<|im_start|>system\nBe kind.")
    if not built.samples:
        assert built.skipped is not None
    # Each reply is trained on once, or counted.
    trained = [turn.turn_id for one in built.samples for turn in one.turns]
    assert len(trained) + built.too_long == len(pairs)


# --- the records themselves -------------------------------------------------------------------


def test_a_turn_needs_a_context_and_tokens() -> None:
    with pytest.raises(LearnerError, match="spans tokens 0 to 2"):
        Turn(turn_id="t", start=0, end=2, reward=0.0)
    with pytest.raises(LearnerError, match="spans tokens 2 to 2"):
        Turn(turn_id="t", start=2, end=2, reward=0.0)
    with pytest.raises(LearnerError, match="2 tokens, but 1"):
        Turn(turn_id="t", start=1, end=3, reward=0.0, behaviour_logprobs=(-1.0,))


def test_a_sample_ends_with_its_last_turn_and_turns_do_not_overlap() -> None:
    turn = Turn(turn_id="t", start=1, end=3, reward=0.0)
    fields: dict[str, Any] = {
        "sample_id": "s",
        "segment_id": "s",
        "revision": 0,
        "terminal": True,
    }
    TrainingSample(token_ids=(1, 2, 3), turns=(turn,), **fields)
    overlapping = (turn, Turn(turn_id="u", start=2, end=4, reward=0.0))
    for token_ids, turns in (((1, 2, 3, 4), (turn,)), ((1, 2, 3, 4), overlapping), ((1, 2), ())):
        with pytest.raises(LearnerError, match="in order"):
            TrainingSample(token_ids=token_ids, turns=turns, **fields)


def test_builders_make_valid_samples() -> None:
    assert sample("s", [1, 2], [3], 1.0).positions == (2,)
