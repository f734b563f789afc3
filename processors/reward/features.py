"""What the learned signals go by: the features of a user's turn and of the reply before it.

A feature is there or not; its name says what it is, and the weights of ``learned.json`` are by
name. Of the turn: its words, pairs of words, their beginnings and ends, the first word of each
clause, classes of words (``CLASSES_EN``, ``CLASSES_ZH``) and of phrases
(``processors.reward.phrases``); of Chinese its characters, alone and two in a row. Of turn and
reply together: how much of the turn the reply says too, and whether there is another number, day
or name in it, and the order of what is the reply's, what is not, and small words (``_shape``).

Names in English: ``help`` a word, ``help me`` two in a row (``^`` and ``$`` are the ends),
``help-`` and ``-ful`` beginning and end, ``.help`` first in a clause and ``^help`` first of all,
but for "well", "ok" and the like. Classes are in capitals, shapes have ``~`` between their parts.

A reader (``English``, ``Chinese``) finds them in terms of a vocabulary
(``processors.reward.vocabulary``): with that of learning names, with that of a model what each name
counts. To make all names would take most of the time, so what a word brings by itself is found once
for each word, and pairs and shapes are looked up by their parts. Pure.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol

from processors.reward.contrast import (
    STOP_ZH,
    asks,
    has_chinese,
    names,
    other_kind_en,
    other_numbers_en,
    other_value_zh,
    predicate_zh,
    stem,
)
from processors.reward.phrases import PHRASES_EN, PHRASES_ZH
from processors.reward.vocabulary import Everything, Row, V, Vocabulary

MAX_CHARS = 200
"""Longer turns tell stories, or paste something: nothing was learned about them."""

MAX_TOKENS = 40
MAX_REPLY_CHARS = 2_000
MAX_KNOWN = 8_192
"""Of so many words, and of so many Chinese characters, what they are is kept."""

CLASSES_EN = {
    "FORM": (
        "bullet bullets bulleted list lists table tables paragraph paragraphs sentence sentences"
        " word words heading headings header headers title titles line lines bold italics italic"
        " emoji emojis markdown html json yaml csv xml latex code snippet comments comment example"
        " examples summary intro introduction conclusion preamble disclaimer disclaimers apology"
        " apologies greeting greetings tone style voice format formatting font spelling units"
        " metric imperial citation citations source sources link links footnote footnotes step"
        " steps column columns row rows jargon slang abbreviations acronyms exclamation marks"
        " capitals caps lowercase uppercase quotes brackets spaces tabs indentation variable"
        " variables docstring docstrings signature subject answer answers reply replies response"
        " responses explanation explanations details detail text numbers number numbered section"
        " sections chart charts diagram checklist outline draft drafts version versions formula"
        " formulas hints hint name names date dates time times prices math working calculation"
        " page pages bars rhyme rhymes verse chords language english french german spanish italian"
        " chinese japanese portuguese russian plain"
    ),
    "OUT": (
        "write answer reply respond explain describe list give show tell use put keep make say"
        " state phrase format translate quote cite mention include add skip drop leave omit avoid"
        " stop start begin end limit stick cut shorten trim round convert express spell call"
        " address refer sort group order rank mark bold highlight label sign assume treat pretend"
        " ask check verify confirm lose ditch quit redo rewrite rephrase reword scale switch"
        " replace remove note flag indicate specify compare break split walk talk speak sound go"
        " stay don't never always only no less fewer more"
    ),
    "EVER": (
        "never always every each everywhere only just from whenever anymore future next time now"
        " once"
    ),
    "POS": (
        "thanks thank thx cheers great perfect awesome nice lovely excellent brilliant works"
        " worked fixed solved helped helpful exactly spot right nailed love loved good cool sweet"
        " yay finally saved amazing wow yes yep got makes sense clear understand understood hit"
    ),
    "NEG": (
        "wrong incorrect false untrue mistake error errors broken fails failed crash crashes"
        " useless nonsense missing forgot missed skipped deleted ignored outdated old dead closed"
        " gone"
    ),
    "NOT": (
        "not no never nobody none nothing neither nowhere without isn't aren't wasn't weren't"
        " doesn't didn't can't cannot won't hasn't haven't don't isnt dont doesnt didnt cant"
        " wont nah nope"
    ),
    "SELF": "i i'm i've i'd i'll im ive my mine me we we're we've our ours us",
    "YOU": "you you're you've your yours u ur",
    "KIN": (
        "son daughter wife husband mother mom mum father dad brother sister aunt uncle boss friend"
        " friends kids kid neighbor neighbour teacher manager grandma grandpa cousin doctor"
        " colleague dog cat girlfriend boyfriend ex client team"
    ),
    "THEY": (
        "he she they it this that these those there he's she's they're it's that's there's its his"
        " her their thats theres"
    ),
    "BE": "is are was were be been am isn't aren't wasn't weren't has have had",
    "MUST": "should must would could ought shouldn't supposed needs need",
    "BUT": (
        "only also still already actually but same twice instead both half different another other"
        " before even though way too again than"
    ),
    "ASK": (
        "what how why when where who which whose can could do does did is are will would should any"
    ),
    "WISH": "i'd please want prefer rather like need let",
    "DAY": (
        "monday tuesday wednesday thursday friday saturday sunday january february march april may"
        " june july august september october november december am pm noon midnight today tomorrow"
        " yesterday"
    ),
    "NUM": (
        "one two three four five six seven eight nine ten eleven twelve first second third fourth"
        " fifth hundred thousand dozen percent #"
    ),
    "PAST": "went took came said told bought called asked saw made found tried gave left",
}
CLASSES_ZH = {
    "FORM": (
        "标题 段落 表格 列表 格式 语气 口吻 字 句 行 条 点 页 步骤 注释 出处 来源 例子 单位 日期"
        " 结论 重点 加粗 拼音 翻译 英文 中文 日文 表情 开头 结尾 末尾 前面 后面 备注 答案 回答"
        " 回复 符号 编号 序号 要点 大纲 清单 公式 代码 图 术语 名字 称呼"
    ),
    "KIN": (
        "老公 老婆 妈 爸 孩子 儿子 女儿 朋友 同事 老板 领导 老师 同学 婆婆 客人 客户 娃 妹 姐 哥"
        " 弟 律师 客服 医生 邻居 对象 室友"
    ),
    "POS": (
        "谢谢 多谢 感谢 管用 搞定 好用 太好 不错 真好 厉害 牛 棒 赞 通过 成功 解决 明白 懂了 清楚"
        " 对了 行了 好了 救命 感恩 真行 哈哈"
    ),
    "NEG": (
        "错 不对 乱码 漏 少了 多了 反了 重复 没有 不存在 打不开 报错 搜不到 不认 跑题 废话 白说"
        " 没说"
    ),
    "OUT": (
        "别 不要 不用 以后 今后 下次 每次 全部 统一 一律 尽量 先 直接 改成 换成 写成 翻成 用 按"
        " 照 放 加上 附上 标 去掉 删 拿掉 重新 短点 一点 些 每 都"
    ),
    "SELF": "我 俺 咱",
    "YOU": "你 您",
    "BE": "是 叫 有 在 为",
    "NOT": "不 没 无 未",
    "BUT": ("才 只 还是 明明 其实 应该 已经 早就 又 但 反而 而 就 却 呀 吧 啊"),
    "ASK": (
        "什么 怎 如何 哪 谁 为何 多少 几个 几点 几次 几年 几号 几岁 几条 几天 几种 啥 吗 呢 干嘛"
        " 咋 多久 多大 多长 多远 多高 多重 是否 能否 可否 来着 有没有 是不是 能不能 要不要 对不对"
        " 好不好"
    ),
}

_KINDS_EN = {
    word: tuple(name for name, words in CLASSES_EN.items() if word in words.split())
    for word in " ".join(CLASSES_EN.values()).split()
}
_KINDS_ZH = {word: name for name, words in CLASSES_ZH.items() for word in words.split()}

_LEAD_WORDS = (
    "hm hmm well but sorry ok okay wait thanks yes yeah no actually and so oh um uh right sure"
    " really please pls also now then just nah nope hi hey lol"
)
_LEADS = frozenset(_LEAD_WORDS.split())
_TOKEN = re.compile(r"\d[\d.,:]*\w*|[a-z]+(?:'[a-z]+)?|[^\sa-z\d]")
_COUNTED_WORDS = "# two three four five six seven eight nine ten twelve hundred"
_COUNTED = frozenset(_COUNTED_WORDS.split())
_BREAKS = frozenset(",.;:!?-()")
_SMALL_EN = frozenset(("NOT", "BE", "THEY", "SELF", "YOU", "MUST", "BUT", "ASK"))
_LARGE_EN = frozenset(("FORM", "OUT", "POS", "NEG", "KIN", "DAY", "PAST"))
_NUMBER_ZH = re.compile(r"\d+(?:[.:]\d+)*")
_DIGITS = re.compile(r"\d+(?:[.,:]\d+)*")
SMALL_ZH = frozenset(
    "的了吗呢吧啊呀我你您他她它们是在有和就都也还这那个不没把给被让很要会能可才又但而比跟对从到说写错应"
    "该别再为怎么什哪谁几多少只"
)
"""Characters that say how, not what."""

_MARKS_ZH = frozenset("，。！？,.!?;；")
_FORMS_ZH = dict.fromkeys(_MARKS_ZH, ",") | {small: small for small in SMALL_ZH}
_PART_ZH = re.compile(_NUMBER_ZH.pattern + "|[a-z]+")
_WORDY = re.compile("[0-9a-z]")
_PIECE_ZH = re.compile(_NUMBER_ZH.pattern + "|.")
_LATIN = re.compile("[a-z]{2,}")
_EITHER_ZH = re.compile(r"(.)[不没]\1")
"""好不好, 能不能."""

_BREAK_ZH = re.compile("[,。!;?]")
_CANTONESE = str.maketrans("冇嘅咗佢嗰喺睇俾啲乜噉咁嚟咪", "没的了他那在看给些啥这这来别")
_CANTONESE_ONLY = re.compile("[唔冇嘅咗佢嗰喺睇俾啲乜噉咁嚟咪]")
_REQUESTS = re.compile(
    "please |let me know|tell me|could you|give me|请|告诉|提供|介绍|說說|说说|描述|補充|补充"
)


def _steps(steps: tuple[int, ...]) -> tuple[str, ...]:
    """The name of each length up to the last of ``steps`` and of what is longer."""
    lengths = range(steps[-1] + 2)
    return tuple(f"length={sum(length > step for step in steps)}" for length in lengths)


_LENGTHS_EN = _steps((1, 2, 4, 7, 12, 20))
_LENGTHS_ZH = _steps((3, 6, 10, 15, 23, 39))
_CLAUSES = tuple(f"clauses={count}" for count in range(5))
_COMMON_EN = tuple(f"common={count}" for count in range(4))
_COMMON_ZH = tuple(f"common={count}" for count in range(5))
_SHARES = ("share=-", "share=0", "share=1", "share=2", "share=3", "share=4")
_REPLY = tuple(f"reply={count}" for count in range(6))


class Reader(Protocol[V]):
    """Reads turns in one language. For use by any number of threads.

    What it keeps of words changes nothing that it finds.
    """

    def found(self, plain: str, text: str, reply: str) -> set[V]:
        """What stands for the features of a turn.

        Args:
            plain: The turn as ``signals.normalise`` makes it, not empty.
            text: The turn as it was written.
            reply: The reply right before it; empty if it is not known.
        """

    def spans(self, plain: str) -> list[tuple[str, Collection[V]]]:
        """The words or Chinese characters of a turn in order, and the features each brings to it.

        These are its own, and that of it with what stands before it.

        Args:
            plain: The turn as ``signals.normalise`` makes it.
        """


def language_of(plain: str) -> str:
    """The language in which a turn is read: ``en`` or ``zh``.

    Args:
        plain: The turn as ``signals.normalise`` makes it, not empty.
    """
    return "en" if plain.isascii() or not has_chinese(plain) else "zh"


def features(plain: str, text: str, reply: str) -> tuple[str, set[str]]:
    """The language of a turn and the names of its features; the arguments of ``Reader.found``."""
    language = language_of(plain)
    return language, _NAMING[language].found(plain, text, reply)


class _Replies(Generic[V]):
    """What a reply is like by itself.

    Args:
        vocabulary: Of its language.
    """

    def __init__(self, vocabulary: Vocabulary[V]) -> None:
        self._of = vocabulary.of
        self._kind = tuple(map(self._of, ("tells", "asks")))
        self._lengths = tuple(map(self._of, _REPLY))
        self._requests = self._of("requests")
        marks = [(mark, self._of(f"reply has {mark}")) for mark in ("!", "！", "(", "1.", "def ")]
        self._marks = tuple((mark, value) for mark, value in marks if value is not None)

    def add(self, reply: str, found: set[Any]) -> bool:
        """Add what a reply is like; whether it tells, which is when it does not end by asking."""
        asked = asks(reply)
        found.add(self._kind[asked])
        found.add(_at(self._lengths, len(reply) // 50))
        for mark, value in self._marks:
            if mark in reply:
                found.add(value)
        begins = reply[:40].lower().split(maxsplit=1)
        found.add(self._of(f"reply ^{begins[0]}" if begins else "blank"))
        if self._requests is not None and _REQUESTS.search(reply[-160:].lower()) is not None:
            found.add(self._requests)
        return not asked


def _at(values: Sequence[V | None], count: int) -> V | None:
    """The value of a count; the last is that of larger ones too."""
    return values[count] if count < len(values) else values[-1]


def _share(part: int, whole: int) -> int:
    """How much of a turn the reply has too, as the place of its name in ``_SHARES``."""
    if not part:
        return 1 if whole else 0
    return 5 if part == whole else 2 + 4 * part // whole


# --- English ----------------------------------------------------------------------------------

_BE, _DAY, _COUNTS = 1, 2, 4
_FLAGS = 3
_OPENS, _BREAKS_OFF = b"\x01", b"\x02"


class _Opening(Generic[V]):
    """What a word brings where it begins something; found when it first does.

    Args:
        token: As features name it.
        kinds: Its classes; ``-`` if it has none.
        vocabulary: What stands for features.
    """

    def __init__(self, token: str, kinds: tuple[str, ...], vocabulary: Vocabulary[V]) -> None:
        self._token = token
        self._kinds = kinds
        self._vocabulary = vocabulary

    @cached_property
    def clause(self) -> list[V]:
        """What it brings where a clause begins with it."""
        return _values(self._vocabulary, [f".{name}" for name in (self._token, *self._kinds)])

    @cached_property
    def first(self) -> list[V]:
        """What it brings besides as the first of a turn's."""
        return _values(self._vocabulary, [f"^{self._token}", f"^{self._kinds[0]}"])

    @cached_property
    def heads(self) -> tuple[Row, Row]:
        """The rows of its token and of its class as the first of a turn's."""
        row = self._vocabulary.row
        return row(f"^{self._token}", " "), row(f"^{self._kinds[0]}", " ")


