"""What a replay came to, read from its folder and from the live topic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from processors.feedback_align import codec as align_codec
from processors.replay.compare import Comparison, Head, Kept, Where, compare, digest_of
from processors.replay.shadow import Job, load_job, store_path
from processors.replay.stages import RECORD_TYPES, Stage
from processors.replay.store import PartitionStore
from streams.archive.reading import open_archive
from streams.contracts import TrajectorySegment
from streams.errors import RecordError, ReplayError
from streams.kafka.places import Range
from streams.kafka.reading import read_messages
from streams.serde import Codec, build_codec
from streams.settings import Settings


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What the partitions of a replay came to.

    Attributes:
        records: Applied.
        outputs: Made, those that only prepare included.
        others: Other records that the stage would have put out, by topic: never compared,
            never produced.
        clocks: Of the aligner, by partition: everything due by then has happened.
    """

    records: int
    outputs: int
    others: dict[str, int]
    clocks: dict[int, int]


def outcomes(folder: Path) -> Outcomes:
    """Read the stores of a replay that has run to its end.

    Raises:
        ReplayError: It has not.
    """
    job = load_job(folder)
    counts: Counter[str] = Counter()
    clocks: dict[int, int] = {}
    for partition in _partitions(job):
        store = PartitionStore(store_path(folder, partition))
        try:
            if not store.is_done():
                raise ReplayError(
                    f"{folder}: partition {partition} is not done; go on with --resume"
                )
            counts.update(store.counts())
            meta = store.meta()
            if job.stage == "align" and meta is not None:
                clocks[partition] = align_codec.decode_partition(meta)[0]
        finally:
            store.close()
    records, outputs = counts.pop("records", 0), counts.pop("outputs", 0)
    return Outcomes(records, outputs, dict(counts), clocks)


def compare_with_live(folder: Path, settings: Settings) -> Comparison:
    """Hold a finished replay against the live stage's topic, as far as that goes now: the one
    in Kafka, or the archived one.

    Raises:
        ReplayError: It has not run to its end, or of a session that was asked for nothing came,
            here or there.
        ArchiveError: The topic is not in the archive, or a file of it is damaged.
        BrokerError: Kafka does not answer.
        TopicError: The topic is gone.
    """
    job = load_job(folder)
    stage = job.build(settings)
    codec = build_codec(settings.schema_registry_url)
    record_type = RECORD_TYPES[stage.name]
    clocks = outcomes(folder).clocks
    unseen = set(job.sessions)
    with _Made(folder, job, stage, unseen) as made:
        found = compare(
            made,
            _live(settings, stage, job, unseen),
            lambda value: codec.decode(value, record_type),
            from_ms=job.compare_from_ms,
            where=_where(job, clocks, codec),
        )
    if unseen:
        # A mistyped id would otherwise pass for one without differences.
        raise ReplayError(
            f"no segment of the session {', '.join(sorted(unseen))} came of what was read, and "
            "none is live: check its id, and that --from and --to hold its end"
        )
    return found


def _partitions(job: Job) -> list[int]:
    return sorted({item.partition for item in job.ranges})


def _session_of(head: Head) -> str:
    return head.session.partition("/")[2]


class _Made:
    """What a replay made (``compare.Here``); takes the sessions it meets out of `unseen`."""

    def __init__(self, folder: Path, job: Job, stage: Stage, unseen: set[str]) -> None:
        self._describe = stage.describe
        self._unseen = unseen
        self._stores = {p: PartitionStore(store_path(folder, p)) for p in _partitions(job)}

    def __enter__(self) -> _Made:
        return self

    def __exit__(self, *_: object) -> None:
        for store in self._stores.values():
            store.close()

    def __iter__(self) -> Iterator[Kept]:
        for partition, store in self._stores.items():
            for number, value in store.made():
                head = self._describe(value)
                self._unseen.discard(_session_of(head))
                yield Kept(head, digest_of(value), partition, number)

    def value(self, kept: Kept) -> bytes:
        return self._stores[kept.partition].output(kept.number)


def _live(
    settings: Settings, stage: Stage, job: Job, unseen: set[str]
) -> Iterator[tuple[Head, bytes]]:
    """Of the sessions that were asked for; takes those it meets out of `unseen`."""
    sessions = set(job.sessions)
    for value in _live_values(settings, stage.output, job):
        if value is None:
            continue
        try:
            head = stage.describe(value)
        except RecordError:
            continue  # A stage of ours does not write such; the topic may be shared.
        if not sessions or _session_of(head) in sessions:
            unseen.discard(_session_of(head))
            yield head, value


def _live_values(settings: Settings, topic: str, job: Job) -> Iterator[bytes | None]:
    """What is due later than the first record that was read is written later, too."""
    if job.against == "live":
        for message in read_messages(settings, topic, since_ms=job.read_from_ms):
            yield message.value()
        return
    archive = open_archive(job.archive, settings)
    for partition in sorted(archive.footers(topic)):
        start = archive.offset_at(topic, partition, job.read_from_ms)
        for row in archive.rows(topic, partition, start):
            yield row.value


def _where(job: Job, clocks: dict[int, int], codec: Codec) -> Callable[[Head, bytes], Where]:
    """Whether the replay read what a live output was made of, and got as far as its due time."""
    if job.stage != "align":
        # Each record that was read has an output, or is counted among the dead letters.
        return lambda head, value: "after"
    ranges: dict[tuple[str, int], Range] = {(r.topic, r.partition): r for r in job.ranges}

    def where(head: Head, value: bytes) -> Where:
        lineage = codec.decode(value, TrajectorySegment).lineage
        places = [(ref.offset, ranges.get((ref.topic, ref.partition))) for ref in lineage]
        known = [(offset, item) for offset, item in places if item is not None]
        # One without lineage is no aligner's: nothing that was read could make it.
        if (
            not places
            or len(known) < len(places)
            or any(offset >= item.end for offset, item in known)
        ):
            return "after"
        if any(offset < item.start for offset, item in known):
            return "before"
        return "read" if head.closed_at <= clocks.get(lineage[0].partition, -1) else "after"

    return where


__all__ = ["Outcomes", "compare_with_live", "outcomes"]
