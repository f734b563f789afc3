"""The aligner's worker over topics of its own, to be looked at from outside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, TopicPartition

from processors.bench.cluster import Names, Topics
from processors.bench.log import Side
from processors.bench.process import BenchError, Subject
from processors.bench.subjects.job import Job, write_job
from streams.kafka.clients import make_consumer
from streams.settings import KafkaSettings
from streams.topics import ALIGN_STATE, DEAD_LETTERS, FEEDBACK, SEGMENTS, TURNS


@dataclass(frozen=True, slots=True)
class Rig:
    """One set of topics, and workers over them.

    Attributes:
        names: Names what it makes.
        folder: Holds the workers' files and ``config.yaml``, their settings.
        kafka: How to reach Kafka.
        bootstrap: Where it is.
        topics: Makes the topics.
        partitions: Of each topic.
    """

    names: Names
    folder: Path
    kafka: KafkaSettings
    bootstrap: str
    topics: Topics
    partitions: int

    @property
    def sides(self) -> dict[Side, str]:
        """The input topics."""
        return {"turns": self.names.of("turns"), "feedback": self.names.of("feedback")}

    @property
    def segments(self) -> str:
        """The topic of segments."""
        return self.names.of("segments")

    @property
    def changelog(self) -> str:
        """The state topic."""
        return self.names.of("state")

    def make_topics(
        self,
        inputs: Mapping[str, Any] | None = None,
        segments: Mapping[str, Any] | None = None,
        changelog: Mapping[str, Any] | None = None,
    ) -> None:
        """Make all topics.

        Args:
            inputs: What is special about the inputs, as ``Topics.make`` takes it.
            segments: Likewise of the segments' topic.
            changelog: Likewise of the changelog.
        """
        make, names = self.topics.make, self.names
        make({TURNS: names.of("turns"), FEEDBACK: names.of("feedback")}, **(inputs or {}))
        make({SEGMENTS: self.segments}, **(segments or {}))
        make({DEAD_LETTERS: names.of("dead_letters")})
        make({ALIGN_STATE: self.changelog}, **(changelog or {}))

    def start(self, name: str, config: Path, *, replay: bool) -> Subject:
        """Start a worker; they all belong to one group and go on from one state.

        Args:
            name: Of its folder; another one for each start.
            config: Its settings.
            replay: Whether the inputs carry arrivals of their own.
        """
        folder = self.folder / name
        folder.mkdir()
        job = Job(
            name=self.names.of("align"),
            config=str(config),
            bootstrap_servers=self.bootstrap,
            turns=self.sides["turns"],
            feedback=self.sides["feedback"],
            segments=self.segments,
            dead_letters=self.names.of("dead_letters"),
            changelog=self.changelog,
            partitions=self.partitions,
            records=0,
            folder=str(folder),
            replay=replay,
        )
        write_job(job, folder / "job.json")
        return Subject("processors.bench.subjects.ours", [str(folder / "job.json")], folder)

    def changelog_records(self) -> Iterator[tuple[bytes, int]]:
        """Key and size of each record of the changelog; -1 for one that has no value.

        Raises:
            BenchError: It cannot be read.
        """
        consumer = make_consumer(
            self.kafka,
            self.bootstrap,
            group=f"{self.changelog}-reader",
            overrides={"enable.partition.eof": True},
        )
        try:
            left = set(range(self.partitions))
            consumer.assign([TopicPartition(self.changelog, p, 0) for p in left])
            while left:
                for message in consumer.consume(5_000, 1.0):
                    error = message.error()
                    if error is None:
                        value = message.value()
                        yield message.key() or b"", -1 if value is None else len(value)
                    elif error.code() == KafkaError._PARTITION_EOF:
                        left.discard(message.partition())
                    else:
                        raise BenchError(f"the changelog cannot be read: {error}")
        finally:
            consumer.close()


__all__ = ["Rig"]
