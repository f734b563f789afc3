"""What a user's own words say about the reply before them, in English and Chinese.

Theory of operation. A turn is normalised (``normalise``) and read by tables of rules, one for
each signal and language. A rule set has two lists of regular expressions: ``masks`` are
phrases that only look like the signal ("no problem", "不错"); each is blanked out first.
``patterns`` are the signal; the first that still matches is it. Precision comes before
recall: a signal that is missed costs nothing, a wrong one teaches the opposite.

Repetition is no rule but a comparison (``repeats``): the user asks again what was answered.

Pure: no clock, no state, no I/O.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from rapidfuzz import fuzz

MAX_CHARS = 2_000
"""How much of a turn is compared with earlier ones."""

MAX_RULE_CHARS = 600
"""How much of a turn the rules read; what people say about a reply stands at its beginning."""

MAX_QUOTE_CHARS = 60


class Signal(StrEnum):
    """What a user's turn can say about the reply before it."""

    REPETITION = "repetition"
    CORRECTION = "correction"
    CONFIRMATION = "confirmation"
    DIRECTIVE = "directive"
    DETAILS = "details"


@dataclass(frozen=True, slots=True)
class RuleSet:
    """The rules of one signal in one language, read on normalised text.

    Args:
        signal: What a match means.
        language: ``en`` or ``zh``; both are tried on every turn.
        masks: Look-alikes, blanked out before the patterns are tried.
        patterns: Any match is the signal.
    """

    signal: Signal
    language: str
    masks: tuple[str, ...]
    patterns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """A signal found in a turn, with the words that gave it away."""

    signal: Signal
    quote: str


_IS = r"(?:'?s| is| was|'?re| are| were)"
_IT = r"\b(?:that|this|it)"
_CLAUSE = r"(?:^|[.,;:!?] ?|\bplease |\bpls |\bjust )"
_DOUBT_EN = r"\b(?:if|whether|unless|in case|why|when|how|until|once)"

CORRECTION_EN = RuleSet(
    Signal.CORRECTION,
    "en",
    masks=(
        r"\bno (?:problem|worries|need|thanks|thank you|rush|doubt|issues?|idea|matter|offence)\b",
        _IT + _IS + r" (?:fine|ok|okay|good|all|enough|great|perfect|everything|alright)\b",
        _DOUBT_EN + r"(?: \w+){0,3} (?:that|this|it|you|answer|code)\b[^,.!?;]*",
        r"(?:\bnot|n'?t|\bnothing|\bnever)(?:'?s| is| was)?(?: \w+)? wrong\b",
        r"\bwrong (?:to|with|that)\b",
        r"\b(?:what|something|anything|everything|who)(?:'?s| is| was| went| goes)? wrong\b",
        r"\b(?:true|right|correct) or (?:false|wrong|incorrect)\b",
        r"\bfalse (?:positives?|alarm|friends?|negatives?)\b",
        r"\bi (?:didn'?t|did not|never) (?:mean|want) to\b",
        r"(?:did|does)(?:n'?t| not) work (?:before|until|at first|earlier|yesterday)\b",
        r"\bnot (?:only|what you know)\b",
        r"\b(?:he|she|they|who|people|some|many) (?:said?|says|think|thinks|claims?)\b[^,.!?;]*",
    ),
    patterns=(
        r"\b(?:that|this|it|answer|code|result|output|formula|date|number|link|translation|example)"
        + _IS
        + r"(?: \w+ly| still| just| all| also| so)*"
        r" (?:wrong|incorrect|inaccurate|false|untrue|mistaken|nonsense|outdated"
        r"|not (?:\w+ )?(?:right|correct|true|accurate|working|what|how))\b",
        _IT + r" (?:is|was)n'?t (?:\w+ )?(?:right|correct|true|accurate|working|what|how)\b",
        r"\byou(?:'?re| are| were) (?:\w+ )?(?:wrong|mistaken|incorrect)\b",
        r"\byou (?:\w+ )?(?:misunderstood|misread|misheard|forgot|ignored|missed (?:the|my|a)"
        r"|made (?:an?|another|the same) (?:\w+ )?(?:mistake|error)"
        r"|got (?:it|that|this|the \w+) wrong)\b",
        _IT + r" (?:still |also )?(?:does|did)(?:n'?t| not)"
        r" (?:work|help|answer|compile|run|solve|fix|make sense)\b",
        r"^(?:no|nope|nah)\b[,.!; ]+(?:i|we) (?:meant|said|asked|wants?|wanted|needs?|needed)\b",
        r"^(?:no|nope|nah)\b[,.!; ]+(?:it|that|this|he|she|they)" + _IS + r"\b",
        r"^(?:no|nope|nah)\b[,.!; ]+not (?:that|this|the|what)\b",
        r"\bnot (?:\w+ )?what i (?:asked|meant|wanted|said|needed|was (?:asking|looking))\b",
        r"\bi (?:didn'?t|did not|never) (?:ask|asked|say|said|mean|meant)\b",
        r"\bi (?:meant|said|asked for|wanted) [^.!?;]{1,80}, not\b",
        r"^(?:wrong|incorrect|false)\b(?=\s*(?:[.,!;]|again|answer|$))",
        r"^not (?:quite |really |exactly )?(?:right|correct|true)\b",
        r"\bstill (?:wrong|incorrect|broken|failing|not (?:working|right|correct))\b",
        r"\bstill (?:get|gets|getting|see|throws?|fails? with)\b[^.!?;]{0,30}\berror\b",
        r"\bwrong again\b|\b(?:bad|terrible|useless|wrong) answer\b",
        _IT + r"(?:" + _IS + r" (?:not helpful|unhelpful|useless)| makes no sense)\b",
        r"\byou (?:didn'?t|did not|still haven'?t) answer",
        r"^👎+$",
    ),
)

