"""The reward worker against a real broker: kills, poison, lag that comes to rest."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from confluent_kafka import Consumer, TopicPartition

from processors.replay.compare import Comparison
from processors.replay.report import compare_with_live
from processors.replay.shadow import Job, prepare, replay_partition
from processors.reward.agent import RewardProcessor
from streams.contracts import (
    AttributedBy,
    ClosedBy,
    DeadLetter,
    DeadLetterReason,
    DialogueTurn,
    FeedbackKind,
    Role,
    ScoredSegment,
    Step,
    StepFeedback,
    TrajectorySegment,
)
from streams.kafka.places import Range
from streams.metrics import ProcessorMetrics
from streams.serde import build_codec
from streams.settings import RewardSettings, load_settings
from tests.conftest import CreateTopics
from tests.integration.harness import DEADLINE_S, Bench, WorkerProcess, wait_until
from tests.integration.reward_worker import topics_of

pytestmark = pytest.mark.broker

PARTITIONS = 2
MAX_BYTES = 1_048_588
ROOM = {"max.message.bytes": str(MAX_BYTES)}
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
            processor = RewardProcessor(RewardSettings(), CODEC, metrics, MAX_BYTES, self.topics)
            mine = [record for record in records if record.partition == partition]
            processor.feed(self.topics.segments, mine)
            made = processor.drain(1_000_000).outputs
            outputs.update((output.topic, output.key, output.value) for output in made)
        return outputs

    def start(self) -> WorkerProcess:
        config = self.config(worker={"group_instance_id": "one", "max_batch_records": 10})
        return self.worker("tests.integration.reward_worker", self.prefix, str(config))

    def assert_exact(self) -> Counter[tuple[str, bytes | None, bytes | None]]:
        """Wait until all is scored; the outputs are those of the pure run."""
        expected = self.expected()
        wait_until(lambda: self.found().total() >= expected.total(), "all scored", poll_s=0.2)
        assert self.found() == expected
        return expected

    def lag(self) -> int:
        consumer = Consumer({"bootstrap.servers": self.bootstrap, "group.id": self.prefix})
        try:
            asked = [TopicPartition(self.topics.segments, p) for p in range(PARTITIONS)]
            return sum(
                consumer.get_watermark_offsets(place)[1] - max(0, place.offset)
                for place in consumer.committed(asked, timeout=DEADLINE_S)
            )
        finally:
            consumer.close()


@pytest.fixture
def bench(
    kafka_bootstrap: str,
    create_topics: CreateTopics,
    unique_name: Callable[[str], str],
    tmp_path: Path,
) -> Iterator[RewardBench]:
    prefix = unique_name("reward")
    names = ("segments", "scored", "reviews", "dead")
    create_topics(
        {
            **{f"{prefix}.{name}": (PARTITIONS, ROOM) for name in names},
            f"{prefix}.state": (PARTITIONS, {"cleanup.policy": "compact"}),
        }
    )
    made = RewardBench(kafka_bootstrap, tmp_path, prefix)
    yield made
    made.stop_all()


def test_scores_are_exact_over_a_kill_and_lag_comes_to_rest(bench: RewardBench) -> None:
    # A transaction's marker is the last thing in the log: it must not count as lag.
    bench.producer = bench.transactional_producer(bench.prefix)
    worker = bench.start()
    worker.wait_ready()
    busy = threading.Thread(target=bench.produce_in_transactions, args=(0, 40))
    busy.start()
    wait_until(lambda: bench.found().total() > 0, "the first scores")
    worker.kill()
    busy.join()
    bench.produce_in_transactions(40, 60)
    worker = bench.start()
    expected = bench.assert_exact()
    topics = {topic for topic, _, _ in expected}
    assert topics == {bench.topics.scored, bench.topics.reviews}
    scored = [
        CODEC.decode(value, ScoredSegment)
        for topic, _, value in expected
        if topic == bench.topics.scored
    ]
    assert len(scored) == 75
    wait_until(lambda: bench.lag() == 0, "lag at rest", poll_s=0.2)
    assert worker.terminate()[0] == 0


def test_scores_are_exact_after_kills_at_random_moments(bench: RewardBench) -> None:
    moments = random.Random(7)
    for round_ in range(4):
        worker = bench.start()
        bench.produce(100 * round_, 100 * round_ + 100)
        bench.flush()
        if round_ % 2:
            worker.wait_ready()
        time.sleep(moments.uniform(0.0, 1.0))
        worker.kill()
    bench.start()
    bench.assert_exact()


def test_poison_is_kept_with_its_coordinates_and_the_stream_goes_on(bench: RewardBench) -> None:
    good = msgspec.to_builtins(segment(1))
    far = msgspec.json.encode(good | {"closed_at": 0}).replace(
        b'"closed_at":0', b'"closed_at":' + b"9" * 30
    )
    turn = DialogueTurn(
        event_id="e",
        session_id="s",
        turn_id="t",
        role=Role.USER,
        content="hello",
        event_time=1,
        source="test",
    )
    poison: list[tuple[bytes | None, DeadLetterReason]] = [
        (b"\xff", DeadLetterReason.UNDECODABLE),
        (b"\xc3\x01" + bytes(8) + b"body", DeadLetterReason.UNKNOWN_SCHEMA),
        (CODEC.encode(turn), DeadLetterReason.INVALID),
        (None, DeadLetterReason.NULL_VALUE),
        (far, DeadLetterReason.INVALID),
        (msgspec.json.encode(good | {"user_id": "u" * 5_000}), DeadLetterReason.INVALID),
        (msgspec.json.encode(good | {"digest": "d" * 1_040_000}), DeadLetterReason.OVERSIZED),
    ]
    for value, _ in poison:
        bench.producer.produce(bench.topics.segments, key=b"", value=value, partition=1)
    bench.produce(0, 10)
    bench.flush()
    worker = bench.start()
    bench.assert_exact()
    letters = [
        CODEC.decode(r.value, DeadLetter) for r in bench.read(bench.topics.dead_letters, PARTITIONS)
    ]
    assert {(d.topic, d.partition, d.offset): d.reason for d in letters} == {
        (bench.topics.segments, 1, offset): reason for offset, (_, reason) in enumerate(poison)
    }
    assert worker.process.poll() is None


def test_a_shadow_replay_of_the_rewards_differs_where_the_weights_do(bench: RewardBench) -> None:
    worker = bench.start()
    worker.wait_ready()
    bench.produce(0, 40)
    bench.flush()
    bench.assert_exact()
    worker.stop_in_peace()
    offsets = {r.partition: r.offset + 1 for r in bench.read(bench.topics.segments, PARTITIONS)}
    job = Job(
        stage="reward",
        ranges=tuple(Range(bench.topics.segments, p, 0, end) for p, end in offsets.items()),
        read_from_ms=0,
        compare_from_ms=0,
        inputs=(bench.topics.segments,),
        output=bench.topics.scored,
    )

    def replayed(name: str, **reward: object) -> Comparison:
        settings = load_settings(bench.config(name, reward=reward))
        prepare(bench.folder / name, job, settings)
        for partition in offsets:
            replay_partition(bench.folder / name, partition, lambda _: None)
        return compare_with_live(bench.folder / name, settings)

    same = replayed("same")
    assert (same.is_equal, same.equal) == (True, 50), same.examples
    other = replayed("other", weight_explicit=0.6, weight_implicit=0.1)
    assert (other.different, other.fields["config_hash"]) == (50, 50)
    assert other.fields["rewards[].reward"] > 0
