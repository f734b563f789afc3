"""A report for people: tables with the median and the spread, goals met and missed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console, Group
from rich.table import Column, Table

from streams.bench.report import Goal, Metrics, Report, Spread
from streams.errors import SettingsError

_MANY_DIGITS = 1_000
_SOME_DIGITS = 10


def show(report: Report, console: Console) -> None:
    """Print a report."""
    machine = report.machine
    console.print(
        f"{report.bench} on {machine['cpus']} processors ({machine['cpu_model']}), "
        f"Python {machine['python']}, load average {machine['load_average']} at the start",
        highlight=False,
    )
    console.print(Group(*_tables(report)))
    if report.missed:
        names = ", ".join(goal.name for goal in report.missed)
        console.print(f"missed: {names}", style="bold red", highlight=False)


def write_json(report: Report, path: Path) -> None:
    """Write a report as JSON.

    Raises:
        SettingsError: The file cannot be written.
    """
    _write(path, json.dumps(report.as_dict(), indent=2, allow_nan=False) + "\n")


def require_writable(path: Path | None) -> None:
    """Find out before a long run whether its report can be written; None needs no file.

    Raises:
        SettingsError: It cannot.
    """
    if path is not None:
        _write(path, "")


def figure(value: float) -> str:
    """A number with about three telling digits."""
    if not math.isfinite(value):
        return "-"
    size = abs(value)
    if size >= _MANY_DIGITS:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= _SOME_DIGITS else f"{value:.2f}"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(
            f"cannot write {path}: {error.strerror}; name another --json"
        ) from error


def _tables(report: Report) -> Iterator[Table]:
    yield _subjects(report)
    if report.ratios:
        yield _ratios(report)
    if report.goals:
        yield _goals(report)


def _subjects(report: Report) -> Table:
    """Subjects against metrics; of the two, what there is more of goes down the side."""
    metrics = list(dict.fromkeys(name for of in report.subjects.values() for name in of))
    if len(metrics) > len(report.subjects):
        table = _figures("metric", report.subjects)
        for metric in metrics:
            cells = (_cell(of, metric) for of in report.subjects.values())
            table.add_row(metric, *cells)
        return table
    table = _figures("subject", metrics)
    for name, of in report.subjects.items():
        table.add_row(name, *(_cell(of, metric) for metric in metrics))
    return table


def _figures(side: str, columns: Iterable[str]) -> Table:
    # A name that is cut could be another's: of the columns, the figures' own may grow taller.
    table = Table(Column(side, no_wrap=True))
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _cell(of: Metrics, metric: str) -> str:
    values = of.get(metric, ())
    return _spread(Spread.of(values)) if values else ""


def _spread(spread: Spread) -> str:
    if spread.min == spread.max:
        return figure(spread.median)
    return f"{figure(spread.median)} ({figure(spread.min)}..{figure(spread.max)})"


def _ratios(report: Report) -> Table:
    table = Table("ratio", "median", "min", "max")
    for name, ratio in report.ratios.items():
        table.add_row(name, figure(ratio.median), figure(ratio.min), figure(ratio.max))
    return table


def _goals(report: Report) -> Table:
    table = Table("goal", "wanted", "measured", "")
    for goal in report.goals:
        table.add_row(goal.name, _wanted(goal), figure(goal.value), _verdict(goal))
    return table


def _wanted(goal: Goal) -> str:
    return f"{'at most' if goal.at_most else 'at least'} {figure(goal.goal)}"


def _verdict(goal: Goal) -> str:
    return "[green]met[/green]" if goal.met else "[bold red]MISSED[/bold red]"


__all__ = ["figure", "require_writable", "show", "write_json"]