class _Word(NamedTuple):
    """What a word or mark of an English turn is by itself.

    Attributes:
        token: As features name it; any number is ``#``.
        kind: The first of its classes.
        role: 1 if a clause can begin with it, 2 if the next one can after it, else 0.
        sought: What is looked for in the reply: its stem; empty if it has none.
        form: What it is in the shape of a turn; empty if that depends on the reply.
        bits: ``_BE``, ``_DAY`` and ``_COUNTS``, and from bit ``_FLAGS`` on its cues.
        features: What it brings.
        after: The row of its token.
        kind_after: The row of its kind.
        part: The word as it stands in the turn.
        opening: What it brings where it begins something.
    """

    token: str
    kind: str
    role: int
    sought: str
    form: str
    bits: int
    features: frozenset[Any]
    after: Row
    kind_after: Row
    part: str
    opening: _Opening[Any]


def _word(part: str, vocabulary: Vocabulary[V]) -> _Word:
    token = "#" if "0" <= part[0] <= "9" else part
    kinds = _KINDS_EN.get(token, ())
    kind = kinds[0] if kinds else "-"
    wordy = token[0].isalnum() or token == "#"
    beginning = stem(token)
    bits = PHRASES_EN.cues_of(part) << _FLAGS
    if "BE" in kinds:
        bits |= _BE
    if "DAY" in kinds:
        bits |= _DAY
    if token in _COUNTED:
        bits |= _COUNTS
    return _Word(
        token=token,
        kind=kind,
        role=2 if token in _BREAKS else 1 if wordy and token not in _LEADS else 0,
        # A short word may stand within another.
        sought=f" {beginning}" if 0 < len(beginning) <= 4 else beginning,
        form=_form(token, kinds, beginning, wordy=wordy),
        bits=bits,
        features=frozenset(_values(vocabulary, [token, *kinds, *_affixes(token)])),
        after=vocabulary.row(token, " "),
        kind_after=vocabulary.row(kind, " "),
        part=part,
        opening=_Opening(token, kinds or ("-",), vocabulary),
    )


