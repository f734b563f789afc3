"""The whole aligner without any framework: what the rivals run, and what is expected.

The same machine, merger and codecs as the real worker's; only the framework around differs.
It is as cheap as it can be, so that no rival is handicapped: no counters, no dead letters
(a bench's log gives no reason for one), and the clock is moved by records alone but at ticks,
for every arrival runs what was due before it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping

from processors.bench.log import LogRecord, Side
from processors.feedback_align import machine
from processors.feedback_align.model import Source
from processors.feedback_align.watermark import Merger, Payload
from streams.contracts import DialogueTurn, FeedbackEvent
from streams.errors import StateError
from streams.serde import Codec
from streams.settings import AlignSettings

_BATCH_RECORDS = 500

Output = tuple[bytes, bytes]
"""Key and value of a segment."""


class PlainAligner:
    """The aligner over one partition of both topics.

    Args:
        partition: The partition.
        turns: The topic of turns.
        feedback: The topic of feedback.
        codec: Reads and writes records.
        settings: The rules.
    """

    def __init__(
        self, partition: int, turns: str, feedback: str, codec: Codec, settings: AlignSettings
    ) -> None:
        self._turns = turns
        self._codec = codec
        self._settings = settings
        self._state = machine.new_state(Source(turns, feedback, partition))
        self._merger = Merger(partition, turns_topic=turns, feedback_topic=feedback)

    def offer(self, topic: str, offset: int, timestamp_ms: int, value: bytes | None) -> None:
        """Take the next record of a topic; a tick if it has no value."""
        payload: Payload = None
        if value is not None:
            is_turn = topic == self._turns
            decode = self._codec.decode
            payload = decode(value, DialogueTurn) if is_turn else decode(value, FeedbackEvent)
        self._merger.offer(topic, offset, timestamp_ms, payload)

    def drain(self, *, advance: bool) -> list[Output]:
        """Apply what can be applied now.

        Args:
            advance: Whether to do what is due by now, too, and not only at the next arrival.

        Returns:
            The segments that closed.

        Raises:
            StateError: A record was rejected, which none of a bench's log should be.
        """
        outputs: list[Output] = []
        for event in self._merger.drain():
            if advance or isinstance(event, machine.Arrival):
                self._state, effects = machine.step(self._state, event, self._settings)
                for effect in effects:
                    if isinstance(effect, machine.EmitSegment):
                        value = self._codec.encode(effect.segment)
                        outputs.append((effect.key.encode(), value))
                    elif isinstance(effect, machine.Reject):
                        raise StateError(f"the bench's log has a bad record: {effect.message}")
        return outputs

    def take(self, topic: str, offset: int, timestamp_ms: int, value: bytes | None) -> list[Output]:
        """Take one record and apply what can be applied."""
        self.offer(topic, offset, timestamp_ms, value)
        return self.drain(advance=value is None)

    def changes(self) -> Iterable[tuple[str, bytes | None]]:
        """What a store must hold of what changed since the last call; None means forgotten."""
        for key, value in machine.take_changes(self._state).items():
            yield "/".join(map(str, key)), value

    def forget_changes(self) -> None:
        """Keep no note of what changed: the state is in memory alone."""
        # Not ``take_changes``: it would encode them.
        self._state.changed.clear()
        self._state.forgotten.clear()


def expected_outputs(
    log: Iterable[LogRecord], names: Mapping[Side, str], codec: Codec, settings: AlignSettings
) -> Counter[bytes]:
    """The multiset of outputs (see :func:`fingerprint`) that a log must give.

    Args:
        log: All of it.
        names: The topic of each side.
        codec: Reads and writes records.
        settings: The rules.
    """
    aligners: dict[int, PlainAligner] = {}
    found: Counter[bytes] = Counter()
    for record in log:
        aligner = aligners.get(record.partition)
        if aligner is None:
            aligner = aligners[record.partition] = PlainAligner(
                record.partition, names["turns"], names["feedback"], codec, settings
            )
        outputs = aligner.take(names[record.side], record.offset, record.arrival_ms, record.value)
        aligner.forget_changes()
        found.update(fingerprint(key, value) for key, value in outputs)
    return found


def run_in_batches(
    log: Iterable[LogRecord], names: Mapping[Side, str], codec: Codec, settings: AlignSettings
) -> None:
    """Run over a log as the worker does: many records at once, then their changes encoded.

    Arguments as :func:`expected_outputs`.
    """
    aligners: dict[int, PlainAligner] = {}
    offered: Counter[int] = Counter()
    for record in log:
        partition = record.partition
        aligner = aligners.get(partition)
        if aligner is None:
            aligner = aligners[partition] = PlainAligner(
                partition, names["turns"], names["feedback"], codec, settings
            )
        aligner.offer(names[record.side], record.offset, record.arrival_ms, record.value)
        offered[partition] += 1
        if offered[partition] % _BATCH_RECORDS == 0 or record.value is None:
            aligner.drain(advance=True)
            for _ in aligner.changes():
                pass


def fingerprint(key: bytes, value: bytes) -> bytes:
    """A digest of an output; its value holds segment id and revision."""
    return hashlib.blake2b(value, digest_size=16, key=key[:64]).digest()


__all__ = ["Output", "PlainAligner", "expected_outputs", "fingerprint", "run_in_batches"]
