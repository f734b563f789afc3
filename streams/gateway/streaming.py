"""One streamed reply on its way from the policy server to the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import Any

import httpx
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from streams.errors import ClawstreamError, ServingError
from streams.gateway.background import Background
from streams.gateway.reply import ReplyBuilder
from streams.gateway.service import Ending
from streams.gateway.sse import DONE, sse_data
from streams.gateway.wire import dump_json, error_body, parse_answer

logger = logging.getLogger(__name__)

Stamp = Callable[[dict[str, Any], ReplyBuilder], dict[str, Any]]
"""Makes what the client sees of a chunk."""

Record = Callable[[ReplyBuilder, Ending], Coroutine[Any, Any, None]]
"""Makes a reply durable."""


class StreamedReply:
    """Passes chunks on and records the reply, exactly once, however it ends.

    Args:
        answer: The policy server's, its body not yet read.
        stamp: See :data:`Stamp`.
        record: See :data:`Record`.
        background: Where recording goes on when the client is gone.
    """

    def __init__(
        self, answer: httpx.Response, stamp: Stamp, record: Record, background: Background
    ) -> None:
        self._answer = answer
        self._stamp = stamp
        self._record = record
        self._background = background
        self._reply = ReplyBuilder()
        self._settled: asyncio.Task[None] | None = None

    async def events(self) -> AsyncGenerator[str, None]:
        """The client's events. The reply is durable before the last one, ``[DONE]``."""
        try:
            async for chunk in self._chunks():
                yield f"data: {dump_json(self._stamp(chunk, self._reply))}\n\n"
            await asyncio.shield(self.settle(Ending.DONE))
            yield f"data: {DONE}\n\n"
        except (httpx.HTTPError, ClawstreamError) as error:
            logger.error("a reply broke off: %s", error)
            with suppress(ClawstreamError):
                await asyncio.shield(self.settle(Ending.BROKEN))
            yield f"data: {dump_json(error_body(502, f'the reply broke off: {error!r}'))}\n\n"

    def settle(self, end: Ending) -> asyncio.Task[None]:
        """Record the reply as far as it came; the first call decides how it ended."""
        if self._settled is None:
            self._settled = self._background.start(self._end(end))
        return self._settled

    async def _chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        async for data in sse_data(self._answer.aiter_bytes()):
            if data == DONE:
                return
            chunk = parse_answer(data)
            if chunk.get("error"):
                raise ServingError(f"the policy server says {str(chunk['error'])[:500]}")
            self._reply.feed(chunk)
            yield chunk
        if self._reply.finish_reason is None:
            raise ServingError("the policy server ended the stream before the reply's end")

    async def _end(self, end: Ending) -> None:
        with suppress(httpx.HTTPError):
            await self._answer.aclose()
        await self._record(self._reply, end)


class StreamedResponse(StreamingResponse):
    """Sends a streamed reply and settles it whatever becomes of the client.

    Args:
        reply: What to send.
        headers: Of the response.
        patience_s: How long a client may take for one event; then it counts as gone.
    """

    def __init__(self, reply: StreamedReply, headers: dict[str, str], patience_s: float) -> None:
        self._reply = reply
        self._patience_s = patience_s
        self._events = reply.events()
        super().__init__(self._events, headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def patiently(message: Message) -> None:
            async with asyncio.timeout(self._patience_s):
                await send(message)

        try:
            await super().__call__(scope, receive, patiently)
        except TimeoutError:
            logger.warning("a client took nothing for %g s, leaving it", self._patience_s)
        finally:
            # The events may not even have begun when the client goes.
            self._reply.settle(Ending.HUNG_UP)
            await self._events.aclose()
