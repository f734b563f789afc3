"""Corrections that only show beside the reply: the user states something else than it said.

People seldom say that a reply is wrong. They say what is right: "she wrote that one in 1926",
"周末是十点才开门". By itself that is a statement like any other. It is taken for a correction where

- the reply did not end in a question, which the statement would answer;
- it is short, no question, no thanks or praise, no plan, no choice, and nothing about knowing;
- it speaks of what the reply speaks of: a content word or (in Chinese) two characters in common, a
  part of the reply ("the second bullet", "第三步"), or the reply itself ("this", "your", "这个");
- and it differs: another number, weekday, month or name than the reply's, a negation, or a word
  that limits or sets against ("only", "but", "also", "只", "才", "全是").

Pure: no clock, no state, no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_CHARS = 160
"""Longer turns tell stories, or paste something."""

MAX_REPLY_CHARS = 4_000
SENTENCES = 2
STEM_CHARS = 5

_ASKS = re.compile(r"(?:[?？]|[吗呢][。.!！~]*)[\"'”’)）\s]*$")
_COURTESY = re.compile(
    r"(?:\b(?:anything else|something else|any (?:other |more |further )?questions"
    r"|else (?:i|we) can"
    r"|(?:does|did) (?:that|this) help|can i (?:help|assist)|(?:help|assist) you with"
    r"|how (?:does|do) (?:that|this|they) (?:sound|look))\b"
    r"|还有(?:什么|别的|其他)|可以帮|能帮|有帮助吗|有用吗|别的需要|其他问题)"
    r"[^.!?。！？]*[?？][\"'”’)）\s]*$",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"[.!;。！；](?:\s|$)|[。！；\n]")

# --- English ----------------------------------------------------------------------------------

_LEAD = (
    r"^(?:(?:hm+|well|but|sorry|ok|okay|wait|thanks|thank you|yes|yeah|no|actually|and|so|oh|um+|uh"
    r"|right|sure|really|i think|i believe|i thought)\b[,. ]*)*"
)
_PARTS = (
    r"(?:the )?(?:(?:first|second|third|fourth|fifth|sixth|last|next|other|same) (?!the\b"
    r"|time\b|i\b|we\b)\w+"
    r"|(?:step|line|section|point|bullet|paragraph|item|row|column|page|example|part|question"
    r"|option"
    r"|chapter|slide|figure|table|verse|answer|sentence|heading|title|footnote)s?"
    r"(?: (?:\d+|one|two|three|four|five|six))?)\b"
)
_ITSELF = (
    r"(?:your|yours|this|that|these|those|it|half of (?:this|these|it|them)"
    r"|(?:some|one|two|three|most|all|none|both) of (?:these|those|them|the))\b"
)
_THEY = (
    r"(?:the|a|an|he|she|they|there|his|her|their|its|only|nobody|no one|every|everything|all|both"
    r"|most|some|in|on|at|\d[\d,.]*|(?!i\b|we\b|my\b|our\b|you\b|let|if\b|when\b"
    r"|please\b)[a-z][\w'-]*)"
)
_SELF = r"(?:i|we|my|our|mine|ours|i'm|we're|i've|we've|i'd)\b"
_VERB = (
    r"(?:'s|'re|'d|\b(?:is|are|was|were|am|be|has|have|had|does|do|did|can|can'?t|cannot|could|will"
    r"|won'?t|would|should|must|might|isn'?t|aren'?t|wasn'?t|weren'?t|hasn'?t|haven'?t|hadn'?t"
    r"|doesn'?t"
    r"|don'?t|didn'?t|wrote|went|came|made|got|took|gave|left|began|won|lost|born|died|means"
    r"|\w{2,}s"
    r"|\w{2,}ed)\b)"
)
_NOT = re.compile(
    r"n'?t\b|\b(?:not|no|never|nobody|none|nothing|neither|nowhere|without|isnt|dont)\b"
)
_AGAINST = re.compile(
    r"\b(?:only|also|still|already|actually|but|same|missing|twice|instead|both|half|wrong"
    r"|different"
    r"|another|other|before|even|surely|though|way|too|empty|blank|again|assumes?|ignores?"
    r"|anymore|old|older"
    r"|outdated|by now|long ago|than|every|all)\b"
)
_COPULA = re.compile(r"(?:\b(?:is|are|was|were|has|have|had)|'s|'re)\b")
_ANOTHER_EN = re.compile(
    r"\?|\b(?:thank|thanks|thx|please|great|good|nice|lovely|beautiful|perfect|awesome|amazing|cool"
    r"|excellent|wonderful|helpful|useful|funny|fun|interesting|fine|brilliant|favou?rite|delicious"
    r"|love|loved|like that|works|worked|makes sense|know|knew|understand|understood|remember"
    r"|wonder"
    r"|guess|hope|feel|think about|never thought|not sure|sure which|mind|no idea|maybe|perhaps"
    r"|could be"
    r"|might|let'?s|let me|i'?ll|we'?ll|i will|we will|going to|gonna|i can try|i'?d like|what"
    r"|how|why"
    r"|the \w+ one|a lot|so much|so many|quite|such|pretty|wow|crazy|expensive|cheap|for me\b"
    r"|which|who|whether|tell me|show me|give me|exactly|agree|sounds|looks|reminds?|used to"
    r"|yesterday|tonight|yet|surprise|happy|glad|sad|tired|haha|lol|better|best|enough|later"
    r"|soon)\b"
)
_TASK_EN = re.compile(
    r"^(?:and |now |then |ok,? |so )*(?:add|write|make|do|give|show|tell|find|search|book|order"
    r"|send|put"
    r"|use|keep|take|try|check|explain|translate|summari[sz]e|calculate|compute|list|create"
    r"|draw|change"
    r"|set|call|open|run|help|remind|read|look|continue|go|start|stop|fix|pick|choose|suggest"
    r"|convert"
    r"|sort|remove|delete|rename|replace|include|skip|leave|don'?t|do not|never|always|be)\b"
)
_FILLER_WORDS = (
    "the and that this these those are was were has have had not for with from you your yours"
    " they them their she her his him its our but only also all any can will would could"
    " should there here does did don isn aren wasn doesn didn won about into than then when"
    " what which who one two too very just some more most much many every each other same"
    " still already after before over under been being get got like make made take say said"
    " use used need want know see way thing things it's i'm"
)
_FILLER_EN = frozenset(_FILLER_WORDS.split())
_NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    " fifteen sixteen seventeen eighteen nineteen twenty"
)
_NUMBERS = {word: str(n) for n, word in enumerate(_NUMBER_WORDS.split())} | {
    "hundred": "100",
    "thousand": "1000",
    "half": "0.5",
    "noon": "12",
    "midnight": "0",
}
_NUMBER_NAMES = frozenset(_NUMBERS)
_DAY_WORDS = "monday tuesday wednesday thursday friday saturday sunday"
_MONTH_WORDS = (
    "january february march april may june july august september october november december"
)
_HALF_WORDS = "morning afternoon evening night am pm"
_KINDS = tuple(frozenset(words.split()) for words in (_DAY_WORDS, _MONTH_WORDS, _HALF_WORDS))
_ALL_KINDS = frozenset[str]().union(*_KINDS)
_DIGITS_EN = re.compile(r"\d+(?:[.,]\d+)*")
_LETTERS_EN = re.compile("[a-z][a-z']*")
_ASCII_LETTERS = "".join(
    c if c in "abcdefghijklmnopqrstuvwxyz'" else " " for c in map(chr, range(128))
)
"""For text of ASCII alone, what splits it where ``_LETTERS_EN`` would, in a third of the time."""

_WORD_EN = re.compile(f"{_DIGITS_EN.pattern}|{_LETTERS_EN.pattern}")
# Capitals are looked for first: there are few.
_NAME = re.compile(r"[A-Z](?<![.!?:] [A-Z])(?<!^[A-Z])(?<!\w[A-Z])[a-z]{2,}\b")

_BUT_EN = re.compile(
    r"(?:thanks|thank you|ok|okay|sorry|great|nice|good|yes|sure)\b[^,.;]{0,20}[,.]? but "
)
_RATHER_EN = re.compile(
    r"^[^,]+, (?:and )?not (?!yet|sure|now|bad|really|too|that|much|only|always)\w+(?: \w+){0,3}$"
    r"|^(?:nobody|no one)\b"
)
_ASKED_EN = re.compile(
    _LEAD + r"i (?:only |just |clearly )?(?:asked (?:for|about)|(?:meant|wanted|requested|ordered"
    r"|specified"
    r"|said|wrote|typed)(?! to\b| that i\b))\b"
)
_DOING_EN = re.compile(
    r"\byou(?:'re| are)(?: still| just| only| again| now)? (?!looking|welcome|kidding|asking"
    r"|going|doing"
    r"|helping|amazing|being|getting)\w+ing\b"
)
_LIMITS_EN = re.compile(
    r"\b(?:only|but|already|actually|different|another|instead|too \w+"
    r"|(?:half|some|most|none|all|two|three) of (?:this|these|it|them|those))\b"
)
_DOES_EN = re.compile(
    r"\b(?:prints?|returns?|shows?|says?|gives?|gave|printed|returned|crash\w*|fails?|failed"
    r"|throws?"
    r"|assumes?|ignores?|skips?|misses|counts?|rounds?|starts?|stops?|ends?|repeats?|deletes?"
    r"|overwrites?"
    r"|matches|leaves|lacks|contradicts|breaks|opens?|points?|links?|goes to|belongs|refers)\b"
)
_PRONOUN_EN = re.compile(_LEAD + r"(?:he|she|they|it)\b")
_SUBJECT_EN = re.compile(_LEAD + r"(?P<subject>" + "|".join((_ITSELF, _PARTS)) + r")")
_STATEMENT_EN = re.compile(_LEAD + r"(?:" + _THEY + r")[^,;]{0,60}?" + _VERB)
_SELF_EN = re.compile(_LEAD + _SELF)
_YOU_EN = re.compile(
    r"\byou(?:'ve| have| had)? (?!know|can|could|may|might|are|were|will|would|should|said"
    r"|mentioned"
    r"|told|helped|saved|made my)(?:\w+ed|wrote|put|gave|got|took|chose|left|forgot|had|have"
    r"|set|built"
    r"|made|did|said|sent|spelt|meant|began|mixed|cut|kept)\b"
)


def corrects(text: str, plain: str, reply: str) -> str | None:
    """The words with which a turn states something else than the reply said; None if none do.

    Args:
        text: The turn as it was written.
        plain: The turn as ``signals.normalise`` makes it.
        reply: The reply right before it, as it was written.
    """
    if not plain or len(plain) > MAX_CHARS or not reply or asks(reply):
        return None
    differs = _differs_en if plain.isascii() or not _CHINESE.search(plain) else _differs_zh
    return _first_sentence(text, plain, reply[:MAX_REPLY_CHARS], differs)


def asks(reply: str) -> bool:
    """Whether a reply ends in a question that is no mere courtesy: what follows is the answer."""
    end = reply[-MAX_CHARS:]
    # Most have none of what it takes: they are not searched.
    if not ("?" in end or "？" in end or "吗" in end or "呢" in end):
        return False
    return _ASKS.search(end) is not None and _COURTESY.search(end) is None


def _first_sentence(
    text: str, plain: str, reply: str, differs: Callable[[str, str, str], bool]
) -> str | None:
    for sentence in [part.strip(" ,") for part in _SENTENCE.split(plain)][:SENTENCES]:
        if sentence and differs(sentence, text, reply):
            return sentence
    return None


def _differs_en(sentence: str, text: str, reply: str) -> bool:
    but = _BUT_EN.match(sentence)
    sentence = sentence[but.end() :] if but else sentence
    if "?" in sentence or _TASK_EN.search(sentence):
        return False
    if _RATHER_EN.search(sentence):
        return True
    if _ANOTHER_EN.search(sentence):
        return False
    if but or _ASKED_EN.search(sentence) or _DOING_EN.search(sentence):
        return True
    you, own = _YOU_EN.search(sentence), _SELF_EN.search(sentence)
    subject = _SUBJECT_EN.search(sentence)
    if not (you or own or subject or _STATEMENT_EN.search(sentence)):
        return False
    said = reply.lower()
    theirs = _stems(said)
    mine = _stems(sentence)
    common = bool(mine & theirs)
    other = _other_value(sentence, said) or (common and _other_name(text, reply))
    negated = _NOT.search(sentence) is not None
    against = _AGAINST.search(sentence) is not None
    if you:
        return common or other or negated or against
    if own:
        return (negated or _LIMITS_EN.search(sentence) is not None) and (common or other)
    if subject:
        itself = subject["subject"] in ("this", "that", "it") and not _DOES_EN.search(sentence)
        return bool(mine - theirs) and (not itself or common or other or negated)
    return (common and (other or negated or against or _new_predicate(sentence, theirs))) or (
        other and (_COPULA.search(sentence) or _PRONOUN_EN.search(sentence)) is not None
    )


def _stems(text: str) -> set[str]:
    """The content words of ``text`` by their beginnings."""
    return {part for word in _WORD_EN.findall(text) if (part := stem(word.strip("'")))}


def stem(word: str) -> str:
    """The beginning of a content word; empty for any other word."""
    if not word or not (word[0].isdigit() or (len(word) > 2 and word not in _FILLER_EN)):
        return ""
    return word[:STEM_CHARS].rstrip("s")


def _new_predicate(sentence: str, theirs: set[str]) -> bool:
    """Whether of subject and predicate, around a form of to be or to have, one is the reply's."""
    hit = _COPULA.search(sentence)
    if hit is None:
        return False
    subject, predicate = _stems(sentence[: hit.start()]), _stems(sentence[hit.end() :])
    if not subject or not predicate:
        return False
    return bool(subject & theirs) is not bool(predicate & theirs)


