"""The runtime against a cluster that misbehaves: topics, group, changelog and broker."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourceType

from processors.runtime.state import ENTRY_PREFIX
from streams.kafka.embedded import start_kafka, stop_kafka
from tests.conftest import create_topics
from tests.integration.harness import DEADLINE_S, WorkerProcess, wait_until
from tests.integration.toy_bench import ARRIVALS, PARTITIONS, ToyBench, toy_bench

pytestmark = pytest.mark.broker


@pytest.fixture
def bench(
    kafka_bootstrap: str, unique_name: Callable[[str], str], tmp_path: Path
) -> Iterator[ToyBench]:
    made = toy_bench(kafka_bootstrap, tmp_path, unique_name("toy"))
    yield made
    made.stop_all()


@pytest.fixture
def admin(kafka_bootstrap: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": kafka_bootstrap})


def stopped(worker: WorkerProcess) -> str:
    """Wait until it has ended by itself with a failure; what it said."""
    assert worker.process.wait(DEADLINE_S) == 1
    return worker.output()


def run_dry(bench: ToyBench, name: str, records: int = 100) -> None:
    """Have a worker apply some records, and leave the group."""
    worker = bench.start(name)
    worker.wait_ready()
    bench.produce(records)
    bench.assert_exact()
    assert worker.terminate()[0] == 0


def set_config(admin: AdminClient, topic: str, name: str, value: str) -> None:
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(DEADLINE_S)


def cut(admin: AdminClient, topic: str) -> None:
    """Drop all records there are, as retention does."""
    places = [TopicPartition(topic, p, -1) for p in range(PARTITIONS)]
    for future in admin.delete_records(places).values():
        future.result(DEADLINE_S)


def test_an_output_topic_that_takes_nothing_for_a_while_costs_nothing(
    bench: ToyBench, admin: AdminClient
) -> None:
    out = f"{bench.prefix}.out"
    worker = bench.start("worker", instance="one")
    worker.wait_ready()
    set_config(admin, out, "max.message.bytes", "90")
    bench.produce(100)
    assert "cannot write as" in stopped(worker)
    assert "cannot write as" in stopped(bench.start("worker", instance="one"))
    assert bench.outputs().total() == 0
    set_config(admin, out, "max.message.bytes", "1000000")
    bench.start("worker", instance="one").wait_ready()
    bench.assert_exact()


def test_lost_group_offsets_neither_lose_nor_repeat_anything(
    bench: ToyBench, admin: AdminClient
) -> None:
    run_dry(bench, "first")
    for future in admin.delete_consumer_groups([f"{bench.prefix}-toy"]).values():
        future.result(DEADLINE_S)
    run_dry(bench, "second")


def test_retention_that_overtook_the_state_is_an_error_in_the_log_and_no_end(
    bench: ToyBench, admin: AdminClient
) -> None:
    run_dry(bench, "first")
    bench.produce(300)
    for topic in bench.inputs:
        cut(admin, topic)
    before = bench.outputs().total()
    worker = bench.start("second")
    wait_until(lambda: "aged out before they were applied" in worker.output(), "the loss is told")
    bench.produce(300)
    wait_until(lambda: bench.outputs().total() > before, "outputs of what came after")
    assert worker.process.poll() is None


def test_retention_that_overtakes_a_running_worker_is_told_too(
    bench: ToyBench, admin: AdminClient
) -> None:
    worker = bench.start("worker")
    worker.wait_ready()
    bench.produce(100)
    bench.assert_exact()
    worker.process.send_signal(signal.SIGSTOP)
    bench.produce(3_000)
    for topic in bench.inputs:
        cut(admin, topic)
    bench.produce(300)
    worker.process.send_signal(signal.SIGCONT)
    wait_until(lambda: "aged out before they were applied" in worker.output(), "the loss is told")
    assert worker.process.poll() is None


def test_an_input_made_anew_is_refused(bench: ToyBench, admin: AdminClient) -> None:
    run_dry(bench, "first")
    (topic, _) = bench.inputs
    for future in admin.delete_topics([topic]).values():
        future.result(DEADLINE_S)
    wait_until(
        lambda: topic not in admin.list_topics(timeout=DEADLINE_S).topics, "the topic is gone"
    )
    create_topics(bench.bootstrap, {topic: (PARTITIONS, ARRIVALS)})
    said = stopped(bench.start("second"))
    assert f"{topic} partition" in said
    assert "made anew or lost records" in said


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (b"garbage", "who else writes to it"),
        (ENTRY_PREFIX + b"k1", "these 7 bytes are no entry"),
    ],
)
def test_garbage_in_the_changelog_is_named_and_ends_the_worker(
    bench: ToyBench, key: bytes, said: str
) -> None:
    run_dry(bench, "first")
    bench.producer.produce(f"{bench.prefix}.state", key=key, value=b"garbage", partition=1)
    bench.flush()
    log = stopped(bench.start("second"))
    assert f"{bench.prefix}.state partition 1: " in log
    assert said in log


@pytest.mark.parametrize("instance", [None, "one"])
def test_a_worker_started_twice_does_nothing_twice(bench: ToyBench, instance: str | None) -> None:
    first = bench.start("first", instance)
    first.wait_ready()
    busy = threading.Thread(target=bench.produce, args=(1_000,))
    busy.start()
    second = bench.start("second", instance)
    second.wait_ready()
    busy.join()
    bench.produce(300)
    bench.assert_exact()
    assert second.process.poll() is None
    if instance is not None:
        wait_until(lambda: first.process.poll() == 1, "the first has made way")


def started_again(bench: ToyBench, worker: WorkerProcess) -> Callable[[], None]:
    """What starts a worker again whenever it was found ended with a failure."""
    running = [worker]

    def look() -> None:
        if running[-1].process.poll() == 1:
            running.append(bench.start(f"again-{len(running)}", instance="one"))

    return look


def test_a_broker_killed_in_the_middle_of_transactions_loses_and_repeats_nothing(
    tmp_path: Path, unique_name: Callable[[str], str]
) -> None:
    folder = tmp_path / "kafka"
    running = start_kafka(folder)
    port = int(running.bootstrap_servers.rpartition(":")[2])
    bench = toy_bench(running.bootstrap_servers, tmp_path, unique_name("toy"))
    try:
        worker = bench.start("worker", instance="one")
        worker.wait_ready()
        for _ in range(2):
            busy = threading.Thread(target=bench.produce, args=(3_000,))
            before = bench.outputs().total()
            busy.start()
            wait_until(lambda at=before: bench.outputs().total() > at, "outputs")  # type: ignore[misc]
            broker = psutil.Process(running.pid)
            broker.kill()
            broker.wait(DEADLINE_S)
            running = start_kafka(folder, port)
            busy.join()
        bench.assert_exact(meanwhile=started_again(bench, worker))
    finally:
        bench.stop_all()
        stop_kafka(folder)
