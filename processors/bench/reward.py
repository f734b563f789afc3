"""``clawstream bench reward``: does the reward keep up, and how long does it take?

*Replay*: a finished log of conversations goes through the aligner's worker, its segments through
the reward's, one after the other, each as users run it. From the first record a worker is handed
until all it makes is visible to a ``read_committed`` reader. *Live*: segments are published at the
rate at which so many turns a second close, and the time is taken from a segment's confirmation by
Kafka until the scored one is visible. Some are published and scored before the clock starts: what
a producer waits for at its first record, and a worker that just started, are no part of it.

The judge has no part in this: it stands beside the stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from confluent_kafka import Consumer, Producer, TopicPartition

from processors.bench.cluster import (
    REPLAYED,
    LogWriter,
    Names,
    OnStep,
    Topics,
    bench_broker,
    run_folder,
    settings_over,
)
from processors.bench.log import LogRecord
from processors.bench.process import BenchError, Outputs, Subject
from processors.bench.rig import Rig
from processors.bench.simple_log import Shape, SimpleLog
from processors.bench.subjects.job import FIRST
from processors.bench.subjects.reward import RewardJob
from streams.bench.machine import describe_machine
from streams.bench.report import Goal, Report, Spread, percentile
from streams.bench.turns import measure_in_turn
from streams.contracts import ScoredSegment, TrajectorySegment
from streams.kafka.clients import make_consumer, make_producer
from streams.process import READY
from streams.serde import build_codec
from streams.settings import Settings, write_settings
from streams.topics import DEAD_LETTERS, REVIEWS, REWARD_STATE, SCORED, SEGMENTS

BEGIN_MS = 1_767_225_600_000
GOAL_MS = 200.0
READY_S = 300.0
LIMIT_S = 3_600.0
SHARES = (("p50", 0.50), ("p95", 0.95), ("p99", 0.99), ("max", 1.0))
TALKING = 1_000
RECORDS_PER_S = 1_000.0
FIRST_SEGMENTS = 100
"""Scored before the clock starts, and not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPlan:
    """What is measured.

    Attributes:
        sessions: Conversations in the log.
        turns: Of each.
        content_bytes: Of each turn.
        turns_per_s: The live rate.
        seconds: How long it goes on.
        repetitions: How often all of it is done.
        partitions: Of each topic.
        latest_ms: A load that fell behind its own schedule by more was no steady one.
    """

    sessions: int = 20_000
    turns: int = 4
    content_bytes: int = 300
    turns_per_s: float = 1_000.0
    seconds: float = 30.0
    repetitions: int = 3
    partitions: int = 4
    latest_ms: float = 250.0


@dataclass(frozen=True, slots=True)
class _Stage:
    """The reward's topics under one stem, and workers over them."""

    rig: Rig
    stem: str
    segments: str

    def of(self, name: str) -> str:
        """A topic's or a group's name."""
        return self.rig.names.of(f"{self.stem}-{name}")

    def make_topics(self) -> None:
        """Make its outputs and its state."""
        self.rig.topics.make(
            {
                SCORED: self.of("scored"),
                REVIEWS: self.of("reviews"),
                DEAD_LETTERS: self.of("dead_letters"),
                REWARD_STATE: self.of("state"),
            }
        )

    def start(self, config: Path) -> Subject:
        """Start a worker."""
        folder = self.rig.folder / self.stem
        folder.mkdir()
        job = RewardJob(
            name=self.of("group"),
            config=str(config),
            segments=self.segments,
            scored=self.of("scored"),
            reviews=self.of("reviews"),
            dead_letters=self.of("dead_letters"),
            changelog=self.of("state"),
        )
        (folder / "job.json").write_bytes(msgspec.json.encode(job))
        return Subject("processors.bench.subjects.reward", [str(folder / "job.json")], folder)


