from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from confluent_kafka import Consumer, Producer, TopicPartition

from learner.feed import Feed
from learner.model import load_base
from learner.update import PpoUpdater
from learner.window import Window
from streams.clock import SystemClock
from streams.contracts import DeadLetter, DeadLetterReason, ModelVersion, VersionStatus
from streams.kafka.clients import make_admin, make_consumer
from streams.registry import Registry, verify
from streams.serde import build_codec
from streams.settings import KafkaSettings, LearnerSettings, ModelSettings
from tests.conftest import CreateTopics
from tests.unit.learner.builders import sample
from tests.unit.learner.fakes import FakeWriter, encoded, scored

pytestmark = [pytest.mark.broker, pytest.mark.timeout(480)]

PARTITIONS = 2
DEADLINE_S = 120.0
T = TypeVar("T", ModelVersion, DeadLetter)


class Rig:
    """A learner process over its own topics, registry and artifacts."""

    def __init__(self, folder: Path, bootstrap: str, name: Callable[[str], str]) -> None:
        self.folder = folder
        self.bootstrap = bootstrap
        self.topics = {kind: name(kind) for kind in ("scored", "versions", "dead")}
        self.config = folder / "settings.yaml"
        self.process: subprocess.Popen[bytes] | None = None
        self._producer = Producer(
            {"bootstrap.servers": bootstrap, "enable.idempotence": True, "log_level": 2}
        )
        self._sent = 0

    def configure(self, **learner: object) -> None:
        """Write the settings file; the next start reads it."""
        values = {
            "data_dir": str(self.folder / "data"),
            "kafka": {"bootstrap_servers": self.bootstrap},
            "learner": {
                "min_sample_size": 4,
                "update_segments": 8,
                "update_interval_ms": 0,
                "batch_segments": 8,
                **learner,
            },
        }
        self.config.write_text(yaml.safe_dump(values), encoding="utf-8")

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the learner."""
        command = [sys.executable, "-m", "tests.integration.learner_worker", str(self.config)]
        command += [*self.topics.values(), *arguments]
        with (self.folder / "learner.log").open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log)
        return self.process

    def send(self, count: int, *, policy: str = "default") -> None:
        """Produce new segments and wait until Kafka has them."""
        for number in range(self._sent, self._sent + count):
            segment = scored(f"s{number}", policy=policy)
            self.send_value(encoded(segment), number % PARTITIONS)
        self._sent += count

    @property
    def sent(self) -> int:
        """How many segments were produced so far."""
        return self._sent

    def send_value(self, value: bytes, partition: int = 0) -> None:
        """Produce one value and wait until Kafka has it."""
        self._producer.produce(self.topics["scored"], value=value, partition=partition)
        assert self._producer.flush(DEADLINE_S) == 0

    def registry(self) -> Registry:
        """The learner's registry."""
        return Registry.open(f"sqlite:///{self.folder}/data/registry.db")

    def wait_for_version(self, number: int) -> None:
        """Wait until a version is recorded."""
        with self.registry() as registry:
            self.wait_until(lambda: registry.next_version("default") > number)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition; fail with the learner's log if it does not come about."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            ended = self.process is not None and self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"it did not come about; the log says:\n{self.log()}")
            time.sleep(0.02)

    def log(self) -> str:
        """What the learner logged so far."""
        return (self.folder / "learner.log").read_text(encoding="utf-8")

    def read(self, kind: str, record_type: type[T]) -> list[T]:
        """Everything in one of the output topics."""
        codec = build_codec()
        return [codec.decode(value, record_type) for value in self.values(kind)]

    def values(self, kind: str) -> list[bytes]:
        """The raw values in one of the output topics."""
        consumer = Consumer({"bootstrap.servers": self.bootstrap, "group.id": "test-reader"})
        try:
            partition = TopicPartition(self.topics[kind], 0, 0)
            _, high = consumer.get_watermark_offsets(partition, timeout=DEADLINE_S)
            consumer.assign([partition])
            found: list[Any] = []
            while len(found) < high:
                found.extend(consumer.consume(high - len(found), 1.0))
            return [message.value() for message in found]
        finally:
            consumer.close()

    def close(self) -> None:
        """End the learner if it still runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(DEADLINE_S)


class _Polled:
    """A consumer that notes how long it was not asked for records."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._polled_s: float | None = None
        self.gaps_s: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def consume(self, count: int, timeout: float) -> list[Any]:
        if self._polled_s is not None:
            self.gaps_s.append(time.monotonic() - self._polled_s)
        found: list[Any] = self._consumer.consume(count, timeout)
        self._polled_s = time.monotonic()
        return found


