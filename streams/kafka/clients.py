"""Kafka clients: our settings in librdkafka's words, in one place.

librdkafka reports a wrong password or certificate to its error callback only; calls just
time out. The clients made here turn such reports into a :class:`BrokerError`.
"""

from __future__ import annotations

import logging
import math
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from streams.errors import BrokerError

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Producer
    from confluent_kafka.admin import AdminClient

    from streams.settings import KafkaSettings, Settings

_log = logging.getLogger(__name__)

PARTITIONER = "murmur2_random"
"""Java's choice. librdkafka's own default would part a session's turns from its feedback."""

_PRODUCER_BATCH_BYTES = 256 * 1024

ErrorSink = Callable[[BrokerError], None]


def resolve_bootstrap(settings: Settings) -> str:
    """The address of Kafka: the configured one, else the embedded node's if it runs.

    Raises:
        BrokerError: There is neither; says what to do.
    """
    if settings.kafka.bootstrap_servers:
        return settings.kafka.bootstrap_servers
    from streams.kafka.cluster import cluster_status
    from streams.kafka.embedded import embedded_dir, kafka_status

    data_dir = embedded_dir(settings.data_dir)
    running = cluster_status(data_dir) or kafka_status(data_dir)
    if running is None:
        raise BrokerError(
            f"no Kafka to talk to: none is configured and none runs in {data_dir.absolute()}. "
            "Start one with `clawstream kafka up`, or set KAFKA_BOOTSTRAP_SERVERS=host:port"
        )
    return running.bootstrap_servers


def common_config(
    kafka: KafkaSettings, bootstrap_servers: str, on_error: ErrorSink
) -> dict[str, Any]:
    """What every client is given: address, security and the error callback.

    Args:
        kafka: The settings.
        bootstrap_servers: From :func:`resolve_bootstrap`.
        on_error: Called with each error that no retry can mend.
    """
    password = kafka.sasl_password
    config = {
        "bootstrap.servers": bootstrap_servers,
        "security.protocol": kafka.security_protocol,
        "sasl.mechanism": kafka.sasl_mechanism,
        "sasl.username": kafka.sasl_username,
        "sasl.password": password.get_secret_value() if password is not None else None,
        "ssl.ca.location": str(kafka.ssl_ca_location) if kafka.ssl_ca_location else None,
        "client.id": "clawstream",
        "error_cb": _ErrorCallback(bootstrap_servers, on_error),
        # Its own lines on stderr, twenty a second while a broker is away, would repeat what
        # the callback hears.
        "log_level": 2,
        "reconnect.backoff.ms": 100,
        "reconnect.backoff.max.ms": 2_000,
    }
    return {key: value for key, value in config.items() if value is not None}


def producer_config(
    kafka: KafkaSettings, bootstrap_servers: str, on_error: ErrorSink
) -> dict[str, Any]:
    """A producer that loses and doubles nothing and puts keys where Java's client would.

    Arguments as :func:`common_config`. There is no compression: not every reader's client
    has every codec.
    """
    return common_config(kafka, bootstrap_servers, on_error) | {
        "acks": "all",
        "enable.idempotence": True,
        "partitioner": PARTITIONER,
        "message.max.bytes": kafka.max_message_bytes,
        # Above a topic's max.message.bytes a batch of small records would be refused whole.
        "batch.size": _PRODUCER_BATCH_BYTES,
    }


