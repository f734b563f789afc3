"""Subjects' processes, and what they make visible."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil

from processors.bench.plain import fingerprint
from streams.errors import BenchError
from streams.kafka.clients import make_consumer
from streams.settings import ENV_PREFIX, KafkaSettings

if TYPE_CHECKING:
    from confluent_kafka import Consumer

_TAIL_LINES = 20
_ADDRESSES = ("SCHEMA_REGISTRY_URL", "KAFKA_BOOTSTRAP_SERVERS")
_READ_RECORDS = 2_000
_READ_S = 0.05
_POLL_S = 0.02


class Subject:
    """One process that is measured; ended at the end of the ``with`` block.

    Args:
        module: What it runs.
        arguments: Its command line.
        folder: Holds what it prints: ``marks`` and ``log``.
        python: The interpreter; this process's own if None.
        environ: Extra environment.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        folder: Path,
        *,
        python: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.marks = folder / "marks"
        self.log = folder / "log"
        with self.marks.open("wb") as marks, self.log.open("wb") as log:
            self.process = _spawn(
                [str(python or sys.executable), "-m", module, *arguments], marks, log, environ
            )
        self._seen = psutil.Process(self.process.pid)

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End it at once, as a crash would."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in self._seen.children(recursive=True):
                child.kill()
        self.process.kill()
        self.process.wait()

    def _processes(self) -> list[psutil.Process]:
        return [self._seen, *self._seen.children(recursive=True)]

    def cpu_s(self) -> float:
        """Processor time it and its children have used, user and system."""
        times = [process.cpu_times() for process in self._processes()]
        return sum(used.user + used.system for used in times)

    def rss_bytes(self) -> int:
        """Resident memory of it and its children."""
        return sum(int(process.memory_info().rss) for process in self._processes())

    def wait_event(self, event: str, limit_s: float) -> dict[str, Any]:
        """Wait until it prints a line of JSON with this ``event``, which is returned.

        Raises:
            BenchError: It ended, or the time ran out.
        """
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            for line in self.marks.read_text(encoding="utf-8", errors="replace").splitlines():
                found = _json_object(line)
                if found.get("event") == event:
                    return found
            self.check_alive()
            time.sleep(_POLL_S)
        raise self.failure(f"did not say {event!r} within {limit_s:g} s")

    def check_alive(self) -> None:
        """See that it runs.

        Raises:
            BenchError: It ended; shows the end of its log.
        """
        if self.process.poll() is not None:
            raise self.failure(f"ended with status {self.process.returncode}")

    def failure(self, what: str) -> BenchError:
        """An error about it, with the end of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        # What is said at last is seldom what came first.
        first = next((n for n, line in enumerate(lines) if " ERROR " in line), len(lines))
        reason = lines[first : min(first + 1, len(lines) - _TAIL_LINES)]
        shown = "\n".join([*reason, *lines[-_TAIL_LINES:]])
        return BenchError(f"a measured process {what}; its log, {self.log}, says:\n{shown}")


def _json_object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _spawn(
    command: Sequence[str],
    marks: IO[bytes],
    log: IO[bytes],
    environ: Mapping[str, str] | None,
) -> subprocess.Popen[bytes]:
    """Start a process whose settings are those of its file alone."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _ADDRESSES and not name.startswith(ENV_PREFIX)
    }
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=marks,
        stderr=log,
        env={**kept, **(environ or {})},
        start_new_session=True,
    )


class Outputs:
    """What a topic shows to a reader that sees committed records only.

    Args:
        kafka: How to reach Kafka.
        bootstrap_servers: Where.
        topic: The topic.
        partitions: How many it has.
        keep: Whether records are kept, or only counted.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        bootstrap_servers: str,
        topic: str,
        partitions: int,
        *,
        keep: bool = True,
    ) -> None:
        from confluent_kafka import TopicPartition

        self._consumer: Consumer = make_consumer(
            kafka,
            bootstrap_servers,
            group=f"{topic}-outputs",
            overrides={"fetch.wait.max.ms": 20},
        )
        self._consumer.assign([TopicPartition(topic, p, 0) for p in range(partitions)])
        self._keep = keep
        self._records: list[tuple[bytes, bytes]] = []
        self.count = 0
        self.bytes = 0

    def __enter__(self) -> Outputs:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def wait_for(self, count: int, subject: Subject, limit_s: float) -> int:
        """Wait until so many records are visible.

        Returns:
            When that was, on the monotonic clock in nanoseconds.

        Raises:
            BenchError: The subject ended, or the time ran out.
        """
        deadline = time.monotonic() + limit_s
        while self.count < count:
            self.read(_READ_S)
            subject.check_alive()
            if time.monotonic() > deadline:
                raise subject.failure(
                    f"showed {self.count} of {count} outputs within {limit_s:g} s"
                )
        return time.monotonic_ns()

    @property
    def records(self) -> list[tuple[bytes, bytes]]:
        """Key and value of all that was read, if records are kept."""
        return self._records

    def multiset(self) -> Counter[bytes]:
        """All that is visible by now, as fingerprints."""
        self.read(0.3)
        return Counter(fingerprint(key, value) for key, value in self._records)

    def read(self, wait_s: float) -> None:
        """Take what is visible now, waiting so long for the first of it."""
        for message in self._consumer.consume(_READ_RECORDS, wait_s):
            if message.error() is not None:
                raise BenchError(f"the outputs cannot be read: {message.error()}")
            key, value = message.key() or b"", message.value() or b""
            self.count += 1
            self.bytes += len(key) + len(value)
            if self._keep:
                self._records.append((key, value))


__all__ = ["BenchError", "Outputs", "Subject"]