@pytest.fixture
def rig(
    tmp_path: Path,
    kafka_bootstrap: str,
    unique_name: Callable[[str], str],
    create_topics: CreateTopics,
) -> Iterator[Rig]:
    made = Rig(tmp_path, kafka_bootstrap, unique_name)
    create_topics(
        {
            made.topics["scored"]: (PARTITIONS, {}),
            made.topics["versions"]: (1, {}),
            made.topics["dead"]: (1, {}),
        }
    )
    yield made
    made.close()


def test_kills_leave_one_version_per_number_and_lose_no_segment(rig: Rig) -> None:
    rig.configure(batch_segments=100)
    for version in (1, 2):
        process = rig.start()
        rig.send(8)
        # Killed as soon as the transaction is visible: before, between or after the event.
        rig.wait_for_version(version)
        process.kill()
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
    rig.configure(batch_segments=100, max_updates=1)
    process = rig.start()
    rig.send(8)
    assert process.wait(DEADLINE_S) == 0, rig.log()

    with rig.registry() as registry:
        versions = registry.versions("default")
        assert registry.unpublished() == ()
        assert registry.live("default") == versions[-1].version
        announced = {v.event_id for v in versions}
        used = {use.segment_id for v in versions for use in registry.lineage("default", v.version)}
    assert [v.version for v in versions] == [1, 2, 3]
    assert used == {f"s{n}" for n in range(24)}
    _check_offsets(versions, total=24)
    _check_events(rig, announced)


def _check_offsets(versions: tuple[ModelVersion, ...], *, total: int) -> None:
    """The ranges of successive versions join up and cover everything that was sent."""
    for partition in range(PARTITIONS):
        ranges = [v.source_offsets[partition] for v in versions]
        assert ranges[0].start == 0
        assert ranges[-1].end == total // PARTITIONS
        assert all(before.end == after.start for before, after in pairwise(ranges))


def _check_events(rig: Rig, announced: set[str]) -> None:
    """Every version was announced, a second time only with the same bytes, in order."""
    values = rig.values("versions")
    events = rig.read("versions", ModelVersion)
    assert {event.event_id for event in events} == announced
    assert len(set(values)) == len(announced)
    assert [e.version for e in events] == sorted(e.version for e in events)
    for event in events:
        assert event.status is VersionStatus.LIVE
        assert event.adapter_uri is not None
        verify(event.adapter_uri, event.adapter_files)


def test_poison_goes_to_the_dead_letters_and_sigterm_ends_quickly(rig: Rig) -> None:
    rig.configure()
    rig.send(4)
    rig.send_value(b"\xffpoison", 0)
    rig.send(4)
    process = rig.start()
    rig.wait_for_version(1)
    rig.wait_until(lambda: "update version=1" in rig.log())
    process.terminate()
    began = time.monotonic()
    assert process.wait(30) == 0, rig.log()
    assert time.monotonic() - began < 20.0
    (letter,) = rig.read("dead", DeadLetter)
    assert letter.reason is DeadLetterReason.UNDECODABLE
    assert (letter.topic, letter.partition, letter.offset) == (rig.topics["scored"], 0, 2)
    assert letter.value == b"\xffpoison"
    with rig.registry() as registry:
        assert len(registry.lineage("default", 1)) == 8


def test_the_window_is_rebuilt_from_the_log(rig: Rig) -> None:
    rig.configure(max_updates=1)
    rig.send(8)
    assert rig.start().wait(DEADLINE_S) == 0, rig.log()
    with rig.registry() as registry:
        before = registry.latest_checkpoint("default")
    assert before is not None
    rig.configure(max_updates=1, update_segments=2, batch_segments=100)
    rig.send(2)
    assert rig.start().wait(DEADLINE_S) == 0, rig.log()
    with rig.registry() as registry:
        after = registry.latest_checkpoint("default")
        lineage = registry.lineage("default", 2)
    assert after is not None
    assert after.window[:8] == before.window
    assert {use.segment_id for use in lineage} == {f"s{n}" for n in range(10)}