@dataclass
class _Reader:
    """Notes in a thread when each scored segment became visible."""

    consumer: Consumer
    seen: list[tuple[float, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)

    def __enter__(self) -> _Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.consumer.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            messages = self.consumer.consume(500, 0.005)
            now_s = time.monotonic()
            for message in messages:
                value = message.value()
                if message.error() is None and value is not None:
                    self.seen.append((now_s, value))


@dataclass(frozen=True, slots=True)
class _Bench:
    """One run, over one broker."""

    plan: RewardPlan
    settings: Settings
    bootstrap: str
    topics: Topics
    folder: Path
    on_step: OnStep

    def measure(self) -> dict[str, float]:
        """One repetition, with topics and workers of its own."""
        names = Names.fresh("reward")
        folder = self.folder / names.prefix
        folder.mkdir()
        plan, kafka = self.plan, self.settings.kafka
        rig = Rig(names, folder, kafka, self.bootstrap, self.topics, plan.partitions)
        rig.make_topics(inputs=REPLAYED)
        self.on_step(f"writing {plan.sessions} conversations of {plan.turns} turns")
        count = self._write_log(rig)
        figures, segments = self._align(rig, count)
        figures |= self._reward(rig, count)
        return figures | self._live(rig, segments)

    def _write_log(self, rig: Rig) -> int:
        """Write the log; returns how many segments it makes."""
        plan = self.plan
        shape = Shape(turns=plan.turns, content_bytes=plan.content_bytes)
        log = SimpleLog(shape, plan.partitions, build_codec(), BEGIN_MS, RECORDS_PER_S)
        writer = LogWriter(rig.sides, self.settings.kafka, self.bootstrap)
        for record in self._records(log):
            writer.write(record)
        writer.flush()
        return plan.sessions + plan.partitions

    def _records(self, log: SimpleLog) -> Iterator[LogRecord]:
        plan = self.plan
        for start in range(0, plan.sessions, TALKING):
            for turn in range(plan.turns):
                for number in range(start, min(start + TALKING, plan.sessions)):
                    yield from log.turn(f"s-{number:09d}", turn, ends=turn == plan.turns - 1)
        yield from log.probes("probe", self.settings.align.settle_ms)

    def _align(
        self, rig: Rig, count: int
    ) -> tuple[dict[str, float], Sequence[tuple[bytes, bytes]]]:
        self.on_step("aligning them")
        outputs = Outputs(self.settings.kafka, self.bootstrap, rig.segments, rig.partitions)
        with outputs, rig.start("align", self._config, replay=True) as worker:
            figures = self._replayed("align", worker, outputs, count)
            return figures, outputs.records

    def _reward(self, rig: Rig, count: int) -> dict[str, float]:
        self.on_step("scoring their segments")
        stage = _Stage(rig, "replay", rig.segments)
        stage.make_topics()
        outputs = Outputs(
            self.settings.kafka, self.bootstrap, stage.of("scored"), rig.partitions, keep=False
        )
        with outputs, stage.start(self._config) as worker:
            return self._replayed("reward", worker, outputs, count)

    def _replayed(
        self, name: str, worker: Subject, outputs: Outputs, count: int
    ) -> dict[str, float]:
        begun = worker.wait_event(FIRST, READY_S)
        cpu_s = worker.cpu_s()
        seconds = (outputs.wait_for(count, worker, LIMIT_S) - begun["at_ns"]) / 1e9
        return {
            f"{name}_s": seconds,
            f"{name}_segments_per_s": count / seconds,
            f"{name}_turns_per_s": count * self.plan.turns / seconds,
            f"{name}_cpu_us_per_segment": 1e6 * (worker.cpu_s() - cpu_s) / count,
        }

    @property
    def _config(self) -> Path:
        return self.folder / "config.yaml"

    # Live

    def _live(self, rig: Rig, segments: Sequence[tuple[bytes, bytes]]) -> dict[str, float]:
        plan, kafka = self.plan, self.settings.kafka
        self.on_step(f"{plan.turns_per_s:g} turns a second for {plan.seconds:g} s")
        stage = _Stage(rig, "live", rig.names.of("live-segments"))
        rig.topics.make({SEGMENTS: stage.segments})
        stage.make_topics()
        consumer = make_consumer(
            kafka, self.bootstrap, group=stage.of("reader"), overrides={"fetch.wait.max.ms": 10}
        )
        consumer.assign([TopicPartition(stage.of("scored"), p, 0) for p in range(rig.partitions)])
        with stage.start(self._config) as worker, _Reader(consumer) as reader:
            worker.wait_event(READY, READY_S)
            producer = make_producer(
                self.settings.kafka, self.bootstrap, overrides={"linger.ms": 0}
            )
            for key, value in segments[:FIRST_SEGMENTS]:
                producer.produce(stage.segments, key=key, value=value)
            producer.flush(READY_S)
            _wait_for(reader, FIRST_SEGMENTS, worker)
            published = self._publish(producer, stage.segments, segments[FIRST_SEGMENTS:])
            _wait_for(reader, FIRST_SEGMENTS + len(published), worker)
        return _delays(published, reader.seen)

    def _publish(
        self, producer: Producer, topic: str, segments: Sequence[tuple[bytes, bytes]]
    ) -> dict[str, float]:
        """Publish at the rate; returns when Kafka confirmed each segment, by its id.

        Raises:
            BenchError: There are too few segments, or the rate could not be kept.
        """
        plan = self.plan
        every_s = plan.turns / plan.turns_per_s
        wanted = int(plan.seconds / every_s)
        chosen = segments[:wanted]
        if wanted > len(chosen):
            raise BenchError(
                f"{plan.seconds:g} s at this rate need {FIRST_SEGMENTS + wanted} segments, the log "
                f"has {FIRST_SEGMENTS + len(segments)}: raise --sessions or lower --seconds"
            )
        codec = build_codec()
        names = [codec.decode(value, TrajectorySegment).segment_id for _, value in chosen]
        confirmed: dict[str, float] = {}
        late_s, began_s = 0.0, time.monotonic()
        for number, (name, (key, value)) in enumerate(zip(names, chosen, strict=True)):
            due_s = began_s + number * every_s
            producer.poll(max(0.0, due_s - time.monotonic()))
            while (left_s := due_s - time.monotonic()) > 0:
                producer.poll(left_s)
            late_s = max(late_s, -left_s)

            def delivered(error: object, _message: object, name: str = name) -> None:
                if error is None:
                    confirmed[name] = time.monotonic()

            producer.produce(topic, key=key, value=value, on_delivery=delivered)
        producer.flush(READY_S)
        if len(confirmed) < wanted or 1_000 * late_s > plan.latest_ms:
            raise BenchError(
                f"the load could not keep its rate (up to {1_000 * late_s:.0f} ms late, "
                f"{wanted - len(confirmed)} not sent): this machine is too busy, lower --rate"
            )
        return confirmed


def _wait_for(reader: _Reader, count: int, worker: Subject) -> None:
    """Wait until so many scored segments are visible."""
    deadline = time.monotonic() + READY_S
    while len(reader.seen) < count:
        worker.check_alive()
        if time.monotonic() > deadline:
            raise worker.failure(f"scored {len(reader.seen)} of {count}")
        time.sleep(0.05)


def _delays(
    published: Mapping[str, float], seen: Sequence[tuple[float, bytes]]
) -> dict[str, float]:
    codec = build_codec()
    visible = {codec.decode(value, ScoredSegment).segment.segment_id: at for at, value in seen}
    # A confirmation may reach us after the scored segment did: then it took no time.
    delays = [max(0.0, 1_000 * (visible[name] - at)) for name, at in published.items()]
    figures = {f"scored_ms_{name}": percentile(delays, share) for name, share in SHARES}
    return figures | {"live_segments": float(len(delays))}


def run(settings: Settings, plan: RewardPlan, on_step: OnStep) -> Report:
    """Measure it.

    Raises:
        BenchError: A worker ended, or the load could not keep its rate.
        BrokerError: Kafka cannot be reached or started.
    """
    machine = describe_machine()
    with bench_broker(settings, on_step) as bootstrap:
        measured = _run_on(settings, plan, bootstrap, on_step)
    ours = measured["ours"]
    keeps_up = [
        reward / align
        for reward, align in zip(
            ours["reward_segments_per_s"], ours["align_segments_per_s"], strict=True
        )
    ]
    goals = [
        Goal("reward's segments a second to the aligner's", 1.0, min(keeps_up)),
        Goal("scored_ms_p99", GOAL_MS, max(ours["scored_ms_p99"]), at_most=True),
    ]
    return Report(
        bench="reward",
        machine=machine,
        subjects=measured,
        ratios={"reward to align, segments a second": Spread.of(keeps_up)},
        goals=goals,
    )


def _run_on(
    settings: Settings, plan: RewardPlan, bootstrap: str, on_step: OnStep
) -> Mapping[str, Mapping[str, Sequence[float]]]:
    with run_folder(settings, Names.fresh("reward").prefix) as folder:
        own = settings_over(settings, bootstrap, folder)
        sections = {"data_dir", "kafka", "align", "worker", "reward"}
        write_settings(own.model_dump(include=sections), folder / "config.yaml")
        topics = Topics(own.kafka, bootstrap, plan.partitions)
        bench = _Bench(plan, own, bootstrap, topics, folder, on_step)
        try:
            return measure_in_turn({"ours": bench.measure}, plan.repetitions, on_step)
        finally:
            topics.delete_all()


__all__ = ["RewardPlan", "run"]
