"""What is read off an expression must hold of every match of it, however odd it is."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from processors.reward.gate import Gate, first
from processors.reward.literals import Opens, folded, needs

ODD = [
    r"",
    r"|",
    r"a||b",
    r"ab|(?:)",
    r"(?:ab|)c",
    r"(?:ab|cd)?ef",
    r"(?:ab)?",
    r"a?b?c",
    r"x*",
    r"x*y",
    r"x{0}y",
    r"x{2}y",
    r"x{2,40}y{0,3}z{,5}",
    r"(?:(?:ab)+c?)*d",
    r"(?:(?:a|bb){1,3}c){2}",
    r"(?:no ){3}",
    r"a.c",
    r"[ab]c",
    r"[^ab]c",
    r"[^]\]]$",
    r"[\d一]x",
    r"[\s,]x|\Wy",
    r"\w+ly\b",
    r"\d个",
    r"a\sb",
    r"a\Bb",
    r"a\S\Dc",
    r"\bno\b",
    r"\b,\b",
    r"x\b\by",
    r"\b(?:\b)?a",
    r"不对\b",
    r"\w好",
    r"^a",
    r"\Aa",
    r"(?:^|,) ?a",
    r"(?:^|[,.] ?|\bso )a",
    r"x?^a",
    r"a^b|c",
    r"^|a",
    r"a*^b",
    r"a$",
    r"a\Z",
    r"a$\n",
    r"$",
    r"end$",
    r"(?:a|$)b?",
    r"a(?=b)",
    r"a(?=[,.]|$)",
    r"(?=[,.])a|b",
    r"a(?=,),b",
    r"a(?!b)c",
    r"(?<=a)b",
    r"(?<!not )good",
    r"(?<!不)(?<!没)行",
    r"(?!)",
    r"(a|b)\1",
    r"(?P<x>ab)-(?P=x)",
    r"(a)?(?(1)b|c)d",
    r"(?>ab|a)b",
    r"a*+b",
    r"(?:ab)?+c",
    r"[a-z]{1,3}q",
    r"[一-鿿]对",
    r"[^.!?;]{3,}, you",
    r"a[^,]{0,4}b",
    r"\(\?=x",
    r"[{3}]\{",
    r"👎+",
    r"^[👍👎]+$",
    "x\ud800y",
    r"x[^.]y",
    "\U00020000[\U00020000-\U00020003]x",
    r"é|ß",
    r"(?:a|b|c|d)(?:e|f|g|h)(?:i|j|k|l)(?:m|n|o|p)(?:q|r|s|t)(?:u|v|w|x)",
]


NOT_MADE = {r"(?!)", r"\b,\b", r"x\b\by", r"a(?=,),b", "x\ud800y"}
"""What Hypothesis makes no match of, for there is none or it needs what stands around."""


def assert_same_as_search(pattern: str, text: str) -> None:
    expected = re.search(pattern, text)
    possible = Gate(["never", pattern]).possible(text)
    found = first(re.compile(pattern), text, possible[1]) if 1 in possible else None
    assert (found and found.span()) == (expected and expected.span()), (pattern, text)


@pytest.mark.parametrize("pattern", ODD)
def test_the_first_match_is_found_wherever_there_is_one(pattern: str) -> None:
    pieces = st.sampled_from(["", "a", "b", "ab", " ", ",", "\n", "_", "不", "x", "\ud800", "👍"])
    around = st.lists(pieces, max_size=4).map("".join)
    own = st.sampled_from(["a,b", "x\ud800y"]) if pattern in NOT_MADE else st.from_regex(pattern)

    @given(around, own, around)
    def check(before: str, match: str, after: str) -> None:
        assert_same_as_search(pattern, before + match + after)

    check()


SMALL = st.recursive(
    st.sampled_from(
        ["a", "b", "ab", " ", ",", "一", ".", r"\b", "^", "$", r"\w", r"\W", "[ab]", "[^a]", "[ ,]"]
    ),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{1,3}", "{0,2}", "??"])).map(
            lambda parts: f"(?:{parts[0]}){parts[1]}"
        ),
        st.tuples(st.sampled_from(["=", "!"]), inner).map(lambda parts: f"(?{parts[0]}{parts[1]})"),
        inner.map(lambda part: f"(?>{part})"),
    ),
    max_leaves=8,
)


@given(SMALL, st.lists(st.text("ab ,一\n", max_size=12), min_size=1, max_size=8))
@example("(?:a|b,)$", ["a\n"])
def test_the_first_match_of_any_expression_is_found(pattern: str, texts: list[str]) -> None:
    for text in texts:
        assert_same_as_search(pattern, text)


@pytest.mark.parametrize("pattern", ["(?i)a", "(?i:a)b", "a(?-i:b)", "(?s:.)", "(?m)^a", "(?x)a b"])
def test_flags_are_refused_by_name_of_the_pattern(pattern: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(pattern))):
        needs(pattern)


def test_what_is_no_expression_is_refused() -> None:
    with pytest.raises(re.error):
        needs("(a")


@pytest.mark.parametrize(
    ("pattern", "literals", "opens"),
    [
        ("wrong", {"wrong": {-2}}, Opens.AT_LITERALS),
        (r"\bwrong", {" wrong": {-1}, ".wrong": {-1}}, Opens.AT_LITERALS),
        ("^wrong", {"\x02 wrong": {0}}, Opens.AT_LITERALS),
        ("(?:very )?wrong", {"wrong": {-2, -7}}, Opens.AT_LITERALS),
        ("(?:不|没)对", {"不对": {-2}, "没对": {-2}}, Opens.AT_LITERALS),
        ("你[^,]{1,2}错了", {"错了": {-3, -4, -5}}, Opens.AT_LITERALS),
        ("(?:^|[,.]).*wrong", {"wrong": {0}}, Opens.BESIDE_WORDS),
        ("^.*wrong", {"wrong": {0}}, Opens.AT_TEXT),
        (".*wrong", {"wrong": {0}}, Opens.ANYWHERE),
        (r"\w+", {}, Opens.ANYWHERE),
    ],
)
def test_what_is_looked_for(pattern: str, literals: dict[str, set[int]], opens: Opens) -> None:
    (need,) = needs(pattern)
    assert need.opens is opens
    assert set(need.literals) == set(literals)
    if opens is Opens.AT_LITERALS:
        assert need.literals == literals


def test_what_is_rare_enough_is_looked_for_beside_the_rarest() -> None:
    (need,) = needs("answer.*(?:mistaken|inaccurate).*i")
    assert set(need.literals) == {"mistaken", "inaccurate"}
    assert set(need.besides) == {"answer"}


def test_alternatives_are_looked_for_each_by_itself() -> None:
    one, other = needs("wrong|^.*answer")
    assert (set(one.literals), one.opens) == ({"wrong"}, Opens.AT_LITERALS)
    assert (set(other.literals), other.opens) == ({"answer"}, Opens.AT_TEXT)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("", "\x02  "),
        ("No, it's_7", "\x02 No. it.s_7 "),
        ("不对。é\t\ud800\U00020000—", "\x02 不对.é..\U00020000. "),
    ],
)
def test_texts_are_folded_character_by_character(text: str, plain: str) -> None:
    assert folded(text) == plain
