"""What a user's own words say about the reply before them, in English and Chinese.

Theory of operation. A turn is normalised (``normalise``) and read by tables of rules, one for
each signal and language. A rule set has two lists of regular expressions: ``masks`` are
phrases that only look like the signal ("no problem", "不错"); each is blanked out first.
``patterns`` are the signal; the first that still matches is it. Precision comes before
recall: a signal that is missed costs nothing, a wrong one teaches the opposite.

Repetition is no rule but a comparison (``repeats``): the user asks again what was answered.
What a tool answered is read by rules of its own (``tool_error``): did the call fail?

Pure: no clock, no state, no I/O.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from msgspec import Struct
from rapidfuzz import fuzz

from processors.reward.contrast import asks, corrects
from processors.reward.gate import Gate
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
        script: What a text must have for any rule to match.
        masks: All masks as one.
        patterns: The patterns, in order.
    """

    signal: Signal
    script: re.Pattern[str]
    masks: re.Pattern[str]
    patterns: tuple[re.Pattern[str], ...]


# A turn without any such character cannot match; 👍 and 👎 are in the rules of both.
_SCRIPTS = {"en": re.compile("[a-z👍👌💯👎]"), "zh": re.compile("[一-鿿👍👌💯👎]")}


def _compile(rules: RuleSet) -> _Compiled:
    return _Compiled(
        rules.signal,
        _SCRIPTS[rules.language],
        re.compile("|".join(f"(?:{mask})" for mask in (QUOTED, *rules.masks))),
        tuple(re.compile(pattern) for pattern in rules.patterns),
    )


_COMPILED = tuple(_compile(rules) for rules in RULE_SETS)
_PLACES = tuple(
    (number, place)
    for number, rules in enumerate(RULE_SETS)
    for place in range(len(rules.patterns))
)
"""Of each pattern, as the gate counts them, its rule set and its place there."""

_GATE = Gate([pattern for rules in RULE_SETS for pattern in rules.patterns])

_SIMPLIFIED = str.maketrans(
    "對錯謝請這問說還為樣決幫個時後讓沒會過結題寫來嗎麼應該給從啦咯囉",
    "对错谢请这问说还为样决帮个时后让没会过结题写来吗么应该给从了了了",
)
_APOSTROPHES = str.maketrans("’‘`´", "''''")
_CODE = re.compile(r"```.*?(?:```|$)", re.DOTALL)
_QUOTED_LINE = re.compile(r"^[^\S\n]*>.*$", re.MULTILINE)
_SPACE = re.compile(r"\s+")
_SPACE_BESIDE_CHINESE = re.compile(r"(?<=[一-鿿,。!?;]) (?=[一-鿿])|(?<=[一-鿿]) (?=[,。!?;])")


