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
from processors.runtime.state import (
    PART_BYTES,
    TransactionalWriter,
    encode_meta,
    read_changelog,
)
from streams.errors import FencedError
from streams.settings import KafkaSettings
from tests.integration.harness import WorkerProcess, wait_until
from tests.integration.toy_bench import ToyBench, toy_bench

pytestmark = pytest.mark.broker


@pytest.fixture
def bench(
    kafka_bootstrap: str, unique_name: Callable[[str], str], tmp_path: Path
) -> Iterator[ToyBench]:
    made = toy_bench(kafka_bootstrap, tmp_path, unique_name("toy"))
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
    second.stop_in_peace()
    bench.produce(300)
    bench.assert_exact()
    busy = threading.Thread(target=bench.produce, args=(2_000,))
    busy.start()
    first.stop_in_peace()
    busy.join()
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
    said_before = len(frozen.output())
    frozen.process.send_signal(signal.SIGCONT)
    bench.produce(300)
    bench.assert_exact()
    wait_until(
        lambda: _ended_fenced(frozen) or _owns_again(frozen, said_before),
        lambda: f"fenced or back in the group (exit code {frozen.process.poll()})",
    )


def _ended_fenced(worker: WorkerProcess) -> bool:
    return worker.process.poll() == 1 and "FencedError" in worker.output()


def _owns_again(worker: WorkerProcess, said_before: int) -> bool:
    """Whether it joined once more, and was ready after that.

    It may have been put to sleep before it first logged that: it says so a moment after the
    line that tests wait for.
    """
    _, joined, said_since = worker.output()[said_before:].partition("Joined group")
    return joined != "" and "Worker ready" in said_since


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


async def test_an_entry_larger_than_any_record_is_restored_and_forgotten(bench: ToyBench) -> None:
    kafka = KafkaSettings(bootstrap_servers=bench.bootstrap)
    topic = f"{bench.prefix}.state"
    large = b"0123456789abcdef" * (20 * PART_BYTES // 16)
    values = (large, large[: PART_BYTES + 1], b"small", None)
    for number, value in enumerate(values):
        writer = TransactionalWriter(kafka, bench.prefix, 0, topic)
        await writer.start()
        writer.resume(read_changelog(kafka, topic, 0, threading.Event()))
        await writer.commit([], {b"k": value}, encode_meta({"a": number}, b""))
        await writer.close()
        state = read_changelog(kafka, topic, 0, threading.Event())
        assert state.entries == ({} if value is None else {b"k": value})
        assert state.applied == {"a": number}
    assert state.parts == {}
