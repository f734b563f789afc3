"""The aligner worker against a real broker: exact outputs, poison, misplaced records."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import aiokafka.producer.producer
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.producer import message_accumulator
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy

from processors.feedback_align.agent import (
    ORIGIN_OFFSET,
    ORIGIN_PARTITION,
    ORIGIN_TOPIC,
    AlignProcessor,
)
from processors.runtime.records import Record
from processors.runtime.state import META_KEY, decode_meta
from streams.contracts import (
    DeadLetter,
    DeadLetterReason,
    DialogueTurn,
    FeedbackEvent,
    FeedbackKind,
    Role,
    TrajectorySegment,
)
from streams.kafka.clients import partition_for
from streams.metrics import ProcessorMetrics
from streams.serde import build_codec
from streams.settings import AlignSettings
from tests.conftest import CreateTopics
from tests.integration.align_worker import configs_of, topics_of
from tests.integration.harness import DEADLINE_S, Bench, WorkerProcess, wait_until
from tests.integration.headers import RawKey

pytestmark = pytest.mark.broker

PARTITIONS = 2
RULES = {
    "settle_ms": 200,
    "gap_ms": 500,
    "max_open_ms": 900,
    "attribution_window_ms": 2_000,
    "orphan_wait_ms": 600,
    "horizon_ms": 1_500,
    "max_skew_ms": 500,
}
CODEC = build_codec()
MAX_BYTES = 1_200_000
ROOM = {"max.message.bytes": str(MAX_BYTES)}
ARRIVALS = {"message.timestamp.type": "LogAppendTime"} | ROOM

Outputs = dict[str, Counter[bytes]]


class ReadAlready:
    """The log as it was read (``records.LogReader``)."""

    def __init__(self, logs: Mapping[str, Sequence[Record]]) -> None:
        self._logs = logs

    def read(self, topic: str, partition: int, offsets: Sequence[int]) -> Iterator[Record]:
        wanted = set(offsets)
        return (r for r in self._logs[topic] if r.partition == partition and r.offset in wanted)


class AlignBench(Bench):
    """The aligner's topics, and its outputs against those of a run without any runtime."""

    def __init__(self, bootstrap: str, folder: Path, prefix: str) -> None:
        super().__init__(bootstrap, folder)
        self.prefix = prefix
        self.topics = topics_of(prefix)
        self._number = 0

    def start(self, name: str = "align") -> WorkerProcess:
        config = self.config(
            name,
            align=RULES,
            worker={"group_instance_id": "one", "max_batch_records": 40},
        )
        return self.worker("tests.integration.align_worker", self.prefix, str(config), name=name)

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: str | None = "k",
        partition: int | None = None,
        headers: Mapping[str, bytes] | None = None,
    ) -> None:
        where = -1 if partition is None else partition
        self.producer.produce(
            topic, key=key, value=value, partition=where, headers=dict(headers or {})
        )

    def converse(self, sessions: int, prefix: str) -> None:
        """Two turns and feedback in each of ``sessions``, a little apart; some end."""
        for turn in range(3):
            for number in range(sessions):
                session = f"{prefix}-{number}"
                if turn < 2:
                    role = Role.USER if turn == 0 else Role.ASSISTANT
                    done = turn == 1 and number % 3 == 0
                    self.send(self.topics.turns, self.turn(session, role, done), session)
                else:
                    self.send(self.topics.feedback, self.thumb(session), session)
            self.flush()

    def turn(
        self, session: str, role: Role, done: bool = False, content: str | None = None
    ) -> bytes:
        self._number += 1
        return CODEC.encode(
            DialogueTurn(
                event_id=f"e{self._number}",
                session_id=session,
                turn_id=f"{session}-{role if content is None else self._number}",
                role=role,
                content=content or f"{role} says {self._number}",
                event_time=time.time_ns() // 1_000_000,
                source="test",
                session_done=done,
            )
        )

    def thumb(self, session: str) -> bytes:
        self._number += 1
        return CODEC.encode(
            FeedbackEvent(
                event_id=f"e{self._number}",
                session_id=session,
                turn_id=f"{session}-{Role.ASSISTANT}",
                kind=FeedbackKind.THUMB,
                value=1.0,
                event_time=time.time_ns() // 1_000_000,
                source="test",
            )
        )

    def found(self) -> Outputs:
        topics = (self.topics.segments, self.topics.dead_letters)
        outputs = {t: Counter(r.value or b"" for r in self.read(t, PARTITIONS)) for t in topics}
        for topic in (self.topics.turns, self.topics.feedback):
            again = (r for r in self.read(topic, PARTITIONS) if _is_republished(r))
            outputs[topic] = Counter(record.value or b"" for record in again)
        return outputs

    def expected(self) -> tuple[Outputs, bool]:
        """What one pass over the log as it is now gives, and whether nothing more can come."""
        inputs = (self.topics.turns, self.topics.feedback)
        logs = {topic: self.read(topic, PARTITIONS) for topic in inputs}
        outputs: Outputs = {
            topic: Counter() for topic in (*inputs, self.topics.segments, self.topics.dead_letters)
        }
        settled = True
        for partition in range(PARTITIONS):
            processor = AlignProcessor(
                partition,
                PARTITIONS,
                AlignSettings(**RULES),
                CODEC,
                ProcessorMetrics("pure"),
                MAX_BYTES,
                ReadAlready(logs),
                self.topics,
            )
            for topic, records in logs.items():
                processor.feed(topic, [r for r in records if r.partition == partition])
            for output in processor.drain(1_000_000).outputs:
                outputs[output.topic][output.value or b""] += 1
            settled = settled and processor.status().tick_after_ms is None
        return outputs, settled

    def assert_exact(self) -> Outputs:
        """Wait until all is closed and forgotten; the outputs are those of the pure run."""
        wait_until(lambda: self.expected()[1], "everything closed and forgotten", poll_s=0.4)
        expected = self.expected()[0]
        wait_until(lambda: _total(self.found()) >= _total(expected), "all outputs", poll_s=0.3)
        assert self.found() == expected
        return expected

    def sessions_closed(self) -> set[str]:
        """The sessions that have a segment; a slow machine makes more than one of some."""
        records = self.read(self.topics.segments, PARTITIONS)
        return {CODEC.decode(r.value, TrajectorySegment).session_id for r in records}

    def applied(self, session: str) -> int:
        """The last offset of turns applied in a session's partition, -1 before the first."""
        topic, latest = self.topics.turns, -1
        for record in self.read(f"{self.prefix}.state", PARTITIONS):
            if record.partition == _home(session) and record.key == META_KEY:
                latest = decode_meta(record.value or b"")[0].get(topic, -1)
        return latest

    def state_bytes(self) -> int:
        """What was ever written to the state."""
        return sum(len(r.value or b"") for r in self.read(f"{self.prefix}.state", PARTITIONS))

    def dead_letters(self) -> dict[tuple[str, int, int], DeadLetter]:
        records = self.read(self.topics.dead_letters, PARTITIONS)
        letters = [CODEC.decode(record.value, DeadLetter) for record in records]
        return {(dead.topic, dead.partition, dead.offset): dead for dead in letters}


