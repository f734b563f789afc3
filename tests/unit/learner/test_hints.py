from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from learner import tiny
from learner.batch import BuildRules, BuiltSamples, TrainingSample, build_samples
from learner.chat import Chat
from learner.hints import HINT_FORMAT, hint_of, teacher_prompt, teaches
from streams.contracts import Message, Role, ScoredSegment, StepReward
from tests.unit.learner.builders import message, scored, step


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(tiny.build_tokenizer())


def rewarded(segment: ScoredSegment, *directives: str, **changes: Any) -> ScoredSegment:
    """The segment whose first reply has these directives."""
    first = segment.segment.steps[0].turn_id
    others = [r for r in segment.rewards if r.turn_id != first]
    values = {"turn_id": first, "reward": 0.5, "directives": directives, **changes}
    return replace(segment, rewards=(StepReward(**values), *others))


def build(segment: ScoredSegment, chat: Chat, limit: int = 4_096, **options: Any) -> BuiltSamples:
    rules = BuildRules(max_sequence_tokens=limit, **{"hint": "directive", **options})
    return build_samples(segment, chat, tokenizer_digest="", template_digest="", rules=rules)


def prompts(built: BuiltSamples, chat: Chat) -> list[str | None]:
    """The teacher's prompts as text."""
    turns = [turn for one in built.samples for turn in one.turns]
    return [
        None
        if turn.teacher_prompt is None
        else chat.decode(turn.teacher_prompt, skip_special_tokens=False)
        for turn in turns
    ]


def sample_of(built: BuiltSamples) -> TrainingSample:
    (one,) = built.samples
    return one


# --- where hints come from --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("directives", "said", "source", "expected"),
    [
        (("shorter", " in French "), "thanks", "directive", "shorter\nin French"),
        (("shorter",), "thanks", "next_user_turn", "shorter"),
        ((), " not like that ", "next_user_turn", "not like that"),
        ((), "not like that", "directive", None),
        ((" ",), "not like that", "next_user_turn", "not like that"),
        ((), "  ", "next_user_turn", None),
        ((), None, "next_user_turn", None),
    ],
)
def test_a_hint_is_what_the_user_asked_for(
    directives: tuple[str, ...], said: str | None, source: Any, expected: str | None
) -> None:
    follow = None if said is None else message(said)
    reply = step("a", message("q"), next_user_turn=follow)
    reward = StepReward(turn_id=reply.turn_id, reward=0.0, directives=directives)
    assert hint_of(reply, reward, source) == expected
    if not directives:
        assert hint_of(reply, None, source) == expected


def test_a_rater_who_is_held_back_gives_no_hint() -> None:
    reply = step("a", message("q"), next_user_turn=message("say foo"))
    for credibility, expected in ((1.0, "say foo"), (0.5, None), (0.0, None)):
        reward = StepReward(turn_id=reply.turn_id, reward=0.0, credibility=credibility)
        assert hint_of(reply, reward, "next_user_turn") == expected


def test_words_teach_where_nobody_rated() -> None:
    silent = scored(step("a", message("q")), trainable=False, reason="all rewards are zero")
    worded = rewarded(silent, "shorter", reward=0.0)
    assert [teaches(s, "directive") for s in (silent, worded)] == [False, True]
    assert not teaches(worded, None)
    # Some other reason keeps a segment with rewards out, whatever was said.
    assert not teaches(rewarded(silent, "shorter", reward=1.0), "directive")
    assert teaches(scored(step("a", message("q"))), None)


# --- where hints go ---------------------------------------------------------------------------


