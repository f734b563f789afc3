"""One look at all rules must never lose a match of any."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import hyperscan
import pytest
from hypothesis import given
from hypothesis import strategies as st

from processors.reward import signals
from processors.reward.agent import STAGE
from processors.reward.app import build_spec
from processors.reward.gate import Gate, loosened
from processors.reward.rules import RULE_SETS
from processors.reward.signals import MAX_RULE_CHARS, normalise
from processors.runtime.topics import Cluster
from streams.metrics import ProcessorMetrics
from streams.settings import RewardSettings, Settings
from tests.unit.processors.reward.labelled import load
from tests.unit.processors.reward.test_signals import CHINESE, ENGLISH

PATTERNS = [pattern for rules in RULE_SETS for pattern in rules.patterns]


@pytest.mark.parametrize(
    ("pattern", "looser"),
    [
        (r"\bwrong\b", "wrong"),
        (r"(?<!not )good(?! (?:one|[)]))!", "good!"),
        (r"a(?=\)|b)c", "ac"),
        (r"\w+", r"[\w\x{80}-\x{10ffff}]+"),
        (r"[\d一]", r"[\p{Nd}一]"),
        (r"[^\w]", r"[^\w]"),
        (r"[^]\]]$", r"[^]\]]$"),
        (r"x{2,40}y{0,3}z{,5}", "x+y*z*"),
        (r"[{3}]\{", r"[{3}]\{"),
        (r"\(\?=x", r"\(\?=x"),
    ],
)
def test_what_is_looked_for(pattern: str, looser: str) -> None:
    assert loosened(pattern) == looser


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
    ],
)
def test_where_python_means_something_else_nothing_is_lost(pattern: str, text: str) -> None:
    assert re.search(pattern, text)
    assert Gate(["never", pattern]).possible(text) == [1]


@given(st.data())
def test_no_text_that_a_rule_matches_is_passed_over(data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(PATTERNS) - 1))
    around = st.sampled_from(["", "x", "a_", " y", "不"])
    text = data.draw(around) + data.draw(st.from_regex(PATTERNS[index])) + data.draw(around)
    for plain in (text[:MAX_RULE_CHARS], normalise(text)[:MAX_RULE_CHARS]):
        if re.search(PATTERNS[index], plain):
            assert index in signals._GATE.possible(plain), (PATTERNS[index], plain)


def test_no_labelled_text_is_passed_over_and_few_rules_are_tried_in_vain() -> None:
    texts = [case.text for case in load()] + [text for text, _ in (*ENGLISH, *CHINESE)]
    matches = tried = 0
    for text in map(normalise, texts):
        possible = signals._GATE.possible(text)
        found = [n for n, pattern in enumerate(PATTERNS) if re.search(pattern, text)]
        assert set(found) <= set(possible), text
        matches, tried = matches + len(found), tried + len(possible)
    assert matches > 500
    assert tried < 2 * matches


def test_threads_do_not_get_in_each_other_s_way() -> None:
    texts = [normalise(case.text) for case in load()]
    expected = [signals._GATE.possible(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: list(map(signals._GATE.possible, texts)), range(8)):
            assert found == expected


def test_a_rule_that_cannot_be_looked_for_is_refused() -> None:
    with pytest.raises(hyperscan.error):
        Gate([r"(a)\1"]).prepare()


IMPORTS_ONLY = """
import hyperscan
hyperscan.Database = None
import processors.reward.__main__
from processors.reward import app, signals
print(signals._GATE._compiled)
"""


def test_importing_the_worker_compiles_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS_ONLY], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr


@pytest.mark.parametrize("reads", [True, False])
def test_rules_are_compiled_for_a_partition_before_its_first_segment(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(["wrong"])
    monkeypatch.setattr(signals, "_GATE", gate)
    settings = Settings(reward=RewardSettings(text_signals=reads))
    spec = build_spec(settings, ProcessorMetrics(STAGE))
    assert gate._compiled is None
    spec.make_processor(0, Cluster(1, dict.fromkeys(spec.outputs, 1_000_000)))
    assert (gate._compiled is not None) is reads
