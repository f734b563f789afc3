"""Reads a topic once, as far as it goes now."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from streams.errors import BrokerError, RecordError, TopicError

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message

    from streams.contracts import Record
    from streams.serde import Codec
    from streams.settings import Settings

T = TypeVar("T", bound="Record")

GROUP = "clawstream-reading"
_TIMEOUT_S = 30.0
_POLL_S = 1.0
_PAUSE_S = 0.2


@contextmanager
def connect(settings: Settings, group: str, **options: Any) -> Iterator[Consumer]:
    """A consumer of committed records; what it raises becomes one of our errors.

    Args:
        settings: Where Kafka is.
        group: Only a name: nothing is subscribed to or committed.
        **options: As ``make_consumer`` takes them.

    Raises:
        BrokerError: Kafka cannot be reached.
    """
    from confluent_kafka import KafkaException

    from streams.kafka.clients import describe_error, make_consumer, resolve_bootstrap

    bootstrap = resolve_bootstrap(settings)
    consumer = make_consumer(settings.kafka, bootstrap, group=group, **options)
    try:
        yield consumer
    except KafkaException as error:
        raise describe_error(error.args[0], bootstrap) from error
    finally:
        consumer.close()


def read_records(
    settings: Settings, topic: str, expected: type[T], codec: Codec, *, since_ms: int | None = None
) -> Iterator[T]:
    """Every record of a topic that can be read, by partition, as far as it goes now.

    Args:
        settings: Where Kafka is.
        topic: Which topic.
        expected: What its values hold; ticks and what cannot be decoded are passed over.
        codec: Decodes them.
        since_ms: Only records from this Kafka timestamp on; all if None.

    Raises:
        TopicError: There is no such topic.
        BrokerError: Kafka does not answer.
    """
    for message in read_messages(settings, topic, since_ms=since_ms):
        value = message.value()
        if value is None:
            continue
        try:
            yield codec.decode(value, expected)
        except RecordError:
            continue


def read_messages(
    settings: Settings, topic: str, *, since_ms: int | None = None
) -> Iterator[Message]:
    """Every message of a topic; see ``read_records``."""
    from confluent_kafka import KafkaException

    from streams.kafka.clients import describe_error, make_consumer, resolve_bootstrap

    bootstrap = resolve_bootstrap(settings)
    consumer = make_consumer(
        settings.kafka, bootstrap, group=GROUP, overrides={"enable.partition.eof": True}
    )
    try:
        yield from _read(consumer, topic, since_ms)
    except KafkaException as error:
        told = describe_error(error.args[0], bootstrap)
        raise BrokerError(f"cannot read {topic}: {told}") from error
    finally:
        consumer.close()


def _read(consumer: Consumer, topic: str, since_ms: int | None) -> Iterator[Message]:
    from confluent_kafka import KafkaError, TopicPartition

    found = consumer.list_topics(topic, timeout=_TIMEOUT_S).topics.get(topic)
    if found is None or found.error is not None:
        raise TopicError(f"there is no topic {topic}: run `clawstream topics apply`")
    for partition in sorted(found.partitions):
        low, high = _ends(consumer, topic, partition)
        start = low
        if since_ms is not None:
            asked = TopicPartition(topic, partition, since_ms)
            (place,) = consumer.offsets_for_times([asked], timeout=_TIMEOUT_S)
            start = place.offset if place.offset >= 0 else high
        if start >= high:
            continue
        consumer.assign([TopicPartition(topic, partition, start)])
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            message = consumer.poll(_POLL_S)
            if message is None:
                if time.monotonic() > deadline:
                    raise BrokerError(f"cannot read {topic}: nothing came for {_TIMEOUT_S:.0f} s")
                continue
            deadline = time.monotonic() + _TIMEOUT_S
            error = message.error()
            if error is not None:
                # What is read is committed only: the end may come before the high watermark.
                if error.code() == KafkaError._PARTITION_EOF:
                    break
                raise BrokerError(f"cannot read {topic}: {error}")
            offset = message.offset()
            assert offset is not None
            if offset < high:
                yield message
            if offset >= high - 1:
                break


def _ends(consumer: Consumer, topic: str, partition: int) -> tuple[int, int]:
    """The first offset there is and the next one; a partition may be without leader for a while."""
    from confluent_kafka import KafkaError, KafkaException, TopicPartition

    passing = (
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        # What the client itself says where the metadata that it has are from before.
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
    )
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            return consumer.get_watermark_offsets(
                TopicPartition(topic, partition), timeout=_TIMEOUT_S
            )
        except KafkaException as error:
            if error.args[0].code() not in passing or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)


def offset_range(consumer: Consumer, topic: str, partition: int) -> tuple[int, int]:
    """The first offset of a partition and the one after its last, its end for everybody.

    Waits a little for a partition whose leader is only being found, as after it was created.

    Raises:
        BrokerError: Kafka does not answer.
    """
    from confluent_kafka import KafkaException

    try:
        return _ends(consumer, topic, partition)
    except KafkaException as error:
        raise BrokerError(
            f"cannot tell where {topic} partition {partition} ends: {error.args[0].str()}"
        ) from error


__all__ = ["connect", "offset_range", "read_messages", "read_records"]
