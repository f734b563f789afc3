"""Header keys as clients write them that do not care for UTF-8."""

from __future__ import annotations


class RawKey(str):
    """A header key that a Python client writes as the bytes it was made of."""

    __slots__ = ("raw",)

    def __new__(cls, raw: bytes) -> RawKey:
        made = super().__new__(cls, raw.decode("latin-1"))
        made.raw = raw
        return made

    raw: bytes

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        return self.raw
