"""How far each stage is behind its input, from committed offsets and topic ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
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
PEEKING: Mapping[str, Any] = {
    "enable.partition.eof": True,
    # One that stands at a partition's end would keep its connection for half a second.
    "fetch.wait.max.ms": 10,
    "max.partition.fetch.bytes": 64 * 1024,
}
"""What a consumer needs besides to look at single records of many partitions."""
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

JUDGE = Stage("judge", "judge", (SEGMENTS,))
"""One more of them, where the settings name a judge."""


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
        group: Its consumer group, or where else it keeps its positions.
        oldest_unread_ms: When the oldest unread record arrived; None without one.
        oldest_event_ms: When what it tells of happened; None where that cannot be told.
    """

    stage: str
    topic: str
    partition: int
    current: int | None
    end: int
    lag: int
    group: str = ""
    oldest_unread_ms: int | None = None
    oldest_event_ms: int | None = None


EventTime = Callable[[str, bytes | None], int | None]
"""When what a record of a topic tells of happened; None if that cannot be told."""


def measure(
    admin: AdminClient,
    consumer: Consumer,
    positions: Mapping[Stage, Mapping[tuple[str, int], int]],
    *,
    open_group: Callable[[str], Consumer],
    address: str,
    event_time: EventTime = lambda topic, value: None,
    also: Sequence[Stage] = (),
) -> list[PartitionLag]:
    """The lag of each partition of each stage.

    Args:
        admin: For topics.
        consumer: A read_committed consumer with ``PEEKING`` for looking whether anything but
            markers is left; it is assigned here, and in the end nothing is.
        positions: Where stages stand that do not commit to Kafka.
        open_group: Makes a consumer of the group of this name, to read its commits; it is
            closed here. Called again for each try while the group's coordinator starts.
        address: Of the cluster, for messages.
        event_time: Looks into an unread record.
        also: Stages that commit to Kafka, besides ``STAGES``.

    Raises:
        BrokerError: Kafka does not answer, or a topic is missing.
    """
    found: list[PartitionLag] = []
    try:
        known = admin.list_topics(timeout=_TIMEOUT_S).topics
        for stage in (*STAGES, *also, *positions):
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
                    event_time,
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


def members_of(admin: AdminClient, address: str, also: Sequence[Stage] = ()) -> dict[str, int]:
    """How many members the group of each stage that commits to Kafka has, by stage.

    Args:
        admin: For groups.
        address: Of the cluster, for messages.
        also: Such stages besides ``STAGES``.

    Raises:
        BrokerError: Kafka does not answer.
    """
    stages = (*STAGES, *also)
    try:
        groups = [stage.group for stage in stages]
        asked = admin.describe_consumer_groups(groups, request_timeout=_TIMEOUT_S)
        return {stage.name: len(asked[stage.group].result().members) for stage in stages}
    except KafkaException as error:
        raise describe_error(error.args[0], address) from error


def _partition(
    consumer: Consumer,
    stage: Stage,
    topic: str,
    partition: int,
    current: int | None,
    event_time: EventTime,
) -> PartitionLag:
    start, end = consumer.get_watermark_offsets(
        TopicPartition(topic, partition), timeout=_TIMEOUT_S
    )
    place = max(start, current or 0)
    lag = max(0, end - place)
    oldest: Message | None = None
    if lag:
        count_all = lag <= _PEEK_RECORDS and current is not None
        unread, oldest = _unread(consumer, TopicPartition(topic, partition, place), count_all)
        lag = lag if unread is None else unread
    return PartitionLag(
        stage.name,
        topic,
        partition,
        current,
        end,
        lag,
        stage.group,
        None if oldest is None else oldest.timestamp()[1],
        None if oldest is None else event_time(topic, oldest.value()),
    )


def _unread(
    consumer: Consumer, place: TopicPartition, count_all: bool
) -> tuple[int | None, Message | None]:
    """Records from ``place`` to the end, markers not counted, and the first of them.

    The number is None if it was not asked for, or the end is not reached in time.
    """
    consumer.assign([place])
    try:
        return _counted(consumer, count_all)
    finally:
        consumer.unassign()


def _counted(consumer: Consumer, count_all: bool) -> tuple[int | None, Message | None]:
    records, deadline_s = 0, time.monotonic() + _PEEK_S
    oldest: Message | None = None
    while time.monotonic() < deadline_s:
        message = consumer.poll(0.5)
        if message is None:
            continue
        error = message.error()
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF:
                return records, oldest
            continue
        records += 1
        oldest = message if oldest is None else oldest
        if not count_all:
            break
    return None, oldest
