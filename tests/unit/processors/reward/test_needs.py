"""Looking for words first must never lose a match."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processors.reward import signals
from processors.reward.needs import needed, needed_besides
from processors.reward.rules import RULE_SETS
from processors.reward.signals import MAX_RULE_CHARS, normalise
from tests.unit.processors.reward.labelled import load
from tests.unit.processors.reward.test_signals import CHINESE, ENGLISH


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"\bwrong\b", {"wrong"}),
        (r"(?:cat|dog)s?", {"cat", "dog"}),
        (r"(?:cat|x*)", set()),
        (r"(?:not )?really bad", {"really bad"}),
        (r"\b(?:this|that|those)\b", {"this", "that", "those"}),
        (r"so (?:this|that.*not)", {"so this", "so that"}),
        (r"a+b?", set()),
        (r"(?:good){2,}", {"good"}),
        (r"[ab]cd.*xyzzy", {"xyzzy"}),
        (r"不对|错了", {"不对", "错了"}),
        (r"(?:不|没)对", {"对"}),
        (r"(?=secret)x", set()),
        (r"(?!secret)word", {"word"}),
        (r"^👎+$", {"👎"}),
        (r".*", set()),
    ],
)
def test_what_a_match_must_have(pattern: str, words: set[str]) -> None:
    assert {word.text for word in needed(pattern)} == words


@pytest.mark.parametrize(
    ("pattern", "starts"),
    [
        (r"\bwrong\b", {"wron"}),
        (r"\bno\b", {"no"}),
        (r"\bno", {None}),
        (r"wrong", {None}),
        (r"^(?:yes|nope) ?\b", {"yes", "nope"}),
        (r"\b(?:so )?wrong", {"wron"}),
        (r"\b(?:so)?wrong", {None}),
        (r"(?:^|[.,] ?)thx(?=[.!]|$)", {"thx"}),
        (r"(?<=, )thanks", {"than"}),
        (r" own (?=x)", {"own"}),
        (r"(?:x )+good", {"good"}),
        (r"(?:x ){0,3}good", {None}),
        (r"\w wrong", {"wron"}),
        (r"不?wrong", {None}),
        (r"\b(?:dog|dots?)\b", {None, "dog"}),
        (r"\b(?:dog|dot x)", {None, "dot"}),
    ],
)
def test_how_the_token_of_a_word_begins(pattern: str, starts: set[str | None]) -> None:
    assert {word.start for word in needed(pattern)} == starts


@given(st.data())
def test_no_text_that_a_rule_matches_is_passed_over(data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(RULE_SETS) - 1))
    place = data.draw(st.integers(0, len(RULE_SETS[number].patterns) - 1))
    pattern = RULE_SETS[number].patterns[place]
    around = st.sampled_from(["", "x", "a_", " y", "不"])
    text = data.draw(around) + data.draw(st.from_regex(pattern)) + data.draw(around)
    for plain in (text[:MAX_RULE_CHARS], normalise(text)[:MAX_RULE_CHARS]):
        if re.search(pattern, plain):
            assert place in _possible(plain)[number], (pattern, plain)


def _possible(plain: str) -> dict[int, set[int]]:
    return signals._possible(plain, re.findall("[a-z0-9]+", plain))


def _texts(pattern: str) -> tuple[str, ...]:
    return tuple(word.text for word in needed(pattern))


def test_no_rule_matches_a_text_without_a_word_it_needs() -> None:
    texts = [case.text for case in load()] + [text for text, _ in (*ENGLISH, *CHINESE)]
    plain = [normalise(text) for text in texts]
    matches = 0
    for number, rules in enumerate(RULE_SETS):
        for place, pattern in enumerate(rules.patterns):
            lists = [words for words in (_texts(pattern), *needed_besides(pattern)) if words]
            for text in plain:
                if re.search(pattern, text):
                    matches += 1
                    for words in lists:
                        assert any(word in text for word in words), (pattern, text)
                    assert place in _possible(text)[number], (pattern, text)
    assert matches > 500


def test_further_words_that_a_match_must_have() -> None:
    assert needed_besides(r"\bi (?:asked|wanted)[^.]*, but\b") == (
        (", but",),
        ("i ",),
        ("asked", "wanted"),
    )
    assert needed_besides(r"(?:maybe )?never(?= mind)") == ()


def test_hardly_any_rule_has_to_be_tried_on_every_text() -> None:
    patterns = [pattern for rules in RULE_SETS for pattern in rules.patterns]
    assert sum(not needed(pattern) for pattern in patterns) <= len(patterns) / 20
