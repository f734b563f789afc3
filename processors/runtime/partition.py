"""One owned input partition: restore, take batches, apply them, write, acknowledge.

The runner is the only one that touches its processor, always in the thread that belongs to
it, so that neither a long computation nor a record read back keeps the event loop from
Kafka. Batches come in through ``accept``; a task of its own feeds them, drains what may be
applied and writes each outcome in one transaction. While a transaction is on its way more
batches gather, so that a loaded partition writes few large transactions and an idle one many
small ones; of a backlog the next portion is computed meanwhile, one ahead at most. A failed
transaction ends the worker, so nothing computed ahead of it can count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from processors.runtime.records import Outcome, Output, PartitionProcessor, RawRecord
from processors.runtime.state import RestoredState, encode_meta
from streams import metrics as names
from streams.clock import Clock
from streams.metrics import ProcessorMetrics

logger = logging.getLogger(__name__)

IDLE_META_INTERVAL_S = 5.0
"""How long offsets that caused nothing (ticks, duplicates) may go unrecorded."""

TICK_TIMEOUT_S = 5.0
"""After this time a tick that was not read back is given up and another may be sent."""


class Writer(Protocol):
    """Where outcomes go: ``state.TransactionalWriter``, or a test's."""

    async def start(self) -> None: ...

    def resume(self, state: RestoredState) -> None: ...

    async def commit(
        self, outputs: Sequence[Output], changes: Mapping[bytes, bytes | None], meta: bytes
    ) -> None: ...

    async def close(self) -> None: ...


T = TypeVar("T")


class Apart(Protocol):
    """Runs a function in the thread of a processor."""

    async def __call__(self, work: Callable[[], T], /) -> T: ...


class Flow(Protocol):
    """Stops and restarts the delivery of one topic partition."""

    def pause(self, topic: str, partition: int) -> None: ...

    def resume(self, topic: str, partition: int) -> None: ...


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """How much a runner takes at once.

    Attributes:
        batch_records: Records applied per transaction, about.
        buffered_records: Records of one topic that may wait for the other topic.
        tick_interval_ms: How long a topic must be silent before a tick is due.
    """

    batch_records: int
    buffered_records: int
    tick_interval_ms: int


