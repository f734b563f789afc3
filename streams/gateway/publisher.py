"""Makes events durable: in Kafka, or on disk until Kafka is back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event, Thread
from typing import Protocol

from confluent_kafka import KafkaError, KafkaException, Producer

from streams.errors import BrokerError, OversizedError, SpoolError
from streams.gateway.spool import Envelope, Spool

logger = logging.getLogger(__name__)

_FLUSH_BATCH = 500
_RETRY_S = 1.0
_POLL_S = 0.1
_NEVER = (
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE,
    KafkaError.INVALID_RECORD,
)
"""Errors of the record itself; all others pass when Kafka or its operator mends something."""


Refused = tuple[Envelope, str]
"""A record that Kafka will never take, and why."""


class Publisher(Protocol):
    """Takes events over from the gateway."""

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        """Returns once ``envelopes`` are durable, those of one key in order.

        Raises:
            OversizedError: Kafka will never take one of them; the others are durable.
            SpoolError: Neither Kafka nor the disk takes them.
        """
        ...


class DeliveryError(BrokerError):
    """Kafka did not take a record in time."""


class Sender(Protocol):
    """What the spooling publisher sends through."""

    async def send(self, envelopes: Sequence[Envelope]) -> Sequence[Refused]:
        """Send and wait for every acknowledgement; those of one key one after the other.

        Returns:
            What Kafka will never take; everything else is acknowledged.

        Raises:
            DeliveryError: At least one was not acknowledged. It may still have been written:
                sending again is safe, since the aligner drops equal events.
            BrokerError: There is no producer to send with.
        """
        ...


class KafkaSender:
    """Produces with confluent-kafka and awaits the acknowledgements.

    A producer that met a fatal error is replaced: it would never send again.

    Args:
        make_producer: Makes an idempotent producer; its ``message.timeout.ms`` bounds how long
            :meth:`send` waits for one record while Kafka is away.
    """

    def __init__(self, make_producer: Callable[[], Producer]) -> None:
        self._make_producer = make_producer
        self._producer = make_producer()
        self._retired: list[Producer] = []
        self._stopping = Event()
        self._poller = Thread(target=self._poll, name="gateway-producer", daemon=True)
        self._poller.start()

    async def send(self, envelopes: Sequence[Envelope]) -> Sequence[Refused]:
        """See :class:`Sender`."""
        by_key: dict[bytes, list[Envelope]] = {}
        for envelope in envelopes:
            by_key.setdefault(envelope.key, []).append(envelope)
        results = await asyncio.gather(
            *(self._send_in_order(some) for some in by_key.values()), return_exceptions=True
        )
        refused: list[Refused] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            refused.extend(result)
        return refused

    def close(self) -> None:
        """Wait briefly for what is under way, then stop."""
        self._producer.flush(5)
        self._stopping.set()
        self._poller.join()

    async def _send_in_order(self, envelopes: Sequence[Envelope]) -> list[Refused]:
        # Each waits for the one before: were all under way at once, a later one could be
        # written while an earlier one runs into its timeout and follows from the spool.
        refused: list[Refused] = []
        for envelope in envelopes:
            producer = self._producer
            error = await self._send_one(producer, envelope)
            if error is None:
                continue
            if error.code() not in _NEVER:
                self._replace_if_dead(producer, error)
                raise DeliveryError(error.str())
            refused.append((envelope, error.str()))
        return refused

    @staticmethod
    def _send_one(producer: Producer, envelope: Envelope) -> asyncio.Future[KafkaError | None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[KafkaError | None] = loop.create_future()

        def resolve(error: KafkaError | None) -> None:
            if not future.done():
                future.set_result(error)

        def delivered(error: KafkaError | None, _message: object) -> None:
            # At the very end the loop may be closed while the last records time out.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(resolve, error)

        try:
            producer.produce(
                envelope.topic, key=envelope.key, value=envelope.value, on_delivery=delivered
            )
        except BufferError as error:
            resolve(KafkaError(KafkaError._QUEUE_FULL, str(error)))
        except KafkaException as error:
            resolve(error.args[0])
        return future

    def _replace_if_dead(self, producer: Producer, error: KafkaError) -> None:
        is_dead = error.fatal() or error.code() == KafkaError._FATAL
        if is_dead and producer is self._producer:
            logger.error("the producer cannot go on, making another: %s", error)
            self._producer = self._make_producer()
            self._retired.append(producer)

    def _poll(self) -> None:
        while not self._stopping.is_set():
            self._producer.poll(_POLL_S)
            # Whatever else a dead one had under way is told so by its own poll.
            for retired in tuple(self._retired):
                retired.poll(0)
                if not len(retired):
                    self._retired.remove(retired)


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
        self._sent_through = 0
        self._refused: tuple[Refused, ...] = ()

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
                refused = await self._sender.send(envelopes)
            except BrokerError as error:
                logger.warning("kafka is away, spooling to disk: %s", error)
            else:
                if refused:
                    raise OversizedError(f"kafka refuses it for good: {refused[0][1]}")
                return
        await asyncio.to_thread(self._spool.append, envelopes)

    async def flush_once(self) -> bool:
        """Send the oldest batch that waits; False if there is none or Kafka is still away.

        What Kafka will never take is set aside in the spool's table ``refused``, so that it
        does not hold up the rest.

        Raises:
            SpoolError: The disk does not answer. What was sent is not sent again.
        """
        last_id, waiting = await asyncio.to_thread(self._spool.first, _FLUSH_BATCH)
        if not waiting:
            return False
        if last_id != self._sent_through:
            try:
                self._refused = tuple(await self._sender.send(waiting))
            except BrokerError:
                return False
            self._sent_through = last_id
        await asyncio.to_thread(self._spool.drop_through, last_id, self._refused)
        for envelope, reason in self._refused:
            logger.error("set aside a record for %s: %s", envelope.topic, reason)
        logger.info("sent %d spooled events, %d still wait", len(waiting), len(self._spool))
        return True

    async def _flush_forever(self) -> None:
        while True:
            try:
                more = await self.flush_once()
            except SpoolError as error:
                logger.error("cannot send what waits on disk, trying again: %s", error)
                more = False
            if not more:
                await asyncio.sleep(_RETRY_S)
