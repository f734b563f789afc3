"""A processor, a writer and a flow that do as they are told and remember it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from processors.runtime.partition import PartitionRunner, RunnerLimits
from processors.runtime.records import Outcome, Output, RawRecord, Record
from processors.runtime.state import RestoredState
from processors.runtime.status import ProcessorStatus
from streams.clock import ManualClock
from streams.metrics import ProcessorMetrics

TOPICS = ("a", "b")
NOW_MS = 1_000_000
DUE_MS = NOW_MS - 1_500

T = TypeVar("T")


def record(topic: str, offset: int, value: bytes | None = b"v") -> Record:
    return Record(topic=topic, partition=0, offset=offset, timestamp=offset, value=value)


@dataclass
class FakeProcessor:
    """Applies everything at once, unless a topic is told to wait. A value is an output."""

    restored: dict[bytes, bytes] = field(default_factory=dict)
    meta: bytes | None = None
    fed: list[tuple[str, int]] = field(default_factory=list)
    pending: list[RawRecord] = field(default_factory=list)
    applied: dict[str, int] = field(default_factory=dict)
    wait: set[str] = field(default_factory=set)
    wants_tick: bool = False

    def restore(self, entries: Iterable[tuple[bytes, bytes]], meta: bytes | None) -> None:
        self.restored, self.meta = dict(entries), meta

    def feed(self, topic: str, records: Sequence[RawRecord]) -> None:
        self.fed.extend((topic, record.offset) for record in records)
        self.pending.extend(records)

    def drain(self, limit: int) -> Outcome:
        ready = [r for r in self.pending if r.topic not in self.wait]
        taken, rest = ready[:limit], ready[limit:]
        self.pending = rest + [r for r in self.pending if r.topic in self.wait]
        self.applied.update({r.topic: r.offset for r in taken})
        outputs = [Output(topic="out", key=None, value=r.value) for r in taken if r.value]
        return Outcome(
            applied=dict(self.applied),
            outputs=outputs,
            changes={output.value or b"": b"seen" for output in outputs},
            meta=b"meta",
            due_ms=[DUE_MS] * len(outputs),
            records=len(taken),
            more=bool(rest),
        )

    def buffered(self, topic: str) -> int:
        return sum(1 for r in self.pending if r.topic == topic)

    def status(self) -> ProcessorStatus:
        return ProcessorStatus(
            clock_ms=None,
            sessions=0,
            open_sessions=0,
            oldest_open=None,
            next_due_ms=None,
            state_entries=len(self.applied),
            state_bytes=7,
            tick_after_ms=-1 if self.wants_tick else None,
        )


@dataclass
class FakeWriter:
    """Keeps what was committed; can be made to wait or to fail."""

    commits: list[tuple[list[bytes | None], dict[bytes, bytes | None], bytes]] = field(
        default_factory=list
    )
    error: Exception | None = None
    gate: asyncio.Event | None = None
    started: bool = False
    closed: bool = False
    resumed: RestoredState | None = None

    async def start(self) -> None:
        self.started = True

    def resume(self, state: RestoredState) -> None:
        self.resumed = state

    async def commit(
        self, outputs: Sequence[Output], changes: Mapping[bytes, bytes | None], meta: bytes
    ) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.commits.append(([output.value for output in outputs], dict(changes), meta))

    async def close(self) -> None:
        self.closed = True


@dataclass
class FakeFlow:
    paused: set[str] = field(default_factory=set)

    def pause(self, topic: str, partition: int) -> None:
        self.paused.add(topic)

    def resume(self, topic: str, partition: int) -> None:
        self.paused.discard(topic)


@dataclass
class Stage:
    """A runner and everything around it."""

    state: RestoredState = field(default_factory=RestoredState)
    limits: RunnerLimits = field(
        default_factory=lambda: RunnerLimits(
            batch_records=10, buffered_records=4, tick_interval_ms=1
        )
    )
    processor: FakeProcessor = field(default_factory=FakeProcessor)
    writer: FakeWriter = field(default_factory=FakeWriter)
    flow: FakeFlow = field(default_factory=FakeFlow)
    metrics: ProcessorMetrics = field(default_factory=lambda: ProcessorMetrics("fake"))
    errors: list[BaseException] = field(default_factory=list)

    def runner(self) -> PartitionRunner:
        return PartitionRunner(
            0,
            TOPICS,
            self.processor,
            self.writer,
            self._restore,
            self.flow,
            apart,
            self.limits,
            self.metrics,
            ManualClock(NOW_MS),
            self._on_error,
        )

    async def _restore(self) -> RestoredState:
        assert self.writer.started, "state must be read after the previous owner was fenced"
        return self.state

    async def _on_error(self, error: BaseException) -> None:
        self.errors.append(error)


async def apart(work: Callable[[], T]) -> T:
    return work()


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(50):
        await asyncio.sleep(0)
