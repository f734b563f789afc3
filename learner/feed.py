"""The feed: scored segments from Kafka into the window, in a thread of their own.

Theory of operation. Offsets live with the versions in the registry, never in Kafka: a
checkpoint names the records its window held and, per partition, the next record to read.
``start`` reads exactly those records again, so that the window is what it was, and then goes on
where the checkpoint ends; a segment that arrived after the snapshot of the newest version is
therefore read again and is new again, whatever happened to the process in between.

One thread reads, decodes, packs and adds to the window; the trainer takes sealed snapshots.
They meet in one lock, held for a batch's additions or for the copying of a snapshot, never for
I/O, never for decoding or packing, and never for training. Partitions are assigned, not
subscribed to: the consumer joins no group that could throw it out, however long an update
takes. A record that cannot be used goes to the dead letters, acknowledged, before the position
moves past it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from learner.kafka import Outgoing
from learner.window import NEVER, Packed, Snapshot, Uses, Window
from streams.clock import Clock
from streams.contracts import (
    TICK_HEADER,
    DeadLetter,
    RecordHeader,
    ScoredSegment,
    SourceRef,
)
from streams.errors import (
    BrokerError,
    ClawstreamError,
    LearnerError,
    OversizedError,
    RecordError,
    SchemaError,
)
from streams.kafka.reading import offset_range
from streams.registry import Checkpoint
from streams.serde import Codec

log = logging.getLogger(__name__)

STAGE = "learner"
"""The stage named in the learner's dead letters."""

_BATCH = 500
_POLL_S = 0.2
_METADATA_TIMEOUT_S = 10.0
_RETRY_S = 1.0


