"""Reading single records again, against a real broker."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from processors.runtime.readback import SEEK_RECORDS, ReadBack
from streams.settings import KafkaSettings
from tests.conftest import CreateTopics

pytestmark = pytest.mark.broker

RECORDS = 4_000


class Topic:
    """A partition of records whose value is their number, and a reader of it."""

    def __init__(self, bootstrap: str, name: str) -> None:
        self.bootstrap = bootstrap
        self.name = name
        self.reader = ReadBack(KafkaSettings(bootstrap_servers=bootstrap))

    def fill(self, count: int, *, transactional: bool = False) -> None:
        config = {"bootstrap.servers": self.bootstrap, "enable.idempotence": True}
        if transactional:
            config["transactional.id"] = self.name
        producer = Producer(config)
        if transactional:
            producer.init_transactions(30)
            producer.begin_transaction()
        for number in range(count):
            value = b"%d" % number
            producer.produce(self.name, value, b"k", 1, headers=[("n", value)])
            if transactional and number % 10 == 9:
                producer.commit_transaction(30)
                producer.begin_transaction()
            producer.poll(0)
        if transactional:
            producer.commit_transaction(30)
        assert producer.flush(30) == 0

    def read(self, *offsets: int) -> list[int]:
        found = []
        for record in self.reader.read(self.name, 1, offsets):
            assert (record.topic, record.partition, record.key) == (self.name, 1, b"k")
            assert record.headers == (("n", record.value),)
            found.append(record.offset)
        return found


@pytest.fixture
def topic(
    kafka_bootstrap: str, create_topics: CreateTopics, unique_name: Callable[[str], str]
) -> Topic:
    name = unique_name("readback")
    create_topics({name: (2, {"message.timestamp.type": "LogAppendTime"})})
    return Topic(kafka_bootstrap, name)


def test_any_offsets_are_found_near_and_far(topic: Topic) -> None:
    topic.fill(RECORDS)
    assert topic.read() == []
    rng = random.Random(3)
    spans = (
        [0],
        [RECORDS - 1],
        [5, 6, 7],
        [0, SEEK_RECORDS, 2 * SEEK_RECORDS + 1, RECORDS - 1],
        sorted(rng.sample(range(RECORDS), 40)),
        list(range(1_000, 3_000)),
        [17],
    )
    for offsets in spans:
        assert topic.read(*offsets) == list(offsets)


def test_a_read_takes_no_fixed_time(topic: Topic) -> None:
    """Twenty reads at places far apart; with a pause in each they would take twenty seconds."""
    topic.fill(RECORDS)
    topic.read(0)
    began = time.monotonic()
    for number in range(20):
        place = number * 190 % RECORDS
        assert topic.read(place) == [place]
    assert time.monotonic() - began < 10


def test_markers_of_transactions_are_no_records(topic: Topic) -> None:
    topic.fill(50, transactional=True)
    # Ten records and a marker: offsets 10, 21, ... hold none.
    assert topic.read(9, 10, 11, 20, 21, 22) == [9, 11, 20, 22]


def test_what_is_gone_from_either_end_is_left_out(topic: Topic) -> None:
    topic.fill(RECORDS)
    admin = AdminClient({"bootstrap.servers": topic.bootstrap})
    (deleted,) = admin.delete_records([TopicPartition(topic.name, 1, 1_500)]).values()
    deleted.result(30)
    assert topic.read(3, 1_499, 1_500, 3_000, RECORDS, RECORDS + 900) == [1_500, 3_000]
    assert topic.read(RECORDS + 5) == []
    assert topic.read(1, 2) == []
    assert topic.read(2_000) == [2_000]
