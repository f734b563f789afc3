"""How well rules alone do on labelled cases; the goal is kept on the held-out half."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from processors.reward.signals import Signal, find
from tests.unit.processors.reward.labelled import (
    FINAL,
    LAST,
    LATER,
    REPLIED,
    REPORTED,
    UNSEEN,
    found,
    load,
    scores,
    table,
)

CASES = load()
MIN_PRECISION = 0.9
MIN_RECALL = 0.8


def test_the_file_is_large_enough_and_each_half_has_every_signal() -> None:
    assert min(Counter(case.language for case in CASES).values()) >= 100
    for held_out in (False, True):
        half = [case for case in CASES if case.held_out is held_out]
        found = Counter(signal for case in half for signal in case.signals)
        assert min(found[signal] for signal in REPORTED) >= 10
        assert sum(not case.signals for case in half) >= 60


def test_the_cases_with_their_replies_are_enough_in_each_language() -> None:
    cases = load(REPLIED) + load(UNSEEN) + load(FINAL)
    assert all(case.reply for case in cases)
    assert len({case.text for case in cases}) == len(cases)
    assert not {case.text for case in cases} & {case.text for case in CASES}
    for language in ("en", "zh"):
        of_language = [case for case in cases if case.language == language]
        assert len(of_language) >= 180
        assert sum(not case.signals for case in of_language) >= 50


def test_no_case_is_in_the_file_twice() -> None:
    assert len({(case.text, case.earlier) for case in CASES}) == len(CASES)


@pytest.mark.parametrize("held_out", [False, True], ids=["tuning", "held-out"])
def test_precision_and_recall_of_each_signal(
    held_out: bool, record_property: Callable[[str, object], None]
) -> None:
    half = [case for case in CASES if case.held_out is held_out]
    record_property("table", table(half, learn=False))
    low = [
        s for s in scores(half, learn=False) if s.precision < MIN_PRECISION or s.recall < MIN_RECALL
    ]
    assert not low, table(half, learn=False)


def test_cases_written_later_are_missed_rather_than_misread() -> None:
    cases = load(LATER) + load(LAST)
    assert len(cases) == 100
    assert not {case.text for case in cases} & {case.text for case in CASES}
    of_interest = {s.signal: s for s in scores(cases, learn=False)}
    for signal in (Signal.CORRECTION, Signal.DIRECTIVE):
        assert of_interest[signal].precision >= MIN_PRECISION, table(cases, learn=False)
    quiet = [case for case in cases if not case.signals]
    assert sum(bool(found(case, learn=False)) for case in quiet) <= len(quiet) / 20


@pytest.mark.parametrize(
    ("file", "corrections", "directives"),
    [(REPLIED, 0.8, 0.9), (UNSEEN, 0.8, 0.9), (FINAL, 0.4, 0.4)],
)
def test_beside_the_reply_corrections_are_found_that_name_no_fault(
    file: Path, corrections: float, directives: float
) -> None:
    cases = load(file)
    of_interest = {s.signal: s for s in scores(cases, learn=False)}
    assert all(s.precision >= MIN_PRECISION for s in of_interest.values() if s.right + s.missed)
    assert of_interest[Signal.CORRECTION].recall >= corrections, table(cases, learn=False)
    assert of_interest[Signal.DIRECTIVE].recall >= directives, table(cases, learn=False)
    alone = [replace(case, reply=None) for case in cases]
    without = {s.signal: s for s in scores(alone, learn=False)}
    assert without[Signal.CORRECTION].recall < of_interest[Signal.CORRECTION].recall / 2


ORDINARY_EN = """
Add milk to the list.
Write a short introduction for my thesis.
Give me a summary of chapter two.
List five countries in Africa.
Translate this into French.
Convert 30 miles to kilometers.
Find flights from Rome to Oslo.
Name three rivers in Spain.
Put the meeting on Friday at noon.
Open the window in the living room.
My train was late again today.
It rained all week.
I have two cats and a dog.
She works at a bank.
There is a park near my house.
It is for school.
The second one looks good to me.
The red one is for my brother.
I will try that tonight.
The flight leaves at nine.
Before we start, what is your name?
Turn the lights off.
"""
ORDINARY_ZH = """
把牛奶加到购物清单里
列出五个非洲国家
写一封给房东的邮件
推荐三家火锅店
今天的天气真糟糕
我中午吃了面条
我有两只猫一条狗
她在银行工作
第二个看起来不错
我今晚试试
飞机九点起飞
把灯关掉
五点提醒我打电话
查一下巴黎天气
这句话对吗:他去了家
周五中午开会
一次就成功了
"""
REPLY_EN = (
    "There are many options in the city. The park opens at 8 on Monday, the train takes two hours."
)
REPLY_ZH = "这里有一些信息供您参考。公园周一八点开门,坐火车要两个小时,票价五十元。"


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        *((text, REPLY_EN) for text in ORDINARY_EN.strip().splitlines()),
        *((text, REPLY_ZH) for text in ORDINARY_ZH.strip().splitlines()),
    ],
)
def test_what_people_go_on_with_neither_corrects_nor_directs(text: str, reply: str) -> None:
    found = {match.signal for match in find(text, reply, learn=False)}
    assert not found & {Signal.CORRECTION, Signal.DIRECTIVE}


@pytest.mark.parametrize(
    ("text", "reply", "corrects"),
    [
        ("It opens at ten.", "The library opens at eight.", True),
        ("It opens at ten.", "The library opens at eight. When do you want to go?", False),
        ("It opens at ten.", "The library opens at ten.", False),
        ("Does it open at ten?", "The library opens at eight.", False),
        ("No, I live alone.", "Do you have any flatmates?", False),
        ("No, you live alone.", "Do you have any flatmates?", True),
        ("不,我一个人住", "您有室友吗?", False),
        ("No, that's wrong", "Rest assured. Is there anything else I can do for you?", True),
        ("No, that's wrong", "Which of them is yours?", True),
        ("不对", "您的快递到了。还有什么可以帮您的吗?", True),
        ("It opens at ten.", "The library opens at eight. Any other questions?", True),
        ("十点才开门", "图书馆八点开门。还有别的问题吗?", True),
        ("十点才开门", "图书馆八点开门。", True),
        ("十点才开门吗", "图书馆八点开门。", False),
        ("It opens at ten. " * 20, "The library opens at eight.", False),
    ],
)
def test_what_a_statement_says_depends_on_the_reply(text: str, reply: str, corrects: bool) -> None:
    found = {match.signal for match in find(text, reply, learn=False)}
    assert (Signal.CORRECTION in found) is corrects
