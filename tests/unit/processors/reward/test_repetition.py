"""Whether a user asks again for what they asked before."""

from __future__ import annotations

from pathlib import Path

import pytest

from processors.reward.repetition import Turns, repeats
from processors.reward.signals import Signal
from tests.unit.processors.reward.labelled import load

PAIRS = load(Path(__file__).with_name("repeated.tsv"))


def test_pairs_of_turns_are_told_apart() -> None:
    wanted = {case.text for case in PAIRS if Signal.REPETITION in case.signals}
    found = {c.text for c in PAIRS if c.earlier and repeats(c.text, [c.earlier], 0.8) is not None}
    assert len(wanted) >= 18
    assert len(PAIRS) >= 60
    assert found <= wanted
    assert len(found) >= 0.9 * len(wanted)


@pytest.mark.parametrize(
    ("text", "earlier", "repeated"),
    [
        ("How do I sort a list in Python?", "how can I sort a list in python", True),
        ("how do I sort a list in pyhton", "How do I sort a list in Python?", True),
        ("I asked: how do I sort a list in Python", "How do I sort a list in Python?", True),
        ("reset my password", "Reset my password!", True),
        ("What is the capital of France?", "What is the capital of Spain?", False),
        ("When did Napoleon die?", "How did Napoleon die?", False),
        ("what is 12 times 13", "what is 12 times 14", False),
        ("go on", "go on", False),
        ("yes please", "yes please", False),
        ("tell me more", "tell me more", False),
        ("Translate this long sentence about cats into French", "Translate this long sentence "
         "about cats into German", False),
        ("How do I reset my password?", "What is the weather like in Berlin today?", False),
        ("怎么重置密码", "如何重置密码？", True),
        ("请问怎么重置我的密码", "怎么重置密码", True),
        ("法国的首都是哪里", "法国的首都是哪里？", True),
        ("法国的首都是哪里", "西班牙的首都是哪里", False),
        ("继续说", "继续说", False),
        ("再来一个", "再来一个", False),
        ("怎么安装数据库", "怎么重置密码", False),
    ],
)  # fmt: skip
def test_repetition(text: str, earlier: str, repeated: bool) -> None:
    assert (repeats(text, [earlier], 0.8) is not None) is repeated
    assert (repeats(earlier, [text], 0.8) is not None) is repeated


@pytest.mark.parametrize(
    ("text", "again"),
    [
        ("Which mountan railway betwen Zurch and Geneva accept bicycles during winter", True),
        ("Which mountan railway betwen Zurch and Genva accept bicycles during winter", False),
    ],
)
def test_a_few_words_of_a_question_may_be_misspelt(text: str, again: bool) -> None:
    earlier = "Which mountain railways between Zurich and Geneva accept bicycles during winter"
    assert (repeats(text, [earlier], 0.8) is not None) is again


def test_repetition_takes_the_closest_of_the_earlier_turns() -> None:
    earlier = ["What is the weather like?", "how to sort a python list", "sort a python list"]
    assert repeats("Sort a Python list", earlier, 0.8) == 1.0
    assert repeats("Sort a Python list", [], 0.8) is None
    assert repeats("Sort a Python list", ["  "], 0.8) is None


@pytest.mark.parametrize(
    ("text", "again"),
    [
        # A question that has half of the earlier one's words, and no other.
        ("which keyboard is quietest?", True),
        ("I want the quietest keyboard", False),
        # Asks for something else.
        ("how quiet is the keyboard with brown switches?", False),
        # The same in one of its clauses.
        ("Those are all loud. Which of these keyboards with brown switches is the quietest?", True),
        ("Those with brown switches are all loud, thanks.", False),
        # Who says that they ask again may do so in other words.
        ("is the keyboard loud?", False),
        ("my question was: are the brown switches quiet?", True),
        ("my question was: are red ones any good?", False),
    ],
)
def test_a_question_is_asked_again_in_fewer_or_other_words(text: str, again: bool) -> None:
    earlier = "Which of these keyboards with brown switches is the quietest?"
    assert (repeats(text, [earlier], 0.8) is not None) is again


def test_traditional_and_simplified_characters_are_the_same() -> None:
    assert repeats("發票丟了可以報帳嗎", ["发票丢了可以报帐吗"], 0.99) == 1.0


def test_turns_are_read_once() -> None:
    turns = Turns()
    texts = [f"how do I sort list number {n}" for n in range(20)]
    for place, text in enumerate(texts):
        assert repeats(text, texts[:place], 0.8, turns) is None
    assert set(turns) == set(texts)
