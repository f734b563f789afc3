"""What every match of a regular expression must hold, read off the expression itself. Pure.

Theory of operation. An expression is read as an *outline*: parts that follow each other in every
match, each one of some words, with at most so many other characters after it. An outline says
less than its expression: look-arounds and back references may be anything, what is repeated and
whole classes are gaps. So it may be found where the expression does not match, but never the
other way round. Of each outline the part is taken whose words are rarest: where none of them
stands, there is no match, and where one stands, a match begins a known number of characters
before it, if the parts before have about one length.

Texts and words are compared *folded*: letters and digits of any script and blanks are themselves,
all else is one character. So a word can say what stands beside it at a word boundary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, reduce
from math import prod
from re import _parser  # type: ignore[attr-defined]  # the only reader of Python's own syntax
from typing import Any

_OTHER = "."
_FOLDED = re.sub(rb"[^\w ]", _OTHER.encode(), bytes(range(128))) + bytes(range(128, 256))
_NEITHER_WORD_NOR_BLANK = re.compile(r"[^\w ]")
_NO_WORD = (" ", _OTHER)
_MARK = re.compile(re.escape(_OTHER))

_START, _EDGE = "\x02", "\x01"
"""Marks in words: here the text begins; on one side of here is no letter or digit."""

_BEGIN = _START + " "
MARGIN = len(_BEGIN)
"""How many characters a folded text has before its first."""

ANY_LENGTH = 1_000_000

# What follows changes how much is tried in vain and how long patterns take to read, never what
# is found. Chosen by the time that the rules take over the labelled texts.

MAX_WORDS = 512
"""How many words parts that touch may have together, to be made one part."""

MAX_LITERAL = 12
"""How many characters of a word are looked for; more would tell little and cost memory."""

MAX_CLASS = 24
"""A class of more characters is a gap."""

MAX_STARTS = 8
"""If a match may begin at more places before a part, it is searched everywhere."""

WORTH_LOOKING = 0.01
"""What costs more is not looked for beside what is rarer."""

_SEARCH_COSTS = 5
"""How many times longer a search everywhere takes than to try such places, roughly."""

_Ops = Sequence[tuple[Any, Any]]
"""Part of an expression as Python's own reader gives it: pairs of an operator and its operands."""


def folded(text: str) -> str:
    """``text`` as literals are looked for in it; ``MARGIN`` characters stand before its first."""
    if text.isascii():
        return f"{_BEGIN}{text.encode().translate(_FOLDED).decode()} "
    return f"{_BEGIN}{_NEITHER_WORD_NOR_BLANK.sub(_OTHER, text)} "


class Opens(Enum):
    """Where the matches of an alternative begin."""

    AT_LITERALS = "a known number of characters before a literal"
    AT_TEXT = "where the text does"
    BESIDE_WORDS = "there, or at a character that is neither letter, digit nor blank"
    ANYWHERE = "anywhere"


@dataclass(frozen=True, slots=True)
class Need:
    """What every match of an alternative has.

    Args:
        literals: At least one of these stands in the folded text; empty if nothing is known. Of
            each where in the text itself a match that holds it may begin, counted from where it
            stands in the folded text, if ``opens`` says so.
        besides: At least one of these, too; empty if nothing more is worth looking for.
        opens: Where matches begin.
    """

    literals: dict[str, frozenset[int]]
    besides: frozenset[str]
    opens: Opens


def needs(pattern: str) -> tuple[Need, ...]:
    """What every match of ``pattern`` has: all that one of these says.

    Args:
        pattern: As Python reads it, without flags.

    Raises:
        ValueError: The pattern has flags, by which a letter may stand for others than itself.
        re.error: It is no regular expression.
    """
    parsed = _parser.parse(pattern)
    alternatives = parsed[0][1][1] if _is_one(parsed, "BRANCH") else [parsed]
    try:
        _refuse_flags(parsed.state.flags & ~re.UNICODE)
        return tuple(map(_need, alternatives))
    except ValueError as error:
        raise ValueError(f"{pattern!r} {error}") from None


def _is_one(ops: _Ops, op: str) -> bool:
    return len(ops) == 1 and str(ops[0][0]) == op


def _refuse_flags(flags: int) -> None:
    if flags:
        raise ValueError(f"has flags, which are not known to {__name__}")


def _need(ops: _Ops) -> Need:
    found = _found(_outline(ops))
    if not found:
        return Need({}, frozenset(), Opens.ANYWHERE)
    rarest = min(found, key=lambda literals: literals.cost)
    others = (frozenset(literals.starts) for literals in found if literals is not rarest)
    besides = min(others, key=_cost, default=frozenset[str]())
    return Need(
        rarest.starts,
        besides if _cost(besides) < WORTH_LOOKING else frozenset(),
        Opens.AT_LITERALS if rarest.exact else _opens(ops),
    )


