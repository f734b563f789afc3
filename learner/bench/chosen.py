"""The subjects that a bench's user named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from streams.errors import SettingsError

Name = TypeVar("Name", bound=str)


def chosen(text: str, known: Sequence[Name], usual: Sequence[Name]) -> tuple[Name, ...]:
    """The names in a list with commas, in the order of ``known``; ``usual`` for "all".

    Raises:
        SettingsError: One is not known, or there is none.
    """
    if text == "all":
        return tuple(usual)
    names = {name.strip() for name in text.split(",") if name.strip()}
    unknown = sorted(names.difference(known))
    if unknown or not names:
        raise SettingsError(
            f"--subjects: unknown {', '.join(unknown) or repr(text)}; known are {', '.join(known)}"
        )
    return tuple(name for name in known if name in names)


__all__ = ["chosen"]