CORRECTION_ZH = RuleSet(
    Signal.CORRECTION,
    "zh",
    masks=(
        r"对不对|是不是|不是吗|行不行|不对[称等外]",
        r"(?:哪里|哪儿|哪一步|什么地方|有什么|有没有|为什么|为何)[^,。!?;]{0,6}(?:不对|不正确|错了?|不行)",
        r"没错|不错|错过|错综|错别字",
        r"我(?:自己|刚才|之前|好像|可能)*(?:搞|弄|写|看|记|理解|打|说|算)?错了",
        r"(?:如果|要是|万一|假如)[^,。!?;]{0,10}(?:不对|不正确|不行|没用|错了?)",
        r"(?:不对|不正确|不行|错了?|没用)(?:吗|么|的话|怎么办)",
        r"^不[,]?(?:谢谢|用|客气|必|需要)[^,。!?;]*",
        r"没有?用(?:过|到|户|的)|用不了(?:多|几)",
    ),
    patterns=(
        r"不对|不正确|不准确|不[太大]对|回答是?错误|没有?回答我",
        r"(?:你|这|那|答案|结果|代码|公式|翻译|日期|数字)[^,。!?;]{0,6}(?:错了|错的|有误)",
        r"(?:理解|搞|弄|写|算|答|说|翻译|拼|看)错(?:了|[,。!]|$)",
        r"^错(?:了|误)?(?=[,。!;]|$)|还是错|又错|全错",
        r"答非所问|文不对题",
        r"不是(?:这样|这个意思|那个意思|我(?:想|要|问|说|需))|^不是这个(?=[,。!;]|$)",
        r"^不(?:是)?,",
        r"我(?:说|问|要|指|想要|想问|需要)的(?:不)?是",
        r"我没有?(?:问|说|要你|让你)|我不是(?:问|说|要|让你)",
        r"(?:还是|仍然|依然|依旧)(?:不行|不对|报错|有错|没用|失败|不能用|出错)",
        r"没有?解决|没有?用(?=[,。!;]|$)",
        r"跑不(?:通|起来)|(?:运行|使用|编译|用)不了",
        r"不行(?=[,。!;]|$)",
        r"(?:不|没有?)(?:符合|满足)我?的?(?:要求|需求|需要)",
        r"你(?:误会|误解|弄反|搞反|漏|忘)了",
        r"^👎+$",
    ),
)

