"""Publishes one update again and again, dying at one durable operation later each time.

Run as ``python -m tests.unit.learner.crash_driver FOLDER``. For n = 1, 2, … a forked child
works in ``FOLDER/n`` and ends with ``os._exit`` right before its n-th operation: an fsync, a
rename, a commit, a record handed to Kafka, its acknowledgement. The first child that comes
through is the last; its number is printed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch
from sqlalchemy import event

from learner.kafka import Outgoing
from learner.publish import FinishedUpdate, Publisher
from streams.clock import ManualClock
from streams.registry import ArtifactStore, Registry
from streams.serde import build_codec
from tests.unit.learner.fakes import BASE, FakeTrainer, finished

CRASHED = 77


class FileWriter:
    """Kafka as a file: what is in it was acknowledged, or about to be."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, records: Sequence[Outgoing]) -> None:
        with self._path.open("ab") as file:
            for record in records:
                os.fsync(file.fileno())
                file.write(msgspec.json.encode(record) + b"\n")
                file.flush()
                os.fsync(file.fileno())

    def values(self) -> list[bytes]:
        """The values in the file, repeated ones included."""
        if not self._path.exists():
            return []
        lines = self._path.read_bytes().splitlines()
        return [msgspec.json.decode(line, type=Outgoing).value for line in lines]


def open_publisher(folder: Path) -> tuple[Registry, Publisher]:
    """A publisher whose registry, artifacts and topic are all in ``folder``."""
    registry = Registry.open(f"sqlite:///{folder}/registry.db")
    publisher = Publisher(
        registry=registry,
        artifacts=ArtifactStore.open(str(folder / "artifacts")),
        writer=FileWriter(folder / "topic"),
        codec=build_codec(),
        topic="versions",
        policy="default",
        base=BASE,
        max_kl=1.0,
        keep_checkpoints=1,
        clock=ManualClock(1_000),
    )
    return registry, publisher


def _die_before(operation: int, registry: Registry) -> None:
    """Arrange for this process to end before its ``operation``-th durable operation."""
    left = operation

    def tick(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os._exit(CRASHED)

    def ticking(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            tick()
            return function(*arguments, **options)

        return call

    os.fsync = ticking(os.fsync)
    Path.rename = ticking(Path.rename)  # type: ignore[method-assign]
    event.listen(registry._engine, "commit", tick)


def _child(folder: Path, operation: int, updates: Sequence[FinishedUpdate]) -> None:
    folder.mkdir(parents=True)
    registry, publisher = open_publisher(folder)
    publisher.publish(updates[0])
    _die_before(operation, registry)
    publisher.publish(updates[1])


def main(root: Path) -> int:
    """The number of operations that a publication takes, plus one."""
    torch.set_num_threads(1)
    trainer = FakeTrainer()
    updates = (finished(trainer), finished(trainer))
    for operation in count(1):
        pid = os.fork()
        if pid == 0:
            _child(root / str(operation), operation, updates)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return operation
        if code != CRASHED:
            raise SystemExit(f"operation {operation}: the child failed with {code}")
    raise AssertionError


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
