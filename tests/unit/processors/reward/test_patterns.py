"""No expression that reads what users write may take a time that doubles with each character."""

from __future__ import annotations

import re
from collections.abc import Iterator
from re import _parser  # type: ignore[attr-defined]
from types import ModuleType
from typing import Any

import pytest

from processors.reward import contrast, features, phrases, repetition, rules, signals
from processors.reward.rules import QUOTED, RULE_SETS
from processors.reward.signals import by_rules, normalise

MODULES = (contrast, features, phrases, repetition, rules, signals)
MAXREPEAT = _parser.MAXREPEAT


def _takes_many_ways(parsed: Any, inside: bool = False) -> bool:
    """Whether a repeated group has in it a repeat alone: "(a+)*" matches "aaa" in four ways.

    What does not match after it is looked for in all of them, twice as many with each character.
    """
    for op, argument in parsed:
        name = str(op)
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            _, most, body = argument
            many = most == MAXREPEAT
            if many and inside and len(parsed) == 1:
                return True
            if _takes_many_ways(body, inside=many):
                return True
        elif name == "BRANCH":
            if any(_takes_many_ways(branch, inside=inside) for branch in argument[1]):
                return True
        elif name in ("SUBPATTERN", "ASSERT", "ASSERT_NOT"):
            body = argument[-1]
            alone = inside and len(parsed) == 1 and name == "SUBPATTERN"
            if _takes_many_ways(body, inside=alone):
                return True
    return False


def _compiled(held: Any) -> Iterator[re.Pattern[str]]:
    """The expressions in a module's names, also in tables of them."""
    match held:
        case re.Pattern():
            yield held
        case ModuleType():
            for value in vars(held).values():
                if not isinstance(value, ModuleType):
                    yield from _compiled(value)
        case dict():
            for value in held.values():
                yield from _compiled(value)
        case tuple() | list() | frozenset():
            for value in held:
                yield from _compiled(value)
        case _:
            return


FOUND = {
    *(pattern.pattern for module in MODULES for pattern in _compiled(module)),
    *(pattern for each in RULE_SETS for pattern in (*each.patterns, *each.masks)),
    QUOTED,
}


@pytest.mark.parametrize(
    ("pattern", "many"),
    [
        ("(?:a+|b)*c", True),
        ("(a*)+", True),
        ("(?:x(?:y|(?:z+))*)+", True),
        ("(?:a+b)*c", False),
        ("(?:a{1,3}|b)*", False),
        ("a+b*(?:c+)?", False),
    ],
)
def test_what_is_looked_for(pattern: str, many: bool) -> None:
    assert _takes_many_ways(_parser.parse(pattern)) is many


def test_no_expression_has_many_ways_to_match_the_same() -> None:
    assert len(FOUND) > 400
    assert [pattern for pattern in FOUND if _takes_many_ways(_parser.parse(pattern))] == []


def test_a_long_hum_before_thanks_is_read_at_once() -> None:
    assert len(by_rules(normalise("嗯" * 500 + "，谢谢"))) == 1
