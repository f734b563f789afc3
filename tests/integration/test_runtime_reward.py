"""The reward worker against a real broker: exact scores over a kill, lag that comes to rest."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from processors.reward.agent import RewardProcessor
from streams.contracts import (
    AttributedBy,
    ClosedBy,
    FeedbackKind,
    ScoredSegment,
    Step,
    StepFeedback,
    TrajectorySegment,
)
from streams.metrics import ProcessorMetrics
from streams.serde import build_codec
from streams.settings import RewardSettings
from tests.conftest import CreateTopics
from tests.integration.harness import Bench, wait_until
from tests.integration.reward_worker import topics_of

pytestmark = pytest.mark.broker

PARTITIONS = 2
CODEC = build_codec()


def segment(number: int, revision: int = 0) -> TrajectorySegment:
    """One of three users' segments; each user turns angry from the fifth on."""
    thumb = StepFeedback(
        event_id=f"f{number}-{revision}",
        kind=FeedbackKind.THUMB,
        event_time=number * 1_000,
        delay_ms=100,
        attributed_by=AttributedBy.TURN_ID,
        source="test",
        value=1.0 if number < 15 else -1.0,
        user_id=f"u{number % 3}",
    )
    step = Step(turn_id=f"t{number}", reply="hello", event_time=1_000, feedback=(thumb,))
    return TrajectorySegment(
        segment_id=f"seg{number}",
        revision=revision,
        session_id=f"s{number}",
        user_id=f"u{number % 3}",
        source="test",
        ordinal=0,
        closed_by=ClosedBy.END,
        closed_at=number * 1_000 + 500,
        first_closed_at=number * 1_000 + 500,
        settle_ms=100,
        first_event_time=number * 1_000,
        last_event_time=number * 1_000,
        digest=f"d{number}",
        steps=(step,),
    )


class RewardBench(Bench):
    """The reward processor's topics, and its outputs against those of a pure run."""

    def __init__(self, bootstrap: str, folder: Path, prefix: str) -> None:
        super().__init__(bootstrap, folder)
        self.prefix = prefix
        self.topics = topics_of(prefix)

    def produce(self, first: int, last: int) -> None:
        for number in range(first, last):
            made = segment(number)
            key = made.user_id or ""
            self.producer.produce(self.topics.segments, key=key, value=CODEC.encode(made))
            if number % 4 == 0:
                again = CODEC.encode(segment(number, revision=1))
                self.producer.produce(self.topics.segments, key=key, value=again)

    def produce_in_transactions(self, first: int, last: int) -> None:
        for start in range(first, last, 5):
            self.in_transaction(self.produce, start, start + 5)

    def found(self) -> Counter[tuple[str, bytes | None, bytes | None]]:
        topics = (self.topics.scored, self.topics.reviews, self.topics.dead_letters)
        return Counter((t, r.key, r.value) for t in topics for r in self.read(t, PARTITIONS))

    def expected(self) -> Counter[tuple[str, bytes | None, bytes | None]]:
        outputs: Counter[tuple[str, bytes | None, bytes | None]] = Counter()
        records = self.read(self.topics.segments, PARTITIONS)
        for partition in range(PARTITIONS):
            metrics = ProcessorMetrics("pure")
            processor = RewardProcessor(
                partition, RewardSettings(), CODEC, metrics, 1 << 23, self.topics
            )
            mine = [record for record in records if record.partition == partition]
            processor.feed(self.topics.segments, mine)
            made = processor.drain(1_000_000).outputs
            outputs.update((output.topic, output.key, output.value) for output in made)
        return outputs

    def lag(self) -> int:
        consumer = Consumer({"bootstrap.servers": self.bootstrap, "group.id": self.prefix})
        try:
            asked = [TopicPartition(self.topics.segments, p) for p in range(PARTITIONS)]
            return sum(
                consumer.get_watermark_offsets(place)[1] - max(0, place.offset)
                for place in consumer.committed(asked, timeout=10)
            )
        finally:
            consumer.close()


def test_scores_are_exact_over_a_kill_and_lag_comes_to_rest(
    kafka_bootstrap: str,
    create_topics: CreateTopics,
    unique_name: Callable[[str], str],
    tmp_path: Path,
) -> None:
    prefix = unique_name("reward")
    names = ("segments", "scored", "reviews", "dead")
    create_topics(
        {
            **{f"{prefix}.{name}": (PARTITIONS, {}) for name in names},
            f"{prefix}.state": (PARTITIONS, {"cleanup.policy": "compact"}),
        }
    )
    bench = RewardBench(kafka_bootstrap, tmp_path, prefix)
    # A transaction's marker is the last thing in the log: it must not count as lag.
    bench.producer = bench.transactional_producer(prefix)
    config = bench.config(worker={"group_instance_id": "one", "max_batch_records": 10})
    try:
        worker = bench.worker("tests.integration.reward_worker", prefix, str(config))
        worker.wait_ready()
        busy = threading.Thread(target=bench.produce_in_transactions, args=(0, 40))
        busy.start()
        wait_until(lambda: bench.found().total() > 0, "the first scores")
        worker.kill()
        busy.join()
        bench.produce_in_transactions(40, 60)
        worker = bench.worker("tests.integration.reward_worker", prefix, str(config))
        expected = bench.expected()
        wait_until(lambda: bench.found().total() >= expected.total(), "all scored", 30, 0.2)
        assert bench.found() == expected
        topics = {topic for topic, _, _ in expected}
        assert topics == {bench.topics.scored, bench.topics.reviews}
        scored = [
            CODEC.decode(value, ScoredSegment)
            for topic, _, value in expected
            if topic == bench.topics.scored
        ]
        assert len(scored) == 75
        wait_until(lambda: bench.lag() == 0, "lag at rest", 20, 0.2)
        assert worker.terminate()[0] == 0
    finally:
        bench.stop_all()
