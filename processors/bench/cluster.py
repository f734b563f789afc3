"""The broker and the topics of a bench, and its settings."""

from __future__ import annotations

import contextlib
import glob
import math
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from processors.bench.log import LogRecord, Side
from streams.errors import BrokerError, SettingsError
from streams.kafka.admin import apply_inventory
from streams.kafka.clients import make_admin, make_producer
from streams.kafka.embedded import start_kafka, stop_kafka
from streams.settings import KafkaSettings, Settings, write_settings
from streams.supervisor import uninterrupted
from streams.topics import Inventory, Topic, load_inventory

FLUSH_S = 120.0
OnStep = Callable[[str], None]
REPLAYED: Mapping[str, Any] = {"timestamp_type": "CreateTime", "retention_ms": -1}
"""For :meth:`Topics.make`: inputs that carry arrivals of their own, however long ago."""


@dataclass(frozen=True, slots=True)
class Names:
    """The topics of a bench, under a prefix that no other run has."""

    prefix: str

    @classmethod
    def fresh(cls, bench: str) -> Names:
        """Names that nothing has yet."""
        return cls(f"bench-{bench}-{secrets.token_hex(4)}")

    def of(self, stem: str) -> str:
        """A topic's or a group's name."""
        return f"{self.prefix}.{stem}"


@contextlib.contextmanager
def bench_broker(settings: Settings, on_step: OnStep) -> Iterator[str]:
    """The address of Kafka: the configured one, else a node of the bench's own.

    Its own node keeps nothing of earlier runs, and is stopped at the end.
    """
    if settings.kafka.bootstrap_servers:
        yield settings.kafka.bootstrap_servers
        return
    folder = bench_dir(settings) / "kafka"
    stop_kafka(folder)
    shutil.rmtree(folder, ignore_errors=True)
    on_step("starting Apache Kafka")
    try:
        most = settings.kafka.max_message_bytes
        yield start_kafka(folder, max_message_bytes=most).bootstrap_servers
    finally:
        with uninterrupted():
            stop_kafka(folder)
            shutil.rmtree(folder, ignore_errors=True)


def topic_bytes_on_disk(settings: Settings, topic: str) -> float:
    """What a topic takes on the disk of the bench's own node; not a number with another."""
    if settings.kafka.bootstrap_servers:
        return math.nan
    data = bench_dir(settings) / "kafka" / "data"
    return float(sum(_size(file) for file in data.glob(f"{glob.escape(topic)}-*/*.log")))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        # The node removed it meanwhile.
        return 0


def bench_dir(settings: Settings) -> Path:
    """Where benches keep their files."""
    folder = (settings.data_dir / "bench").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def run_folder(settings: Settings, name: str) -> Iterator[Path]:
    """A folder for one run. It stays after an error: it holds the logs of what failed."""
    folder = bench_dir(settings) / name
    folder.mkdir()
    try:
        yield folder
    except Exception:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder)


def settings_over(
    settings: Settings, bootstrap_servers: str, folder: Path, **sections: Mapping[str, Any]
) -> Settings:
    """The user's settings for a process of the bench, over its broker.

    There is no schema registry: all subjects read and write single-object encoding.

    Args:
        settings: The user's.
        bootstrap_servers: Where Kafka is.
        folder: For what the process keeps.
        sections: Other values than the user's, by section and key.

    Raises:
        SettingsError: Together they cannot be used.
    """
    wanted = {"kafka": {"bootstrap_servers": bootstrap_servers}, **sections}
    changed: dict[str, Any] = {"data_dir": folder / "data", "schema_registry_url": None}
    for name, values in wanted.items():
        section = getattr(settings, name)
        try:
            changed[name] = type(section).model_validate({**section.model_dump(), **values})
        except ValidationError as error:
            problems = "; ".join(str(item["msg"]) for item in error.errors())
            raise SettingsError(f"{name} with {dict(values)}: {problems}") from None
    return settings.model_copy(update=changed)


def write_config(settings: Settings, path: Path) -> None:
    """Leave settings for a process that is given no others; only the user may read them."""
    write_settings(settings.model_dump(include={"data_dir", "kafka", "align", "worker"}), path)


