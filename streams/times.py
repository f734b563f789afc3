"""Points in time as people and front ends write them. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from streams.errors import InvalidRecordError, SettingsError

EARLIEST_MS = 100_000_000_000
"""1973: a smaller number is of seconds, as many systems count them."""

_UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}
_AGE = re.compile(r"(\d+)([smhdw])")
_MILLISECONDS = re.compile(r"\d{12,14}")


def parse_time(text: str, now_ms: int) -> int:
    """A point in time, in milliseconds since the epoch.

    Args:
        text: ``2026-11-30``, ``2026-11-30T06:15``, with or without seconds and zone (UTC
            without one); how long ago (``90s``, ``15m``, ``6h``, ``30d``, ``4w``); ``now``; or
            milliseconds since the epoch (12 to 14 digits).
        now_ms: What ``now`` is, and what ages count from.

    Raises:
        SettingsError: It is none of these.
    """
    wanted = text.strip()
    if wanted == "now":
        return now_ms
    if age := _AGE.fullmatch(wanted):
        return max(0, now_ms - int(age[1]) * _UNITS_MS[age[2]])
    if _MILLISECONDS.fullmatch(wanted):
        return int(wanted)
    try:
        found = datetime.fromisoformat(wanted)
        return round((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1_000)
    except (ValueError, OverflowError):
        raise SettingsError(
            f"{text!r} is no time: write 2026-11-30, 2026-11-30T06:15 (UTC) or with a zone "
            "(2026-11-30T06:15+01:00), or how long ago: 15m, 6h, 30d"
        ) from None


def check_event_time(time_ms: int, latest_ms: int) -> None:
    """Refuse a time that an event cannot have.

    Args:
        time_ms: As it was sent, ms since the epoch.
        latest_ms: The latest time that is believed.

    Raises:
        InvalidRecordError: It is before ``EARLIEST_MS``, or after ``latest_ms``.
    """
    if time_ms < EARLIEST_MS:
        raise InvalidRecordError(
            f"event_time: {time_ms} ms since 1970 is before 1973, these look like seconds; send "
            "milliseconds since 1970, UTC"
        )
    if time_ms > latest_ms:
        raise InvalidRecordError(
            f"event_time: {time_ms} is more than align.max_skew_ms ahead of the clock here; send "
            "milliseconds since 1970, UTC"
        )


def show_time(time_ms: int) -> str:
    """A time for people: UTC, to the second; what no calendar has as plain milliseconds."""
    try:
        return f"{datetime.fromtimestamp(time_ms / 1_000, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return f"{time_ms} ms"


__all__ = ["EARLIEST_MS", "check_event_time", "parse_time", "show_time"]