class Writer(Protocol):
    """What writes records and waits for their acknowledgement."""

    def write(self, records: Sequence[Outgoing]) -> None:
        """See ``KafkaWriter.write``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """A snapshot and, per partition, the first record that is not in it."""

    snapshot: Snapshot
    positions: tuple[SourceRef, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedStatus:
    """How much waits: new and usable segments as in ``Window``, and what arrived so far."""

    new_segments: int
    available_segments: int
    segments: int
    tokens: int
    held_bytes: int
    arrivals: Mapping[str, int]


class Feed:
    """See the module.

    Args:
        consumer: A confluent-kafka consumer with ``enable.partition.eof``.
        topic: Where scored segments are.
        policy: Segments of other policies are passed over.
        window: Where they go; from now on only this feed touches it.
        codec: Decodes them and encodes dead letters.
        writer: Writes dead letters.
        dead_letters: The topic of the dead letters.
        clock: Tells when a dead letter was written.
        stopping: Ends all reading and waiting once set, by whoever has it.
    """

    def __init__(
        self,
        *,
        consumer: Any,
        topic: str,
        policy: str,
        window: Window,
        codec: Codec,
        writer: Writer,
        dead_letters: str,
        clock: Clock,
        stopping: threading.Event,
    ) -> None:
        self._consumer = consumer
        self._topic = topic
        self._policy = policy
        self._window = window
        self._codec = codec
        self._writer = writer
        self._dead_letters = dead_letters
        self._clock = clock
        self._positions: dict[int, int] = {}
        self._arrivals: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._stopping = stopping
        self._failure: ClawstreamError | None = None
        self._uses_of: Callable[[Iterable[str]], Mapping[str, Uses]] = lambda _: {}
        self._newest_use: tuple[frozenset[str], Uses] = (frozenset(), NEVER)
        self._thread = threading.Thread(target=self._run, name="learner-feed", daemon=True)

    def start(
        self,
        checkpoint: Checkpoint | None,
        uses_of: Callable[[Iterable[str]], Mapping[str, Uses]],
    ) -> tuple[SourceRef, ...]:
        """Rebuild the window as of the checkpoint, then read on in the background.

        Args:
            checkpoint: Where the newest version left off; None reads from the beginning.
            uses_of: In which versions each of some segments was used.

        Returns:
            Per partition, the first record read as new.

        Raises:
            BrokerError: Kafka cannot be reached, or the topic does not exist.
            LearnerError: The topic ends before the checkpoint, or lacks one of its
                partitions: it is another topic.
        """
        self._uses_of = uses_of
        try:
            wanted = self._start_positions(checkpoint)
            if checkpoint is not None:
                self._restore(checkpoint, wanted)
                self._window.restore_uses(uses_of(self._window.segment_ids()))
            self._positions = wanted
            self._assign(wanted)
        except KafkaException as error:
            raise self._broker_error(error) from error
        begun = self._refs(self._positions)
        self._thread.start()
        return begun

    def stop(self) -> None:
        """Stop reading and close the consumer."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._consumer.close()

    def status(self) -> FeedStatus:
        """How much waits now.

        Raises:
            ClawstreamError: Reading failed in the background and has ended.
        """
        self._raise_failure()
        with self._lock:
            return FeedStatus(
                new_segments=self._window.new_segments,
                available_segments=self._window.available_segments,
                segments=len(self._window),
                tokens=self._window.tokens,
                held_bytes=self._window.held_bytes,
                arrivals=dict(self._arrivals),
            )

    def seal(self) -> Sealed:
        """A snapshot of the window for training; later arrivals are new again.

        Raises:
            ClawstreamError: Reading failed in the background and has ended.
        """
        self._raise_failure()
        with self._lock:
            return Sealed(snapshot=self._window.seal(), positions=self._refs(self._positions))

    def record_use(self, segment_ids: Iterable[str], update: int) -> None:
        """An update, named by its version's number, used these segments."""
        used = frozenset(segment_ids)
        with self._lock:
            self._newest_use = used, frozenset((update,))
            self._window.record_use(used, update)

    def require_version(self, min_version: int) -> None:
        """Segments with a reply by an older version are not usable from now on."""
        with self._lock:
            self._window.require_version(min_version)

    # Starting

    def _start_positions(self, checkpoint: Checkpoint | None) -> dict[int, int]:
        saved = {} if checkpoint is None else _by_partition(checkpoint.positions, self._topic)
        partitions = self._partitions()
        gone = sorted(saved.keys() - partitions)
        if gone:
            raise self._recreated(f"has no partition {gone[0]} any more, which was read before")
        return {
            partition: self._start_position(partition, saved.get(partition))
            for partition in partitions
        }

    def _partitions(self) -> list[int]:
        metadata = self._consumer.list_topics(self._topic, timeout=_METADATA_TIMEOUT_S)
        found = metadata.topics[self._topic]
        if found.error is not None or not found.partitions:
            raise BrokerError(
                f"topic {self._topic} does not exist; create the topics first (clawstream topics)"
            )
        return sorted(found.partitions)

    def _start_position(self, partition: int, saved: int | None) -> int:
        low, high = offset_range(self._consumer, self._topic, partition)
        if saved is None:
            return low
        if saved > high:
            raise self._recreated(
                f"partition {partition} ends at offset {high}, but the registry says that it was "
                f"read up to {saved}"
            )
        if saved < low:
            log.warning(
                "records lost to retention topic=%s partition=%d from=%d to=%d",
                self._topic, partition, saved, low,
            )  # fmt: skip
        return max(saved, low)

    def _assign(self, positions: Mapping[int, int]) -> None:
        self._consumer.assign(
            [TopicPartition(self._topic, p, offset) for p, offset in positions.items()]
        )

    def _restore(self, checkpoint: Checkpoint, ends: Mapping[int, int]) -> None:
        """Read the records of the checkpoint's window again and add them in their old order."""
        wanted = {ref for ref in checkpoint.window if ref.topic == self._topic}
        found = self._read_again(wanted, ends)
        for ref in checkpoint.window:
            if ref in found:
                self._window.add(found[ref])
        self._window.seal()
        missing = len(wanted) - len(found)
        if missing:
            log.warning("window restored without %d segments that the log no longer has", missing)
        log.info("window restored segments=%d version=%d", len(self._window), checkpoint.version)

    def _read_again(
        self, wanted: set[SourceRef], ends: Mapping[int, int]
    ) -> dict[SourceRef, Packed]:
        starts: dict[int, int] = {}
        for ref in wanted:
            if ref.partition in ends:
                starts[ref.partition] = min(starts.get(ref.partition, ref.offset), ref.offset)
        open_partitions = set(starts)
        self._assign(starts)
        found: dict[SourceRef, Packed] = {}
        while open_partitions and not self._stopping.is_set():
            for message in self._consumer.consume(_BATCH, _POLL_S):
                if _ends(message, ends):
                    open_partitions.discard(message.partition())
                elif self._is_record(message) and _ref(message) in wanted:
                    scored = self._decode_again(message)
                    if scored is not None:
                        found[_ref(message)] = self._window.pack(_ref(message), scored)
        return found

    def _decode_again(self, message: Any) -> ScoredSegment | None:
        """A record that was in the window once; None if it can't be used any more."""
        try:
            return self._decode(message)
        except RecordError as error:
            log.warning("not restored: %s", error)
            return None

    # Reading

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._take(self._consumer.consume(_BATCH, _POLL_S))
        except KafkaException as error:
            self._failure = self._broker_error(error)
        except ClawstreamError as error:
            self._failure = error
        except Exception as error:  # a thread has nobody else to tell
            log.exception("the feed failed")
            self._failure = LearnerError(f"the feed failed: {error!r}; the log has the traceback")

    def _take(self, messages: Sequence[Any]) -> None:
        """Decode and pack a batch, write its dead letters, then append it."""
        arrived: list[Packed] = []
        rejected: list[tuple[Any, RecordError]] = []
        records = [message for message in messages if self._is_record(message)]
        self._require_order(records)
        for message in records:
            try:
                scored = self._decode(message)
            except RecordError as error:
                rejected.append((message, error))
            else:
                if scored is not None:
                    arrived.append(self._window.pack(_ref(message), scored))
        if self._bury(rejected):
            past_uses = self._past_uses(arrived)
            self.append(arrived, past_uses, records, dead_letters=len(rejected))

    def append(
        self,
        arrived: Sequence[Packed],
        past_uses: Mapping[str, Uses],
        records: Sequence[Any],
        *,
        dead_letters: int,
    ) -> None:
        """Move window and positions together: what arrivals and trainer meet in.

        Args:
            arrived: What enters the window.
            past_uses: Which versions used an earlier revision, by segment.
            records: The Kafka messages that are done with this.
            dead_letters: How many of them could not be used.
        """
        with self._lock:
            # What is here now may leave to make room for those that are added before it.
            known = {p.segment_id: self._uses_so_far(p.segment_id) for p in arrived}
            for packed in arrived:
                uses = known[packed.segment_id] | past_uses.get(packed.segment_id, NEVER)
                self._arrivals[self._window.add(packed, past_uses=uses).value] += 1
            for message in records:
                self._positions[message.partition()] = message.offset() + 1
            self._arrivals["dead_letter"] += dead_letters

    def _past_uses(self, arrived: Sequence[Packed]) -> Mapping[str, Uses]:
        """Which versions used the segments of which a revision comes back.

        The window forgets the uses of what leaves it; a start would know them from the
        registry, so a running learner asks as well.
        """
        returning = [
            packed.segment_id
            for packed in arrived
            if packed.revision > 0 and packed.segment_id not in self._window
        ]
        return self._uses_of(returning) if returning else {}

    def _uses_so_far(self, segment_id: str) -> Uses:
        """What the window knows, and the newest version: it may have been recorded after the
        registry was asked."""
        used, update = self._newest_use
        return self._window.uses(segment_id) | (update if segment_id in used else NEVER)

    def _is_record(self, message: Any) -> bool:
        """False if it is news of the partition.

        Raises:
            KafkaException: The news is an error that waiting does not mend.
        """
        error = message.error()
        if error is None:
            return True
        if error.code() != KafkaError._PARTITION_EOF:
            if not error.retriable():
                raise KafkaException(error)
            log.warning("reading %s: %s", self._topic, error.str())
        return False

    def _require_order(self, records: Sequence[Any]) -> None:
        """Offsets only grow, unless somebody deleted the topic and made it again."""
        for message in records:
            expected = self._positions.get(message.partition(), 0)
            if message.offset() < expected:
                raise self._recreated(
                    f"partition {message.partition()} goes on at offset {message.offset()} after "
                    f"it was read up to {expected}"
                )

    def _decode(self, message: Any) -> ScoredSegment | None:
        """The segment of a record; None if it is a tick or another policy's."""
        if any(key == TICK_HEADER for key, _ in message.headers() or ()):
            return None
        try:
            scored = self._decode_patiently(message.value())
        except RecordError as error:
            raise error.at(message.topic(), message.partition(), message.offset()) from error
        return scored if scored.segment.policy == self._policy else None

    def _decode_patiently(self, value: bytes | None) -> ScoredSegment:
        """Decode, and wait for a schema registry that is away: the record may be fine."""
        while True:
            try:
                return self._codec.decode(value, ScoredSegment)
            except SchemaError as error:
                if self._stopping.is_set():
                    raise
                log.warning("waiting for the schema registry: %s", error)
                self._stopping.wait(_RETRY_S)

    def _bury(self, rejected: Sequence[tuple[Any, RecordError]]) -> bool:
        """Write dead letters. False if stopped before all were: positions must not move then."""
        for message, error in rejected:
            log.warning("dead letter reason=%s %s", error.reason.value, error)
            letter = _dead_letter(message, error, self._clock.now_ms())
            while not self._write(letter):
                if self._stopping.wait(_RETRY_S):
                    return False
        return True

    def _write(self, letter: DeadLetter) -> bool:
        try:
            self._write_whole_or_without_value(letter)
        except BrokerError as error:
            log.warning("dead letter not written, trying again: %s", error)
            return False
        return True

    def _write_whole_or_without_value(self, letter: DeadLetter) -> None:
        try:
            self._writer.write([self._outgoing(letter)])
        except OversizedError:
            self._writer.write([self._outgoing(_without_value(letter))])

    def _outgoing(self, letter: DeadLetter) -> Outgoing:
        value = self._codec.encode(letter, self._dead_letters)
        return Outgoing(topic=self._dead_letters, key=letter.key, value=value)

    # Small things

    def _refs(self, positions: Mapping[int, int]) -> tuple[SourceRef, ...]:
        return tuple(
            SourceRef(topic=self._topic, partition=partition, offset=offset)
            for partition, offset in sorted(positions.items())
        )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _recreated(self, how: str) -> LearnerError:
        return LearnerError(
            f"{self._topic} {how}: the topic was recreated. Restore it, or start with an empty "
            "registry and artifact folder, or another learner.policy"
        )

    def _broker_error(self, error: KafkaException) -> BrokerError:
        return BrokerError(
            f"cannot read {self._topic}: {error.args[0].str()}; check that Kafka is reachable at "
            "kafka.bootstrap_servers"
        )


