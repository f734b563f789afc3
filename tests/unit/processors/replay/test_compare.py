from __future__ import annotations

import json
from typing import Any

import pytest

from processors.replay.compare import MAX_EXAMPLES, Comparison, Where, compare, differing
from processors.replay.store import Made


def made(
    name: str, content: object = 1, *, session: str = "s", ordinal: int = 0, at: int = 100
) -> Made:
    return Made(name, 0, f"default/{session}", ordinal, at, json.dumps(content).encode())


def compared(here: list[Made], there: list[Made], **options: Any) -> Comparison:
    return compare(here, there, json.loads, **{"from_ms": 0, **options})


def test_the_same_is_equal() -> None:
    both = [made("a"), made("b", session="t")]
    found = compared(both, both[::-1])
    assert (found.is_equal, found.equal) == (True, 2)


def test_each_kind_of_difference_is_counted_and_shown() -> None:
    here = [made("same"), made("other", {"a": [1, 2], "b": 1}), made("mine", session="m")]
    there = [made("same"), made("other", {"a": [1, 3], "b": 1}), made("theirs", session="t")]
    found = compared(here, there)
    assert (found.equal, found.different, found.only_here, found.only_there) == (1, 1, 1, 1)
    assert found.fields == {"a[]": 1}
    assert [(item.segment_id, item.kind) for item in found.examples] == [
        ("other", "different"), ("theirs", "only_there"), ("mine", "only_here"),
    ]  # fmt: skip
    assert not found.is_equal


def test_other_bytes_of_the_same_content_are_equal() -> None:
    one = Made("a", 0, "s", 0, 100, b'{"x": 1}')
    other = Made("a", 0, "s", 0, 100, b'{"x":1}')
    assert compared([one], [other]).equal == 1


def test_what_closed_before_the_beginning_only_prepares() -> None:
    here = [made("old", at=50), made("mine", at=49, session="m")]
    there = [made("old", 2, at=50), made("theirs", at=50, session="t")]
    found = compared(here, there, from_ms=51)
    assert (found.is_equal, found.equal) == (True, 0)


def test_what_is_due_after_the_last_live_one_may_still_come() -> None:
    here = [made("a", at=100), made("b", at=101, session="b"), made("c", at=99, session="c")]
    found = compared(here, [made("a", at=100)])
    assert (found.equal, found.not_yet_live, found.only_here) == (1, 1, 1)


def test_sessions_older_than_what_was_read_are_not_held_against_either_side() -> None:
    here = [made("x", ordinal=0), made("y", ordinal=1, at=99)]
    there = [made("g", ordinal=6), made("h", ordinal=7)]
    found = compared(here, there)
    assert (found.began_before, found.is_equal) == (2, True)


def test_a_segment_lost_in_the_middle_of_a_session_is_a_difference() -> None:
    here = [made("a", ordinal=0), made("d", ordinal=3)]
    there = [made(name, ordinal=n) for n, name in enumerate("abcd")]
    found = compared(here, there)
    assert (found.only_there, found.began_before, found.equal) == (2, 0, 2)


@pytest.mark.parametrize(
    ("where", "only_there", "began_before"), [("read", 1, 0), ("before", 0, 1), ("after", 0, 0)]
)
def test_where_a_live_output_comes_from(where: Where, only_there: int, began_before: int) -> None:
    found = compared([], [made("a")], where=lambda _: where)
    assert (found.only_there, found.began_before) == (only_there, began_before)


def test_examples_are_few() -> None:
    found = compared([], [made(str(n), session=str(n)) for n in range(50)])
    assert (found.only_there, len(found.examples)) == (50, MAX_EXAMPLES)


@pytest.mark.parametrize(
    ("one", "other", "paths"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"b": 1}, ["a", "b"]),
        ({"a": {"b": [{"c": 1}]}}, {"a": {"b": [{"c": 2}]}}, ["a.b[].c"]),
        ([1, 2], [1], ["[] (number of items)"]),
        ({"a": float("nan")}, {"a": float("nan")}, []),
        ({"a": None}, {"a": 0}, ["a"]),
    ],
)
def test_paths_of_fields(one: Any, other: Any, paths: list[str]) -> None:
    assert list(differing(one, other)) == paths
