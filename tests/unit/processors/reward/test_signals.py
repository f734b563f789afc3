"""What the text rules find in what people write, and what they must leave alone."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from processors.reward.signals import (
    MAX_CHARS,
    RULE_SETS,
    Signal,
    find,
    normalise,
    tool_error,
    words,
)

C, OK, D, M = Signal.CORRECTION, Signal.CONFIRMATION, Signal.DIRECTIVE, Signal.DETAILS

ENGLISH: list[tuple[str, set[Signal]]] = [
    # corrections
    ("No, that's wrong.", {C}),
    ("no thats wrong", {C}),
    ("That’s not right, it was founded in 1998", {C}),
    ("that isn't what I asked for", {C}),
    ("You're wrong about the date.", {C}),
    ("You misunderstood the question", {C}),
    ("it still doesn't work", {C}),
    ("No, I meant the other file", {C}),
    ("No, it's Tuesday.", {C}),
    ("I said red, not blue", {C}),
    ("Wrong. Try again.", {C}),
    ("I still get the same error", {C}),
    ("The answer is incorrect", {C}),
    ("Thanks, but that's wrong", {C}),
    ("Great, but it doesn't work on my machine", {C}),
    ("I think that's incorrect", {C}),
    ("you forgot the second argument", {C}),
    ("👎", {C}),
    ("You didn't answer my question", {C}),
    ("this makes no sense", {C}),
    # look like corrections
    ("Write a story about people who said that's wrong", set()),
    ("No problem, thanks", set()),
    ("no worries, take your time", set()),
    ("No thanks", set()),
    ("No, thank you, that's all for today", set()),
    ("No, that's fine", set()),
    ("What's wrong with my code?", set()),
    ("Why is it wrong to lie?", set()),
    ("What should I do if that's wrong?", set()),
    ("Tell me whether it's incorrect", set()),
    ("There is nothing wrong with it", set()),
    ("True or false: the earth is flat", set()),
    ("Is that wrong?", set()),
    ("How do I handle false positives?", set()),
    ("No.", set()),
    ("It isn't wrong", set()),
    ("```\n# that's wrong\n```\nwhat does this code print", set()),
    ("> that's wrong\nwho wrote this line?", set()),
    # confirmations
    ("Thanks, that works", {OK}),
    ("Thanks, that works!", {OK}),
    ("that fixed it", {OK}),
    ("Perfect!", {OK}),
    ("Great, thank you so much", {OK}),
    ("thanks", {OK}),
    ("Exactly what I needed.", {OK}),
    ("Now it works, thank you", {OK}),
    ("That makes sense", {OK}),
    ("You're right", {OK}),
    ("That was very helpful", {OK}),
    ("It didn't work before, but now it works", {OK}),
    ("Thanks, that works, but can I also sort it?", {OK}),
    ("okay, got it", {OK}),
    ("the bug is fixed", {OK}),
    ("👍", {OK}),
    ("works like a charm", {OK}),
    ("That's what I wanted", {OK}),
    # look like confirmations
    ("Does that work?", set()),
    ("Explain how it works", set()),
    ("how does it work on Windows?", set()),
    ("I'm not sure that works", set()),
    ("I hope it works", set()),
    ("Let me check if it works", set()),
    ("This works by hashing the key", set()),
    ("Thanks in advance for any hints about the parser", set()),
    ("Great, another error", set()),
    ("What is a great gift for my dad", set()),
    ("Is this correct?", set()),
    ("turn right now", set()),
    ("it is useful for parsing", set()),
    # directives
    ("Use pandas instead", {D}),
    ("please use British spelling", {D}),
    ("First list the files, then delete the old ones", {D}),
    ("Instead of a loop, use a comprehension", {D}),
    ("Don't use bullet points", {D}),
    ("Answer in French", {D}),
    ("Please keep it short", {D}),
    ("From now on call me Sam", {D}),
    ("you should have used a set", {D}),
    ("Be more concise", {D}),
    ("No, that's wrong. Use the second column instead.", {C, D}),
    # look like directives
    ("What can I use instead?", set()),
    ("Should I use Rust instead?", set()),
    ("I first tried the cache and then gave up", set()),
    ("First of all, who are you and what happens then", set()),
    ("Please write a poem about spring", set()),
    ("Don't worry about it", set()),
    ("never mind", set()),
    ("Next time I go to Paris I want to see the tower", set()),
    # asking for details
    ("Can you explain that in more detail?", {M}),
    ("Tell me more", {M}),
    ("without details please", {Signal.DIRECTIVE}),
    # nothing at all
    ("", set()),
    ("What is the capital of France?", set()),
]

CHINESE: list[tuple[str, set[Signal]]] = [
    # corrections
    ("不对", {C}),
    ("不对，应该是三月", {C}),
    ("你说错了", {C}),
    ("這樣不對", {C}),
    ("答案错了，再算一遍", {C}),
    ("我说的是北京，不是上海", {C}),
    ("我不是这个意思", {C}),
    ("答非所问", {C}),
    ("还是报错", {C}),
    ("这个方法不行", {C}),
    ("不，我要的是表格", {C}),
    ("没有解决我的问题", {C}),
    ("你理解错了", {C}),
    ("谢谢，但是结果不对", {C}),
    ("代码跑不通", {C}),
    ("错了。", {C}),
    ("結果錯了", {C}),
    ("不太对", {C}),
    ("你没有回答我的问题", {C}),
    # look like corrections
    ("不用了，谢谢", set()),
    ("不，谢谢", set()),
    ("不客气", set()),
    ("你觉得我说得对不对？", set()),
    ("是不是应该先备份", set()),
    ("哪里不对？", set()),
    ("如果不对怎么办", set()),
    ("我搞错了", set()),
    ("别错过这场电影", set()),
    ("这个函数是不对称的吗", set()),
    ("这种药我没用过", set()),
    ("没问题，谢谢", set()),
    ("为什么这样写是错的", set()),
    # confirmations
    ("谢谢，可以了", {OK}),
    ("可以了！", {OK}),
    ("搞定了，谢谢", {OK}),
    ("问题解决了", {OK}),
    ("谢谢你", {OK}),
    ("好的，谢谢！", {OK}),
    ("太好了，正是我需要的", {OK}),
    ("很有用", {OK}),
    ("明白了", {OK}),
    ("没错", {OK}),
    ("不错，谢谢", {OK}),
    ("完美！", {OK}),
    ("运行成功", {OK}),
    ("謝謝", {OK}),
    ("这次对了", {OK}),
    # look like confirmations
    ("这样就可以了吗？", set()),
    ("还没解决", {C}),
    ("怎么解决这个问题", set()),
    ("这个有用吗", set()),
    ("不明白", set()),
    ("对了，明天天气怎么样", set()),
    ("系统里有用户表", set()),
    ("正确的做法是什么", set()),
    ("还不清楚", set()),
    ("可以了解一下吗", set()),
    ("解决了温饱问题的国家有哪些", set()),
    ("你明白了吗", set()),
    # directives
    ("请用中文回答", {D}),
    ("改用表格", {D}),
    ("先列出文件，然后删除旧的", {D}),
    ("不要用列表", {D}),
    ("别再重复了", {D}),
    ("下次请直接给代码", {D}),
    ("简短一点", {D}),
    ("用英文写", {D}),
    ("不对，请用第二列", {C, D}),
    # look like directives
    ("请问你是谁", set()),
    ("要不要用列表？", set()),
    ("怎么用英文写信", set()),
    ("王先生然后怎么了", set()),
    ("我先睡了，然后明天再聊", set()),
    ("这两个有什么区别", set()),
    # asking for details
    ("能详细说说吗", {M}),
    ("举个例子", {M}),
    ("不用详细说", set()),
    # nothing at all
    ("法国的首都是哪里", set()),
]


@pytest.mark.parametrize(("text", "expected"), ENGLISH)
def test_english(text: str, expected: set[Signal]) -> None:
    assert {match.signal for match in find(text, learn=False)} == expected


@pytest.mark.parametrize(("text", "expected"), CHINESE)
def test_chinese(text: str, expected: set[Signal]) -> None:
    assert {match.signal for match in find(text, learn=False)} == expected


def test_the_quote_shows_what_was_found() -> None:
    (match,) = find("Well... No, that's completely WRONG, sorry")
    assert match.quote == "that's completely wrong"


def test_there_are_rules_for_both_languages_and_each_signal() -> None:
    pairs = {(rules.signal, rules.language) for rules in RULE_SETS}
    assert pairs == {(signal, language) for signal in (C, OK, D, M) for language in ("en", "zh")}


def test_normalise_folds_and_bounds() -> None:
    assert normalise("　Ｈello，\n WORLD’s ") == "hello, world's"
    assert len(normalise("x" * 100_000)) == MAX_CHARS


MOST_CPU_S = 1.0
"""A thousand times what any of these takes; what goes back and forth in a text takes more."""


@pytest.mark.parametrize("read", [find, normalise, tool_error, words])
@pytest.mark.parametrize(
    "unit", ["\n", " \n", "\r\n", "a.b\n", "a: ", "a/b-c: ", "no, ", "not x, not y, ", "的是", "1 "]
)
@pytest.mark.parametrize("end", ["", ">", "x>", "Error"])
def test_no_text_takes_long_to_read(read: Callable[[str], object], unit: str, end: str) -> None:
    text = unit * (8_000 // len(unit)) + end
    begun_s = time.thread_time()
    read(text)
    assert time.thread_time() - begun_s < MOST_CPU_S
