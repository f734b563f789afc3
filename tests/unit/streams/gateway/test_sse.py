from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from streams.errors import ServingError
from streams.gateway import sse
from streams.gateway.sse import sse_data


async def pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def read(data: bytes, size: int = 1) -> list[str]:
    return [found async for found in sse_data(pieces(data, size))]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
async def test_only_line_feeds_end_a_line(size: int) -> None:
    data = "data: a\u2028\u0085b\r\n\r\n: ping\n\nevent: x\ndata:\ndata:c\n\ndata: 😀".encode()
    assert await read(data, size) == ["a\u2028\u0085b", "c", "😀"]


async def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(ServingError, match="UTF-8"):
        await read(b"data: \xff\n")


async def test_an_endless_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "LONGEST_LINE_BYTES", 5)
    with pytest.raises(ServingError, match="more than 5 bytes"):
        await read(b"data: endless")