def consumer_config(
    kafka: KafkaSettings,
    bootstrap_servers: str,
    on_error: ErrorSink,
    *,
    group: str,
    auto_offset_reset: Literal["earliest", "latest", "error"] = "earliest",
    isolation: Literal["read_committed", "read_uncommitted"] = "read_committed",
) -> dict[str, Any]:
    """A consumer that commits only when told to.

    Args:
        kafka: As :func:`common_config`, like the next two.
        bootstrap_servers: Where.
        on_error: See there.
        group: Its consumer group; any name for one that is assigned its partitions.
        auto_offset_reset: Where it starts without a valid commit.
        isolation: Whether it sees records of open or aborted transactions.
    """
    return common_config(kafka, bootstrap_servers, on_error) | {
        "group.id": group,
        "enable.auto.commit": False,
        "auto.offset.reset": auto_offset_reset,
        "isolation.level": isolation,
        "session.timeout.ms": kafka.session_timeout_ms,
        "heartbeat.interval.ms": max(1, kafka.session_timeout_ms // 3),
        "max.partition.fetch.bytes": kafka.max_message_bytes,
        "topic.metadata.refresh.interval.ms": 30_000,
    }


def raise_error(error: BrokerError) -> None:
    """Raise it: out of the ``poll``, ``consume`` or ``flush`` that served the callback."""
    raise error


def make_producer(
    kafka: KafkaSettings,
    bootstrap_servers: str,
    *,
    on_error: ErrorSink = raise_error,
    overrides: Mapping[str, Any] | None = None,
) -> Producer:
    """A producer as :func:`producer_config` has it.

    Wrong credentials raise :class:`BrokerError` from ``poll`` and ``flush`` unless
    ``on_error`` does otherwise (as a gateway must that goes on while Kafka is away).
    """
    from confluent_kafka import Producer

    config = producer_config(kafka, bootstrap_servers, on_error) | dict(overrides or {})
    with _readable(bootstrap_servers):
        return Producer(config)


def make_consumer(
    kafka: KafkaSettings,
    bootstrap_servers: str,
    *,
    group: str,
    auto_offset_reset: Literal["earliest", "latest", "error"] = "earliest",
    isolation: Literal["read_committed", "read_uncommitted"] = "read_committed",
    on_error: ErrorSink = raise_error,
    overrides: Mapping[str, Any] | None = None,
) -> Consumer:
    """A consumer as :func:`consumer_config` has it; wrong credentials as for producers."""
    from confluent_kafka import Consumer

    config = consumer_config(
        kafka,
        bootstrap_servers,
        on_error,
        group=group,
        auto_offset_reset=auto_offset_reset,
        isolation=isolation,
    )
    with _readable(bootstrap_servers):
        return Consumer(config | dict(overrides or {}))


def make_admin(
    kafka: KafkaSettings, bootstrap_servers: str, *, on_error: ErrorSink = raise_error
) -> AdminClient:
    """An admin client.

    Its error callback is served by its ``poll`` only: call that when another call fails, as
    :mod:`streams.kafka.admin` does.
    """
    from confluent_kafka.admin import AdminClient

    with _readable(bootstrap_servers):
        return AdminClient(common_config(kafka, bootstrap_servers, on_error))


@contextmanager
def _readable(bootstrap_servers: str) -> Iterator[None]:
    """Map what librdkafka says about a configuration."""
    from confluent_kafka import KafkaException

    try:
        yield
    except KafkaException as error:
        raise BrokerError(f"cannot make a client for {bootstrap_servers}: {error}") from error


class _ErrorCallback:
    """Passes on what is hopeless, logs the rest, each kind of it at most once in 30 s."""

    _QUIET_S = 30.0

    def __init__(self, bootstrap_servers: str, on_error: ErrorSink) -> None:
        self._address = bootstrap_servers
        self._on_error = on_error
        self._logged_at_s: dict[int, float] = {}

    def __call__(self, error: KafkaError) -> None:
        if _is_hopeless(error):
            self._on_error(describe_error(error, self._address))
            return
        now_s, code = time.monotonic(), error.code()
        if now_s - self._logged_at_s.get(code, -math.inf) >= self._QUIET_S:
            self._logged_at_s[code] = now_s
            _log.warning("Kafka at %s: %s", self._address, error.str())


def _is_hopeless(error: KafkaError) -> bool:
    """Whether trying again cannot help; everything else librdkafka mends by itself."""
    from confluent_kafka import KafkaError as Codes

    if error.fatal() or error.code() == Codes._AUTHENTICATION:
        return True
    return error.code() == Codes._SSL and "verify failed" in error.str()


def describe_error(error: KafkaError, bootstrap_servers: str) -> BrokerError:
    """What librdkafka reports, with what to do about it."""
    from confluent_kafka import KafkaError as Codes

    advice = {
        Codes._AUTHENTICATION: "check kafka.sasl_mechanism, sasl_username and sasl_password",
        Codes._SSL: "check kafka.ssl_ca_location and the address",
        Codes._TRANSPORT: "check the address and that Kafka runs",
        Codes._ALL_BROKERS_DOWN: "check the address and that Kafka runs",
        Codes._TIMED_OUT: "check the address and that Kafka runs",
        Codes.NOT_COORDINATOR: "the cluster is still starting, try again",
        Codes.COORDINATOR_NOT_AVAILABLE: "the cluster is still starting, try again",
        Codes.COORDINATOR_LOAD_IN_PROGRESS: "the cluster is still starting, try again",
        Codes.CLUSTER_AUTHORIZATION_FAILED: "this user lacks a right on the cluster",
        Codes.TOPIC_AUTHORIZATION_FAILED: "this user lacks a right on the topic",
    }.get(error.code())
    message = f"Kafka at {bootstrap_servers}: {error.str()}"
    return BrokerError(f"{message}; {advice}" if advice else message)


@lru_cache(maxsize=65_536)
def murmur2(key: bytes) -> int:
    """MurmurHash2 as Java's Kafka client computes it, a signed 32-bit number.

    (Austin Appleby's MurmurHash2, 32 bit, seed 0x9747b28c.)
    """
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    h = 0x9747B28C ^ len(key)
    words = len(key) // 4
    for k in struct.unpack_from(f"<{words}I", key):
        k = (k * m) & mask
        k = ((k ^ (k >> 24)) * m) & mask
        h = ((h * m) & mask) ^ k
    rest = key[words * 4 :]
    if rest:
        h = ((h ^ int.from_bytes(rest, "little")) * m) & mask
    h = ((h ^ (h >> 13)) * m) & mask
    h ^= h >> 15
    return h - (1 << 32) if h & 0x80000000 else h


def partition_for(key: bytes, partitions: int) -> int:
    """The partition that Java's client, and ``murmur2_random``, put a key in.

    Args:
        key: The record's key; a record without one may be anywhere.
        partitions: How many the topic has.
    """
    return (murmur2(key) & 0x7FFFFFFF) % partitions


__all__ = [
    "PARTITIONER",
    "common_config",
    "consumer_config",
    "describe_error",
    "make_admin",
    "make_consumer",
    "make_producer",
    "murmur2",
    "partition_for",
    "producer_config",
    "raise_error",
    "resolve_bootstrap",
]
