from __future__ import annotations

from typing import Any

import pytest

from streams.errors import RequestRefusedError
from streams.gateway.ids import LONGEST_ID_BYTES, header_text, header_value, usable_id


@pytest.mark.parametrize("value", [None, "", "  ", 5, [], {}], ids=str)
def test_what_is_no_text_is_no_id(value: Any) -> None:
    assert usable_id("session_id", value) is None


def test_blanks_around_an_id_are_not_part_of_it() -> None:
    assert usable_id("session_id", " a b ") == "a b"


@pytest.mark.parametrize("value", ["a\r\nX: y", "a\x00", "a\x7fb", "a\tb"])
def test_an_id_that_could_end_a_header_is_refused(value: str) -> None:
    with pytest.raises(RequestRefusedError, match="session_id"):
        usable_id("session_id", value)


def test_an_id_may_be_so_long_and_no_longer() -> None:
    longest = "é" * (LONGEST_ID_BYTES // 2)
    assert usable_id("x", longest) == longest
    with pytest.raises(RequestRefusedError, match="longer"):
        usable_id("x", longest + "a")


@pytest.mark.parametrize("text", ["plain", "会话", "é"])
def test_headers_carry_utf8(text: str) -> None:
    assert header_text({"x": header_value(text)}, "x") == text


def test_a_header_that_is_latin_1_stays_so() -> None:
    assert header_text({"x": "caf\xe9"}, "x") == "café"
    assert header_text({}, "x") is None
