"""``clawstream bench align-state --soak``: whether memory and disk stay flat for long.

Sessions come, talk, close and leave the state past their horizon, which is short here: the
log's own clock goes many times faster than ours, so that ten million events see some fifty
horizons go by. Every so many events the worker's memory and the changelog's size on disk are
noted. Flat is what grows by no more than a given share over the second half of the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from processors.bench.align_state import BEGIN_MS, READY_S
from processors.bench.cluster import (
    LogWriter,
    Names,
    OnStep,
    Topics,
    bench_broker,
    run_folder,
    settings_over,
    topic_bytes_on_disk,
    write_config,
)
from processors.bench.log import LogRecord
from processors.bench.process import Outputs, Subject
from processors.bench.rig import Rig
from processors.bench.simple_log import Shape, SimpleLog
from streams.bench.machine import describe_machine
from streams.bench.report import Goal, Report, growth
from streams.process import READY
from streams.serde import build_codec
from streams.settings import Settings

RULES = {
    "settle_ms": 10_000,
    "gap_ms": 30_000,
    "max_open_ms": 120_000,
    "orphan_wait_ms": 60_000,
    "attribution_window_ms": 60_000,
    "horizon_ms": 180_000,
}
MEMORY_GROWTH = 0.05
DISK_GROWTH = 0.25
AHEAD_SESSIONS = 15_000
"""How many sessions may be written and not closed yet: they hold the writer back."""

STALL_S = 300.0
_INPUTS = {
    "timestamp_type": "CreateTime",
    "retention_ms": -1,
    "extra": {"retention.bytes": str(256 * 2**20), "segment.bytes": str(32 * 2**20)},
}
# Kafka keeps what says that a key is gone for a day of its own clock. On the log's clock, which
# goes many times faster, that would be months.
_CHANGELOG = {"extra": {"delete.retention.ms": "60000"}}
_SEGMENTS = {
    "extra": {"retention.bytes": str(64 * 2**20), "segment.bytes": str(32 * 2**20)},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakPlan:
    """What is run.

    Attributes:
        events: Turns and feedback.
        samples: How often memory and disk are noted.
        talking: Sessions that talk at any time.
        turns: Of each session.
        records_per_s: Of the log's own clock.
        partitions: Of each topic.
    """

    events: int = 10_000_000
    samples: int = 100
    talking: int = 2_000
    turns: int = 6
    records_per_s: float = 1_000.0
    partitions: int = 4


def rolling(log: SimpleLog, talking: int, turns: int) -> Iterator[LogRecord]:
    """Endless sessions, so many of them at a time; when one ends another takes its place.

    The first ones are shorter, each by another number of exchanges, so that ends are spread.
    """
    places = [(place, 0, turns - 2 * (place % (turns // 2))) for place in range(talking)]
    begun = talking
    while True:
        for place, (session, number, length) in enumerate(places):
            ends = number == length - 1
            yield from log.turn(f"soak-{session:012d}", number, ends=ends)
            if ends:
                places[place] = (begun, 0, turns)
                begun += 1
            else:
                places[place] = (session, number + 1, length)


def run(settings: Settings, plan: SoakPlan, on_step: OnStep) -> Report:
    """Run the soak; its samples are the values of the report's metrics.

    Raises:
        BenchError: The worker ended, or stood still.
        BrokerError: Kafka cannot be reached or started.
    """
    machine = describe_machine()
    with bench_broker(settings, on_step) as bootstrap:
        samples = _soak(settings, plan, bootstrap, on_step)
    goals = [
        Goal("growth of memory", MEMORY_GROWTH, growth(samples["rss_bytes"]), at_most=True),
    ]
    if not settings.kafka.bootstrap_servers:
        grown = growth(samples["changelog_disk_bytes"])
        goals.append(Goal("growth of the changelog", DISK_GROWTH, grown, at_most=True))
    return Report(bench="align-soak", machine=machine, subjects={"ours": samples}, goals=goals)


def _soak(
    settings: Settings, plan: SoakPlan, bootstrap: str, on_step: OnStep
) -> dict[str, list[float]]:
    names = Names.fresh("soak")
    with run_folder(settings, names.prefix) as folder:
        config = folder / "config.yaml"
        own = settings_over(settings, bootstrap, folder, align=RULES)
        write_config(own, config)
        topics = Topics(own.kafka, bootstrap, plan.partitions)
        rig = Rig(names, folder, own.kafka, bootstrap, topics, plan.partitions)
        try:
            rig.make_topics(inputs=_INPUTS, segments=_SEGMENTS, changelog=_CHANGELOG)
            with (
                rig.start("worker", config, replay=True) as worker,
                Outputs(own.kafka, bootstrap, rig.segments, plan.partitions, keep=False) as outputs,
            ):
                worker.wait_event(READY, READY_S)
                return _run(settings, plan, rig, worker, outputs, on_step)
        finally:
            topics.delete_all()


def _run(
    settings: Settings,
    plan: SoakPlan,
    rig: Rig,
    worker: Subject,
    outputs: Outputs,
    on_step: OnStep,
) -> dict[str, list[float]]:
    log = SimpleLog(Shape(plan.turns), plan.partitions, build_codec(), BEGIN_MS, plan.records_per_s)
    writer = LogWriter(rig.sides, rig.kafka, rig.bootstrap)
    records = rolling(log, plan.talking, plan.turns)
    per_session = plan.turns + plan.turns / 2 / Shape(plan.turns).feedback_every
    every = max(1, plan.events // plan.samples)
    samples: dict[str, list[float]] = {}
    for _ in range(plan.samples):
        began_s, cpu_s = time.monotonic(), worker.cpu_s()
        for record in islice(records, every):
            writer.write(record)
            if writer.records % 1_000 == 0:
                _hold_back(writer.records / per_session, worker, outputs)
        writer.flush()
        sample = {
            "events": float(writer.records),
            "records_per_s": every / (time.monotonic() - began_s),
            "cpu_us_per_record": 1e6 * (worker.cpu_s() - cpu_s) / every,
            "rss_bytes": float(worker.rss_bytes()),
            "changelog_disk_bytes": topic_bytes_on_disk(settings, rig.changelog),
            "segments": float(outputs.count),
        }
        for metric, value in sample.items():
            samples.setdefault(metric, []).append(value)
        on_step(_line(sample))
    return samples


def _hold_back(sessions: float, worker: Subject, outputs: Outputs) -> None:
    """Wait while the worker is too far behind.

    Raises:
        BenchError: It ended, or closes nothing any more.
    """
    moved_s, seen = time.monotonic(), outputs.count
    outputs.read(0)
    while sessions - outputs.count > AHEAD_SESSIONS:
        outputs.read(0.1)
        worker.check_alive()
        if outputs.count > seen:
            moved_s, seen = time.monotonic(), outputs.count
        elif time.monotonic() - moved_s > STALL_S:
            raise worker.failure(f"closed nothing for {STALL_S:g} s")


def _line(sample: dict[str, float]) -> str:
    return (
        f"{sample['events']:>12,.0f} events  {sample['records_per_s']:>8,.0f}/s  "
        f"memory {sample['rss_bytes'] / 2**20:>7,.0f} MiB  "
        f"changelog {sample['changelog_disk_bytes'] / 2**20:>7,.0f} MiB"
    )


__all__ = ["SoakPlan", "rolling", "run"]