def _other_value(sentence: str, reply: str) -> bool:
    """Whether there is a number, weekday or month where the reply has others of the kind."""
    return other_kind_en(sentence, reply) or other_numbers_en(sentence, reply)


def other_kind_en(sentence: str, reply: str) -> bool:
    """Whether there is a weekday, month or half of a day where the reply has others."""
    mine = _ALL_KINDS.intersection(_words_en(sentence))
    if not mine:
        return False
    theirs = _ALL_KINDS.intersection(_words_en(reply))
    for kind in _KINDS:
        own, its = kind & mine, kind & theirs
        if own and its and not own & its:
            return True
    return False


def other_numbers_en(sentence: str, reply: str) -> bool:
    """Whether there is a number that the reply, which has numbers, does not have."""
    mine = _numbers(sentence)
    if not mine:
        return False
    its = _numbers(reply)
    return bool(its) and not mine <= its


def _words_en(text: str) -> list[str]:
    """The words of a text, without its numbers."""
    if not text.isascii():
        return _LETTERS_EN.findall(text)
    apart = f" {text}".translate(_ASCII_LETTERS)
    while " '" in apart:
        apart = apart.replace(" '", " ")
    return apart.split()


def _numbers(text: str) -> set[str]:
    words = _NUMBER_NAMES.intersection(_words_en(text))
    digits = [digits.replace(",", "") for digits in _DIGITS_EN.findall(text)]
    return {*digits, *[_NUMBERS[word] for word in words]}


