"""Words that a text must have for a regular expression to match it. Pure.

Trying a few hundred patterns on each turn takes most of the time there is; looking for plain words
first takes hardly any. Python parses the expression; what is required of its parts is put
together here. Where nothing is required for certain, nothing is: the pattern is always tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# The standard library has no other way to a parsed expression.
from re import _parser  # type: ignore[attr-defined]
from typing import Any

MAX_WORDS = 12
"""Of what else a match must have, lists of more words are not worth looking through."""

MIN_CHARS = 2
"""Shorter words stand in nearly every text; one Chinese character is a word."""

Words = frozenset[str]


def needed(pattern: str) -> tuple[str, ...]:
    """Words of which every match of ``pattern`` has at least one; empty if that is not known."""
    words = _of_sequence(_parser.parse(pattern))
    return tuple(sorted(words)) if words is not None else ()


def needed_besides(pattern: str) -> tuple[tuple[str, ...], ...]:
    """Further lists of words: of each every match of ``pattern`` has at least one, too."""
    best = frozenset(needed(pattern))
    lists = {words for words in _all_of_sequence(_parser.parse(pattern)) if words != best}
    return tuple(sorted((tuple(sorted(w)) for w in lists if len(w) <= MAX_WORDS), key=len))


def _of_sequence(items: Iterable[Any]) -> Words | None:
    """The best of what any item requires."""
    return max(_all_of_sequence(items), key=_worth, default=None)


def _all_of_sequence(items: Iterable[Any]) -> list[Words]:
    """What each of the items requires: runs of letters, or what stands in a group."""
    found: list[Words] = []
    run = ""
    for operation, argument in items:
        if operation is _parser.LITERAL:
            run += chr(argument)
            continue
        _keep(found, run)
        run = ""
        words = _of_item(operation, argument)
        if words is not None:
            found.append(words)
    _keep(found, run)
    return found


def _keep(found: list[Words], run: str) -> None:
    if _is_word(run):
        found.append(frozenset({run}))


def _is_word(text: str) -> bool:
    return len(text) >= MIN_CHARS or (len(text) == 1 and text > "\u2fff")


def _worth(words: Words) -> tuple[int, int]:
    """Long words are rarer than short ones, few are found faster than many."""
    weights = (len(word) * (1 if word.isascii() else 3) for word in words)
    return min(weights), -len(words)


def _of_item(operation: Any, argument: Any) -> Words | None:
    if operation is _parser.SUBPATTERN:
        return _of_sequence(argument[-1])
    if operation in (_parser.MAX_REPEAT, _parser.MIN_REPEAT):
        least, _, items = argument
        return _of_sequence(items) if least >= 1 else None
    if operation is _parser.BRANCH:
        return _of_branches(argument[1])
    return None


def _of_branches(branches: Sequence[Any]) -> Words | None:
    parts = [_of_sequence(branch) for branch in branches]
    if any(part is None for part in parts):
        return None
    return frozenset().union(*(part for part in parts if part is not None))


__all__ = ["needed", "needed_besides"]
