"""``clawstream bench closing-delay``: from the moment a segment is due until readers have it.

Users converse at a steady rate, and the aligner's worker runs as users run it. A segment says
when it was due (``closed_at``, on the broker's clock). *Appended* is when the broker took it
(the bench's topic of segments is LogAppendTime), *visible* when a ``read_committed`` reader
had it, by the clock of this machine: with a broker elsewhere the clocks must agree.

With a replay beside it, the same is measured twice in turn: alone, and while a shadow replay of a
finished log runs on the same machine and broker at the rate that it is held to.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from confluent_kafka import Consumer, TopicPartition

from processors.bench.cluster import (
    Names,
    OnStep,
    Topics,
    bench_broker,
    run_folder,
    settings_over,
    write_config,
)
from processors.bench.dialogue import DialoguePlan, talking_for
from processors.bench.process import BenchError, Subject
from processors.bench.replayed import ReplayedLog, start_shadow
from processors.bench.rig import Rig
from processors.bench.subjects.load import BEGUN, DONE, LoadJob
from processors.bench.subjects.shadow import REACHED
from streams.bench.machine import describe_machine
from streams.bench.report import Goal, Report, percentile, ratios_to
from streams.bench.turns import measure_in_turn
from streams.contracts import TrajectorySegment
from streams.kafka.clients import make_consumer
from streams.process import READY
from streams.serde import build_codec
from streams.settings import Settings

GOAL_MS = 500.0
GOAL = "visible_ms_p99"
SHARES = (("p50", 0.50), ("p95", 0.95), ("p99", 0.99), ("max", 1.0))
READY_S = 120.0
OURS, ALONE, BESIDE = "ours", "alone", "beside_replay"


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayPlan:
    """What is measured.

    Attributes:
        turns_per_s: The rate.
        seconds: How long delays are measured, after the warm-up.
        warm_up_s: Until the rate is steady and segments of all kinds close.
        settle_ms: The aligner's; short, so that a minute sees many closings.
        gap_ms: The aligner's, likewise.
        repetitions: How often.
        partitions: Of each topic.
        tail_s: How long after the end what was due before it may take.
        latest_ms: A load that fell behind its own schedule by more was no steady one.
        beside_replay_per_s: If there is one, delays are measured beside a replay of so many
            records a second, too.
        replayed_records: How many the replayed log has; it is replayed again and again.
    """

    turns_per_s: float = 1_000.0
    seconds: float = 60.0
    warm_up_s: float = 40.0
    settle_ms: int = 5_000
    gap_ms: int = 20_000
    repetitions: int = 1
    partitions: int = 4
    tail_s: float = 10.0
    latest_ms: int = 250
    beside_replay_per_s: float | None = None
    replayed_records: int = 200_000


@dataclass(frozen=True, slots=True)
class _Seen:
    """One segment as it became visible."""

    appended_ms: int
    visible_ms: int
    value: bytes


class _Reader:
    """Notes in a thread when each segment became visible."""

    def __init__(self, consumer: Consumer, topic: str, partitions: int) -> None:
        self._consumer = consumer
        self._consumer.assign([TopicPartition(topic, p, 0) for p in range(partitions)])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)
        self.seen: list[_Seen] = []

    def __enter__(self) -> _Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._consumer.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            messages = self._consumer.consume(500, 0.005)
            now_ms = time.time_ns() // 1_000_000
            for message in messages:
                value = message.value()
                if message.error() is None and value is not None:
                    self.seen.append(_Seen(message.timestamp()[1], now_ms, value))


@dataclass(frozen=True, slots=True)
class _Bench:
    """One run, over one broker."""

    plan: DelayPlan
    settings: Settings
    bootstrap: str
    topics: Topics
    folder: Path

    def measure(self, replayed: ReplayedLog | None = None) -> dict[str, float]:
        """One repetition, with topics and a worker of its own.

        Args:
            replayed: What is replayed meanwhile.
        """
        names = Names.fresh("delay")
        folder = self.folder / names.prefix
        folder.mkdir()
        plan, kafka = self.plan, self.settings.kafka
        rig = Rig(names, folder, kafka, self.bootstrap, self.topics, plan.partitions)
        rig.make_topics(segments={"timestamp_type": "LogAppendTime"})
        consumer = make_consumer(
            kafka, self.bootstrap, group=names.of("reader"), overrides={"fetch.wait.max.ms": 10}
        )
        config = self.folder / "config.yaml"
        with ExitStack() as stack:
            worker = stack.enter_context(rig.start("worker", config, replay=False))
            reader = stack.enter_context(_Reader(consumer, rig.segments, plan.partitions))
            worker.wait_event(READY, READY_S)
            replay = None
            if replayed is not None:
                rate = plan.beside_replay_per_s
                job, place = replayed.job(), folder / "replay"
                replay = stack.enter_context(
                    start_shadow(job, place, config, rate_per_s=rate, again=True)
                )
                replay.wait_event(REACHED, READY_S)
            return self._under_load(rig, worker, reader, replay)

    def _under_load(
        self, rig: Rig, worker: Subject, reader: _Reader, replay: Subject | None
    ) -> dict[str, float]:
        plan = self.plan
        with self._load(rig) as load:
            limit_s = 10 * (plan.seconds + plan.warm_up_s) + READY_S
            begun = load.wait_event(BEGUN, limit_s)
            _sleep_until(begun["begin_ms"] + plan.warm_up_s * 1000)
            cpu_before_s = worker.cpu_s()
            done = load.wait_event(DONE, limit_s)
            cpu_s = worker.cpu_s() - cpu_before_s
        worker.check_alive()
        replay_figures: dict[str, float] = {}
        if replay is not None:
            replay.check_alive()
            replay_figures = _replay_rate(replay, plan.seconds)
        if done["unsent"] or done["late_ms"] > plan.latest_ms:
            raise BenchError(
                f"the load could not keep its rate (up to {done['late_ms']} ms late, "
                f"{done['unsent']} not sent): this machine is too busy, lower --rate"
            )
        # What was due at the very end is on its way, the slowest of it too.
        time.sleep(plan.tail_s)
        from_ms = begun["begin_ms"] + plan.warm_up_s * 1000
        written = sum(len(key) + max(0, size) for key, size in rig.changelog_records())
        return {
            **_delays(reader.seen, from_ms, done["end_ms"]),
            "turns_per_s": begun["steady_turns"] / plan.seconds,
            "worker_cpu_share": cpu_s / plan.seconds,
            "state_bytes_per_input_byte": written / begun["bytes"],
            **replay_figures,
        }

    def _load(self, rig: Rig) -> Subject:
        plan = self.plan
        pause_ms = plan.gap_ms + 5_000
        think_ms = DialoguePlan(talking=1, begin_ms=0).think_ms
        job = LoadJob(
            config=str(self.folder / "config.yaml"),
            bootstrap_servers=self.bootstrap,
            turns=rig.sides["turns"],
            feedback=rig.sides["feedback"],
            talking=talking_for(plan.turns_per_s, think_ms, pause_ms),
            pause_ms=pause_ms,
            # About the time of one exchange: so the rate is steady from then on.
            ramp_ms=think_ms,
            seconds=plan.seconds + plan.warm_up_s,
            warm_up_s=plan.warm_up_s,
            seed=1,
        )
        folder = rig.folder / "load"
        folder.mkdir()
        (folder / "job.json").write_bytes(msgspec.json.encode(job))
        return Subject("processors.bench.subjects.load", [str(folder / "job.json")], folder)


def _sleep_until(wall_ms: float) -> None:
    time.sleep(max(0.0, wall_ms / 1000 - time.time()))


def _replay_rate(replay: Subject, seconds: float) -> dict[str, float]:
    """What the replay did within the last so many seconds.

    Raises:
        BenchError: It did nothing.
    """
    lines = replay.marks.read_text(encoding="utf-8").splitlines()
    marks = [json.loads(line) for line in lines if line.endswith("}") and REACHED in line]
    last = marks[-1]
    within = [mark for mark in marks if mark["at_ms"] >= last["at_ms"] - 1000 * seconds]
    took_ms = last["at_ms"] - within[0]["at_ms"]
    if not took_ms:
        raise BenchError("the replay stood still while it was measured")
    return {"replay_records_per_s": 1000 * (last["records"] - within[0]["records"]) / took_ms}


def _delays(seen: Sequence[_Seen], from_ms: float, to_ms: float) -> dict[str, float]:
    """The percentiles of the segments that were due in a time.

    Raises:
        BenchError: None was.
    """
    codec = build_codec()
    visible: list[float] = []
    appended: list[float] = []
    revisions = 0
    for item in list(seen):
        segment = codec.decode(item.value, TrajectorySegment)
        if from_ms <= segment.closed_at < to_ms:
            visible.append(item.visible_ms - segment.closed_at)
            appended.append(item.appended_ms - segment.closed_at)
            revisions += segment.revision > 0
    if not visible:
        raise BenchError("no segment was due in the time measured; make it longer")
    figures = {f"visible_ms_{name}": percentile(visible, share) for name, share in SHARES}
    figures |= {f"appended_ms_{name}": percentile(appended, share) for name, share in SHARES}
    return figures | {"segments": len(visible) - revisions, "revisions": revisions}


def run(settings: Settings, plan: DelayPlan, on_step: OnStep) -> Report:
    """Measure the delays.

    Raises:
        BenchError: The worker ended, or the load could not keep its rate.
        BrokerError: Kafka cannot be reached or started.
    """
    machine = describe_machine()
    with bench_broker(settings, on_step) as bootstrap:
        measured = _run_on(settings, plan, bootstrap, on_step)
    goals = [
        Goal(f"{name} {GOAL}", GOAL_MS, max(found[GOAL]), at_most=True)
        for name, found in measured.items()
    ]
    ratios = ratios_to(measured, BESIDE, GOAL, [ALONE])
    return Report(
        bench="closing-delay", machine=machine, subjects=measured, ratios=ratios, goals=goals
    )


def _run_on(
    settings: Settings, plan: DelayPlan, bootstrap: str, on_step: OnStep
) -> Mapping[str, Mapping[str, Sequence[float]]]:
    with run_folder(settings, Names.fresh("delay").prefix) as folder:
        rules = {"settle_ms": plan.settle_ms, "gap_ms": plan.gap_ms}
        own = settings_over(settings, bootstrap, folder, align=rules)
        write_config(own, folder / "config.yaml")
        topics = Topics(own.kafka, bootstrap, plan.partitions)
        bench = _Bench(plan, own, bootstrap, topics, folder)
        try:
            subjects = _subjects(bench, on_step)
            on_step(f"{plan.turns_per_s:g} turns a second for {plan.seconds + plan.warm_up_s:g} s")
            return measure_in_turn(subjects, plan.repetitions, on_step)
        finally:
            topics.delete_all()


def _subjects(bench: _Bench, on_step: OnStep) -> Mapping[str, Callable[[], Mapping[str, float]]]:
    plan = bench.plan
    if plan.beside_replay_per_s is None:
        return {OURS: bench.measure}
    on_step(f"making {plan.replayed_records} records to replay")
    log = ReplayedLog.make(
        bench.settings, bench.topics, bench.bootstrap, plan.replayed_records, plan.partitions
    )
    return {ALONE: bench.measure, BESIDE: partial(bench.measure, log)}


__all__ = ["DelayPlan", "run"]
