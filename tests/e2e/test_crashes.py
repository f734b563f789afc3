"""Workers are killed while users converse; nothing that was accepted may be lost."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

from streams.clock import SystemClock
from streams.contracts import DialogueTurn, FeedbackEvent, TrajectorySegment, VersionStatus
from streams.demo.run import is_moving
from streams.demo.tally import TALLIED, Tally
from streams.demo.traffic import Traffic, TrafficPlan, send_faults
from streams.demo.users import TASTES
from streams.demo.watcher import TopicWatcher, count
from streams.errors import RecordError
from streams.kafka.admin import apply_inventory
from streams.kafka.clients import make_consumer
from streams.kafka.embedded import start_kafka, stop_kafka
from streams.ports import free_ports
from streams.registry import Registry
from streams.serde import build_codec
from streams.settings import Settings, load_settings
from streams.supervisor import PROCESSES, Supervisor
from streams.topics import FEEDBACK, SEGMENTS, TURNS, load_inventory
from tests.oracle.aligner import run_oracle
from tests.oracle.logs import LogRecord

CODEC = build_codec()
READY_S = 120.0
SETTLED_S = 150.0

pytestmark = [pytest.mark.broker, pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def bootstrap(tmp_path: Path) -> Iterator[str]:
    """A broker of this test's own: the pipeline's topics have fixed names."""
    try:
        yield start_kafka(tmp_path / "kafka").bootstrap_servers
    finally:
        stop_kafka(tmp_path / "kafka")


@pytest.fixture
def config(tmp_path: Path, bootstrap: str) -> Path:
    gateway, serve = free_ports(2)
    path = tmp_path / "clawstream.yaml"
    values: dict[str, Any] = {
        "data_dir": str(tmp_path),
        "kafka": {"bootstrap_servers": bootstrap, "session_timeout_ms": 6000},
        "align": {
            "settle_ms": 1000, "gap_ms": 4000, "max_open_ms": 20000, "max_skew_ms": 5000,
            "attribution_window_ms": 30000, "orphan_wait_ms": 5000, "horizon_ms": 600000,
        },
        "reward": {"negatives_in_a_row": 50},
        "model": {"base": "tiny-random", "num_threads": 1, "dtype": "float32"},
        "learner": {
            "min_sample_size": 2, "update_segments": 3, "update_interval_ms": 1000,
            "update_max_interval_ms": 5000, "batch_segments": 4, "micro_batch_segments": 2,
        },
        "serve": {"port": serve, "max_new_tokens": 12},
        "gateway": {"port": gateway, "upstream_url": f"http://127.0.0.1:{serve}/v1"},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def test_nothing_accepted_is_lost_when_workers_are_killed(
    tmp_path: Path, bootstrap: str, config: Path
) -> None:
    settings = load_settings(config)
    apply_inventory(settings.kafka, bootstrap, load_inventory())
    consumer = make_consumer(settings.kafka, bootstrap, group="e2e-watcher")
    watcher = TopicWatcher(consumer, CODEC)
    supervisor = Supervisor(tmp_path, config)
    try:
        for name in PROCESSES:
            supervisor.start(name)
        for name in ("serve", "gateway"):
            supervisor.wait_ready(name, READY_S)
        traffic = asyncio.run(converse_under_fire(settings, supervisor, watcher))
    finally:
        supervisor.stop()
        watcher.close()

    records = read_all(settings, bootstrap)
    tally = Tally()
    for message in records:
        count(tally, message, CODEC)
    assert traffic.outcome.refused == 0
    assert_accepted_events_are_accounted_for(traffic, records, tally)
    assert_segments_equal_the_oracle(records, settings)
    assert tally.unscored() == []
    assert_one_version_each(tally, settings)
    with watcher.tally() as watched:
        assert_same_figures(watched, tally)


async def converse_under_fire(
    settings: Settings, supervisor: Supervisor, watcher: TopicWatcher
) -> Traffic:
    """Users converse; aligner, reward worker and learner are killed and started again."""
    plan = TrafficPlan(
        concurrent_sessions=5,
        turns_per_session=3,
        longest_delay_ms=9_000,
        max_tokens=12,
        temperature=0.7,
        seed=11,
    )
    clock = SystemClock()
    traffic = Traffic(f"http://127.0.0.1:{settings.gateway.port}", TASTES["you"], plan, clock)
    users = asyncio.create_task(traffic.run())
    await send_faults(traffic, clock)
    for segments, victim in ((3, "align"), (6, "reward"), (9, "align"), (12, "learn")):
        await wait_until(watcher, lambda tally, n=segments: tally.segments >= n)  # type: ignore[misc]
        await asyncio.to_thread(supervisor.kill, victim)
        await asyncio.to_thread(supervisor.start, victim)
    before = newest_version(watcher)
    await wait_until(watcher, lambda tally: len(tally.versions) > before)
    traffic.stop()
    await users
    await wait_until(watcher, lambda tally: not is_moving(tally, traffic.outcome))
    return traffic


async def wait_until(watcher: TopicWatcher, condition: Callable[[Tally], bool]) -> None:
    async with asyncio.timeout(SETTLED_S):
        while True:
            with watcher.tally() as tally:
                if condition(tally):
                    return
            await asyncio.sleep(0.1)


def newest_version(watcher: TopicWatcher) -> int:
    with watcher.tally() as tally:
        return len(tally.versions)


def read_all(settings: Settings, bootstrap: str) -> list[Any]:
    """Every committed record of the counted topics, by a consumer that knows nothing."""
    overrides = {"enable.partition.eof": True}
    consumer = make_consumer(settings.kafka, bootstrap, group="e2e-fresh", overrides=overrides)
    try:
        return _read_all(consumer)
    finally:
        consumer.close()


def _read_all(consumer: Consumer) -> list[Any]:
    known = consumer.list_topics(timeout=READY_S).topics
    places = [
        TopicPartition(topic, partition, OFFSET_BEGINNING)
        for topic in TALLIED
        for partition in known[topic].partitions
    ]
    consumer.assign(places)
    open_places, records = len(places), []
    while open_places:
        message = consumer.poll(READY_S)
        assert message is not None
        if message.error() is None:
            records.append(message)
        else:
            open_places -= 1
    return records


def assert_accepted_events_are_accounted_for(
    traffic: Traffic, records: Sequence[Any], tally: Tally
) -> None:
    accepted = traffic.outcome.accepted
    assert len(accepted) > 20
    written = {
        event.event_id
        for message in records
        if message.topic() in (TURNS, FEEDBACK)
        if isinstance(event := decoded(message), DialogueTurn | FeedbackEvent)
    }
    assert accepted <= written
    assert tally.unaccounted() == []


def assert_segments_equal_the_oracle(records: Sequence[Any], settings: Settings) -> None:
    logs: dict[int, dict[str, list[LogRecord]]] = defaultdict(lambda: {TURNS: [], FEEDBACK: []})
    for message in records:
        if message.topic() in (TURNS, FEEDBACK):
            logs[message.partition()][message.topic()].append(log_record(message))
    expected = sorted(
        CODEC.encode(segment)
        for log in logs.values()
        for segment in run_oracle(
            log[TURNS], log[FEEDBACK], settings.align, final_clock_ms=2**62
        ).segments
    )
    published = sorted(m.value() for m in records if m.topic() == SEGMENTS)
    assert [readable(data) for data in published] == [readable(data) for data in expected]
    assert published == expected


def log_record(message: Any) -> LogRecord:
    record = decoded(message)
    assert record is None or isinstance(record, DialogueTurn | FeedbackEvent)
    return LogRecord(
        message.topic(), message.partition(), message.offset(), message.timestamp()[1], record
    )


def decoded(message: Any) -> Any:
    try:
        return CODEC.decode(message.value(), TALLIED[message.topic()])
    except RecordError:
        return None


def readable(data: bytes) -> TrajectorySegment:
    return CODEC.decode(data, TrajectorySegment)


def assert_one_version_each(tally: Tally, settings: Settings) -> None:
    assert tally.live_versions
    with Registry.open(settings.effective_registry_url) as registry:
        stored = registry.versions(settings.learner.policy)
        unpublished = registry.unpublished(settings.learner.policy)
    assert [v.version for v in sorted(stored, key=lambda v: v.version)] == list(
        range(1, len(stored) + 1)
    )
    published = {v.version for v in stored} - {v.version for v in unpublished}
    assert published <= tally.versions.keys()
    live = [v for v in stored if v.status is VersionStatus.LIVE]
    assert len(live) == 1


def assert_same_figures(watched: Tally, fresh: Tally) -> None:
    figures = ("turns", "feedback", "unreadable", "revisions", "replies_by_version", "dead_letters")
    for name in figures:
        assert getattr(watched, name) == getattr(fresh, name), name
    assert watched.segments_by_closing() == fresh.segments_by_closing()
    assert watched.scored == fresh.scored
    assert watched.nonzero_share() == fresh.nonzero_share()
