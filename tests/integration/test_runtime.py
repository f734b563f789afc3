"""The runtime against a real broker: what survives kills, rebalances and zombies."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from processors.runtime.records import Output
from processors.runtime.state import TransactionalWriter, encode_meta, read_changelog
from streams.errors import FencedError
from streams.settings import KafkaSettings
from tests.conftest import CreateTopics
from tests.integration.harness import Bench, WorkerProcess, wait_until
from tests.integration.toy import ToyProcessor

pytestmark = pytest.mark.broker

PARTITIONS = 3
GAP_MS = 300
TOY = "tests.integration.toy"


class ToyBench(Bench):
    """The toy's topics, and its outputs against those of a run without any runtime."""

    def __init__(self, bootstrap: str, folder: Path, prefix: str) -> None:
        super().__init__(bootstrap, folder)
        self.prefix = prefix
        self.inputs = (f"{prefix}.a", f"{prefix}.b")
        self._number = 0

    def start(self, name: str, instance: str | None = None) -> WorkerProcess:
        # Small limits, so that a backlog of one input runs into all of them.
        limits = {"max_batch_records": 50, "max_buffered_records": 60}
        config = self.config(name, worker={"group_instance_id": instance, **limits})
        return self.worker(TOY, self.prefix, str(GAP_MS), str(config), name=name)

    def produce(self, count: int) -> None:
        for _ in range(count):
            number = self._number = self._number + 1
            topic = self.inputs[number % 3 == 0]
            self.producer.produce(topic, key=f"k{number % 17}", value=f"v{number}")
            self.producer.poll(0)
        assert self.producer.flush(20) == 0

    def outputs(self) -> Counter[bytes]:
        return Counter(r.value or b"" for r in self.read(f"{self.prefix}.out", 2))

    def expected(self) -> tuple[Counter[bytes], bool]:
        """What a pure run over the log as it is now gives, and whether all is closed."""
        logs = {topic: self.read(topic, PARTITIONS) for topic in self.inputs}
        values: Counter[bytes] = Counter()
        closed = True
        for partition in range(PARTITIONS):
            processor = ToyProcessor(self.inputs, "out", GAP_MS)
            for topic, records in logs.items():
                processor.feed(topic, [r for r in records if r.partition == partition])
            outcome = processor.drain(1_000_000)
            values.update(output.value or b"" for output in outcome.outputs)
            closed = closed and not processor.keys and not processor.needs_tick(0)
        return values, closed

    def assert_exact(self) -> None:
        """Wait until every key is closed; then the outputs are those of the pure run."""
        wait_until(lambda: self.expected()[1], "all keys closed", 40, 0.3)
        expected = self.expected()[0]
        wait_until(lambda: self.outputs().total() >= expected.total(), "all outputs", 20, 0.3)
        assert self.outputs() == expected
        assert max(expected.values()) == 1


@pytest.fixture
def bench(
    kafka_bootstrap: str,
    create_topics: CreateTopics,
    unique_name: Callable[[str], str],
    tmp_path: Path,
) -> Iterator[ToyBench]:
    prefix = unique_name("toy")
    arrivals = {"message.timestamp.type": "LogAppendTime"}
    create_topics(
        {
            f"{prefix}.a": (PARTITIONS, arrivals),
            f"{prefix}.b": (PARTITIONS, arrivals),
            f"{prefix}.out": (2, {}),
            f"{prefix}.state": (PARTITIONS, {"cleanup.policy": "compact"}),
        }
    )
    made = ToyBench(kafka_bootstrap, tmp_path, prefix)
    yield made
    made.stop_all()


def test_outputs_are_exact_after_kills_at_random_moments(bench: ToyBench) -> None:
    moments = random.Random(5)
    for _ in range(3):
        worker = bench.start("killed", instance="one")
        bench.produce(60)
        worker.wait_ready()
        steady = threading.Thread(target=bench.produce, args=(400,))
        steady.start()
        time.sleep(moments.uniform(0.0, 0.6))
        worker.kill()
        steady.join()
    bench.start("killed", instance="one").wait_ready()
    bench.produce(60)
    bench.assert_exact()


def test_a_second_worker_joins_and_leaves_and_sigterm_is_clean(bench: ToyBench) -> None:
    first = bench.start("first")
    first.wait_ready()
    bench.produce(300)
    second = bench.start("second")
    second.wait_ready()
    bench.produce(300)
    wait_until(lambda: "owns partitions" in second.output(), "the second owns partitions")
    bench.produce(300)
    code, seconds = second.terminate()
    assert code == 0
    assert seconds < 5
    bench.produce(300)
    bench.assert_exact()
    busy = threading.Thread(target=bench.produce, args=(2_000,))
    busy.start()
    code, seconds = first.terminate()
    busy.join()
    assert code == 0
    assert seconds < 5
    bench.start("third").wait_ready()
    bench.assert_exact()


def test_a_worker_that_was_frozen_is_fenced_off_when_it_wakes_up(bench: ToyBench) -> None:
    frozen = bench.start("frozen")
    frozen.wait_ready()
    bench.produce(500)
    busy = threading.Thread(target=bench.produce, args=(2_000,))
    busy.start()
    frozen.process.send_signal(signal.SIGSTOP)
    bench.start("successor").wait_ready()
    busy.join()
    frozen.process.send_signal(signal.SIGCONT)
    bench.produce(300)
    bench.assert_exact()
    wait_until(lambda: _ended_fenced(frozen) or _owns_again(frozen), "fenced or back in the group")


def _ended_fenced(worker: WorkerProcess) -> bool:
    return worker.process.poll() == 1 and "FencedError" in worker.output()


def _owns_again(worker: WorkerProcess) -> bool:
    return worker.output().count("Worker ready") > 1


async def test_a_zombie_can_neither_commit_nor_leave_anything_behind(bench: ToyBench) -> None:
    kafka = KafkaSettings(bootstrap_servers=bench.bootstrap)
    topic = f"{bench.prefix}.state"
    out = Output(topic=f"{bench.prefix}.out", key=b"k", value=b"zombie")
    zombie = TransactionalWriter(kafka, bench.prefix, 1, topic)
    await zombie.start()
    await zombie.commit([], {b"k": b"1"}, encode_meta({"a": 1}, b"m1"))
    successor = TransactionalWriter(kafka, bench.prefix, 1, topic)
    await successor.start()
    with pytest.raises(FencedError):
        await zombie.commit([out], {b"k": b"zombie"}, encode_meta({"a": 9}, b"zombie"))
    changes = {b"k": None, b"new": b"2"}
    await successor.commit([], changes, encode_meta({"a": 2}, b"m2"))
    await zombie.close()
    await successor.close()
    state = read_changelog(kafka, topic, 1, threading.Event())
    assert state.entries == {b"new": b"2"}
    assert (state.applied, state.meta) == ({"a": 2}, b"m2")
    assert bench.outputs() == Counter()
    # The client leaves the exception of a record it never sent to the garbage collector.
    gc.collect()


def test_what_a_restore_reads_ends_at_the_end(bench: ToyBench) -> None:
    kafka = KafkaSettings(bootstrap_servers=bench.bootstrap)
    state = read_changelog(kafka, f"{bench.prefix}.state", 0, threading.Event())
    assert (state.entries, state.applied, state.meta) == ({}, {}, None)
