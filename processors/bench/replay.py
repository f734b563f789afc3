"""``clawstream bench replay``: how long a shadow replay takes, from topics and from an archive.

A finished log of dialogue is in its topics, and in an archive made of them. Each subject is a
process that replays all of it as ``clawstream replay --execute`` does, as many partitions at a time
as there are processors; only the comparison with live outputs is left out. ``seconds`` counts from
when the first of its processes can begin to read, ``start_s`` is the time before that. What 10
million turns would take is extrapolated from ``seconds``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from processors.bench.cluster import (
    Names,
    OnStep,
    Topics,
    bench_broker,
    run_folder,
    settings_over,
    write_config,
)
from processors.bench.process import BenchError, Subject
from processors.bench.replayed import ReplayedLog, start_shadow
from processors.bench.subjects.shadow import BEGUN, DONE, REACHED
from processors.replay.shadow import Job, store_path
from processors.replay.store import PartitionStore
from streams.archive.store import LocalStore
from streams.archive.writing import Archiver, Rolling
from streams.bench.machine import describe_machine
from streams.bench.report import Goal, Metrics, Report
from streams.bench.turns import measure_in_turn
from streams.contracts import DialogueTurn, FeedbackEvent, TrajectorySegment
from streams.kafka.clients import make_producer, partition_for
from streams.kafka.places import Range
from streams.serde import build_codec, load_schemas
from streams.settings import Settings
from streams.topics import SEGMENTS

TOPICS, ARCHIVE, REWARD = "topics", "archive", "reward"
SUBJECTS = (TOPICS, ARCHIVE, REWARD)
MINUTES = "minutes_for_10m_turns"
GOAL_MINUTES = 10.0
MANY_TURNS = 10_000_000
TURNS_SHARE = 0.86
"""Of the records of the bench's dialogue, about."""

LIMIT_S = 1_800.0
FLUSH_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """What is measured.

    Attributes:
        turns: Turns in the log, about; there is feedback beside them.
        repetitions: How often each subject is measured.
        partitions: Of each topic; each is a process of the replay.
        profile: Whether to look, once more, where the time of one partition goes.
    """

    turns: int = 200_000
    repetitions: int = 3
    partitions: int = 2
    profile: bool = False


@dataclass(frozen=True, slots=True)
class _Bench:
    """One run: the log is in its topics.

    Attributes:
        log: The log.
        folder: For the files of each measurement.
        config: The settings of the replays.
    """

    log: ReplayedLog
    folder: Path
    config: Path

    def measure(self, name: str, job: Job) -> dict[str, float]:
        """Measure a replay once.

        Raises:
            BenchError: It ended, took too long, or made nothing.
        """
        folder = self.folder / Names.fresh(name).prefix
        with start_shadow(job, folder, self.config) as process:
            figures = self._figures(process)
        shutil.rmtree(folder)
        return figures

    def _figures(self, process: Subject) -> dict[str, float]:
        done = process.wait_event(DONE, LIMIT_S)
        if not done["outputs"]:
            raise process.failure("made no output")
        begun, ready = (process.wait_event(name, LIMIT_S)["at_ms"] for name in (BEGUN, REACHED))
        seconds = (done["at_ms"] - ready) / 1000
        turns_per_s = self.log.turns / seconds
        return {
            "turns_per_s": turns_per_s,
            "records_per_s": done["records"] / seconds,
            "outputs": done["outputs"],
            "seconds": seconds,
            "start_s": (ready - begun) / 1000,
            "cpu_s": done["cpu_s"],
            MINUTES: MANY_TURNS / turns_per_s / 60,
        }

    def profile(self, name: str, job: Job, path: Path) -> None:
        """Look where the time of a replay goes.

        Raises:
            BenchError: It ended, took too long, or made nothing.
        """
        folder = self.folder / Names.fresh(name).prefix
        with start_shadow(job, folder, self.config, profile=path) as process:
            done = process.wait_event(DONE, LIMIT_S)
            if not done["outputs"] or process.process.wait(FLUSH_S) != 0:
                raise process.failure("made no output")
        shutil.rmtree(folder)

    def segments(self) -> list[tuple[TrajectorySegment, bytes]]:
        """What the aligner makes of the log, in the order in which it closed."""
        folder = self.folder / "segments"
        with start_shadow(self.log.job(), folder, self.config, keep=True) as process:
            process.wait_event(DONE, LIMIT_S)
            if process.process.wait(FLUSH_S) != 0:
                raise process.failure("did not end well")
        codec = build_codec()
        made: list[tuple[TrajectorySegment, bytes]] = []
        for partition in {item.partition for item in self.log.ranges}:
            store = PartitionStore(store_path(folder / "pass-0", partition))
            made += [(codec.decode(value, TrajectorySegment), value) for _, value in store.made()]
            store.close()
        shutil.rmtree(folder)
        return sorted(made, key=_closing_order)


