"""How well the text signals do on labelled cases; the goal is kept on the held-out half."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from processors.reward.signals import Signal
from tests.unit.processors.reward.labelled import (
    LAST,
    LATER,
    REPLIED,
    REPORTED,
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
    cases = load(REPLIED)
    assert all(case.reply for case in cases)
    assert not {case.text for case in cases} & {case.text for case in CASES}
    for language in ("en", "zh"):
        of_language = [case for case in cases if case.language == language]
        assert len(of_language) >= 80
        assert sum(not case.signals for case in of_language) >= 25


def test_no_case_is_in_the_file_twice() -> None:
    assert len({(case.text, case.earlier) for case in CASES}) == len(CASES)


@pytest.mark.parametrize("held_out", [False, True], ids=["tuning", "held-out"])
def test_precision_and_recall_of_each_signal(
    held_out: bool, record_property: Callable[[str, object], None]
) -> None:
    half = [case for case in CASES if case.held_out is held_out]
    record_property("table", table(half))
    low = [s for s in scores(half) if s.precision < MIN_PRECISION or s.recall < MIN_RECALL]
    assert not low, table(half)


def test_cases_written_later_are_missed_rather_than_misread() -> None:
    cases = load(LATER) + load(LAST)
    assert len(cases) == 100
    assert not {case.text for case in cases} & {case.text for case in CASES}
    of_interest = {s.signal: s for s in scores(cases)}
    for signal in (Signal.CORRECTION, Signal.DIRECTIVE):
        assert of_interest[signal].precision >= MIN_PRECISION, table(cases)
    quiet = [case for case in cases if not case.signals]
    assert sum(bool(found(case)) for case in quiet) <= len(quiet) / 20
