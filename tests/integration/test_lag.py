"""Lag against a real broker: groups that commit, markers that are no records, nobody at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from streams.errors import BrokerError
from streams.kafka.clients import make_admin, make_consumer
from streams.lag import groups
from streams.lag.groups import PartitionLag, Stage, measure
from streams.settings import KafkaSettings
from tests.conftest import CreateTopics
from tests.integration.harness import DEADLINE_S

pytestmark = pytest.mark.broker


@pytest.fixture
def reader(kafka_bootstrap: str) -> Iterator[Consumer]:
    overrides = {"enable.partition.eof": True}
    consumer = make_consumer(KafkaSettings(), kafka_bootstrap, group="lag", overrides=overrides)
    yield consumer
    consumer.close()


@pytest.fixture
def topic(unique_name: Any, create_topics: CreateTopics) -> str:
    name = str(unique_name("lag"))
    create_topics({name: (1, {})})
    return name


def produce(bootstrap: str, topic: str, records: int, transactional_id: str | None = None) -> None:
    config: dict[str, Any] = {"bootstrap.servers": bootstrap, "enable.idempotence": True}
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
    assert found == PartitionLag("s", topic, 0, current=4, end=7, lag=3)


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
