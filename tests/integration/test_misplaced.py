"""Records on the wrong partition: published again once, and in their session's segment."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from processors.feedback_align.agent import ORIGIN_OFFSET, ORIGIN_PARTITION, ORIGIN_TOPIC
from processors.runtime.records import Record
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
from streams.serde import build_codec
from tests.conftest import CreateTopics
from tests.integration.align_worker import configs_of, topics_of
from tests.integration.harness import Bench, WorkerProcess, wait_until

pytestmark = pytest.mark.broker

PARTITIONS = 3
SESSIONS = tuple(f"session-{number}" for number in range(24))
RULES = {
    "settle_ms": 200,
    "gap_ms": 60_000,
    "max_open_ms": 600_000,
    "orphan_wait_ms": 600_000,
    "horizon_ms": 3_600_000,
}
CODEC = build_codec()

Place = tuple[str, int, int]


class MisplacingBench(Bench):
    """An aligner whose sources do not use Java's partitioner."""

    def __init__(self, bootstrap: str, folder: Path, prefix: str) -> None:
        super().__init__(bootstrap, folder)
        self.prefix = prefix
        self.topics = topics_of(prefix)
        # librdkafka's default: CRC32 of the key, any partition without one.
        self.stray = Producer(
            {"bootstrap.servers": bootstrap, "enable.idempotence": True, "log_level": 2}
        )

    def start(self) -> WorkerProcess:
        config = self.config(
            align=RULES, worker={"group_instance_id": "one", "max_batch_records": 10}
        )
        return self.worker("tests.integration.align_worker", self.prefix, str(config))

    def converse(self, session: str, key: str | None) -> None:
        now_ms = time.time_ns() // 1_000_000
        for role in (Role.USER, Role.ASSISTANT):
            turn = DialogueTurn(
                event_id=f"{session}-{role}",
                session_id=session,
                turn_id=f"{session}-{role}",
                role=role,
                content=f"{role} of {session}",
                event_time=now_ms - (1_000 if role is Role.USER else 0),
                source="test",
                session_done=role is Role.ASSISTANT,
            )
            self.send(self.topics.turns, CODEC.encode(turn), key)
        thumb = FeedbackEvent(
            event_id=f"{session}-thumb",
            session_id=session,
            turn_id=f"{session}-{Role.ASSISTANT}",
            kind=FeedbackKind.THUMB,
            value=1.0,
            event_time=now_ms,
            source="test",
        )
        self.send(self.topics.feedback, CODEC.encode(thumb), key)

    def send(self, topic: str, value: bytes, key: str | None, **where: object) -> None:
        self.stray.produce(topic, value=value, key=key, **where)  # type: ignore[arg-type]

    def events(self) -> list[tuple[Record, DialogueTurn | FeedbackEvent]]:
        """What is in the input topics, ticks left out."""
        turns = [(r, CODEC.decode(r.value, DialogueTurn)) for r in self.records(self.topics.turns)]
        notes = [
            (r, CODEC.decode(r.value, FeedbackEvent)) for r in self.records(self.topics.feedback)
        ]
        return [*turns, *notes]

    def records(self, topic: str) -> list[Record]:
        return [r for r in self.read(topic, PARTITIONS) if r.value is not None]

    def published_again(self) -> list[Record]:
        topics = (self.topics.turns, self.topics.feedback)
        return [r for t in topics for r in self.records(t) if origin(r) is not None]

    def latest(self) -> dict[str, list[TrajectorySegment]]:
        """The last revision of each segment, by session."""
        last: dict[str, TrajectorySegment] = {}
        for record in self.read(self.topics.segments, PARTITIONS):
            segment = CODEC.decode(record.value, TrajectorySegment)
            known = last.get(segment.segment_id)
            if known is None or known.revision < segment.revision:
                last[segment.segment_id] = segment
        found: dict[str, list[TrajectorySegment]] = defaultdict(list)
        for segment in last.values():
            found[segment.session_id].append(segment)
        return found

    def is_complete(self) -> bool:
        found = self.latest()
        return len(found) == len(SESSIONS) and all(
            sum(len(segment.lineage) for segment in segments) == 3 for segments in found.values()
        )

    def dead_letters(self) -> list[DeadLetter]:
        return [
            CODEC.decode(r.value, DeadLetter)
            for r in self.read(self.topics.dead_letters, PARTITIONS)
        ]


