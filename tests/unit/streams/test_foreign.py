"""What others wrote, as far as it can be used."""

from __future__ import annotations

import pytest

from streams.foreign import lone_half, writable


@pytest.mark.parametrize(
    ("text", "half"),
    [
        ("", None),
        ("plain, 中文 and \U0001f600", None),
        ("x\ud83dy", "\ud83d"),
        ("\ude00\ud83d", "\ude00"),
    ],
)
def test_half_of_a_pair_is_found_where_it_stands(text: str, half: str | None) -> None:
    assert lone_half(text) == half
    assert lone_half(writable(text)) is None
