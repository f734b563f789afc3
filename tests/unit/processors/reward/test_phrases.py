"""Cues must never lose a phrase."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processors.reward import phrases as phrases_of
from processors.reward.phrases import PHRASES_EN, PHRASES_ZH, Phrase, Phrases
from processors.reward.signals import normalise
from tests.unit.processors.reward.labelled import CHECKING, TUNING, load

ALL = [
    (phrases, phrase)
    for phrases in (PHRASES_EN, PHRASES_ZH)
    for each in phrases.classes.values()
    for phrase in each
]


def found(phrases: Phrases, text: str) -> set[str]:
    return set(phrases.found(text, phrases.cues_of(text)))


def expected(phrases: Phrases, text: str) -> set[str]:
    return {
        name
        for name, each in phrases.classes.items()
        if any(re.search(phrase.pattern, text) for phrase in each)
    }


@pytest.mark.parametrize(("phrases", "phrase"), ALL)
@given(st.data())
def test_no_phrase_is_lost(phrases: Phrases, phrase: Phrase, data: st.DataObject) -> None:
    around = st.sampled_from(["", "x", "a'", " ", "2", "é", ". ", "_", "不"])
    words = data.draw(st.from_regex(phrase.pattern))
    for text in (words, data.draw(around) + words + data.draw(around)):
        assert found(phrases, text) == expected(phrases, text)


def test_of_labelled_cases_all_classes_are_found_and_few_tried_in_vain() -> None:
    classes, tried, right = set(), 0, 0
    for case in (*load(TUNING), *load(CHECKING)):
        plain = normalise(case.text)
        for phrases in (PHRASES_EN, PHRASES_ZH):
            cues = phrases.cues_of(plain)
            names = found(phrases, plain)
            assert names == expected(phrases, plain)
            classes |= names
            right += len(names)
            tried += len(phrases._tried[cues])
    assert classes == {*PHRASES_EN.classes, *PHRASES_ZH.classes}
    assert tried < 5 * right


def test_what_is_kept_is_bounded_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [normalise(case.text) for case in load(TUNING)]
    once = [found(PHRASES_EN, text) for text in texts]
    monkeypatch.setattr(phrases_of, "MAX_KNOWN", 3)
    again = Phrases(PHRASES_EN.classes)
    assert [found(again, text) for text in texts] == once
    assert 0 < len(again._tried) <= 3


def test_a_turn_has_the_cues_of_its_words() -> None:
    phrases = Phrases({"SAID": [Phrase("as you said", ("^you$", "^said"))]})
    you, said = phrases.cues_of("you"), phrases.cues_of("said")
    assert you
    assert said
    assert not you & said
    assert phrases.cues_of("young") == phrases.cues_of("saving") == 0
    assert phrases.found("as you said", you | said) == ["SAID"]
    assert phrases.found("as you said", you) == []
