"""The state of one input partition in a compacted changelog, written in transactions.

Everything one step of a partition causes (outputs, dead letters, changed state, the offsets
applied) is written in a single Kafka transaction under the transactional id
``<app id>-<partition>``. So the changelog always holds the state of exactly a prefix of the
partition's merged input, a ``read_committed`` reader sees each output once, and the first
thing a new owner does, initialising its transactions, fences the old one off and aborts what
it left open.

Changelog records of input partition ``p`` are in changelog partition ``p``. Their key is one
byte followed by the entry's key: ``0`` for the partition's own record (whose entry key is
empty), ``1`` for an entry, ``2`` and a 4-byte number for what of an entry did not fit the
record before (``Parts``). A null value is an entry, or a part of one, that was forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiokafka import AIOKafkaProducer
from aiokafka.errors import IllegalOperation, InvalidProducerEpoch, KafkaError, ProducerFenced
from aiokafka.producer.message_accumulator import BatchBuilder
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka import KafkaError as ConfluentError

from processors.runtime.connection import aiokafka_config, bootstrap_servers
from processors.runtime.records import Output
from streams.errors import BrokerError, ClawstreamError, FencedError, StateError
from streams.kafka.clients import make_consumer, partition_for
from streams.settings import KafkaSettings

META_KEY = b"\x00"
ENTRY_PREFIX = b"\x01"
PART_PREFIX = b"\x02"
PART_BYTES = 512 * 1024
"""Most bytes of an entry in one record; with its key well below any topic's limit."""

PRODUCER_BATCH_BYTES = 256 * 1024
META_VERSION = 1
_PART_NUMBER = struct.Struct(">I")
_READ_RECORDS = 10_000
_READ_TIMEOUT_S = 0.02
_RESTORE_STALL_S = 60.0


class _Meta(msgspec.Struct, frozen=True):
    version: int
    applied: dict[str, int]
    processor: bytes


@dataclass(frozen=True, slots=True)
class RestoredState:
    """What a changelog partition held.

    Attributes:
        entries: The latest value of each entry that is not forgotten.
        applied: Last applied offset per input topic.
        meta: The processor's own part of the partition record, None if there never was one.
        parts: How many records each entry takes that takes more than one.
    """

    entries: dict[bytes, bytes] = field(default_factory=dict)
    applied: dict[str, int] = field(default_factory=dict)
    meta: bytes | None = None
    parts: dict[bytes, int] = field(default_factory=dict)