class PartitionRunner:
    """Runs one processor over one partition of each input topic.

    Args:
        partition: The input partition.
        topics: The input topics, in merge order.
        processor: The logic; nobody else may call it.
        writer: Where outcomes are written.
        restore: Reads the partition's state; called after the writer was started.
        flow: Pauses and resumes input.
        apart: Runs what calls the processor.
        limits: How much is taken at once.
        metrics: Counters.
        clock: Wall time, to say how late outputs are.
        on_error: Called with what ended the runner's task.
    """

    def __init__(
        self,
        partition: int,
        topics: tuple[str, ...],
        processor: PartitionProcessor,
        writer: Writer,
        restore: Callable[[], Awaitable[RestoredState]],
        flow: Flow,
        apart: Apart,
        limits: RunnerLimits,
        metrics: ProcessorMetrics,
        clock: Clock,
        on_error: Callable[[BaseException], Awaitable[None]],
    ) -> None:
        self.partition = partition
        self.topics = topics
        self.processor = processor
        self.ready = False
        self._writer = writer
        self._restore = restore
        self._flow = flow
        self._apart = apart
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._on_error = on_error
        self._inbox: deque[tuple[str, Sequence[RawRecord]]] = deque()
        self._inbox_records = 0
        self._received: dict[str, int] = {}
        self._committed: dict[str, int] = {}
        self._owed: Outcome | None = None
        self._owed_since = 0.0
        self._issued: dict[str, int] = {}
        self._writing: asyncio.Task[None] | None = None
        self._more = False
        self._last_delivery: dict[str, float] = {}
        self._ticks: dict[str, int] = {}
        self._tick_sent_at: float | None = None
        self._paused: set[str] = set()
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._running = asyncio.Lock()
        self._held = False
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Fence the previous owner, restore the state, begin to apply what is accepted.

        Raises:
            BrokerError: Kafka cannot be reached.
            StateError: The state cannot be restored.
            RestoreCancelledError: The partition was taken away meanwhile.
        """
        began = time.monotonic()
        await self._writer.start()
        state = await self._restore()
        self._writer.resume(state)
        await self._apart(lambda: self.processor.restore(state.entries.items(), state.meta))
        self._received = dict(state.applied)
        self._committed = dict(state.applied)
        self._issued = dict(state.applied)
        self._show_state()
        self.ready = True
        seconds = time.monotonic() - began
        self._metrics.observe(names.RESTORE_SECONDS, seconds)
        logger.info(
            "restored partition=%d entries=%d applied=%s seconds=%.2f",
            self.partition,
            len(state.entries),
            state.applied or "nothing",
            seconds,
        )
        self._task = asyncio.create_task(self._run(), name=f"partition-{self.partition}")

    def applied_offset(self, topic: str) -> int | None:
        """The last offset of ``topic`` whose effects are committed."""
        return self._committed.get(topic)

    async def accept(self, topic: str, records: Sequence[RawRecord]) -> None:
        """Take a batch. Waits while too much is waiting to be fed.

        Records at or below an offset taken before are skipped: after a rebalance the
        partition is read again from behind its state.
        """
        while self._inbox_records >= 2 * self._limits.batch_records and not self._closed:
            self._room.clear()
            await self._room.wait()
        if self._closed:
            return
        seen = self._received.get(topic, -1)
        if records[0].offset <= seen:
            records = [record for record in records if record.offset > seen]
            if not records:
                return
        self._received[topic] = records[-1].offset
        self._last_delivery[topic] = time.monotonic()
        self._metrics.add(names.RECORDS_IN, len(records), topic=topic)
        self._inbox.append((topic, records))
        self._inbox_records += len(records)
        self._wake.set()

    async def hold(self) -> None:
        """Stop between two transactions; returns when none is running.

        Who gives up waiting leaves the one that runs alone.
        """
        self._held = True
        if self._task is not None and not self._task.done():
            async with self._running:
                await self._guarded(self._finish())

    def release(self) -> None:
        """Go on after ``hold``; what was paused flows again until it must be paused."""
        self._held = False
        self._paused.clear()
        now = time.monotonic()
        self._last_delivery = dict.fromkeys(self.topics, now)
        self._wake.set()

    async def close(self) -> None:
        """Give the partition up. Nothing more is written."""
        self._closed = True
        self.ready = False
        self._room.set()
        for task in (self._task, self._writing):
            if task is not None:
                task.cancel()
                # What it raised was reported, or does not matter any more.
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
        await self._writer.close()
        self._metrics.forget_partition(self.partition, self.topics)

    # Ticks

    def tick_due(self, now_ms: int) -> bool:
        """Whether a tick should be sent to the partition of each input topic.

        So it is when the processor could go on with one, a topic it waits for has been
        silent for the interval, and no tick is on its way.
        """
        if not self.ready or self._held or self._more or self._inbox or self._tick_on_its_way():
            return False
        if not self.processor.status().needs_tick(now_ms):
            return False
        silent_before = time.monotonic() - self._limits.tick_interval_ms / 1000
        return any(
            self.processor.buffered(topic) == 0
            and self._last_delivery.get(topic, 0.0) <= silent_before
            for topic in self.topics
        )

    def tick_sent(self, offsets: Mapping[str, int]) -> None:
        """Note the offsets a tick got, per topic."""
        self._ticks = dict(offsets)
        self._tick_sent_at = time.monotonic()

    def _tick_on_its_way(self) -> bool:
        if self._tick_sent_at is None:
            return False
        read_back = all(
            self._received.get(topic, -1) >= offset for topic, offset in self._ticks.items()
        )
        if read_back or time.monotonic() - self._tick_sent_at > TICK_TIMEOUT_S:
            self._tick_sent_at = None
        return self._tick_sent_at is not None

    # The task

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(IDLE_META_INTERVAL_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            if not await self._guarded(self._work()):
                return

    async def _guarded(self, work: Awaitable[None]) -> bool:
        """Whether ``work`` went well; what it raised ends the worker."""
        try:
            await work
        except Exception as error:
            await self._on_error(error)
            return False
        return True

    async def _work(self) -> None:
        more = True
        while more and not self._held and not self._closed:
            async with self._running:
                more = await self._step()
            # Others must get the loop between two steps of a long backlog.
            await asyncio.sleep(0)

    async def _step(self) -> bool:
        """Apply one portion and have it written. Whether there is more to apply."""
        if not self._more and self._inbox_records < self._limits.batch_records:
            # No backlog: let what comes meanwhile go into one transaction.
            await self._written()
        batches, self._inbox, self._inbox_records = self._inbox, deque(), 0
        self._room.set()
        outcome = await self._apart(lambda: self._apply(batches))
        self._more = outcome.more
        self._balance()
        await self._written()
        if outcome.outputs or outcome.changes:
            self._begin_to_write(outcome)
            self._issued = dict(outcome.applied)
            if not (self._more or self._inbox):
                await self._written()
        else:
            await self._owe(outcome)
        return self._more or bool(self._inbox)

    def _apply(self, batches: Iterable[tuple[str, Sequence[RawRecord]]]) -> Outcome:
        """In the processor's thread: feed what waited, drain a portion."""
        for topic, records in batches:
            self.processor.feed(topic, records)
        outcome = self.processor.drain(self._limits.batch_records)
        # With the offsets of topics that it says nothing about.
        return replace(outcome, applied={**self._issued, **outcome.applied})

    async def _written(self) -> None:
        """Wait for the transaction that is on its way; raises what it raised."""
        if self._writing is not None:
            # Cut short it would be left out, and what was computed after it written.
            await asyncio.shield(self._writing)
            self._writing = None

    def _begin_to_write(self, outcome: Outcome) -> None:
        self._writing = asyncio.create_task(self._write(outcome))

    async def _finish(self) -> None:
        """Write all that is computed."""
        await self._written()
        if self._owed is not None:
            self._begin_to_write(self._owed)
            await self._written()

    def _balance(self) -> None:
        """Pause a topic whose records pile up waiting for another; resume it when drained."""
        for topic in self.topics:
            waiting = self.processor.buffered(topic)
            self._metrics.set(
                names.BUFFERED_RECORDS, waiting, topic=topic, partition=str(self.partition)
            )
            if waiting > self._limits.buffered_records and topic not in self._paused:
                self._paused.add(topic)
                self._flow.pause(topic, self.partition)
            elif waiting <= self._limits.buffered_records // 2 and topic in self._paused:
                self._paused.discard(topic)
                self._flow.resume(topic, self.partition)

    async def _owe(self, outcome: Outcome) -> None:
        """Offsets that caused nothing need no transaction of their own each time."""
        if outcome.applied == self._issued and self._owed is None:
            return
        if self._owed is None:
            self._owed_since = time.monotonic()
            self._owed = outcome
        else:
            records = self._owed.records + outcome.records
            self._owed = replace(outcome, records=records)
        self._issued = dict(outcome.applied)
        if time.monotonic() - self._owed_since >= IDLE_META_INTERVAL_S:
            self._begin_to_write(self._owed)
            await self._written()

    async def _write(self, outcome: Outcome) -> None:
        began = time.monotonic()
        meta = encode_meta(outcome.applied, outcome.meta)
        await self._writer.commit(outcome.outputs, outcome.changes, meta)
        self._owed = None
        self._note(outcome, time.monotonic() - began)
        self._committed = dict(outcome.applied)

    def _note(self, outcome: Outcome, seconds: float) -> None:
        self._metrics.observe(names.BATCH_RECORDS, outcome.records)
        self._metrics.observe(names.TRANSACTION_SECONDS, seconds)
        for topic, count in Counter(output.topic for output in outcome.outputs).items():
            self._metrics.add(names.RECORDS_OUT, count, topic=topic)
        now_ms = self._clock.now_ms()
        for due_ms in outcome.due_ms:
            self._metrics.observe(names.CLOSING_DELAY, max(0, now_ms - due_ms) / 1000)
        partition = str(self.partition)
        self._metrics.set(names.LAST_TRANSACTION_SECONDS, seconds, partition=partition)
        self._show_state()

    def _show_state(self) -> None:
        status = self.processor.status()
        partition = str(self.partition)
        self._metrics.set(names.STATE_ENTRIES, status.state_entries, partition=partition)
        self._metrics.set(names.STATE_BYTES, status.state_bytes, partition=partition)


__all__ = ["Apart", "Flow", "PartitionRunner", "RunnerLimits", "Writer"]