def _other_name(text: str, reply: str) -> bool:
    """Whether there is a name where the reply has others, but for the beginnings of sentences."""
    mine, theirs = names(text), names(reply)
    return bool(mine) and bool(theirs) and not mine & theirs


def names(text: str) -> set[str]:
    """The words with a capital, but for the beginnings of sentences."""
    return set(_NAME.findall(text))


# --- Chinese ----------------------------------------------------------------------------------

_CHINESE = re.compile("[一-鿿]")


def has_chinese(text: str) -> bool:
    """Whether there is a Chinese character."""
    return _CHINESE.search(text) is not None


_ANOTHER_ZH = re.compile(
    r"\?|[吗呢么](?=[,。!]|$)|(.)[不没]\1|什么(?!都|也)|怎么|怎样|如何|哪|谁|为何|多少"
    r"|几[点个时次年号]|能不能|可不可以|是不是|要不要"
    r"|谢|多谢|感谢|辛苦|太好|很好|真好|不错|厉害|有意思|好看|好吃|漂亮|喜欢|完美|有用|搞定"
    r"|解决了|明白|懂了|知道|想起"
    r"|记得|觉得|希望|可能|也许|大概|不确定|没意见|没关系|没事|没问题|再说|等会|一会|回头|刚才"
    r"|昨天|以前|小时候"
    r"|我(?:先|再|去|来|会|就|想|试|看看|回|也)|那我|那就|我们(?:去|先|再)|帮我|给我|请|麻烦"
    r"|再来|接下来|然后"
)
_TASK_ZH = re.compile(
    r"^(?:那|再|就|先|好[的,]*)*(?:写|做|算|画|查|找|订|买|推荐|翻译|总结|解释|列|改|换|加|删"
    r"|发|讲|说|介绍|告诉|继续"
    r"|用|按(?!钮)|把|别|不要|不用|不必|每|全部|尽量|以后|今后|下次|只(?!有|能|剩|是)|语气|结尾"
    r"|开头)"
)
_PART_ZH = re.compile(
    r"第[\d一二三四五六七八九十]+[步条段题行句个点章页项列次]"
    r"|[这那][些个本首段句张篇家步种条题行列部次]|^[这那]"
    r"|标点|格式|链接|代码|公式|循环|运行|编译|表格|译文|答案|结果|你(?!好)"
)
_DIFFERS_ZH = re.compile(
    r"不|没|无|未|(?<![\d一二三四五六七八九十两几])只|才|全是|都是|还是|还差|还少|还缺"
    r"|(?<=.)少了?|多了|漏|更|重复|反了|旧|早就|去年|前年|往年|上一?[版个年]|已经|已|又|明明"
    r"|应该|其实|就[^,。]{1,4}了"
    r"|但|而|比|错|同一|一样|以前的|别的|另|(?<!我)的是|你[^,。]{1,8}的(?=[,。]|$)"
)
_LACKS_ZH = re.compile(
    r"^(?!我)[^,。]{0,6}(?:漏|落|丢|少写|少算|多算|多写|少列|少了|缺了)了?|^还?(?:差|少|缺"
    r"|漏)了?[^,。]{1,8}(?:没[^,。]{1,3})?$|^没有?[这你]"
)
_IS_ZH = re.compile(r"是|有|在|叫|比|等于|为")
_NUMBER_ZH = re.compile(
    r"\d+(?:\.\d+)?"
    r"|[零一二三四五六七八九十百千万两半]+(?=[点口个人年月日号元块次天岁步条页章楼米分])"
)
_WEEK_ZH = re.compile(r"(?:周|星期|礼拜)([一二三四五六日天末])")
_HALVES_ZH = re.compile("早上|上午|中午|下午|晚上|凌晨")
_VALUES_ZH = ((_WEEK_ZH, "周期拜"), (_HALVES_ZH, "上午晨"))
"""What there is one of, and characters of which one is in each."""

