"""One look at all rules must never lose a match of any."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processors.reward import signals
from processors.reward.agent import STAGE
from processors.reward.app import build_spec
from processors.reward.gate import Gate, first
from processors.reward.rules import QUOTED, RULE_SETS
from processors.reward.signals import MAX_RULE_CHARS, Signal, by_rules, normalise
from processors.runtime.topics import Cluster
from streams.metrics import ProcessorMetrics
from streams.settings import RewardSettings, Settings
from tests.unit.processors.reward import labelled, learning
from tests.unit.processors.reward.labelled import load
from tests.unit.processors.reward.test_signals import CHINESE, ENGLISH

PATTERNS = [pattern for rules in RULE_SETS for pattern in rules.patterns]


COMPILED = list(map(re.compile, PATTERNS))
MASKS = [
    re.compile("|".join(f"(?:{mask})" for mask in (QUOTED, *rules.masks))) for rules in RULE_SETS
]
FILES = (*learning.FILES, labelled.FILE.with_name("repeated.tsv"))


def texts_of(files: Iterable[Path]) -> list[str]:
    """All turns and replies of these files, as rules read them."""
    cases = chain.from_iterable(map(load, files))
    texts = (text for case in cases for text in (case.text, case.earlier, case.reply) if text)
    return sorted({normalise(text)[:MAX_RULE_CHARS] for text in texts})


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"不对\b", "不对 了"),
        (r"\w好", "é好"),
        (r"\bno\b", "no—"),
        (r"\d个", "٣个"),
        (r"a\sb", "a\x1cb"),
        (r"a\sb", "a\u2003b"),
        (r"end$", "end\n"),
        (r"x.y", "x\ud800y"),
        (r"x[^.]y", "x\udfffy"),
        (r"(?:no ){3}", "no no no "),
        (r"x*", ""),
        (r"(a)\1", "baab"),
        (r"(?<=, a)b", "no, ab"),
        (r"a\B\wc", "abc"),
        (r"\w\Bbc", "abc"),
    ],
)
def test_what_python_means_is_what_is_looked_for(pattern: str, text: str) -> None:
    assert re.search(pattern, text)
    assert list(Gate(["never", pattern]).possible(text)) == [1]


def test_without_patterns_nothing_is_possible() -> None:
    assert Gate([]).possible("no") == {}


@given(st.data())
def test_no_text_that_a_rule_matches_is_passed_over(data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(PATTERNS) - 1))
    around = st.sampled_from(["", "x", "a_", " y", "不"])
    text = data.draw(around) + data.draw(st.from_regex(PATTERNS[index])) + data.draw(around)
    for plain in (text[:MAX_RULE_CHARS], normalise(text)[:MAX_RULE_CHARS]):
        if re.search(PATTERNS[index], plain):
            assert index in signals._GATE.possible(plain), (PATTERNS[index], plain)


@given(st.data())
def test_matches_are_where_they_are_without_a_gate(data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(PATTERNS) - 1))
    around = st.sampled_from(["", "no, ", "a_", "。", "but it's ", "不"])
    match = data.draw(st.from_regex(PATTERNS[index], fullmatch=True))
    text = (data.draw(around) + match + data.draw(around) + match)[:MAX_RULE_CHARS]
    for number, begins in signals._GATE.possible(text).items():
        assert_first(number, text, begins)


def assert_first(number: int, text: str, begins: list[int] | None) -> None:
    found, expected = first(COMPILED[number], text, begins), COMPILED[number].search(text)
    assert (found and found.span()) == (expected and expected.span()), (PATTERNS[number], text)


def test_no_labelled_text_is_passed_over_and_few_rules_are_tried_in_vain() -> None:
    matches = tried = 0
    own = (normalise(text)[:MAX_RULE_CHARS] for text, _ in (*ENGLISH, *CHINESE))
    for text in {*texts_of(FILES), *own}:
        possible = signals._GATE.possible(text)
        found = [n for n, pattern in enumerate(COMPILED) if pattern.search(text)]
        assert set(found) <= set(possible), text
        for number, begins in possible.items():
            assert_first(number, text, begins)
        matches, tried = matches + len(found), tried + len(possible)
    assert matches > 2_000
    assert tried < 3 * matches


@pytest.mark.parametrize(
    ("text", "quote"),
    [
        ("it failed before but now it runs", "it runs"),
        ("yup docker ps shows it running", "it running"),
    ],
)
def test_words_that_stand_twice_do_not_hide_a_match(text: str, quote: str) -> None:
    assert by_rules(text) == (signals.Match(Signal.CONFIRMATION, quote),)


def test_look_alikes_are_blanked_out_as_one_expression_of_all_does() -> None:
    texts = texts_of(FILES)[::5]
    texts += [" ".join(texts[n : n + 30])[:MAX_RULE_CHARS] for n in range(0, len(texts), 60)]
    for rules, masks in zip(signals._COMPILED, MASKS, strict=True):
        for text in texts:
            assert signals._masked(rules, text) == masks.sub(" ~ ", text)


@given(st.data())
def test_look_alikes_beside_each_other_are_blanked_out_so_too(data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(RULE_SETS) - 1))
    mask = st.sampled_from((QUOTED, *RULE_SETS[number].masks)).flatmap(st.from_regex)
    text = "".join(data.draw(st.lists(mask, min_size=1, max_size=3)))[:MAX_RULE_CHARS]
    assert signals._masked(signals._COMPILED[number], text) == MASKS[number].sub(" ~ ", text)


def test_no_look_alike_is_empty() -> None:
    for mask in (QUOTED, *chain.from_iterable(rules.masks for rules in RULE_SETS)):
        assert _parser.parse(mask).getwidth()[0] > 0, mask


def test_threads_do_not_get_in_each_other_s_way() -> None:
    texts = [normalise(case.text) for case in load()]
    expected = [signals._GATE.possible(text) for text in texts]
    gate = Gate(PATTERNS)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: list(map(gate.possible, texts)), range(8)):
            assert found == expected


def test_a_rule_with_flags_is_refused() -> None:
    with pytest.raises(ValueError, match="has flags"):
        Gate(["(?i)a"]).prepare()


IMPORTS_ONLY = """
import processors.reward.__main__
from processors.reward import app, signals
print(signals._GATE._read, {rules.mask_gate._read for rules in signals._COMPILED})
"""


def test_importing_the_worker_reads_no_patterns() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS_ONLY], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "None {None}\n"), done.stderr


@pytest.mark.parametrize("reads", [True, False])
def test_rules_are_read_for_a_partition_before_its_first_segment(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(["wrong"])
    monkeypatch.setattr(signals, "_GATE", gate)
    settings = Settings(reward=RewardSettings(text_signals=reads))
    spec = build_spec(settings, ProcessorMetrics(STAGE))
    assert gate._read is None
    spec.make_processor(0, Cluster(1, dict.fromkeys(spec.outputs, 1_000_000)))
    assert (gate._read is not None) is reads
