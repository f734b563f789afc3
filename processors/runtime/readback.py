"""Single records of the log, read again: what memory no longer has and a segment needs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from processors.runtime.connection import bootstrap_servers
from processors.runtime.records import Record
from streams.errors import BrokerError
from streams.kafka.clients import make_consumer
from streams.settings import KafkaSettings

SEEK_RECORDS = 500
"""Reading on over so many records costs about as much as a seek."""

_FETCH_BYTES = 128 * 1024
_CONSUME_RECORDS = 1_000
_POLL_S = 0.02
_STALL_S = 30.0
_END_PATIENCE_S = 3.0


class ReadBack:
    """Reads records by offset (``records.LogReader``). Used by one thread.

    Its consumer joins no group and is made when it is first needed.

    Args:
        kafka: How to reach Kafka.
    """

    def __init__(self, kafka: KafkaSettings) -> None:
        self._kafka = kafka
        self._consumer: Consumer | None = None

    def read(self, topic: str, partition: int, offsets: Sequence[int]) -> Iterator[Record]:
        """See ``LogReader``."""
        if not offsets:
            return
        consumer = self._connected()
        try:
            yield from _Reading(consumer, topic, partition, offsets).records()
            consumer.unassign()
        except KafkaException as error:
            raise BrokerError(f"cannot read {topic} partition {partition}: {error}") from error

    def _connected(self) -> Consumer:
        if self._consumer is None:
            self._consumer = make_consumer(
                self._kafka,
                bootstrap_servers(self._kafka),
                group="clawstream-readback",
                auto_offset_reset="error",
                overrides={
                    "enable.partition.eof": True,
                    "fetch.wait.max.ms": 10,
                    "fetch.message.max.bytes": _FETCH_BYTES,
                    "queued.min.messages": 1,
                    # With so small a queue the client would wait for a second before each fetch.
                    "fetch.queue.backoff.ms": 1,
                    "queued.max.messages.kbytes": 2 * _FETCH_BYTES // 1024,
                },
            )
        return self._consumer


class _Reading:
    """One pass over rising offsets of one partition."""

    def __init__(
        self, consumer: Consumer, topic: str, partition: int, offsets: Sequence[int]
    ) -> None:
        self._consumer = consumer
        self._topic = topic
        self._partition = partition
        self._offsets = offsets
        self._next = 0
        self._last_seen_s = time.monotonic()

    def records(self) -> Iterator[Record]:
        offsets = self._offsets
        self._consumer.assign([self._place()])
        while self._next < len(offsets):
            for message in self._consumer.consume(self._portion(), _POLL_S) or self._waited():
                error = message.error()
                if error is not None:
                    self._judge(error)
                    if self._next == len(offsets):
                        return
                    continue
                self._last_seen_s = time.monotonic()
                if message.partition() != self._partition or message.topic() != self._topic:
                    continue  # It was on its way when the place before was left.
                offset = message.offset() or 0
                while self._next < len(offsets) and offsets[self._next] < offset:
                    self._next += 1  # This one is gone.
                if self._next < len(offsets) and offsets[self._next] == offset:
                    self._next += 1
                    yield record_of(message)
                if self._next == len(offsets):
                    return
                if offsets[self._next] - offset > SEEK_RECORDS:
                    # What else was consumed lies before the next place.
                    self._consumer.seek(self._place())
                    break

    def _place(self) -> TopicPartition:
        return TopicPartition(self._topic, self._partition, self._offsets[self._next])

    def _portion(self) -> int:
        """How many records to take at once: only as many as lead to the next ones wanted."""
        ahead = self._offsets[min(self._next + 200, len(self._offsets) - 1)]
        return max(1, min(_CONSUME_RECORDS, ahead - self._offsets[self._next] + 1))

    def _waited(self) -> Sequence[Message]:
        if time.monotonic() - self._last_seen_s > _STALL_S:
            raise BrokerError(
                f"nothing comes from {self._topic} partition {self._partition} at offset "
                f"{self._offsets[self._next]}: is it online?"
            )
        return ()

    def _judge(self, error: KafkaError) -> None:
        if error.code() == KafkaError._PARTITION_EOF:
            self._doubt_the_end()
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:
            self._go_where_records_are()
        elif not error.retriable() and error.code() not in PASSING:
            raise BrokerError(
                f"cannot read {self._topic} partition {self._partition} again: {error}"
            )

    def _doubt_the_end(self) -> None:
        """Give up what lies behind the end once it has stayed there.

        Right after a change of leaders the end may for a moment lie before records that were
        there already.
        """
        if time.monotonic() - self._last_seen_s > _END_PATIENCE_S:
            self._next = len(self._offsets)
        else:
            self._consumer.assign([self._place()])

    def _go_where_records_are(self) -> None:
        """Leave out what lies before the first record there is, and after the last."""
        low, high = self._consumer.get_watermark_offsets(self._place(), timeout=_STALL_S)
        while self._next < len(self._offsets) and self._offsets[self._next] < low:
            self._next += 1
        if self._next < len(self._offsets) and self._offsets[self._next] >= high:
            self._doubt_the_end()
        elif self._next < len(self._offsets):
            self._consumer.assign([self._place()])


PASSING = {KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN}
"""Errors that the client mends by itself, and does not call retriable."""


def record_of(message: Message) -> Record:
    """A consumed message as plain data."""
    headers: Any = message.headers() or ()
    return Record(
        topic=message.topic() or "",
        partition=message.partition() or 0,
        offset=message.offset() or 0,
        timestamp=message.timestamp()[1],
        key=message.key(),
        value=message.value(),
        headers=tuple(headers),
    )


__all__ = ["PASSING", "ReadBack", "record_of"]