_NUMERAL_ZH = re.compile(r"[\d零一二三四五六七八九十百千万两半]")
_DIGITS_ZH = str.maketrans("零一二三四五六七八九两", "01234567892")
STOP_ZH = frozenset(
    "的了吗呢吧啊呀我你您他她它们是在有和就都也还这那个不没一把给被让很请要会能可以上下里中"
)


def _differs_zh(sentence: str, _text: str, reply: str) -> bool:
    but = re.match(r"(?:谢谢|感谢|好的?|嗯+|哦)[你您]?[,](?:不过|但是?|可是?)", sentence)
    rest = sentence[but.end() :] if but else sentence
    tagged = re.sub(r"(?:好吗|好吧|好不好|对吧|吧|啊|呀|哦|哎)$", "", rest)
    if _ANOTHER_ZH.search(tagged) or _TASK_ZH.search(tagged):
        return False
    common = _common_zh(tagged, reply)
    other = other_value_zh(tagged, reply)
    part = _PART_ZH.search(tagged) is not None
    differs = _DIFFERS_ZH.search(tagged) is not None or but is not None
    if (
        but is not None
        or _LACKS_ZH.search(tagged)
        or (other and (common or differs or part or tagged.endswith("了")))
    ):
        return True
    if part and differs:
        return True
    if "我" in tagged[:2]:
        return differs and common
    return common and (differs or _new_predicate_zh(tagged, reply))