def _total(outputs: Outputs) -> int:
    return sum(counter.total() for counter in outputs.values())


def _is_republished(record: Record) -> bool:
    names = [name for name, _ in record.headers]
    return ORIGIN_TOPIC in names and "by-test" not in names


@pytest.fixture
def bench(
    kafka_bootstrap: str,
    create_topics: CreateTopics,
    unique_name: Callable[[str], str],
    tmp_path: Path,
) -> Iterator[AlignBench]:
    prefix = unique_name("align")
    create_topics(configs_of(prefix, PARTITIONS, ROOM))
    made = AlignBench(kafka_bootstrap, tmp_path, prefix)
    yield made
    made.stop_all()


def test_segments_are_exact_after_kills_at_random_moments(bench: AlignBench) -> None:
    moments = random.Random(11)
    for round_ in range(3):
        worker = bench.start()
        bench.converse(10, f"before-{round_}")
        worker.wait_ready()
        steady = threading.Thread(target=bench.converse, args=(40, f"steady-{round_}"))
        steady.start()
        time.sleep(moments.uniform(0.0, 1.2))
        worker.kill()
        steady.join()
    worker = bench.start()
    expected = bench.assert_exact()
    segments = [CODEC.decode(value, TrajectorySegment) for value in expected[bench.topics.segments]]
    assert len({segment.segment_id for segment in segments}) >= 150
    assert expected[bench.topics.segments].total() == len(segments)
    worker.stop_in_peace()


