"""What a user's own words say about the reply before them, in English and Chinese.

Theory of operation. A turn is normalised (``normalise``) and read by tables of rules, one for
each signal and language. A rule set has two lists of regular expressions: ``masks`` are
phrases that only look like the signal ("no problem", "不错"); each is blanked out first.
``patterns`` are the signal; the first that still matches is it. Precision comes before
recall: a signal that is missed costs nothing, a wrong one teaches the opposite.

Repetition is no rule but a comparison (``processors.reward.repetition``).
What a tool answered is read by rules of its own (``tool_error``): did the call fail?

Pure: no clock, no state, no I/O.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush

from msgspec import Struct
from opencc import OpenCC

from processors.reward import learned
from processors.reward.contrast import asks, corrects
from processors.reward.features import MAX_CHARS as MAX_LEARNED_CHARS
from processors.reward.gate import Gate, first
from processors.reward.rules import (
    QUOTED,
    RULE_SETS,
    TOOL_ERRORS,
    TOOL_MASKS,
    RuleSet,
    Signal,
)

MAX_CHARS = 2_000
"""How much of a turn is compared with earlier ones."""

MAX_RULE_CHARS = 600
"""How much of a turn the rules read; what people say about a reply stands at its beginning."""

MAX_QUOTE_CHARS = 60


class Match(Struct, frozen=True, gc=False):
    """A signal found in a turn, with the words that gave it away."""

    signal: Signal
    quote: str


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A rule set, ready to be used.

    Args:
        signal: What a match means.
        masks: What is blanked out: what is quoted, and the masks, in order.
        mask_gate: Which of them a text may have.
        patterns: The patterns, in order.
    """

    signal: Signal
    masks: tuple[re.Pattern[str], ...]
    mask_gate: Gate
    patterns: tuple[re.Pattern[str], ...]


def _compile(rules: RuleSet) -> _Compiled:
    masks = (QUOTED, *rules.masks)
    return _Compiled(
        rules.signal,
        tuple(map(re.compile, masks)),
        Gate(masks),
        tuple(map(re.compile, rules.patterns)),
    )


_COMPILED = tuple(_compile(rules) for rules in RULE_SETS)
_PATTERNS = tuple(pattern for rules in _COMPILED for pattern in rules.patterns)
"""All patterns, in the order that the gate counts them."""

_RULES = tuple(number for number, rules in enumerate(_COMPILED) for _ in rules.patterns)
"""Of each the number of its rule set."""

_GATE = Gate([pattern for rules in RULE_SETS for pattern in rules.patterns])

_HAN = range(0x3400, 0xA000)
_PARTICLES = dict.fromkeys(map(ord, "啦咯囉"), "了")
_APOSTROPHES = str.maketrans("’‘`´", "''''")
_CODE = re.compile(r"```.*?(?:```|$)", re.DOTALL)
_QUOTED_LINE = re.compile(r"^[^\S\n]*>.*$", re.MULTILINE)
_SPACE = re.compile(r"\s+")
_SPACE_BESIDE_CHINESE = re.compile(r"(?<=[一-鿿,。!?;]) (?=[一-鿿])|(?<=[一-鿿]) (?=[,。!?;])")


def normalise(text: str) -> str:
    """``text`` as the rules read it.

    Fenced code and quoted lines are dropped (they are not the user's words about the reply),
    compatibility forms folded (full-width punctuation becomes ASCII), case folded, traditional
    characters made simplified, white space collapsed; the first ``MAX_CHARS``.
    """
    return _normalise(text[: 4 * MAX_CHARS])


# What is read of a turn more than once is read soon after. Many more would not stay in the
# processor's own memory.
@lru_cache(maxsize=32)
def _normalise(text: str) -> str:
    own = _CODE.sub(" ", text) if "```" in text else text
    own = _QUOTED_LINE.sub(" ", own) if ">" in own else own
    if own.isascii():
        return " ".join(own.replace("`", "'").lower().split())[:MAX_CHARS]
    folded = unicodedata.normalize("NFKC", own.translate(_APOSTROPHES)).casefold()
    spaced = _SPACE.sub(" ", folded.translate(_simplified())).strip()
    return _SPACE_BESIDE_CHINESE.sub("", spaced)[:MAX_CHARS]


