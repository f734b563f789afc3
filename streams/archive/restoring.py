"""Topics made of an archive: keys, values, headers and timestamps as they were.

A restored topic has ``CreateTime``, for with ``LogAppendTime`` every record would be of today.
Records keep their order in their partition, and their offsets too if the archive starts at 0 and
has no holes. Restoring goes on where an earlier run was ended: what is in the topic must be the
beginning of what the archive has, record by record, and the rest is added to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from streams.archive.chain import Break
from streams.archive.columns import Row
from streams.archive.reading import Archive
from streams.errors import ArchiveError, BrokerError, TopicError
from streams.kafka.reading import offset_range

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message, Producer

    from streams.kafka.admin import Admin
    from streams.settings import Settings

GROUP = "clawstream-restore"
_TIMEOUT_S = 60.0
_POLL_S = 0.2
_PORTION = 1_000
_MAX_BYTES = "max.message.bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a restore did with one partition.

    Attributes:
        found: Records that were there from an earlier run.
        written: Records that were added.
    """

    partition: int
    found: int
    written: int


OnProgress = Callable[[int], None]


class Restorer:
    """Restores topics of one archive.

    Args:
        settings: Where Kafka is.
        archive: What to restore.
        on_progress: Told how many more records are in the topic now.
    """

    def __init__(
        self,
        settings: Settings,
        archive: Archive,
        *,
        on_progress: OnProgress = lambda records: None,
    ) -> None:
        self._settings = settings
        self._archive = archive
        self._on_progress = on_progress

    def restore(
        self, topic: str, into: str, *, replication: int = 1, allow_gaps: bool = False
    ) -> list[Restored]:
        """Fill a topic with an archived one's records. It is created if it is not there.

        Everything that can be known before is checked before the first record is written.

        Args:
            topic: The archived topic.
            into: The topic to fill: new, empty, or left by an earlier run.
            replication: Copies of each partition if it is created.
            allow_gaps: Restore what there is although files are missing.

        Raises:
            ArchiveError: The archive has no such topic or has gaps; or the topic holds something
                else, or somebody else writes to it.
            DamagedArchiveError: A file cannot be read.
            TopicError: The topic cannot take the records as they were.
            BrokerError: Kafka cannot be reached.
        """
        from confluent_kafka import KafkaException

        from streams.kafka.admin import Admin
        from streams.kafka.clients import describe_error, resolve_bootstrap

        self._check_gaps(self._archive.breaks(topic), allow_gaps)
        self._archive.check(topic)
        bootstrap = resolve_bootstrap(self._settings)
        admin = Admin(self._settings.kafka, bootstrap)
        self._prepare(admin, topic, into, replication)
        try:
            return self._fill(bootstrap, topic, into)
        except KafkaException as error:
            told = describe_error(error.args[0], bootstrap)
            raise BrokerError(f"cannot restore into {into}: {told}") from error

    def _check_gaps(self, found: list[Break], allow_gaps: bool) -> None:
        lost = [item for item in found if item.kind == "gap"]
        overlaps = [item for item in found if item.kind == "overlap"]
        if overlaps:
            raise ArchiveError(f"{overlaps[0]}; see `clawstream archive verify`")
        if lost and not allow_gaps:
            lines = "\n".join(f"  {item}" for item in lost)
            raise ArchiveError(
                f"the archive is not whole:\n{lines}\nPut the files back, or restore what there "
                "is with --allow-gaps"
            )

    def _prepare(self, admin: Admin, topic: str, into: str, replication: int) -> None:
        footers = [f for files in self._archive.footers(topic).values() for f in files]
        largest = max(footer.source.max_message_bytes for footer in footers)
        partitions = self._archive.partitions(topic)
        target = admin.describe((into,)).get(into)
        if target is None:
            admin.create(into, partitions, replication, _config(largest))
            return
        if target.partitions != partitions:
            raise TopicError(
                f"{into} has {target.partitions} partitions, the archived {topic} had "
                f"{partitions}: keys would be elsewhere. Restore into a new topic (--into)"
            )
        if target.config.get("message.timestamp.type") != "CreateTime":
            raise TopicError(
                f"{into} has message.timestamp.type=LogAppendTime: every record would be of "
                "today. Restore into a new topic (--into); replays read it, live workers do not"
            )
        if "compact" in target.config.get("cleanup.policy", ""):
            raise TopicError(f"{into} is compacted: it would not keep every record")
        if int(target.config[_MAX_BYTES]) < largest:
            raise TopicError(
                f"{into} takes records of {target.config[_MAX_BYTES]} bytes, the archived {topic} "
                f"took {largest}: raise its {_MAX_BYTES}"
            )

    def _fill(self, bootstrap: str, topic: str, into: str) -> list[Restored]:
        from streams.kafka.clients import make_consumer, make_producer

        consumer = make_consumer(
            self._settings.kafka,
            bootstrap,
            group=GROUP,
            auto_offset_reset="error",
            isolation="read_uncommitted",
        )
        heard: list[BrokerError] = []
        producer = make_producer(self._settings.kafka, bootstrap, on_error=heard.append)
        try:
            found = {
                partition: self._check_beginning(consumer, topic, into, partition)
                for partition in range(self._archive.partitions(topic))
            }
            return [
                self._fill_partition(producer, topic, into, partition, there)
                for partition, there in found.items()
            ]
        except BrokerError as error:
            raise (heard or [error])[0] from error
        finally:
            consumer.close()

    def _check_beginning(self, consumer: Consumer, topic: str, into: str, partition: int) -> int:
        """How many records of the archive are in the topic already."""
        low, high = offset_range(consumer, into, partition)
        if low > 0:
            raise _not_ours(into, partition, "its first records are gone")
        footers = self._archive.footers(topic).get(partition, [])
        if high > sum(footer.rows for footer in footers):
            raise _not_ours(into, partition, "it holds more than the archive")
        there = _messages(consumer, into, partition, high)
        for message, row in zip(there, self._rows(topic, partition), strict=False):
            if not _is_same(message, row):
                raise _not_ours(
                    into,
                    partition,
                    f"the record at offset {message.offset()} is not that of the archive "
                    f"(offset {row.offset})",
                )
            self._on_progress(1)
        return high

    def _rows(self, topic: str, partition: int) -> Iterator[Row]:
        return self._archive.all_rows(topic, partition)

    def _fill_partition(
        self, producer: Producer, topic: str, into: str, partition: int, there: int
    ) -> Restored:
        deliveries = _Deliveries(into, partition, there, self._on_progress)
        written = 0
        for row in islice(self._rows(topic, partition), there, None):
            _check_timestamp(row)
            _produce(producer, into, row, deliveries)
            written += 1
        unsent = producer.flush(_TIMEOUT_S)
        deliveries.raise_failure()
        if unsent:
            raise BrokerError(
                f"Kafka did not take {unsent} records of {into} partition {partition} within "
                f"{_TIMEOUT_S:.0f} s; run the same command again to go on"
            )
        return Restored(partition=partition, found=there, written=written)