def test_poison_is_kept_with_its_coordinates_and_the_stream_goes_on(bench: AlignBench) -> None:
    turns = bench.topics.turns
    session = next(s for s in map("s{}".format, range(99)) if _home(s) == 0)
    bench.send(turns, b"\xffnot a record", partition=0)
    bench.send(turns, None, partition=0)
    bench.send(turns, b"\xc3\x01" + bytes(8) + b"body", partition=0)
    bench.send(turns, b'{"event_id": "e"}', partition=0)
    bench.send(turns, bench.turn(session, Role.USER), session, partition=1)
    twice = {ORIGIN_TOPIC: b"t", "by-test": b""}
    bench.send(turns, bench.thumb(session), session, partition=0)
    bench.send(turns, bench.turn(session, Role.USER), session, partition=1, headers=twice)
    bench.flush()
    worker = bench.start()
    bench.converse(3, "after")
    bench.assert_exact()
    dead = bench.dead_letters()
    reasons = {place: letter.reason for place, letter in dead.items()}
    assert reasons == {
        (turns, 0, 0): DeadLetterReason.UNDECODABLE,
        (turns, 0, 1): DeadLetterReason.NULL_VALUE,
        (turns, 0, 2): DeadLetterReason.UNKNOWN_SCHEMA,
        (turns, 0, 3): DeadLetterReason.INVALID,
        (turns, 0, 4): DeadLetterReason.INVALID,
        (turns, 1, 1): DeadLetterReason.INVALID,
    }
    assert dead[turns, 0, 0].value == b"\xffnot a record"
    assert dead[turns, 0, 0].key == b"k"
    (again,) = [r for r in bench.read(turns, PARTITIONS) if _is_republished(r)]
    assert (again.partition, again.key) == (0, session.encode())
    assert dict(again.headers) == {
        ORIGIN_TOPIC: turns.encode(),
        ORIGIN_PARTITION: b"1",
        ORIGIN_OFFSET: b"0",
    }
    assert worker.process.poll() is None


async def test_keys_and_headers_of_any_kind_do_no_harm(
    bench: AlignBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = bench.topics.turns
    sessions = [f"s{number}" for number in range(4)]
    for session, key in zip(sessions, (None, "", "another", "s3"), strict=True):
        bench.send(turns, bench.turn(session, Role.USER), key, partition=_home(session))
    bench.flush()
    # Only the client's builder in Python writes what it is told to.
    for module in (message_accumulator, aiokafka.producer.producer):
        monkeypatch.setattr(module, "DefaultRecordBatchBuilder", _DefaultRecordBatchBuilderPy)
    producer = AIOKafkaProducer(bootstrap_servers=bench.bootstrap, enable_idempotence=True)
    await producer.start()
    strange = [(RawKey(b"\xff\xfe"), b"\xff"), (RawKey(b""), b"")]
    try:
        for value in (bench.turn("s0", Role.ASSISTANT, done=True), b"poison"):
            await producer.send_and_wait(turns, value, partition=_home("s0"), headers=strange)
    finally:
        await producer.stop()
    worker = bench.start()
    await asyncio.to_thread(
        wait_until,
        lambda: bench.sessions_closed() == set(sessions) and bench.dead_letters() != {},
        lambda: f"all of {sessions} and the dead letter, not only {bench.sessions_closed()}",
    )
    (dead,) = bench.dead_letters().values()
    assert dead.value == b"poison"
    assert [(h.key, h.value) for h in dead.headers] == [("\ufffd\ufffd", b"\xff"), ("", b"")]
    assert worker.process.poll() is None


def test_a_session_larger_than_any_record_survives_a_kill(bench: AlignBench) -> None:
    turns, session = bench.topics.turns, "large"
    worker = bench.start()
    worker.wait_ready()
    for _ in range(12):
        bench.send(turns, bench.turn(session, Role.USER, content="x" * 900_000), session)
    bench.flush()
    wait_until(lambda: bench.applied(session) >= 11, "all of it applied")
    worker.kill()
    assert bench.state_bytes() < 100_000
    bench.send(turns, bench.turn(session, Role.ASSISTANT, done=True), session)
    fields = len(bench.turn(session, Role.USER, content="x"))
    largest = bench.turn(session, Role.USER, content="x" * (MAX_BYTES - fields - 150))
    bench.send(turns, largest, partition=1 - _home(session))
    bench.flush()
    bench.start().wait_ready()
    bench.assert_exact()
    dead = bench.dead_letters().values()
    assert {letter.reason for letter in dead} == {DeadLetterReason.OVERSIZED}
    assert any("too large to be published" in letter.message for letter in dead)


def _home(session: str) -> int:
    return partition_for(session.encode(), PARTITIONS)


def test_topics_without_arrivals_are_refused(
    bench: AlignBench, create_topics: CreateTopics, unique_name: Callable[[str], str]
) -> None:
    prefix = unique_name("archive")
    create_topics(
        {
            f"{prefix}.turns": (PARTITIONS, ARRIVALS),
            f"{prefix}.feedback": (PARTITIONS, {"message.timestamp.type": "CreateTime"}),
            f"{prefix}.segments": (PARTITIONS, {}),
            f"{prefix}.dead": (PARTITIONS, {}),
            f"{prefix}.state": (PARTITIONS, {"cleanup.policy": "compact"}),
        }
    )
    config = bench.config("archive", align=RULES)
    worker = bench.worker("tests.integration.align_worker", prefix, str(config), name="archive")
    assert worker.process.wait(DEADLINE_S) == 1
    assert f"{prefix}.feedback must have" in worker.output()