class Topics:
    """Makes topics as the inventory has them, and deletes all it made at the end.

    Args:
        kafka: How to reach Kafka.
        bootstrap_servers: Where.
        partitions: Of each topic.
    """

    def __init__(self, kafka: KafkaSettings, bootstrap_servers: str, partitions: int) -> None:
        self._kafka = kafka
        self._bootstrap = bootstrap_servers
        self._partitions = partitions
        self._inventory = load_inventory()
        self._made: list[str] = []

    def make(
        self,
        names: Mapping[str, str],
        *,
        timestamp_type: str | None = None,
        retention_ms: int | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        """Make topics under names of the bench's own; they can be used afterwards.

        Args:
            names: By the name of the inventory's topic that they are like.
            timestamp_type: Another one than the inventory's.
            retention_ms: Likewise; arrivals of long ago need -1.
            extra: Further settings, by Kafka's names.

        Raises:
            TopicError: The cluster refuses.
            BrokerError: It cannot be reached.
        """
        topics = [self._like(self._inventory[like], name) for like, name in names.items()]
        if timestamp_type is not None:
            topics = [replace(topic, timestamp_type=timestamp_type) for topic in topics]
        if retention_ms is not None:
            topics = [replace(topic, retention_ms=retention_ms) for topic in topics]
        if extra:
            topics = [replace(topic, extra={**topic.extra, **extra}) for topic in topics]
        self._made.extend(names.values())
        apply_inventory(self._kafka, self._bootstrap, Inventory(tuple(topics)))

    def _like(self, topic: Topic, name: str) -> Topic:
        return replace(topic, name=name, partitions=self._partitions, replication=1)

    def delete_all(self) -> None:
        """Delete what was made, and what a framework made beside it, as far as Kafka lets us."""
        client = make_admin(self._kafka, self._bootstrap)
        prefixes = {name.rpartition(".")[0] for name in self._made}
        there = client.list_topics(timeout=30).topics
        ours = [name for name in there if any(prefix in name for prefix in prefixes)]
        if ours:
            for future in client.delete_topics(ours, operation_timeout=30).values():
                with contextlib.suppress(Exception):
                    future.result()


class LogWriter:
    """Writes records with arrivals of their own.

    Args:
        names: The topic of each side.
        kafka: How to reach Kafka.
        bootstrap_servers: Where.
    """

    def __init__(
        self, names: Mapping[Side, str], kafka: KafkaSettings, bootstrap_servers: str
    ) -> None:
        self._names = names
        self._producer = make_producer(kafka, bootstrap_servers, overrides={"linger.ms": 20})
        self._failed: list[str] = []
        self.records = 0
        self.bytes = 0

    def write(self, record: LogRecord) -> None:
        """Send one record; waits while too many are on their way."""
        while True:
            try:
                self._producer.produce(
                    self._names[record.side],
                    value=record.value,
                    key=record.key,
                    partition=record.partition,
                    timestamp=record.arrival_ms,
                    headers=record.headers,
                    on_delivery=self._on_delivery,
                )
                break
            except BufferError:
                self._producer.poll(0.1)
        self._producer.poll(0)
        self.records += 1
        self.bytes += len(record.key) + len(record.value or b"")

    def flush(self) -> None:
        """Wait until Kafka has everything.

        Raises:
            BrokerError: It did not take it.
        """
        left = self._producer.flush(FLUSH_S)
        if left or self._failed:
            why = self._failed[0] if self._failed else f"{left} records are not confirmed"
            raise BrokerError(f"Kafka did not take the bench's log: {why}")

    def _on_delivery(self, error: object, _message: object) -> None:
        if error is not None:
            self._failed.append(str(error))


def produce(
    log: Iterable[LogRecord], names: Mapping[Side, str], kafka: KafkaSettings, bootstrap: str
) -> None:
    """Write a whole log into the topics of its sides.

    Raises:
        BrokerError: Kafka did not take it.
    """
    writer = LogWriter(names, kafka, bootstrap)
    for record in log:
        writer.write(record)
    writer.flush()


__all__ = [
    "REPLAYED",
    "LogWriter",
    "Names",
    "Topics",
    "bench_broker",
    "bench_dir",
    "produce",
    "run_folder",
    "settings_over",
    "topic_bytes_on_disk",
    "write_config",
]
