"""What a case plays in: topics of its own, load, workers, and the judgement of the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from confluent_kafka import Consumer, IsolationLevel, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from processors.runtime.records import Record
from streams.contracts import DeadLetter, TrajectorySegment
from streams.serde import Codec, build_codec
from streams.settings import AlignSettings
from tests.faults.load import OVERSIZED_BYTES, Load, LoadPlan
from tests.faults.sizes import Sizes
from tests.faults.stage import Stage
from tests.faults.verdict import Coordinates, Judge, Outcome, Verdict
from tests.faults.watch import Place, Watcher
from tests.integration.align_worker import topics_of
from tests.integration.harness import Bench, WorkerProcess, wait_until

PARTITIONS = 3
WORKER = ("tests.integration.align_worker",)
RULES: dict[str, int] = {
    "settle_ms": 300,
    "gap_ms": 900,
    "max_open_ms": 2_000,
    "max_steps": 3,
    "max_bytes": 60,
    "attribution_window_ms": 1_500,
    "orphan_wait_ms": 1_500,
    "horizon_ms": 4_000,
    "max_skew_ms": 500,
    "max_context_bytes": 40,
}
"""All that is due comes about within 4 s of the log's own clock."""

WORKER_LIMITS = {"max_batch_records": 200, "body_cache_bytes": 10_000, "hot_sessions": 20}
"""Small batches, so that a fault meets the middle of one more often; and so little memory that
most of what is revised must be read back from the inputs."""

