"""The archiver: reads topics as they grow and writes them to an archive, each offset once.

The archive's own files say where to go on, so nothing else has to be kept: a run that was killed
at any point leaves whole files and, in the workspace, what no reader looks at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streams.archive.columns import NO_TIMESTAMP, Columns, Row
from streams.archive.files import FileWriter, Footer, Source, read_footer
from streams.archive.layout import FileName, of_topic
from streams.archive.store import Store
from streams.contracts import Record
from streams.errors import ArchiveError, BrokerError, TopicError
from streams.kafka.reading import offset_range

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message

    from streams.kafka.admin import Admin
    from streams.serde import Codec, SchemaStore
    from streams.settings import Settings

GROUP = "clawstream-archive"
_PORTION = 1_000
_LOOK_S = 15.0
"""So often it is looked whether the topics are still the same."""
_POLL_S = 0.2
_TIMESTAMP_TYPES = {0: "CreateTime", 1: "CreateTime", 2: "LogAppendTime"}

Partition = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolling:
    """When a file is finished: at a size (uncompressed), or at an age since its first record."""

    size_bytes: int
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where the archive of a partition goes on.

    Attributes:
        offset: The next offset to archive.
        high: The end of the partition when the run began.
        aged_out_from: The first offset that Kafka deleted before it was archived.
    """

    offset: int
    high: int
    aged_out_from: int | None = None


OnFile = Callable[[Footer], None]


