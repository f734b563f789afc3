"""Makes events durable: in Kafka, or on disk until Kafka is back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from threading import Event, Thread
from typing import Any, Protocol

from confluent_kafka import KafkaException, Producer

from streams.gateway.spool import Envelope, Spool

logger = logging.getLogger(__name__)

_FLUSH_BATCH = 500
_RETRY_S = 1.0
_POLL_S = 0.1


class Publisher(Protocol):
    """Takes events over from the gateway."""

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        """Returns once ``envelopes`` are durable, in order.

        Raises:
            sqlite3.Error: Neither Kafka nor the disk takes them.
        """
        ...


class DeliveryError(Exception):
    """Kafka did not take a record in time."""


class KafkaSender:
    """Produces with confluent-kafka and awaits the acknowledgements.

    Args:
        config: librdkafka settings of an idempotent producer; its ``message.timeout.ms``
            bounds how long :meth:`send` waits while Kafka is away.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._producer = Producer(config)
        self._stopping = Event()
        self._poller = Thread(target=self._poll, name="gateway-producer", daemon=True)
        self._poller.start()

    async def send(self, envelopes: Sequence[Envelope]) -> None:
        """Produce all and wait for every acknowledgement.

        Raises:
            DeliveryError: At least one was not acknowledged. It may still have been written:
                sending again is safe, since the aligner drops equal events.
        """
        loop = asyncio.get_running_loop()
        results = await asyncio.gather(
            *(self._send_one(loop, envelope) for envelope in envelopes), return_exceptions=True
        )
        failed = [result for result in results if isinstance(result, BaseException)]
        if failed:
            raise DeliveryError(str(failed[0])) from failed[0]

    def close(self) -> None:
        """Wait briefly for what is under way, then stop."""
        self._producer.flush(5)
        self._stopping.set()
        self._poller.join()

    def _send_one(
        self, loop: asyncio.AbstractEventLoop, envelope: Envelope
    ) -> asyncio.Future[None]:
        future: asyncio.Future[None] = loop.create_future()

        def resolve(error: Any) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(DeliveryError(str(error)))

        def delivered(error: Any, _message: Any) -> None:
            loop.call_soon_threadsafe(resolve, error)

        try:
            self._producer.produce(
                envelope.topic, key=envelope.key, value=envelope.value, on_delivery=delivered
            )
        except (BufferError, KafkaException) as error:
            future.set_exception(DeliveryError(str(error)))
        return future

    def _poll(self) -> None:
        while not self._stopping.is_set():
            self._producer.poll(_POLL_S)


class Sender(Protocol):
    """What the spooling publisher sends through."""

    async def send(self, envelopes: Sequence[Envelope]) -> None:
        """Raises :class:`DeliveryError` unless every envelope is acknowledged."""
        ...


class SpoolingPublisher:
    """Sends to Kafka; keeps on disk what Kafka does not take, and sends it first later.

    While anything waits on disk, everything new goes there too, so that a session's events
    reach Kafka in the order in which they were accepted.

    Args:
        sender: The way to Kafka.
        spool: The way to the disk.
    """

    def __init__(self, sender: Sender, spool: Spool) -> None:
        self._sender = sender
        self._spool = spool
        self._flusher: asyncio.Task[None] | None = None

    @property
    def spooled(self) -> int:
        """Events that wait on disk."""
        return len(self._spool)

    def start(self) -> None:
        """Send what an earlier run left on disk, and whatever comes to wait there."""
        self._flusher = asyncio.create_task(self._flush_forever())

    async def stop(self) -> None:
        """Stop sending; what waits stays on disk."""
        if self._flusher is not None:
            self._flusher.cancel()
            await asyncio.gather(self._flusher, return_exceptions=True)

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        """See :class:`Publisher`."""
        if not len(self._spool):
            try:
                await self._sender.send(envelopes)
            except DeliveryError as error:
                logger.warning("kafka is away, spooling to disk: %s", error)
            else:
                return
        await asyncio.to_thread(self._spool.append, envelopes)

    async def flush_once(self) -> bool:
        """Send the oldest batch that waits; False if there is none or Kafka is still away."""
        last_id, waiting = await asyncio.to_thread(self._spool.first, _FLUSH_BATCH)
        if not waiting:
            return False
        try:
            await self._sender.send(waiting)
        except DeliveryError:
            return False
        await asyncio.to_thread(self._spool.drop_through, last_id)
        logger.info("sent %d spooled events, %d still wait", len(waiting), len(self._spool))
        return True

    async def _flush_forever(self) -> None:
        while True:
            if not await self.flush_once():
                await asyncio.sleep(_RETRY_S)
