"""Which of many regular expressions may match a text, told by one pass over it. Pure.

Trying a few hundred expressions on each turn takes most of the time there is. Hyperscan looks for
all of them at once, in about the same time whatever the text. It knows no look-around, and other
words and digits than Python, so what it looks for is looser: it says which are worth trying.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence

import hyperscan

_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?<?[=!]|\{\d*,?\d*\}|.", re.DOTALL)
_LOOKS = frozenset({"(?=", "(?!", "(?<=", "(?<!"})
_WIDER = {
    r"\s": r"\t-\r\x1c- \x{85}\p{Z}",
    r"\w": r"\w\x{80}-\x{10ffff}",
    r"\d": r"\p{Nd}",
}
_HALF_PAIR = re.compile("[\ud800-\udfff]")
"""Has no bytes of its own; an expression can take it for any character at most."""

_FLAGS = hyperscan.HS_FLAG_UTF8 | hyperscan.HS_FLAG_SINGLEMATCH | hyperscan.HS_FLAG_ALLOWEMPTY


class Gate:
    """Regular expressions, each known by its number. For use by any number of threads.

    Compiling three hundred takes one to two seconds of processor time and keeps 2 MB, so it is
    done when a text is first looked at, or before by ``prepare``.

    Args:
        patterns: As Python reads them, without flags.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = tuple(patterns)
        self._compiled: hyperscan.Database | None = None
        self._compiling = threading.Lock()
        self._of_thread = threading.local()

    def prepare(self) -> None:
        """Compile now, unless it has been done.

        Raises:
            hyperscan.error: A pattern is not taken even when it is loosened.
        """
        self._database()

    def possible(self, text: str) -> list[int]:
        """The numbers of all that match somewhere in ``text`` and of some that do not, in order.

        Raises:
            hyperscan.error: As ``prepare``.
        """
        plain = text if text.isascii() else _HALF_PAIR.sub("\ufffd", text)
        found: list[int] = []

        def note(number: int, *_: object) -> None:
            found.append(number)

        database = self._database()
        database.scan(plain.encode(), match_event_handler=note, scratch=self._scratch(database))
        return sorted(found)

    def _database(self) -> hyperscan.Database:
        if self._compiled is None:
            with self._compiling:
                if self._compiled is None:
                    self._compiled = _compile(self._patterns)
        return self._compiled

    def _scratch(self, database: hyperscan.Database) -> hyperscan.Scratch:
        """What a pass writes in; two at a time must not share it."""
        if not hasattr(self._of_thread, "scratch"):
            self._of_thread.scratch = hyperscan.Scratch(database)
        scratch: hyperscan.Scratch = self._of_thread.scratch
        return scratch


def _compile(patterns: Sequence[str]) -> hyperscan.Database:
    database = hyperscan.Database()
    database.compile(
        expressions=[loosened(pattern).encode() for pattern in patterns],
        ids=list(range(len(patterns))),
        elements=len(patterns),
        flags=[_FLAGS] * len(patterns),
    )
    return database


def loosened(pattern: str) -> str:
    """``pattern`` as Hyperscan looks for it: found wherever ``pattern`` is, and maybe elsewhere.

    Look-arounds and word boundaries are left out, words and digits are those of any script, and
    what may be repeated a number of times may be repeated any number of times: counting is what
    takes long to compile.

    Args:
        pattern: As Python reads it, without flags.
    """
    kept: list[str] = []
    depth = 0
    for piece in _PIECE.findall(pattern):
        if depth or piece in _LOOKS:
            depth += (piece[0] == "(") - (piece == ")")
        else:
            kept.append(_loosened(piece))
    return "".join(kept)


def _loosened(piece: str) -> str:
    if piece in (r"\b", r"\B"):
        return ""
    if piece[0] == "{":
        return "*" if piece[1:2] in ("0", ",") else "+"
    if piece.startswith("[^"):
        return piece  # fewer characters in it are more outside
    for short, characters in _WIDER.items():
        piece = piece.replace(short, characters if piece[0] == "[" else f"[{characters}]")
    return piece


__all__ = ["Gate", "loosened"]