def test_the_hint_stands_in_the_last_message_of_the_user(chat: Chat) -> None:
    segment = scored(step("Hello.", message("Be kind.", Role.SYSTEM), message("Hi")))
    (prompt,) = prompts(build(rewarded(segment, "in French"), chat), chat)
    said = HINT_FORMAT.format(content="Hi", hint="in French")
    assert prompt == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_each_reply_has_its_own_hint_and_the_policys_prompt_none(chat: Chat) -> None:
    segment = scored(
        step("one", message("a")),
        step("two", message("b")),
        step("three", message("c"), message("42", Role.TOOL)),
    )
    rewards = [
        StepReward(turn_id="r-two", reward=0.0, directives=("longer",)),
        StepReward(turn_id="r-three", reward=1.0, directives=("calmer",)),
    ]
    built = build(replace(segment, rewards=tuple(rewards)), chat)
    one = sample_of(built)
    assert "longer" not in chat.decode(one.token_ids)
    first, second, third = prompts(built, chat)
    assert first is None
    assert second is not None
    assert third is not None
    assert HINT_FORMAT.format(content="b", hint="longer") in second
    assert HINT_FORMAT.format(content="c", hint="calmer") in third
    assert "longer" not in third
    assert "<|im_start|>tool\n42<|im_end|>" in third
    # What was said before is the same for teacher and policy, token by token.
    turn = one.turns[1]
    assert turn.teacher_prompt is not None
    shared = chat.encode("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n")
    assert one.token_ids[: len(shared)] == turn.teacher_prompt[: len(shared)] == shared


def test_a_recorded_prompt_keeps_what_only_the_server_knew(chat: Chat) -> None:
    rendered = chat.render_prompt([{"role": "user", "content": "Hi"}])
    reply = step("ab", message("Hi"), token_ids=(40, 41), prompt_token_ids=(9, 8, 7, *rendered))
    one = sample_of(build(rewarded(scored(reply), "shorter"), chat))
    hinted = HINT_FORMAT.format(content="Hi", hint="shorter")
    expected = (9, 8, 7, *chat.render_prompt([{"role": "user", "content": hinted}]))
    assert one.turns[0].teacher_prompt == expected


def test_a_prompt_that_ends_otherwise_has_no_place_for_a_hint(chat: Chat) -> None:
    reply = step("ab", message("Hi"), token_ids=(40, 41), prompt_token_ids=(9, 8, 7))
    assert sample_of(build(rewarded(scored(reply), "x"), chat)).turns[0].teacher_prompt is None


def test_no_user_no_hint(chat: Chat) -> None:
    only_system = [{"role": "system", "content": "s"}]
    ids = chat.render_prompt(only_system)
    assert teacher_prompt(chat, only_system, ids, "x", max_hint_tokens=9) is None


def test_a_template_that_hides_the_hint_teaches_nothing() -> None:
    tokenizer = tiny.build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    blind = Chat(tokenizer)
    messages = [{"role": "user", "content": "Hi"}]
    ids = blind.render_prompt(messages)
    assert teacher_prompt(blind, messages, ids, "x", max_hint_tokens=9) is None


@pytest.mark.parametrize(("most", "there"), [(7, True), (6, False)])
def test_a_long_text_is_no_hint(most: int, there: bool, chat: Chat) -> None:
    segment = rewarded(scored(step("a", message("q"))), "shorter")
    (prompt,) = prompts(build(segment, chat, max_hint_tokens=most), chat)
    assert (prompt is not None) is there


def test_a_teacher_reads_no_more_than_the_limit(chat: Chat) -> None:
    segment = rewarded(scored(step("a", message("q"))), "shorter")
    one = sample_of(build(segment, chat))
    assert one.turns[0].teacher_prompt is not None
    needed = len(one.turns[0].teacher_prompt) + 2
    for limit, there in ((needed, True), (needed - 1, False)):
        (prompt,) = prompts(build(segment, chat, limit=limit), chat)
        assert (prompt is not None) is there


def test_without_a_source_there_are_no_teachers(chat: Chat) -> None:
    segment = rewarded(scored(step("a", message("q"))), "shorter")
    assert prompts(build(segment, chat, hint=None), chat) == [None]


def test_an_unrated_segment_with_a_hint_is_built(chat: Chat) -> None:
    said = Message(turn_id="n", role=Role.USER, content="shorter", event_time=0)
    segment = scored(step("a", message("q"), next_user_turn=said), trainable=False, reason="zero")
    segment = rewarded(segment, "shorter", reward=0.0)
    assert len(build(segment, chat).samples) == 1
    assert build(segment, chat, hint=None).skipped == "untrainable: zero"
