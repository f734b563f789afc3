"""Does a user ask again for what they asked before? In English and Chinese.

Theory of operation. Turns are cut into clauses, since "You described the trail. Are dogs allowed?"
asks again in its second. Of each clause the content words count, and what it asks for ("which",
"how"); words of emphasis ("or not", "到底") say that somebody asks again and are no content. Two
clauses are compared by rapidfuzz, as they are written and by their words (``_similarity``).

Two clauses are no repetition, however similar, if each has a content word that the other lacks
("the capital of France", "the capital of Spain"), or if one asks how and the other when.

Pure: no clock, no state, no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property

from rapidfuzz import fuzz

from processors.reward.signals import normalise, tokens_of

MIN_CONTENT = 4
"""Weight of content below which nothing is a repetition: a word is 2, a Chinese character 1."""

MIN_MARKED = 2
"""The same, where the user says that they ask again."""

HALF = 0.5
"""A question that is this part of an earlier one counts as all of it."""

MARKED = 0.75
"""Who says that they ask again needs no more than this share of their words in the earlier turn."""

MAX_CLAUSES = 8
MAX_TOKENS = 256
MAX_SLIPS = 4
"""More words that the other turn lacks are no slips of the pen, however similar to its words."""

SAME_WORD = 0.8
"""Similarity from which two words are one, misspelt or in another form."""

_FILLER_EN = (
    "a an the is are was were be been do does did has have had can could will would should i you me"
    " my your we us it its im id ive that thats this there here not one ones thing as if with"
    " from by about into to of in on at for and or but so please pls tell again more continue next"
    " another still right hello hi hey ok okay yes no go get got just then now know want wanna"
    " gonna like need say said asked ask repeat"
)
_FILLER_ZH = (
    "请的了吗呢吧啊呀我你您帮给再来个继续是好说遍能可以想要知道告诉问么那就还该用放嘛喔哦呗急只会"
    "得需须从这"
)
_FILLER = frozenset(_FILLER_EN.split()) | frozenset(_FILLER_ZH)
"""Words that may differ, come or go without making it another question."""

_ASKED_FOR = {
    word: word for word in ("what", "which", "who", "whom", "whose", "when", "where", "why", "how")
} | {"whats": "what", "whos": "who", "wheres": "where", "hows": "how"}
_NO_CONTENT = _FILLER | frozenset(_ASKED_FOR)

_SAME_WORDS = (
    ("如何", "怎么"),
    ("怎样", "怎么"),
    ("咋", "怎么"),
    ("怎么整", "怎么"),
    ("怎么办", "怎么"),
    ("怎么弄", "怎么"),
    ("怎么搞", "怎么"),
    ("啥", "什么"),
    ("多少钱", "多少"),
    ("价格", "多少"),
    ("价钱", "多少"),
    ("多长时间", "多久"),
    *((word, "何时") for word in ("什么时候", "啥时候", "几时", "几点")),
    ("为何", "为什么"),
    *((word, "丢") for word in ("遗失", "丢失", "弄丢")),
    ("报销", "报账"),
    ("购买", "买"),
    ("维修", "修"),
    ("修理", "修"),
    *((word, "天") for word in ("每天", "一天", "每日")),
    ("哪里", "哪"),
    ("哪儿", "哪"),
    *(
        (f"{word}不{word}", word)
        for word in ("能", "可", "会", "是", "要", "用", "该", "好", "行", "对")
    ),
    ("有没有", "有"),
    *((word, "") for word in ("一下", "一个", "一遍", "一本", "一首", "一些", "一点", "合适")),
)
_SYNONYMS = {
    word: first
    for first, *others in (
        ("buy", "purchase", "buying", "purchasing"),
        ("fix", "repair", "mend", "fixed", "repaired", "mended", "repairing", "fixing"),
        ("price", "cost", "costs", "prices", "how much is", "how much are"),
        ("when", "at what time", "what time"),
        ("what", "how much does", "how much do"),
        ("child", "kid", "kids", "children"),
        ("start", "begin", "begins", "starts"),
        ("end", "finish", "finishes", "ends"),
        ("close", "shut", "shuts", "closes"),
        ("phone", "mobile", "cellphone"),
        ("mom", "mum", "mother"),
        ("picture", "photo", "pic"),
        ("film", "movie"),
        ("store", "shop"),
        ("allowed", "permitted"),
    )
    for word in others
}
"""The first of words that mean the same, of each of the others."""

_SYNONYM = re.compile(r"\b(?:" + "|".join(sorted(_SYNONYMS, key=len, reverse=True)) + r")\b")
_AGAIN = re.compile(
    r"\b(?:or not?|yes or no|(?:once|one) more(?: time)?"
    r"|let me (?:try|ask|rephrase|repeat)[^:,.?!]*|(?:please )?just (?:tell|answer)(?: me)?"
    r"|that'?s all i (?:wanna|want to) know"
    r"|i(?:'m| am| was| just)? (?:asked|asking|meant|wanted to know)"
    r"|(?:my|the) question (?:is|was))\b"
    r"|到底|究竟|刚才(?:那个|的问题)?|我(?:问的是|是(?:要|想)问|想知道的是|只想知道)"
    r"|再[问说讲]一[次遍]"
)
"""With these words a user says that they ask again."""

_EMPHASIS = re.compile(
    r"\b(?:though|tho|thx|thanks|anyway|exactly|actually|really|simply|either|finally)\b|直接"
)
_BEGINS_TO_ASK = re.compile(
    r"(?:(?:so|ok|but|and|right|well)[ ,]+)*"
    r"(?:is|are|do|does|did|can|could|will|would|should|was|were|has|have|am)\b"
)
_ASKS_IN_CHINESE = re.compile(
    r"[吗呢嘛么]|什么|怎|如何|多[少久长大远]|几|哪|谁|为何|还是|(.)不\1|有没有"
)
_CLAUSE_END = re.compile(r"[.!;:?,。\n](?:(?<=[。\n])|(?<!,)(?=\s|$)|(?<=[^\x00-\x7f].))")


class _Clause:
    """A clause as it is compared; most of it is made when another has half of its words.

    Args:
        plain: As it was written, normalised.

    Attributes:
        rough: Its words that are neither filler nor interrogatives, emphasis among them.
        asks: Whether it asks something.
    """

    def __init__(self, plain: str) -> None:
        self.plain = plain
        tokens = frozenset(tokens_of(plain))
        self.rough = tokens - _NO_CONTENT
        self.asks = (
            "?" in plain
            or not tokens.isdisjoint(_ASKED_FOR)
            or _BEGINS_TO_ASK.match(plain) is not None
            or (not plain.isascii() and _ASKS_IN_CHINESE.search(plain) is not None)
        )

    @cached_property
    def marked(self) -> bool:
        """Whether it says that it asks again."""
        return _AGAIN.search(self.plain) is not None

    @cached_property
    def _found(self) -> list[str]:
        text = self.plain
        if not text.isascii():
            for variant, word in _SAME_WORDS:
                text = text.replace(variant, word)
        else:
            text = _SYNONYM.sub(lambda hit: _SYNONYMS[hit.group()], text)
        text = _EMPHASIS.sub(" ", _AGAIN.sub(" ", text))
        return tokens_of(text.replace("'", ""))[:MAX_TOKENS]

    @cached_property
    def asked_for(self) -> frozenset[str]:
        """Its interrogatives."""
        return frozenset(_ASKED_FOR[token] for token in self._found if token in _ASKED_FOR)

    @cached_property
    def tokens(self) -> list[str]:
        """Its content words, in order."""
        return [token for token in self._found if token not in _NO_CONTENT]

    @cached_property
    def words(self) -> frozenset[str]:
        """Its content words, each once."""
        return frozenset(self.tokens)


class _Turn:
    """A turn as it is compared.

    Args:
        text: As it was written.
    """

    def __init__(self, text: str) -> None:
        self.whole = _Clause(normalise(text))

    @cached_property
    def clauses(self) -> tuple[_Clause, ...]:
        """The first of its clauses; none if it is one clause."""
        plain = self.whole.plain
        ends = [match.end() for match in _CLAUSE_END.finditer(plain)]
        places = zip([0, *ends], [*ends, None], strict=True)
        parts = [part for part in (plain[a:b].strip() for a, b in places) if part]
        return tuple(map(_Clause, parts[:MAX_CLAUSES])) if len(parts) > 1 else ()


class Turns(dict[str, _Turn]):
    """The turns of a segment as they are compared, each made when it is first asked for.

    Each turn is compared with all replies before it, so it is read once for all of them.
    """

    def __missing__(self, text: str) -> _Turn:
        made = self[text] = _Turn(text)
        return made


def repeats(
    text: str, earlier: Sequence[str], threshold: float, turns: Turns | None = None
) -> float | None:
    """How closely ``text`` asks again for what one of ``earlier`` asked.

    Args:
        text: The later turn.
        earlier: Earlier turns of the user.
        threshold: Least similarity that counts, in [0, 1].
        turns: What is known of the turns of its segment.

    Returns:
        The largest similarity in [threshold, 1]; None if there is none.
    """
    known = Turns() if turns is None else turns
    later = known[text]
    best = max((_asks_again(later, known[other]) for other in earlier), default=0.0)
    return best if best >= threshold and best > 0.0 else None


def _asks_again(later: _Turn, before: _Turn) -> float:
    """The similarity of the two turns, or of a question in each, whichever is larger."""
    if later.whole.rough.isdisjoint(before.whole.rough):
        return 0.0
    if not (later.whole.asks and before.whole.asks):
        return _similarity(later.whole, before.whole)
    best = 0.0
    for mine in (later.whole, *later.clauses):
        if _apart(mine, before.whole) or not mine.asks:
            continue
        for theirs in (before.whole, *before.clauses):
            if theirs.asks:
                best = max(best, _similarity(mine, theirs, asks=True, marked=later.whole.marked))
    return best


def _apart(mine: _Clause, theirs: _Clause) -> bool:
    """Whether most words of each are not in the other: no slips of the pen explain that."""
    both = len(mine.rough & theirs.rough)
    return 2 * both < min(len(mine.rough), len(theirs.rough))


def _similarity(
    later: _Clause, before: _Clause, *, asks: bool = False, marked: bool = False
) -> float:
    """How similar two clauses are, in [0, 1].

    That is the largest of: the similarity of the clauses as they are written; of their content
    words, sorted; of a question with nothing that the earlier lacks, its part of the earlier's
    words (``HALF`` is all); of a question that says it asks again, the part of its words that the
    earlier has (``MARKED`` is all). The last alone is not 0 if each lacks a word of the other.
    """
    if _apart(later, before):
        return 0.0
    if later.asked_for and before.asked_for and later.asked_for.isdisjoint(before.asked_for):
        return 0.0
    mine, theirs = _weight(later.tokens), _weight(before.tokens)
    if min(mine, theirs) < (MIN_MARKED if marked else MIN_CONTENT):
        return 0.0
    new, gone = _lacking(later, before), _lacking(before, later)
    repeated = min(1.0, (1.0 - _weight(new) / mine) / MARKED) if marked else 0.0
    if new and gone:
        return repeated
    if asks and not new:
        repeated = max(repeated, min(1.0, (1.0 - _weight(gone) / theirs) / HALF))
    if min(mine, theirs) < MIN_CONTENT:
        return repeated
    whole = fuzz.ratio(later.plain, before.plain)
    content = fuzz.token_sort_ratio(" ".join(later.tokens), " ".join(before.tokens))
    return max(repeated, float(max(whole, content)) / 100.0)


def _weight(tokens: Sequence[str]) -> int:
    return 2 * len(tokens) - len([1 for token in tokens if "一" <= token[0] <= "鿿"])


def _lacking(clause: _Clause, other: _Clause) -> list[str]:
    """The words that have no counterpart in the other clause; numbers must be equal."""
    missing = [token for token in clause.tokens if token not in other.words]
    if len(missing) > MAX_SLIPS:
        return missing
    return [token for token in missing if not _has_counterpart(token, other.words)]


def _has_counterpart(token: str, others: Iterable[str]) -> bool:
    if len(token) < 4 or any(character.isdigit() for character in token):
        return False
    # A slip of the pen hardly ever spares the first letter: "ethanol", "methanol" are two words.
    return any(
        token[0] == other[0] and fuzz.ratio(token, other) >= 100 * SAME_WORD for other in others
    )


__all__ = ["MIN_CONTENT", "Turns", "repeats"]