_PRAISE = (
    r"(?:perfect|excellent|awesome|brilliant|wonderful|amazing|fantastic|great|exactly|correct"
    r"|spot on|nice one)"
)

CONFIRMATION_EN = RuleSet(
    Signal.CONFIRMATION,
    "en",
    masks=(
        r"(?:\b(?:if|whether|how|why|when|until|unless|hope|hopefully|wish|sure|check|ensure"
        r"|explain|assuming|doubt|think|not|never|because|know|way)|n'?t)"
        r"(?: \w+){0,2} (?:that|this|it|everything|you)\b[^,.!?;]*",
        r"(?:^|[.,!?;] ?)(?:does|did|is|was|has|can|could|will|would)(?: \w+){0,2}"
        r" (?:that|this|it|everything)\b[^,.!?;]*",
        r"\bworks (?:by|as|like(?! a charm)|in|on|when|at|under)\b",
        r"\b(?:works|correct|right|perfect|makes sense)\s*\?",
        r"\bmakes sense to\b|\buseful (?:for|to|when|in)\b|\bhelpful (?:for|to|if)\b",
        r"\bright (?:there|here|now|next|before|after|angle|side|hand)\b",
        r"\bworked (?:\w+ )?(?:before|until|yesterday|earlier)\b|\b(?:was|were|been) working\b",
        r"^"
        + _PRAISE
        + r"\b.*\b(?:but|however|unfortunately|another (?:error|bug|problem)|broken|still)\b",
        r"(?:\bnot|n'?t|\bless|\bmore|\bmost) (?:\w+ )?(?:helpful|working)\b",
    ),
    patterns=(
        r"\b(?:that|this|it|everything|all)(?: \w+ly| now| all| just)*"
        r" (?:works?|worked|fixed (?:it|that|this)|solved (?:it|that|my|the)"
        r"|did (?:it|the trick)|does (?:it|the trick)|makes (?:perfect |more |a lot of )?sense"
        r"|clears? (?:it|that|things|this) up|answer(?:s|ed) my question)\b",
        r"\b(?:that|this)(?: \w+ly)? help(?:s|ed)\b|\bi (?:understand|see) now\b",
        _IT + _IS + r"(?: exactly| just)? what i (?:wanted|needed|meant)\b",
        r"\bexactly (?:what|the \w+) i (?:needed|need|wanted|want|was looking for|meant|asked)\b",
        _IT + _IS + r"(?: \w+ly| very| so| just)* (?:perfect|great|excellent|awesome|amazing"
        r"|brilliant|helpful|wonderful|fantastic|correct|right|spot on|useful|it|working)\b",
        r"\bwork(?:s|ed|ing) (?:now|perfectly|great|fine|like a charm|well|beautifully|for me)\b",
        r"\b(?:very|so|really|super|extremely|incredibly) helpful\b",
        r"\byou(?:'?re| are|'?ve been| were) (?:absolutely |totally |completely )?"
        r"(?:right|correct|the best|a (?:lifesaver|genius))\b",
        r"\b(?:problem|issue|bug|error)(?:'?s| is)(?: now)? (?:solved|fixed|gone|resolved)\b",
        r"\b(?:well done|(?:good|great|nice) (?:job|work|answer)|nicely done|i love (?:it|this))\b",
        r"^(?:ok(?:ay)?[,. ]+|ah[,. ]+|oh[,. ]+)?(?:got it|i get it now|now i get it)\b"
        r"(?! (?:wrong|from|on|in|at))",
        r"^(?:(?:ok(?:ay)?|great|perfect|awesome|cool|nice|excellent|brilliant|yes|yep|yeah|ah|oh)"
        r"[,.! ]+)*(?:many thanks|thanks|thank you|thx|ty|cheers)"
        r"(?: so much| very much| a lot| a million| again| for (?:the|your) \w+)*[.! ]*$",
        r"^(?:(?:ok(?:ay)?|yes|oh|ah|wow)[,.! ]+)?" + _PRAISE + r"(?=\s*(?:[.!,;]|$)| thank)",
        r"^[👍👌💯]+$",
    ),
)

