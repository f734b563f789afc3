"""Reads the topics in a thread of its own and keeps a tally."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from threading import Event, Lock, Thread
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from streams.contracts import TICK_HEADER, SourceRef
from streams.demo.tally import TALLIED, Tally
from streams.errors import RecordError
from streams.kafka.reading import offset_range
from streams.serde import Codec

_POLL_S = 0.2
_BATCH = 500


class TopicWatcher:
    """Keeps a :class:`Tally` of everything written since it was made.

    Args:
        consumer: A read_committed consumer; belongs to the watcher from now on.
        codec: Reads the records.
    """

    def __init__(self, consumer: Consumer, codec: Codec) -> None:
        self._consumer = consumer
        self._codec = codec
        self._tally = Tally()
        self._lock = Lock()
        self._stopping = Event()
        self._consumer.assign(_ends(consumer))
        self._thread = Thread(target=self._run, name="demo-watcher", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def tally(self) -> Iterator[Tally]:
        """The tally, held still while it is read."""
        with self._lock:
            yield self._tally

    def close(self) -> None:
        """Stop reading."""
        self._stopping.set()
        self._thread.join()
        self._consumer.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            messages = self._consumer.consume(_BATCH, _POLL_S)
            with self._lock:
                for message in messages:
                    if message.error() is None:
                        count(self._tally, message, self._codec)


def count(tally: Tally, message: Any, codec: Codec) -> None:
    """Add one Kafka message to ``tally``; clock ticks are not records."""
    if message.value() is None and TICK_HEADER in dict(message.headers() or ()):
        return
    ref = SourceRef(topic=message.topic(), partition=message.partition(), offset=message.offset())
    try:
        record = codec.decode(message.value(), TALLIED[message.topic()])
    except RecordError:
        tally.add_unreadable()
        return
    tally.add(ref, record)


def _ends(consumer: Consumer) -> list[TopicPartition]:
    known = consumer.list_topics(timeout=10).topics
    partitions = [
        TopicPartition(topic, partition)
        for topic in TALLIED
        for partition in sorted(known[topic].partitions)
    ]
    for place in partitions:
        _, place.offset = offset_range(consumer, place.topic, place.partition)
    return partitions
