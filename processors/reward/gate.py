"""Which of many regular expressions may match a text, told by one pass over it. Pure.

Trying a few hundred expressions on each turn takes most of the time there is. Every match of an
expression holds one of some literals (``processors.reward.literals``); those of all expressions
are looked for at once, by Aho and Corasick's automaton, and most texts have few. Where one
stands it is mostly known where the match would begin, so that it is tried there only.
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Sequence
from operator import itemgetter

from ahocorasick_rs import AhoCorasick

from processors.reward.literals import Opens, beside_words, folded, needs

Begins = list[int] | None
"""Where in a text a match may begin; None: anywhere."""

_NUMBER = itemgetter(0)
_AT_LITERALS = Opens.AT_LITERALS


class _Literals:
    """The literals of all patterns, each known by its number, ready to be looked for.

    Args:
        patterns: As Python reads them, without flags.

    Attributes:
        always: The patterns of which nothing is known.
        alternatives: Of each alternative of the others its pattern, where its matches begin, and
            the literals of which a text must have one, too, if there are any.
        starts: Of each literal the alternatives whose matches may hold it, and where those begin,
            counted from its own beginning.
        find: Finds all in a text, in order: number, beginning and end.

    Raises:
        ValueError: A pattern has flags.
        re.error: It is no regular expression.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self.always: dict[int, Begins] = {}
        self.alternatives: list[tuple[int, Opens, frozenset[int]]] = []
        numbers: defaultdict[str, int] = defaultdict(lambda: len(numbers))
        starts: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for index, pattern in enumerate(patterns):
            for need in needs(pattern):
                if not need.literals:
                    self.always[index] = None
                for literal, places in need.literals.items():
                    alternative = len(self.alternatives)
                    starts[numbers[literal]] += [(alternative, place) for place in places]
                besides = frozenset(numbers[literal] for literal in need.besides)
                self.alternatives.append((index, need.opens, besides))
        self.starts = [starts[number] for number in range(len(numbers))]
        self.find = AhoCorasick(numbers).find_matches_as_indexes


class Gate:
    """Regular expressions, each known by its number. For use by any number of threads.

    Reading three hundred takes about a third of a second of processor time, so it is done when a
    text is first looked at, or before by ``prepare``.

    Args:
        patterns: As Python reads them, without flags.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = tuple(patterns)
        self._read: _Literals | None = None
        self._reading = threading.Lock()

    def prepare(self) -> None:
        """Read the patterns now, unless it has been done.

        Raises:
            ValueError: A pattern has flags.
            re.error: It is no regular expression.
        """
        self._literals()

    def possible(self, text: str) -> dict[int, Begins]:
        """The numbers of all that match somewhere in ``text`` and of some that do not.

        Returns:
            Of each where its matches may begin, as ``first`` takes it.

        Raises:
            ValueError: As ``prepare``.
            re.error: As ``prepare``.
        """
        literals = self._read or self._literals()
        plain = folded(text)
        hits = literals.find(plain, True)
        begins: dict[int, list[int]] = {}
        for number, at, _ in hits:
            for alternative, start in literals.starts[number]:
                if alternative in begins:
                    begins[alternative].append(at + start)
                else:
                    begins[alternative] = [at + start]
        possible = literals.always.copy()
        if not begins:
            return possible
        found = set(map(_NUMBER, hits))
        for alternative, at_literals in begins.items():
            index, opens, besides = literals.alternatives[alternative]
            if besides and besides.isdisjoint(found):
                continue
            more = at_literals if opens is _AT_LITERALS else _begins(opens, plain)
            possible[index] = _either(possible[index], more) if index in possible else more
        return possible

    def _literals(self) -> _Literals:
        if self._read is None:
            with self._reading:
                if self._read is None:
                    self._read = _Literals(self._patterns)
        return self._read


def _begins(opens: Opens, plain: str) -> Begins:
    """Where in a text that was folded to ``plain`` matches may begin that begin so."""
    if opens is Opens.AT_TEXT:
        return [0]
    return beside_words(plain) if opens is Opens.BESIDE_WORDS else None


def _either(one: Begins, other: Begins) -> Begins:
    return None if one is None or other is None else one + other


def first(
    pattern: re.Pattern[str], text: str, begins: Begins, since: int = 0
) -> re.Match[str] | None:
    """The first match of ``pattern`` in ``text``.

    Args:
        pattern: The pattern.
        text: The text.
        begins: Where it may begin, as a gate that knows the pattern says of this text.
        since: Where it may begin at the earliest.
    """
    if begins is None:
        return pattern.search(text, since)
    for begin in sorted(set(begins)) if len(begins) > 1 else begins:
        hit = pattern.match(text, begin) if begin >= since else None
        if hit is not None:
            return hit
    return None


__all__ = ["Begins", "Gate", "first"]