def origin(record: Record) -> Place | None:
    """Where a record that was published again says it was found."""
    headers = dict(record.headers)
    topic, partition, offset = (
        (headers.get(name) or b"").decode()
        for name in (ORIGIN_TOPIC, ORIGIN_PARTITION, ORIGIN_OFFSET)
    )
    return (topic, int(partition), int(offset)) if topic else None


def home(session: str) -> int:
    return partition_for(session.encode(), PARTITIONS)


def place(record: Record) -> Place:
    return record.topic, record.partition, record.offset


@pytest.fixture
def bench(
    kafka_bootstrap: str,
    create_topics: CreateTopics,
    unique_name: Callable[[str], str],
    tmp_path: Path,
) -> Iterator[MisplacingBench]:
    prefix = unique_name("misplaced")
    create_topics(configs_of(prefix, PARTITIONS))
    made = MisplacingBench(kafka_bootstrap, tmp_path, prefix)
    yield made
    made.stop_all()


def test_each_stray_is_published_again_once_and_joins_its_session(bench: MisplacingBench) -> None:
    for number, session in enumerate(SESSIONS):
        bench.converse(session, session if number % 2 else None)
    assert bench.stray.flush(60) == 0
    strays = {place(r): e for r, e in bench.events() if r.partition != home(e.session_id)}
    assert len(strays) > len(SESSIONS)

    worker = bench.start()
    wait_until(lambda: bench.published_again() != [], "the first published again", 60)
    worker.kill()
    bench.start().wait_ready(60)
    wait_until(bench.is_complete, "all sessions whole", 90, 0.3)

    again = {origin(record): record for record in bench.published_again()}
    assert len(again) == len(bench.published_again())
    assert again.keys() == strays.keys()
    for found_at, record in again.items():
        assert found_at is not None
        session = strays[found_at].session_id
        assert (record.topic, record.partition) == (found_at[0], home(session))
        assert record.key == session.encode()
    decoded = {place(record): event for record, event in bench.events()}
    assert {place(record): decoded[place(record)] for record in again.values()} == {
        place(record): strays[at] for at, record in again.items() if at is not None
    }

    for session, segments in bench.latest().items():
        lineage = [(ref.topic, ref.partition, ref.offset) for s in segments for ref in s.lineage]
        assert {partition for _, partition, _ in lineage} == {home(session)}
        assert sorted(decoded[at].event_id for at in lineage) == sorted(
            f"{session}-{what}" for what in (Role.USER, Role.ASSISTANT, "thumb")
        )
    assert bench.dead_letters() == []


def test_what_was_published_again_and_is_misplaced_still_is_a_dead_letter(
    bench: MisplacingBench,
) -> None:
    session = SESSIONS[0]
    wrong = (home(session) + 1) % PARTITIONS
    turn = DialogueTurn(
        event_id="e",
        session_id=session,
        turn_id="t",
        role=Role.USER,
        content="text",
        event_time=time.time_ns() // 1_000_000,
        source="test",
    )
    value = CODEC.encode(turn)
    headers = {ORIGIN_TOPIC: b"elsewhere", ORIGIN_PARTITION: b"7", ORIGIN_OFFSET: b"1"}
    bench.send(bench.topics.turns, value, session, partition=wrong, headers=headers)
    assert bench.stray.flush(60) == 0
    bench.start().wait_ready(60)
    wait_until(lambda: bench.dead_letters() != [], "the dead letter", 60, 0.2)
    (letter,) = bench.dead_letters()
    assert letter.reason is DeadLetterReason.INVALID
    assert "published again once already" in letter.message
    assert (letter.topic, letter.partition, letter.value) == (bench.topics.turns, wrong, value)
    assert [header.key for header in letter.headers] == list(headers)
    (record,) = bench.records(bench.topics.turns)
    assert origin(record) == ("elsewhere", 7, 1)
