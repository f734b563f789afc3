from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from processors.runtime.apart import RemoteProcessor, apart
from processors.runtime.records import Outcome, Output, PartitionProcessor, Record
from processors.runtime.spec import WorkerSpec
from processors.runtime.status import NOTHING
from processors.runtime.topics import Cluster
from streams import metrics as names
from streams.errors import ProcessError, RecordError, StateError
from streams.metrics import ProcessorMetrics
from streams.settings import Settings, WorkerSettings
from tests.unit.processors.runtime.apart_stage import PARTITIONS, Obedient, build

CLUSTER = Cluster(PARTITIONS, {"a": 1, "b": 2})
ONE = Settings(worker=WorkerSettings(processor_processes=1))


def record(offset: int, value: bytes | None = b"v", topic: str = "a") -> Record:
    headers = (("h", b"\xff"), ("n\u00fc", None))
    return Record(
        topic=topic,
        partition=1,
        offset=offset,
        timestamp=-1,
        key=None,
        value=value,
        headers=headers,
    )


@pytest.fixture
def metrics() -> ProcessorMetrics:
    return ProcessorMetrics("obedient")


@pytest.fixture
def spec(metrics: ProcessorMetrics) -> Iterator[WorkerSpec]:
    with apart(build, ONE, metrics) as spec:
        yield spec


@pytest.fixture
def processor(spec: WorkerSpec) -> PartitionProcessor:
    made = spec.make_processor(1, CLUSTER)
    made.restore([], None)
    return made


def children() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [child for child in found if "processors.runtime.apart" in child.cmdline()]


def test_what_goes_in_comes_out_as_without_another_process(
    processor: PartitionProcessor, metrics: ProcessorMetrics
) -> None:
    assert isinstance(processor, RemoteProcessor)
    processor.feed("a", [record(0), record(1, None)])
    processor.feed("b", [record(7, b"", "b")])
    assert (processor.buffered("a"), processor.buffered("b")) == (2, 1)
    first = processor.drain(2)
    assert first == Outcome(
        applied={"a": 1},
        outputs=[
            Output(topic="a", key=None, value=value, partition=1, headers=record(0).headers)  # type: ignore[arg-type]
            for value in (b"v", None)
        ],
        changes={b"kept": b"1", b"gone": None},
        meta=b"meta",
        due_ms=[-1, -1],
        records=2,
        more=True,
    )
    assert (processor.buffered("a"), processor.buffered("b")) == (0, 1)
    assert processor.drain(2).applied == {"b": 7}
    assert metrics.value(names.DUPLICATES) == 3


def test_a_state_is_restored_there(spec: WorkerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("processors.runtime.apart._CHUNK_ENTRIES", 2)
    processor = spec.make_processor(2, CLUSTER)
    assert processor.status() is NOTHING
    processor.restore(((b"%d" % n, b"abc") for n in range(5)), b"12345678")
    status = processor.status()
    assert (status.clock_ms, status.sessions, status.next_due_ms) == (2, PARTITIONS, 8)
    assert (status.state_entries, status.state_bytes) == (5, 15)
    assert status.needs_tick(-4)
    assert not status.needs_tick(-5)


def test_an_error_there_is_an_error_here_and_not_the_end(processor: PartitionProcessor) -> None:
    processor.feed("a", [record(0), record(1, b"fail")])
    with pytest.raises(RecordError, match="as told") as caught:
        processor.drain(10)
    assert (caught.value.detail, caught.value.reason.value) == ("as told", "unknown")
    processor.feed("a", [record(2, b"fail unsendably")])
    with pytest.raises(ProcessError, match="UnsendableError: as told"):
        processor.drain(10)
    processor.feed("a", [record(3)])
    assert processor.drain(10).applied == {"a": 3}


def test_a_state_that_is_refused_there_is_refused_here(spec: WorkerSpec) -> None:
    with pytest.raises(StateError, match="this is no state"):
        spec.make_processor(0, CLUSTER).restore([(b"k", b"v")], b"damaged")


def test_gauges_are_not_for_processors(processor: PartitionProcessor) -> None:
    processor.feed("a", [record(0, b"set a gauge")])
    with pytest.raises(TypeError, match=names.SESSIONS.name):
        processor.drain(1)


def test_a_partition_that_was_given_up_is_forgotten_there(spec: WorkerSpec) -> None:
    kept, given_up = (spec.make_processor(n, CLUSTER) for n in (0, 1))
    for processor in (kept, given_up):
        processor.restore([], None)
    assert given_up.status().open_sessions == 2
    del processor, given_up
    gc.collect()
    kept.drain(1)
    assert kept.status().open_sessions == 1


def test_without_it_the_worker_ends_and_says_why(processor: PartitionProcessor) -> None:
    (child,) = children()
    processor.feed("a", [record(0, b"end")])
    with pytest.raises(ProcessError, match=rf"pid {child.pid}\) ended with status 9: .* successor"):
        processor.drain(1)
    with pytest.raises(ProcessError, match="ended with status 9"):
        processor.drain(1)


def test_signals_are_for_the_worker(processor: PartitionProcessor) -> None:
    (child,) = children()
    for number in (signal.SIGINT, signal.SIGTERM):
        child.send_signal(number)
    processor.feed("a", [record(0)])
    assert processor.drain(1).records == 1


def test_it_ends_with_the_block(metrics: ProcessorMetrics) -> None:
    with apart(build, ONE, metrics) as spec:
        spec.make_processor(0, CLUSTER).restore([], None)
        (child,) = children()
    assert not child.is_running()


def test_it_ends_when_the_worker_is_killed(tmp_path: Path) -> None:
    said = tmp_path / "child"
    code = (
        "import sys\n"
        "from processors.runtime.apart import apart\n"
        "from streams.metrics import ProcessorMetrics\n"
        "from tests.unit.processors.runtime.apart_stage import build\n"
        "from tests.unit.processors.runtime.test_apart import CLUSTER, ONE, children\n"
        "with apart(build, ONE, ProcessorMetrics('x')) as spec:\n"
        "    spec.make_processor(0, CLUSTER).restore([], None)\n"
        "    print(children()[0].pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with said.open("wb") as errors:
        worker = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert worker.stdout is not None
        child = psutil.Process(int(worker.stdout.readline()))
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
        assert worker.stdin is not None
        worker.stdin.close()
    # It is nobody's child of ours, so it cannot be waited for but by looking.
    psutil.wait_procs([child], timeout=120)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_it_can_be_left_out(metrics: ProcessorMetrics) -> None:
    settings = Settings(worker=WorkerSettings(processor_processes=0))
    with apart(build, settings, metrics) as spec:
        assert isinstance(spec.make_processor(0, CLUSTER), Obedient)
        assert children() == []


def test_partitions_are_shared_out(metrics: ProcessorMetrics) -> None:
    settings = Settings(worker=WorkerSettings(processor_processes=2))
    with apart(build, settings, metrics) as spec:
        made = [spec.make_processor(partition, CLUSTER) for partition in range(PARTITIONS)]
        for processor in made:
            processor.restore([], None)
        assert len(children()) == 2
        for processor in made:
            processor.drain(1)
        assert [processor.status().open_sessions for processor in made] == [2, 1, 2]
    assert children() == []
