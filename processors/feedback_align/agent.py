"""The aligner's shell over its pure parts: decode, merge, step, hand over.

Nothing is decided here about dialogue. What is: a record that cannot be used becomes a dead
letter of the step that passes it, and one that came to the wrong partition is published again
to the right one, once. Either only moves the clock, as a tick does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from processors.feedback_align import codec as state_codec
from processors.feedback_align import machine
from processors.feedback_align.watermark import Merger, Position
from processors.runtime import deadletters
from processors.runtime.decoding import decode
from processors.runtime.records import Outcome, Output, RawRecord, Record, is_tick
from streams import metrics as names
from streams.contracts import (
    DeadLetter,
    DeadLetterReason,
    DialogueTurn,
    FeedbackEvent,
    TrajectorySegment,
)
from streams.errors import InvalidRecordError, OversizedError, RecordError
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
        input_max_bytes: The largest record that the input topics take; as large as outputs
            if None.
    """

    def __init__(
        self,
        partition: int,
        partitions: int,
        settings: AlignSettings,
        codec: Codec,
        metrics: ProcessorMetrics,
        max_bytes: int,
        topics: AlignTopics | None = None,
        *,
        input_max_bytes: int | None = None,
    ) -> None:
        self._partition = partition
        self._partitions = partitions
        self._settings = settings
        self._codec = codec
        self._metrics = metrics
        self._max_bytes = max_bytes
        self._input_max_bytes = max_bytes if input_max_bytes is None else input_max_bytes
        self._topics = topics or AlignTopics()
        self._state = machine.new_state()
        self._merger = self._new_merger({})
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
        sessions = (state_codec.decode_session(value) for _, value in entries)
        self._state = machine.restore_state(sessions, clock_ms, self._settings)
        self._merger = self._new_merger(positions)

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
        outputs: list[Output] = []
        inputs = self._merger.drain(limit)
        arrivals = 0
        for event in inputs:
            self._state, effects = machine.step(self._state, event, self._settings)
            for effect in effects:
                outputs.extend(self._perform(effect))
            if isinstance(event, machine.Arrival):
                arrivals += 1
                self._raw.pop((event.topic, event.offset), None)
        positions = self._merger.positions()
        outputs.extend(self._passed(positions))
        self._show()
        return Outcome(
            applied={topic: at.offset for topic, at in positions.items() if at.offset >= 0},
            outputs=outputs,
            changes=self._changes(),
            meta=state_codec.encode_partition(self._state.clock_ms, positions),
            records=arrivals,
            more=arrivals >= limit,
        )

    def buffered(self, topic: str) -> int:
        """See ``PartitionProcessor``."""
        return self._merger.buffered(topic)

    def needs_tick(self, now_ms: int) -> bool:
        """See ``PartitionProcessor``."""
        return self._merger.needs_tick(machine.next_due_ms(self._state), now_ms)

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
            right = partition_for(decoded.session_id.encode(), self._partitions)
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
        changed, forgotten = machine.take_changes(self._state)
        changes: dict[bytes, bytes | None] = {
            encode_key(key): state_codec.encode_session(session) for key, session in changed.items()
        }
        changes.update((encode_key(key), None) for key in sorted(forgotten))
        return changes

    def _show(self) -> None:
        partition = str(self._partition)
        self._metrics.set(names.OPEN_SESSIONS, len(self._state.sessions), partition=partition)
        if self._state.clock_ms > 0:
            self._metrics.set(
                names.PARTITION_CLOCK, self._state.clock_ms / 1000, partition=partition
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


def encode_key(key: tuple[str, str]) -> bytes:
    """The changelog key of a session: its policy and id."""
    return msgspec.msgpack.encode(key)


__all__ = ["AlignProcessor", "AlignTopics", "encode_key"]
