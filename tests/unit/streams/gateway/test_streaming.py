from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from streams.errors import SpoolError
from streams.gateway.background import Background
from streams.gateway.reply import ReplyBuilder
from streams.gateway.service import Ending
from streams.gateway.streaming import StreamedReply, StreamedResponse

HELLO = b'data: {"choices": [{"index": 0, "delta": {"content": "hello"}}]}\n\n'
END = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


class Recorder:
    """Notes how replies ended; may refuse."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.recorded: list[tuple[str, Ending]] = []

    async def __call__(self, reply: ReplyBuilder, end: Ending) -> None:
        await asyncio.sleep(0)
        if self.refuses:
            raise SpoolError("full")
        self.recorded.append((reply.content, end))


class Client:
    """An ASGI client that leaves, or stops reading, when told to."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.body = b""

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.body += message.get("body", b"")


def streamed(
    recorder: Recorder, background: Background, *parts: bytes | asyncio.Event
) -> StreamedReply:
    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            if isinstance(part, bytes):
                yield part
            else:
                await part.wait()

    answer = httpx.Response(200, content=body())
    return StreamedReply(answer, lambda chunk, _reply: chunk, recorder, background)


async def send(reply: StreamedReply, client: Client, patience_s: float = 10.0) -> None:
    response = StreamedResponse(reply, {}, patience_s)
    await response({"type": "http", "asgi": {}}, client.receive, client.send)


async def test_a_reply_is_recorded_before_done() -> None:
    recorder, background, client = Recorder(), Background(), Client()
    reply = streamed(recorder, background, HELLO, END, DONE)
    async for line in reply.events():
        if "[DONE]" in line:
            assert recorder.recorded == [("hello", Ending.DONE)]
            break
    else:
        raise AssertionError("no [DONE]")
    await send(streamed(recorder, background, HELLO, END, DONE), client)
    assert client.body.endswith(DONE)
    assert len(recorder.recorded) == 2


async def test_a_client_that_left_before_the_first_byte_leaves_a_marked_turn() -> None:
    recorder, background, client = Recorder(), Background(), Client()
    client.gone.set()
    client.reads.clear()
    await send(streamed(recorder, background, HELLO, END, DONE), client)
    await background.drain()
    assert recorder.recorded == [("", Ending.HUNG_UP)]


async def test_a_client_that_never_reads_counts_as_gone() -> None:
    recorder, background, client = Recorder(), Background(), Client()
    client.reads.clear()
    await send(streamed(recorder, background, HELLO, END, DONE), client, patience_s=0.01)
    await background.drain()
    assert [end for _, end in recorder.recorded] == [Ending.HUNG_UP]


async def test_leaving_while_the_end_is_recorded_records_it_once() -> None:
    recorder, background = Recorder(), Background()
    reply = streamed(recorder, background, HELLO, END, DONE)
    events = reply.events()
    assert [await anext(events), await anext(events)]
    last = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    last.cancel()
    with pytest.raises(asyncio.CancelledError):
        await last
    reply.settle(Ending.HUNG_UP)
    await background.drain()
    assert len(recorder.recorded) == 1


async def test_a_reply_that_cannot_be_recorded_has_no_done() -> None:
    recorder, background, client = Recorder(refuses=True), Background(), Client()
    await send(streamed(recorder, background, HELLO, END, DONE), client)
    last = client.body.decode().strip().split("\n\n")[-1]
    assert "full" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert b"[DONE]" not in client.body


async def test_what_comes_after_done_is_not_waited_for() -> None:
    recorder, background, client = Recorder(), Background(), Client()
    never = asyncio.Event()
    async with asyncio.timeout(10):
        await send(streamed(recorder, background, HELLO, END, DONE, never), client)
    assert recorder.recorded == [("hello", Ending.DONE)]
