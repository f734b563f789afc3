"""The aligner's shell over its pure parts: decode, merge, step, hand over.

Nothing is decided here about dialogue. What is: a record that cannot be used becomes a dead
letter of the step that passes it, and one that came to the wrong partition is published again
to the right one, once. Either only moves the clock, as a tick does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec
from msgspec.structs import replace

from processors.feedback_align import codec as state_codec
from processors.feedback_align import machine
from processors.feedback_align.bodies import CachedBodies
from processors.feedback_align.model import HOT_SESSIONS, EntryKey, Position, Source
from processors.feedback_align.watermark import Merger
from processors.runtime import deadletters
from processors.runtime.decoding import decode
from processors.runtime.records import LogReader, Outcome, Output, RawRecord, Record, is_tick
from processors.runtime.status import OpenSession, ProcessorStatus
from streams import metrics as names
from streams.contracts import (
    DeadLetter,
    DeadLetterReason,
    DialogueTurn,
    FeedbackEvent,
    TrajectorySegment,
)
from streams.errors import InvalidRecordError, OversizedError, RecordError, StateError
from streams.kafka.clients import partition_for
from streams.metrics import ProcessorMetrics
from streams.serde import Codec
from streams.settings import AlignSettings
from streams.topics import DEAD_LETTERS, FEEDBACK, SEGMENTS, TURNS

STAGE = "feedback_align"


ORIGIN_TOPIC = "clawstream-origin-topic"
ORIGIN_PARTITION = "clawstream-origin-partition"
ORIGIN_OFFSET = "clawstream-origin-offset"
"""Headers of a record published again: where it was found misplaced."""


HOME_CACHE = 100_000
"""Sessions whose partition is remembered."""

BODY_CACHE_BYTES = 64 * 1024 * 1024

AHEAD_SESSIONS = 100
"""When content must be read back, that of so many sessions that are due next comes with it."""

PAUSE_MS = 1_000
"""So long without a record enough may be due to fill more than one outcome."""

OUTCOME_BYTES = 16 * 1024 * 1024
"""About how much one outcome puts out: it is written in one transaction, which Kafka gives up
after a minute."""

OUTCOME_FETCHED = 1_000
"""About how many records are read back for one outcome."""


@dataclass(frozen=True, slots=True)
class AlignTopics:
    """The topics the aligner works on."""

    turns: str = TURNS
    feedback: str = FEEDBACK
    segments: str = SEGMENTS
    dead_letters: str = DEAD_LETTERS


class AlignProcessor:
    """One partition of the aligner (``runtime.records.PartitionProcessor``).

    Args:
        partition: The input partition.
        partitions: How many there are.
        settings: The rules.
        codec: Reads and writes records.
        metrics: Counters.
        max_bytes: The largest record that segments and dead letters may be.
        topics: Where records come from and go to.
        log: Reads back the content that a segment needs and memory does not have.
        input_max_bytes: The largest record that the input topics take; as large as outputs
            if None.
        body_cache_bytes: About how much content to keep in memory.
        hot_sessions: How many sessions to keep as objects.
    """

    def __init__(
        self,
        partition: int,
        partitions: int,
        settings: AlignSettings,
        codec: Codec,
        metrics: ProcessorMetrics,
        max_bytes: int,
        log: LogReader,
        topics: AlignTopics | None = None,
        *,
        input_max_bytes: int | None = None,
        body_cache_bytes: int = BODY_CACHE_BYTES,
        hot_sessions: int = HOT_SESSIONS,
    ) -> None:
        self._partition = partition
        self._partitions = partitions
        self._settings = settings
        self._codec = codec
        self._metrics = metrics
        self._max_bytes = max_bytes
        self._input_max_bytes = max_bytes if input_max_bytes is None else input_max_bytes
        self._topics = names = topics or AlignTopics()
        self._log = log
        self._bodies = CachedBodies(
            (names.turns, names.feedback),
            self._turns,
            self._feedback,
            body_cache_bytes,
            lambda: machine.content_due(self._state, AHEAD_SESSIONS),
        )
        source = Source(names.turns, names.feedback, partition)
        self._state = machine.new_state(source, self._bodies, hot_sessions)
        self._home = lru_cache(HOME_CACHE)(
            lambda session_id: partition_for(session_id.encode(), partitions)
        )
        self._merger = self._new_merger({})
        self._status = self._new_status()
        # What was fed and not passed yet: the records as they came, and what to do about
        # those that are no input of the machine once they are passed.
        self._raw: dict[tuple[str, int], RawRecord] = {}
        self._aside: dict[str, deque[tuple[int, Output]]] = {
            topic: deque() for topic in (self._topics.turns, self._topics.feedback)
        }

    def restore(self, entries: Iterable[tuple[bytes, bytes]], meta: bytes | None) -> None:
        """See ``PartitionProcessor``."""
        if meta is None:
            return
        clock_ms, positions = state_codec.decode_partition(meta)
        named = ((decode_key(key), value) for key, value in entries)
        self._state = machine.restore_state(self._state, named, clock_ms)
        self._merger = self._new_merger(positions)
        self._status = self._new_status()

    def feed(self, topic: str, records: Sequence[RawRecord]) -> None:
        """See ``PartitionProcessor``.

        Raises:
            SchemaError: The schema registry cannot be reached.
        """
        for record in records:
            payload = None if is_tick(record) else self._payload(topic, record)
            if payload is not None:
                self._raw[topic, record.offset] = record
            self._merger.offer(topic, record.offset, record.timestamp, payload)

    def drain(self, limit: int) -> Outcome:
        """See ``PartitionProcessor``."""
        portion = _Portion(limit, self._bodies)
        outputs = portion.outputs
        arrivals = 0
        for event in self._merger.inputs(limit, PAUSE_MS):
            if isinstance(event, machine.Arrival):
                self._step(event, portion)
                arrivals += 1
                self._raw.pop((event.topic, event.offset), None)
            else:
                self._advance(event.clock_ms, portion)
            if portion.is_full():
                more = True
                break
        else:
            more = arrivals >= limit
        positions = self._merger.positions()
        outputs.extend(self._passed(positions))
        changes = self._changes()
        self._status = self._new_status()
        return Outcome(
            applied={topic: at.offset for topic, at in positions.items() if at.offset >= 0},
            outputs=outputs,
            changes=changes,
            meta=state_codec.encode_partition(self._state.clock_ms, positions),
            due_ms=portion.due_ms,
            records=arrivals,
            more=more,
        )

    def _advance(self, clock_ms: int, portion: _Portion) -> None:
        """Do what is due by then, until the portion is full."""
        while (due_ms := machine.next_due_ms(self._state)) is not None and due_ms <= clock_ms:
            self._step(machine.Advance(due_ms), portion)
            if portion.is_full():
                return
        self._step(machine.Advance(clock_ms), portion)

    def _step(self, event: machine.Input, portion: _Portion) -> None:
        self._state, effects = machine.step(self._state, event, self._settings)
        for effect in effects:
            for output in self._perform(effect):
                portion.add(output)
            if isinstance(effect, machine.EmitSegment):
                portion.due_ms.append(effect.segment.closed_at)

    def buffered(self, topic: str) -> int:
        """See ``PartitionProcessor``."""
        return self._merger.buffered(topic)

    def status(self) -> ProcessorStatus:
        """See ``PartitionProcessor``."""
        return self._status

    def _new_status(self) -> ProcessorStatus:
        state = self._state
        oldest = None
        if (found := machine.oldest_open(state)) is not None:
            since_ms, (policy, session_id) = found
            due_ms = machine.due_of(state, (policy, session_id))
            oldest = OpenSession(
                policy=policy, session_id=session_id, since_ms=since_ms, due_ms=due_ms
            )
        next_due_ms = machine.next_due_ms(state)
        return ProcessorStatus(
            clock_ms=state.clock_ms if state.clock_ms > 0 else None,
            sessions=len(state.sessions) + len(state.packed),
            open_sessions=state.open_sessions,
            oldest_open=oldest,
            next_due_ms=next_due_ms,
            tick_after_ms=self._merger.tick_after_ms(next_due_ms),
            state_entries=state.entries,
            state_bytes=state.entry_bytes,
        )

    def _new_merger(self, positions: dict[str, Position]) -> Merger:
        return Merger(
            self._partition,
            positions,
            turns_topic=self._topics.turns,
            feedback_topic=self._topics.feedback,
        )

    # Records

    def _payload(self, topic: str, record: RawRecord) -> DialogueTurn | FeedbackEvent | None:
        """The decoded record; None if it must go elsewhere, which is then noted."""
        try:
            decoded = self._decode(topic, record)
            right = self._home(decoded.session_id)
            if right == self._partition:
                return decoded
            self._set_aside(record, self._republished(record, decoded.session_id, right))
        except RecordError as error:
            self._set_aside(record, self._dead(deadletters.of_record(record, error, STAGE)))
        return None

    def _decode(self, topic: str, record: RawRecord) -> DialogueTurn | FeedbackEvent:
        if topic == self._topics.turns:
            return decode(self._codec, record, DialogueTurn, self._max_bytes)
        return decode(self._codec, record, FeedbackEvent, self._max_bytes)

    def _turns(self, offsets: Sequence[int]) -> Iterator[tuple[int, DialogueTurn]]:
        for record in self._log.read(self._topics.turns, self._partition, offsets):
            yield record.offset, decode(self._codec, record, DialogueTurn, self._max_bytes)

    def _feedback(self, offsets: Sequence[int]) -> Iterator[tuple[int, FeedbackEvent]]:
        for record in self._log.read(self._topics.feedback, self._partition, offsets):
            yield record.offset, decode(self._codec, record, FeedbackEvent, self._max_bytes)

    def _set_aside(self, record: RawRecord, output: Output) -> None:
        self._aside[record.topic].append((record.offset, output))

    def _passed(self, positions: dict[str, Position]) -> Iterable[Output]:
        """What was set aside of the records that are passed now."""
        for topic, waiting in self._aside.items():
            while waiting and waiting[0][0] <= positions[topic].offset:
                yield waiting.popleft()[1]

    def _republished(self, record: RawRecord, session_id: str, partition: int) -> Output:
        """The record once more, for the partition it belongs on.

        Raises:
            InvalidRecordError: It was published again before.
            OversizedError: With its new headers its topic would not take it.
        """
        if any(name == ORIGIN_TOPIC for name, _ in record.headers):
            raise InvalidRecordError(
                f"its session belongs to partition {partition}, and the record was "
                "published again once already: is its topic's partition count the inputs'?"
            )
        origin = (
            (ORIGIN_TOPIC, record.topic.encode()),
            (ORIGIN_PARTITION, str(record.partition).encode()),
            (ORIGIN_OFFSET, str(record.offset).encode()),
        )
        again = Output(
            topic=record.topic,
            key=session_id.encode(),
            value=record.value,
            partition=partition,
            headers=(*record.headers, *origin),
        )
        if again.most_bytes() > self._input_max_bytes:
            raise OversizedError(
                f"it belongs to partition {partition}, and is too large to be published there "
                "with the headers that say where it comes from"
            )
        self._metrics.add(names.MISPLACED, topic=record.topic)
        return again

    # Effects

    def _perform(self, effect: machine.Effect) -> list[Output]:
        if isinstance(effect, machine.EmitSegment):
            return [self._segment(effect)]
        if isinstance(effect, machine.Reject):
            return [self._rejected(effect)]
        if isinstance(effect, machine.DropDuplicate):
            self._metrics.add(names.DUPLICATES)
        elif isinstance(effect, machine.Late):
            self._metrics.add(names.LATE, topic=effect.topic)
        elif isinstance(effect, machine.HeldBack):
            self._metrics.add(names.HELD_BACK, effect.count)
        return []

    def _segment(self, effect: machine.EmitSegment) -> Output:
        segment = effect.segment
        if segment.revision == 0:
            self._metrics.add(names.SEGMENTS, closed_by=segment.closed_by)
        else:
            self._metrics.add(names.REVISIONS)
        key = effect.key.encode()
        value = self._codec.encode(segment, self._topics.segments)
        if len(key) + len(value) > self._max_bytes - deadletters.OVERHEAD_BYTES:
            return self._dead(_too_large(segment, key, value))
        return Output(topic=self._topics.segments, key=key, value=value)

    def _rejected(self, effect: machine.Reject) -> Output:
        arrival = effect.arrival
        raw = self._raw.get((arrival.topic, arrival.offset))
        if raw is not None:
            return self._dead(
                deadletters.letter(raw, effect.reason, effect.message, STAGE, effect.time_ms)
            )
        # It was accepted long ago: its bytes are gone, its content is not.
        again = Record(
            topic=arrival.topic,
            partition=arrival.partition,
            offset=arrival.offset,
            timestamp=arrival.arrival_ms,
            key=arrival.record.session_id.encode(),
            value=self._codec.encode(arrival.record, arrival.topic),
        )
        dead = deadletters.letter(again, effect.reason, effect.message, STAGE, effect.time_ms)
        return self._dead(replace(dead, attributes={"value": "encoded again"}))

    def _dead(self, dead: DeadLetter) -> Output:
        self._metrics.add(names.DEAD_LETTERS, reason=dead.reason)
        return deadletters.to_output(dead, self._codec, self._max_bytes, self._topics.dead_letters)

    # State

    def _changes(self) -> dict[bytes, bytes | None]:
        changes = machine.take_changes(self._state)
        return {encode_key(key): value for key, value in changes.items()}


class _Portion:
    """What one outcome puts out, and whether that is enough for one.

    Args:
        limit: Of outputs, about.
        bodies: Where content is read back.
    """

    def __init__(self, limit: int, bodies: CachedBodies) -> None:
        self.outputs: list[Output] = []
        self.due_ms: list[int] = []
        self._limit = limit
        self._bytes = 0
        self._bodies = bodies
        self._fetched = bodies.fetched

    def add(self, output: Output) -> None:
        self.outputs.append(output)
        self._bytes += len(output.value or b"")

    def is_full(self) -> bool:
        return (
            len(self.outputs) >= self._limit
            or self._bytes >= OUTCOME_BYTES
            or self._bodies.fetched - self._fetched >= OUTCOME_FETCHED
        )


def _too_large(segment: TrajectorySegment, key: bytes, value: bytes) -> DeadLetter:
    last = segment.lineage[-1]
    return DeadLetter(
        stage=STAGE,
        reason=DeadLetterReason.OVERSIZED,
        message=(
            f"segment {segment.segment_id} revision {segment.revision} of session "
            f"{segment.session_id} has {len(value)} bytes, more than fit a record; raise "
            "kafka.max_message_bytes and the topic's max.message.bytes, or lower "
            "align.max_bytes. The coordinates are those of its last source record"
        ),
        topic=last.topic,
        partition=last.partition,
        offset=last.offset,
        time=segment.closed_at,
        key=key,
        value=value,
    )


_encode_key = msgspec.msgpack.Encoder().encode
_decode_key = msgspec.msgpack.Decoder(tuple[str, str, int]).decode


def encode_key(key: EntryKey) -> bytes:
    """The changelog key of an entry."""
    return _encode_key(key)


def decode_key(key: bytes) -> EntryKey:
    """The entry that a changelog key names.

    Raises:
        StateError: It names none.
    """
    try:
        return _decode_key(key)
    except msgspec.DecodeError as error:
        raise StateError(
            f"{key[:64]!r} is no key of an aligner's state ({error}): who else writes to it?"
        ) from error


__all__ = ["AlignProcessor", "AlignTopics", "decode_key", "encode_key"]
