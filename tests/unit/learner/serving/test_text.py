from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.serving.text import ReplyText

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def decode(token_ids: Sequence[int]) -> str:
    """Tokens are bytes; 256 and above are special and have no text."""
    return bytes(token for token in token_ids if token < 256).decode(errors="replace")


def feed(text: ReplyText, data: bytes) -> list[str]:
    return [text.push(byte) for byte in data]


def test_a_character_is_released_when_it_is_whole() -> None:
    text = ReplyText(decode)
    assert feed(text, "a你b".encode()) == ["a", "", "", "你", "b"]
    assert text.finish() == ""


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    text = ReplyText(decode)
    assert feed(text, "好".encode()[:2]) == ["", ""]
    assert text.finish() == UNFINISHED


def test_a_special_token_has_no_text() -> None:
    text = ReplyText(decode)
    assert [text.push(token) for token in (97, 300, 98)] == ["a", "", "b"]


def test_what_could_begin_a_stop_string_is_held_back() -> None:
    text = ReplyText(decode, stop=("END",))
    assert feed(text, b"xEN") == ["x", "", ""]
    assert text.push(ord("x")) == "ENx"
    assert not text.stopped


def test_a_stop_string_is_cut_off_and_nothing_follows() -> None:
    text = ReplyText(decode, stop=("END",))
    assert feed(text, b"xENDy") == ["x", "", "", "", ""]
    assert text.stopped
    assert text.finish() == ""


def test_the_earliest_of_several_stop_strings_counts() -> None:
    text = ReplyText(lambda ids: "one two three"[: 13 * len(ids)], stop=("three", "two"))
    assert text.push(1) == "one "
    assert text.stopped


def test_a_held_back_end_is_released_when_the_reply_ends() -> None:
    text = ReplyText(decode, stop=("END",))
    feed(text, b"xEN")
    assert text.finish() == "EN"


@given(st.binary(max_size=40))
def test_the_pieces_are_the_text(data: bytes) -> None:
    text = ReplyText(decode)
    pieces = [*feed(text, data), text.finish()]
    assert "".join(pieces) == data.decode(errors="replace")


@given(st.text(alphabet="ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4)))
def test_the_pieces_end_before_the_first_stop_string(said: str, stop: list[str]) -> None:
    text = ReplyText(decode, stop=tuple(stop))
    pieces = []
    for byte in said.encode():
        pieces.append(text.push(byte))
        if text.stopped:
            break
    pieces.append(text.finish())
    # As a reader of the stream sees it: the first moment at which a stop string is complete.
    complete = [end for end in range(len(said) + 1) if any(item in said[:end] for item in stop)]
    seen = said[: complete[0]] if complete else said
    cut = min((seen.find(item) for item in stop if item in seen), default=len(seen))
    assert "".join(pieces) == seen[:cut]
    assert text.stopped == bool(complete)


@pytest.mark.parametrize("stop", [(), ("",)])
def test_an_empty_stop_string_stops_nothing(stop: tuple[str, ...]) -> None:
    text = ReplyText(decode, stop=stop)
    assert "".join(feed(text, b"abc")) == "abc"
