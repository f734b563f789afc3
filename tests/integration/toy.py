"""A small processor with everything the runtime must carry: two inputs, state, due times.

Per key it folds what it reads into a digest; a key that was quiet for ``gap_ms`` of the
log's own clock is closed: one output, and the key is forgotten. Every fifth record makes an
output too. Run as a module it is a worker, so that tests can kill it.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from processors.runtime.process import run_worker
from processors.runtime.records import Outcome, Output, RawRecord
from processors.runtime.spec import WorkerSpec
from processors.runtime.status import OpenSession, ProcessorStatus
from streams.errors import StateError
from streams.settings import load_settings


@dataclass(slots=True)
class Key:
    """What is kept of one key: how much was read, its digest, its last arrival."""

    count: int
    digest: str
    last_ms: int

    def encode(self) -> bytes:
        return json.dumps([self.count, self.digest, self.last_ms]).encode()


@dataclass(slots=True)
class ToyProcessor:
    """Merges its inputs by arrival, as the aligner does."""

    topics: tuple[str, ...]
    output: str
    gap_ms: int
    keys: dict[bytes, Key] = field(default_factory=dict)
    changed: set[bytes] = field(default_factory=set)
    outputs: list[Output] = field(default_factory=list)
    maxima: dict[str, int] = field(default_factory=dict)
    applied: dict[str, int] = field(default_factory=dict)
    clock_ms: int = 0
    heap: list[tuple[int, int, int, bytes | None, bytes | None]] = field(default_factory=list)
    waiting: dict[str, int] = field(default_factory=dict)

    def restore(self, entries: Iterable[tuple[bytes, bytes]], meta: bytes | None) -> None:
        for key, value in entries:
            try:
                self.keys[key] = Key(*json.loads(value))
            except ValueError as error:
                raise StateError(f"these {len(value)} bytes are no entry") from error
        if meta is not None:
            saved = json.loads(meta)
            self.applied, self.clock_ms = saved["applied"], saved["clock_ms"]
            # The maxima of what was applied only: records read on top of them come again.
            self.maxima = saved["maxima"]

    def feed(self, topic: str, records: Sequence[RawRecord]) -> None:
        for record in records:
            arrival = max(self.maxima.get(topic, 0), record.timestamp)
            self.maxima[topic] = arrival
            item = (arrival, self.topics.index(topic), record.offset, record.key, record.value)
            heapq.heappush(self.heap, item)
            self.waiting[topic] = self.waiting.get(topic, 0) + 1

    def drain(self, limit: int) -> Outcome:
        done = 0
        while self.heap and done < limit and self._is_next(self.heap[0]):
            arrival, index, offset, key, value = heapq.heappop(self.heap)
            topic = self.topics[index]
            self.waiting[topic] -= 1
            self.applied[topic] = offset
            self._advance(arrival - 1)
            self.clock_ms = arrival
            if value is not None:
                self._apply(key or b"", value, arrival)
            done += 1
        if not (self.heap and self._is_next(self.heap[0])):
            self._advance(self._horizon() - 1)
        return self._outcome(done)

    def buffered(self, topic: str) -> int:
        return self.waiting.get(topic, 0)

    def status(self) -> ProcessorStatus:
        # Asked while another thread may be draining: never walk the dict itself.
        keys = list(self.keys.items())
        waits = any(value is not None for *_, value in list(self.heap))
        oldest = min(keys, key=lambda item: (item[1].last_ms, item[0]), default=None)
        due_ms = None if oldest is None else oldest[1].last_ms + self.gap_ms
        return ProcessorStatus(
            tick_after_ms=0 if waits else due_ms,
            clock_ms=self.clock_ms or None,
            sessions=len(self.keys),
            open_sessions=len(self.keys),
            oldest_open=None
            if oldest is None
            else OpenSession(
                policy="toy",
                session_id=oldest[0].decode(),
                since_ms=oldest[1].last_ms,
                due_ms=due_ms,
            ),
            next_due_ms=due_ms,
            state_entries=len(self.keys),
            state_bytes=0,
        )

    def _horizon(self) -> int:
        return min(self.maxima.get(topic, 0) for topic in self.topics)

    def _is_next(self, item: tuple[int, int, int, bytes | None, bytes | None]) -> bool:
        return all(
            item[:2] <= (self.maxima.get(topic, 0), index)
            for index, topic in enumerate(self.topics)
            if self.waiting.get(topic, 0) == 0
        )

    def _advance(self, to_ms: int) -> None:
        due = sorted(
            (key.last_ms + self.gap_ms, name)
            for name, key in self.keys.items()
            if key.last_ms + self.gap_ms <= to_ms
        )
        for at_ms, name in due:
            self._emit(name, f"closed at {at_ms}", self.keys.pop(name))
            self.changed.add(name)
        self.clock_ms = max(self.clock_ms, to_ms)

    def _apply(self, name: bytes, value: bytes, arrival: int) -> None:
        key = self.keys.get(name) or Key(0, "", 0)
        digest = hashlib.sha256(key.digest.encode() + value).hexdigest()[:16]
        self.keys[name] = key = Key(key.count + 1, digest, arrival)
        self.changed.add(name)
        if key.count % 5 == 0:
            self._emit(name, "five", key)

    def _emit(self, name: bytes, why: str, key: Key) -> None:
        value = json.dumps([name.decode(), why, key.count, key.digest]).encode()
        self.outputs.append(Output(topic=self.output, key=name, value=value))

    def _outcome(self, done: int) -> Outcome:
        changes = {
            name: self.keys[name].encode() if name in self.keys else None for name in self.changed
        }
        applied_maxima = {t: m for t, m in self.maxima.items() if not self.waiting.get(t)}
        meta = {
            "applied": self.applied,
            "clock_ms": self.clock_ms,
            "maxima": {t: applied_maxima.get(t, self.clock_ms) for t in self.maxima},
        }
        outcome = Outcome(
            applied=dict(self.applied),
            outputs=tuple(self.outputs),
            changes=changes,
            meta=json.dumps(meta).encode(),
            records=done,
            more=bool(self.heap) and self._is_next(self.heap[0]),
        )
        self.outputs.clear()
        self.changed.clear()
        return outcome


def toy_spec(prefix: str, gap_ms: int) -> WorkerSpec:
    """A worker over ``<prefix>.a`` and ``<prefix>.b``."""
    inputs = (f"{prefix}.a", f"{prefix}.b")
    output = f"{prefix}.out"
    return WorkerSpec(
        app_id=f"{prefix}-toy",
        processor="toy",
        inputs=inputs,
        outputs=(output,),
        changelog=f"{prefix}.state",
        ticks=True,
        web_port=0,
        make_processor=lambda _partition, _count: ToyProcessor(inputs, output, gap_ms),
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    prefix, gap, config = sys.argv[1:4]
    raise SystemExit(run_worker(toy_spec(prefix, int(gap)), load_settings(Path(config))))