def test_a_warm_start_is_made_once_and_then_updates(rig: Rig) -> None:
    rig.configure(max_updates=1)
    labels = rig.folder / "labels.jsonl"
    line = {"messages": [{"role": "user", "content": "Hi"}], "reply": "Hello!"}
    labels.write_text(json.dumps(line), encoding="utf-8")
    for _ in range(2):
        rig.send(8)
        assert rig.start(str(labels)).wait(DEADLINE_S) == 0, rig.log()
    with rig.registry() as registry:
        versions = registry.versions("default")
        assert registry.unpublished() == ()
    digest = hashlib.sha256(labels.read_bytes()).hexdigest()
    found = [version.attributes.get("warm_start_sha256") for version in versions]
    assert found == [digest, None, None]
    assert "has learned from labels.jsonl already" in rig.log()
    _check_offsets(versions[1:], total=16)
    _check_events(rig, {version.event_id for version in versions})


def test_learners_of_two_policies_share_a_topic(rig: Rig) -> None:
    for policy, expected in (("npc", 12), ("default", 8)):
        rig.configure(max_updates=1, policy=policy, batch_segments=100, update_segments=expected)
        rig.send(4, policy="npc")
        rig.send(8, policy=policy)
        assert rig.start().wait(DEADLINE_S) == 0, rig.log()
    with rig.registry() as registry:
        npc, ours = registry.versions("npc"), registry.versions("default")
        used = {
            policy: {use.segment_id for use in registry.lineage(policy, 1)}
            for policy in ("npc", "default")
        }
    assert [v.version for v in npc] == [v.version for v in ours] == [1]
    assert used == {
        "npc": {f"s{n}" for n in range(12)},
        "default": {f"s{n}" for n in range(16, 24)},
    }
    # The second has read past the records of the first, and kept none of them.
    _check_offsets(ours, total=24)
    _check_offsets(npc, total=12)
    events = rig.read("versions", ModelVersion)
    assert [(event.policy, event.version) for event in events] == [("npc", 1), ("default", 1)]


def test_an_update_longer_than_the_session_and_poll_limits_loses_nothing(
    rig: Rig, kafka_bootstrap: str
) -> None:
    """Training holds up neither reading nor heartbeats, and no group can throw the reader out."""
    group = f"group-of-{rig.topics['scored']}"
    limits_ms = {"session.timeout.ms": 6_000, "max.poll.interval.ms": 6_000}
    consumer = _Polled(
        make_consumer(
            KafkaSettings(),
            kafka_bootstrap,
            group=group,
            overrides={
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                **limits_ms,
            },
        )
    )
    stopping = threading.Event()
    feed = Feed(
        consumer=consumer,
        topic=rig.topics["scored"],
        policy="default",
        window=Window(max_segments=10_000, max_tokens=10**9, max_uses=8),
        codec=build_codec(),
        writer=FakeWriter(),
        dead_letters=rig.topics["dead"],
        clock=SystemClock(),
        stopping=stopping,
    )
    settings = LearnerSettings(learning_rate=1e-6, learning_rate_floor=1e-6, epochs=1)
    shape = ModelSettings(base="tiny-random", device="cpu", num_threads=1)
    updater = PpoUpdater(load_base(shape, rig.folder), settings, shape)
    samples = [sample(f"s{n}", range(10, 40), range(40, 90), 1.0) for n in range(16)]
    try:
        feed.start(None, lambda _: {})
        rig.send(4)
        began = time.monotonic()
        seen = [0]
        while time.monotonic() - began < 9.0:
            updater.update(samples)
            rig.send(1)
            seen.append(feed.status().arrivals.get("added", 0))
        # It read while updates ran, not only after them.
        assert len(set(seen)) > 3
        rig.wait_until(lambda: feed.status().arrivals["added"] == rig.sent)
        assert max(consumer.gaps_s) < min(limits_ms.values()) / 1e3
        assert feed.status().available_segments == rig.sent
        admin = make_admin(KafkaSettings(), kafka_bootstrap)
        groups = admin.list_consumer_groups(request_timeout=DEADLINE_S).result(DEADLINE_S)
        assert group not in {found.group_id for found in groups.valid}
    finally:
        stopping.set()
        feed.stop()