_GOOD_ZH = r"(?:可以了|搞定|解决|成功|能用|有用|有帮助|管用|好用|明白|懂|清楚|完美|正确|理解|对的)"

CONFIRMATION_ZH = RuleSet(
    Signal.CONFIRMATION,
    "zh",
    masks=(
        r"(?:不|没有?|未|无法|怎么|如何|怎样|才|是否|如果|要是|只要|希望|等)[^,。!?;]{0,6}"
        + _GOOD_ZH
        + r"了?",
        _GOOD_ZH + r"了?(?:吗|么|嘛|没|吧\?|的话|一半|\?|一个|的(?:做法|方法|答案))",
        r"^(?:没错|正确|对的|完美|太好了|太棒了|很好|非常好|不错)[^。!?]*(?:但|不过|可是|然而|只是)",
    ),
    patterns=(
        r"可以了(?!解)|可以用了|搞定了?|解决了(?=[,。!;~]|$|谢|多谢|感谢|我的|这个问题)",
        r"(?:这次|这下|终于)(?:对|好|行)了",
        r"成功了|(?:运行|编译|测试|安装)成功|跑通了|能[用跑]了|好使了",
        r"(?:很|非常|挺|太|真|十分|特别|确实|对我)(?:有用|有帮助|管用|好用)|帮了?我?(?:大忙|很大的忙)",
        r"正是我(?:想|需|要|找)|就是(?:这样|这个|我想要的)(?=[,。!;了]|$)",
        r"^(?:没错|正确|对的|对对对|完全正确|完美|太好了|太棒了|很好|非常好|好极了|太赞了|不错|厉害)"
        r"(?=[,。!;~]|$|谢|多谢|感谢)",
        r"(?:明白|懂|清楚)了(?=[,。!;~]|$|谢|多谢|感谢)",
        r"(?:回答|解释|讲|说)得?(?:很|非常|真|太)(?:好|棒|清楚|详细|准确|到位)|你?说得?对(?=[,。!;]|$)",
        r"效果(?:很好|不错|非常好)",
        r"^(?:(?:好[的了]?|嗯+|ok|行|明白|可以|对|是的)[,。! ]*)?"
        r"(?:谢谢|多谢|感谢|谢了|(?:非常|十分|太)感谢)(?:你|您|啦|了|的(?:帮助|回答|解答)|[!。~])*$",
        r"^[👍👌💯]+$",
    ),
)

