"""Corrections, directives and confirmations as learned from labelled cases.

Theory of operation. A linear model for each signal and language: a turn gives the signal where the
weights of its features (``processors.reward.features``), added up, reach the threshold. Weights
are whole numbers in ``learned.json``, so that sums are exact on every machine. The file is made by
``python -m tests.unit.processors.reward.learning`` from the labelled cases beside it, which also
says what its thresholds were chosen by. What a rule found (``processors.reward.rules``) adds
``RULED``, or ``PLAIN``, and so is only dropped where much speaks against it. Pure but for reading
the file, once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from importlib import resources

import msgspec

from processors.reward.features import Chinese, English, Reader, language_of
from processors.reward.rules import Signal
from processors.reward.vocabulary import Known

FILE = "learned.json"
SIGNALS = (Signal.CORRECTION, Signal.DIRECTIVE, Signal.CONFIRMATION)
"""What is learned, in the order in which weights stand in the file."""

SCALE = 1_000
"""What the file has for a weight of 1; learning puts a case at least 1 from the boundary."""

RULED = 600
"""What a rule's match adds. Few labelled cases use the usual words that rules look for: with less,
"Thanks, that works" beside a reply is missed."""

PLAIN = 1_500
"""What it adds where the words it matches are half of the turn or more: they say it plainly."""

STATED = 150
"""What a statement adds that differs from the reply (``processors.reward.contrast``)."""

_BITS = 24
_HALF = 1 << (_BITS - 1)
_HALVES = _HALF | _HALF << _BITS | _HALF << 2 * _BITS
_MASK = (1 << _BITS) - 1


class Language(msgspec.Struct, frozen=True):
    """The models of one language.

    Args:
        bias: Of each signal, what a turn without any feature has.
        threshold: Of each signal, the least sum that is the signal.
        weights: Of each feature, what it adds for each signal.
    """

    bias: tuple[int, int, int]
    threshold: tuple[int, int, int]
    weights: dict[str, tuple[int, int, int]]


class Model(msgspec.Struct, frozen=True):
    """What the file holds.

    Args:
        cases: Digest of the labelled cases it was learned from.
        languages: By the name that ``features`` gives.
    """

    cases: str
    languages: dict[str, Language]


class _Ready:
    """A language's models as they are used.

    What a feature counts is one number: its three weights, so that three sums are made at once, and
    above them a number of its own, by which features of equal weights stay two in a set.

    Args:
        name: Of the language.
        language: What the file has of it.
    """

    def __init__(self, name: str, language: Language) -> None:
        counts = {
            each: _packed((*weights, number))
            for number, (each, weights) in enumerate(language.weights.items(), start=1)
        }
        self.reader = _READERS[name](Known(counts))
        both = zip(language.bias, language.threshold, strict=True)
        self.start = _packed([bias - threshold for bias, threshold in both])


_READERS: Mapping[str, Callable[[Known[int]], Reader[int]]] = {"en": English, "zh": Chinese}


def _packed(values: Sequence[int]) -> int:
    return sum(value << (_BITS * place) for place, value in enumerate(values))


def _unpacked(packed: int) -> tuple[int, int, int]:
    # No part is negative then, so none borrows of the next.
    raised = packed + _HALVES
    return (
        (raised & _MASK) - _HALF,
        (raised >> _BITS & _MASK) - _HALF,
        (raised >> 2 * _BITS & _MASK) - _HALF,
    )


@functools.cache
def model() -> Model:
    """The model in the file."""
    data = resources.files("processors.reward").joinpath(FILE).read_bytes()
    return msgspec.json.decode(data, type=Model)


@functools.cache
def _ready() -> Mapping[str, _Ready]:
    return {name: _Ready(name, language) for name, language in model().languages.items()}


def prepare() -> None:
    """Read the file now, unless it has been read."""
    _ready()


def ruled(words: str, plain: str) -> int:
    """What a rule's match adds to the sum of its signal.

    Args:
        words: What it matched.
        plain: The turn as ``signals.normalise`` makes it.
    """
    return PLAIN if 2 * len(words) >= len(plain.strip(" ,.;!?")) else RULED


def sums(plain: str, text: str, reply: str) -> tuple[str, tuple[int, int, int]]:
    """The language of a turn, and of each of ``SIGNALS`` its sum less its threshold.

    Args:
        plain: The turn as ``signals.normalise`` makes it, not empty.
        text: The turn as it was written.
        reply: The reply right before it; empty if it is not known.
    """
    language = language_of(plain)
    ready = _ready()[language]
    return language, _unpacked(sum(ready.reader.found(plain, text, reply), start=ready.start))


def quote(plain: str, language: str, signal: Signal) -> str:
    """The words in a row of a turn that add most to the sum of a signal.

    Args:
        plain: The turn as ``signals.normalise`` makes it, not empty.
        language: Its language, as ``sums`` gives it.
        signal: One of ``SIGNALS``.
    """
    spans = _ready()[language].reader.spans(plain)
    if not spans:
        return plain
    shift = _BITS * SIGNALS.index(signal)
    first, last = _best_run([(sum(found) + _HALVES >> shift & _MASK) - _HALF for _, found in spans])
    start = end = 0
    for place, (word, _) in enumerate(spans[: last + 1]):
        begins = plain.index(word, end)
        start, end = begins if place == first else start, begins + len(word)
    words = plain[start:end]
    return words if any(map(str.isalnum, words)) else plain


def _best_run(values: Sequence[int]) -> tuple[int, int]:
    """First and last of the values in a row whose sum is largest; the earliest of equal ones."""
    best, best_sum, begin, running = (0, 0), None, 0, 0
    for place, value in enumerate(values):
        if running <= 0:
            begin, running = place, 0
        running += value
        if best_sum is None or running > best_sum:
            best, best_sum = (begin, place), running
    return best


__all__ = [
    "FILE",
    "PLAIN",
    "RULED",
    "SIGNALS",
    "STATED",
    "Language",
    "Model",
    "model",
    "prepare",
    "quote",
    "ruled",
    "sums",
]