def _opens(ops: _Ops) -> Opens:
    if _begins(ops, (), "AT_BEGINNING"):
        return Opens.AT_TEXT
    return Opens.BESIDE_WORDS if _begins(ops, (_OTHER,), "AT_BEGINNING") else Opens.ANYWHERE


# Outlines


@dataclass(frozen=True, slots=True)
class _Part:
    """One of ``words``, and after it up to ``gap`` characters of any kind."""

    words: frozenset[str]
    gap: int = 0

    @property
    def lengths(self) -> tuple[int, int]:
        """Of its words without marks: the fewest and the most characters."""
        lengths = [len(word) - word.count(_START) - word.count(_EDGE) for word in self.words]
        return min(lengths), max(lengths)

    @property
    def width(self) -> int:
        """How many characters it takes at most, with the gap."""
        return min(ANY_LENGTH, self.lengths[1] + self.gap)


_Outline = tuple[_Part, ...]


def _words(*words: str) -> _Outline:
    return (_Part(frozenset(words)),)


def _gap(width: int) -> _Outline:
    return (_Part(frozenset({""}), min(ANY_LENGTH, width)),)


def _width(outline: _Outline) -> int:
    return sum(part.width for part in outline)


def _outline(ops: _Ops) -> _Outline:
    return reduce(_joined, (_of_op(str(op), given) for op, given in ops), _words(""))


def _joined(left: _Outline, right: _Outline) -> _Outline:
    """One outline after the other; parts that touch become one if their words are few enough."""
    last, first = left[-1], right[0]
    if first.words == {""}:
        widened = _Part(last.words, min(ANY_LENGTH, last.gap + first.gap))
        return (*left[:-1], widened, *right[1:])
    if last.gap == 0 and prod(map(len, (last.words, first.words))) <= MAX_WORDS:
        words = frozenset(one + other for one in last.words for other in first.words)
        return (*left[:-1], _Part(words, first.gap), *right[1:])
    return (*left, *right)


def _of_op(op: str, given: Any) -> _Outline:
    """What is known of one operator; of those not named here nothing, which is always true."""
    match op:
        case "LITERAL":
            return _words(_character(given))
        case "IN":
            return _of_class(given)
        case "ANY" | "NOT_LITERAL":
            return _gap(1)
        case "AT":
            return _of_place(str(given))
        case "ASSERT":
            ahead, ops = given
            return _words(_EDGE if ahead > 0 and _begins(ops, _NO_WORD, "AT_END") else "")
        case "ASSERT_NOT":
            return _words("")
        case "SUBPATTERN":
            return _of_group(*given)
        case "ATOMIC_GROUP":
            return _outline(given)
        case "BRANCH":
            return _either([_outline(branch) for branch in given[1]])
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            return _repeated(*given)
        case _:
            return _gap(ANY_LENGTH)


def _character(code: int) -> str:
    return _NEITHER_WORD_NOR_BLANK.sub(_OTHER, chr(code))


def _of_class(members: _Ops) -> _Outline:
    characters: set[str] = set()
    for kind, given in members:
        match str(kind):
            case "LITERAL":
                characters.add(_character(given))
            case "RANGE" if given[1] - given[0] <= MAX_CLASS:
                characters.update(map(_character, range(given[0], given[1] + 1)))
            case "CATEGORY" if str(given) in ("CATEGORY_SPACE", "CATEGORY_NOT_WORD"):
                characters.update(_NO_WORD)
            case _:
                return _gap(1)
    return _words(*characters) if len(characters) <= MAX_CLASS else _gap(1)


def _of_place(place: str) -> _Outline:
    match place:
        case "AT_BEGINNING" | "AT_BEGINNING_STRING":
            return _words(_START)
        case "AT_BOUNDARY" | "AT_END" | "AT_END_STRING":
            return _words(_EDGE)
        case _:
            return _words("")


def _begins(ops: _Ops, characters: Sequence[str], places: str) -> bool:
    """Whether what ``ops`` match begins with one of ``characters``, or at one of such places."""
    if not ops:
        return False
    op, given = str(ops[0][0]), ops[0][1]
    match op:
        case "LITERAL" | "IN":
            return _of_op(op, given)[0].words <= set(characters)
        case "AT":
            return str(given) in (places, f"{places}_STRING")
        case "SUBPATTERN":
            return _begins(given[3], characters, places)
        case "BRANCH":
            return all(_begins(branch, characters, places) for branch in given[1])
        case _:
            return False


def _of_group(_: int | None, more_flags: int, fewer_flags: int, ops: _Ops) -> _Outline:
    _refuse_flags(more_flags | fewer_flags)
    return _outline(ops)


def _repeated(least: int, most: int, ops: _Ops) -> _Outline:
    once = _outline(ops)
    if least == 0:
        return _either([_words(""), once]) if most == 1 else _gap(_width(once) * int(most))
    return _joined(once, _gap(_width(once) * (int(most) - 1)))