def _common_zh(text: str, reply: str) -> bool:
    """Whether two characters of ``text`` that mean something together stand in the reply."""
    return any(
        text[n : n + 2] in reply
        for n in range(len(text) - 1)
        if _CHINESE.match(text[n])
        and _CHINESE.match(text[n + 1])
        and not STOP_ZH.intersection(text[n : n + 2])
    )


def predicate_zh(sentence: str, places: list[int]) -> bool:
    """As ``_new_predicate_zh``, of a turn that has pairs of the reply's at ``places``."""
    hit = _IS_ZH.search(sentence)
    if hit is None or not places:
        return False
    return places[0] < hit.start() and places[-1] < hit.end() - 1


def _new_predicate_zh(sentence: str, reply: str) -> bool:
    hit = _IS_ZH.search(sentence)
    if hit is None:
        return False
    return _common_zh(sentence[: hit.start()], reply) and not _common_zh(
        sentence[hit.end() :], reply
    )


def other_value_zh(sentence: str, reply: str) -> bool:
    """Whether there is a weekday, half of a day or number where the reply has others."""
    for kind, signs in _VALUES_ZH:
        if any(map(sentence.__contains__, signs)):
            mine, theirs = kind.findall(sentence), kind.findall(reply)
            if mine and theirs and set(mine).isdisjoint(theirs):
                return True
    own = _numbers_zh(sentence)
    if not own:
        return False
    its = _numbers_zh(reply)
    return bool(its) and not own <= its


def _numbers_zh(text: str) -> set[str]:
    if _NUMERAL_ZH.search(text) is None:
        return set()
    return {number.translate(_DIGITS_ZH) for number in _NUMBER_ZH.findall(text)}


__all__ = [
    "STOP_ZH",
    "asks",
    "corrects",
    "has_chinese",
    "names",
    "other_kind_en",
    "other_numbers_en",
    "other_value_zh",
    "predicate_zh",
    "stem",
]