@lru_cache(maxsize=1)
def _simplified() -> dict[int, str]:
    """The simplified form of each character that has another."""
    simple = OpenCC("t2s").convert
    table = {code: simple(chr(code)) for code in _HAN}
    return {code: form for code, form in table.items() if ord(form) != code} | _PARTICLES


def prepare() -> None:
    """Make ready what ``find`` needs, so that the first turn takes no longer than any other.

    It takes about half a second of processor time, once in a process.
    """
    _GATE.prepare()
    for rules in _COMPILED:
        rules.mask_gate.prepare()
    _simplified()
    learned.prepare()


def find(text: str, reply: str = "", *, learn: bool = True) -> tuple[Match, ...]:
    """The signals that ``text`` gives by its words, at most one of each kind.

    A turn that corrects does not confirm: "thanks, but that's wrong" is a correction only. In a
    short turn corrections, directives and confirmations are what the learned models say
    (``processors.reward.learned``), to whom a rule's match is one reason among others.

    Args:
        text: The turn.
        reply: The reply right before it; empty if it is not known.
        learn: Whether the learned models are asked. If not, rules alone decide, and what gives no
            signal by itself may correct by what it says of the same things as the reply
            (``processors.reward.contrast``).

    Returns:
        Matches in the order of ``Signal``; repetition is never among them.
    """
    plain = normalise(text)[:MAX_RULE_CHARS]
    if not plain:
        return ()
    ruled = by_rules(plain, reply)
    if learn and len(plain) <= MAX_LEARNED_CHARS:
        return _learned(plain, text, reply, ruled)
    stated = None if ruled else _stated(plain, text, reply)
    return ruled if stated is None else (stated,)


def by_rules(plain: str, reply: str = "") -> tuple[Match, ...]:
    """What the rules find in a turn, as ``normalise`` made it."""
    hits = [
        (index, hit)
        for index, begins in _GATE.possible(plain).items()
        if (hit := first(_PATTERNS[index], plain, begins)) is not None
    ]
    return _found(plain, reply, sorted(hits)) if hits else ()


def _found(plain: str, reply: str, hits: list[tuple[int, re.Match[str]]]) -> tuple[Match, ...]:
    """What rules find whose patterns have these first matches."""
    of_rules: dict[int, list[re.Match[str]]] = {}
    for index, hit in hits:
        of_rules.setdefault(_RULES[index], []).append(hit)
    found: dict[Signal, Match] = {}
    for number, matched in of_rules.items():
        signal = _COMPILED[number].signal
        if signal in found or (signal is Signal.CONFIRMATION and Signal.CORRECTION in found):
            continue
        unmasked = _unmasked(_COMPILED[number], plain, matched)
        if unmasked is not None:
            found[signal] = Match(signal, _quote(unmasked.group()))
    if Signal.CORRECTION in found and _ANSWER.match(plain) and asks(reply):
        return ()
    return tuple(found.values())


def _learned(plain: str, text: str, reply: str, ruled: tuple[Match, ...]) -> tuple[Match, ...]:
    language, sums = learned.sums(plain, text, reply)
    if not ruled and max(sums) < -learned.STATED:
        return ()
    by_signal = {match.signal: match for match in ruled}
    found: list[Match] = []
    for signal, total in zip(learned.SIGNALS, sums, strict=True):
        match = by_signal.pop(signal, None)
        if match is not None:
            total += learned.ruled(match.quote, plain)
        elif signal is Signal.CORRECTION and -learned.STATED <= total < 0:
            match = _stated(plain, text, reply)
            total = total if match is None else 0
        if total >= 0:
            found.append(match or Match(signal, _quote(learned.quote(plain, language, signal))))
    if found and found[0].signal is Signal.CORRECTION:
        found = [match for match in found if match.signal is not Signal.CONFIRMATION]
    return (*found, *by_signal.values())


def _stated(plain: str, text: str, reply: str) -> Match | None:
    """The correction that a statement is by what it says beside the reply."""
    stated = corrects(text, plain, reply) if reply else None
    return None if stated is None else Match(Signal.CORRECTION, _quote(stated))


