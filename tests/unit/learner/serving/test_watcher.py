from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from prometheus_client import CollectorRegistry

from learner.model import BaseModel
from learner.serving.adapters import AdapterTable
from learner.serving.metrics import ServeMetrics
from learner.serving.watcher import VersionLog, VersionWatcher
from streams.contracts import ModelVersion, VersionStatus
from streams.serde import Codec, build_codec
from tests.unit.learner.serving.harness import DEADLINE_S, Adapter, make_table

TOPIC = "versions"
LIVE, ROLLED_BACK = VersionStatus.LIVE, VersionStatus.ROLLED_BACK
CANDIDATE, REJECTED, RETIRED = (
    VersionStatus.CANDIDATE,
    VersionStatus.REJECTED,
    VersionStatus.RETIRED,
)


def event(version: int, status: VersionStatus, event_id: str = "", **fields: Any) -> ModelVersion:
    values: dict[str, Any] = {
        "event_id": event_id or f"{version}-{status}",
        "version": version,
        "status": status,
        "base_model_id": "tiny-random",
        "base_model_digest": "b",
        "tokenizer_digest": "t",
        "template_digest": "c",
        "event_time": 1_000,
    }
    return ModelVersion(**(values | fields))


def log_of(*events: ModelVersion) -> VersionLog:
    log = VersionLog("default")
    for item in events:
        log.apply(item)
    return log


@pytest.mark.parametrize(
    ("events", "preference"),
    [
        ([], [0]),
        ([event(1, LIVE)], [1, 0]),
        ([event(1, LIVE), event(2, LIVE)], [2, 1, 0]),
        ([event(1, LIVE), event(2, CANDIDATE), event(3, REJECTED)], [1, 0]),
        ([event(1, LIVE), event(2, LIVE), event(2, ROLLED_BACK, previous_live=1)], [1, 0]),
        ([event(1, LIVE), event(1, ROLLED_BACK)], [0]),
        # The event of a roll-back may name the version that was live until then: itself.
        ([event(1, LIVE), event(2, LIVE), event(2, ROLLED_BACK, previous_live=2)], [1, 0]),
        # Back by two.
        (
            [
                event(1, LIVE),
                event(2, LIVE),
                event(3, LIVE),
                event(3, ROLLED_BACK, previous_live=1),
            ],
            [1, 2, 0],
        ),
        # An old version is rolled back after the fact: the live one stays.
        ([event(1, LIVE), event(2, LIVE), event(1, ROLLED_BACK)], [2, 0]),
        # Live again, under an event of its own.
        ([event(1, LIVE), event(2, LIVE), event(1, LIVE, "again")], [1, 2, 0]),
        # Delivered twice: the second one is no news.
        ([event(1, LIVE), event(2, LIVE), event(1, LIVE)], [2, 1, 0]),
        ([event(1, LIVE), event(2, LIVE), event(1, RETIRED)], [2, 0]),
        ([event(1, LIVE), event(1, RETIRED)], [1, 0]),
        ([event(1, LIVE), event(0, LIVE)], [0]),
        ([event(1, LIVE), event(9, LIVE, policy="other")], [1, 0]),
    ],
)
def test_what_the_log_says_is_live(events: list[ModelVersion], preference: list[int]) -> None:
    log = log_of(*events)
    assert list(log.preference()) == preference
    assert log.live == preference[0]


def test_the_newest_candidate_is_known_until_its_fate_is_decided() -> None:
    log = log_of(event(1, CANDIDATE), event(2, CANDIDATE))
    assert log.candidate == 2
    log.apply(event(2, REJECTED))
    assert log.candidate is None


# The thread, over a broker that a test can play


@dataclass(frozen=True)
class Record:
    payload: bytes | None = None
    failure: int | None = None
    at: int = 0

    def error(self) -> KafkaError | None:
        return None if self.failure is None else KafkaError(self.failure)

    def value(self) -> bytes | None:
        return self.payload

    def topic(self) -> str:
        return TOPIC

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self.at


class PlayedBroker:
    """Acts for a consumer and its broker."""

    def __init__(self) -> None:
        self.records: queue.Queue[Record] = queue.Queue()
        self.down = False
        self.assigned: list[Any] = []
        self.closed = threading.Event()

    def list_topics(self, topic: str, timeout: float) -> Any:
        del timeout
        if self.down:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))

        class Found:
            partitions = {0: object()}  # noqa: RUF012

        class Metadata:
            topics = {topic: Found}  # noqa: RUF012

        return Metadata

    def incremental_assign(self, partitions: list[Any]) -> None:
        self.assigned.extend(partitions)

    def consume(self, num_messages: int, timeout: float) -> list[Record]:
        del num_messages
        if not self.assigned:
            return []
        try:
            return [self.records.get(timeout=timeout)]
        except queue.Empty:
            return []

    def close(self) -> None:
        self.closed.set()


class Scene:
    """A watcher on a played broker."""

    def __init__(self, base: BaseModel, retry_ms: int) -> None:
        self.base = base
        self.broker = PlayedBroker()
        self.codec: Codec = build_codec()
        self.table: AdapterTable = make_table(base)
        self.metrics = ServeMetrics(CollectorRegistry())
        self.watcher = VersionWatcher(
            make_consumer=lambda: self.broker,
            topic=TOPIC,
            codec=self.codec,
            base=base,
            table=self.table,
            metrics=self.metrics,
            retry_ms=retry_ms,
        )

    def event(self, adapter: Adapter, status: VersionStatus, **fields: Any) -> ModelVersion:
        values: dict[str, Any] = {
            "adapter_uri": adapter.folder.as_uri(),
            "adapter_files": dict(adapter.files),
            "base_model_digest": self.base.base_digest,
            "tokenizer_digest": self.base.tokenizer_digest,
            "template_digest": self.base.template_digest,
        }
        return event(adapter.version, status, **(values | fields))

    def send(self, *events: ModelVersion) -> None:
        for item in events:
            self.broker.records.put(Record(self.codec.encode(item)))

    def end(self) -> None:
        self.broker.records.put(Record(failure=KafkaError._PARTITION_EOF))

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def wait_live(self, version: int) -> None:
        self.wait(lambda: self.table.live.version == version)

    def wait(self, condition: Any) -> None:
        waiting = threading.Event()
        for _ in range(int(DEADLINE_S / 0.01)):
            if condition():
                return
            waiting.wait(0.01)
        raise AssertionError("the condition did not come true")