def _values(vocabulary: Vocabulary[V], names: Iterable[str]) -> list[V]:
    return [value for value in map(vocabulary.of, names) if value is not None]


def _affixes(token: str) -> tuple[str, ...]:
    if len(token) <= 4:
        return ()
    ends = (f"-{token[-2:]}", f"-{token[-3:]}")
    return ends if len(token) == 5 else (f"{token[:5]}-", *ends)


def _form(token: str, kinds: tuple[str, ...], beginning: str, *, wordy: bool) -> str:
    if token == "#":
        return "#"
    if not wordy:
        return token if token in ",.;:!?" else "-"
    if kinds and (kinds[0] in _SMALL_EN or (not beginning and kinds[0] not in _LARGE_EN)):
        return kinds[0]
    return "" if beginning else token


class _Words(dict[str, _Word], Generic[V]):
    """What words and marks are, each found when it is first asked for.

    Args:
        vocabulary: What stands for features.
    """

    def __init__(self, vocabulary: Vocabulary[V]) -> None:
        super().__init__()
        self._vocabulary = vocabulary

    def __missing__(self, part: str) -> _Word:
        if len(self) >= MAX_KNOWN:
            self.clear()
        made = self[part] = _word(part, self._vocabulary)
        return made

    def read(self, plain: str) -> list[_Word]:
        """The words and marks of a turn."""
        parts = plain.split()
        # With letters alone between blanks they are its words.
        if not (plain.isascii() and "".join(parts).isalpha()):
            parts = _TOKEN.findall(plain)
        return list(map(self.__getitem__, parts))


