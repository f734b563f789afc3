"""A stage that the other process can import: its processor does what records tell it to."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Sequence

from processors.runtime.records import Outcome, Output, RawRecord
from processors.runtime.spec import WorkerSpec
from processors.runtime.status import NOTHING, ProcessorStatus
from processors.runtime.topics import Cluster
from streams import metrics as names
from streams.errors import RecordError, StateError
from streams.metrics import ProcessorMetrics
from streams.settings import Settings

PARTITIONS = 3


class UnsendableError(Exception):
    """An error that pickle cannot make again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class Obedient:
    """Puts out what it is fed; some values ask for something else."""

    def __init__(self, partition: int, cluster: Cluster, metrics: ProcessorMetrics) -> None:
        self._partition = partition
        self._partitions = cluster.partitions
        self._metrics = metrics
        self._entries: dict[bytes, bytes] = {}
        self._meta: bytes | None = None
        self._waiting: list[RawRecord] = []

    def restore(self, entries: Iterable[tuple[bytes, bytes]], meta: bytes | None) -> None:
        self._entries, self._meta = dict(entries), meta
        if meta == b"damaged":
            raise StateError("this is no state")

    def feed(self, topic: str, records: Sequence[RawRecord]) -> None:
        self._waiting.extend(records)

    def drain(self, limit: int) -> Outcome:
        taken, self._waiting = self._waiting[:limit], self._waiting[limit:]
        outputs = [output for record in taken for output in self._obey(record)]
        self._metrics.add(names.DUPLICATES, len(taken))
        return Outcome(
            applied={record.topic: record.offset for record in taken},
            outputs=outputs,
            changes={b"kept": b"1", b"gone": None},
            meta=b"meta",
            due_ms=[record.timestamp for record in taken],
            records=len(taken),
            more=bool(self._waiting),
        )

    def _obey(self, record: RawRecord) -> list[Output]:
        if record.value == b"fail":
            raise RecordError("as told", topic=record.topic, partition=1, offset=record.offset)
        if record.value == b"fail unsendably":
            raise UnsendableError("as", "told")
        if record.value == b"end":
            os._exit(9)
        if record.value == b"set a gauge":
            self._metrics.set(names.SESSIONS, 1, partition="0")
        return [
            Output(
                topic=record.topic,
                key=record.key,
                value=record.value,
                partition=record.partition,
                headers=tuple(record.headers),
            )
        ]

    def buffered(self, topic: str) -> int:
        return sum(record.topic == topic for record in self._waiting)

    def status(self) -> ProcessorStatus:
        alive = sum(isinstance(item, Obedient) for item in gc.get_objects())
        return ProcessorStatus(
            clock_ms=self._partition,
            sessions=self._partitions,
            open_sessions=alive,
            oldest_open=NOTHING.oldest_open,
            next_due_ms=None if self._meta is None else len(self._meta),
            state_entries=len(self._entries),
            state_bytes=sum(map(len, self._entries.values())),
            tick_after_ms=-5,
        )


def build(settings: Settings, metrics: ProcessorMetrics) -> WorkerSpec:
    """The stage."""
    return WorkerSpec(
        app_id="obedient",
        processor="obedient",
        inputs=("a", "b"),
        outputs=(),
        changelog="state",
        ticks=False,
        web_port=0,
        make_processor=lambda partition, cluster: Obedient(partition, cluster, metrics),
    )
