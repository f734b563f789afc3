"""``clawstream bench align-state``: what the aligner's state takes, and a restart with it.

The worker is looked at from outside, empty, then with closed sessions that are within their
horizon, then with open ones beside them: resident memory, its changelog, all it wrote for a
byte that it read. Then it is killed and started again, and the time is taken until the
first segment that was not due before is visible; once as any worker is started, which waits
until the group gives the killed one up, and once under a fixed name
(``worker.group_instance_id``), which does not.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from processors.bench.cluster import (
    REPLAYED,
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
from streams.bench.report import Goal, Report
from streams.bench.turns import measure_in_turn
from streams.errors import SettingsError
from streams.kafka.clients import make_admin
from streams.process import READY
from streams.serde import build_codec
from streams.settings import AlignSettings, Settings

BEGIN_MS = 1_767_225_600_000
GOAL_S = 15.0
SPAN_SHARE = 0.2
PROBES = 6
READY_S = 600.0
APPLY_S = 3_600.0
COMPACT_S = 180.0
INSTANCE = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    """What is measured.

    Attributes:
        sessions: Open ones.
        closed: Closed ones within their horizon, beside them.
        turns: Of each session.
        content_bytes: Of each turn.
        horizon_ms: The aligner's; the user's setting if None.
        partitions: Of each topic.
        repetitions: How often all of it is done.
        compact: Whether to wait until Kafka has compacted the changelog.
        quiet_s: How long before memory is read.
    """

    sessions: int = 100_000
    closed: int = 100_000
    turns: int = 4
    content_bytes: int = 300
    horizon_ms: int | None = None
    partitions: int = 4
    repetitions: int = 1
    compact: bool = True
    quiet_s: float = 3.0


@dataclass(slots=True)
class _Scene:
    """One repetition."""

    plan: StatePlan
    settings: Settings
    own: Settings
    rig: Rig
    log: SimpleLog
    writer: LogWriter
    outputs: Outputs
    on_step: OnStep
    expected: int = 0

    def measure(self) -> dict[str, float]:
        """Fill the state, look at it, kill the worker and start it again."""
        plan = self.plan
        figures: dict[str, float] = {}
        with self._start("empty") as worker:
            figures["rss_empty_bytes"] = self._rss(worker)
            figures |= self._fill(worker, "closed", plan.closed)
            figures |= self._fill(worker, "open", plan.sessions)
            figures |= self._traffic()
            worker.kill()
            figures["restart_s"] = self._restart("restarted")
        with self._start("named", instance=INSTANCE) as worker:
            worker.kill()
            figures["restart_named_s"] = self._restart("restarted-named", instance=INSTANCE)
        if plan.compact:
            figures |= self._compacted()
        return figures

    def _fill(self, worker: Subject, kind: str, sessions: int) -> dict[str, float]:
        """Bring sessions into the state, in two halves.

        What a session takes is seen in the second: by then caches of fixed size are full.
        """
        half = sessions // 2
        closing = kind == "closed"
        cpu_s, before = worker.cpu_s(), self.writer.records
        self._apply(worker, f"{kind}, first half", range(half), closing=closing)
        first = self._rss(worker)
        self._apply(worker, f"{kind}, second half", range(half, sessions), closing=closing)
        second = self._rss(worker)
        records = self.writer.records - before
        return {
            f"rss_{kind}_bytes": second,
            f"rss_per_{kind}_session_bytes": (second - first) / max(1, sessions - half),
            f"cpu_us_per_record_{kind}": 1e6 * (worker.cpu_s() - cpu_s) / records,
        }

    # The log

    def _sessions(self, kind: str, numbers: range, *, closing: bool) -> Iterator[LogRecord]:
        """Sessions that all talk at the same time, a thousand of them if they end."""
        group = 1_000 if closing else max(1, len(numbers))
        for start in range(0, len(numbers), group):
            for turn in range(self.plan.turns):
                ends = closing and turn == self.plan.turns - 1
                for number in numbers[start : start + group]:
                    yield from self.log.turn(f"{kind}-{number:09d}", turn, ends=ends)

    def _apply(self, worker: Subject, name: str, numbers: range, *, closing: bool) -> None:
        """Write sessions and wait until they are applied.

        They are once a probe behind them is closed in each partition.
        """
        self.on_step(f"{name}: writing")
        for record in self._sessions(name.partition(",")[0], numbers, closing=closing):
            self.writer.write(record)
        for record in self.log.probes(f"probe {name}", self.own.align.settle_ms):
            self.writer.write(record)
        self.writer.flush()
        self.on_step(f"{name}: waiting until all {self.writer.records} records are applied")
        self.expected += self.plan.partitions + (len(numbers) if closing else 0)
        self.outputs.wait_for(self.expected, worker, APPLY_S)

    # Looking

    def _rss(self, worker: Subject) -> float:
        time.sleep(self.plan.quiet_s)
        return float(worker.rss_bytes())

    def _traffic(self) -> dict[str, float]:
        """What was written for each byte that was read, keys and values."""
        written, kept, entries = self._read_changelog()
        read = self.writer.bytes
        return {
            "state_bytes_per_input_byte": written / read,
            "segment_bytes_per_input_byte": self.outputs.bytes / read,
            "changelog_entries": entries,
            "changelog_live_bytes": kept,
            "changelog_disk_bytes": topic_bytes_on_disk(self.settings, self.rig.changelog),
        }

    def _read_changelog(self) -> tuple[int, int, int]:
        """All bytes in the changelog, those of the latest values, and how many there are."""
        written = 0
        latest: dict[bytes, int] = {}
        for key, size in self.rig.changelog_records():
            written += len(key) + max(0, size)
            if size < 0:
                latest.pop(key, None)
            else:
                latest[key] = len(key) + size
        return written, sum(latest.values()), len(latest)

    def _compacted(self) -> dict[str, float]:
        """The changelog's size on disk once Kafka has compacted it."""
        if self.settings.kafka.bootstrap_servers:
            return {"changelog_compacted_disk_bytes": math.nan}
        self.on_step("waiting until Kafka has compacted the changelog")
        _hurry_compaction(self.rig)
        with self._start("compacting") as worker:
            # Only a new record ends the segment that is not compacted yet.
            self._apply(worker, "compacting", range(0), closing=False)
            smallest = topic_bytes_on_disk(self.settings, self.rig.changelog)
            deadline = changed_s = time.monotonic()
            while time.monotonic() - deadline < COMPACT_S and time.monotonic() - changed_s < 45:
                size = topic_bytes_on_disk(self.settings, self.rig.changelog)
                if size < 0.99 * smallest:
                    smallest, changed_s = size, time.monotonic()
                time.sleep(1.0)
                worker.check_alive()
        return {"changelog_compacted_disk_bytes": smallest}

    # Processes

    def _start(self, name: str, instance: str | None = None) -> Subject:
        self.on_step(f"starting a worker ({name})")
        worker = self.rig.start(name, self._config(instance), replay=True)
        try:
            worker.wait_event(READY, READY_S)
        except BaseException:
            worker.kill()
            raise
        return worker

    def _config(self, instance: str | None) -> Path:
        path = self.rig.folder / f"{instance or 'config'}.yaml"
        if not path.exists():
            worker = {"group_instance_id": instance}
            own = settings_over(self.own, self.rig.bootstrap, self.rig.folder, worker=worker)
            write_config(own, path)
        return path

    def _restart(self, name: str, instance: str | None = None) -> float:
        """Seconds from starting a worker again to the first segment only it can have written."""
        for record in self.log.probes(f"probe {name}", self.own.align.settle_ms):
            self.writer.write(record)
        self.writer.flush()
        self.on_step(f"starting the killed worker again ({name})")
        began_ns = time.monotonic_ns()
        with self.rig.start(name, self._config(instance), replay=True) as worker:
            visible_ns = self.outputs.wait_for(self.expected + 1, worker, READY_S)
            self.expected += self.plan.partitions
            self.outputs.wait_for(self.expected, worker, READY_S)
        return (visible_ns - began_ns) / 1e9


