"""How far each stage is behind its input, from committed offsets and topic ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient

from streams.errors import BrokerError
from streams.kafka.clients import describe_error
from streams.topics import FEEDBACK, SEGMENTS, TURNS

_TIMEOUT_S = 10.0
_PATIENCE_S = 60.0
_RETRY_S = 0.2
_PEEK_RECORDS = 100
_PEEK_S = 10.0
_COORDINATOR_STARTS = frozenset(
    {
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.NOT_COORDINATOR,
        KafkaError._WAIT_COORD,
        KafkaError._TIMED_OUT,
    }
)


@dataclass(frozen=True, slots=True)
class Stage:
    """A consumer group and the topics it reads."""

    name: str
    group: str
    topics: tuple[str, ...]


STAGES: Sequence[Stage] = (
    Stage("align", "feedback_align", (TURNS, FEEDBACK)),
    Stage("reward", "reward", (SEGMENTS,)),
)
"""The stages whose offsets are committed to Kafka; the learner's live with its versions."""


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """One partition of one stage.

    Attributes:
        stage: The stage.
        topic: Its input.
        partition: The partition.
        current: Next offset to read; None if the stage has not committed any.
        end: Offset behind the newest record.
        lag: Records not read yet. Markers of transactions have offsets too and are not counted
            once the stage stands right before the end.
    """

    stage: str
    topic: str
    partition: int
    current: int | None
    end: int
    lag: int


def measure(
    admin: AdminClient,
    consumer: Consumer,
    positions: Mapping[Stage, Mapping[tuple[str, int], int]],
    *,
    open_group: Callable[[str], Consumer],
    address: str,
) -> list[PartitionLag]:
    """The lag of each partition of each stage.

    Args:
        admin: For topics.
        consumer: A read_committed consumer with ``enable.partition.eof`` for looking whether
            anything but markers is left; it is assigned here.
        positions: Where stages stand that do not commit to Kafka.
        open_group: Makes a consumer of the group of this name, to read its commits; it is
            closed here. Called again for each try while the group's coordinator starts.
        address: Of the cluster, for messages.

    Raises:
        BrokerError: Kafka does not answer, or a topic is missing.
    """
    found: list[PartitionLag] = []
    try:
        known = admin.list_topics(timeout=_TIMEOUT_S).topics
        for stage in (*STAGES, *positions):
            for topic in stage.topics:
                if topic not in known:
                    raise BrokerError(f"topic {topic} is missing: run `clawstream topics apply`")
            places = [
                TopicPartition(topic, partition)
                for topic in stage.topics
                for partition in sorted(known[topic].partitions)
            ]
            if stage in positions:
                committed = positions[stage]
            else:
                committed = _committed(partial(open_group, stage.group), places)
            found.extend(
                _partition(
                    consumer,
                    stage,
                    place.topic,
                    place.partition,
                    committed.get((place.topic, place.partition)),
                )
                for place in places
            )
    except KafkaException as error:
        raise describe_error(error.args[0], address) from error
    return found


def _committed(
    open_reader: Callable[[], Consumer], places: list[TopicPartition]
) -> dict[tuple[str, int], int]:
    """What a group has committed for ``places``; its readers join no group.

    The admin client's own call for this crashes the process in librdkafka while a new
    cluster's group coordinator is still starting. A consumer waits for one to be named, but
    not until that one has taken its office: each try asks anew who it is.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        reader = open_reader()
        try:
            return _offsets(reader.committed(places, timeout=_TIMEOUT_S))
        except KafkaException as error:
            starting = error.args[0].code() in _COORDINATOR_STARTS
            if not starting or time.monotonic() > deadline_s:
                raise
        finally:
            reader.close()
        time.sleep(_RETRY_S)


def _offsets(committed: list[TopicPartition]) -> dict[tuple[str, int], int]:
    for place in committed:
        if place.error is not None:
            raise KafkaException(place.error)
    return {
        (place.topic, place.partition): place.offset for place in committed if place.offset >= 0
    }


def _partition(
    consumer: Consumer, stage: Stage, topic: str, partition: int, current: int | None
) -> PartitionLag:
    start, end = consumer.get_watermark_offsets(
        TopicPartition(topic, partition), timeout=_TIMEOUT_S
    )
    lag = max(0, end - max(start, current or 0))
    if 0 < lag <= _PEEK_RECORDS and current is not None:
        unread = _unread(consumer, TopicPartition(topic, partition, current))
        lag = lag if unread is None else unread
    return PartitionLag(stage.name, topic, partition, current, end, lag)


def _unread(consumer: Consumer, place: TopicPartition) -> int | None:
    """Records from ``place`` to the end, markers not counted; None if it is not reached in time."""
    consumer.assign([place])
    records, deadline_s = 0, time.monotonic() + _PEEK_S
    while time.monotonic() < deadline_s:
        message = consumer.poll(0.5)
        if message is None:
            continue
        error = message.error()
        if error is not None and error.code() == KafkaError._PARTITION_EOF:
            return records
        records += error is None
    return None
