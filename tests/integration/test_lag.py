"""Lag against a real broker: groups that commit, markers that are no records, nobody at all."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from streams.errors import BrokerError
from streams.kafka.clients import make_admin, make_consumer
from streams.kafka.embedded import embedded_dir, start_kafka, stop_kafka
from streams.lag import groups
from streams.lag.burrow import State
from streams.lag.groups import PartitionLag, Stage, measure, members_of
from streams.lag.watch import LagStatus, Watch, watching
from streams.settings import KafkaSettings, Settings
from tests.conftest import CreateTopics
from tests.conftest import create_topics as create_topics_at
from tests.integration.harness import DEADLINE_S

pytestmark = pytest.mark.broker


@pytest.fixture
def reader(kafka_bootstrap: str) -> Iterator[Consumer]:
    consumer = make_consumer(
        KafkaSettings(), kafka_bootstrap, group="lag", overrides=groups.PEEKING
    )
    yield consumer
    consumer.close()


@pytest.fixture
def topic(unique_name: Any, create_topics: CreateTopics) -> str:
    name = str(unique_name("lag"))
    create_topics({name: (1, {})})
    return name


def produce(bootstrap: str, topic: str, records: int, transactional_id: str | None = None) -> None:
    config: dict[str, Any] = {
        "bootstrap.servers": bootstrap,
        "enable.idempotence": True,
        "log_level": 2,
    }
    if transactional_id is not None:
        config["transactional.id"] = transactional_id
    producer = Producer(config)
    if transactional_id is not None:
        producer.init_transactions(DEADLINE_S)
        producer.begin_transaction()
    for _ in range(records):
        producer.produce(topic, value=b"x")
    if transactional_id is not None:
        producer.commit_transaction(DEADLINE_S)
    assert producer.flush(DEADLINE_S) == 0


def commit(bootstrap: str, group: str, topic: str, offset: int) -> None:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    consumer.commit(offsets=[TopicPartition(topic, 0, offset)], asynchronous=False)
    consumer.close()


def measure_all(
    bootstrap: str, reader: Consumer, positions: Mapping[Stage, Mapping[tuple[str, int], int]]
) -> list[PartitionLag]:
    return measure(
        make_admin(KafkaSettings(), bootstrap),
        reader,
        positions,
        open_group=lambda group: make_consumer(KafkaSettings(), bootstrap, group=group),
        address=bootstrap,
        event_time=lambda topic, value: 1_000 if value == b"x" else None,
    )


def lag_of(
    bootstrap: str, reader: Consumer, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> PartitionLag:
    monkeypatch.setattr(groups, "STAGES", (stage,))
    (found,) = measure_all(bootstrap, reader, {})
    return found


def test_lag_is_what_was_not_read(
    kafka_bootstrap: str, reader: Consumer, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(kafka_bootstrap, topic, 7)
    commit(kafka_bootstrap, f"group-{topic}", topic, 4)
    found = lag_of(kafka_bootstrap, reader, Stage("s", f"group-{topic}", (topic,)), monkeypatch)
    assert (found.current, found.end, found.lag) == (4, 7, 3)
    assert found.group == f"group-{topic}"
    assert found.oldest_unread_ms is not None
    assert abs(found.oldest_unread_ms - time.time() * 1000) < 3_600_000
    assert found.oldest_event_ms == 1_000


def test_a_marker_is_no_lag(
    kafka_bootstrap: str, reader: Consumer, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(kafka_bootstrap, topic, 2, transactional_id=f"t-{topic}")
    commit(kafka_bootstrap, f"group-{topic}", topic, 2)
    found = lag_of(kafka_bootstrap, reader, Stage("s", f"group-{topic}", (topic,)), monkeypatch)
    assert (found.end, found.lag) == (3, 0)


def test_a_group_nobody_runs_lags_by_everything(
    kafka_bootstrap: str, reader: Consumer, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(kafka_bootstrap, topic, 5)
    found = lag_of(kafka_bootstrap, reader, Stage("s", f"nobody-{topic}", (topic,)), monkeypatch)
    assert (found.current, found.lag) == (None, 5)


def test_a_stage_that_keeps_its_own_positions(
    kafka_bootstrap: str, reader: Consumer, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(kafka_bootstrap, topic, 5)
    monkeypatch.setattr(groups, "STAGES", ())
    stage = Stage("learn", "registry", (topic,))
    (found,) = measure_all(kafka_bootstrap, reader, {stage: {(topic, 0): 1}})
    assert (found.current, found.lag) == (1, 4)


def test_a_missing_topic_is_named(
    kafka_bootstrap: str, reader: Consumer, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage("s", "g", (f"no-{topic}",))
    with pytest.raises(BrokerError, match=f"no-{topic}"):
        lag_of(kafka_bootstrap, reader, stage, monkeypatch)


# States, by real consumers


@contextmanager
def member(bootstrap: str, group: str, topic: str) -> Iterator[Consumer]:
    """A consumer that has joined its group, and commits only what it is told to."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": group, "enable.auto.commit": False}
    )
    consumer.subscribe([topic])
    deadline_s = time.monotonic() + DEADLINE_S
    while not consumer.assignment():
        assert time.monotonic() < deadline_s, "it was given no partition"
        consumer.poll(0.1)
    try:
        yield consumer
    finally:
        consumer.close()