def _either(outlines: Sequence[_Outline]) -> _Outline:
    """What is true of each: one of all words, or one of the rarest of each between gaps."""
    if all(len(outline) == 1 and outline[0].gap == 0 for outline in outlines):
        return _words(*(word for (part,) in outlines for word in part.words))
    words: set[str] = set()
    before = after = 0
    for outline in outlines:
        usable = [place for place, part in enumerate(outline) if _known(part) is not None]
        if not usable:
            return _gap(max(map(_width, outlines)))
        place = min(usable, key=lambda place: _cost(_known(outline[place]) or {}))
        words |= outline[place].words
        before = max(before, _width(outline[:place]))
        after = max(after, outline[place].gap + _width(outline[place + 1 :]))
    return _joined(_gap(before), (_Part(frozenset(words), min(ANY_LENGTH, after)),))


# Literals


@dataclass(frozen=True, slots=True)
class _Literals:
    """What may be looked for instead of a part: where a match begins, of each, if that is known."""

    starts: dict[str, frozenset[int]]
    exact: bool

    @property
    def cost(self) -> float:
        """About how long it takes to try what is found."""
        return _cost(self.starts) * (1 if self.exact else _SEARCH_COSTS)


def _found(outline: _Outline) -> list[_Literals]:
    """The literals of each part that has any."""
    found = []
    shortest = longest = 0
    for part in outline:
        known = _known(part)
        if known is not None:
            found.append(_placed(known, shortest, longest))
        fewest, most = part.lengths
        shortest, longest = shortest + fewest, longest + most + part.gap
    return found


def _placed(known: dict[str, frozenset[int]], shortest: int, longest: int) -> _Literals:
    """``known``, where a match begins so many characters before the part."""
    if longest - shortest >= MAX_STARTS:
        return _Literals(known, exact=False)
    before = range(shortest, longest + 1)
    starts = {
        literal: frozenset(lead - length - MARGIN for lead in leads for length in before)
        for literal, leads in known.items()
    }
    exact = all(len(places) <= 2 * MAX_STARTS for places in starts.values())
    return _Literals(starts, exact)


@lru_cache(maxsize=64)
def _known(part: _Part) -> dict[str, frozenset[int]] | None:
    """The literals of which one stands wherever a word of ``part`` does.

    Returns:
        Of each how many characters after it the word may begin. None if a word tells nothing.
    """
    leads: dict[str, set[int]] = {}
    for word in part.words:
        for literal, lead in _resolved(word):
            if not literal:
                return None
            leads.setdefault(literal, set()).add(lead)
    kept: dict[str, frozenset[int]] = {}
    lengths: set[int] = set()
    for literal in sorted(leads, key=len):
        within = _held(literal, kept, lengths)
        if within is None:
            kept[literal] = frozenset(leads[literal])
            lengths.add(len(literal))
        else:
            at = literal.find(within)
            kept[within] |= {lead - at for lead in leads[literal]}
    return kept


def _held(literal: str, shorter: dict[str, frozenset[int]], lengths: set[int]) -> str | None:
    """The one of ``shorter``, which have these lengths, that stands in ``literal``."""
    for length in lengths:
        for begin in range(len(literal) - length + 1):
            if literal[begin : begin + length] in shorter:
                return literal[begin : begin + length]
    return None


def _resolved(word: str) -> list[tuple[str, int]]:
    """A word with its marks written out: what may be found, and how far after that it begins."""
    own = word.rpartition(_START)[2]
    plain = own.replace(_EDGE, "")
    if not plain:
        return [("", 0)]
    right = _NO_WORD if own[-1] == _EDGE and plain[-1] not in _NO_WORD else ("",)
    if _START in word:
        left: tuple[str, ...] = (_BEGIN,)
    else:
        left = _NO_WORD if own[0] == _EDGE and plain[0] not in _NO_WORD else ("",)
    return [
        ((before + plain + after)[:MAX_LITERAL], len(before)) for before in left for after in right
    ]


def _cost(known: Iterable[str]) -> float:
    """About how many of these stand in a text, up to a factor."""
    return sum(prod(map(_frequency, literal)) for literal in known)


def _frequency(character: str) -> float:
    """About how often a place that fits otherwise has this character."""
    if character == " " or character in "etaonisrhldc":
        return 0.2
    return 0.05 if character.isascii() else 0.004


def beside_words(plain: str) -> list[int]:
    """Where matches may begin that open beside words, in a text that ``folded`` made."""
    if _OTHER not in plain:
        return [0]
    return [0, *(mark.start() - MARGIN for mark in _MARK.finditer(plain))]


__all__ = ["MARGIN", "Need", "Opens", "beside_words", "folded", "needs"]