class English(Generic[V]):
    """Reads English turns.

    Args:
        vocabulary: What stands for features.
    """

    def __init__(self, vocabulary: Vocabulary[V]) -> None:
        self._of = vocabulary.of
        self._following = vocabulary.following
        self._words = _Words(vocabulary)
        self._replies = _Replies(vocabulary)
        self._start = vocabulary.row("^", " ")
        self._shape = vocabulary.joined("~")
        self._lengths = tuple(map(self._of, _LENGTHS_EN))
        self._clauses = tuple(map(self._of, _CLAUSES))
        self._common = tuple(map(self._of, _COMMON_EN))
        self._shares = tuple(map(self._of, _SHARES))
        self._other_day = self._of("other day")

    def spans(self, plain: str) -> list[tuple[str, Collection[V]]]:
        """As ``Reader.spans``."""
        read = self._words.read(plain)[:MAX_TOKENS]
        rows = [self._start, *[word.after for word in read]]
        pairs = self._following(rows, [word.token for word in read])
        return [
            (word.part, word.features if pair is None else (*word.features, pair))
            for word, pair in zip(read, pairs, strict=True)
        ]

    def found(self, plain: str, text: str, reply: str) -> set[V]:
        """As ``Reader.found``."""
        words = self._words.read(plain)
        read = words[:MAX_TOKENS]
        # By columns: each is then gone through at once.
        tokens, kinds, roles, sought, forms, each_bits, own, after, kind_after, *_ = zip(
            *read, strict=True
        )
        found: set[Any] = set()
        found.update(*own)
        found.update(self._following((self._start, *after), (*tokens, "$")))
        found.update(self._following((self._start, *kind_after), kinds))
        self._add_beginnings(read, bytes(roles), found)
        found.add(_at(self._lengths, len(read)))
        bits = _any_of(each_bits)
        cues = bits >> _FLAGS
        if len(words) > MAX_TOKENS:
            cues |= _any_of([word.bits for word in words]) >> _FLAGS
        found.update(map(self._of, PHRASES_EN.found(plain, cues)))
        if not reply:
            found.add(self._of("no reply"))
        elif self._replies.add(reply, found):
            self._add_comparison(plain, text, reply, read, sought, forms, bits, found)
        found.discard(None)
        return found

    def _add_beginnings(self, read: list[_Word], roles: bytes, found: set[Any]) -> None:
        """Add what clauses begin with, and the whole turn."""
        place = roles.find(_OPENS)
        if place < 0:
            found.add(self._clauses[0])
            return
        opening = read[place].opening
        found.update(opening.first)
        found.update(opening.clause)
        second = roles.find(_OPENS, place + 1)
        if second >= 0:
            word = read[second]
            found.update(self._following(opening.heads, (word.token, word.kind)))
        clauses = 1
        while (ends := roles.find(_BREAKS_OFF, place)) >= 0:
            place = roles.find(_OPENS, ends)
            if place < 0:
                break
            found.update(read[place].opening.clause)
            clauses += 1
        found.add(_at(self._clauses, clauses))

    def _add_comparison(
        self,
        plain: str,
        text: str,
        reply: str,
        read: list[_Word],
        sought: tuple[str, ...],
        forms: tuple[str, ...],
        bits: int,
        found: set[Any],
    ) -> None:
        said = f" {reply[:MAX_REPLY_CHARS].lower()}"
        mine = set(sought)
        mine.discard("")
        common = set(filter(said.__contains__, mine))
        found.add(_at(self._common, len(common)))
        found.add(self._shares[_share(len(common), len(mine))])
        if bits & _COUNTS and other_numbers_en(plain, said):
            found.add(self._of("other number"))
        if bits & _DAY and self._other_day is not None and other_kind_en(plain, said):
            found.add(self._other_day)
        if not text[1:].islower():
            called = names(text)
            if called and not any(map(reply.__contains__, called)):
                found.add(self._of("other name"))
        if common and bits & _BE and _new_predicate(read, common):
            found.add(self._of("new predicate"))
        if "#" in forms:
            forms = tuple(_compared(read, said))
        made = _made_of_en(forms, sought, common)
        found.update(map(self._shape, zip(made, made[1:], made[2:], strict=False)))


