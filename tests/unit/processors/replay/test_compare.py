from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from processors.replay.compare import (
    MAX_EXAMPLES,
    Comparison,
    Head,
    Kept,
    Where,
    compare,
    differing,
    digest_of,
)
from streams.errors import UndecodableError

Made = tuple[Head, bytes]


def made(
    name: str, content: object = 1, *, session: str = "s", ordinal: int = 0, at: int = 100
) -> Made:
    head = Head(name, 0, f"default/{session}", ordinal, at)
    return head, json.dumps(content).encode()


class Here:
    """Outputs of a replay; notes which of them are read again."""

    def __init__(self, outputs: list[Made]) -> None:
        self.outputs = outputs
        self.read: list[str] = []

    def __iter__(self) -> Iterator[Kept]:
        for number, (head, value) in enumerate(self.outputs):
            yield Kept(head, digest_of(value), 0, number)

    def value(self, kept: Kept) -> bytes:
        self.read.append(kept.head.segment_id)
        return self.outputs[kept.number][1]


def decoded(value: bytes) -> Any:
    if value == b"damaged":
        raise UndecodableError("it is damaged")
    return json.loads(value)


def compared(here: list[Made], there: list[Made], **options: Any) -> Comparison:
    return compare(Here(here), there, decoded, **{"from_ms": 0, **options})


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
    head, value = made("a", {"x": 1})
    assert value == b'{"x": 1}'
    assert compared([(head, value)], [(head, b'{"x":1}')]).equal == 1


def test_only_outputs_that_differ_are_read_again() -> None:
    here = Here([made("same"), made("other"), made("old", at=10), made("mine", session="m")])
    there = [made("same"), made("other", 2), made("old", 2, at=10), made("theirs", session="t")]
    found = compare(here, there, decoded, from_ms=50)
    assert (found.equal, found.different, found.only_here, found.only_there) == (1, 1, 1, 1)
    assert here.read == ["other"]


def test_a_live_output_that_cannot_be_read_is_passed_over() -> None:
    head, _ = made("a")
    found = compared([made("a")], [(head, b"damaged"), made("a")])
    assert (found.is_equal, found.equal) == (True, 1)


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
    found = compared([], [made("a")], where=lambda head, value: where)
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
