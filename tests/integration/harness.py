"""What the worker tests share: topics of their own, workers as processes, logs read back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from confluent_kafka import Consumer, Message, Producer, TopicPartition

from processors.runtime.records import Record

ROOT = Path(__file__).parents[2]
POLL_S = 0.05
DEADLINE_S = 120.0
"""For what must come about at all, however busy the machine is."""

GRACE_WAS_USED = ("was given up", "did not end within", "Ended now")
"""What a worker logs that could not stop in peace."""


def wait_until(
    condition: Callable[[], bool],
    what: str | Callable[[], str],
    timeout_s: float = DEADLINE_S,
    poll_s: float = POLL_S,
) -> float:
    """Wait for ``condition``; returns the seconds it took, fails the test after the limit.

    Args:
        condition: Asked again and again.
        what: It, in words; called for them at the end of the limit if it can be.
        timeout_s: The limit.
        poll_s: How long to wait before it is asked again.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            said = what if isinstance(what, str) else what()
            raise AssertionError(f"{said}: not within {timeout_s:.0f} s")
        time.sleep(poll_s)
    return time.monotonic() - began


class WorkerProcess:
    """A worker as a process of its own, its log in a file."""

    def __init__(self, module: str, arguments: Sequence[str], log: Path) -> None:
        self.log = log
        # What pytest set for itself is not the worker's.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
        with log.open("a", encoding="utf-8") as file:
            self._start = log.stat().st_size
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment,
            )

    def output(self) -> str:
        """What it logged since it was started."""
        return self.log.read_bytes()[self._start :].decode()

    def wait_ready(self, timeout_s: float = DEADLINE_S) -> float:
        """Wait until it consumes; returns the seconds it took."""
        return wait_until(self._is_ready, f"worker ready ({self.log})", timeout_s)

    def _is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"the worker ended:\n{self.output()[-4000:]}")
        return '{"event": "ready"' in self.output()

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def terminate(self, timeout_s: float = DEADLINE_S) -> tuple[int, float]:
        """SIGTERM; returns its exit code and the seconds it took to end."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout_s)
        return code, time.monotonic() - began

    def stop_in_peace(self) -> None:
        """SIGTERM; it must end with code 0, and nothing that it does then may run into a limit."""
        assert self.terminate()[0] == 0, self.output()[-3000:]
        assert not [line for line in GRACE_WAS_USED if line in self.output()]


class Bench:
    """Topics under a prefix, workers over them, and what is in them."""

    def __init__(self, bootstrap: str, folder: Path) -> None:
        self.bootstrap = bootstrap
        self.folder = folder
        self.workers: list[WorkerProcess] = []
        self.producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                # A first batch on a new topic is sometimes sent twice: tests count on offsets.
                "enable.idempotence": True,
                "partitioner": "murmur2_random",
                "linger.ms": 5,
                "message.max.bytes": 4_000_000,
                # It may outlive its broker, and would say so behind pytest's last line.
                "log_level": 2,
            }
        )

    def config(self, name: str = "worker", **sections: object) -> Path:
        """A settings file over the bench's broker."""
        path = self.folder / f"{name}.yaml"
        kafka = {"bootstrap_servers": self.bootstrap, "session_timeout_ms": 6_000}
        values = {"data_dir": str(self.folder / "data"), "kafka": kafka, **sections}
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return path

    def worker(self, module: str, *arguments: str, name: str = "worker") -> WorkerProcess:
        """Start a worker process; it is killed at the end if it still runs."""
        worker = WorkerProcess(module, arguments, self.folder / f"{name}.log")
        self.workers.append(worker)
        return worker

    def transactional_producer(self, name: str) -> Producer:
        """A producer for ``in_transaction``."""
        producer = Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "partitioner": "murmur2_random",
                "transactional.id": name,
                "log_level": 2,
            }
        )
        producer.init_transactions(DEADLINE_S)
        return producer

    def in_transaction(self, produce: Callable[..., None], *arguments: int) -> None:
        """Call ``produce`` in a transaction of the bench's transactional producer."""
        self.producer.begin_transaction()
        produce(*arguments)
        self.producer.commit_transaction(DEADLINE_S)

    def flush(self) -> None:
        """Wait until Kafka has everything that was produced."""
        assert self.producer.flush(DEADLINE_S) == 0

    def stop_all(self) -> None:
        """Kill what still runs."""
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.kill()

    def read(self, topic: str, partitions: int) -> list[Record]:
        """Everything committed in a topic now, in order of partition and offset."""
        with self._reader() as consumer:
            return [r for p in range(partitions) for r in _read_partition(consumer, topic, p)]

    @contextlib.contextmanager
    def _reader(self) -> Iterator[Consumer]:
        consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": "reader",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 20,
            }
        )
        try:
            yield consumer
        finally:
            consumer.close()


def _read_partition(consumer: Consumer, topic: str, partition: int) -> Iterator[Record]:
    consumer.assign([TopicPartition(topic, partition, 0)])
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        for message in consumer.consume(5_000, 0.02):
            error = message.error()
            if error is not None:
                if error.name() == "_PARTITION_EOF":
                    return
                raise AssertionError(str(error))
            yield Record(
                topic=topic,
                partition=partition,
                offset=message.offset() or 0,
                timestamp=message.timestamp()[1],
                key=message.key(),
                value=message.value(),
                headers=_headers(message),
            )
    raise AssertionError(f"{topic} {partition} could not be read to its end")


def _headers(message: Message) -> tuple[tuple[str, bytes | None], ...]:
    found: Any = message.headers() or ()
    return tuple((name, value) for name, value in found)
