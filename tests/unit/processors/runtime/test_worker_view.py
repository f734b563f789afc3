from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from faust.types import TP

from processors.feedback_align.app import build_spec
from processors.runtime.status import OpenSession, ProcessorStatus
from processors.runtime.topics import Cluster
from processors.runtime.worker import BatchApp, BatchWorker
from streams import metrics as names
from streams.clock import ManualClock
from streams.errors import StateError
from streams.metrics import ProcessorMetrics
from streams.settings import KafkaSettings, Settings


class Reader:
    """A consumer that was assigned some partitions of both topics."""

    def __init__(self, *assigned: TP) -> None:
        self.assigned = set(assigned)

    def assignment(self) -> set[TP]:
        return self.assigned

    def highwater(self, tp: TP) -> int:
        assert tp in self.assigned, "the driver refuses to tell of others"
        return 9

    def lag(self, tp: TP) -> int:
        assert tp in self.assigned
        return 2


class Clerk:
    """A processor that only says where it stands."""

    def __init__(self, status: ProcessorStatus) -> None:
        self.said = status

    def status(self) -> ProcessorStatus:
        return self.said

    def buffered(self, topic: str) -> int:
        return 4


def runner(partition: int, status: ProcessorStatus) -> Any:
    return SimpleNamespace(
        partition=partition,
        ready=True,
        processor=Clerk(status),
        applied_offset=lambda _topic: 6,
    )


NOW_MS = 1_800_000_000_000
OPEN = ProcessorStatus(
    clock_ms=NOW_MS - 3_000,
    sessions=5,
    open_sessions=2,
    oldest_open=OpenSession(policy="p", session_id="s", since_ms=NOW_MS - 8_000, due_ms=None),
    next_due_ms=NOW_MS - 1_500,
    state_entries=7,
    state_bytes=700,
)
EMPTY = ProcessorStatus(
    clock_ms=None,
    sessions=0,
    open_sessions=0,
    oldest_open=None,
    next_due_ms=None,
    state_entries=0,
    state_bytes=0,
)


def new_worker(tmp_path: Path) -> BatchWorker:
    settings = Settings(data_dir=tmp_path, kafka=KafkaSettings(bootstrap_servers="h:1"))
    metrics = ProcessorMetrics("feedback_align")
    spec = build_spec(settings, metrics)
    return BatchWorker(spec, settings, Cluster(3, {}), metrics, ManualClock(NOW_MS))


async def test_a_partition_is_shown_as_restoring_until_it_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = new_worker(tmp_path)
    seen: list[tuple[int, ...]] = []

    class Opening:
        broken = False

        async def open(self) -> None:
            seen.append(worker.view().restoring)
            if self.broken:
                raise StateError("broken")

        async def close(self) -> None:
            pass

    opening: Any = Opening()
    monkeypatch.setattr(worker, "_new_runner", lambda _: opening)
    await worker._open(2)
    worker._runners.clear()
    assert (seen, worker.view().restoring) == ([(2,)], ())
    opening.broken = True
    with pytest.raises(StateError, match="partition 2: broken"):
        await worker._open(2)
    assert (seen, worker.view().restoring) == ([(2,), (2,)], ())


async def test_what_a_worker_says_of_its_partitions_in_gauges_and_on_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = new_worker(tmp_path)
    metrics = worker.metrics
    turns, feedback = worker.spec.inputs
    reader = Reader(TP(turns, 1), TP(feedback, 1))
    monkeypatch.setattr(BatchApp, "consumer", property(lambda _: reader))
    worker._runners = {2: runner(2, EMPTY), 1: runner(1, OPEN)}
    worker._restoring = {9, 4}
    metrics.set(names.LAST_TRANSACTION_SECONDS, 0.25, partition="1")

    await worker.report()
    shown = {
        metric.name: metrics.shown(metric, partition="1")
        for metric in (
            names.SESSIONS,
            names.OPEN_SESSIONS,
            names.OLDEST_OPEN_SECONDS,
            names.OVERDUE,
            names.EVENT_TIME_LAG,
            names.PARTITION_CLOCK,
        )
    }
    assert list(shown.values()) == [5, 2, 8.0, 1.5, 3.0, NOW_MS / 1000 - 3]
    assert metrics.value(names.PARTITION_LAG, topic=turns, partition="1") == 2
    assert metrics.shown(names.SESSIONS, partition="2") == 0
    assert metrics.shown(names.PARTITION_CLOCK, partition="2") is None
    assert metrics.shown(names.EVENT_TIME_LAG, partition="2") is None

    view = worker.view()
    assert (view.processor, view.application, view.now_ms) == (
        "feedback_align",
        "feedback_align",
        NOW_MS,
    )
    assert view.restoring == (4, 9)
    one, two = view.partitions
    assert (one.partition, two.partition) == (1, 2)
    assert (one.status, one.event_time_lag_ms, one.overdue_ms) == (OPEN, 3_000, 1_500)
    assert (one.last_transaction_s, two.last_transaction_s) == (0.25, None)
    # Partition 2 was revoked a moment ago.
    assert [
        (t.topic, t.applied_offset, t.end_offset, t.lag_records, t.buffered_records)
        for t in (*one.topics, *two.topics)
    ] == [
        (turns, 6, 9, 2, 4),
        (feedback, 6, 9, 2, 4),
        (turns, 6, None, None, 4),
        (feedback, 6, None, None, 4),
    ]