@contextmanager
def scene(base: BaseModel, retry_ms: int = 60_000) -> Iterator[Scene]:
    played = Scene(base, retry_ms)
    played.watcher.start()
    try:
        yield played
    finally:
        played.watcher.stop()
        assert played.broker.closed.is_set()


def test_only_the_newest_live_version_is_loaded_at_the_start(
    base: BaseModel, adapters: list[Adapter]
) -> None:
    with scene(base) as played:
        played.send(*(played.event(adapter, LIVE) for adapter in adapters[:3]))
        assert not played.watcher.wait_caught_up(0.0)
        played.end()
        assert played.watcher.wait_caught_up(DEADLINE_S)
        assert played.table.live.version == 3
        assert [version.version for version in played.table.versions()] == [0, 3]
        assert played.watcher.connected


def test_new_versions_go_live_and_roll_back(base: BaseModel, adapters: list[Adapter]) -> None:
    with scene(base) as played:
        played.end()
        played.send(played.event(adapters[0], LIVE))
        played.wait_live(1)
        played.send(played.event(adapters[1], LIVE))
        played.wait_live(2)
        played.send(played.event(adapters[1], ROLLED_BACK, previous_live=1))
        played.wait_live(1)
        played.send(played.event(adapters[0], ROLLED_BACK))
        played.wait_live(0)


def test_a_version_that_was_unloaded_is_loaded_again_for_a_roll_back(
    base: BaseModel, adapters: list[Adapter]
) -> None:
    with scene(base) as played:
        played.end()
        played.send(played.event(adapters[0], LIVE))
        played.wait_live(1)
        played.send(played.event(adapters[1], LIVE))
        played.wait_live(2)
        played.table.unload("default-v1")
        played.send(played.event(adapters[1], ROLLED_BACK, previous_live=1))
        played.wait_live(1)


@pytest.mark.parametrize(
    "fault",
    [
        {"adapter_uri": "file:///nowhere/at/all"},
        {"adapter_uri": "s3://bucket/v2"},
        {"adapter_uri": None},
        {"adapter_files": {}},
        {"base_model_digest": "another"},
        {"tokenizer_digest": "another"},
        {"template_digest": "another"},
    ],
)
def test_a_version_that_cannot_be_served_changes_nothing(
    base: BaseModel, adapters: list[Adapter], fault: dict[str, Any]
) -> None:
    with scene(base) as played:
        played.end()
        played.send(played.event(adapters[0], LIVE))
        played.wait_live(1)
        played.send(played.event(adapters[1], LIVE, **fault))
        played.wait(lambda: played.count("clawstream_serve_swaps_total", outcome="failed") == 1)
        assert played.table.live.version == 1
        played.send(played.event(adapters[2], LIVE))
        played.wait_live(3)


def test_a_damaged_adapter_is_served_once_it_is_whole_again(
    base: BaseModel, adapters: list[Adapter], tmp_path: Path
) -> None:
    folder = tmp_path / "late"
    late = replace(adapters[1], folder=folder)
    with scene(base, retry_ms=20) as played:
        played.send(played.event(adapters[0], LIVE), played.event(late, LIVE))
        played.end()
        assert played.watcher.wait_caught_up(DEADLINE_S)
        assert played.table.live.version == 1
        _copy_atomically(adapters[1].folder, folder)
        played.wait_live(2)


def _copy_atomically(source: Path, target: Path) -> None:
    shutil.copytree(source, target.with_name("partial")).rename(target)


def test_a_record_that_is_not_one_of_ours_is_skipped_and_counted(
    base: BaseModel, adapters: list[Adapter], caplog: pytest.LogCaptureFixture
) -> None:
    with scene(base) as played:
        played.broker.records.put(Record(b"\x07nonsense", at=41))
        played.broker.records.put(Record(None))
        played.send(played.event(adapters[0], LIVE))
        played.end()
        played.wait_live(1)
        assert played.count("clawstream_serve_watch_errors_total", kind="record") == 1
    assert f"topic={TOPIC} partition=0 offset=41" in caplog.text


def test_a_broker_that_is_away_is_waited_for(base: BaseModel, adapters: list[Adapter]) -> None:
    played = Scene(base, retry_ms=60_000)
    played.broker.down = True
    played.watcher.start()
    try:
        assert not played.watcher.wait_caught_up(0.3)
        assert not played.watcher.connected
        played.broker.down = False
        played.send(played.event(adapters[0], LIVE))
        played.end()
        played.wait_live(1)
        assert played.watcher.connected
    finally:
        played.watcher.stop()


def test_a_candidate_can_be_asked_for_before_it_is_live(
    base: BaseModel, adapters: list[Adapter]
) -> None:
    with scene(base) as played:
        played.send(played.event(adapters[0], LIVE), played.event(adapters[1], CANDIDATE))
        played.end()
        assert played.watcher.wait_caught_up(DEADLINE_S)
        assert played.table.live.version == 1
        assert played.table.bind("default-v2").version.version == 2