def _hurry_compaction(rig: Rig) -> None:
    """Have Kafka compact the changelog soon, as it would in time."""
    wanted = {
        "segment.ms": "1000",
        "min.cleanable.dirty.ratio": "0.001",
        "max.compaction.lag.ms": "1000",
        "delete.retention.ms": "1000",
    }
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        for name, value in wanted.items()
    ]
    resource = ConfigResource(ResourceType.TOPIC, rig.changelog, incremental_configs=entries)
    client = make_admin(rig.kafka, rig.bootstrap)
    for future in client.incremental_alter_configs([resource]).values():
        future.result()


def _rules(plan: StatePlan) -> dict[str, int]:
    return {} if plan.horizon_ms is None else {"horizon_ms": plan.horizon_ms}


def run(settings: Settings, plan: StatePlan, on_step: OnStep) -> Report:
    """Measure the state.

    Raises:
        SettingsError: Sessions would not stay open for as long as it takes.
        BenchError: A worker ended, or took too long.
        BrokerError: Kafka cannot be reached or started.
    """
    machine = describe_machine()
    _check(settings.align)
    with bench_broker(settings, on_step) as bootstrap:
        measured = measure_in_turn(
            {"ours": lambda: _repetition(settings, plan, bootstrap, on_step)},
            plan.repetitions,
            on_step,
        )
    worst = max(measured["ours"]["restart_s"])
    goal = Goal(f"ours restart_s with {plan.sessions} open sessions", GOAL_S, worst, at_most=True)
    return Report(bench="align-state", machine=machine, subjects=measured, goals=[goal])


