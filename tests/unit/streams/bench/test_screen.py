from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from streams.bench.machine import describe_machine
from streams.bench.report import Goal, Report, Spread
from streams.bench.screen import figure, require_writable, show, write_json
from streams.errors import SettingsError


def report(*goals: Goal) -> Report:
    return Report(
        bench="align",
        machine=describe_machine(),
        subjects={"ours": {"records_per_s": [900.0, 1200.0, 1500.0]}, "bare": {"cpu_s": [0.5]}},
        ratios={"ours/bare": Spread(3.0, 2.0, 4.0)},
        goals=goals,
    )


def shown(of: Report, width: int = 120) -> str:
    text = io.StringIO()
    show(of, Console(file=text, width=width))
    return text.getvalue()


def test_the_median_stands_before_the_spread() -> None:
    text = shown(report())
    assert "1,200 (900.0..1,500)" in text
    assert "│ bare    │                      │  0.50 │" in text


def test_many_metrics_go_down_the_side() -> None:
    subjects = {"ours": {"p50": [1.0], "p99": [2.0]}}
    text = shown(Report(bench="delay", machine=describe_machine(), subjects=subjects))
    assert "│ p50    │ 1.00 │" in text
    assert "│ p99    │ 2.00 │" in text


def test_names_are_whole_on_a_narrow_screen() -> None:
    metrics = {f"a_metric_with_a_long_name_{number}": [1.0, 2.0] for number in range(4)}
    names = ["filters_on_20%", "filters_on_20%_no_attack", "x", "y", "z"]
    subjects = dict.fromkeys(names, metrics)
    text = shown(Report(bench="b", machine=describe_machine(), subjects=subjects), width=80)
    assert "…" not in text
    assert all(f"│ {name} " in text for name in names)


def test_a_goal_missed_is_shown_as_missed() -> None:
    text = shown(report(Goal("speed", 5.0, 3.0), Goal("delay", 500.0, 20.0, at_most=True)))
    assert "at least 5.00" in text
    assert "at most 500.0" in text
    assert "missed: speed\n" in text
    assert "missed" not in shown(report(Goal("speed", 2.0, 3.0)))


@pytest.mark.parametrize(
    ("value", "text"),
    [(12_345.6, "12,346"), (123.45, "123.5"), (1.234, "1.23"), (0.0, "0.00"), (float("nan"), "-")],
)
def test_figures(value: float, text: str) -> None:
    assert figure(value) == text


def test_the_report_is_written(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    require_writable(path)
    write_json(report(), path)
    assert json.loads(path.read_text())["subjects"]["bare"] == {"cpu_s": [0.5]}


def test_an_unwritable_report_is_found_out_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="name another --json"):
        require_writable(tmp_path / "absent" / "report.json")
    require_writable(None)


def test_the_machine_is_described() -> None:
    machine = describe_machine()
    assert machine["cpus"] >= 1
    assert machine["memory_bytes"] > 0
    assert set(machine) >= {"cpu_model", "system", "python", "load_average"}
