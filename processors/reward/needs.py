"""Words that a text must have for a regular expression to match it. Pure.

Trying a few hundred patterns on each turn takes most of the time there is; looking for plain words
first takes hardly any. Python parses the expression; what is required of its parts is put
together here. Where nothing is required for certain, nothing is: the pattern is always tried.

Most words stand where a token of the text begins (a token is a run of a to z and 0 to 9). How
that token begins is noted too: a text's tokens are looked up together, and hardly any word has
to be searched for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# The standard library has no other way to a parsed expression.
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

MAX_WORDS = 12
"""Of what else a match must have, lists of more words are not worth looking through."""

MIN_CHARS = 2
"""Shorter words stand in nearly every text; one Chinese character is a word."""

START_CHARS = 4
"""By so many characters tokens are looked up."""

_TOKEN_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789")
_APART = (_parser.CATEGORY_SPACE, _parser.CATEGORY_NOT_WORD)


class Word(NamedTuple):
    """Something that stands in every text that matches, or one of several of which one does.

    Args:
        text: The word.
        start: How a token of such a text begins: its first ``START_CHARS`` characters, all of it
            if it has fewer; None if that is not known.
    """

    text: str
    start: str | None


Words = frozenset[Word]


def needed(pattern: str) -> tuple[Word, ...]:
    """Words of which every match of ``pattern`` has at least one; empty if that is not known."""
    words = max(_all_of(_parser.parse(pattern), False, False), key=_worth, default=frozenset())
    return tuple(sorted(words, key=_text))


def needed_besides(pattern: str) -> tuple[tuple[str, ...], ...]:
    """Further lists of words: of each every match of ``pattern`` has at least one, too."""
    best = frozenset(map(_text, needed(pattern)))
    found = _all_of(_parser.parse(pattern), False, False)
    lists = {words for words in (frozenset(map(_text, w)) for w in found) if words != best}
    few = (tuple(sorted(words)) for words in lists if len(words) <= MAX_WORDS)
    return tuple(sorted(few, key=lambda words: (len(words), words)))


def _text(word: Word) -> str:
    return word.text


def _all_of(items: Iterable[Any], before: bool, after: bool) -> list[Words]:
    """What each of the items requires: runs of letters, or what stands in a group.

    Args:
        items: What follows each other.
        before: Whether no token reaches from what is before them into them.
        after: The same of what comes after them.
    """
    parts = list(items)
    befores, behind = _edges(parts, before), _edges(parts[::-1], after, backwards=True)
    afters = behind[-2::-1]
    found: list[Words] = []
    start = 0
    while start < len(parts):
        end = start + 1
        operation, argument = parts[start]
        if operation is _parser.LITERAL:
            while end < len(parts) and parts[end][0] is _parser.LITERAL:
                end += 1
            run = "".join(chr(code) for _, code in parts[start:end])
            if end < len(parts) and parts[end][0] is _parser.BRANCH:
                found += _joined(run, parts[end][1][1], befores[start], afters[end])
            if _is_word(run):
                begins = _start(run, befores[start], afters[end - 1])
                found.append(frozenset({Word(run, begins)}))
        else:
            words = _of_item(operation, argument, befores[start], afters[start])
            if words is not None:
                found.append(words)
        start = end
    return found


def _joined(run: str, branches: Sequence[Any], before: bool, after: bool) -> list[Words]:
    """What is required of a run with one of several that follow it: words have been cut there.

    Python takes what alternatives begin with out of them: of "this|that" it makes "th(is|at)".
    """
    words: set[Word] = set()
    for branch in branches:
        items = list(branch)
        size = next(
            (n for n, (operation, _) in enumerate(items) if operation is not _parser.LITERAL),
            len(items),
        )
        word = run + "".join(chr(code) for _, code in items[:size])
        behind = _edges(items[:size:-1], after, backwards=True)[-1] if size < len(items) else after
        if size < len(items):
            operation, argument = items[size]
            behind = _edge(operation, argument, behind, True)
        if not _is_word(word):
            return []
        words.add(Word(word, _start(word, before, behind)))
    return [frozenset(words)]


def _is_word(text: str) -> bool:
    return len(text) >= MIN_CHARS or (len(text) == 1 and text > "\u2fff")


def _start(run: str, before: bool, after: bool) -> str | None:
    """How the token begins that has the first letters of ``run``."""
    skipped = next((n for n, c in enumerate(run) if c in _TOKEN_CHARACTERS), len(run))
    rest = run[skipped:]
    size = next((n for n, c in enumerate(rest) if c not in _TOKEN_CHARACTERS), len(rest))
    if not size or not (skipped or before):
        return None
    is_whole = size < len(rest) or after
    return rest[:size][:START_CHARS] if is_whole or size >= START_CHARS else None


def _worth(words: Words) -> tuple[int, int]:
    """Long words are rarer than short ones, few are found faster than many."""
    weights = (len(word.text) * (1 if word.text.isascii() else 3) for word in words)
    return min(weights), -len(words)


def _of_item(operation: Any, argument: Any, before: bool, after: bool) -> Words | None:
    """The best of what an item requires."""
    if operation is _parser.BRANCH:
        return _of_branches(argument[1], before, after)
    if operation is _parser.IN:
        return _of_characters(argument)
    if operation is _parser.SUBPATTERN:
        items = argument[-1]
    elif operation in (_parser.MAX_REPEAT, _parser.MIN_REPEAT) and argument[0] >= 1:
        items = argument[2]
        if argument[1] > 1:
            before = after = False
    else:
        return None
    return max(_all_of(items, before, after), key=_worth, default=None)


def _of_characters(characters: Sequence[Any]) -> Words | None:
    """The characters of a set, if each is a word."""
    if any(kind is not _parser.LITERAL or not _is_word(chr(n)) for kind, n in characters):
        return None
    return frozenset(Word(chr(n), None) for _, n in characters)


def _of_branches(branches: Sequence[Any], before: bool, after: bool) -> Words | None:
    parts = [max(_all_of(b, before, after), key=_worth, default=None) for b in branches]
    if any(part is None for part in parts):
        return None
    return frozenset().union(*(part for part in parts if part is not None))


def _edges(items: Sequence[Any], first: bool, *, backwards: bool = False) -> list[bool]:
    """Of each item whether no token reaches into it from the items before; and behind the last.

    Args:
        items: What follows each other; the last comes first if ``backwards``.
        first: Whether no token reaches into the first.
        backwards: Whether they are read from the end on.
    """
    edges = [first]
    for operation, argument in items:
        edges.append(_edge(operation, argument, edges[-1], backwards))
    return edges


def _edge(operation: Any, argument: Any, before: bool, backwards: bool) -> bool:
    """Whether no token reaches out of an item, whatever it matches."""
    if operation is _parser.AT:
        return before or argument is not _parser.AT_NON_BOUNDARY
    if operation is _parser.LITERAL:
        return chr(argument) not in _TOKEN_CHARACTERS
    if operation is _parser.IN:
        return all(_is_apart(kind, value) for kind, value in argument)
    if operation is _parser.SUBPATTERN:
        return _edge_of_all(argument[-1], before, backwards)
    if operation is _parser.BRANCH:
        return all(_edge_of_all(branch, before, backwards) for branch in argument[1])
    if operation in (_parser.MAX_REPEAT, _parser.MIN_REPEAT):
        least, most, items = argument
        repeated = _edge_of_all(items, before and most == 1, backwards)
        return repeated and (before or least >= 1)
    if operation is _parser.ASSERT:
        looks, items = argument
        # What is looked at stands beside: it takes nothing, but it is there.
        return before or (
            looks == (1 if backwards else -1) and _edge_of_all(items, False, backwards)
        )
    return before if operation is _parser.ASSERT_NOT else False


def _edge_of_all(items: Iterable[Any], before: bool, backwards: bool) -> bool:
    parts = list(items)
    return _edges(parts[::-1] if backwards else parts, before, backwards=backwards)[-1]


def _is_apart(kind: Any, value: Any) -> bool:
    if kind is _parser.LITERAL:
        return chr(value) not in _TOKEN_CHARACTERS
    return kind is _parser.CATEGORY and value in _APART


__all__ = ["START_CHARS", "Word", "needed", "needed_besides"]
