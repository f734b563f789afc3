"""A finished log in topics of its own, and shadow replays of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from processors.bench.cluster import REPLAYED, Names, Topics, produce
from processors.bench.dialogue import DialoguePlan
from processors.bench.log import SIDES, LogRecord, Side, make_log
from processors.bench.process import Subject
from processors.bench.subjects.shadow import ShadowJob
from processors.replay.shadow import Job
from streams.kafka.places import Range
from streams.serde import build_codec
from streams.settings import Settings
from streams.topics import FEEDBACK, TURNS

BEGIN_MS = 1_767_225_600_000
RECORDS_PER_CONVERSATION = 120


@dataclass(frozen=True, slots=True)
class ReplayedLog:
    """A log that is there to be replayed.

    Attributes:
        sides: Its topics.
        ranges: All of it.
        records: How many there are.
        turns: How many of them are turns.
    """

    sides: Mapping[Side, str]
    ranges: tuple[Range, ...]
    records: int
    turns: int

    @classmethod
    def make(
        cls, settings: Settings, topics: Topics, bootstrap: str, records: int, partitions: int
    ) -> ReplayedLog:
        """Write dialogue into topics of its own.

        Args:
            settings: How to reach Kafka; the aligner's, to know what its clock must pass.
            topics: Makes the topics.
            bootstrap: Where Kafka is.
            records: How many turns and feedback events.
            partitions: Of each topic.

        Raises:
            BrokerError: Kafka does not take them.
        """
        names = Names.fresh("replayed")
        sides: dict[Side, str] = {side: names.of(side) for side in SIDES}
        most = max(1, records // RECORDS_PER_CONVERSATION)
        plan = DialoguePlan(talking=min(500, most), begin_ms=BEGIN_MS)
        log = make_log(plan, records, partitions, build_codec(), settings.align)
        topics.make({TURNS: sides["turns"], FEEDBACK: sides["feedback"]}, **REPLAYED)
        produce(log, sides, settings.kafka, bootstrap)
        ticks = len(SIDES) * partitions
        turns = sum(one.side == "turns" for one in log) - partitions
        return cls(sides, _ranges(log, sides), len(log) - ticks, turns)

    def job(self, archive: str = "") -> Job:
        """Its replay.

        Args:
            archive: The address of an archive to read instead.
        """
        return Job(
            stage="align",
            ranges=self.ranges,
            read_from_ms=0,
            compare_from_ms=0,
            inputs=(self.sides["turns"], self.sides["feedback"]),
            output=f"{self.sides['turns']}-made",
            archive=archive,
        )


def start_shadow(
    job: Job,
    folder: Path,
    config: Path,
    *,
    rate_per_s: float | None = None,
    again: bool = False,
    keep: bool = False,
    profile: Path | None = None,
) -> Subject:
    """Start a process that replays.

    Args:
        job: What.
        folder: For its files; made.
        config: Its settings.
        rate_per_s: At most so many records a second.
        again: Whether it begins anew whenever it is through, until it is ended.
        keep: Whether what came of it stays in ``folder / "pass-0"``.
        profile: A file for where the time of one partition goes, which then is all it replays.
    """
    folder.mkdir(parents=True)
    told = ShadowJob(
        config=str(config),
        folder=str(folder),
        job=job,
        rate_per_s=rate_per_s,
        again=again,
        keep=keep,
        profile=None if profile is None else str(profile),
    )
    path = folder / "job.json"
    path.write_bytes(msgspec.json.encode(told))
    return Subject("processors.bench.subjects.shadow", [str(path)], folder)


def _ranges(log: list[LogRecord], sides: Mapping[Side, str]) -> tuple[Range, ...]:
    ends: dict[tuple[Side, int], int] = {}
    for one in log:
        ends[one.side, one.partition] = one.offset + 1
    return tuple(Range(sides[side], partition, 0, end) for (side, partition), end in ends.items())


__all__ = ["ReplayedLog", "start_shadow"]