_ANSWER = re.compile(
    r"(?:no|nope|nah)\b[,.! ]+(?:i|we|my|our|none|nobody|just)\b"
    r"(?! (?:said|meant|asked|told|want|need))"
    r"(?!.*\byou)|不[,。!]?我(?!要|说|问|不|没|是说|指)(?!.*你)"
)
"""How an answer begins where the reply asked something: the "no" in it corrects nothing."""


def _unmasked(rules: _Compiled, text: str, hits: list[re.Match[str]]) -> re.Match[str] | None:
    """The match that stands first in ``text`` once look-alikes are blanked out.

    Args:
        rules: The rule set.
        text: The text.
        hits: The first match of each pattern in the text as it is; patterns without any are not
            looked for again.
    """
    masked = _masked(rules, text)
    if masked != text:
        hits = [hit for hit in (old.re.search(masked) for old in hits) if hit is not None]
    return min(hits, key=lambda hit: hit.start(), default=None)


def _masked(rules: _Compiled, text: str) -> str:
    """``text`` with its look-alikes blanked out: the one that stands first, and so on after it.

    Of two that begin at one place, it is that of the mask that comes first.
    """
    possible = rules.mask_gate.possible(text)
    kept: list[str] = []
    end = 0
    ahead = [
        (hit.start(), index, hit)
        for index, begins in possible.items()
        if (hit := first(rules.masks[index], text, begins)) is not None
    ]
    heapify(ahead)
    while ahead:
        start, index, hit = heappop(ahead)
        if start >= end:
            kept.append(text[end:start])
            end = hit.end()
        later = first(rules.masks[index], text, possible[index], end)
        if later is not None:
            heappush(ahead, (later.start(), index, later))
    kept.append(text[end:])
    return " ~ ".join(kept)


def _quote(words: str) -> str:
    stripped = words.strip(" ,.;!?")
    return stripped if len(stripped) <= MAX_QUOTE_CHARS else stripped[: MAX_QUOTE_CHARS - 1] + "…"


MAX_TOOL_CHARS = 4_000
"""How much of a tool's answer is read: so much of its beginning, and of its end."""


def tool_error(text: str) -> str | None:
    """The words with which a tool or compiler says that a call failed; None if it did not.

    Read line by line: an error stands at the beginning of a line, in a status or in a field of
    its own; text that only speaks of errors is none.
    """
    ends = (
        text
        if len(text) <= 2 * MAX_TOOL_CHARS
        else (text[:MAX_TOOL_CHARS] + "\n" + text[-MAX_TOOL_CHARS:])
    )
    hit = TOOL_ERRORS.search(TOOL_MASKS.sub(" ~ ", ends))
    return None if hit is None else _quote(_SPACE.sub(" ", hit.group()))


_TOKEN = re.compile(r"[一-鿿]|[^\W_一-鿿]+")
EDGE_CHARS = 120
_DIGITS = re.compile(r"\d+")
_ASCII_BLANKS = "".join(chr(n).lower() if chr(n).isalnum() else " " for n in range(128))
"""What text of ASCII alone becomes for its tokens to be split: lower case, all else a blank."""

_ASCII_DIGITS = b"0123456789"


def tokens_of(plain: str) -> list[str]:
    """The words of a text that ``normalise`` made; of Chinese its characters."""
    if plain.isascii():
        return plain.translate(_ASCII_BLANKS).split()
    return _TOKEN.findall(plain)


def words(text: str) -> tuple[str, ...]:
    """The words of ``text`` as templates are compared: numbers alike, Chinese by character.

    Of a long text those of its first and of its last ``EDGE_CHARS``.
    """
    # Each reply is read for this once: there is nothing to remember.
    plain = _normalise.__wrapped__(text[: 4 * MAX_CHARS])
    if not plain.isascii() or len(plain.encode().translate(None, _ASCII_DIGITS)) < len(plain):
        plain = _DIGITS.sub("0", plain)
    if len(plain) > 2 * EDGE_CHARS:
        plain = f"{plain[:EDGE_CHARS]} {plain[-EDGE_CHARS:]}"
    return tuple(tokens_of(plain))


__all__ = [
    "MAX_CHARS",
    "MAX_RULE_CHARS",
    "RULE_SETS",
    "Match",
    "RuleSet",
    "Signal",
    "by_rules",
    "find",
    "normalise",
    "prepare",
    "tokens_of",
    "tool_error",
    "words",
]