def _any_of(each: Iterable[int]) -> int:
    bits = 0
    for some in filter(None, each):
        bits |= some
    return bits


def _compared(read: list[_Word], said: str) -> Iterator[str]:
    """The forms of words; that of a number which the reply does not have is ``N``."""
    theirs = frozenset(_DIGITS.findall(said))
    for word in read:
        other = word.form == "#" and word.part.strip(".,:") not in theirs
        yield "N" if other else word.form


def _made_of_en(forms: Iterable[str], sought: Iterable[str], common: set[str]) -> list[str]:
    """What a turn is made of beside the reply, as in Chinese; small words by their class."""
    last = "^"
    made = [last]
    for form, looked_for in zip(forms, sought, strict=True):
        if form:
            last = form
            made.append(form)
            continue
        name = "R" if looked_for in common else "o"
        if name != last:
            last = name
            made.append(name)
    made.append("$")
    return made


def _new_predicate(read: list[_Word], common: set[str]) -> bool:
    """Whether the reply says something of what stands before a form of to be, not after it."""
    place = next(place for place, word in enumerate(read) if word.bits & _BE)
    before = {word.sought for word in read[:place]} - {""}
    after = {word.sought for word in read[place + 1 :]} - {""}
    return bool(before and after) and before.isdisjoint(common) is not after.isdisjoint(common)


