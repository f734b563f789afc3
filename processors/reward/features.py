"""What the learned signals go by: the features of a user's turn and of the reply before it.

A feature is there or not; its name says what it is, and the weights of ``learned.json`` are by
name. Of the turn: its words, pairs of words, their beginnings and ends, the first word of each
clause, classes of words (``CLASSES_EN``, ``CLASSES_ZH``) and of phrases (``PHRASES_EN``,
``PHRASES_ZH``); of Chinese its characters, alone and two in a row. Of turn and reply together: how
much of the turn the reply says too, and whether there is another number, day or name in it, and
the order of what is the reply's, what is not, and small words (``_shape_en``, ``_shape_zh``).

Names in English: ``help`` a word, ``help me`` two in a row (``^`` and ``$`` are the ends),
``help-`` and ``-ful`` beginning and end, ``.help`` first in a clause and ``^help`` first of all,
but for "well", "ok" and the like. Classes are in capitals, shapes have ``~`` between their parts.
Pure.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterable

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

MAX_CHARS = 200
"""Longer turns tell stories, or paste something: nothing was learned about them."""

MAX_TOKENS = 40
MAX_REPLY_CHARS = 2_000
MAX_KNOWN = 8_192
"""Of so many words what they are is kept."""

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
PHRASES_EN = {
    "QUESTION": re.compile(
        r"(?:^|[,.;!?] )(?:(?:and|so|but|ok|okay|hm+|lol|then|wait|thanks|great|now|also|oh|well"
        r"|sorry)[ ,]+)*"
        r"(?:what|what's|whats|how|how's|why|when|who|who's|which|is|are|does|do|did|can|could"
        r"|should|will|was|were|would|where|where's|any|has|have)\b"
        r"(?! (?:you |i |we )?(?:please|said|asked))"
    ),
    "RETORT": re.compile(
        r"\?\?|\b(?:isn't|aren't|wasn't|weren't|doesn't|don't|didn't|shouldn't|isnt|arent|doesnt"
        r"|surely|can't be)\b[^?.]*\?"
        r"|where(?:'d| did) (?:you|that|the|this)|since when|how come|which is it|really\?"
        r"|wh(?:y|o|at|ere) (?:did|do|are|is|would|were|have|'d|made|told|asked|said)\b[^?]{0,12}"
        r"\byou|how (?:is|can|could|did)\b[^?]{0,8}(?:that|this|it|you)\b|says who"
        r"|who (?:said|asked|told)|are you (?:sure|kidding)|i thought\b|what happened to"
    ),
    "CREDIT": re.compile(
        r"\b(?:as|like|what|the \w+|way|how) (?:you|u)(?:'d| had)? (?:said|told|suggested|mentioned"
        r"|described|gave|wrote|showed|recommended|pointed)"
        r"|\b(?:your|ur) (?:tip|idea|trick|advice|hints?|suggestion|way|version|method|explanation"
        r"|steps|fix|recipe|wording|notes|timing)"
        r"|\byou (?:were right|nailed|saved|rock|deserve)"
        r"|(?:good|great|nice) (?:catch|call|tip|thinking|shout|idea)|right call"
    ),
    "MATCH": re.compile(
        r"\b(?:match(?:es|ed)?|agrees?|squares with|tall(?:y|ies)|lines up|adds up|spot on"
        r"|same (?:number|answer|figure|thing|result|amount|price|total)|(?:exactly|just) what"
        r"|to the (?:penny|cent|letter|dot|point|minute|word)|that'?s (?:the one|it))\b"
    ),
    "PRAISE": re.compile(
        r"\b(?:she|he|they|boss|teacher|prof|professor|editor|inspector|client|customer|wife"
        r"|husband|mom|mum|dad|mother|father|daughter|son|kids?|everyone|everybody|crowd|guests?"
        r"|judge|advisor|supervisor|doctor|vet|nurse|lawyer|mechanic|landlord|landlady|accountant"
        r"|board|class|audience|guy|colleagues?|girlfriend|boyfriend|friends?|neighbou?rs?"
        r"|students?|manager|team|family|group|grandma|grandpa|coach|examiner|reviewers?)\b"
        r"[^,.;]{0,30}\b(?:loved|liked|laughed|cried|said (?:yes|it's|it was|that's)|accepted"
        r"|approved|passed|signed|agreed|complimented|praised|asked for|nodded|got it|finally"
        r"|impressed|happy|thrilled|delighted|raved|clapped|smiled|thanked|ate|devoured"
        r"|understood|wants?|wanted)\b"
    ),
    "RESULT": re.compile(
        r"\b(?:finally|works|worked|working|fixed|solved|passed|gone|no more|at last|first try"
        r"|green|runs|ran|builds|compiles|stopped|ordered|printed|posted|sent|filed|booked|signed"
        r"|saved|in one go|success|sorted|cleared|healed|fits)\b"
    ),
}
"""What turns ask, object, credit, compare and report in: each is a feature where it is found."""

PHRASES_ZH = {
    "QUESTION": re.compile(
        r"哪(?:一?[年天个种家里位些款本首部]|儿|里)|为什么|为啥|几[点年岁个天号次]|多[少久大长远高重]"
        r"|什么时候|[有能是要可会]不[有能是要可会]|有没有|[吗呢么不]\??$|怎么(?:办|弄|做|用|说|读|走|去|样)"
        r"|怎么写的|啥[时意]|是什么|什么意思|如何|来着"
    ),
    "RETORT": re.compile(
        r"(?:怎么|怎|咋)(?:会|能|变|成|还|又|写|是|给|就|没|也|都|可能|搞|整|翻|排|把|行|跑)"
        r"|哪(?:来|有|要|门子|能|会|是|叫|算)|凭[啥什]|什么叫|叫啥|谁(?:要|让|叫|说|看|家|跟)|何来"
    ),
    "CREDIT": re.compile(
        r"[按照跟听用依同][你您]|[你您](?:那|这)?个?[^,。]{0,4}(?:说|给|教|编|写|讲|算|改|推荐|列|提醒|划|画)的"
        r"|[你您]那|[这那]招|这版|那句|多亏|果然|原来|还真|真[行管灵神准好]"
    ),
    "MATCH": re.compile(
        r"对得?上|一[模分毫个][^,。]{0,2}[样差]|不差|[跟和同][^,。]{1,10}一样|符合|吻合|没[错误]|[正刚]好"
    ),
    "PRAISE": re.compile(
        r"(?:老师|医生|大夫|律师|老板|领导|客户|客人|客服|甲方|面试官|教授|婆|妈|爸|媳妇|老婆|老公|师傅|柜台"
        r"|主任|教练|同事|同学|邻居|买家|卖家|物业|导师|裁判|孩子|娃|老人|爷|奶|家里|全家|大家|台下|都|人家"
        r"|对方|他|她)[^,。]{0,8}(?:夸|赞|点头|喜欢|满意|同意|批了|看懂|听懂|爱|抢|笑|吃光|没一?个|认了"
        r"|说[^,。]{0,3}(?:好|对|行|专业|自然|顺|清|有|规范|地道|一样|靠谱)|讲[^,。]{0,2}(?:一样|的一)"
        r"|给了?[^,。]{0,3}[满甲优a高大])"
    ),
    "RESULT": re.compile(
        r"(?:不|没再?|没有)[^,。]{1,4}了|(?:好|过|成|通|亮|行|顺|退|消|灭|稳|起来|出来|下来|上去|跑|到账|签|收"
        r"|中)了|跑通|通过|搞定|满分|录取|绿灯|全过"
    ),
}
"""The same in Chinese, as ``signals.normalise`` and ``_spoken`` make it."""

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
_COUNTED = frozenset(
    [
        "#",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "twelve",
        "hundred",
    ]
)
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
_PART_ZH = re.compile(_NUMBER_ZH.pattern + "|[a-z]+|.", re.DOTALL)
_WORDY = re.compile("[0-9a-z]")
_PIECE_ZH = re.compile(_NUMBER_ZH.pattern + "|.")
_LATIN = re.compile("[a-z]{2,}")
_EITHER_ZH = re.compile(r"(.)[不没]\1")
"""好不好, 能不能."""

_BREAK_ZH = re.compile("[,。!;?]")
_CANTONESE = str.maketrans("冇嘅咗佢嗰喺睇俾啲乜噉咁嚟咪", "没的了他那在看给些啥这这来别")
_REQUESTS = (
    "please ", "let me know", "tell me", "could you", "give me", "请", "告诉", "提供", "介绍",
    "說說", "说说", "描述", "補充", "补充",
)  # fmt: skip
_MARKS = tuple((mark, f"reply has {mark}") for mark in ("!", "！", "(", "1.", "def "))
_LENGTHS_EN = (1, 2, 4, 7, 12, 20)
_LENGTHS_ZH = (3, 6, 10, 15, 23, 39)


def features(plain: str, text: str, reply: str) -> tuple[str, set[str]]:
    """The language of a turn and its features.

    Args:
        plain: The turn as ``signals.normalise`` makes it, not empty.
        text: The turn as it was written.
        reply: The reply right before it; empty if it is not known.
    """
    if plain.isascii() or not has_chinese(plain):
        return "en", _english(plain, text, reply)
    return "zh", _chinese(plain, text, reply)


def _tokens_of(plain: str) -> list[str]:
    """The words and marks of an English turn as features name them; any number is ``#``."""
    return [
        "#" if "0" <= token[0] <= "9" else token for token in _TOKEN.findall(plain)[:MAX_TOKENS]
    ]


