"""A relay in front of a broker, which can be cut as a cable can."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from streams.ports import LOOPBACK

CHUNK_BYTES = 64 * 1024


class Relays:
    """Relays on ports of their own, all driven by one thread.

    Args:
        count: How many.
    """

    def __init__(self, count: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relays", daemon=True)
        self._thread.start()
        self._relays = [self._await(_Relay.listen()) for _ in range(count)]

    @property
    def ports(self) -> list[int]:
        """Where they listen."""
        return [relay.port for relay in self._relays]

    def connect(self, targets: list[int]) -> None:
        """Say which local port each of them leads to."""
        for relay, target in zip(self._relays, targets, strict=True):
            relay.target = target

    def cut(self, index: int) -> None:
        """Let nothing through either way; connections stay open, as when packets are lost."""
        self._loop.call_soon_threadsafe(self._relays[index].is_open.clear)

    def mend(self) -> None:
        """Let everything through again, what was held up first, and without delay."""
        for relay in self._relays:
            relay.delay_s = 0.0
            self._loop.call_soon_threadsafe(relay.is_open.set)

    def slow(self, delay_s: float) -> None:
        """Hold each piece of what brokers say up for a while."""
        for relay in self._relays:
            relay.delay_s = delay_s

    def close(self) -> None:
        """End all connections."""
        for relay in self._relays:
            self._await(relay.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _await(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)


class _Relay:
    def __init__(self) -> None:
        self.target = 0
        self.delay_s = 0.0
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.port = 0
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()

    @classmethod
    async def listen(cls) -> _Relay:
        relay = cls()
        relay._server = await asyncio.start_server(relay._connected, LOOPBACK, 0)
        relay.port = relay._server.sockets[0].getsockname()[1]
        return relay

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.is_open.wait()
        try:
            back_reader, back_writer = await asyncio.open_connection(LOOPBACK, self.target)
        except OSError:
            writer.close()
            return
        for pump in (
            self._pump(reader, back_writer, is_answer=False),
            self._pump(back_reader, writer, is_answer=True),
        ):
            task = asyncio.create_task(pump)
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if is_answer and self.delay_s > 0:
                    await asyncio.sleep(self.delay_s)
                await self.is_open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