@pytest.fixture
def watch(
    kafka_bootstrap: str, reader: Consumer, topic: str, monkeypatch: pytest.MonkeyPatch
) -> Watch:
    monkeypatch.setattr(groups, "STAGES", (Stage("s", f"group-{topic}", (topic,)),))
    admin = make_admin(KafkaSettings(), kafka_bootstrap)
    return Watch(
        lambda: measure_all(kafka_bootstrap, reader, {}),
        lambda: members_of(admin, kafka_bootstrap),
        window=5,
    )


def looks(watch: Watch, *between: Callable[[], None]) -> LagStatus:
    """The status after a look before, between and after what is done."""
    (status,) = watch.take()
    for act in between:
        act()
        (status,) = watch.take()
    return status


def idle() -> None:
    """Nothing is done."""


def at(topic: str, offset: int) -> list[TopicPartition]:
    return [TopicPartition(topic, 0, offset)]


def test_a_group_nobody_runs_is_stopped(kafka_bootstrap: str, topic: str, watch: Watch) -> None:
    produce(kafka_bootstrap, topic, 5)
    never = looks(watch, idle)
    assert (never.state, "never committed" in never.reason) == (State.STOP, True)
    with member(kafka_bootstrap, f"group-{topic}", topic) as consumer:
        consumer.commit(offsets=at(topic, 2), asynchronous=False)
    gone = looks(watch, idle)
    assert (gone.state, gone.lag.lag, "no members" in gone.reason) == (State.STOP, 3, True)


def test_a_member_that_does_not_move_stalls(kafka_bootstrap: str, topic: str, watch: Watch) -> None:
    produce(kafka_bootstrap, topic, 5)
    with member(kafka_bootstrap, f"group-{topic}", topic) as consumer:
        assert looks(watch, idle).state is State.STALL
        consumer.commit(offsets=at(topic, 2), asynchronous=False)
        moves = looks(watch)
        assert (moves.state, "catches up" in moves.reason) == (State.OK, True)
        assert moves.read_per_s is not None
        assert moves.read_per_s > 0


def test_a_member_that_falls_behind_is_warned_of(
    kafka_bootstrap: str, topic: str, watch: Watch
) -> None:
    produce(kafka_bootstrap, topic, 5)
    with member(kafka_bootstrap, f"group-{topic}", topic) as consumer:
        consumer.commit(offsets=at(topic, 1), asynchronous=False)

        def falls_behind() -> None:
            produce(kafka_bootstrap, topic, 5)
            consumer.commit(offsets=at(topic, 2), asynchronous=False)

        status = looks(watch, falls_behind)
    assert (status.state, "grew by 4" in status.reason) == (State.WARN, True)


def test_a_group_that_was_set_back_rewinds(kafka_bootstrap: str, topic: str, watch: Watch) -> None:
    produce(kafka_bootstrap, topic, 5)
    with member(kafka_bootstrap, f"group-{topic}", topic) as consumer:
        consumer.commit(offsets=at(topic, 5), asynchronous=False)
        assert looks(watch).state is State.OK
        consumer.commit(offsets=at(topic, 1), asynchronous=False)
        status = looks(watch)
    assert (status.state, "from offset 5 to 1" in status.reason) == (State.REWIND, True)
    assert status.time_lag_s is not None
    assert 0 < status.time_lag_s < 3_600


def test_no_partition_stays_assigned_after_a_look(
    kafka_bootstrap: str, reader: Consumer, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer that waits at an end keeps its connection: each question took half a second."""
    produce(kafka_bootstrap, topic, 2, transactional_id=f"t-{topic}")
    stage = Stage("s", f"group-{topic}", (topic,))
    monkeypatch.setattr(groups, "STAGES", ())
    positions = {stage: {(topic, 0): 2}}
    measure_all(kafka_bootstrap, reader, positions)
    assert reader.assignment() == []


def test_a_watch_goes_on_when_the_broker_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also its admin client, which had spoken with the group's coordinator before."""
    settings = Settings(data_dir=tmp_path)
    folder = embedded_dir(settings.data_dir)
    monkeypatch.setattr(groups, "STAGES", (Stage("s", "group", ("t",)),))
    try:
        running = start_kafka(folder)
        create_topics_at(running.bootstrap_servers, {"t": (1, {})})
        produce(running.bootstrap_servers, "t", 3)
        commit(running.bootstrap_servers, "group", "t", 1)
        with watching(settings) as watch:
            (before,) = watch.take()
            os.kill(running.pid, signal.SIGKILL)
            with pytest.raises(BrokerError):
                watch.take()
            start_kafka(folder)
            deadline_s = time.monotonic() + DEADLINE_S
            while True:
                try:
                    (after,) = watch.take()
                    break
                except BrokerError:
                    assert time.monotonic() < deadline_s, "the watch never came back"
        assert (before.lag.lag, after.lag.lag, after.state) == (2, 2, State.STOP)
    finally:
        stop_kafka(folder)