def spans_of(plain: str, language: str) -> list[tuple[str, tuple[str, ...]]]:
    """The words or Chinese characters of a turn in order, and the features that each brings to it.

    These are its own, and those of it with what stands before it.

    Args:
        plain: The turn as ``signals.normalise`` makes it.
        language: As ``features`` gives it.
    """
    if language == "en":
        words, names = _TOKEN.findall(plain)[:MAX_TOKENS], ["^", *_tokens_of(plain)]
        pairs = map(" ".join, itertools.pairwise(names))
        own = [_WORDS[name].features for name in names[1:]]
        return [(w, (*f, pair)) for w, f, pair in zip(words, own, pairs, strict=True)]
    words = _PIECE_ZH.findall(plain)[:MAX_CHARS]
    names = ["^", *("#" if "0" <= word[0] <= "9" else word for word in words)]
    return [(w, (b, a + b)) for w, (a, b) in zip(words, itertools.pairwise(names), strict=True)]


# --- English ----------------------------------------------------------------------------------


class _Word:
    """What a word is by itself.

    Args:
        token: As ``_tokens_of`` gives it.
    """

    __slots__ = (
        "breaks",
        "clause",
        "features",
        "form",
        "kind",
        "kinds",
        "lead",
        "sought",
        "stem",
        "token",
        "word",
    )

    def __init__(self, token: str) -> None:
        self.token = token
        self.kinds = _KINDS_EN.get(token, ())
        self.kind = self.kinds[0] if self.kinds else "-"
        self.word = token[0].isalnum() or token == "#"
        self.lead = token in _LEADS
        self.breaks = token in _BREAKS
        self.stem = stem(token)
        self.form = self._form()
        # A short word may stand within another.
        self.sought = self.stem if len(self.stem) > 4 else f" {self.stem}"
        found = [token, *self.kinds]
        if len(token) > 5:
            found.append(f"{token[:5]}-")
        if len(token) > 4:
            found += (f"-{token[-2:]}", f"-{token[-3:]}")
        self.features = tuple(found)
        self.clause = (f".{token}", *(f".{kind}" for kind in self.kinds or ("-",)))

    def _form(self) -> str:
        """What it is in the shape of a turn; empty if that depends on the reply."""
        if self.token == "#":
            return "#"
        if not self.word:
            return self.token if self.token in ",.;:!?" else "-"
        if self.kind in _SMALL_EN or (self.kinds and not self.stem and self.kind not in _LARGE_EN):
            return self.kind
        return "" if self.stem else self.token