class Parts:
    """Cuts entries into changelog records that fit, and forgets the parts left over.

    All records of an entry are written in one transaction, so a reader finds either all parts
    of its old value or all of its new one.

    Args:
        counts: How many records each entry takes that takes more than one.
    """

    def __init__(self, counts: Mapping[bytes, int] | None = None) -> None:
        self._counts = dict(counts or {})

    def records(self, key: bytes, value: bytes | None) -> Iterator[tuple[bytes, bytes | None]]:
        """The changelog records (key, value) that replace an entry."""
        count = 0 if value is None else max(1, -(-len(value) // PART_BYTES))
        for number in range(max(1, count, self._counts.pop(key, 1))):
            start = number * PART_BYTES
            part = None if value is None or number >= count else value[start : start + PART_BYTES]
            yield part_key(key, number), part
        if count > 1:
            self._counts[key] = count


def part_key(key: bytes, number: int) -> bytes:
    """The changelog key of an entry's part; number 0 is its first."""
    return ENTRY_PREFIX + key if number == 0 else PART_PREFIX + _PART_NUMBER.pack(number) + key


class RestoreCancelledError(Exception):
    """The partition was taken away while its state was being read."""


def encode_meta(applied: Mapping[str, int], processor: bytes) -> bytes:
    """The value of a partition's own changelog record."""
    return msgspec.msgpack.encode(_Meta(META_VERSION, dict(applied), processor))


def decode_meta(value: bytes) -> tuple[dict[str, int], bytes]:
    """The offsets applied and the processor's part.

    Raises:
        StateError: It was not written by this version of the runtime.
    """
    try:
        meta = msgspec.msgpack.decode(value, type=_Meta)
    except msgspec.MsgspecError as error:
        raise StateError(f"the partition record cannot be read: {error}") from error
    if meta.version != META_VERSION:
        raise StateError(
            f"the partition record has version {meta.version}, this worker reads "
            f"{META_VERSION}; run the version that wrote it, or start with a new changelog"
        )
    return meta.applied, meta.processor


def collect(records: Sequence[tuple[bytes | None, bytes | None]], into: dict[bytes, bytes]) -> None:
    """Play changelog records (key, value) over ``into``; the later ones win."""
    for key, value in records:
        if key is None:
            continue
        if value is None:
            into.pop(key, None)
        else:
            into[key] = value


def as_state(raw: dict[bytes, bytes]) -> RestoredState:
    """Put raw changelog records together: the partition's record and its state entries.

    Raises:
        StateError: There are entries but no partition record, a part of an entry without the
            part before it, or a record that this runtime did not write.
    """
    value = raw.pop(META_KEY, None)
    if value is None:
        if raw:
            raise StateError("the changelog has entries but no partition record")
        return RestoredState()
    applied, meta = decode_meta(value)
    first = len(ENTRY_PREFIX)
    entries = {key[first:]: part for key, part in raw.items() if key.startswith(ENTRY_PREFIX)}
    parts: dict[bytes, int] = {}
    # In the order of their keys all second parts come before all third ones.
    for key in sorted(key for key in raw if not key.startswith(ENTRY_PREFIX)):
        _add_part(key, raw[key], entries, parts)
    return RestoredState(entries, applied, meta, parts)


def _add_part(
    key: bytes, value: bytes, entries: dict[bytes, bytes], parts: dict[bytes, int]
) -> None:
    start = len(PART_PREFIX) + _PART_NUMBER.size
    if not key.startswith(PART_PREFIX) or len(key) < start:
        raise StateError(f"record {key[:64]!r} is none of a changelog: who else writes to it?")
    (number,) = _PART_NUMBER.unpack_from(key, len(PART_PREFIX))
    entry = key[start:]
    if entry not in entries or parts.get(entry, 1) != number:
        raise StateError(f"part {number} of entry {entry[:64]!r} has none before it")
    entries[entry] += value
    parts[entry] = number + 1


def read_changelog(
    kafka: KafkaSettings,
    topic: str,
    partition: int,
    cancelled: threading.Event,
) -> RestoredState:
    """Read one changelog partition from its beginning to its end. Blocks.

    Call it only after the partition's transactions were initialised, or records of a
    transaction still open would be missed.

    Args:
        kafka: How to reach Kafka.
        topic: The changelog topic.
        partition: Its partition.
        cancelled: Set by another thread to give up.

    Raises:
        StateError: It cannot be read or decoded; the message leaves out which one it is.
        BrokerError: Kafka cannot be reached.
        RestoreCancelledError: ``cancelled`` was set.
    """
    consumer = make_consumer(
        kafka,
        bootstrap_servers(kafka),
        group=f"restore-{topic}",
        overrides={"enable.partition.eof": True, "fetch.wait.max.ms": 50},
    )
    raw: dict[bytes, bytes] = {}
    try:
        consumer.assign([TopicPartition(topic, partition, 0)])
        _read_to_end(consumer, topic, partition, cancelled, raw)
        return as_state(raw)
    except KafkaException as error:
        raise BrokerError(f"cannot read {topic} partition {partition}: {error}") from error
    finally:
        consumer.close()


def _read_to_end(
    consumer: Consumer,
    topic: str,
    partition: int,
    cancelled: threading.Event,
    raw: dict[bytes, bytes],
) -> None:
    last_seen_s = time.monotonic()
    while True:
        if cancelled.is_set():
            raise RestoreCancelledError
        messages = consumer.consume(_READ_RECORDS, _READ_TIMEOUT_S)
        if messages:
            last_seen_s = time.monotonic()
        elif time.monotonic() - last_seen_s > _RESTORE_STALL_S:
            raise BrokerError(f"nothing comes from {topic} partition {partition}: is it online?")
        for message in messages:
            error = message.error()
            if error is None:
                collect([(message.key(), message.value())], raw)
            elif error.code() == ConfluentError._PARTITION_EOF:
                return
            elif not error.retriable() and error.code() not in _PASSING:
                raise StateError(f"cannot be read: {error}")


_PASSING = {ConfluentError._TRANSPORT, ConfluentError._ALL_BROKERS_DOWN}


class TransactionalWriter:
    """Writes what a partition's steps cause, one transaction a step.

    Args:
        kafka: How to reach Kafka.
        app_id: The application; with the partition it names the transactions.
        partition: The input partition.
        changelog: The changelog topic.
        batch_bytes: The largest batch of records that every topic takes.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        app_id: str,
        partition: int,
        changelog: str,
        batch_bytes: int = PRODUCER_BATCH_BYTES,
    ) -> None:
        self._kafka = kafka
        self._batch_bytes = min(batch_bytes, PRODUCER_BATCH_BYTES)
        self._transactional_id = f"{app_id}-{partition}"
        self._partition = partition
        self._changelog = changelog
        self._parts = Parts()
        self._producer: AIOKafkaProducer | None = None

    async def start(self) -> None:
        """Take the partition over: fence the previous owner, abort what it left open.

        Raises:
            BrokerError: Kafka cannot be reached.
        """
        self._producer = AIOKafkaProducer(
            **aiokafka_config(self._kafka),
            transactional_id=self._transactional_id,
            acks="all",
            max_batch_size=self._batch_bytes,
            max_request_size=self._kafka.max_message_bytes,
        )
        try:
            await self._producer.start()
        except KafkaError as error:
            raise BrokerError(
                f"cannot begin to write as {self._transactional_id}: {error}"
            ) from error

    def resume(self, state: RestoredState) -> None:
        """Note what the changelog holds: what was written in parts is forgotten in parts."""
        self._parts = Parts(state.parts)

    async def commit(
        self,
        outputs: Sequence[Output],
        changes: Mapping[bytes, bytes | None],
        meta: bytes,
    ) -> None:
        """Write outputs, changed entries and the partition record, all or nothing.

        Raises:
            FencedError: Another worker has taken the partition over.
            StateError: Kafka refused or did not answer; nothing of it became visible,
                or it cannot be known, and the worker must stop.
        """
        producer = self._producer
        if producer is None:
            raise StateError(f"{self._transactional_id} is not started")
        sending = _Sending(producer)
        try:
            await producer.begin_transaction()
            for output in outputs:
                await sending.add_output(output)
            for entry, value in changes.items():
                for key, part in self._parts.records(entry, value):
                    await sending.add(self._changelog, self._partition, key, part)
            await sending.add(self._changelog, self._partition, META_KEY, meta)
            # The client commits a transaction of which Kafka refused a record.
            await sending.confirmed()
            await producer.commit_transaction()
        except (KafkaError, IllegalOperation) as error:
            sending.mark_seen()
            raise self._mapped(error) from error

    async def close(self) -> None:
        """Stop writing. A transaction left open is aborted by the next owner."""
        producer, self._producer = self._producer, None
        if producer is not None:
            # Fenced or without a broker it may raise; there is nothing left to save.
            with contextlib.suppress(KafkaError):
                await producer.stop()

    def _mapped(self, error: Exception) -> ClawstreamError:
        # Of a transaction that Kafka has ended the client says that there is none.
        if isinstance(error, ProducerFenced | InvalidProducerEpoch | IllegalOperation):
            return FencedError(
                f"another worker took over {self._transactional_id}, or Kafka gave up a "
                "transaction that took too long; this worker stops"
            )
        return StateError(f"cannot write as {self._transactional_id}: {error!r}")


class _Sending:
    """The records of one transaction, put into batches here.

    The client's ``send`` makes a future for each record and costs more than all else of it.
    """

    def __init__(self, producer: AIOKafkaProducer) -> None:
        self._producer = producer
        self._open: dict[tuple[str, int], BatchBuilder] = {}
        self._futures: list[asyncio.Future[Any]] = []

    async def add_output(self, output: Output) -> None:
        """Put an output into the batch of the partition it names, or its key leads to."""
        partition = output.partition
        if partition is None:
            count = len(await self._producer.partitions_for(output.topic))
            partition = partition_for(output.key or b"", count)
        await self.add(output.topic, partition, output.key, output.value, output.headers)

    async def add(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes | None]] = (),
    ) -> None:
        """Put a record into the batch of its partition; a full one goes on its way."""
        place = (topic, partition)
        batch = self._open.get(place)
        if batch is not None:
            if _append(batch, key, value, headers):
                return
            await self._send(place, batch)
        batch = self._open[place] = self._producer.create_batch()
        # The first record always fits; whether it is too large is for Kafka to say.
        _append(batch, key, value, headers)

    async def confirmed(self) -> None:
        """Send what is not on its way, and wait until Kafka has confirmed all of it."""
        for place, batch in self._open.items():
            await self._send(place, batch)
        self._open = {}
        for future in self._futures:
            await future

    async def _send(self, place: tuple[str, int], batch: BatchBuilder) -> None:
        batch.close()
        topic, partition = place
        self._futures.append(await self._producer.send_batch(batch, topic, partition=partition))

    def mark_seen(self) -> None:
        """Keep asyncio from reporting each batch of a failed transaction once more."""
        for future in self._futures:
            future.add_done_callback(lambda done: done.cancelled() or done.exception())


def _append(
    batch: BatchBuilder,
    key: bytes | None,
    value: bytes | None,
    headers: Sequence[tuple[str, bytes | None]],
) -> bool:
    """Whether the batch had room for the record."""
    added = batch.append(timestamp=None, key=key, value=value, headers=list(headers))
    return added is not None