DIRECTIVE_EN = RuleSet(
    Signal.DIRECTIVE,
    "en",
    masks=(
        r"\b(?:should|can|could|may|do|would|if|how|why|when|what)(?: \w+)? (?:i|we|they|people)"
        r" (?:\w+ )?\w+[^.!?;]*",
        r"\bnext time (?:i|we|he|she|they)\b",
        r"\bi(?:'?ll| will|'?d)? (?:\w+ )?use\b[^.!?;]*",
    ),
    patterns=(
        r"\buse [^.!?;]{1,60}? instead\b",
        r"\binstead of [^.!?;]{1,80}?,? (?:please )?(?:use|write|say|give|try)\b",
        r"\bplease (?:use|stick to)\b|(?:^|[.,;:!?] ?)use [^.!?;]{1,60} please\b",
        _CLAUSE + r"(?:do not|don'?t|never|always|avoid|stop)"
        r" (?:us(?:e|ing)|writ(?:e|ing)|add(?:ing)?|includ(?:e|ing)|repeat(?:ing)?|mention(?:ing)?"
        r"|explain(?:ing)?|answer(?:ing)?|reply(?:ing)?|say(?:ing)?|giv(?:e|ing)|mak(?:e|ing)"
        r"|put(?:ting)?|start(?:ing)?|end(?:ing)?|call(?:ing)?|apologi[sz](?:e|ing))\b",
        _CLAUSE
        + r"(?:now )?(?:answer|reply|respond|write|rewrite|say|explain|format|output|return)"
        r"(?: it| that| this| everything)? (?:only |always )?(?:in|as|using) ",
        r"\b(?:keep|make) (?:it|this|that|them|(?:your |the )?(?:answers?|repl(?:y|ies)))"
        r" (?:\w+ )?(?:short|shorter|brief|simple|simpler|concise|formal|informal|longer|polite"
        r"|friendl(?:y|ier)|under|below|more|less)\b",
        r"\b(?:from now on|going forward|next time)\b",
        r"(?:^|[.;!] ?|\bplease |\byou should )first,?"
        r" (?!of all|i\b|we\b|he\b|she\b|they\b|it\b|the\b|time|name|day)\w+[^.!?]{1,160}?\bthen\b",
        r"\byou should(?:'?ve| have)? (?:\w+ )?(?:used?|be|been|answer(?:ed)?|check(?:ed)?"
        r"|ask(?:ed)?|mention(?:ed)?|include[d]?|start(?:ed)?)\b",
        _CLAUSE + r"be (?:more|less|brief|concise|polite|formal|honest|specific)\b",
        r"\bi(?:'?d| would)? (?:prefer|rather have)\b",
    ),
)

DIRECTIVE_ZH = RuleSet(
    Signal.DIRECTIVE,
    "zh",
    masks=(
        r"请问|请用餐|先生|先进|先后|先前|优先|首先",
        r"要不要[^,。!?;]*",
        r"(?:怎么|如何|怎样|能否|能不能|可不可以|可以|是否|我想|我)(?:\w{0,4})"
        r"(?:用|改用|换成|改成|改为|换用)[^,。!?;]*",
        r"(?:我|我们|他|她|他们|大家)先[^,。!?;]*[,。;]?(?:然后|再|接着)",
        r"(?:我|我们|是不是|是否)应该[^,。!?;]*",
    ),
    patterns=(
        r"请(?:用|以|改|换|使用|按|只|不要|别|务必|始终|直接|尽量|先)",
        r"改用|换成|改成|改为|换用|而不是",
        r"用(?:中文|英文|英语|日语|法语|表格|列表|[a-z+#]{2,12})[^,。!?;]{0,6}"
        r"(?:回答|回复|写|说|输出|表示|实现)|^用(?:中文|英文|英语)(?=[,。!;]|$)",
        r"(?:^|[,。!;])(?:请|你应该|应该|你|要)?先[^,。!?;]{1,40}[,。;]?(?:然后|再|接着)",
        r"不要再?(?:用|使用|写|加|添加|说|给|出现|重复|输出|解释|超过|太)",
        r"(?:^|[,。!;])别再?(?:用|写|加|说|给|重复|输出|解释|太)",
        r"(?:以后|今后|下次|从现在开始|接下来)(?:请|都|要|不要|别|记得|回答|回复|直接)",
        r"应该(?:用|改|先|直接|使用)",
        r"(?:简短|简洁|简单|正式|口语化|礼貌|通俗|短|长)(?:一点|一些|点)",
        r"(?:控制在|不要?超过)[\d一二三四五六七八九十百千]+",
    ),
)

DETAILS_EN = RuleSet(
    Signal.DETAILS,
    "en",
    masks=(r"\b(?:no|without|less|fewer)(?: \w+)? (?:details?|examples?)\b",),
    patterns=(
        r"\b(?:can|could|would) you (?:please )?(?:explain|elaborate|expand|clarify|go deeper)\b",
        r"\btell me more\b|\bmore details?\b|\belaborate\b|\bin more (?:depth|detail)\b",
        r"\bwhat (?:do|did) you mean\b|\b(?:give me|show me|have) an example\b",
    ),
)

