"""Runs the ranges of a plan through a stage's processor. Nothing is produced to Kafka.

Each partition is a process of its own. It reads its ranges, ticks included, as the live worker
did, keeps what comes of them in its store, and can be killed at any time: called again with
the same folder it goes on. What the processor wants to put into its inputs (misplaced
records) is counted and dropped; the log has those records already, where the live worker put them.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty
from typing import Literal, Protocol

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from processors.feedback_align.agent import AlignTopics
from processors.replay.archived import ArchivedLog, ArchiveReader, cluster_of
from processors.replay.stages import Stage, build_stage
from processors.replay.store import PartitionStore
from processors.reward.agent import RewardTopics
from processors.runtime.connection import bootstrap_servers
from processors.runtime.readback import PASSING, record_of
from processors.runtime.records import Outcome, PartitionProcessor, RawRecord, Record
from processors.runtime.topics import Cluster
from streams.archive.reading import Archive, open_archive
from streams.contracts import TICK_HEADER
from streams.errors import BrokerError, ClawstreamError, ReplayError
from streams.kafka.admin import Admin
from streams.kafka.clients import make_consumer
from streams.kafka.places import Range
from streams.serde import build_codec
from streams.settings import Settings, load_settings, write_settings

logger = logging.getLogger(__name__)

BATCH_RECORDS = 5_000
"""Records read at a time."""

APPLIED_RECORDS = 20_000
APPLIED_BYTES = 16 * 1024 * 1024
"""So many records, or so much, are applied at a time: after each time the processor writes down
what changed in its state, most of which changes again. What the outputs are does not depend on
it."""

GC_THRESHOLDS = (500_000, 20, 100)
"""What is read and not yet applied are some 200,000 objects, in which a live worker's thresholds
would search for cycles again and again."""

SPARING_S = 0.05
"""With a rate, what may be done in so long is taken at a time: whatever is taken at once is done
at once, and live workers beside it wait that long for a processor."""

_NICENESS = 10
_SLACK_S = 0.2
_BUFFERED_RECORDS = 50_000
_POLL_S = 0.2
_STALL_S = 60.0
_TICK = ((TICK_HEADER, b""),)

Against = Literal["live", "archive"]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is replayed; kept beside what has come of it.

    Attributes:
        stage: Which.
        ranges: What is read.
        read_from_ms: When the first of it arrived, about.
        compare_from_ms: Outputs that closed earlier only prepare.
        sessions: Only these; all if empty.
        inputs: The input topics, if others than the inventory's (aligner: turns, feedback).
        output: The topic to compare with, if another one.
        archive: The address of the archive that is read; Kafka is if there is none.
        against: Whether outputs are compared with the topic in Kafka, or the archive's.
    """

    stage: str
    ranges: tuple[Range, ...]
    read_from_ms: int
    compare_from_ms: int
    sessions: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    output: str = ""
    archive: str = ""
    against: Against = "live"

    @property
    def needs_kafka(self) -> bool:
        """Whether anything of it is in Kafka."""
        return not self.archive or self.against == "live"

    def opened(self, settings: Settings) -> Archive | None:
        """The archive that is read.

        Raises:
            ArchiveError: No file system is known for it here.
        """
        return open_archive(self.archive, settings) if self.archive else None

    def topics(self) -> tuple[AlignTopics | None, RewardTopics | None]:
        """The topics of the aligner, or of the reward stage, if they are not the usual ones."""
        if not self.inputs:
            return None, None
        if self.stage == "align":
            turns, feedback = self.inputs
            return AlignTopics(turns=turns, feedback=feedback, segments=self.output), None
        (segments,) = self.inputs
        return None, RewardTopics(segments=segments, scored=self.output)

    def build(self, settings: Settings, archive: Archive | None = None) -> Stage:
        """The stage of this job.

        Args:
            settings: All settings.
            archive: Where content is read back from; Kafka if None.
        """
        codec = build_codec(settings.schema_registry_url)
        align, reward = self.topics()
        log = None if archive is None else ArchivedLog(archive)
        return build_stage(
            self.stage, settings, codec, align_topics=align, reward_topics=reward, log=log
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a partition is.

    Attributes:
        partition: Which.
        records: Applied so far, in this call and before.
        outputs: Made so far.
    """

    partition: int
    records: int
    outputs: int


def prepare(folder: Path, job: Job, settings: Settings) -> None:
    """Make the folder of a new replay, or check that it is this one's.

    Raises:
        ReplayError: Another replay's results are there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / "job.json"
    wanted = msgspec.json.encode(job)
    rules = settings.model_dump_json(include={"align", "reward"}).encode()
    for path, data in ((plan, wanted), (folder / "rules.json", rules)):
        if path.exists():
            if path.read_bytes() != data:
                raise ReplayError(
                    f"{folder} holds a replay of something else ({path.name} differs): choose "
                    "another --name, or remove the folder"
                )
        else:
            part = path.with_suffix(".part")
            part.write_bytes(data)
            part.rename(path)
    used = {"data_dir", "kafka", "align", "reward", "worker", "archive", "schema_registry_url"}
    write_settings(settings.model_dump(include=used), folder / "config.yaml")


def load_job(folder: Path) -> Job:
    """The job of a folder.

    Raises:
        ReplayError: There is none.
    """
    try:
        return msgspec.json.decode((folder / "job.json").read_bytes(), type=Job)
    except (OSError, msgspec.DecodeError) as error:
        raise ReplayError(f"{folder} holds no replay: {error}") from error


def store_path(folder: Path, partition: int) -> Path:
    """Where a partition's results are."""
    return folder / f"partition-{partition}.sqlite"


def run(
    folder: Path,
    on_progress: Callable[[Progress], None],
    *,
    rate_per_s: float | None = None,
    processes: int | None = None,
) -> None:
    """Replay what ``prepare`` was told, from where it stands. Blocks.

    Args:
        folder: The replay's.
        on_progress: Told now and then.
        rate_per_s: At most so many records a second, over all partitions, by processes that
            give way to others.
        processes: How many partitions at a time; as many as there are processors if None.

    Raises:
        ReplayError: A partition could not be replayed; says why.
    """
    job = load_job(folder)
    left = sorted({item.partition for item in job.ranges})
    most = min(len(left), processes or os.cpu_count() or 1)
    share = None if rate_per_s is None else rate_per_s / most
    context = multiprocessing.get_context("spawn")
    news = context.Queue()
    running: dict[int, BaseProcess] = {}
    try:
        while left or running:
            while left and len(running) < most:
                partition = left.pop(0)
                arguments = (str(folder), partition, share, news)
                process: BaseProcess = context.Process(target=_child, args=arguments, daemon=True)
                process.start()
                running[partition] = process
            _hear(news, on_progress, running)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.join()
        news.close()


def _hear(
    news: multiprocessing.Queue[Progress | tuple[int, str | None]],
    on_progress: Callable[[Progress], None],
    running: dict[int, BaseProcess],
) -> None:
    try:
        said = news.get(timeout=_POLL_S)
    except Empty:
        for partition, process in running.items():
            if not process.is_alive() and news.empty():
                raise ReplayError(
                    f"the process of partition {partition} ended with {process.exitcode}; call it "
                    "again to go on from where it stood"
                ) from None
        return
    if isinstance(said, Progress):
        on_progress(said)
        return
    partition, failure = said
    running.pop(partition).join()
    if failure is not None:
        raise ReplayError(f"partition {partition}: {failure}")


def _child(
    folder: str,
    partition: int,
    rate_per_s: float | None,
    news: multiprocessing.Queue[Progress | tuple[int, str | None]],
) -> None:
    # Ctrl-C is the parent's affair: it ends its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if rate_per_s is not None:
        os.nice(_NICENESS)
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    failure = None
    try:
        replay_partition(Path(folder), partition, news.put, rate_per_s=rate_per_s)
    except ClawstreamError as error:
        failure = str(error)
    except KafkaException as error:
        failure = f"Kafka: {error}"
    news.put((partition, failure))


def replay_partition(
    folder: Path,
    partition: int,
    on_progress: Callable[[Progress], None],
    *,
    rate_per_s: float | None = None,
) -> None:
    """Replay one partition, in this process.

    Raises:
        ReplayError: Records are gone meanwhile.
        ArchiveError: They are gone from the archive, or a file of it is damaged.
        BrokerError: Kafka does not answer.
        StateError: What was kept is damaged, or content is gone from the log.
    """
    job = load_job(folder)
    settings = load_settings(folder / "config.yaml")
    archive = job.opened(settings)
    stage = job.build(settings, archive)
    ranges = [item for item in job.ranges if item.partition == partition]
    store = PartitionStore(store_path(folder, partition))
    try:
        if store.is_done():
            counts = store.counts()
            on_progress(Progress(partition, counts.get("records", 0), counts.get("outputs", 0)))
            return
        processor = stage.make(partition, _cluster(stage, settings, archive))
        processor.restore(store.entries(), store.meta())
        pace = _Pace(rate_per_s)
        left = _left(ranges, store)
        reader = _reader(settings, archive, partition, left, processor, pace.portion)
        try:
            _Pass(stage, processor, store, partition, on_progress, pace).run(
                reader, frozenset(name.encode() for name in job.sessions)
            )
        finally:
            reader.close()
    finally:
        store.close()


class Reader(Protocol):
    """Reads what is left of a partition."""

    def batches(self) -> Iterator[Mapping[str, Sequence[RawRecord]]]:
        """What is read, by topic, until every range is at its end."""
        ...

    def close(self) -> None:
        """Let go of what is open."""
        ...


def _left(ranges: Sequence[Range], store: PartitionStore) -> dict[str, tuple[int, int]]:
    """From and to of each topic, without what is applied already."""
    applied = store.applied()
    return {
        item.topic: (max(item.start, applied.get(item.topic, -1) + 1), item.end) for item in ranges
    }


def _reader(
    settings: Settings,
    archive: Archive | None,
    partition: int,
    left: Mapping[str, tuple[int, int]],
    processor: PartitionProcessor,
    portion: int,
) -> Reader:
    if archive is None:
        return _KafkaReader(settings, partition, left, processor.buffered, portion)
    return ArchiveReader(
        archive,
        partition,
        left,
        processor.buffered,
        portion=portion,
        most_buffered=_BUFFERED_RECORDS,
    )


def _cluster(stage: Stage, settings: Settings, archive: Archive | None) -> Cluster:
    if archive is not None:
        return cluster_of(archive, stage, settings)
    kafka = settings.kafka
    names = (*stage.inputs, stage.output, *stage.others)
    found = Admin(kafka, bootstrap_servers(kafka)).describe(names)
    for name in stage.inputs:
        if name not in found:
            raise ReplayError(f"topic {name} is gone")
    most = kafka.max_message_bytes
    max_bytes = {
        name: int(found[name].config["max.message.bytes"]) if name in found else most
        for name in names
    }
    return Cluster(found[stage.inputs[0]].partitions, max_bytes, kafka)


class _Pace:
    """Holds a partition to its share of a rate.

    Args:
        rate_per_s: At most so many records a second; as many as there are if None.
    """

    def __init__(self, rate_per_s: float | None) -> None:
        self._rate_per_s = rate_per_s
        self._due_s = time.monotonic()

    @property
    def portion(self) -> int:
        """How many records to read at a time."""
        if self._rate_per_s is None:
            return BATCH_RECORDS
        return max(1, min(BATCH_RECORDS, round(self._rate_per_s * SPARING_S)))

    @property
    def applied(self) -> int:
        """How many records to apply at a time."""
        return APPLIED_RECORDS if self._rate_per_s is None else self.portion

    def wait(self, records: int) -> None:
        """Wait until so many more may have been done. Time that was lost is not made up for."""
        if self._rate_per_s is None:
            return
        now_s = time.monotonic()
        self._due_s = max(self._due_s, now_s - _SLACK_S) + records / self._rate_per_s
        time.sleep(max(0.0, self._due_s - now_s))


class _Pass:
    """One partition on its way through a processor."""

    def __init__(
        self,
        stage: Stage,
        processor: PartitionProcessor,
        store: PartitionStore,
        partition: int,
        on_progress: Callable[[Progress], None],
        pace: _Pace,
    ) -> None:
        self._stage = stage
        self._processor = processor
        self._store = store
        self._partition = partition
        self._on_progress = on_progress
        self._pace = pace
        self._counts = Counter(store.counts())

    def run(self, reader: Reader, sessions: frozenset[bytes]) -> None:
        self._tell()
        waiting = waiting_bytes = 0
        for batch in reader.batches():
            for topic, records in batch.items():
                self._processor.feed(topic, _only(records, sessions))
                waiting += len(records)
                waiting_bytes += sum(len(record.value or b"") for record in records)
            if waiting >= self._pace.applied or waiting_bytes >= APPLIED_BYTES:
                self._drain(done=False)
                waiting = waiting_bytes = 0
            self._pace.wait(sum(map(len, batch.values())))
        self._drain(done=True)

    def _drain(self, *, done: bool) -> None:
        while True:
            outcome = self._processor.drain(self._pace.applied)
            self._keep(outcome, done=done and not outcome.more)
            if not outcome.more:
                return

    def _keep(self, outcome: Outcome, *, done: bool) -> None:
        stage = self._stage
        made = []
        for output in outcome.outputs:
            if output.topic == stage.output and output.value is not None:
                made.append(output.value)
            else:
                self._counts[output.topic] += 1
        self._counts["records"] += outcome.records
        self._counts["outputs"] += len(made)
        self._store.save(outcome, made, self._counts, done=done)
        self._tell()

    def _tell(self) -> None:
        counts = self._counts
        self._on_progress(Progress(self._partition, counts["records"], counts["outputs"]))


def _only(records: Sequence[RawRecord], sessions: frozenset[bytes]) -> Sequence[RawRecord]:
    """Records of other sessions move the clock and nothing else, as a tick does."""
    if not sessions:
        return records
    return [
        record
        if record.key in sessions or record.value is None
        else Record(
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            timestamp=record.timestamp,
            headers=_TICK,
        )
        for record in records
    ]


class _KafkaReader:
    """Reads ranges of one partition of several topics, side by side.

    Args:
        settings: Where Kafka is.
        partition: The partition.
        left: From and to of each topic.
        buffered: How many records of a topic wait: one that is far ahead is paused.
        portion: How many records to take at a time.
    """

    def __init__(
        self,
        settings: Settings,
        partition: int,
        left: Mapping[str, tuple[int, int]],
        buffered: Callable[[str], int],
        portion: int,
    ) -> None:
        self._portion = portion
        self._partition = partition
        self._ends = {topic: end for topic, (start, end) in left.items() if start < end}
        self._next = {topic: left[topic][0] for topic in self._ends}
        self._buffered = buffered
        self._paused: set[str] = set()
        self._heard_s = time.monotonic()
        self._consumer: Consumer = make_consumer(
            settings.kafka,
            bootstrap_servers(settings.kafka),
            group="clawstream-replay",
            auto_offset_reset="error",
            overrides={"enable.partition.eof": True, "fetch.queue.backoff.ms": 10},
        )
        places = [TopicPartition(t, partition, o) for t, o in self._next.items()]
        if places:
            self._consumer.assign(places)

    def close(self) -> None:
        self._consumer.close()

    def batches(self) -> Iterator[Mapping[str, Sequence[RawRecord]]]:
        """What is read, by topic, until every range is at its end.

        Raises:
            ReplayError: The next records are gone.
            BrokerError: Kafka does not answer.
        """
        while self._ends:
            batch: dict[str, list[Record]] = {}
            for message in self._consumer.consume(self._portion, _POLL_S):
                self._take(message, batch)
            if batch:
                self._heard_s = time.monotonic()
                yield batch
            elif time.monotonic() - self._heard_s > _STALL_S:
                raise BrokerError(
                    f"nothing comes of {', '.join(self._ends)} partition {self._partition} "
                    f"from offsets {self._next} on: are they online?"
                )
            self._balance()

    def _take(self, message: Message, batch: dict[str, list[Record]]) -> None:
        topic = message.topic() or ""
        error = message.error()
        if error is not None:
            self._judge(topic, error)
            return
        end = self._ends.get(topic)
        offset = message.offset() or 0
        if end is None:
            return
        if offset < end:
            batch.setdefault(topic, []).append(record_of(message))
            self._next[topic] = offset + 1
        if offset >= end - 1:
            self._finish(topic)

    def _judge(self, topic: str, error: KafkaError) -> None:
        if error.code() == KafkaError._PARTITION_EOF:
            # Only markers are left before the end.
            self._finish(topic)
        elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            raise ReplayError(
                f"{topic} partition {self._partition} no longer has offset "
                f"{self._next.get(topic)}: retention deleted it meanwhile. Replay from later on, "
                "or from an archive"
            )
        elif not error.retriable() and error.code() not in PASSING:
            raise BrokerError(f"cannot read {topic} partition {self._partition}: {error}")

    def _finish(self, topic: str) -> None:
        if self._ends.pop(topic, None) is not None:
            self._consumer.pause([TopicPartition(topic, self._partition)])

    def _balance(self) -> None:
        """Let a topic that is far ahead wait for the other."""
        for topic in self._ends:
            far = self._buffered(topic) > _BUFFERED_RECORDS and len(self._ends) > 1
            place = [TopicPartition(topic, self._partition)]
            if far and topic not in self._paused:
                self._consumer.pause(place)
                self._paused.add(topic)
            elif not far and topic in self._paused:
                self._consumer.resume(place)
                self._paused.discard(topic)


__all__ = [
    "GC_THRESHOLDS",
    "Against",
    "Job",
    "Progress",
    "load_job",
    "prepare",
    "replay_partition",
    "run",
    "store_path",
]
