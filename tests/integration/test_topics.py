"""Topic plans against a real cluster, and its partitioner against ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from confluent_kafka import KafkaError, Message

from streams.errors import TopicError
from streams.kafka.admin import Admin, apply_inventory
from streams.kafka.clients import make_producer, partition_for
from streams.settings import KafkaSettings
from streams.topics import Inventory, Topic
from tests.conftest import create_topics

pytestmark = pytest.mark.broker

TURNS_LIKE = Topic(
    name="turns",
    key="k",
    schema=None,
    partitions=4,
    replication=1,
    retention_ms=86_400_000,
    cleanup="delete",
    timestamp_type="LogAppendTime",
    doc="d",
    extra={"max.message.bytes": "2000000"},
)
STATE_LIKE = replace(
    TURNS_LIKE,
    name="state",
    cleanup="compact",
    retention_ms=None,
    timestamp_type="CreateTime",
    extra={"min.cleanable.dirty.ratio": "0.2", "segment.bytes": "67108864"},
)


@pytest.fixture
def admin(kafka_bootstrap: str) -> Admin:
    return Admin(KafkaSettings(), kafka_bootstrap)


@pytest.fixture
def inventory(unique_name: Callable[[str], str]) -> Inventory:
    """Two topics like ours under names of their own."""
    return Inventory(
        tuple(replace(topic, name=unique_name(topic.name)) for topic in (TURNS_LIKE, STATE_LIKE))
    )


def test_an_applied_inventory_leaves_nothing_to_do(
    admin: Admin, kafka_bootstrap: str, inventory: Inventory
) -> None:
    done = apply_inventory(KafkaSettings(), kafka_bootstrap, inventory)
    assert done.creates == inventory.topics
    assert admin.plan(inventory).changes == ()
    described = admin.describe(tuple(topic.name for topic in inventory))
    for topic in inventory:
        assert described[topic.name].partitions == topic.partitions
        assert topic.config.items() <= described[topic.name].config.items()


def test_what_loses_nothing_is_altered(
    admin: Admin, kafka_bootstrap: str, inventory: Inventory
) -> None:
    turns, state = inventory
    apply_inventory(KafkaSettings(), kafka_bootstrap, inventory)
    longer = replace(turns, retention_ms=-1, extra={"max.message.bytes": "3000000"})
    smaller = replace(state, extra={"segment.bytes": "33554432"})
    done = apply_inventory(KafkaSettings(), kafka_bootstrap, Inventory((longer, smaller)))
    assert done.alters == {
        turns.name: {"retention.ms": "-1", "max.message.bytes": "3000000"},
        state.name: {"segment.bytes": "33554432"},
    }
    assert admin.plan(Inventory((longer, smaller))).changes == ()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"partitions": 8}, "keys would move"),
        ({"retention_ms": 1000}, "records would be deleted"),
        ({"timestamp_type": "CreateTime"}, "timestamps would mean two things"),
        ({"cleanup": "compact", "retention_ms": None}, "records would be lost to compact"),
    ],
)
def test_one_refusal_stops_everything(
    admin: Admin,
    kafka_bootstrap: str,
    inventory: Inventory,
    change: dict[str, object],
    reason: str,
) -> None:
    turns, state = inventory
    apply_inventory(KafkaSettings(), kafka_bootstrap, Inventory((turns,)))
    before = admin.describe((turns.name,))
    wanted = replace(turns, extra={"max.message.bytes": "3000000"}, **change)  # type: ignore[arg-type]
    with pytest.raises(TopicError, match=f"{turns.name}.*{reason}"):
        apply_inventory(KafkaSettings(), kafka_bootstrap, Inventory((wanted, state)))
    assert admin.describe((turns.name, state.name)) == before


def test_what_the_cluster_refuses_stops_everything(
    admin: Admin, kafka_bootstrap: str, inventory: Inventory
) -> None:
    turns, state = inventory
    apply_inventory(KafkaSettings(), kafka_bootstrap, Inventory((turns,)))
    before = admin.describe((turns.name,))
    longer = replace(turns, retention_ms=-1)
    too_many = replace(state, replication=99)
    with pytest.raises(TopicError, match=f"refuses to create topic {state.name}"):
        apply_inventory(KafkaSettings(), kafka_bootstrap, Inventory((longer, too_many)))
    broken = replace(turns, extra={"segment.bytes": "-5"})
    with pytest.raises(TopicError, match=f"refuses to alter topic {turns.name}"):
        apply_inventory(KafkaSettings(), kafka_bootstrap, Inventory((broken, state)))
    assert admin.describe((turns.name, state.name)) == before


@pytest.mark.parametrize("partitions", [4, 7])
def test_our_partitions_are_librdkafkas(
    kafka_bootstrap: str, unique_name: Callable[[str], str], partitions: int
) -> None:
    name = unique_name("partitioned")
    create_topics(kafka_bootstrap, {name: (partitions, {})})
    keys = [("k" * (i % 9) + str(i) + "é" * (i % 3)).encode() for i in range(400)] + [b""]
    found: dict[bytes, int] = {}

    def note(error: KafkaError | None, message: Message) -> None:
        assert error is None
        key, partition = message.key(), message.partition()
        assert isinstance(key, bytes)
        assert partition is not None
        found[key] = partition

    producer = make_producer(KafkaSettings(), kafka_bootstrap)
    for key in keys:
        producer.produce(name, b"", key=key, on_delivery=note)
    assert producer.flush(30) == 0
    assert found == {key: partition_for(key, partitions) for key in keys}
    assert len(set(found.values())) == partitions
