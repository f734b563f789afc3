"""The topic of dead letters, read: letters and marks for a ledger, single letters with bytes."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from streams.contracts import DeadLetter
from streams.dlq.model import MARK_HEADER, Ledger, Letter, Mark, Place, letter_of
from streams.errors import BrokerError, DeadLetterError, RecordError
from streams.kafka.reading import read_messages
from streams.topics import DEAD_LETTERS

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message

    from streams.serde import Codec
    from streams.settings import Settings

GROUP = "clawstream-dlq"
_TIMEOUT_S = 30.0
_PORTION = 500
_POLL_S = 0.2


def read_ledger(settings: Settings, codec: Codec, topic: str = DEAD_LETTERS) -> Ledger:
    """Every letter and mark there is now, without the bytes that letters keep.

    Raises:
        TopicError: There is no such topic.
        BrokerError: Kafka does not answer.
    """
    ledger = Ledger()
    for message in read_messages(settings, topic):
        entry = _entry(message, codec, topic)
        if entry is None:
            ledger.unreadable += 1
        else:
            ledger.add(entry)
    return ledger


def _entry(message: Message, codec: Codec, topic: str) -> Letter | Mark | None:
    value = message.value()
    try:
        if value is None:
            return Mark.from_json(_mark_of(message))
        return letter_of(codec.decode(value, DeadLetter), _place(message, topic))
    except (RecordError, DeadLetterError):
        return None


def _mark_of(message: Message) -> bytes:
    headers: Any = message.headers() or ()
    return next((value or b"" for name, value in headers if name == MARK_HEADER), b"")


def _place(message: Message, topic: str) -> Place:
    return Place(topic, message.partition() or 0, message.offset() or 0)


def read_letters(
    settings: Settings, codec: Codec, places: Collection[Place]
) -> Iterator[tuple[Place, DeadLetter]]:
    """The letters at these places of one topic, whole, by partition and offset.

    Raises:
        DeadLetterError: One is gone, or cannot be read any more.
        BrokerError: Kafka does not answer.
    """
    from confluent_kafka import KafkaException

    from streams.kafka.clients import describe_error, make_consumer, resolve_bootstrap

    bootstrap = resolve_bootstrap(settings)
    consumer = make_consumer(settings.kafka, bootstrap, group=GROUP, auto_offset_reset="error")
    try:
        for partition in sorted({place.partition for place in places}):
            wanted = sorted(place for place in places if place.partition == partition)
            for message in _read(consumer, wanted):
                place = _place(message, wanted[0].topic)
                yield place, _decoded(message, codec, place)
    except KafkaException as error:
        told = describe_error(error.args[0], bootstrap)
        raise BrokerError(f"cannot read dead letters: {told}") from error
    finally:
        consumer.close()


def _decoded(message: Message, codec: Codec, place: Place) -> DeadLetter:
    try:
        return codec.decode(message.value(), DeadLetter)
    except RecordError as error:
        raise DeadLetterError(f"the letter at {place} cannot be read: {error}") from error


def _read(consumer: Consumer, wanted: list[Place]) -> Iterator[Message]:
    from confluent_kafka import TopicPartition

    first = wanted[0]
    missing = {place.offset for place in wanted}
    consumer.assign([TopicPartition(first.topic, first.partition, first.offset)])
    deadline = time.monotonic() + _TIMEOUT_S
    while missing:
        for message in consumer.consume(_PORTION, _POLL_S):
            if message.error() is not None:
                raise BrokerError(f"cannot read {first.topic}: {message.error()}")
            deadline = time.monotonic() + _TIMEOUT_S
            offset = message.offset() or 0
            if offset in missing:
                missing.discard(offset)
                yield message
            if missing and min(missing) < offset:
                raise DeadLetterError(
                    f"the letter at {first.topic}/{first.partition}/{min(missing)} is gone"
                )
            if not missing:
                return
        if time.monotonic() > deadline:
            raise BrokerError(f"cannot read {first.topic}: nothing came for {_TIMEOUT_S:.0f} s")


__all__ = ["read_ledger", "read_letters"]
