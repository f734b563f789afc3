"""What was learned from labelled cases: that the file is theirs, and how well it does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processors.reward import features as features_of
from processors.reward import learned
from processors.reward.contrast import corrects
from processors.reward.features import MAX_CHARS, Chinese, English, features
from processors.reward.formulas import score_segment
from processors.reward.learned import PLAIN, RULED, SIGNALS, STATED
from processors.reward.signals import Match, Signal, by_rules, find, normalise
from processors.reward.vocabulary import Known
from streams.settings import RewardSettings
from tests.unit.processors.reward import learning
from tests.unit.processors.reward.builders import reply, said, segment
from tests.unit.processors.reward.labelled import (
    APART,
    CHECKING,
    OTHER_HANDS,
    TUNING,
    UNREAD,
    load,
    scores,
    table,
)
from tests.unit.processors.reward.learning import LANGUAGES, Example, Totals, examples
from tests.unit.processors.reward.test_labelled import ORDINARY_EN, ORDINARY_ZH, REPLY_EN, REPLY_ZH
from tests.unit.processors.reward.test_signals import CHINESE, ENGLISH


@pytest.fixture(scope="module")
def everything() -> list[Example]:
    return examples()


@pytest.fixture(scope="module")
def without(everything: Sequence[Example]) -> Mapping[str, Totals]:
    return learning.left_out(everything)


def test_the_file_is_what_the_labelled_cases_teach(
    everything: Sequence[Example], without: Mapping[str, Totals]
) -> None:
    assert learned.model().cases == learning.digest(), "python -m ...learning --write"
    assert learning.written(learning.make(everything, without)) == learning.TARGET.read_bytes()


def test_the_file_is_small_and_says_why() -> None:
    assert len(learning.TARGET.read_bytes()) < 550_000
    for language in LANGUAGES:
        weights = learned.model().languages[language].weights
        assert len(weights) > 1_000
        assert all(max(map(abs, each)) >= learning.LEAST_WEIGHT for each in weights.values())
    english = learned.model().languages["en"].weights
    assert english["you"][0] > 0 > english["asks"][0]
    assert learned.model().languages["zh"].weights["别"][1] > 50


LEAST_IN_A_ROW = {
    Signal.CORRECTION: (0.92, 0.61),
    Signal.DIRECTIVE: (0.91, 0.75),
    Signal.CONFIRMATION: (0.83, 0.7),
}
LEAST_OTHER_HANDS = {
    Signal.CORRECTION: (0.88, 0.37),
    Signal.DIRECTIVE: (0.86, 0.87),
    Signal.CONFIRMATION: (0.89, 0.3),
}
"""Precision and recall on cases of other hands that were left out; docs/rewards.md has more."""


@pytest.mark.parametrize(
    ("sources", "least"),
    [(learning.IN_A_ROW, LEAST_IN_A_ROW), (learning.OTHER_HANDS, LEAST_OTHER_HANDS)],
    ids=["in a row", "other hands"],
)
def test_precision_and_recall_on_cases_left_out(
    sources: frozenset[str],
    least: Mapping[Signal, tuple[float, float]],
    everything: Sequence[Example],
    without: Mapping[str, Totals],
) -> None:
    pairs: dict[Signal, list[tuple[bool, bool]]] = {signal: [] for signal in SIGNALS}
    for example, signal, got in learning.outcomes(everything, without):
        if example.source in sources:
            pairs[signal].append((signal in example.case.signals, got))
    for signal, each in pairs.items():
        right = sum(wanted and got for wanted, got in each)
        precision = right / sum(got for _, got in each)
        recall = right / sum(wanted for wanted, _ in each)
        assert precision >= least[signal][0], (signal, precision, recall)
        assert recall >= least[signal][1], (signal, precision, recall)


LEAST_APART = {
    Signal.CORRECTION: (0.9, 0.58),
    Signal.DIRECTIVE: (0.89, 0.78),
    Signal.CONFIRMATION: (0.88, 0.75),
    Signal.REPETITION: (1.0, 0.5),
}
LEAST_UNREAD = {
    Signal.CORRECTION: (0.87, 0.33),
    Signal.DIRECTIVE: (0.88, 0.92),
    Signal.CONFIRMATION: (0.9, 0.3),
}
"""Least precision and recall on cases that nothing was tuned on. The goal is 0.9 and 0.8."""


@pytest.mark.parametrize(
    ("file", "count", "least"), [(APART, 200, LEAST_APART), (UNREAD, 1_100, LEAST_UNREAD)]
)
def test_precision_and_recall_on_cases_that_nothing_was_tuned_on(
    file: Path, count: int, least: Mapping[Signal, tuple[float, float]]
) -> None:
    cases = load(file)
    assert len(cases) >= count
    for score in scores(cases):
        if score.signal in least:
            precision, recall = least[score.signal]
            assert score.precision >= precision, table(cases)
            assert score.recall >= recall, table(cases)


@pytest.mark.parametrize("file", [APART, UNREAD], ids=lambda file: file.stem)
def test_what_nothing_is_tuned_on_is_not_learned_from(file: Path) -> None:
    known = {(case.text, case.reply) for each in learning.FILES for case in load(each)}
    replies = {reply for _, reply in known if reply}
    cases = load(file)
    assert not {(case.text, case.reply) for case in cases} & known
    assert not {case.reply for case in cases} & replies


@pytest.mark.parametrize(
    ("files", "count"),
    [((TUNING, CHECKING), 500), (OTHER_HANDS, 5_200), ((UNREAD,), 1_100)],
    ids=["in a row", "other hands", "unread"],
)
def test_the_cases_of_other_hands_are_enough_and_each_is_there_once(
    files: Sequence[Path], count: int
) -> None:
    cases = [case for file in files for case in load(file)]
    assert len(cases) >= count
    assert len({(case.text, case.reply) for case in cases}) == len(cases)
    for language in LANGUAGES:
        of_language = [case for case in cases if case.language == language]
        for signal in SIGNALS:
            assert sum(signal in case.signals for case in of_language) >= 30
        assert sum(not case.signals for case in of_language) >= 90


def test_learning_finds_what_tells_cases_apart() -> None:
    rows = [[0, 2], [0, 3], [1, 2], [1, 3]] * 5
    weights = learning.descend(rows, [1, 1, -1, -1] * 5, 4)
    assert weights[0] > 0.3
    assert weights[1] < -0.3
    assert max(abs(weights[2]), abs(weights[3]), abs(weights[4])) < 0.1


def test_a_threshold_keeps_the_precision() -> None:
    totals, gives = [5, 4, 3, 2, 2, 1], [True, True, False, True, True, False]
    assert learning.threshold(totals, gives, 1.0) == 4
    assert learning.threshold(totals, gives, 0.8) == 2
    assert learning.threshold([1, 2], [True, False], 0.9) == 3


def added_up(plain: str, text: str, before: str) -> tuple[str, tuple[int, ...]]:
    """What ``learned.sums`` gives, from the weights of each name."""
    name, found = features(plain, text, before)
    language = learned.model().languages[name]
    known = [language.weights[each] for each in found if each in language.weights]
    both = zip(language.bias, language.threshold, strict=True)
    return name, tuple(
        bias - threshold + sum(weights[place] for weights in known)
        for place, (bias, threshold) in enumerate(both)
    )


@pytest.mark.parametrize("file", learning.FILES, ids=lambda file: file.stem)
def test_sums_are_those_of_the_weights_one_by_one(file: Path) -> None:
    for case in load(file):
        plain = normalise(case.text)
        for before in {case.reply or "", ""} if plain else ():
            assert learned.sums(plain, case.text, before) == added_up(plain, case.text, before)


_WORDS = (
    "no reply other number other day the three is are isn't o'clock 'one Anna 3.5 1,000 2nd you"
    " your tip said it that's match who why NOT help helping ? ! , ; # - ^ $ ~ good catch"
    " 的 了 吗 不 没有 什么 周一 二 早上 下午 标题 说 夸 唔好 嘅 好不好 能不能 一样 你 他 ， 。 ？"
    " ５ ٣٤ ① é 👍 \ud800 SF12 x2"
)
WORDS = _WORDS.split()
TEXTS = st.one_of(
    st.text(max_size=80),
    st.text(st.characters(categories=["Cs", "Nd", "Lu", "So", "Zs", "Lo"]), max_size=30),
    st.lists(st.sampled_from(WORDS), max_size=50).map(" ".join),
    st.lists(st.sampled_from(WORDS), max_size=20).map("".join),
)


@given(TEXTS, TEXTS)
def test_of_any_text_sums_are_those_of_the_weights_one_by_one(text: str, before: str) -> None:
    plain = normalise(text)
    if plain:
        assert learned.sums(plain, text, before) == added_up(plain, text, before)


@given(TEXTS, TEXTS)
def test_any_text_has_features_and_a_quote_of_its_own(text: str, before: str) -> None:
    plain = normalise(text)
    if not plain:
        assert find(text, before) == ()
        return
    language, found = features(plain, text, before)
    assert language in LANGUAGES
    assert found
    assert all(isinstance(match, Match) for match in find(text, before))
    for signal in SIGNALS:
        quote = learned.quote(plain, language, signal)
        assert quote
        assert quote in plain


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("name", "reader"), [("en", English), ("zh", Chinese)])
def test_a_reader_finds_what_its_vocabulary_knows(
    name: str, reader: type[English[int]] | type[Chinese[int]], every: int
) -> None:
    cases = [(normalise(case.text), case.text, case.reply or "") for case in load(TUNING)]
    found = [(case, features(*case)) for case in cases]
    ours = [(case, names) for case, (language, names) in found if language == name]
    numbers = {each: n for n, each in enumerate(sorted({*itertools.chain(*(x for _, x in ours))}))}
    known = dict(itertools.islice(numbers.items(), 0, None, every))
    read = reader(Known(known))
    for case, names in ours:
        assert read.found(*case) == {known[each] for each in names & known.keys()}


def test_what_words_were_seen_before_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = load(TUNING)[:80]
    first = [find(case.text, case.reply or "") for case in cases]
    shuffled = list(enumerate(cases))
    random.Random(1).shuffle(shuffled)
    monkeypatch.setattr(features_of, "MAX_KNOWN", 7)
    learned._ready.cache_clear()
    again = {place: find(case.text, case.reply or "") for place, case in shuffled}
    assert [again[place] for place in range(len(cases))] == first
    english, chinese = learned._ready()["en"].reader, learned._ready()["zh"].reader
    assert isinstance(english, English)
    assert isinstance(chinese, Chinese)
    kept = (english._words, chinese._characters, chinese._shapes)
    assert all(0 < len(each) <= 7 for each in kept)
    learned._ready.cache_clear()


def test_threads_do_not_get_in_each_other_s_way(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(normalise(case.text), case.text, case.reply or "") for case in load(TUNING)]
    expected = [learned.sums(*case) for case in cases]
    monkeypatch.setattr(features_of, "MAX_KNOWN", 50)
    learned._ready.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: [learned.sums(*case) for case in cases], range(8)):
            assert found == expected
    learned._ready.cache_clear()


@pytest.mark.parametrize(
    ("text", "before", "signal", "quote"),
    [
        ("nope, it closes at eight", "The library closes at ten.", Signal.CORRECTION, "nope"),
        ("in grams and celsius please", "Bake 2 cups of flour at 350.", Signal.DIRECTIVE, "please"),
        ("老外回了,说写得很地道,哈哈", "Hi Mark, just checking in.", Signal.CONFIRMATION, "地道"),
        ("写成表格,别超过三行", "这里有一些介绍。", Signal.DIRECTIVE, "写成"),
    ],
)
def test_the_quote_is_the_words_that_decided(
    text: str, before: str, signal: Signal, quote: str
) -> None:
    match = next(match for match in find(text, before) if match.signal is signal)
    assert quote in match.quote
    assert match.quote in normalise(text)


def test_where_marks_alone_decided_all_of_it_is_quoted() -> None:
    assert learned.quote("hmm!!", "en", Signal.CONFIRMATION) == "hmm!!"


def test_a_rule_s_words_are_quoted_where_a_rule_found_them() -> None:
    (match,) = find("Well... No, that's completely WRONG, sorry")
    assert match == Match(Signal.CORRECTION, "that's completely wrong")


def test_what_rules_find_in_plain_words_is_found_with_what_was_learned_too() -> None:
    cases = [*ENGLISH, *CHINESE]
    other = [text for text, signals in cases if {m.signal for m in find(text)} != signals]
    assert len(other) <= len(cases) / 12, other


@pytest.mark.parametrize("before", ["An answer.", REPLY_EN, REPLY_ZH], ids=["short", "en", "zh"])
@pytest.mark.parametrize(
    ("text", "signal"),
    [
        ("Thanks, that works", Signal.CONFIRMATION),
        ("yes, that's right", Signal.CONFIRMATION),
        ("谢谢,有用", Signal.CONFIRMATION),
        ("No, that's wrong", Signal.CORRECTION),
        ("不对,我说的是周二", Signal.CORRECTION),
        ("Please answer in French", Signal.DIRECTIVE),
    ],
)
def test_plain_words_are_found_beside_any_reply(text: str, signal: Signal, before: str) -> None:
    assert signal in {match.signal for match in find(text, before)}


def test_what_people_go_on_with_is_seldom_a_signal() -> None:
    turns = [
        *((text, REPLY_EN) for text in ORDINARY_EN.strip().splitlines()),
        *((text, REPLY_ZH) for text in ORDINARY_ZH.strip().splitlines()),
    ]
    wrong = [text for text, before in turns if find(text, before)]
    assert len(wrong) <= len(turns) / 9, wrong


def test_a_rule_s_match_adds_to_the_sum() -> None:
    outcomes = set()
    for case in (*load(TUNING), *load(CHECKING)):
        plain, before = normalise(case.text), case.reply or ""
        ruled = Signal.DIRECTIVE in {match.signal for match in by_rules(plain, before)}
        total = learned.sums(plain, case.text, before)[1][SIGNALS.index(Signal.DIRECTIVE)]
        if -RULED <= total < 0 and len(plain) <= MAX_CHARS:
            directed = Signal.DIRECTIVE in {match.signal for match in find(case.text, before)}
            assert directed is ruled
            outcomes.add(ruled)
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    ("words", "plain", "added"),
    [
        ("wrong", "wrong.", PLAIN),
        ("wrong", "oh, wrong!", PLAIN),
        ("wrong", "wrong number", RULED),
        ("不对", "不对吧", PLAIN),
    ],
)
def test_words_that_are_half_of_the_turn_add_more(words: str, plain: str, added: int) -> None:
    assert learned.ruled(words, plain) == added


def test_a_statement_beside_the_reply_adds_a_little() -> None:
    outcomes = set()
    for case in (*load(TUNING), *load(CHECKING), *load(learning.WRITTEN)):
        plain, before = normalise(case.text), case.reply or ""
        total = learned.sums(plain, case.text, before)[1][0]
        if -STATED <= total < 0 and not by_rules(plain, before) and len(plain) <= MAX_CHARS:
            stated = corrects(case.text, plain, before) is not None
            corrected = Signal.CORRECTION in {match.signal for match in find(case.text, before)}
            assert corrected is stated
            outcomes.add(stated)
    assert outcomes == {True, False}


def test_a_long_turn_is_left_to_rules() -> None:
    text = "I went to the market and bought apples and pears for my mother. " * 3
    assert len(text) <= MAX_CHARS < len(text + text)
    assert find(text + "Please answer in French. " + text) == find(
        text + "Please answer in French. " + text, learn=False
    )
    assert find(text + "Please answer in French. " + text)


def test_it_can_be_turned_off() -> None:
    turn = said("u2", "it prints again now")
    step = reply("a1", next_user_turn=turn, reply="Hold the button for 5 s.")
    learned_ = score_segment(segment([step]), RewardSettings()).rewards[0]
    ruled = score_segment(segment([step]), RewardSettings(learned_signals=False)).rewards[0]
    assert learned_.reward == 0
    assert ruled.reward < 0