def _check(rules: AlignSettings) -> None:
    """See that open sessions stay open: time goes by for each probe's settling."""
    needed_ms = PROBES * (rules.settle_ms + 1_000) + SPAN_SHARE * rules.gap_ms
    if rules.gap_ms <= needed_ms:
        raise SettingsError(
            f"align.gap_ms must be above {needed_ms:.0f} for this bench, which lets "
            f"align.settle_ms go by {PROBES} times while sessions are open"
        )


def _repetition(
    settings: Settings, plan: StatePlan, bootstrap: str, on_step: OnStep
) -> Mapping[str, float]:
    names = Names.fresh("state")
    with run_folder(settings, names.prefix) as folder:
        own = settings_over(settings, bootstrap, folder, align=_rules(plan))
        topics = Topics(own.kafka, bootstrap, plan.partitions)
        rig = Rig(names, folder, own.kafka, bootstrap, topics, plan.partitions)
        try:
            rig.make_topics(inputs=REPLAYED)
            figures = _measure_on(settings, own, plan, rig, on_step)
        finally:
            topics.delete_all()
        if max(figures["restart_s"], figures["restart_named_s"]) > GOAL_S:
            kept = shutil.copytree(folder, folder.with_name(f"{folder.name}-slow"))
            on_step(f"a restart took long; the workers' logs are in {kept}")
        return figures


def _measure_on(
    settings: Settings, own: Settings, plan: StatePlan, rig: Rig, on_step: OnStep
) -> dict[str, float]:
    # All turns of open sessions come within a part of the gap.
    rate = plan.sessions * plan.turns * 1.5 / (SPAN_SHARE * own.align.gap_ms / 1000)
    shape = Shape(plan.turns, plan.content_bytes)
    log = SimpleLog(shape, plan.partitions, build_codec(), BEGIN_MS, max(1_000.0, rate))
    writer = LogWriter(rig.sides, own.kafka, rig.bootstrap)
    with Outputs(own.kafka, rig.bootstrap, rig.segments, plan.partitions, keep=False) as outputs:
        return _Scene(plan, settings, own, rig, log, writer, outputs, on_step).measure()


__all__ = ["StatePlan", "run"]
