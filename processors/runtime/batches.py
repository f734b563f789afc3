"""Faust transport that delivers batches: one event per list of records of one partition.

Stock Faust hands every record through its conductor, a queue and a stream of its own, which
costs more than 100 microseconds each. Here the driver's ``getmany`` yields one message per
fetched list; ``RawBatchSchema`` passes the list on as the event's value.

Two more things differ from the stock consumer, both because a partition's state (``state``)
is the truth about what was applied:

- The group's committed offset is the last applied offset plus one, never derived from acks.
  Acks only end Faust's own tracking of a message.
- After a rebalance a partition is read from behind its last applied record, whatever the
  group has committed. Expired, late or rewound group offsets therefore neither lose nor
  repeat anything.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol, cast

import aiokafka
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from faust import Schema
from faust.transport.drivers.aiokafka import (
    AIOKafkaConsumerThread,
    credentials_to_aiokafka_auth,
    server_list,
)
from faust.transport.drivers.aiokafka import Consumer as AIOKafkaFaustConsumer
from faust.transport.drivers.aiokafka import Transport as AIOKafkaTransport
from faust.types import TP, ConsumerMessage
from mode.utils.futures import notify

from processors.runtime.wire import read_any_header_key
from streams.errors import StateError

logger = logging.getLogger(__name__)

FETCH_MAX_WAIT_MS = 250
"""How long the broker may hold an empty fetch: the delay before a resumed partition flows."""

POLL_TIMEOUT_S = 0.25
"""How long one poll waits while other partitions are paused."""


class Owner(Protocol):
    """Who owns the partitions' state: answers for it, and is told of rebalances."""

    def applied_offset(self, topic: str, partition: int) -> int | None:
        """The last applied offset whose effects are committed, None if there is none."""
        ...

    def restored(self, topic: str, partition: int) -> bool:
        """Whether the partition's state is here and may say where to read on."""
        ...

    async def before_revoke(self) -> None:
        """Partitions are about to be revoked: running transactions have ended on return."""
        ...

    def assigned(self) -> None:
        """Partitions were assigned; their restore comes next."""
        ...


class RawBatchSchema(Schema):  # type: ignore[type-arg]
    """Passes the list of raw records on as the event's value."""

    def loads_key(self, app: Any, message: Any, **kwargs: Any) -> Any:
        return None

    def loads_value(self, app: Any, message: Any, **kwargs: Any) -> Any:
        return message.value


class BatchConsumerThread(AIOKafkaConsumerThread):
    """The driver's thread with a consumer that suits transactions and joined topics.

    ``read_committed``, because inputs may be written in transactions; range assignment,
    because partition ``n`` of every input topic must come to the same worker.
    """

    def _create_worker_consumer(self, transport: Any) -> aiokafka.AIOKafkaConsumer:
        read_any_header_key()
        conf = self.app.conf
        return aiokafka.AIOKafkaConsumer(
            client_id=conf.broker_client_id,
            group_id=conf.id,
            group_instance_id=conf.consumer_group_instance_id,
            bootstrap_servers=server_list(transport.url, transport.default_port),
            partition_assignment_strategy=[RangePartitionAssignor],
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            max_poll_records=conf.broker_max_poll_records,
            max_poll_interval_ms=int(conf.broker_max_poll_interval * 1000.0),
            max_partition_fetch_bytes=conf.consumer_max_fetch_size,
            fetch_max_wait_ms=FETCH_MAX_WAIT_MS,
            request_timeout_ms=int(conf.broker_request_timeout * 1000.0),
            check_crcs=conf.broker_check_crcs,
            session_timeout_ms=int(conf.broker_session_timeout * 1000.0),
            rebalance_timeout_ms=int(conf.broker_rebalance_timeout * 1000.0),
            heartbeat_interval_ms=int(conf.broker_heartbeat_interval * 1000.0),
            isolation_level="read_committed",
            metadata_max_age_ms=conf.consumer_metadata_max_age_ms,
            connections_max_idle_ms=conf.consumer_connections_max_idle_ms,
            **credentials_to_aiokafka_auth(conf.broker_credentials, conf.ssl_context),
        )