# --- Chinese ----------------------------------------------------------------------------------

_ASKS_ZH = tuple(word for word in CLASSES_ZH["ASK"].split() if len(word) <= 2)


def _spoken(plain: str) -> str:
    """A turn in Cantonese with the words that standard Chinese has for its commonest ones."""
    if _CANTONESE_ONLY.search(plain) is None:
        return plain
    return plain.replace("唔好", "别").replace("唔", "不").translate(_CANTONESE)


class _Character(NamedTuple):
    """What a character of a Chinese turn is by itself.

    Attributes:
        character: It.
        own: What it brings; None if nothing.
        after: Its row.
        kind: Its class; None if it has none.
        kinds_after: The classes of it with another after it, by that.
        cues: Its cues.
    """

    character: str
    own: Any
    after: Row
    kind: str | None
    kinds_after: dict[str, str]
    cues: int


_PAIRS_ZH = [word for word in _KINDS_ZH if len(word) == 2]
_KINDS_AFTER = {
    first: {word[1]: _KINDS_ZH[word] for word in _PAIRS_ZH if word[0] == first}
    for first in {word[0] for word in _PAIRS_ZH}
}
"""The classes of words of two characters, by the first and the second."""

_NO_KINDS: dict[str, str] = {}


class _Characters(dict[str, _Character], Generic[V]):
    """What characters are, each found when it is first asked for.

    Args:
        vocabulary: What stands for features.
    """

    def __init__(self, vocabulary: Vocabulary[V]) -> None:
        super().__init__()
        self._vocabulary = vocabulary

    def __missing__(self, character: str) -> _Character:
        if len(self) >= MAX_KNOWN:
            self.clear()
        made = self[character] = _Character(
            character=character,
            own=self._vocabulary.of(character),
            after=self._vocabulary.row(character, ""),
            kind=_KINDS_ZH.get(character),
            kinds_after=_KINDS_AFTER.get(character, _NO_KINDS),
            cues=PHRASES_ZH.cues_of(character),
        )
        return made


