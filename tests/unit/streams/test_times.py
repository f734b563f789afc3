from __future__ import annotations

import pytest

from streams.errors import SettingsError
from streams.times import parse_time, show_time

NOW_MS = 1_800_000_000_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now", NOW_MS),
        ("90s", NOW_MS - 90_000),
        ("15m", NOW_MS - 900_000),
        (" 6h ", NOW_MS - 6 * 3_600_000),
        ("30d", NOW_MS - 30 * 86_400_000),
        ("4w", NOW_MS - 28 * 86_400_000),
        ("9999999w", 0),
        ("1700000000123", 1_700_000_000_123),
        ("1970-01-02", 86_400_000),
        ("1970-01-01T01:00", 3_600_000),
        ("1970-01-01 01:00:00.250", 3_600_250),
        ("1970-01-01T01:00+01:00", 0),
        ("1970-01-01T00:00:01Z", 1_000),
    ],
)
def test_times_are_read(text: str, expected: int) -> None:
    assert parse_time(text, NOW_MS) == expected


@pytest.mark.parametrize("text", ["", "yesterday", "6 h", "2026-13-01", "h", "-6h", "12:30"])
def test_what_is_no_time_is_refused_with_what_would_be(text: str) -> None:
    with pytest.raises(SettingsError, match="is no time: write 2026-11-30"):
        parse_time(text, NOW_MS)


def test_times_are_shown_in_utc() -> None:
    assert show_time(86_400_000) == "1970-01-02 00:00:00"
    assert show_time(2**62) == f"{2**62} ms"
