"""Reads topics as they grow, and remembers when each record came to be seen."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec

from processors.runtime.records import Record

_LATEST: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]

Place = tuple[str, int]
"""Topic and partition."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A committed record, and the moment (``time.monotonic``) at which it was read."""

    record: Record
    at_s: float


class Watcher:
    """Keeps every committed record of some topics, from their beginning.

    It goes on through all faults of the cluster, and keeps what retention deletes later.

    Args:
        bootstrap: Where.
        places: The topic partitions.
    """

    def __init__(self, bootstrap: str, places: Sequence[Place]) -> None:
        self._seen: dict[Place, list[Seen]] = {place: [] for place in places}
        self._read_to: dict[Place, int] = dict.fromkeys(places, 0)
        self._bootstrap = bootstrap
        self._admin = _admin(self._bootstrap)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "fault-watcher",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 200,
                "reconnect.backoff.max.ms": 500,
                "log_level": 0,
            }
        )
        self._consumer.assign([TopicPartition(topic, p, 0) for topic, p in places])
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reading."""
        self._stopped.set()
        self._thread.join(30)
        self._consumer.close()

    def seen(self, topic: str) -> list[Seen]:
        """What was read of a topic so far, partition by partition in order of offsets."""
        with self._lock:
            places = sorted(place for place in self._seen if place[0] == topic)
            return [seen for place in places for seen in self._seen[place]]

    def count(self, topic: str) -> int:
        """How many records of a topic were read so far."""
        with self._lock:
            return sum(len(seen) for place, seen in self._seen.items() if place[0] == topic)

    def catch_up(self, timeout_s: float = 60.0) -> None:
        """Wait until everything that is committed now was read.

        Raises:
            AssertionError: It was not within the limit.
        """
        deadline = time.monotonic() + timeout_s
        for (topic, partition), end in self.ends(
            IsolationLevel.READ_COMMITTED, tuple(self._seen)
        ).items():
            while self._read_to[topic, partition] < end:
                assert time.monotonic() < deadline, f"{topic} could not be read to its end"
                time.sleep(0.02)

    def ends(self, level: IsolationLevel, places: Sequence[Place]) -> dict[Place, int]:
        """Where partitions end now: what is committed, or all."""
        deadline = time.monotonic() + 60
        while True:
            try:
                return self._ends(level, places)
            except KafkaException:
                # A leader is just changing, and this client would keep to the former one.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
                self._admin = _admin(self._bootstrap)

    def _ends(self, level: IsolationLevel, places: Sequence[Place]) -> dict[Place, int]:
        wanted = {TopicPartition(topic, p): _LATEST for topic, p in places}
        found = self._admin.list_offsets(wanted, isolation_level=level, request_timeout=20)
        return {(tp.topic, tp.partition): f.result(20).offset for tp, f in found.items()}

    def _run(self) -> None:
        while not self._stopped.is_set():
            messages = self._consumer.consume(2_000, 0.05)
            at_s = time.monotonic()
            with self._lock:
                for message in messages:
                    self._note(message, at_s)

    def _note(self, message: Any, at_s: float) -> None:
        place = (message.topic(), message.partition())
        error = message.error()
        if error is None:
            self._seen[place].append(Seen(record_of(message), at_s))
            self._read_to[place] = message.offset() + 1
        elif error.code() == KafkaError._PARTITION_EOF:
            # Behind the markers of transactions, which are no messages.
            self._read_to[place] = message.offset()


def _admin(bootstrap: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})


def record_of(message: Any) -> Record:
    """A consumed message as the processors see it."""
    return Record(
        topic=message.topic(),
        partition=message.partition(),
        offset=message.offset(),
        timestamp=message.timestamp()[1],
        key=message.key(),
        value=message.value(),
        headers=tuple((name, value) for name, value in message.headers() or ()),
    )
