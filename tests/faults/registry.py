"""The list of cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.faults.scene import Scene

PARTS = "abcdefgh"

Play = Callable[["Scene"], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One fault.

    Attributes:
        number: Its number in the matrix; a letter tells parts of one number apart.
        name: What ``ONLY=`` takes.
        what: What is done, in one line.
        play: Does it: has load and workers, breaks something, and returns when nothing more is
            sent and workers run that can finish. Raises AssertionError if something is wrong.
        brokers: How many the case needs.
    """

    number: str
    name: str
    what: str
    play: Play
    brokers: int = 1


_CASES: list[Case] = []


def case(number: str, name: str, what: str, *, brokers: int = 1) -> Callable[[Play], Play]:
    """Register the decorated function as a case."""

    def register(play: Play) -> Play:
        _CASES.append(Case(number, name, what, play, brokers))
        return play

    return register


def all_cases() -> list[Case]:
    """Every case, in the order of the matrix."""
    # Each module registers its cases when it is imported.
    from tests.faults import cluster, kills, records, schemas, state  # noqa: F401

    return sorted(_CASES, key=lambda item: (int(item.number.rstrip(PARTS)), item.number))


def find_cases(name: str) -> list[Case]:
    """The cases of a name or a number; 15 means all parts of 15.

    Raises:
        KeyError: There is none.
    """
    cases = all_cases()
    found = [item for item in cases if name in (item.name, item.number)]
    found = found or [item for item in cases if item.number.rstrip(PARTS) == name]
    if not found:
        raise KeyError(name)
    return found