def _closing_order(made: tuple[TrajectorySegment, bytes]) -> tuple[int, str, int]:
    segment, _ = made
    return segment.closed_at, segment.segment_id, segment.revision


def run(settings: Settings, plan: ReplayPlan, on_step: OnStep) -> tuple[Report, Mapping[str, Path]]:
    """Measure everything.

    Returns:
        What was measured, and the profile of each subject if they were wanted
        (:func:`processors.bench.profile.read_stacks` reads them).

    Raises:
        BenchError: A replay ended, or made nothing.
        ArchiveError: The archive cannot be made.
        BrokerError: Kafka cannot be reached or started.
    """
    machine = describe_machine()
    with bench_broker(settings, on_step) as bootstrap:
        measured, profiles = _run_on(settings, plan, bootstrap, on_step)
    report = Report(bench="replay", machine=machine, subjects=measured, goals=_goals(measured))
    return report, profiles


def _run_on(
    settings: Settings, plan: ReplayPlan, bootstrap: str, on_step: OnStep
) -> tuple[Mapping[str, Metrics], Mapping[str, Path]]:
    with run_folder(settings, Names.fresh("replay").prefix) as folder:
        own = settings_over(settings, bootstrap, folder)
        config = folder / "config.yaml"
        write_config(own, config)
        topics = Topics(own.kafka, bootstrap, plan.partitions)
        try:
            on_step(f"making about {plan.turns} turns with their feedback")
            records = round(plan.turns / TURNS_SHARE)
            log = ReplayedLog.make(own, topics, bootstrap, records, plan.partitions)
            bench = _Bench(log, folder, config)
            on_step(f"the log: {log.records} records, {log.turns} of them turns; archiving it")
            archive = _archive(own, log, folder)
            on_step("making its segments, for the reward stage")
            scored = _scoring(own, topics, bootstrap, plan.partitions, bench.segments())
            jobs = {TOPICS: log.job(), ARCHIVE: log.job(archive), REWARD: scored}
            subjects: dict[str, Callable[[], Mapping[str, float]]] = {
                name: partial(bench.measure, name, job) for name, job in jobs.items()
            }
            measured = measure_in_turn(subjects, plan.repetitions, on_step)
            return measured, _profiles(bench, plan, jobs, on_step)
        finally:
            topics.delete_all()


def _profiles(
    bench: _Bench, plan: ReplayPlan, jobs: Mapping[str, Job], on_step: OnStep
) -> Mapping[str, Path]:
    if not plan.profile:
        return {}
    on_step("once more, to see where the time of one partition goes")
    paths = {name: bench.folder.parent / f"replay-{name}.profile" for name in jobs}
    for name, job in jobs.items():
        bench.profile(name, job, paths[name])
    return paths


def _archive(settings: Settings, log: ReplayedLog, folder: Path) -> str:
    """The log as an archiver leaves it; its address."""
    store = LocalStore(folder / "archive")
    rules = settings.archive
    Archiver(
        settings,
        store,
        build_codec(),
        load_schemas(),
        Rolling(size_bytes=rules.roll_bytes, age_s=rules.roll_ms / 1000),
        types={log.sides["turns"]: DialogueTurn, log.sides["feedback"]: FeedbackEvent},
    ).run(once=True)
    return store.address


def _scoring(
    settings: Settings,
    topics: Topics,
    bootstrap: str,
    partitions: int,
    segments: Sequence[tuple[TrajectorySegment, bytes]],
) -> Job:
    """Put segments into a topic; the replay of the reward stage over it."""
    topic = Names.fresh("replayed").of("segments")
    topics.make({SEGMENTS: topic})
    producer = make_producer(settings.kafka, bootstrap, overrides={"linger.ms": 20})
    ends = dict.fromkeys(range(partitions), 0)
    for segment, value in segments:
        key = (segment.user_id or segment.session_id).encode()
        partition = partition_for(key, partitions)
        ends[partition] += 1
        producer.produce(topic, key=key, value=value, partition=partition)
        producer.poll(0)
    if producer.flush(FLUSH_S):
        raise BenchError("Kafka did not take the bench's segments")
    return Job(
        stage="reward",
        ranges=tuple(Range(topic, partition, 0, end) for partition, end in ends.items()),
        read_from_ms=0,
        compare_from_ms=0,
        inputs=(topic,),
        output=f"{topic}-scored",
    )


def _goals(measured: Mapping[str, Metrics]) -> list[Goal]:
    worst = {name: max(found[MINUTES]) for name, found in measured.items()}
    named = {
        "minutes for 10 million turns, aligner (extrapolated)": worst[TOPICS],
        "minutes for 10 million turns, aligner and reward (extrapolated)": worst[TOPICS]
        + worst[REWARD],
    }
    return [Goal(name, GOAL_MINUTES, value, at_most=True) for name, value in named.items()]


__all__ = ["SUBJECTS", "ReplayPlan", "run"]
