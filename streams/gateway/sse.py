"""Reads the server-sent events of a policy server. Pure, apart from the bytes it is given."""

from __future__ import annotations

from collections.abc import AsyncIterator

from streams.errors import ServingError

DONE = "[DONE]"
LONGEST_LINE_BYTES = 16 * 1024 * 1024


async def sse_data(body: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The ``data`` of each event, one line each as the OpenAI protocol has it.

    Lines end at LF or CRLF alone: JSON may hold U+2028 or U+0085, at which ``str.splitlines``
    would cut it in two.

    Raises:
        ServingError: A line is too long, or no UTF-8.
    """
    rest = b""
    async for part in body:
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > LONGEST_LINE_BYTES:
            raise ServingError(f"a line has more than {LONGEST_LINE_BYTES} bytes")
        for line in lines:
            if data := _data(line):
                yield data
    if data := _data(rest):
        yield data


def _data(line: bytes) -> str | None:
    if not line.startswith(b"data:"):
        return None
    try:
        return line.removeprefix(b"data:").decode().strip("\r \t") or None
    except UnicodeDecodeError as error:
        raise ServingError(f"a line is no UTF-8: {error}") from error