class _Shapes(dict[tuple[str, str, str], tuple[Any, ...]], Generic[V]):
    """What three parts in a row bring: they, and the first two.

    Args:
        shape: What stands for parts in a row.
    """

    def __init__(self, shape: Callable[[tuple[str, ...]], V | None]) -> None:
        super().__init__()
        self._shape = shape

    def __missing__(self, parts: tuple[str, str, str]) -> tuple[Any, ...]:
        if len(self) >= MAX_KNOWN:
            self.clear()
        both = self._shape(parts[:2]), self._shape(parts)
        made = self[parts] = tuple(value for value in both if value is not None)
        return made


class Chinese(Generic[V]):
    """Reads Chinese turns.

    Args:
        vocabulary: What stands for features.
    """

    def __init__(self, vocabulary: Vocabulary[V]) -> None:
        self._of = vocabulary.of
        self._following = vocabulary.following
        self._characters = _Characters(vocabulary)
        self._replies = _Replies(vocabulary)
        self._start = vocabulary.row("^", "")
        self._shape = vocabulary.joined("~")
        self._shapes = _Shapes(self._shape)
        self._lengths = tuple(map(self._of, _LENGTHS_ZH))
        self._clauses = tuple(map(self._of, _CLAUSES))
        self._common = tuple(map(self._of, _COMMON_ZH))
        self._shares = tuple(map(self._of, _SHARES))

    def spans(self, plain: str) -> list[tuple[str, Collection[V]]]:
        """As ``Reader.spans``."""
        words = _PIECE_ZH.findall(plain)[:MAX_CHARS]
        read = ["#" if "0" <= word[0] <= "9" else word for word in words]
        own = [self._characters[character] for character in read]
        pairs = self._following([self._start, *[each.after for each in own]], read)
        return [
            (word, [value for value in (each.own, pair) if value is not None])
            for word, each, pair in zip(words, own, pairs, strict=True)
        ]

    def found(self, plain: str, text: str, reply: str) -> set[V]:
        """As ``Reader.found``."""
        plain = _spoken(plain)
        # Most are letters alone, to Python: no number, no mark.
        letters = plain.isalpha()
        read = plain if letters else _NUMBER_ZH.sub("#", plain)
        characters, own, after, kind, kinds_after, each_cues = zip(
            *map(self._characters.__getitem__, read), strict=True
        )
        found = set(own)
        found.update(self._following((self._start, *after), (*characters, "$")))
        kinds = set(kind)
        kinds.update(map(dict.get, kinds_after, characters[1:]))
        kinds.discard(None)
        if ("不" in plain or "没" in plain) and _EITHER_ZH.search(plain) is not None:
            kinds.add("ASK")
        parts = [plain] if letters else [part for part in _BREAK_ZH.split(plain) if part]
        if "ASK" in kinds and parts and any(map(parts[-1].__contains__, _ASKS_ZH)):
            kinds.add("ASK$")
        found.update(map(self._of, kinds))
        found.add(_at(self._clauses, len(parts)))
        found.add(_at(self._lengths, len(plain)))
        found.update(map(self._of, PHRASES_ZH.found(plain, _any_of(each_cues))))
        if not reply:
            found.add(self._of("no reply"))
        elif self._replies.add(reply, found):
            self._add_comparison(plain, text, reply, found)
        found.discard(None)
        return found

    def _add_comparison(self, plain: str, text: str, reply: str, found: set[Any]) -> None:
        said, own = reply[:MAX_REPLY_CHARS].lower(), text[:MAX_CHARS].strip().lower()
        places = _common_places(own, said)
        found.add(_at(self._common, len(places)))
        found.add(self._shares[_share(len(places), len(own) - 1)])
        if other_value_zh(plain, said):
            found.add(self._of("other value"))
        wordy = _WORDY.search(own) is not None
        latin = _LATIN.findall(own) if wordy else ()
        if latin:
            some = any(map(said.__contains__, latin))
            found.add(self._of("latin=1" if some else "latin=0"))
        if own[:2] in said:
            found.add(self._of("first said"))
        if own[-2:] in said:
            found.add(self._of("last said"))
        if places and predicate_zh(own, places):
            found.add(self._of("new predicate"))
        alike = plain if len(plain) == len(own) else own
        forms = [_FORMS_ZH.get(character, "o") for character in alike]
        shared = {*places, *[place + 1 for place in places]}
        for place in shared:
            forms[place] = "R"
        if wordy or _WORDY.search(alike) is not None:
            parts = [*_PART_ZH.finditer(own)] if wordy else []
            _compare_parts(forms, alike, own, said, shared, parts)
        made = _made_of_zh(forms)
        found.update(*map(self._shapes.__getitem__, zip(made, made[1:], made[2:], strict=False)))
        found.add(self._shape((made[-2], made[-1])))


