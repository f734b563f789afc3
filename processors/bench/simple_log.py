"""Plain conversations in any number, for benches of size: cheap to make, all alike. Pure.

Every conversation has as many turns, user and reply in turn, of about as many bytes. Arrivals
follow each other at a steady rate, so that how long a log is in time is known beforehand.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from processors.bench.dialogue import WORDS
from processors.bench.log import TICK_KEY, LogRecord, Side
from streams.contracts import DialogueTurn, FeedbackEvent, FeedbackKind, Role
from streams.kafka.clients import partition_for
from streams.serde import Codec

_POOL = 100_000


@dataclass(frozen=True, slots=True)
class Shape:
    """What a conversation is like.

    Attributes:
        turns: Of each conversation, replies included; an even number ends with a reply.
        content_bytes: Of each turn.
        feedback_every: One of so many replies is rated.
    """

    turns: int
    content_bytes: int = 300
    feedback_every: int = 3


class SimpleLog:
    """Writes records one after another, and knows the clock and the offsets.

    Args:
        shape: What conversations are like.
        partitions: Of each topic.
        codec: Writes records.
        begin_ms: The first arrival.
        records_per_s: How dense arrivals are.
    """

    def __init__(
        self, shape: Shape, partitions: int, codec: Codec, begin_ms: int, records_per_s: float
    ) -> None:
        self._shape = shape
        self._partitions = partitions
        self._codec = codec
        self._step_ms = 1000 / records_per_s
        self._at_ms = float(begin_ms)
        self._ends: dict[tuple[Side, int], int] = {}
        rng = random.Random(1)
        # Words, in which the reward's rules find something to read.
        self._text = " ".join(rng.choices(WORDS, k=_POOL // 4))
        self._replies = 0

    @property
    def at_ms(self) -> int:
        """The arrival of the last record."""
        return int(self._at_ms)

    def turn(self, session: str, number: int, *, ends: bool = False) -> Iterator[LogRecord]:
        """A conversation's turn, counted from 0, and the feedback on it if there is any."""
        at_ms = self._next_ms()
        reply = number % 2 == 1
        start = (self._ends.get(("turns", 0), 0) * 37) % (_POOL - self._shape.content_bytes)
        turn_id = f"{session}-t{number}"
        record = DialogueTurn(
            event_id=f"{turn_id}-e",
            session_id=session,
            turn_id=turn_id,
            parent_turn_id=f"{session}-t{number - 1}" if number else None,
            role=Role.ASSISTANT if reply else Role.USER,
            content=self._text[start : start + self._shape.content_bytes],
            event_time=at_ms,
            source="gateway",
            user_id=session,
            session_done=ends,
            policy_version=1 if reply else None,
        )
        yield self._record("turns", session, at_ms, self._codec.encode(record))
        self._replies += reply
        if reply and self._replies % self._shape.feedback_every == 0:
            yield self._feedback(session, turn_id)

    def tick(self, after_ms: int) -> Iterator[LogRecord]:
        """Move the clock of every partition on by this."""
        self._at_ms += after_ms
        sides: tuple[Side, Side] = ("turns", "feedback")
        for side in sides:
            for partition in range(self._partitions):
                offset = self._offset(side, partition)
                yield LogRecord(side, partition, offset, self.at_ms, TICK_KEY, None)

    def probes(self, name: str, settle_ms: int) -> Iterator[LogRecord]:
        """One short conversation for each partition, and ticks that close it."""
        for partition in range(self._partitions):
            number = 0
            while partition_for(f"{name}-{number}".encode(), self._partitions) != partition:
                number += 1
            yield from self.turn(f"{name}-{number}", 0)
            yield from self.turn(f"{name}-{number}", 1, ends=True)
        yield from self.tick(settle_ms + 1_000)

    def _feedback(self, session: str, turn_id: str) -> LogRecord:
        at_ms = self._next_ms()
        record = FeedbackEvent(
            event_id=f"{turn_id}-f",
            session_id=session,
            event_time=at_ms,
            kind=FeedbackKind.THUMB,
            source="gateway",
            turn_id=turn_id,
            value=1.0,
            user_id=session,
        )
        return self._record("feedback", session, at_ms, self._codec.encode(record))

    def _next_ms(self) -> int:
        self._at_ms += self._step_ms
        return int(self._at_ms)

    def _record(self, side: Side, session: str, at_ms: int, value: bytes) -> LogRecord:
        key = session.encode()
        partition = partition_for(key, self._partitions)
        return LogRecord(side, partition, self._offset(side, partition), at_ms, key, value)

    def _offset(self, side: Side, partition: int) -> int:
        offset = self._ends.get((side, partition), 0)
        self._ends[side, partition] = offset + 1
        return offset


__all__ = ["Shape", "SimpleLog"]