def _by_partition(refs: Iterable[SourceRef], topic: str) -> dict[int, int]:
    return {ref.partition: ref.offset for ref in refs if ref.topic == topic}


def _ref(message: Any) -> SourceRef:
    return SourceRef(topic=message.topic(), partition=message.partition(), offset=message.offset())


def _ends(message: Any, ends: Mapping[int, int]) -> bool:
    """True once nothing before the partition's end can follow."""
    error = message.error()
    if error is None:
        return bool(message.offset() >= ends[message.partition()])
    return bool(error.code() == KafkaError._PARTITION_EOF)


def _dead_letter(message: Any, error: RecordError, now_ms: int) -> DeadLetter:
    _, timestamp_ms = message.timestamp()
    return DeadLetter(
        stage=STAGE,
        reason=error.reason,
        message=str(error),
        topic=message.topic(),
        partition=message.partition(),
        offset=message.offset(),
        time=now_ms,
        key=message.key(),
        value=message.value(),
        headers=tuple(RecordHeader(key=k, value=v) for k, v in message.headers() or ()),
        timestamp=timestamp_ms,
    )


def _without_value(letter: DeadLetter) -> DeadLetter:
    """The letter of a record that fills its topic's limit: its coordinates find value and
    headers."""
    return DeadLetter(
        stage=letter.stage,
        reason=letter.reason,
        message=letter.message,
        topic=letter.topic,
        partition=letter.partition,
        offset=letter.offset,
        time=letter.time,
        key=letter.key,
        timestamp=letter.timestamp,
        attributes={"value_omitted": f"{len(letter.value or b'')} bytes, too large to repeat"},
    )
