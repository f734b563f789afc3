"""``clawstream bench align``: the same job in several frameworks, over the same log.

Each subject reads turns and feedback from the beginning, keeps the sessions, and writes the
segments that close. ``records_per_s`` counts the records of both topics, from the first one
handed to the subject's code until the last expected segment is visible to a ``read_committed``
reader; ``cpu_s`` is what the subject's own processes used meanwhile, user and system. The
segments of every subject are compared, byte for byte and as a multiset, with those of one
pass over the log without any framework.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from processors.bench.cluster import (
    REPLAYED,
    Names,
    OnStep,
    Topics,
    bench_broker,
    bench_dir,
    produce,
    run_folder,
    settings_over,
    write_config,
)
from processors.bench.dialogue import DialoguePlan
from processors.bench.log import LogRecord, Side, make_log
from processors.bench.plain import expected_outputs, run_in_batches
from processors.bench.process import BenchError, Outputs, Subject
from processors.bench.profile import Profile
from processors.bench.quix_env import quix_environment
from processors.bench.subjects.aligners import GC_THRESHOLDS
from processors.bench.subjects.job import FIRST, LAST, Job, Mark, read_marks, write_job
from streams.bench.machine import describe_machine
from streams.bench.report import Goal, Metrics, Report, ratios_to
from streams.bench.turns import measure_in_turn
from streams.errors import SettingsError
from streams.serde import build_codec
from streams.settings import Settings
from streams.topics import ALIGN_STATE, DEAD_LETTERS, FEEDBACK, SEGMENTS, TURNS

OURS = "ours"
BARE = "bare_decode"
QUIX = ("quix_rocksdb", "quix_dict")
SUBJECTS: tuple[str, ...] = (OURS, "faust_stock", "faust_take", *QUIX, BARE)
SPEED = "records_per_s"
GOALS: Mapping[str, Sequence[tuple[str, float]]] = {
    "faust_stock": (("", 10.0), (" (floor)", 5.0)),
    "quix_rocksdb": (("", 2.0),),
    "quix_dict": (("", 1.3),),
    BARE: (("", 0.25),),
}
"""What ``ours`` is to reach, in times of each other subject, on two processors."""

BEGIN_MS = 1_767_225_600_000
"""When the log's dialogue begins: the same moment in each run, so the same bytes."""