class Archiver:
    """Archives topics.

    Args:
        settings: Where Kafka is.
        store: Where files go.
        codec: Reads records for the decoded columns.
        schemas: The schemas of all records.
        rolling: When files are finished.
        types: What each topic's values hold; topics of anything else have raw columns only.
        on_file: Told of each file when it is there.
        skip_aged_out: Go on behind records that Kafka has deleted, and note it in the next file.
        clock_s: A clock that only rises.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        codec: Codec,
        schemas: SchemaStore,
        rolling: Rolling,
        *,
        types: Mapping[str, type[Record] | None],
        on_file: OnFile = lambda footer: None,
        skip_aged_out: bool = False,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._store = store
        self._rolling = rolling
        self._on_file = on_file
        self._skip_aged_out = skip_aged_out
        self._clock_s = clock_s
        self._columns = {name: Columns(kind, codec, schemas) for name, kind in types.items()}

    def run(self, *, once: bool, is_stopping: Callable[[], bool] = lambda: False) -> None:
        """Archive until the topics' present ends, or until told to stop.

        Whatever was read is in whole files when it returns.

        Raises:
            ArchiveError: Records are gone that the archive lacks, a topic is another one than
                the archived one, another archiver is at work, or files cannot be written.
            TopicError: There is no such topic.
            BrokerError: Kafka cannot be read.
            SchemaError: The schema registry cannot be reached.
        """
        from confluent_kafka import KafkaException

        from streams.kafka.clients import describe_error, make_consumer, resolve_bootstrap

        bootstrap = resolve_bootstrap(self._settings)
        with ExitStack() as stack:
            folders = {
                topic: stack.enter_context(self._store.workspace(topic)) for topic in self._columns
            }
            sources = _sources(self._settings, bootstrap, tuple(self._columns))
            consumer = make_consumer(
                self._settings.kafka,
                bootstrap,
                group=GROUP,
                auto_offset_reset="error",
                overrides={"enable.partition.eof": True, "queued.max.messages.kbytes": 16 * 1024},
            )
            stack.callback(consumer.close)
            try:
                starts = self._starts(consumer, sources)
                same = _Same(self._settings, bootstrap, sources)
                with self._files(folders, sources, starts, same) as files:
                    self._consume(consumer, files, starts, same, once=once, is_stopping=is_stopping)
            except KafkaException as error:
                told = describe_error(error.args[0], bootstrap)
                raise BrokerError(f"cannot archive: {told}") from error

    @contextmanager
    def _files(
        self,
        folders: Mapping[str, Path],
        sources: Mapping[str, Source],
        starts: Mapping[Partition, Start],
        same: _Same,
    ) -> Iterator[dict[Partition, _Rolling]]:
        """What is written to, partition by partition; nothing unfinished is left behind."""
        files = {
            (topic, partition): _Rolling(
                topic=topic,
                partition=partition,
                start=start,
                folder=folders[topic],
                source=sources[topic],
                columns=self._columns[topic],
                store=self._store,
                rolling=self._rolling,
                on_file=self._on_file,
                clock_s=self._clock_s,
                same=same,
            )
            for (topic, partition), start in starts.items()
        }
        try:
            yield files
        finally:
            for file in files.values():
                file.abandon()

    def _consume(
        self,
        consumer: Consumer,
        files: Mapping[Partition, _Rolling],
        starts: Mapping[Partition, Start],
        same: _Same,
        *,
        once: bool,
        is_stopping: Callable[[], bool],
    ) -> None:
        from confluent_kafka import TopicPartition

        next_look_s = self._clock_s() + _LOOK_S
        behind = {place for place, start in starts.items() if start.offset < start.high}
        consumer.assign([TopicPartition(*place, starts[place].offset) for place in sorted(starts)])
        while not is_stopping() and not (once and not behind):
            for message in consumer.consume(_PORTION, _POLL_S):
                place = (message.topic() or "", message.partition() or 0)
                if message.error() is not None:
                    self._judge(message)
                    files[place].has_read_to(message.offset() or 0)
                    behind.discard(place)
                    continue
                if once and place not in behind:
                    continue
                files[place].add(_row(message))
                if files[place].end >= starts[place].high:
                    behind.discard(place)
            if self._clock_s() >= next_look_s:
                # Kafka may be away for a while: the consumer waits, too.
                with suppress(BrokerError):
                    same.require(*self._columns)
                next_look_s = self._clock_s() + _LOOK_S
            for file in files.values():
                file.roll_if_old()
        for file in files.values():
            file.roll()

    def _judge(self, message: Message) -> None:
        """Let the end of a partition pass; raise anything else."""
        from confluent_kafka import KafkaError

        error = message.error()
        assert error is not None
        if error.code() == KafkaError._PARTITION_EOF:
            return
        where = f"{message.topic()} partition {message.partition()}"
        if error.code() in (
            KafkaError.UNKNOWN_TOPIC_OR_PART,
            KafkaError._UNKNOWN_TOPIC,
            KafkaError._UNKNOWN_PARTITION,
        ):
            raise TopicError(f"{where} is gone: was the topic deleted while it was archived?")
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            raise ArchiveError(
                f"{where}: Kafka has deleted records before they were archived ({error.str()}); "
                "run again with --skip-aged-out, and raise the topic's retention"
            )
        raise BrokerError(f"cannot read {where}: {_text(error)}")

    def _starts(self, consumer: Consumer, sources: Mapping[str, Source]) -> dict[Partition, Start]:
        found: dict[Partition, Start] = {}
        for topic, source in sources.items():
            files = of_topic(self._store.files(topic), topic)
            for partition in range(source.partitions):
                low, high = offset_range(consumer, topic, partition)
                # Names say where files start; where the last one ends its footer says.
                last = [read_footer(self._store, f.name) for f in files.get(partition, [])[-1:]]
                found[topic, partition] = self._start(topic, partition, source, last, low, high)
        return found

    def _start(
        self,
        topic: str,
        partition: int,
        source: Source,
        last: Sequence[Footer],
        low: int,
        high: int,
    ) -> Start:
        if not last:
            return Start(offset=low, high=high)
        (footer,) = last
        where = f"{topic} partition {partition}"
        if footer.source.topic_id != source.topic_id or footer.end > high:
            raise ArchiveError(
                f"{where} is not the topic that was archived to {self._store.address} (its id is "
                f"{source.topic_id}, it ends at {high}; the archive is of {footer.source.topic_id} "
                f"up to {footer.end}): it was deleted and made again, or this is another "
                "cluster. Archive it to another place (--to)"
            )
        if footer.end >= low:
            return Start(offset=footer.end, high=high)
        if not self._skip_aged_out:
            raise ArchiveError(
                f"{where}: Kafka has deleted offsets {footer.end} to {low - 1} before they were "
                "archived. Run again with --skip-aged-out to go on behind them (the next file "
                "says so), and raise the topic's retention"
            )
        return Start(offset=low, high=high, aged_out_from=footer.end)


class _Same:
    """Makes sure that topics are those that a run began with.

    A consumer waits in silence for one that was deleted, and goes on in one that was made anew
    under its name.
    """

    def __init__(self, settings: Settings, bootstrap: str, sources: Mapping[str, Source]) -> None:
        self._settings = settings
        self._bootstrap = bootstrap
        self._sources = sources
        self._admin: Admin | None = None

    def require(self, *topics: str) -> None:
        """Look whether these are still there.

        Raises:
            TopicError: One is gone, or another one.
            BrokerError: Kafka does not answer.
        """
        ids = self._ids(topics)
        for topic in topics:
            if ids.get(topic) != self._sources[topic].topic_id:
                what = "made anew" if topic in ids else "deleted"
                raise TopicError(f"{topic} is gone: it was {what} while it was archived")

    def _ids(self, topics: tuple[str, ...]) -> dict[str, str]:
        from streams.kafka.admin import Admin

        admin = self._admin or Admin(self._settings.kafka, self._bootstrap)
        self._admin = None
        ids = admin.topic_ids(tuple(admin.describe(topics)))
        self._admin = admin  # One that failed is not asked again.
        return ids


class _Rolling:
    """The file of one partition that is being written, and the next one, and so on."""

    def __init__(
        self,
        *,
        topic: str,
        partition: int,
        start: Start,
        folder: Path,
        source: Source,
        columns: Columns,
        store: Store,
        rolling: Rolling,
        on_file: OnFile,
        clock_s: Callable[[], float],
        same: _Same,
    ) -> None:
        self._same = same
        self.end = start.offset
        self._name = FileName(topic, partition, start.offset)
        self._aged_out_from = start.aged_out_from
        self._folder = folder
        self._source = source
        self._columns = columns
        self._store = store
        self._rolling = rolling
        self._on_file = on_file
        self._clock_s = clock_s
        self._writer: FileWriter | None = None
        self._began_s = 0.0

    def add(self, row: Row) -> None:
        """Take the next record; the file is finished before it if it is full."""
        self.has_read_to(row.offset)
        if self._writer is not None and self._writer.size_bytes >= self._rolling.size_bytes:
            self.roll()
        if self._writer is None:
            last = str(self._name).rpartition("/")[2]
            self._writer = FileWriter(
                path=self._folder / f"{last}.tmp",
                name=self._name,
                source=self._source,
                columns=self._columns,
                aged_out_from=self._aged_out_from,
            )
            self._began_s = self._clock_s()
        self._writer.add(row)
        self.end = row.offset + 1

    def has_read_to(self, offset: int) -> None:
        """Everything before ``offset`` was read, though perhaps it was no record."""
        self.end = max(self.end, offset)

    def roll_if_old(self) -> None:
        """Finish the file if its first record has waited long enough."""
        if self._clock_s() - self._began_s >= self._rolling.age_s:
            self.roll()

    def roll(self) -> None:
        """Finish the file, if there is one, and publish it: all in it is of one topic."""
        if self._writer is None:
            return
        self._same.require(self._name.topic)
        footer = self._writer.finish(self.end)
        self._store.publish(self._writer.path, self._name)
        self._writer = None
        self._name = FileName(self._name.topic, self._name.partition, footer.end)
        self._aged_out_from = None
        self._on_file(footer)

    def abandon(self) -> None:
        """Leave no unfinished file."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None


def _row(message: Message) -> Row:
    kind, timestamp = message.timestamp()
    headers: Any = message.headers() or ()
    return Row(
        topic=message.topic() or "",
        partition=message.partition() or 0,
        offset=message.offset() or 0,
        timestamp=timestamp if kind else NO_TIMESTAMP,
        timestamp_type=_TIMESTAMP_TYPES[kind],
        key=message.key(),
        value=message.value(),
        headers=tuple((name, value) for name, value in headers),
    )


def _text(error: KafkaError) -> str:
    return error.str()


def _sources(settings: Settings, bootstrap: str, topics: tuple[str, ...]) -> dict[str, Source]:
    from streams.kafka.admin import Admin

    admin = Admin(settings.kafka, bootstrap)
    admin.require(topics)
    ids = admin.topic_ids(topics)
    return {
        name: Source(
            partitions=found.partitions,
            max_message_bytes=int(found.config["max.message.bytes"]),
            topic_id=ids[name],
        )
        for name, found in admin.describe(topics).items()
    }


__all__ = ["Archiver", "Rolling", "Start"]