class BatchConsumer(AIOKafkaFaustConsumer):
    """Delivers one message per partition and fetch; commits what the state has applied."""

    transport: BatchTransport

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._owner: Owner = self.transport.owner
        self._delivered: dict[TP, int] = {}
        self._read_to: dict[TP, int] = {}

    def _new_consumer_thread(self) -> BatchConsumerThread:
        return BatchConsumerThread(self, loop=self.loop, beacon=self.beacon)

    async def getmany(self, timeout: float) -> AsyncIterator[tuple[TP, ConsumerMessage]]:
        if not self.flow_active:
            await self.wait(self.can_resume_flow)  # type: ignore[arg-type]
        generation_id = self.app.consumer_generation_id
        records, _ = await self._wait_next_records(min(timeout, POLL_TIMEOUT_S))
        if self.should_stop:
            return
        # A partition paused meanwhile is not left out, or what was fetched for it would be lost.
        batches = {TP(tp.topic, tp.partition): batch for tp, batch in (records or {}).items()}
        if not self._suspended(generation_id):
            await self._check_continuity(batches)
            self._note_positions(batches)
        for tp, batch in batches.items():
            if self._suspended(generation_id):
                await self._seek_again()
                return
            # Stock code takes a jump in offsets for a gap it must track; saying first that
            # the whole batch was read keeps it from doing so.
            self._read_offset[tp] = batch[-1].offset
            yield tp, self._batch_message(tp, batch, generation_id)

    async def _check_continuity(self, batches: Mapping[TP, list[Any]]) -> None:
        """See that each partition is read on from where it was read to.

        It is not if retention overtook the reader, or the topic was made anew: the driver
        then goes to the first record there is.

        Raises:
            StateError: Offsets begin again.
        """
        for tp, batch in batches.items():
            expected, first = self._read_to.get(tp, 0), batch[0].offset
            if first < expected:
                raise StateError(_begins_again(tp, expected - 1, f"offset {first} came after it"))
            if 0 < expected < first:
                # Markers and aborted records leave gaps, too.
                earliest = (await self.earliest_offsets(tp)).get(tp) or 0
                _warn_of_loss(tp, expected, earliest)

    async def check_ends(self) -> None:
        """See that the inputs still reach as far as they were applied.

        Raises:
            StateError: One ends before that.
        """
        restored = [tp for tp in self.assignment() if self._owner.restored(tp.topic, tp.partition)]
        ends = await self.highwaters(*restored) if restored else {}
        for tp in restored:
            applied, end = self._owner.applied_offset(tp.topic, tp.partition), ends.get(tp)
            if applied is not None and end is not None and end <= applied:
                raise StateError(_begins_again(tp, applied, f"it now ends at offset {end}"))

    async def _seek_again(self) -> None:
        """Have what was fetched across a rebalance, and is dropped, fetched once more.

        The seek that ends the rebalance may already be over.
        """
        try:
            await self.perform_seek()
        except Exception:
            if self.flow_active:
                raise
            logger.info("seeking is left to the end of the rebalance", exc_info=True)

    def _suspended(self, generation_id: int) -> bool:
        return not self.flow_active or self.app.consumer_generation_id != generation_id

    def _batch_message(self, tp: TP, batch: list[Any], generation_id: int) -> ConsumerMessage:
        last = batch[-1]
        return ConsumerMessage(
            tp.topic,
            tp.partition,
            last.offset,
            last.timestamp / 1000.0,
            last.timestamp_type,
            [],
            None,
            cast(Any, batch),
            None,
            0,
            0,
            tp,
            generation_id=generation_id,
        )

    def ack(self, message: Any) -> bool:
        """End Faust's tracking of ``message``; offsets follow the state instead."""
        if message.acked:
            return False
        message.acked = True
        self._unacked_messages.discard(message)
        self._n_acked += 1
        notify(self._waiting_for_ack)
        return True

    def on_buffer_full(self, tp: TP) -> None:
        """Nothing: a full queue already holds the fetcher back where it stands."""

    def on_buffer_drop(self, tp: TP) -> None:
        """Nothing, see ``on_buffer_full``."""

    def _filter_tps_with_pending_acks(self, topics: Any = None) -> list[TP]:  # type: ignore[override]
        return [
            tp
            for tp in self.assignment()
            if (topics is None or tp in topics or tp.topic in topics)
            and self._new_offset(tp) is not None
        ]

    def lag(self, tp: TP) -> int | None:
        """Records of ``tp`` that are not applied; None before the first fetch."""
        end: int | None = self.highwater(tp)
        offset = self._new_offset(tp)
        return None if end is None or offset is None else max(0, end - offset)

    def _new_offset(self, tp: TP) -> int | None:
        applied = self._owner.applied_offset(tp.topic, tp.partition)
        if applied is None:
            return None
        if applied >= self._delivered.get(tp, applied):
            # Transaction markers at the end of a partition are read and never delivered.
            return max(applied + 1, self._read_to.get(tp, 0))
        return applied + 1

    def _note_positions(self, batches: Mapping[TP, list[Any]]) -> None:
        """Remember how far each partition was read, markers included, and what was records."""
        for tp, batch in batches.items():
            self._delivered[tp] = batch[-1].offset
        subscription = self._thread._ensure_consumer()._subscription.subscription
        assignment = subscription.assignment if subscription is not None else None
        if assignment is None:
            return
        for tp in self._active_partitions:
            state = assignment.state_value(self._new_topicpartition(tp.topic, tp.partition))
            if state is not None and state.has_valid_position:
                self._read_to[tp] = state.position

    def _should_commit(self, tp: TP, offset: int) -> bool:
        return self._committed_offset[tp] != offset

    async def on_partitions_revoked(self, revoked: set[TP]) -> None:
        """Commit first: stock code forgets what could be committed before its last commit.

        Neither is waited for once the worker crashed: the consumer's thread, which is ending
        then, answers no call any more and waits itself for the revocation.
        """
        await self.wait(self._owner.before_revoke())
        if not self.should_stop:
            await self.wait(self.commit())
        self._delivered.clear()
        self._read_to.clear()
        await super().on_partitions_revoked(revoked)

    async def on_partitions_assigned(self, assigned: set[TP], generation_id: int = 0) -> None:
        """Tell the owner before anything can begin to restore."""
        self._owner.assigned()
        await super().on_partitions_assigned(assigned, generation_id)

    async def perform_seek(self) -> None:
        """Go to the group's offsets, and from there to where the state ends."""
        self._read_to.clear()
        await super().perform_seek()
        restored = [tp for tp in self.assignment() if self._owner.restored(tp.topic, tp.partition)]
        earliest = await self.earliest_offsets(*restored) if restored else {}
        targets = {tp: self._behind_state(tp, earliest.get(tp) or 0) for tp in restored}
        moved = {tp: to for tp, to in targets.items() if self._committed_offset[tp] != to}
        if moved:
            await self.seek_wait(moved)

    def _behind_state(self, tp: TP, earliest: int) -> int:
        """The first offset that is not applied and still there."""
        applied = self._owner.applied_offset(tp.topic, tp.partition)
        if applied is None:
            return earliest
        _warn_of_loss(tp, applied + 1, earliest)
        return max(applied + 1, earliest)


def _warn_of_loss(tp: TP, expected: int, earliest: int) -> None:
    if expected < earliest:
        logger.error(
            "records aged out before they were applied: topic=%s partition=%d offsets=%d..%d; "
            "raise the topic's retention",
            tp.topic,
            tp.partition,
            expected,
            earliest - 1,
        )


def _begins_again(tp: TP, applied: int, found: str) -> str:
    return (
        f"{tp.topic} partition {tp.partition} was read to offset {applied}, but {found}: it was "
        "made anew or lost records, and the state no longer belongs to it. Start with another "
        "application id and an empty changelog"
    )


class BatchTransport(AIOKafkaTransport):
    """The driver's transport with the batching consumer.

    Args:
        url: The brokers.
        app: The Faust app.
        owner: Whose partitions they are.
    """

    Consumer = BatchConsumer

    def __init__(self, url: Any, app: Any, owner: Owner) -> None:
        super().__init__(url, app)
        self.owner = owner


__all__ = [
    "BatchConsumer",
    "BatchTransport",
    "Owner",
    "RawBatchSchema",
]