RECORDS_PER_CONVERSATION = 120
LIMIT_S = 900.0
START_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignPlan:
    """What is measured.

    Attributes:
        subjects: Of ``SUBJECTS``, in the order of their turns.
        records: Turns and feedback in the log, about.
        repetitions: How often each subject is measured.
        talking: Conversations that go on at any time; by the number of records if None.
        partitions: Of each topic.
        profile: Whether to look, once more, where ``ours`` spends its time.
    """

    subjects: Sequence[str] = SUBJECTS
    records: int = 120_000
    repetitions: int = 3
    talking: int | None = None
    partitions: int = 4
    profile: bool = False

    @property
    def dialogue(self) -> DialoguePlan:
        """The dialogue of the log: long enough that most segments close within it."""
        most = max(1, self.records // RECORDS_PER_CONVERSATION)
        return DialoguePlan(talking=self.talking or min(500, most), begin_ms=BEGIN_MS)


@dataclass(frozen=True, slots=True)
class _Bench:
    """One run: the log is in its topics, what must come of it is known."""

    plan: AlignPlan
    settings: Settings
    bootstrap: str
    sides: Mapping[Side, str]
    topics: Topics
    folder: Path
    records: int
    expected: Counter[bytes]

    def measure(self, subject: str, *, profile: Path | None = None) -> dict[str, float]:
        """Measure one subject once.

        Raises:
            BenchError: It ended, took too long, or its outputs are not the expected ones.
        """
        name = Names.fresh(subject.replace("_", "-")).prefix
        job = self._job(name, profile)
        outputs = {SEGMENTS: job.segments, DEAD_LETTERS: job.dead_letters}
        self.topics.make({**outputs, ALIGN_STATE: job.changelog})
        folder = Path(job.folder)
        folder.mkdir(parents=True)
        write_job(job, folder / "job.json")
        with self._start(subject, folder) as process:
            wait = self._wait_bare if subject == BARE else partial(self._wait_outputs, job)
            figures = wait(process)
        shutil.rmtree(folder)
        return figures

    def _job(self, name: str, profile: Path | None) -> Job:
        return Job(
            name=name,
            config=str(self.folder / "config.yaml"),
            bootstrap_servers=self.bootstrap,
            turns=self.sides["turns"],
            feedback=self.sides["feedback"],
            segments=f"{name}.segments",
            dead_letters=f"{name}.dead_letters",
            changelog=f"{name}.state",
            partitions=self.plan.partitions,
            records=self.records,
            folder=str(self.folder / name),
            profile=None if profile is None else str(profile),
        )

    def _start(self, subject: str, folder: Path) -> Subject:
        arguments = [str(folder / "job.json")]
        if subject not in QUIX:
            return Subject(f"processors.bench.subjects.{subject}", arguments, folder)
        environment = quix_environment(self.folder.parent)
        return Subject(
            "processors.bench.subjects.quix",
            [*arguments, subject],
            folder,
            python=environment.python,
            environ=environment.environ,
        )

    def _wait_outputs(self, job: Job, process: Subject) -> dict[str, float]:
        kafka = self.settings.kafka
        partitions = self.plan.partitions
        with Outputs(kafka, self.bootstrap, job.segments, partitions) as outputs:
            end_ns = outputs.wait_for(self.expected.total(), process, LIMIT_S)
            end = Mark(LAST, end_ns, process.cpu_s())
            found = outputs.multiset()
        if found != self.expected:
            missing, extra = self.expected - found, found - self.expected
            raise process.failure(
                f"wrote other segments than expected: {missing.total()} are missing, "
                f"{extra.total()} are not expected"
            )
        return self._figures(read_marks(process.marks)[FIRST], end)

    def _wait_bare(self, process: Subject) -> dict[str, float]:
        deadline = time.monotonic() + LIMIT_S
        while LAST not in (marks := read_marks(process.marks)):
            process.check_alive()
            if time.monotonic() > deadline:
                raise process.failure(f"took more than {LIMIT_S:g} s")
            time.sleep(0.05)
        return self._figures(marks[FIRST], marks[LAST])

    def _figures(self, first: Mark, last: Mark) -> dict[str, float]:
        seconds = (last.at_ns - first.at_ns) / 1e9
        return {SPEED: self.records / seconds, "cpu_s": last.cpu_s - first.cpu_s}


@dataclass(frozen=True, slots=True)
class Profiles:
    """Where the time goes; :func:`processors.bench.profile.read_stacks` reads both files.

    Attributes:
        worker: Of ``ours``, main thread and others.
        plain: Of one pass over the log without a framework: what the aligner itself takes.
    """

    worker: Path
    plain: Path


def run(settings: Settings, plan: AlignPlan, on_step: OnStep) -> tuple[Report, Profiles | None]:
    """Measure everything.

    Returns:
        The report, and where the time goes if that was wanted.

    Raises:
        SettingsError: Kafka wants more than a plain connection.
        BenchError: A subject's outputs are wrong, or it cannot be run.
        BrokerError: Kafka cannot be reached or started.
    """
    if settings.kafka.security_protocol != "PLAINTEXT":
        raise SettingsError(
            "bench align needs a plain connection to Kafka: leave kafka.bootstrap_servers unset, "
            "and it starts a node of its own"
        )
    machine = describe_machine()
    if any(name in QUIX for name in plan.subjects):
        quix_environment(bench_dir(settings)).prepare(on_step)
    with bench_broker(settings, on_step) as bootstrap:
        return _run_on(settings, plan, bootstrap, machine, on_step)


def _run_on(
    settings: Settings,
    plan: AlignPlan,
    bootstrap: str,
    machine: Mapping[str, object],
    on_step: OnStep,
) -> tuple[Report, Profiles | None]:
    names = Names.fresh("align")
    with run_folder(settings, names.prefix) as folder:
        own = settings_over(settings, bootstrap, folder)
        write_config(own, folder / "config.yaml")
        topics = Topics(own.kafka, bootstrap, plan.partitions)
        try:
            bench, log = _prepare(own, plan, bootstrap, names, topics, folder, on_step)
            measures: dict[str, Callable[[], Mapping[str, float]]] = {
                subject: partial(bench.measure, subject) for subject in plan.subjects
            }
            measured = measure_in_turn(measures, plan.repetitions, on_step)
            return _report(machine, measured), _profile(bench, log, on_step)
        finally:
            topics.delete_all()


def _prepare(
    settings: Settings,
    plan: AlignPlan,
    bootstrap: str,
    names: Names,
    topics: Topics,
    folder: Path,
    on_step: OnStep,
) -> tuple[_Bench, Sequence[LogRecord]]:
    on_step(f"making {plan.records} records of dialogue and what must come of them")
    codec = build_codec()
    log = make_log(plan.dialogue, plan.records, plan.partitions, codec, settings.align)
    sides: dict[Side, str] = {"turns": names.of("turns"), "feedback": names.of("feedback")}
    expected = expected_outputs(log, sides, codec, settings.align)
    if not expected:
        raise BenchError("no segment comes of this log; measure more records")
    topics.make({TURNS: sides["turns"], FEEDBACK: sides["feedback"]}, **REPLAYED)
    produce(log, sides, settings.kafka, bootstrap)
    on_step(_describe(log, expected))
    return _Bench(plan, settings, bootstrap, sides, topics, folder, len(log), expected), log


def _describe(log: Sequence[LogRecord], expected: Counter[bytes]) -> str:
    size = sum(len(record.value or b"") for record in log)
    return (
        f"the log: {len(log)} records of {size / len(log):.0f} bytes on average, "
        f"{expected.total()} segments and revisions come of it"
    )


def _report(machine: Mapping[str, object], measured: Mapping[str, Metrics]) -> Report:
    ratios = ratios_to(measured, OURS, SPEED, [name for name in measured if name != OURS])
    goals = [
        Goal(f"{OURS}/{other}{suffix}", goal, ratios[f"{OURS}/{other}"].median)
        for other, wanted in GOALS.items()
        if f"{OURS}/{other}" in ratios
        for suffix, goal in wanted
    ]
    return Report(bench="align", machine=machine, subjects=measured, ratios=ratios, goals=goals)


def _profile(bench: _Bench, log: Sequence[LogRecord], on_step: OnStep) -> Profiles | None:
    if not bench.plan.profile:
        return None
    on_step(f"{OURS}: once more, to see where the time goes")
    profiles = Profiles(
        bench.folder.parent / "align-worker.profile", bench.folder.parent / "align-plain.profile"
    )
    bench.measure(OURS, profile=profiles.worker)
    profile = Profile(profiles.plain)
    usual = gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLDS)
    profile.start()
    try:
        run_in_batches(log, bench.sides, build_codec(), bench.settings.align)
    finally:
        profile.stop()
        gc.set_threshold(*usual)
    return profiles


__all__ = ["SUBJECTS", "AlignPlan", "Profiles", "run"]
