"""The learner's Kafka clients: one reader, and one writer that waits for the acknowledgement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException

from streams.errors import BrokerError, OversizedError
from streams.kafka.clients import make_consumer, make_producer
from streams.settings import KafkaSettings

_DELIVERY_TIMEOUT_MS = 30_000
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """One record to be written."""

    topic: str
    key: bytes | None
    value: bytes


class KafkaWriter:
    """Writes records with ``acks=all`` and returns when Kafka has them. Safe for threads."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer

    def write(self, records: Sequence[Outgoing]) -> None:
        """Write records in order and wait until all are acknowledged.

        Blocks for at most about 30 s. Any of them may have been written if this raises.

        Raises:
            OversizedError: A record is larger than its topic takes.
            BrokerError: Kafka did not acknowledge all of them in time.
        """
        outcomes: list[KafkaError | None] = []

        def delivered(error: KafkaError | None, _message: object) -> None:
            outcomes.append(error)

        for record in records:
            self._produce(record, delivered)
        while len(outcomes) < len(records):
            self._producer.poll(_POLL_S)
        for error in outcomes:
            if error is not None:
                raise _mapped(error, "write")

    def _produce(self, record: Outgoing, delivered: Any) -> None:
        while True:
            try:
                self._producer.produce(
                    record.topic, value=record.value, key=record.key, on_delivery=delivered
                )
                return
            except BufferError:
                self._producer.poll(_POLL_S)
            except KafkaException as error:
                raise _mapped(error.args[0], f"write to {record.topic}") from error


def connect_writer(settings: KafkaSettings, bootstrap_servers: str) -> KafkaWriter:
    """A writer for the cluster at ``bootstrap_servers``.

    Raises:
        BrokerError: The settings make no client.
    """
    overrides = {"delivery.timeout.ms": _DELIVERY_TIMEOUT_MS}
    return KafkaWriter(make_producer(settings, bootstrap_servers, overrides=overrides))


def connect_consumer(settings: KafkaSettings, bootstrap_servers: str) -> Consumer:
    """A reader of committed records that keeps no offsets in Kafka.

    Raises:
        BrokerError: The settings make no client.
    """
    return make_consumer(
        settings,
        bootstrap_servers,
        group="clawstream-learner",
        overrides={"enable.auto.offset.store": False, "enable.partition.eof": True},
    )


def _mapped(error: KafkaError, what: str) -> BrokerError | OversizedError:
    if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
        return OversizedError(
            f"cannot {what}: the record is too large; raise kafka.max_message_bytes and the "
            "topic's max.message.bytes"
        )
    return BrokerError(
        f"cannot {what}: {error.str()}; check that Kafka is reachable and the topic exists"
    )