class _Words(dict[str, _Word]):
    """What words are, each found when it is first asked for."""

    def __missing__(self, token: str) -> _Word:
        if len(self) >= MAX_KNOWN:
            self.clear()
        made = self[token] = _Word(token)
        return made


_WORDS = _Words()


def _english(plain: str, text: str, reply: str) -> set[str]:
    parts = _TOKEN.findall(plain)[:MAX_TOKENS]
    tokens = ["#" if "0" <= part[0] <= "9" else part for part in parts]
    read = [_WORDS[token] for token in tokens]
    kinds = [word.kind for word in read]
    found = set(map(" ".join, zip(["^", *tokens], [*tokens, "$"], strict=True)))
    found.update(map(" ".join, itertools.pairwise(["^", *kinds])))
    found.update(*[word.features for word in read])
    starts, clauses = True, 0
    first: list[_Word] = []
    for word in read:
        if not word.word:
            starts = starts or word.breaks
        elif not word.lead:
            if starts:
                found.update(word.clause)
                clauses, starts = clauses + 1, False
            if len(first) < 2:
                first.append(word)
    found.add(f"clauses={min(4, clauses)}")
    found.add(f"length={_step(len(tokens), _LENGTHS_EN)}")
    found.update([name for name, phrase in PHRASES_EN.items() if phrase.search(plain)])
    if first:
        found.add(f"^{first[0].token}")
        found.add(f"^{first[0].kind}")
        found.add(f"^{' '.join([word.token for word in first])}")
        found.add(f"^{' '.join([word.kind for word in first])}")
    if reply:
        found.update(_beside_en(plain, text, reply, found, read, parts))
    else:
        found.add("no reply")
    return found