INPUT_CONFIG = {"message.timestamp.type": "LogAppendTime", "max.message.bytes": "2000000"}
OUTPUT_CONFIG = {"max.message.bytes": str(OVERSIZED_BYTES * 3 // 4)}
STATE_CONFIG = {"cleanup.policy": "compact", "max.message.bytes": "8000000"}
RESTART_PAUSE_S = 0.5
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Kafka:
    """Where a scene's topics are.

    Attributes:
        bootstrap: The brokers' addresses.
        replicas: Copies of each topic.
        stage: The brokers, for cases that break them.
    """

    bootstrap: str
    replicas: int = 1
    stage: Stage | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment from which recovery is timed.

    Attributes:
        at_s: The moment, by ``time.monotonic``.
        ends: Where the output topics' partitions ended then.
        partitions: The input partitions that are affected.
    """

    at_s: float
    ends: Mapping[Place, int]
    partitions: frozenset[int]


class KeptWorker:
    """A worker that is started again when it ends by itself, as a supervisor does.

    Args:
        start: Starts the process.
    """

    def __init__(self, start: Callable[[], WorkerProcess]) -> None:
        self.restarts = 0
        self.worker = start()
        self._start = start
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Start it no more."""
        self._released.set()
        self._thread.join(10)

    def _keep(self) -> None:
        while not self._released.wait(RESTART_PAUSE_S):
            if self.worker.process.poll() is not None:
                self.restarts += 1
                self.worker = self._start()


class Scene(Bench):
    """One case's topics, workers and judgement.

    Args:
        kafka: Where its topics are.
        folder: Scratch space.
        prefix: Of its topics' names.
        sizes: How long and how often.
        command: Module and first arguments of the worker under test.
    """

    def __init__(
        self,
        kafka: Kafka,
        folder: Path,
        prefix: str,
        sizes: Sizes,
        command: Sequence[str] = WORKER,
    ) -> None:
        super().__init__(kafka.bootstrap, folder)
        self.kafka = kafka
        self.producer = Producer({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
        self.prefix = prefix
        self.sizes = sizes
        self.topics = topics_of(prefix)
        self.state_topic = f"{prefix}.state"
        self.settings = AlignSettings(**RULES)
        self.judge = Judge(self.topics, self.settings, build_codec())
        self.recoveries: list[float] = []
        self.notes: list[str] = []
        self.unread: set[Coordinates] = set()
        self.allow_repeats = False
        self.registry_url: str | None = None
        self.worker_bootstrap = kafka.bootstrap
        self.command = command
        self._kept: list[KeptWorker] = []
        self._closing = ExitStack()
        self.admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        self._create_topics()
        outputs = (self.topics.segments, self.topics.dead_letters)
        self.outputs = [(topic, p) for topic in outputs for p in range(PARTITIONS)]
        inputs = (self.topics.turns, self.topics.feedback)
        self.inputs = [(topic, p) for topic in inputs for p in range(PARTITIONS)]
        self.watcher = Watcher(kafka.bootstrap, [*self.inputs, *self.outputs])

    @property
    def stage(self) -> Stage:
        """The brokers, which the case may break."""
        assert self.kafka.stage is not None, "this case needs brokers of its own"
        return self.kafka.stage

    def use_relays(self) -> None:
        """Have workers reach the brokers through relays only."""
        self.worker_bootstrap = self.stage.relayed_bootstrap

    def use_codec(self, codec: Codec, registry_url: str) -> None:
        """Have load, judge and workers use a schema registry."""
        self.judge = Judge(self.topics, self.settings, codec)
        self.registry_url = registry_url

    def on_close(self, call: Callable[[], object]) -> None:
        """Call something at the scene's end."""
        self._closing.callback(call)

    def close(self) -> None:
        """End all that runs, and drop the topics."""
        self._closing.close()
        for kept in self._kept:
            kept.release()
        self.stop_all()
        self.watcher.close()
        with suppress(Exception):
            names = {topic for topic, _ in (*self.inputs, *self.outputs)} | {self.state_topic}
            for future in self.admin.delete_topics(sorted(names)).values():
                future.result(20)

    # Load and workers

    def load(self, plan: LoadPlan | None = None) -> Load:
        """Load for a ``with`` block; at its end all of it is in the topics."""
        return Load(
            self.bootstrap,
            (self.topics.turns, self.topics.feedback),
            PARTITIONS,
            self.settings,
            plan or LoadPlan(scripts=self.sizes.scripts),
            self.judge.codec,
        )

    def start(self, name: str, instance: str | None = None) -> WorkerProcess:
        """Start a worker. With ``instance`` it is a static member of the group."""
        config = self.config(
            name,
            kafka={
                "bootstrap_servers": self.worker_bootstrap,
                "session_timeout_ms": 6_000,
            },
            data_dir=str(self.data_dir(name)),
            align=RULES,
            worker=WORKER_LIMITS | {"group_instance_id": instance},
            **({"schema_registry_url": self.registry_url} if self.registry_url else {}),
        )
        module, *arguments = self.command
        return self.worker(module, *arguments, self.prefix, str(config), name=name)

    def keep(self, name: str, instance: str | None = None) -> KeptWorker:
        """Start a worker that is started again whenever it ends by itself."""
        kept = KeptWorker(lambda: self.start(name, instance))
        self._kept.append(kept)
        return kept

    def data_dir(self, name: str) -> Path:
        """A worker's data folder."""
        return self.folder / "data" / name

    def alive(self) -> list[WorkerProcess]:
        """The workers that run."""
        return [worker for worker in self.workers if worker.process.poll() is None]

    # Time

    def mark(self, *partitions: int, silent: bool = False) -> Mark:
        """Time recovery from now, of some partitions or of all.

        With ``silent`` nothing can have been written of late, and Kafka, which may not be able
        to say where the outputs end, is not asked.
        """
        affected = frozenset(partitions or range(PARTITIONS))
        if silent:
            return Mark(time.monotonic(), dict.fromkeys(self.outputs, 0), affected)
        ends = self.watcher.ends(IsolationLevel.READ_UNCOMMITTED, self.outputs)
        return Mark(time.monotonic(), ends, affected)

    def open_transactions(self) -> int:
        """How many partitions of outputs and state end in a transaction that is still open."""
        return self._open((self.state_topic, p) for p in range(PARTITIONS)) + self.open_outputs()

    def open_outputs(self) -> int:
        """How many partitions of outputs hold records that are not committed yet."""
        return self._open(self.outputs)

    def _open(self, places: Iterable[Place]) -> int:
        wanted = tuple(places)
        ends = self.watcher.ends(IsolationLevel.READ_UNCOMMITTED, wanted)
        stable = self.watcher.ends(IsolationLevel.READ_COMMITTED, wanted)
        return sum(stable[place] < ends[place] for place in wanted)

    def first_outputs(self, mark: Mark) -> dict[int, float]:
        """Seconds from a mark to the first new output of each affected partition, so far."""
        firsts: dict[int, float] = {}
        for topic in (self.topics.segments, self.topics.dead_letters):
            for seen in self.watcher.seen(topic):
                if seen.at_s < mark.at_s:
                    continue
                place = (topic, seen.record.partition)
                partition = self._source(seen.record)
                if seen.record.offset >= mark.ends[place] and partition in mark.partitions:
                    seconds = seen.at_s - mark.at_s
                    firsts[partition] = min(firsts.get(partition, seconds), seconds)
        return firsts

    def recovered(self, mark: Mark, timeout_s: float = PATIENCE_S) -> float:
        """Wait until every affected partition has new outputs; notes and returns the seconds."""
        wait_until(
            lambda: self._working() and self.first_outputs(mark).keys() == mark.partitions,
            f"new outputs of partitions {sorted(mark.partitions)}",
            timeout_s,
        )
        seconds = max(self.first_outputs(mark).values())
        self.recoveries.append(seconds)
        return seconds

    def resumed(self, mark: Mark, timeout_s: float = PATIENCE_S) -> float:
        """Wait until every affected partition has outputs of new input, after a fault that
        workers may live through; notes and returns the longest time one had none.
        """
        wanted = time.monotonic()
        now = Mark(wanted, mark.ends, mark.partitions)
        wait_until(
            lambda: self._working() and self.first_outputs(now).keys() == mark.partitions,
            f"new outputs of partitions {sorted(mark.partitions)}",
            timeout_s,
        )
        seconds = self._longest_silence(mark)
        self.recoveries.append(seconds)
        return seconds

    def _longest_silence(self, mark: Mark) -> float:
        times: dict[int, list[float]] = {partition: [mark.at_s] for partition in mark.partitions}
        for topic in (self.topics.segments, self.topics.dead_letters):
            for seen in self.watcher.seen(topic):
                partition = self._source(seen.record)
                if seen.at_s > mark.at_s and partition in times:
                    times[partition].append(seen.at_s)
        return max(
            later - earlier
            for moments in map(sorted, times.values())
            for earlier, later in pairwise(moments)
        )

    def _working(self) -> bool:
        """True; a failure if no worker is left that could do anything."""
        if not self._kept and not self.alive():
            last = self.workers[-1]
            raise AssertionError(f"the last worker ended by itself:\n{last.output()[-3000:]}")
        return True

    def _source(self, record: Record) -> int:
        """The input partition an output comes from."""
        if record.topic == self.topics.segments:
            segment = self.judge.codec.decode(record.value, TrajectorySegment)
            return segment.lineage[-1].partition
        return self.judge.codec.decode(record.value, DeadLetter).partition

    def wait_for_outputs(self, count: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait until ``count`` more segments are there."""
        wanted = self.watcher.count(self.topics.segments) + count
        wait_until(
            lambda: self._working() and self.watcher.count(self.topics.segments) >= wanted,
            f"{count} more segments",
            timeout_s,
        )

    def sent_so_far(self) -> int:
        """Records that are in the inputs."""
        return sum(self.watcher.count(topic) for topic in {topic for topic, _ in self.inputs})

    def wait_until_sent(self, count: int) -> None:
        """Wait until ``count`` more records are in the inputs."""
        wanted = self.sent_so_far() + count
        wait_until(lambda: self.sent_so_far() >= wanted, f"{count} more records", PATIENCE_S)

    def committed(self, places: list[TopicPartition]) -> list[TopicPartition]:
        """The group's offsets."""
        consumer = Consumer({"bootstrap.servers": self.bootstrap, "group.id": self.prefix})
        try:
            return list(consumer.committed(places, timeout=30))
        finally:
            consumer.close()

    # The end

    def settle(self) -> Verdict:
        """Wait for all outputs, stop the workers, and compare what the topics hold."""
        self._wait_for_all()
        self._stop_workers()
        self.watcher.catch_up()
        inputs = self._records(self.inputs)
        outputs = [
            r
            for topic in (self.topics.segments, self.topics.dead_letters)
            for r in self.read(topic, PARTITIONS)
        ]
        expected = self.judge.expected(inputs, self.unread)
        return self.judge.verdict(inputs, expected, self.judge.found(inputs, outputs))

    def _wait_for_all(self) -> None:
        """Wait until nothing is missing, or nothing has come for too long."""
        expected = Outcome()
        known = -1
        progress = (0, time.monotonic())
        while True:
            self.watcher.catch_up()
            inputs = self._records(self.inputs)
            sent = sum(record.value is not None for record in inputs)
            if sent != known:
                expected, known = self.judge.expected(inputs, self.unread), sent
            found = self.judge.found(inputs, self._records(self.outputs))
            verdict = self.judge.verdict(inputs, expected, found)
            if verdict.lost == 0:
                return
            if found.total() != progress[0]:
                progress = (found.total(), time.monotonic())
            elif time.monotonic() - progress[1] > self.sizes.patience_s:
                return
            time.sleep(0.3)

    def _stop_workers(self) -> None:
        for kept in self._kept:
            kept.release()
        for worker in self.alive():
            stop_cleanly(worker)

    def _records(self, places: Sequence[Place]) -> list[Record]:
        topics = sorted({topic for topic, _ in places})
        return [seen.record for topic in topics for seen in self.watcher.seen(topic)]

    # Topics

    def _create_topics(self) -> None:
        inputs = (self.topics.turns, self.topics.feedback)
        configs = dict.fromkeys(inputs, INPUT_CONFIG)
        configs |= dict.fromkeys((self.topics.segments, self.topics.dead_letters), OUTPUT_CONFIG)
        configs[self.state_topic] = STATE_CONFIG
        wanted = [
            NewTopic(
                name,
                num_partitions=PARTITIONS,
                replication_factor=self.kafka.replicas,
                config=dict(config),
            )
            for name, config in configs.items()
        ]
        for future in self.admin.create_topics(wanted).values():
            future.result(30)
        self.wait_for_leaders()

    def wait_for_leaders(self) -> None:
        """Wait until all topics can be used."""
        topics = self.topics
        names = {topics.turns, topics.feedback, topics.segments, topics.dead_letters}
        names.add(self.state_topic)
        wait_until(lambda: _have_leaders(self.admin, names), "leaders of all topics", 60)


def stop_cleanly(worker: WorkerProcess) -> None:
    """SIGTERM; it must end well and in time."""
    code, seconds = worker.terminate(40)
    assert code == 0, f"exit code {code} after SIGTERM:\n{worker.output()[-3000:]}"
    assert seconds < 15, f"SIGTERM took {seconds:.0f} s"


def _have_leaders(admin: AdminClient, names: set[str]) -> bool:
    found = admin.list_topics(timeout=20).topics
    return all(
        name in found
        and len(found[name].partitions) == PARTITIONS
        and all(partition.leader >= 0 for partition in found[name].partitions.values())
        for name in names
    )