class _Deliveries:
    """Sees that each record lands right behind the one before it."""

    def __init__(self, into: str, partition: int, there: int, on_progress: OnProgress) -> None:
        self._into = into
        self._partition = partition
        self._next = there
        self._on_progress = on_progress
        self._failure: Exception | None = None

    def __call__(self, error: Any, message: Message) -> None:
        if self._failure is not None:
            return
        if error is not None:
            self._failure = BrokerError(
                f"Kafka did not take a record of {self._into} partition {self._partition}: "
                f"{error.str()}; run the same command again to go on"
            )
        elif message.offset() != self._next:
            self._failure = ArchiveError(
                f"a record landed at offset {message.offset()} of {self._into} partition "
                f"{self._partition} in place of {self._next}: somebody else writes to this "
                "topic. Stop them, delete the topic and restore it again"
            )
        else:
            self._next += 1
            self._on_progress(1)

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _produce(producer: Producer, into: str, row: Row, deliveries: _Deliveries) -> None:
    while True:
        try:
            producer.produce(
                into,
                key=row.key,
                value=row.value,
                headers=list(row.headers),
                partition=row.partition,
                timestamp=row.timestamp,
                on_delivery=deliveries,
            )
            break
        except BufferError:
            producer.poll(0.1)
    producer.poll(0)
    deliveries.raise_failure()


def _check_timestamp(row: Row) -> None:
    if row.timestamp <= 0:
        raise ArchiveError(
            f"offset {row.offset} of {row.topic} partition {row.partition} has the timestamp "
            f"{row.timestamp}, which Kafka's client cannot write (it would put today's)"
        )


def _is_same(message: Message, row: Row) -> bool:
    headers: Any = message.headers() or ()
    return (
        message.key() == row.key
        and message.value() == row.value
        and tuple(headers) == row.headers
        and message.timestamp()[1] == row.timestamp
    )


def _messages(consumer: Consumer, topic: str, partition: int, high: int) -> Iterator[Message]:
    from confluent_kafka import TopicPartition

    if high == 0:
        return
    consumer.assign([TopicPartition(topic, partition, 0)])
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        for message in consumer.consume(_PORTION, _POLL_S):
            if message.error() is not None:
                raise BrokerError(f"cannot read {topic}: {message.error()}")
            deadline = time.monotonic() + _TIMEOUT_S
            yield message
            if (message.offset() or 0) >= high - 1:
                return
        if time.monotonic() > deadline:
            raise BrokerError(f"cannot read {topic}: nothing came for {_TIMEOUT_S:.0f} s")


def _not_ours(into: str, partition: int, why: str) -> ArchiveError:
    return ArchiveError(
        f"{into} partition {partition} is no beginning of a restore: {why}. Restore into a topic "
        "that is new or empty (--into)"
    )


def _config(max_message_bytes: int) -> dict[str, str]:
    return {
        "message.timestamp.type": "CreateTime",
        "cleanup.policy": "delete",
        # Old records would be deleted at once.
        "retention.ms": "-1",
        _MAX_BYTES: str(max_message_bytes),
    }


__all__ = ["Restored", "Restorer"]
