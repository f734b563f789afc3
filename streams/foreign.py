"""Values of JSON that others wrote, as far as they can be used. Pure."""

from __future__ import annotations

import math
from typing import Any


def finite_number(value: Any) -> float | None:
    """A number as a float; None for anything else, and for what no float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def lone_half(text: str) -> str | None:
    """The first half of a surrogate pair in ``text``: JSON can name one, UTF-8 has none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return None


def writable(text: str) -> str:
    """Text whose characters are whole: a half that lost its other half cannot be written."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
