from __future__ import annotations

import json
import math

import pytest

from streams.bench.report import Goal, Report, Spread, growth, percentile, ratio, ratios_to

MEASURED = {
    "ours": {"records_per_s": [100.0, 300.0, 200.0], "cpu_s": [1.0, 1.0, 2.0]},
    "other": {"records_per_s": [50.0, 100.0, 50.0], "cpu_s": [2.0, 4.0, 4.0]},
}


@pytest.mark.parametrize(
    ("values", "spread"),
    [
        ([3.0], Spread(3.0, 3.0, 3.0)),
        ([5.0, 1.0, 2.0], Spread(2.0, 1.0, 5.0)),
        ([4.0, 1.0, 3.0, 2.0], Spread(2.5, 1.0, 4.0)),
    ],
)
def test_spread(values: list[float], spread: Spread) -> None:
    assert Spread.of(values) == spread


def test_no_values_have_no_spread() -> None:
    with pytest.raises(ValueError, match="no values"):
        Spread.of([])


def test_ratios_pair_the_values_of_one_repetition() -> None:
    # Of the medians it would be 200 / 50.
    assert ratio(MEASURED["ours"]["records_per_s"], MEASURED["other"]["records_per_s"]) == Spread(
        3.0, 2.0, 4.0
    )


def test_unpaired_values_have_no_ratio() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratio([1.0, 2.0], [1.0])


def test_ratios_are_to_the_subjects_that_were_measured() -> None:
    found = ratios_to(MEASURED, "ours", "cpu_s", ["other", "absent"])
    assert found == {"ours/other": Spread(0.5, 0.25, 0.5)}
    assert ratios_to(MEASURED, "absent", "cpu_s", ["other"]) == {}


@pytest.mark.parametrize(
    ("share", "value"), [(0.01, 10.0), (0.5, 30.0), (0.6, 30.0), (0.61, 40.0), (1.0, 50.0)]
)
def test_percentiles(share: float, value: float) -> None:
    assert percentile([50.0, 10.0, 40.0, 20.0, 30.0], share) == value


@pytest.mark.parametrize(
    ("values", "share"),
    [
        # The first half is left out: it fills up.
        ([0.0, 50.0, 100.0, 100.0, 100.0, 100.0], 0.0),
        ([0.0, 0.0, 0.0, 90.0, 100.0, 110.0], 0.2),
        ([1.0, 1.0, 110.0, 90.0], -0.2),
        ([5.0, 5.0, 0.0, 0.0], 0.0),
    ],
)
def test_growth(values: list[float], share: float) -> None:
    assert growth(values) == pytest.approx(share)


def test_growth_needs_two_values() -> None:
    with pytest.raises(ValueError, match="at least two"):
        growth([1.0, 2.0])


def test_no_values_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


@pytest.mark.parametrize(
    ("value", "at_most", "met"),
    [
        (10.0, False, True),
        (9.99, False, False),
        (10.0, True, True),
        (10.01, True, False),
        (math.nan, False, False),
        (math.nan, True, False),
        (math.inf, True, False),
    ],
)
def test_goals(value: float, at_most: bool, met: bool) -> None:
    assert Goal("speed", 10.0, value, at_most=at_most).met is met


def test_json_has_the_shared_form() -> None:
    report = Report(
        bench="align",
        machine={"cpus": 2},
        subjects={"ours": {"records_per_s": [2.0, math.inf]}},
        ratios={"ours/other": Spread(3.0, 2.0, 4.0)},
        goals=[Goal("delay", 500.0, 400.0, at_most=True), Goal("ratio", 5.0, 3.0)],
    )
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False)) == {
        "bench": "align",
        "machine": {"cpus": 2},
        "subjects": {"ours": {"records_per_s": [2.0, None]}},
        "ratios": {"ours/other": {"median": 3.0, "min": 2.0, "max": 4.0}},
        "goals": [
            {"name": "delay", "goal": 500.0, "value": 400.0, "met": True},
            {"name": "ratio", "goal": 5.0, "value": 3.0, "met": False},
        ],
    }
    assert [goal.name for goal in report.missed] == ["ratio"]
