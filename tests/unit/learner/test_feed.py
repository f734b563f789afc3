from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from learner.feed import Feed
from learner.kafka import KafkaWriter, Outgoing
from learner.window import Window
from streams.clock import ManualClock
from streams.contracts import DeadLetter, SourceRef
from streams.errors import BrokerError, LearnerError, OversizedError, SchemaError
from streams.registry import Checkpoint
from streams.serde import build_codec
from tests.unit.learner.fakes import (
    Entry,
    Failing,
    FakeConsumer,
    FakeWriter,
    Ticking,
    at,
    encoded,
    scored,
)

DEADLINE_S = 20.0


@dataclass
class Bench:
    """A feed over a log in memory."""

    log: list[Entry] = field(default_factory=list)
    writer: Any = field(default_factory=FakeWriter)
    stopping: threading.Event = field(default_factory=threading.Event)
    codec: Any = field(default_factory=build_codec)
    feed: Feed | None = None
    max_segments: int = 100
    uses: int = 1

    def start(self, checkpoint: Checkpoint | None = None, *, low: int = 0) -> tuple[SourceRef, ...]:
        """Start a feed; where it begins."""
        self.feed = self.make(low=low)
        return self.feed.start(
            checkpoint, lambda ids: dict.fromkeys(ids, frozenset(range(self.uses)))
        )

    def make(self, *, low: int = 0) -> Feed:
        """A feed over the log, not started."""
        return Feed(
            consumer=FakeConsumer(self.log, "scored", low=low),
            topic="scored",
            policy="default",
            window=Window(max_segments=self.max_segments, max_tokens=10_000, max_uses=2),
            codec=self.codec,
            writer=self.writer,
            dead_letters="dead",
            clock=ManualClock(9_000),
            stopping=self.stopping,
        )

    def wait(self, condition: Callable[[Feed], bool]) -> Feed:
        """Wait until the feed fulfils a condition."""
        assert self.feed is not None
        deadline = time.monotonic() + DEADLINE_S
        while not condition(self.feed):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self.feed


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.stopping.set()
    if made.feed is not None:
        made.feed.stop()


def checkpoint(position: int, window: Sequence[int]) -> Checkpoint:
    return Checkpoint(
        version=1,
        state_uri="",
        state_files={},
        positions=(at(position),),
        window=tuple(at(offset) for offset in window),
        rng=b"",
        sealed_at=0,
    )


def arrived(count: int) -> Callable[[Feed], bool]:
    return lambda feed: sum(feed.status().arrivals.values()) >= count


def held(feed: Feed) -> list[tuple[int, str]]:
    candidates = feed.seal().snapshot.candidates
    return [(c.ref.offset, c.segment_id) for c in candidates]


def test_reads_everything_from_the_beginning(bench: Bench) -> None:
    bench.log.extend(encoded(scored(name)) for name in "ab")
    assert bench.start() == (at(0),)
    feed = bench.wait(arrived(2))
    assert feed.status().new_segments == 2
    sealed = feed.seal()
    assert sealed.positions == (at(2),)
    bench.log.append(encoded(scored("c")))
    bench.wait(arrived(3))
    assert feed.status().new_segments == 1


