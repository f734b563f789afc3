"""What stands for the names of features: for learning they themselves, else what they count. Pure.

Features are found once for both (``processors.reward.features``), in terms of a vocabulary. Most
names are of parts with a mark between them: ``help me``, ``R~BE~$``. A vocabulary of known names
looks them up by their parts, so that no string is made for a name that counts nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

V = TypeVar("V")
"""What stands for a name."""

V_co = TypeVar("V_co", covariant=True)

Row = Any
"""What a vocabulary has for the first of two parts."""


class Vocabulary(Protocol[V_co]):
    """What stands for names; None stands for a name that counts nothing.

    No part of a name may have in it the ``mark`` that parts are joined with.
    """

    def of(self, name: str) -> V_co | None:
        """What stands for a name."""

    def joined(self, mark: str) -> Callable[[tuple[str, ...]], V_co | None]:
        """Gives what stands for the name that parts make with ``mark`` between them."""

    def row(self, first: str, mark: str) -> Row:
        """What ``following`` needs of a first part with ``mark`` after it."""

    def following(self, rows: Iterable[Row], seconds: Iterable[str]) -> Iterator[V_co | None]:
        """What stands for the names of first parts, given by their rows, each with a second."""


class Everything:
    """All names, each standing for itself."""

    def of(self, name: str) -> str:
        """As ``Vocabulary.of``."""
        return name

    def joined(self, mark: str) -> Callable[[tuple[str, ...]], str]:
        """As ``Vocabulary.joined``."""
        return mark.join

    def row(self, first: str, mark: str) -> Row:
        """As ``Vocabulary.row``."""
        return first + mark

    def following(self, rows: Iterable[Row], seconds: Iterable[str]) -> Iterator[str]:
        """As ``Vocabulary.following``."""
        return map(operator.add, rows, seconds)


class Known(Generic[V]):
    """The names that have a value; none is None.

    Args:
        values: By name.
    """

    def __init__(self, values: Mapping[str, V]) -> None:
        self._values = dict(values)
        self.of = self._values.get
        self._rows: dict[str, dict[str, dict[str, V]]] = {}
        self._empty: dict[str, V] = {}

    def joined(self, mark: str) -> Callable[[tuple[str, ...]], V | None]:
        """As ``Vocabulary.joined``."""
        by_parts: dict[tuple[str, ...], V] = {
            tuple(name.split(mark)): value for name, value in self._values.items() if mark in name
        }
        return by_parts.get

    def row(self, first: str, mark: str) -> Row:
        """As ``Vocabulary.row``."""
        if mark not in self._rows:
            self._rows[mark] = self._rows_of(mark)
        return self._rows[mark].get(first, self._empty)

    def following(self, rows: Iterable[Row], seconds: Iterable[str]) -> Iterator[V | None]:
        """As ``Vocabulary.following``."""
        return map(dict.get, rows, seconds)

    def _rows_of(self, mark: str) -> dict[str, dict[str, V]]:
        rows: dict[str, dict[str, V]] = {}
        for name, value in self._values.items():
            parts = name.split(mark) if mark else [*name]
            if len(parts) == 2:
                rows.setdefault(parts[0], {})[parts[1]] = value
        return rows


__all__ = ["Everything", "Known", "Row", "V", "Vocabulary"]
