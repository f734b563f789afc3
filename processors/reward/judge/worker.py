"""Reads segments, has them judged and publishes the judgements as feedback.

It stands beside the stream, not in it: nothing waits for it. Segments are read in a consumer
group of its own and committed once their judgements are in Kafka; a crash in between judges
them again, from the cache, into equal events, which the aligner drops.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from confluent_kafka import KafkaException, TopicPartition

from processors.reward.judge.service import JudgeService
from processors.reward.judge.verdicts import newest_of
from streams import metrics as names
from streams.clock import Clock, SystemClock
from streams.contracts import FeedbackEvent, TrajectorySegment
from streams.errors import BrokerError, RecordError
from streams.kafka.clients import make_consumer, make_producer, resolve_bootstrap
from streams.metrics import ProcessorMetrics
from streams.serde import Codec
from streams.settings import Settings
from streams.topics import FEEDBACK, SEGMENTS

if TYPE_CHECKING:
    from confluent_kafka import Message

logger = logging.getLogger(__name__)

GROUP = "judge"
POLL_S = 0.5
FLUSH_S = 30.0


class JudgeWorker:
    """Runs a judge over ``trajectory.segments``.

    Args:
        settings: All settings.
        service: Judges segments.
        codec: Reads and writes records.
        metrics: Counters.
        group: Its consumer group.
        segments: Where segments are read.
        feedback: Where judgements go.
        clock: Tells what is too old to be judged.
    """

    def __init__(
        self,
        settings: Settings,
        service: JudgeService,
        codec: Codec,
        metrics: ProcessorMetrics,
        *,
        group: str = GROUP,
        segments: str = SEGMENTS,
        feedback: str = FEEDBACK,
        clock: Clock | None = None,
    ) -> None:
        self._settings = settings
        self._service = service
        self._codec = codec
        self._metrics = metrics
        self._segments = segments
        self._feedback = feedback
        self._clock = clock or SystemClock()
        bootstrap = resolve_bootstrap(settings)
        self._consumer = make_consumer(settings.kafka, bootstrap, group=group)
        self._producer = make_producer(settings.kafka, bootstrap)
        self._consumer.subscribe([segments])

    async def run(self, stop: asyncio.Event) -> None:
        """Judge until ``stop`` is set.

        Raises:
            BrokerError: Kafka did not take a judgement.
            JudgeError: The cache cannot be used.
        """
        try:
            while not stop.is_set():
                read = await asyncio.to_thread(
                    self._consumer.consume, self._settings.judge.max_waiting, POLL_S
                )
                if read:
                    await self._judge(read, stop)
        finally:
            await asyncio.to_thread(self._consumer.close)

    async def _judge(self, read: Sequence[Message], stop: asyncio.Event) -> None:
        segments = self._in_time(newest_of(filter(None, map(self._segment, read))))
        failures: list[str] = []
        work = asyncio.ensure_future(
            asyncio.gather(*(self._judge_one(segment, failures) for segment in segments))
        )
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await self._wait(work, stopped)
            if not work.done():
                return
            work.result()
            await asyncio.to_thread(self._flush, failures)
            await asyncio.to_thread(self._commit, read)
        finally:
            for task in (work, stopped):
                task.cancel()

    def _in_time(self, segments: Sequence[TrajectorySegment]) -> Sequence[TrajectorySegment]:
        """Those that a judgement can still reach: the aligner takes none beyond its horizon."""
        since_ms = self._clock.now_ms() - self._settings.align.horizon_ms
        found = [segment for segment in segments if segment.first_closed_at >= since_ms]
        late = len(segments) - len(found)
        if late:
            self._metrics.add(names.JUDGE_LATE, late)
            logger.warning(
                "%d segments are not judged: they closed more than align.horizon_ms (%d ms) ago",
                late,
                self._settings.align.horizon_ms,
            )
        return found

    async def _judge_one(self, segment: TrajectorySegment, failures: list[str]) -> None:
        """Publish what is found of a segment as soon as it is: others may take much longer."""
        for event in await self._service.judge(segment):
            self._produce(event, failures)

    async def _wait(
        self,
        work: asyncio.Future[list[None]],
        stopped: asyncio.Future[Literal[True]],
    ) -> None:
        """Wait for the judge, however long it takes; the group sees that we live."""
        held = self._consumer.assignment()
        self._consumer.pause(held)
        while not work.done() and not stopped.done():
            await asyncio.wait((work, stopped), timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            message = await asyncio.to_thread(self._consumer.poll, 0.0)
            if message is not None and message.error() is None:
                # Of partitions that came in the meantime: they are read from there again.
                self._consumer.seek(_place(message))
        held = self._consumer.assignment()
        if held:
            self._consumer.resume(held)

    def _segment(self, message: Message) -> TrajectorySegment | None:
        value = message.value()
        if message.error() is not None or value is None:
            return None
        try:
            return self._codec.decode(value, TrajectorySegment)
        except RecordError as error:
            # The reward worker sends it to the dead letters; one report is enough.
            logger.warning("a segment cannot be read: %s", error)
            return None

    def _produce(self, event: FeedbackEvent, failures: list[str]) -> None:
        def delivered(error: object, _message: object) -> None:
            if error is not None:
                failures.append(str(error))

        value = self._codec.encode(event, self._feedback)
        while True:
            try:
                self._producer.produce(
                    self._feedback, key=event.session_id, value=value, on_delivery=delivered
                )
                break
            except BufferError:
                self._producer.poll(POLL_S)
        self._metrics.add(names.RECORDS_OUT, topic=self._feedback)

    def _flush(self, failures: Sequence[str]) -> None:
        left = self._producer.flush(FLUSH_S)
        if left or failures:
            raise BrokerError(
                f"Kafka did not take {left + len(failures)} judgements: "
                f"{failures[0] if failures else 'no answer'}; the next start judges them again"
            )

    def _commit(self, read: Sequence[Message]) -> None:
        newest = {(m.topic(), m.partition()): m for m in read if m.error() is None}
        places = [_place(message, after=True) for message in newest.values()]
        try:
            if places:
                self._consumer.commit(offsets=places, asynchronous=False)
        except KafkaException as error:
            # Somebody else has the partition now and judges these again, into equal events.
            logger.warning("judged, but not committed: %s", error)


def _place(message: Message, *, after: bool = False) -> TopicPartition:
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    assert topic is not None
    assert partition is not None
    assert offset is not None
    return TopicPartition(topic, partition, offset + after)


__all__ = ["GROUP", "JudgeWorker"]
