"""The one form in which every bench reports. Pure.

A *subject* is what is measured, a *metric* a named figure of it; each repetition gives one
value. Subjects take turns in one run, so the values at one index of two subjects belong
together: a ratio is taken index by index, and what the machine did at that time to both of
them cancels out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Metrics = Mapping[str, Sequence[float]]
"""The values of each repetition, by metric."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle and the ends of some values."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value.

        Raises:
            ValueError: There are none.
        """
        if not values:
            raise ValueError("no values have no spread")
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure that was to be reached.

    Attributes:
        name: What it is about.
        goal: The figure.
        value: What was measured.
        at_most: Whether the value must not be above the goal; else it must not be below.
    """

    name: str
    goal: float
    value: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether it was reached; a value that is not a number reaches nothing."""
        return self.value <= self.goal if self.at_most else self.value >= self.goal


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one run of a bench measured.

    Attributes:
        bench: Its name.
        machine: What it ran on, and how busy that was.
        subjects: The values of each subject, by metric.
        ratios: How subjects compare, by name.
        goals: What was to be reached.
    """

    bench: str
    machine: Mapping[str, Any]
    subjects: Mapping[str, Metrics]
    ratios: Mapping[str, Spread] = field(default_factory=dict)
    goals: Sequence[Goal] = ()

    @property
    def missed(self) -> tuple[Goal, ...]:
        """The goals that were not reached."""
        return tuple(goal for goal in self.goals if not goal.met)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON has it; what is not a number is null there."""
        return {
            "bench": self.bench,
            "machine": dict(self.machine),
            "subjects": {
                name: {metric: [_plain(value) for value in values] for metric, values in of.items()}
                for name, of in self.subjects.items()
            },
            "ratios": {
                name: {
                    "median": _plain(ratio.median),
                    "min": _plain(ratio.min),
                    "max": _plain(ratio.max),
                }
                for name, ratio in self.ratios.items()
            },
            "goals": [
                {
                    "name": goal.name,
                    "goal": _plain(goal.goal),
                    "value": _plain(goal.value),
                    "met": goal.met,
                }
                for goal in self.goals
            ],
        }


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """How many times ``below`` fits into ``above``, repetition by repetition.

    Raises:
        ValueError: They have not equally many values, or none.
    """
    pairs = zip(above, below, strict=True)
    return Spread.of([a / b if b else math.inf for a, b in pairs])


def ratios_to(
    subjects: Mapping[str, Metrics], subject: str, metric: str, others: Sequence[str]
) -> dict[str, Spread]:
    """``subject``'s metric over that of each of ``others`` that was measured.

    Returns:
        Named ``subject/other``; empty if ``subject`` itself was not measured.
    """
    if subject not in subjects:
        return {}
    mine = subjects[subject][metric]
    return {
        f"{subject}/{other}": ratio(mine, subjects[other][metric])
        for other in others
        if other in subjects
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` (in (0, 1]) of all values do not exceed.

    Raises:
        ValueError: There are none.
    """
    if not values:
        raise ValueError("no values have no percentile")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def growth(values: Sequence[float]) -> float:
    """By what share of their mean values grow over the second half of them.

    The slope is that of a least-squares line, so that a single peak counts little. Values
    are equally far apart.

    Raises:
        ValueError: The second half has fewer than two values.
    """
    half = values[len(values) // 2 :]
    if len(half) < 2:
        raise ValueError("growth needs at least two values in the second half")
    places = range(len(half))
    slope = statistics.linear_regression(places, half).slope
    mean = statistics.fmean(half)
    return slope * (len(half) - 1) / mean if mean else 0.0


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


__all__ = ["Goal", "Metrics", "Report", "Spread", "growth", "percentile", "ratio", "ratios_to"]