def normalise(text: str) -> str:
    """``text`` as the rules read it.

    Fenced code and quoted lines are dropped (they are not the user's words about the reply),
    compatibility forms folded (full-width punctuation becomes ASCII), case folded, common
    traditional characters made simplified, white space collapsed; the first ``MAX_CHARS``.
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
    spaced = _SPACE.sub(" ", folded.translate(_SIMPLIFIED)).strip()
    return _SPACE_BESIDE_CHINESE.sub("", spaced)[:MAX_CHARS]


def prepare() -> None:
    """Make ready what ``find`` needs, so that the first turn takes no longer than any other.

    It takes one to two seconds of processor time, once in a process.
    """
    _GATE.prepare()


def find(text: str, reply: str = "") -> tuple[Match, ...]:
    """The signals that ``text`` gives by its words, at most one of each kind.

    A turn that corrects does not confirm: "thanks, but that's wrong" is a correction only. What
    gives no signal by itself may correct by what it says of the same things as the reply
    (``processors.reward.contrast``).

    Args:
        text: The turn.
        reply: The reply right before it; empty if it is not known.

    Returns:
        Matches in the order of ``RULE_SETS``; repetition is never among them.
    """
    normalised = normalise(text)[:MAX_RULE_CHARS]
    possible = _possible(normalised)
    found: dict[Signal, Match] = {}
    for number in sorted(possible):
        rules = _COMPILED[number]
        if rules.signal in found or not rules.script.search(normalised):
            continue
        hit = _first(rules, normalised, possible[number])
        if hit is not None:
            found[rules.signal] = Match(rules.signal, _quote(hit.group()))
    if Signal.CORRECTION in found:
        if _ANSWER.match(normalised) and asks(reply):
            return ()
        found.pop(Signal.CONFIRMATION, None)
    if not found and reply:
        stated = corrects(text, normalised, reply)
        if stated is not None:
            return (Match(Signal.CORRECTION, _quote(stated)),)
    return tuple(found.values())


_ANSWER = re.compile(
    r"(?:no|nope|nah)\b[,.! ]+(?:i|we|my|our|none|nobody|just)\b"
    r"(?! (?:said|meant|asked|told|want|need))"
    r"(?!.*\byou)|不[,。!]?我(?!要|说|问|不|没|是说|指)(?!.*你)"
)
"""How an answer begins where the reply asked something: the "no" in it corrects nothing."""


def _possible(text: str) -> dict[int, list[int]]:
    """The patterns of each rule set that may match ``text``, as ``normalise`` made it."""
    found: dict[int, list[int]] = {}
    for index in _GATE.possible(text):
        number, place = _PLACES[index]
        found.setdefault(number, []).append(place)
    return found


def _first(rules: _Compiled, text: str, places: Iterable[int]) -> re.Match[str] | None:
    """The match that stands first in ``text`` once look-alikes are blanked out.

    Most texts match nothing: they are not even masked unless a pattern matches as they are.
    """
    patterns = [
        rules.patterns[place] for place in places if rules.patterns[place].search(text) is not None
    ]
    if not patterns:
        return None
    masked = rules.masks.sub(" ~ ", text)
    hits = (pattern.search(masked) for pattern in patterns)
    return min((hit for hit in hits if hit is not None), key=lambda hit: hit.start(), default=None)


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

_FILLER_EN = (
    "a an the is are was were be do does did can could would will should i you me my your we us"
    " it that this to of in on at for and or so please pls tell again more continue next another"
    " ok okay yes no go just then now hey hi hello know want like need say said asked ask repeat"
)
_FILLER_ZH = "请的了吗呢吧啊呀我你您帮给再来个继续是好说遍能可以想要知道告诉问么那就还"
_FILLER = frozenset(_FILLER_EN.split()) | frozenset(_FILLER_ZH)
"""Words that may differ, come or go without making it another question."""

_SAME_WORDS = (
    ("如何", "怎么"),
    ("怎样", "怎么"),
    ("啥", "什么"),
    *((word, "") for word in ("一下", "一个", "一遍", "一本", "一首", "一些", "一点")),
)
MIN_CONTENT = 4
"""Weight of content below which nothing is a repetition: a word is 2, a Chinese character 1."""

MAX_TOKENS = 256
MAX_SLIPS = 4
"""More words that the other turn lacks are no slips of the pen, however similar to its words."""

SAME_WORD = 0.8
"""Similarity from which two words are one, misspelt or in another form."""


class _Content:
    """A turn as it is compared.

    Args:
        text: As it was written.
        tokens: All its words, in order.
        words: Those among them that are content, each once.
    """

    __slots__ = ("_plain", "text", "tokens", "words")

    def __init__(self, text: str, tokens: list[str]) -> None:
        self.text = text
        self.tokens = tokens
        self.words = frozenset(tokens) - _FILLER
        self._plain: str | None = None

    @property
    def plain(self) -> str:
        """As ``normalise`` makes it."""
        if self._plain is None:
            self._plain = normalise(self.text)
        return self._plain

    def in_order(self) -> list[str]:
        """The content words."""
        return [token for token in self.tokens if token not in _FILLER]


class Turns(dict[str, _Content]):
    """The turns of a segment as they are compared, each made when it is first asked for.

    Each turn is compared with all replies before it, so it is read once for all of them.
    """

    def __missing__(self, text: str) -> _Content:
        made = self[text] = _content_of(text)
        return made


def repeats(
    text: str, earlier: Sequence[str], threshold: float, turns: Turns | None = None
) -> float | None:
    """How closely ``text`` asks again for what one of ``earlier`` asked.

    The similarity is rapidfuzz's, of the whole texts or of their content words, whichever is
    larger. Two things are no repetition however similar: texts with hardly any content ("go
    on"), and texts that each have a content word the other lacks ("the capital of France",
    "the capital of Spain").

    Args:
        text: The later turn.
        earlier: Earlier turns of the user.
        threshold: Least similarity that counts, in [0, 1].
        turns: What is known of the turns of its segment.

    Returns:
        The largest similarity in [threshold, 1]; None if there is none.
    """
    known = Turns() if turns is None else turns
    scores = [
        _similarity(known[text], known[other]) for other in earlier if not other.isspace() and other
    ]
    best = max((score for score in scores if score is not None), default=None)
    return best if best is not None and best >= threshold else None


def _content_of(text: str) -> _Content:
    if _is_plain(text):
        tokens = text.translate(_ASCII_BLANKS).split()
    else:
        content = normalise(text)
        if not content.isascii():
            for variant, word in _SAME_WORDS:
                content = content.replace(variant, word)
        tokens = _tokens(content)
    return _Content(text, tokens if len(tokens) <= MAX_TOKENS else tokens[:MAX_TOKENS])


def _is_plain(text: str) -> bool:
    """Whether normalising drops and folds nothing of ``text`` that would change its tokens."""
    return text.isascii() and len(text) <= MAX_CHARS and ">" not in text and "```" not in text


def _tokens(plain: str) -> list[str]:
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
    return tuple(_tokens(plain))


def _weight(tokens: Sequence[str]) -> int:
    return 2 * len(tokens) - len([1 for token in tokens if "一" <= token[0] <= "鿿"])


def _similarity(later: _Content, before: _Content) -> float | None:
    if _apart(later.words, before.words):
        return None
    mine, theirs = later.in_order(), before.in_order()
    if min(_weight(mine), _weight(theirs)) < MIN_CONTENT:
        return None
    if _lacking(later, before) and _lacking(before, later):
        return None
    whole = fuzz.ratio(later.plain, before.plain)
    content = fuzz.token_sort_ratio(" ".join(mine), " ".join(theirs))
    return float(max(whole, content)) / 100.0


def _apart(mine: frozenset[str], theirs: frozenset[str]) -> bool:
    """Whether most words of each are not in the other: no slips of the pen explain that."""
    return 2 * len(mine & theirs) < min(len(mine), len(theirs))


def _lacking(content: _Content, other: _Content) -> bool:
    """Whether a token has no counterpart in the other turn; numbers must be equal."""
    missing = content.words - other.words
    if len(missing) > MAX_SLIPS:
        return True
    return any(not _has_counterpart(token, other.words) for token in missing)


def _has_counterpart(token: str, others: Iterable[str]) -> bool:
    if len(token) < 4 or any(character.isdigit() for character in token):
        return False
    # A slip of the pen hardly ever spares the first letter: "ethanol", "methanol" are two words.
    return any(
        token[0] == other[0] and fuzz.ratio(token, other) >= 100 * SAME_WORD for other in others
    )


__all__ = [
    "MAX_CHARS",
    "MAX_RULE_CHARS",
    "MIN_CONTENT",
    "RULE_SETS",
    "Match",
    "RuleSet",
    "Signal",
    "Turns",
    "find",
    "normalise",
    "prepare",
    "repeats",
    "tool_error",
    "words",
]