def test_restores_what_the_checkpoint_names_and_nothing_else(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.log.extend(encoded(scored(name)) for name in "abcde")
    # b was evicted or replaced before; d and e arrived after the snapshot.
    assert bench.start(checkpoint(3, [2, 0])) == (at(3),)
    feed = bench.wait(arrived(2))
    assert feed.status().new_segments == 2
    assert held(feed) == [(2, "c"), (0, "a"), (3, "d"), (4, "e")]
    assert "lost to retention" not in caplog.text
    assert "no longer has" not in caplog.text


def test_restored_segments_keep_their_uses(bench: Bench) -> None:
    bench.log.append(encoded(scored("a")))
    bench.start(checkpoint(1, [0]))
    assert bench.feed is not None
    bench.feed.record_use(["a"], 9)
    assert bench.feed.status().available_segments == 0


def test_a_revision_of_a_segment_that_left_has_its_old_uses(bench: Bench) -> None:
    bench.max_segments, bench.uses = 1, 2
    bench.log.extend(encoded(scored(name)) for name in "ab")
    bench.start()
    # "a" was evicted by "b"; two versions had used it by then, and that is the limit.
    bench.wait(arrived(2))
    bench.log.append(encoded(scored("a", revision=1, reward=-1.0)))
    feed = bench.wait(arrived(3))
    assert (feed.status().segments, feed.status().available_segments) == (1, 0)
    # A segment nobody knows is asked about by nobody, and is new.
    bench.log.append(encoded(scored("c")))
    feed = bench.wait(arrived(4))
    assert (feed.status().available_segments, feed.status().new_segments) == (1, 1)


def test_a_revision_keeps_its_uses_though_its_own_batch_evicts_what_it_replaces(
    bench: Bench,
) -> None:
    bench.max_segments = 2
    bench.log.extend(encoded(scored(name)) for name in "ab")
    feed = bench.make()
    bench.feed = feed
    feed.start(None, lambda _: {})
    bench.wait(arrived(2))
    for update in (1, 2):
        feed.record_use(["a"], update)
    # "a" is here when the batch is read, and gone when its revision's turn comes.
    batch = [encoded(scored("c")), encoded(scored("a", revision=1, reward=-1.0))]
    bench.log.extend(batch)
    bench.wait(arrived(4))
    assert [name for _, name in held(feed)] == ["c"]
    assert feed.status().segments == 2


def test_a_version_recorded_while_the_registry_is_asked_counts(bench: Bench) -> None:
    bench.max_segments = 1
    bench.log.extend(encoded(scored(name)) for name in "ab")
    feed = bench.make()
    bench.feed = feed

    def recorded_meanwhile(_: object) -> dict[str, frozenset[int]]:
        feed.record_use(["a"], 2)
        return {"a": frozenset({1})}

    feed.start(None, recorded_meanwhile)
    bench.wait(arrived(2))
    bench.log.append(encoded(scored("a", revision=1, reward=-1.0)))
    bench.wait(arrived(3))
    assert (feed.status().segments, feed.status().available_segments) == (1, 0)


def test_records_of_other_policies_move_the_position_and_nothing_else(bench: Bench) -> None:
    bench.log.append(encoded(scored("a")))
    # An id of ours under another policy replaces nothing of ours.
    bench.log.append(encoded(scored("a", policy="npc", revision=5, reward=-1.0)))
    bench.log.extend(encoded(scored(f"n{n}", policy="npc")) for n in range(9))
    bench.start()
    feed = bench.wait(lambda feed: feed.status().segments == 1)
    bench.wait(lambda feed: feed.seal().positions == (at(11),))
    sealed, status = feed.seal(), feed.status()
    assert dict(status.arrivals) == {"added": 1, "dead_letter": 0}
    assert (status.segments, status.available_segments) == (1, 1)
    assert sealed.snapshot.refs == (at(0),)
    assert sealed.snapshot.candidates[0].revision == 0
    assert bench.writer.records == []


def test_a_tick_is_read_past(bench: Bench) -> None:
    bench.log.extend([Ticking, encoded(scored("a")), Ticking])
    bench.start()
    feed = bench.wait(lambda feed: feed.seal().positions == (at(3),))
    assert dict(feed.status().arrivals) == {"added": 1, "dead_letter": 0}
    assert bench.writer.records == []


class Retriable(Failing):
    """One that goes away by itself."""

    code = KafkaError._TRANSPORT
    retriable = True


def test_an_error_that_mends_itself_is_waited_out(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.log.extend([encoded(scored("a")), encoded(scored("b"))])
    consuming = FakeConsumer.consume

    def stumble(consumer: FakeConsumer, count: int, timeout: float) -> Any:
        found = consuming(consumer, count, timeout)
        return [Retriable("scored", -1, None), *found]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeConsumer, "consume", stumble)
        # While the window is restored as well as afterwards.
        bench.start(checkpoint(1, [0]))
        feed = bench.wait(arrived(1))
        assert held(feed) == [(0, "a"), (1, "b")]
    assert "reading scored" in caplog.text


@pytest.mark.parametrize("restoring", [True, False])
def test_an_error_that_does_not_mend_ends_the_feed(restoring: bool, bench: Bench) -> None:
    bench.log.append(encoded(scored("a")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeConsumer, "consume", lambda *_: [Failing("scored", -1, None)])
        if restoring:
            with pytest.raises(BrokerError, match="cannot read scored"):
                bench.start(checkpoint(1, [0]))
            return
        bench.start()
        with pytest.raises(BrokerError, match="cannot read scored"):
            bench.wait(lambda feed: feed.status().segments > 9)


def test_a_dead_letter_is_not_written_again_after_a_restart(bench: Bench) -> None:
    bench.log.extend([b"\xff", encoded(scored("a"))])
    bench.start(checkpoint(1, []))
    bench.wait(arrived(1))
    assert bench.writer.records == []


def test_nothing_is_lost_where_retention_ends_at_the_checkpoint(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.log.extend(encoded(scored(name)) for name in "abc")
    assert bench.start(checkpoint(2, []), low=2) == (at(2),)
    bench.wait(arrived(1))
    assert "lost to retention" not in caplog.text


def test_a_record_of_a_partition_that_is_not_there_is_not_waited_for(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.log.extend(encoded(scored(name)) for name in "ab")
    saved = replace(checkpoint(1, []), window=(at(0), at(0, partition=1)))
    bench.start(saved)
    feed = bench.wait(arrived(1))
    assert held(feed) == [(0, "a"), (1, "b")]
    assert "without 1 segments" in caplog.text


def test_versions_that_are_too_far_behind_are_not_sampled(bench: Bench) -> None:
    bench.log.extend(encoded(scored(f"s{n}", policy_version=n)) for n in range(3))
    bench.start()
    feed = bench.wait(arrived(3))
    feed.require_version(2)
    assert feed.status().available_segments == 1
    assert held(feed) == [(2, "s2")]


def test_a_topic_that_ends_before_the_checkpoint_is_another_one(bench: Bench) -> None:
    bench.log.extend(encoded(scored(name)) for name in "ab")
    with pytest.raises(LearnerError, match=r"ends at offset 2, but the registry says .* up to 3"):
        bench.start(checkpoint(3, [0]))


def test_retention_moves_the_start_and_says_what_is_lost(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.log.extend(encoded(scored(name)) for name in "abcd")
    assert bench.start(checkpoint(1, [0]), low=3) == (at(3),)
    feed = bench.wait(arrived(1))
    assert held(feed) == [(3, "d")]
    assert "lost to retention" in caplog.text
    assert "without 1 segments" in caplog.text


def test_the_position_waits_until_the_dead_letter_is_written(bench: Bench) -> None:
    bench.log.extend([b"\xff", encoded(scored("a"))])
    bench.writer.failures = 1
    bench.start()
    feed = bench.wait(arrived(2))
    assert len(bench.writer.records) == 1
    assert feed.seal().positions == (at(2),)


def test_a_stop_does_not_move_past_an_unwritten_dead_letter(bench: Bench) -> None:
    bench.log.append(b"\xff")
    bench.writer.failures = 1_000_000
    bench.writer.on_write = bench.stopping.set
    bench.start()
    assert bench.feed is not None
    bench.feed.stop()
    assert bench.feed.seal().positions == (at(0),)


def test_a_value_too_large_to_repeat_is_named_instead(bench: Bench) -> None:
    class Small(FakeWriter):
        """Takes no record of more than 500 bytes."""

        def write(self, records: Sequence[Outgoing]) -> None:
            if any(len(record.value) > 500 for record in records):
                raise OversizedError("too large")
            super().write(records)

    bench.writer = Small()
    bench.log.append(b"\xff" * 1_000)
    bench.start()
    bench.wait(lambda feed: feed.status().arrivals.get("dead_letter") == 1)
    (record,) = bench.writer.records
    letter = build_codec().decode(record.value, DeadLetter)
    assert letter.value is None
    assert letter.offset == 0
    assert letter.attributes == {"value_omitted": "1000 bytes, too large to repeat"}


def test_waits_for_a_schema_registry_that_is_away(bench: Bench) -> None:
    class Away:
        """A codec whose registry answers at the second try."""

        tries = 0

        def decode(self, value: bytes, expected: type[Any]) -> Any:
            self.tries += 1
            if self.tries == 1:
                raise SchemaError("the registry is away")
            return build_codec().decode(value, expected)

    bench.codec = Away()
    bench.log.append(encoded(scored("a")))
    bench.start()
    feed = bench.wait(arrived(1))
    assert feed.status().segments == 1


@pytest.mark.parametrize("started", [True, False])
def test_a_stop_ends_the_reading_and_closes_the_consumer(started: bool, bench: Bench) -> None:
    bench.log.append(encoded(scored("a")))
    bench.start()
    feed = bench.wait(arrived(1))
    if not started:
        feed.stop()
        # One that never read, as after an error while connecting.
        feed = bench.make()
    feed.stop()
    assert bench.stopping.is_set()
    assert not feed._thread.is_alive()
    assert feed._consumer.closed


def test_a_topic_that_is_missing_is_explained(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = FakeConsumer.list_topics

    def missing(self: FakeConsumer, topic: str, timeout: float) -> Any:
        found = listing(self, topic, timeout)
        found.topics[topic].error = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
        return found

    monkeypatch.setattr(FakeConsumer, "list_topics", missing)
    with pytest.raises(BrokerError, match="create the topics first"):
        bench.start()


def test_a_topic_made_again_while_reading_is_noticed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.log.extend(encoded(scored(name)) for name in "abc")
    bench.start()
    feed = bench.wait(arrived(3))
    consuming = FakeConsumer.consume

    def begin_again(self: FakeConsumer, count: int, timeout: float) -> Any:
        monkeypatch.undo()
        self._next = 0
        return consuming(self, count, timeout)

    monkeypatch.setattr(FakeConsumer, "consume", begin_again)
    with pytest.raises(LearnerError, match="the topic was recreated"):
        bench.wait(lambda feed: feed.status().segments > 3)
    with pytest.raises(LearnerError, match="offset 0 after it was read up to 3"):
        feed.seal()


def test_a_partition_that_is_gone_is_noticed(bench: Bench) -> None:
    saved = checkpoint(0, [])
    saved = replace(saved, positions=(at(0), at(0, partition=1)))
    with pytest.raises(LearnerError, match="has no partition 1 any more"):
        bench.start(saved)


def test_a_record_that_became_another_is_not_restored(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.log.extend([b"\xff", encoded(scored("n", policy="npc")), encoded(scored("a"))])
    bench.start(checkpoint(3, [0, 1, 2]))
    assert bench.feed is not None
    assert held(bench.feed) == [(2, "a")]
    assert "not restored" in caplog.text
    assert "topic=scored partition=0 offset=0" in caplog.text
    assert "without 2 segments" in caplog.text


def test_an_oversized_letter_is_tried_again_while_kafka_is_away(bench: Bench) -> None:
    class SmallAndAway(FakeWriter):
        """Takes no large record, and no small one at first."""

        def write(self, records: Sequence[Outgoing]) -> None:
            if any(len(record.value) > 500 for record in records):
                raise OversizedError("too large")
            super().write(records)

    bench.writer = SmallAndAway(failures=2)
    bench.log.append(b"\xff" * 1_000)
    bench.start()
    bench.wait(lambda feed: feed.status().arrivals.get("dead_letter") == 1)
    assert len(bench.writer.records) == 1


class _Producer:
    """Answers each record with the next of some outcomes, when polled."""

    def __init__(self, *outcomes: int | None) -> None:
        self._outcomes = list(outcomes)
        self._waiting: list[Callable[[], None]] = []
        self.produced: list[bytes] = []
        self.full = False

    def produce(self, topic: str, *, value: bytes, key: bytes | None, on_delivery: Any) -> None:
        assert topic
        assert key is None
        if self.full:
            raise BufferError
        outcome = self._outcomes.pop(0)
        error = None if outcome is None else KafkaError(outcome)
        if outcome == KafkaError._FATAL:
            raise KafkaException(error)
        self.produced.append(value)
        self._waiting.append(lambda: on_delivery(error, None))

    def poll(self, timeout: float) -> None:
        assert timeout > 0
        self.full = False
        if self._waiting:
            self._waiting.pop(0)()


def outgoing(*values: bytes) -> list[Outgoing]:
    return [Outgoing(topic="t", key=None, value=value) for value in values]


def test_the_writer_returns_once_all_are_acknowledged() -> None:
    producer = _Producer(None, None)
    producer.full = True
    KafkaWriter(producer).write(outgoing(b"a", b"b"))
    assert producer.produced == [b"a", b"b"]
    assert producer._waiting == []


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (KafkaError._MSG_TIMED_OUT, BrokerError),
        (KafkaError._FATAL, BrokerError),
        (KafkaError.MSG_SIZE_TOO_LARGE, OversizedError),
    ],
)
def test_the_writer_maps_errors(outcome: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="cannot write"):
        KafkaWriter(_Producer(None, outcome)).write(outgoing(b"a", b"b"))