def _common_places(own: str, said: str) -> list[int]:
    """Where two characters that mean something stand together as in the reply."""
    pairs = map(operator.add, own, own[1:])
    return [
        place
        for place in itertools.compress(itertools.count(), map(said.__contains__, pairs))
        if own[place] >= "一"
        and own[place + 1] >= "一"
        and STOP_ZH.isdisjoint(own[place : place + 2])
    ]


def _compare_parts(
    forms: list[str],
    plain: str,
    own: str,
    said: str,
    shared: Collection[int],
    parts: Sequence[re.Match[str]],
) -> None:
    """Set the forms of digits and Latin letters; each of the ``parts`` becomes one."""

    def compared(place: int, part: str) -> str:
        first = plain[place]
        if place in shared:
            return "R"
        if "0" <= first <= "9":
            return "#" if part in said else "N"
        if "a" <= first <= "z":
            return "R" if part in said else "e"
        return forms[place]

    for place in [hit.start() for hit in _WORDY.finditer(plain)]:
        forms[place] = compared(place, own[place])
    for hit in reversed(parts):
        forms[hit.start() : hit.end()] = [compared(hit.start(), hit.group())]


def _made_of_zh(forms: Iterable[str]) -> list[str]:
    """What a turn is made of, beside the reply.

    ``R`` are characters that the reply has too, ``o`` others, ``#`` a number of the reply's and
    ``N`` another one; the characters of ``SMALL_ZH`` stand for themselves.
    """
    last = "^"
    made = [last]
    for form in forms:
        if form != last or form not in "oR":
            made.append(form)
            last = form
    made.append("$")
    return made


_NAMING: Mapping[str, Reader[str]] = {"en": English(Everything()), "zh": Chinese(Everything())}

__all__ = [
    "CLASSES_EN",
    "CLASSES_ZH",
    "MAX_CHARS",
    "Chinese",
    "English",
    "Reader",
    "features",
    "language_of",
]
