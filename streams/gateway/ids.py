"""Which ids the gateway takes from outside. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streams.errors import RequestRefusedError

LONGEST_ID_BYTES = 512
"""Ids are repeated in headers and are Kafka keys; both have little room."""


def usable_id(name: str, value: Any) -> str | None:
    """An id as it is recorded: without surrounding blanks; None if there is none.

    Args:
        name: What to call it in the error.
        value: What the client sent; anything but text counts as not sent.

    Raises:
        RequestRefusedError: It holds control characters, which could end a header, or is longer
            than ``LONGEST_ID_BYTES`` in UTF-8.
    """
    if not isinstance(value, str) or not (text := value.strip()):
        return None
    if any(character < " " or character == "\x7f" for character in text):
        raise RequestRefusedError(f"{name} must not hold control characters", param=name)
    if len(text.encode()) > LONGEST_ID_BYTES:
        raise RequestRefusedError(f"{name} is longer than {LONGEST_ID_BYTES} bytes", param=name)
    return text


def header_text(headers: Mapping[str, str], name: str) -> str | None:
    """A request header as the UTF-8 it most likely is; None if it was not sent.

    HTTP libraries read headers as Latin-1, which turns the session id that the same client
    sends in a JSON body into another one.
    """
    value = headers.get(name)
    if value is None:
        return None
    try:
        return value.encode("latin-1").decode()
    except UnicodeError:
        return value


def header_value(text: str) -> str:
    """``text`` such that a library that writes headers in Latin-1 sends it in UTF-8."""
    return text.encode().decode("latin-1")
