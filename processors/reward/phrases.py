"""Classes of phrases that a turn's features tell: what people ask, object, credit and report in.

A class is found where one of its expressions is. Most turns have none, and trying all takes longer
than anything else that is done with a turn. So with each expression stand its cues: words that a
turn must have for it to match, one of each group. Which cues a word is one of is found once for
each word (``Phrases.cues_of``); a turn's cues together say which expressions are tried. Cues only
save time: a test holds that no match is lost by them. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

MAX_KNOWN = 8_192
"""For so many sets of cues it is kept which expressions are tried."""

_PIECE = re.compile("[a-z]+|[^a-z]")


@dataclass(frozen=True)
class Phrase:
    """An expression with its cues.

    Args:
        pattern: As Python reads it, without flags.
        cues: Expressions. Wherever ``pattern`` matches, each of them matches in some piece of the
            turn: a run of the letters a to z, as long as it goes, or any other character.
    """

    pattern: str
    cues: tuple[str, ...]


_Look = Callable[[str], re.Match[str] | None]


class _Tried(dict[int, tuple[tuple[str, _Look], ...]]):
    """Which expressions are tried where there are these cues; found when it is first asked for.

    Args:
        looks: The cues that each needs, the name of its class, and what looks for it.
    """

    def __init__(self, looks: Sequence[tuple[int, str, _Look]]) -> None:
        super().__init__()
        self._looks = looks

    def __missing__(self, cues: int) -> tuple[tuple[str, _Look], ...]:
        if len(self) >= MAX_KNOWN:
            self.clear()
        made = self[cues] = tuple(
            (n, look) for needed, n, look in self._looks if not needed & ~cues
        )
        return made


class Phrases:
    """Classes of phrases, ready to be looked for. For use by any number of threads.

    Args:
        classes: By name.
    """

    def __init__(self, classes: Mapping[str, Sequence[Phrase]]) -> None:
        self.classes = classes
        phrases = [(name, phrase) for name, each in classes.items() for phrase in each]
        cues = dict.fromkeys(cue for _, phrase in phrases for cue in phrase.cues)
        self._cues = tuple((re.compile(cue), 1 << place) for place, cue in enumerate(cues))
        self._some_begins = re.compile(_either(cue for cue in cues if cue[0] == "^")).match
        self._some_has = re.compile(_either(cue for cue in cues if cue[0] != "^")).search
        bits = {cue.pattern: bit for cue, bit in self._cues}
        self._tried = _Tried(
            [
                (sum(bits[cue] for cue in phrase.cues), name, _look(phrase.pattern))
                for name, phrase in phrases
            ]
        )

    def cues_of(self, words: str) -> int:
        """The cues that there are in a part of a turn, as a sum of bits.

        Args:
            words: No part of a turn that begins or ends within a run of letters.
        """
        found = 0
        for piece in _PIECE.findall(words):
            # Most words are none.
            if self._some_begins(piece) is not None or self._some_has(piece) is not None:
                found |= sum(bit for cue, bit in self._cues if cue.search(piece) is not None)
        return found

    def found(self, plain: str, cues: int) -> list[str]:
        """The names of the classes in a turn; a name may be there twice.

        Args:
            plain: The turn.
            cues: Those of all its parts, joined by ``|``.
        """
        return [name for name, look in self._tried[cues] if look(plain) is not None]


def _either(patterns: Iterable[str]) -> str:
    """What matches where one of some expressions does; nowhere without any."""
    return "|".join(f"(?:{pattern})" for pattern in patterns) or "(?!)"


def _look(pattern: str) -> _Look:
    compiled = re.compile(pattern)
    return compiled.match if pattern.startswith("^") else compiled.search


_ASKING = (
    r"(?:what|what's|whats|how|how's|why|when|who|who's|which|is|are|does|do|did|can|could"
    r"|should|will|was|were|would|where|where's|any|has|have)"
)
_QUESTION = (
    r"(?:(?:and|so|but|ok|okay|hm+|lol|then|wait|thanks|great|now|also|oh|well|sorry)[ ,]+)*"
    + _ASKING
    + r"\b(?! (?:you |i |we )?(?:please|said|asked))"
)
_ASKS = rf"^{_ASKING}$"
_SAID = r"(?:said|told|suggested|mentioned|described|gave|wrote|showed|recommended|pointed)"
_TIP = (
    r"(?:tip|idea|trick|advice|hints?|suggestion|way|version|method|explanation|steps|fix|recipe"
    r"|wording|notes|timing)"
)
_CATCH = r"(?:catch|call|tip|thinking|shout|idea)"
_NUMBER = r"(?:number|answer|figure|thing|result|amount|price|total)"
_POINT = r"(?:penny|cent|letter|dot|point|minute|word)"
_PEOPLE = (
    r"(?:she|he|they|boss|teacher|prof|professor|editor|inspector|client|customer|wife"
    r"|husband|mom|mum|dad|mother|father|daughter|son|kids?|everyone|everybody|crowd|guests?"
    r"|judge|advisor|supervisor|doctor|vet|nurse|lawyer|mechanic|landlord|landlady|accountant"
    r"|board|class|audience|guy|colleagues?|girlfriend|boyfriend|friends?|neighbou?rs?"
    r"|students?|manager|team|family|group|grandma|grandpa|coach|examiner|reviewers?)"
)
_LIKED = (
    r"loved|liked|laughed|cried|accepted|approved|passed|signed|agreed|complimented|praised|nodded"
    r"|finally|impressed|happy|thrilled|delighted|raved|clapped|smiled|thanked|ate|devoured"
    r"|understood|wants?|wanted"
)
_DONE = (
    r"(?:finally|works|worked|working|fixed|solved|passed|gone|green|runs|ran|builds|compiles"
    r"|stopped|ordered|printed|posted|sent|filed|booked|signed|saved|success|sorted|cleared"
    r"|healed|fits)"
)

PHRASES_EN = Phrases(
    {
        "QUESTION": (
            Phrase(rf"^{_QUESTION}", (_ASKS,)),
            Phrase(rf"[,.;!?] {_QUESTION}", (_ASKS, "[,.;!?]")),
        ),
        "RETORT": (
            Phrase(
                r"\?\?|\b(?:isn't|aren't|wasn't|weren't|doesn't|don't|didn't|shouldn't|isnt|arent"
                r"|doesnt|surely|can't be)\b[^?.]*\?|really\?",
                (r"\?",),
            ),
            Phrase(r"where(?:'d| did) (?:you|that|the|this)", ("where$", "^(?:you|th)")),
            Phrase(
                r"wh(?:y|o|at|ere) (?:did|do|are|is|would|were|have|'d|made|told|asked|said)\b"
                r"[^?]{0,12}\byou",
                ("wh(?:y|o|at|ere)$", "^you"),
            ),
            Phrase(
                r"how (?:is|can|could|did)\b[^?]{0,8}(?:that|this|it|you)\b",
                ("how$", "^(?:is|can|could|did)$", "(?:that|this|it|you)$"),
            ),
            Phrase(
                r"which is it|what happened to|who (?:said|asked|told)",
                ("wh(?:ich|at|o)$", "^(?:it|happened|said|asked|told)"),
            ),
            Phrase(
                r"since when|how come|says who|i thought\b|are you (?:sure|kidding)",
                ("(?:since|how|says|i|are)$", "^(?:when|come|who|thought$|sure|kidding)"),
            ),
        ),
        "CREDIT": (
            Phrase(
                rf"\b(?:as|like|what|the \w+|way|how) (?:you|u)(?:'d| had)? {_SAID}",
                ("^(?:you|u)$", f"^{_SAID}"),
            ),
            Phrase(rf"\b(?:your|ur) {_TIP}", ("^(?:your|ur)$", f"^{_TIP}")),
            Phrase(
                r"\byou (?:were right|nailed|saved|rock|deserve)",
                ("^you$", "^(?:were|nailed|saved|rock|deserve)"),
            ),
            Phrase(
                rf"(?:good|great|nice) {_CATCH}|right call",
                ("(?:good|great|nice|right)$", f"^{_CATCH}"),
            ),
        ),
        "MATCH": (
            Phrase(
                r"\b(?:match(?:es|ed)?|agrees?|squares with|tall(?:y|ies)|lines up|adds up"
                r"|spot on)\b",
                ("^(?:match(?:es|ed)?|agrees?|squares|tall(?:y|ies)|lines|adds|spot)$",),
            ),
            Phrase(rf"\bsame {_NUMBER}\b", ("^same$", f"^{_NUMBER}$")),
            Phrase(r"\b(?:exactly|just) what\b", ("^(?:exactly|just)$", "^what$")),
            Phrase(rf"\bto the {_POINT}\b", ("^to$", f"^{_POINT}$")),
            Phrase(r"\bthat'?s (?:the one|it)\b", ("^thats?$", "^(?:one|it)$")),
        ),
        "PRAISE": (
            Phrase(
                rf"\b{_PEOPLE}\b[^,.;]{{0,30}}\b(?:{_LIKED}|said (?:yes|it's|it was|that's)"
                r"|asked for|got it)\b",
                (f"^{_PEOPLE}$", f"^(?:{_LIKED}|said|asked|got)$"),
            ),
        ),
        "RESULT": (
            Phrase(rf"\b{_DONE}\b", (f"^{_DONE}$",)),
            Phrase(
                r"\b(?:no more|at last|first try|in one go)\b",
                ("^(?:no|at|first|in)$", "^(?:more|last|try|go)$"),
            ),
        ),
    }
)
"""What turns ask, object, credit, compare and report in: each is a feature where it is found."""

PHRASES_ZH = Phrases(
    {
        "QUESTION": (
            Phrase(
                r"哪(?:一?[年天个种家里位些款本首部]|儿|里)|为啥|几[点年岁个天号次]"
                r"|多[少久大长远高重]|啥[时意]|如何|来着",
                ("[哪啥几多如来]",),
            ),
            Phrase(
                r"为什么|什么时候|是什么|什么意思|怎么(?:办|弄|做|用|说|读|走|去|样)|怎么写的",
                ("么", "[什怎]"),
            ),
            Phrase(r"[有能是要可会]不[有能是要可会]|有没有", ("[有能是要可会]", "[不没]")),
            Phrase(r"[吗呢么不]\??$", ("[吗呢么不]",)),
        ),
        "RETORT": (
            Phrase(
                r"(?:怎么|怎|咋)(?:会|能|变|成|还|又|写|是|给|就|没|也|都|可能|搞|整|翻|排|把|行|跑)",
                ("[怎咋]",),
            ),
            Phrase(
                r"哪(?:来|有|要|门子|能|会|是|叫|算)|凭[啥什]|什么叫|叫啥"
                r"|谁(?:要|让|叫|说|看|家|跟)|何来",
                ("[哪凭叫谁何]",),
            ),
        ),
        "CREDIT": (
            Phrase(
                r"[按照跟听用依同][你您]|[你您]那"
                r"|[你您](?:那|这)?个?[^,。]{0,4}(?:说|给|教|编|写|讲|算|改|推荐|列|提醒|划|画)的",
                ("[你您]",),
            ),
            Phrase(
                r"[这那]招|这版|那句|多亏|果然|原来|还真|真[行管灵神准好]", ("[招版句亏果原真]",)
            ),
        ),
        "MATCH": (
            Phrase(
                r"对得?上|一[模分毫个][^,。]{0,2}[样差]|不差|[跟和同][^,。]{1,10}一样|符合|吻合"
                r"|没[错误]|[正刚]好",
                ("[对一不符吻没正刚]", "[上样差合错误好]"),
            ),
        ),
        "PRAISE": (
            Phrase(
                r"(?:老师|医生|大夫|律师|老板|领导|客户|客人|客服|甲方|面试官|教授|婆|妈|爸|媳妇|老婆|老公"
                r"|师傅|柜台|主任|教练|同事|同学|邻居|买家|卖家|物业|导师|裁判|孩子|娃|老人|爷|奶|家里|全家"
                r"|大家|台下|都|人家|对方|他|她)[^,。]{0,8}(?:夸|赞|点头|喜欢|满意|同意|批了|看懂|听懂|爱"
                r"|抢|笑|吃光|没一?个|认了|说[^,。]{0,3}(?:好|对|行|专业|自然|顺|清|有|规范|地道|一样|靠谱)"
                r"|讲[^,。]{0,2}(?:一样|的一)|给了?[^,。]{0,3}[满甲优a高大])",
                (
                    "[师医夫板导客方官授婆妈爸媳公柜主练事学邻家物裁孩娃老爷奶台都他她]",
                    "[夸赞点喜满意批懂爱抢笑吃没认说讲给]",
                ),
            ),
        ),
        "RESULT": (
            Phrase(
                r"(?:不|没再?|没有)[^,。]{1,4}了"
                r"|(?:好|过|成|通|亮|行|顺|退|消|灭|稳|起来|出来|下来|上去|跑|到账|签|收|中)了",
                ("了", "[不没好过成通亮行顺退消灭稳来去跑账签收中]"),
            ),
            Phrase(r"跑通|通过|搞定|满分|录取|绿灯|全过", ("[通定分取灯过]",)),
        ),
    }
)
"""The same in Chinese, as ``signals.normalise`` and ``features`` make it."""

__all__ = ["PHRASES_EN", "PHRASES_ZH", "Phrase", "Phrases"]