DETAILS_ZH = RuleSet(
    Signal.DETAILS,
    "zh",
    masks=(r"(?:不用|不必|不要|无需|别)[^,。!?;]{0,4}(?:详细|具体|展开|举例)",),
    patterns=(
        r"详细(?:说|讲|解释|介绍|一点|一些|点)|具体(?:说|讲|解释|一点|一些|怎么|点)",
        r"展开(?:说|讲|一下)|举个?例|进一步(?:说|讲|解释)|多(?:说|讲)(?:一点|一些|点)",
        r"(?:是)?什么意思",
    ),
)

RULE_SETS: tuple[RuleSet, ...] = (
    CORRECTION_EN,
    CORRECTION_ZH,
    CONFIRMATION_EN,
    CONFIRMATION_ZH,
    DIRECTIVE_EN,
    DIRECTIVE_ZH,
    DETAILS_EN,
    DETAILS_ZH,
)


@dataclass(frozen=True, slots=True)
class _Compiled:
    signal: Signal
    script: re.Pattern[str]
    masks: re.Pattern[str]
    patterns: re.Pattern[str]


# A turn without any such character cannot match; 👍 and 👎 are in the rules of both.
_SCRIPTS = {"en": re.compile("[a-z👍👌💯👎]"), "zh": re.compile("[一-鿿👍👌💯👎]")}


def _compile(rules: RuleSet) -> _Compiled:
    return _Compiled(
        rules.signal,
        _SCRIPTS[rules.language],
        re.compile("|".join(f"(?:{mask})" for mask in rules.masks)),
        re.compile("|".join(f"(?:{pattern})" for pattern in rules.patterns)),
    )


_COMPILED = tuple(_compile(rules) for rules in RULE_SETS)

_SIMPLIFIED = str.maketrans(
    "對錯謝請這問說還為樣決幫個時後讓沒會過結題寫來嗎麼應該給從",
    "对错谢请这问说还为样决帮个时后让没会过结题写来吗么应该给从",
)
_APOSTROPHES = str.maketrans("’‘`´", "''''")
_CODE = re.compile(r"```.*?(?:```|$)", re.DOTALL)
_QUOTED_LINE = re.compile(r"^\s*>.*$", re.MULTILINE)
_SPACE = re.compile(r"\s+")
_SPACE_BESIDE_CHINESE = re.compile(r"(?<=[一-鿿,。!?;]) (?=[一-鿿])|(?<=[一-鿿]) (?=[,。!?;])")


def normalise(text: str) -> str:
    """``text`` as the rules read it.

    Fenced code and quoted lines are dropped (they are not the user's words about the reply),
    compatibility forms folded (full-width punctuation becomes ASCII), case folded, common
    traditional characters made simplified, white space collapsed; the first ``MAX_CHARS``.
    """
    return _normalise(text[: 4 * MAX_CHARS])


# A turn is read once for each reply before it: remembered for as long as its segment takes.
@lru_cache(maxsize=256)
def _normalise(text: str) -> str:
    own = _QUOTED_LINE.sub(" ", _CODE.sub(" ", text))
    folded = unicodedata.normalize("NFKC", own.translate(_APOSTROPHES)).casefold()
    spaced = _SPACE.sub(" ", folded.translate(_SIMPLIFIED)).strip()
    return _SPACE_BESIDE_CHINESE.sub("", spaced)[:MAX_CHARS]


def find(text: str) -> tuple[Match, ...]:
    """The signals that ``text`` gives by its words, at most one of each kind.

    A turn that corrects does not confirm: "thanks, but that's wrong" is a correction only.

    Returns:
        Matches in the order of ``RULE_SETS``; repetition is never among them.
    """
    normalised = normalise(text)[:MAX_RULE_CHARS]
    found: dict[Signal, Match] = {}
    for rules in _COMPILED:
        if rules.signal in found or not rules.script.search(normalised):
            continue
        hit = rules.patterns.search(rules.masks.sub(" ~ ", normalised))
        if hit is not None:
            found[rules.signal] = Match(rules.signal, _quote(hit.group()))
    if Signal.CORRECTION in found:
        found.pop(Signal.CONFIRMATION, None)
    return tuple(found.values())