def _beside_en(
    plain: str, text: str, reply: str, own: set[str], read: list[_Word], parts: list[str]
) -> list[str]:
    found = _of_reply(reply)
    if found[0] == "asks":
        return found
    said = f" {reply[:MAX_REPLY_CHARS].lower()}"
    mine = {word.stem: word.sought for word in read if word.stem}
    common = {part for part, sought in mine.items() if sought in said}
    found.append(f"common={min(3, len(common))}")
    found.append(f"share={_quarter(len(common), len(mine))}")
    if not own.isdisjoint(_COUNTED) and other_numbers_en(plain, said):
        found.append("other number")
    if "DAY" in own and other_kind_en(plain, said):
        found.append("other day")
    if not text[1:].islower():
        called = names(text)
        if called and True not in [name in reply for name in called]:
            found.append("other name")
    if common and "BE" in own and _new_predicate(read, common):
        found.append("new predicate")
    found += _shape_en(parts, read, said, common)
    return found


def _shape_en(parts: list[str], read: list[_Word], said: str, common: set[str]) -> list[str]:
    """Three in a row of what a turn is made of, as ``_shape_zh``; small words by their class."""
    made = ["^"]
    theirs: frozenset[str] | None = None
    for part, word in zip(parts, read, strict=True):
        name = word.form
        if name == "#":
            theirs = frozenset(_DIGITS.findall(said)) if theirs is None else theirs
            name = "#" if part.strip(".,:") in theirs else "N"
        elif not name:
            name = "R" if word.stem in common else "o"
            if name == made[-1]:
                continue
        made.append(name)
    made.append("$")
    return list(map("~".join, zip(made, made[1:], made[2:], strict=False)))


def _new_predicate(read: list[_Word], common: set[str]) -> bool:
    """Whether the reply says something of what stands before a form of to be, not after it."""
    place = next(place for place, word in enumerate(read) if "BE" in word.kinds)
    before = {word.stem for word in read[:place]} - {""}
    after = {word.stem for word in read[place + 1 :]} - {""}
    return bool(before and after) and before.isdisjoint(common) is not after.isdisjoint(common)


def _of_reply(reply: str) -> list[str]:
    """What the reply is like, ``asks`` first where it ends in a question."""
    tail = reply[-160:].lower()
    found = ["asks" if asks(reply) else "tells", f"reply={min(5, len(reply) // 50)}"]
    found.extend([name for mark, name in _MARKS if mark in reply])
    begins = reply[:40].lower().split(maxsplit=1)
    found.append(f"reply ^{begins[0]}" if begins else "blank")
    if True in [words in tail for words in _REQUESTS]:
        found.append("requests")
    return found


def _step(count: int, steps: tuple[int, ...]) -> int:
    """In which interval a count falls."""
    return len([1 for step in steps if count > step])


