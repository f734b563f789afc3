"""Merging the two input topics of one partition into the machine's inputs. Pure.

The log's order is (arrival, turns before feedback, offset). A record is handed out once no
record that stands before it can still appear, which each topic's running maximum tells: the
next record of a topic arrives at its running maximum or later. So a turn that arrives at t
waits until feedback was read up to t, feedback that arrives at t until turns were read past
t, and the clock may go to w once both topics were read past w. A silent topic holds back the
other; ticks (records with a null value, read like any other) move it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from processors.feedback_align.machine import Advance, Arrival, Input
from processors.feedback_align.model import NEVER, Position
from streams.contracts import DialogueTurn, FeedbackEvent
from streams.errors import StateError
from streams.topics import FEEDBACK, TURNS

Payload = DialogueTurn | FeedbackEvent | None
"""What a record holds; None for a tick or a record that cannot be used."""


@dataclass(slots=True)
class _Side:
    topic: str
    applied_offset: int
    applied_ms: int
    read_offset: int
    maximum_ms: int
    waiting: deque[tuple[int, int, Payload]] = field(default_factory=deque)

    @classmethod
    def at(cls, topic: str, position: Position) -> _Side:
        offset, maximum_ms = position.offset, position.maximum_ms
        return cls(topic, offset, maximum_ms, offset, maximum_ms)

    def read(self, offset: int, timestamp_ms: int, record: Payload) -> None:
        if offset <= self.read_offset:
            return
        self.read_offset = offset
        self.maximum_ms = max(self.maximum_ms, timestamp_ms)
        self.waiting.append((offset, self.maximum_ms, record))

    def pass_unusable(self) -> None:
        """Go past what only moves the maximum, up to the next record."""
        while self.waiting and self.waiting[0][2] is None:
            self.take()

    def take(self) -> tuple[int, int, Payload]:
        offset, arrival_ms, record = self.waiting.popleft()
        self.applied_offset, self.applied_ms = offset, arrival_ms
        return offset, arrival_ms, record


class Merger:
    """Merges ``dialogue.turns`` and ``dialogue.feedback`` of one partition.

    Args:
        partition: The partition, of both topics.
        positions: Where to go on from, by topic; the beginning if None. Records must be
            offered from the offset after each on; earlier ones are ignored.
        turns_topic: The topic of turns.
        feedback_topic: The topic of feedback.
    """

    def __init__(
        self,
        partition: int,
        positions: Mapping[str, Position] | None = None,
        *,
        turns_topic: str = TURNS,
        feedback_topic: str = FEEDBACK,
    ) -> None:
        self.partition = partition
        self.clock_ms = NEVER
        known = positions or {}
        self._turns, self._feedback = (
            _Side.at(topic, known.get(topic, Position())) for topic in (turns_topic, feedback_topic)
        )

    def offer(self, topic: str, offset: int, timestamp_ms: int, record: Payload) -> None:
        """Take the next record of a topic.

        Args:
            topic: One of the two.
            offset: Rising within the topic; what is not beyond the last is ignored.
            timestamp_ms: The record's Kafka timestamp.
            record: Its value; None if it is a tick or cannot be used: it moves the running
                maximum of its topic, nothing else.

        Raises:
            StateError: The topic is none of the two.
        """
        self._side(topic).read(offset, timestamp_ms, record)

    def drain(self, limit: int | None = None) -> list[Input]:
        """Hand out what can be applied now, in order.

        Args:
            limit: At most so many records; the rest stays for the next call.

        Returns:
            The records, and last an ``Advance`` as far as the clock may go, if it goes any
            further than the last one did.
        """
        return list(self.inputs(limit))

    def inputs(self, limit: int | None = None, pause_ms: int | None = None) -> Iterator[Input]:
        """As :meth:`drain`, one by one: who stops at one is handed what follows next time.

        An ``Advance`` at which its taker stops is not done with, and comes again.

        Args:
            limit: See there.
            pause_ms: With an ``Advance`` before each record that arrives later than this after
                the clock; it changes nothing but where its taker can stop.
        """
        count = 0
        while limit is None or count < limit:
            side = self._next()
            if side is None:
                break
            clock_ms = side.waiting[0][1] - 1
            if pause_ms is not None and clock_ms > self.clock_ms + pause_ms:
                yield from self._advance(clock_ms)
            offset, arrival_ms, record = side.take()
            assert record is not None
            count += 1
            yield Arrival(side.topic, self.partition, offset, arrival_ms, record)
        clock_ms = self._reachable_clock()
        if clock_ms > self.clock_ms:
            yield from self._advance(clock_ms)

    def _advance(self, clock_ms: int) -> Iterator[Advance]:
        yield Advance(clock_ms)
        self.clock_ms = clock_ms

    def _next(self) -> _Side | None:
        """The topic whose next record can be applied now."""
        turns, feedback = self._turns, self._feedback
        turns.pass_unusable()
        feedback.pass_unusable()
        if turns.waiting:
            arrival_ms = turns.waiting[0][1]
            if not feedback.waiting or arrival_ms <= feedback.waiting[0][1]:
                return turns if feedback.maximum_ms >= arrival_ms else None
        elif not feedback.waiting or turns.maximum_ms <= feedback.waiting[0][1]:
            return None
        return feedback

    def _reachable_clock(self) -> int:
        """The clock as far as both topics are read, and no record waits before it."""
        sides = (self._turns, self._feedback)
        for side in sides:
            side.pass_unusable()
        clock_ms = min(side.maximum_ms for side in sides) - 1
        arrivals = [side.waiting[0][1] - 1 for side in sides if side.waiting]
        return min(clock_ms, *arrivals) if arrivals else clock_ms

    def buffered(self, topic: str) -> int:
        """How many records of a topic wait."""
        return len(self._side(topic).waiting)

    def positions(self) -> dict[str, Position]:
        """How far each topic is applied: to be kept with the state it was applied to.

        A restart re-reads what was offered but not handed out, with the same arrivals.
        """
        return {
            side.topic: Position(side.applied_offset, side.applied_ms)
            for side in (self._turns, self._feedback)
        }

    def maxima(self) -> dict[str, int]:
        """The running maximum of each topic as read; ``NEVER`` before its first record."""
        return {side.topic: side.maximum_ms for side in (self._turns, self._feedback)}

    @property
    def lagging_topic(self) -> str | None:
        """The topic that holds the clock back; None if both stand equal."""
        turns, feedback = self._turns, self._feedback
        if turns.maximum_ms == feedback.maximum_ms:
            return None
        return turns.topic if turns.maximum_ms < feedback.maximum_ms else feedback.topic

    def tick_after_ms(self, next_due_ms: int | None) -> int | None:
        """After which time silent topics must be moved. Ask after a drain without limit.

        Args:
            next_due_ms: When the machine's next action is due; None if none is.

        Returns:
            ``NEVER``, which is before any time, if records wait for the other side; the due
            time of something that the clock has not reached; None if there is neither.
        """
        if self._turns.waiting or self._feedback.waiting:
            return NEVER
        return next_due_ms if next_due_ms is not None and next_due_ms > self.clock_ms else None

    def _side(self, topic: str) -> _Side:
        for side in (self._turns, self._feedback):
            if side.topic == topic:
                return side
        raise StateError(
            f"topic {topic} is not merged here (partition={self.partition}): offer records of "
            f"{self._turns.topic} and {self._feedback.topic} only"
        )


__all__ = ["Merger", "Payload", "Position"]