def _quote(words: str) -> str:
    stripped = words.strip(" ,.;!?")
    return stripped if len(stripped) <= MAX_QUOTE_CHARS else stripped[: MAX_QUOTE_CHARS - 1] + "…"


_TOKEN = re.compile(r"[一-鿿]|[^\W_一-鿿]+")
_FILLER_EN = (
    "a an the is are was were be do does did can could would will should i you me my your we us"
    " it that this to of in on at for and or so please pls tell again more continue next another"
    " ok okay yes no go just then now hey hi hello know want like need say said asked ask repeat"
)
_FILLER_ZH = "请的了吗呢吧啊呀我你您帮给一下再来个继续是好说遍能可以想要知道告诉问么那就还"
_FILLER = frozenset(_FILLER_EN.split()) | frozenset(_FILLER_ZH)
"""Words that may differ, come or go without making it another question."""

_SAME_WORDS = (("如何", "怎么"), ("怎样", "怎么"), ("啥", "什么"))
MIN_CONTENT = 4
"""Weight of content below which nothing is a repetition: a word is 2, a Chinese character 1."""

MAX_TOKENS = 256
SAME_WORD = 0.8
"""Similarity from which two words are one, misspelt or in another form."""


def repeats(text: str, earlier: Sequence[str], threshold: float) -> float | None:
    """How closely ``text`` asks again for what one of ``earlier`` asked.

    The similarity is rapidfuzz's, of the whole texts or of their content words, whichever is
    larger. Two things are no repetition however similar: texts with hardly any content ("go
    on"), and texts that each have a content word the other lacks ("the capital of France",
    "the capital of Spain").

    Args:
        text: The later turn.
        earlier: Earlier turns of the user.
        threshold: Least similarity that counts, in [0, 1].

    Returns:
        The largest similarity in [threshold, 1]; None if there is none.
    """
    later = _content(text)
    scores = [
        _similarity(text, other, later, _content(other)) for other in earlier if other.strip()
    ]
    best = max((score for score in scores if score is not None), default=None)
    return best if best is not None and best >= threshold else None


def _content(text: str) -> tuple[str, ...]:
    return _content_of(normalise(text))


@lru_cache(maxsize=256)
def _content_of(plain: str) -> tuple[str, ...]:
    for variant, word in _SAME_WORDS:
        plain = plain.replace(variant, word)
    return tuple(t for t in _TOKEN.findall(plain)[:MAX_TOKENS] if t not in _FILLER)


def _weight(tokens: Sequence[str]) -> int:
    return sum(1 if "一" <= token[0] <= "鿿" else 2 for token in tokens)


def _similarity(
    text: str, other: str, later: tuple[str, ...], before: tuple[str, ...]
) -> float | None:
    if min(_weight(later), _weight(before)) < MIN_CONTENT:
        return None
    if _lacking(later, before) and _lacking(before, later):
        return None
    whole = fuzz.ratio(normalise(text), normalise(other))
    content = fuzz.token_sort_ratio(" ".join(later), " ".join(before))
    return float(max(whole, content)) / 100.0


def _lacking(tokens: tuple[str, ...], others: tuple[str, ...]) -> bool:
    """Whether a token has no counterpart among ``others``; numbers must be equal."""
    missing = set(tokens) - set(others)
    return any(not _has_counterpart(token, others) for token in missing)


def _has_counterpart(token: str, others: tuple[str, ...]) -> bool:
    if len(token) < 4 or any(character.isdigit() for character in token):
        return False
    return any(fuzz.ratio(token, other) >= 100 * SAME_WORD for other in others)


__all__ = [
    "MAX_CHARS",
    "MAX_RULE_CHARS",
    "MIN_CONTENT",
    "RULE_SETS",
    "Match",
    "RuleSet",
    "Signal",
    "find",
    "normalise",
    "repeats",
]