def _quarter(part: int, whole: int) -> str:
    if not whole:
        return "-"
    return "0" if not part else "4" if part == whole else str(1 + 4 * part // whole)


# --- Chinese ----------------------------------------------------------------------------------


def _grams_of(plain: str) -> list[str]:
    """A Chinese turn as features name it: its characters, and two in a row."""
    text = f"^{_NUMBER_ZH.sub('#', plain)}$"
    return [*text[1:-1], *map(operator.add, text, text[1:])]


def _spoken(plain: str) -> str:
    """A turn in Cantonese with the words that standard Chinese has for its commonest ones."""
    return plain.replace("唔好", "别").replace("唔", "不").translate(_CANTONESE)


def _chinese(plain: str, text: str, reply: str) -> set[str]:
    plain = _spoken(plain)
    found = set(_grams_of(plain))
    kinds = {_KINDS_ZH[gram] for gram in found & _KINDS_ZH.keys()}
    if _EITHER_ZH.search(plain):
        kinds.add("ASK")
    found.update(kinds)
    parts = [part for part in _BREAK_ZH.split(plain) if part]
    found.add(f"clauses={min(4, len(parts))}")
    found.add(f"length={_step(len(plain), _LENGTHS_ZH)}")
    found.update([name for name, phrase in PHRASES_ZH.items() if phrase.search(plain)])
    if "ASK" in kinds and parts and not _ASKS_ZH.isdisjoint(_grams_of(parts[-1])):
        found.add("ASK$")
    if reply:
        found.update(_beside_zh(plain, text, reply, kinds))
    else:
        found.add("no reply")
    return found


_ASKS_ZH = frozenset(CLASSES_ZH["ASK"].split())


def _beside_zh(plain: str, text: str, reply: str, kinds: set[str]) -> list[str]:
    found = _of_reply(reply)
    if found[0] == "asks":
        return found
    said, own = reply[:MAX_REPLY_CHARS].lower(), text[:MAX_CHARS].strip().lower()
    pairs = map("".join, itertools.pairwise(own))
    places = [
        place
        for place, pair in enumerate(pairs)
        if pair in said
        and pair[0] >= "一"
        and pair[1] >= "一"
        and pair[0] not in STOP_ZH
        and pair[1] not in STOP_ZH
    ]
    found.append(f"common={min(4, len(places))}")
    found.append(f"share={_quarter(len(places), len(own) - 1)}")
    differs = other_value_zh(plain, said)
    if differs:
        found.append("other value")
    latin = _LATIN.findall(own)
    if latin:
        found.append(f"latin={1 if True in [word in said for word in latin] else 0}")
    if own[:2] in said:
        found.append("first said")
    if own[-2:] in said:
        found.append("last said")
    if places and predicate_zh(own, places):
        found.append("new predicate")
    found += _shape_zh(plain if len(plain) == len(own) else own, own, said, places)
    return found


def _shape_zh(plain: str, own: str, said: str, places: list[int]) -> list[str]:
    """Two and three in a row of what a turn is made of, beside the reply.

    ``R`` are characters that the reply has too, ``o`` others, ``#`` a number of the reply's and
    ``N`` another one; the characters of ``SMALL_ZH`` stand for themselves.
    """
    shared = {*places, *[place + 1 for place in places]}
    made = ["^"]
    parts: Iterable[tuple[int, str]] = enumerate(own)
    if _WORDY.search(own) is not None:
        parts = [(hit.start(), hit.group()) for hit in _PART_ZH.finditer(own)]
    for place, part in parts:
        first = plain[place]
        if place in shared:
            name = "R"
        elif "0" <= first <= "9":
            name = "#" if part in said else "N"
        elif "a" <= first <= "z":
            name = "R" if part in said else "e"
        elif first in SMALL_ZH:
            name = first
        else:
            name = "," if first in _MARKS_ZH else "o"
        if name != made[-1] or name not in "oR":
            made.append(name)
    made.append("$")
    pairs = map("~".join, itertools.pairwise(made))
    return [*pairs, *map("~".join, zip(made, made[1:], made[2:], strict=False))]


__all__ = [
    "CLASSES_EN",
    "CLASSES_ZH",
    "MAX_CHARS",
    "PHRASES_EN",
    "PHRASES_ZH",
    "features",
    "spans_of",
]
