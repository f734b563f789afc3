from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from processors.feedback_align.agent import (
    ORIGIN_OFFSET,
    ORIGIN_TOPIC,
    AlignProcessor,
)
from processors.runtime import deadletters
from processors.runtime.decoding import MAX_KEY_BYTES
from processors.runtime.records import Headers, LogReader, Outcome, Output, Record
from streams import metrics as names
from streams.contracts import (
    TICK_HEADER,
    ClosedBy,
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
from streams.topics import DEAD_LETTERS, FEEDBACK, SEGMENTS, TURNS

CODEC = build_codec()
PARTITIONS = 4
SESSION = next(s for s in map("s{}".format, range(99)) if partition_for(s.encode(), 4) == 0)
STRANGER = next(s for s in map("s{}".format, range(99)) if partition_for(s.encode(), 4) == 3)
MAX_BYTES = 1_000_000


class Log:
    """Feeds a processor records with rising offsets."""

    def __init__(self, processor: AlignProcessor | None = None, first: int = 0) -> None:
        self.records: dict[tuple[str, int], Record] = {}
        self.processor = processor or new_processor(ProcessorMetrics("feedback_align"), self)
        self.next = {TURNS: first, FEEDBACK: first}

    def read(self, topic: str, partition: int, offsets: Sequence[int]) -> Iterator[Record]:
        """As ``records.LogReader``."""
        return (self.records[topic, offset] for offset in offsets)

    def put(self, topic: str, at_ms: int, value: bytes | None, headers: Headers = ()) -> int:
        offset = self.next[topic]
        self.next[topic] = offset + 1
        record = Record(
            topic=topic,
            partition=0,
            offset=offset,
            timestamp=at_ms,
            key=b"key",
            value=value,
            headers=headers,
        )
        self.records[topic, offset] = record
        self.processor.feed(topic, [record])
        return offset

    def tick(self, at_ms: int) -> Outcome:
        for topic in (TURNS, FEEDBACK):
            self.put(topic, at_ms, None, ((TICK_HEADER, b""),))
        return self.processor.drain(1_000)


def turn(at_ms: int, role: Role, session: str = SESSION, *, done: bool = False) -> bytes:
    return CODEC.encode(
        DialogueTurn(
            event_id=f"{session}-{role}-{at_ms}",
            session_id=session,
            turn_id=f"{role}-{at_ms}",
            role=role,
            content="text",
            event_time=at_ms,
            source="test",
            session_done=done,
        )
    )


def thumb(at_ms: int, turn_id: str) -> bytes:
    return CODEC.encode(
        FeedbackEvent(
            event_id=f"f-{at_ms}",
            session_id=SESSION,
            turn_id=turn_id,
            kind=FeedbackKind.THUMB,
            value=1.0,
            event_time=at_ms,
            source="test",
        )
    )


@pytest.fixture
def metrics() -> ProcessorMetrics:
    return ProcessorMetrics("feedback_align")


@pytest.fixture
def log(metrics: ProcessorMetrics) -> Log:
    return new_log(metrics)


def new_log(metrics: ProcessorMetrics, max_bytes: int = MAX_BYTES, **limits: int | None) -> Log:
    log = Log()
    log.processor = new_processor(metrics, log, max_bytes, **limits)
    return log


def new_processor(
    metrics: ProcessorMetrics, log: LogReader, max_bytes: int = MAX_BYTES, **limits: Any
) -> AlignProcessor:
    return AlignProcessor(0, PARTITIONS, AlignSettings(), CODEC, metrics, max_bytes, log, **limits)


def dead(outputs: list[Output] | tuple[Output, ...]) -> list[DeadLetter]:
    return [CODEC.decode(o.value, DeadLetter) for o in outputs if o.topic == DEAD_LETTERS]


def test_a_conversation_becomes_a_segment_under_its_key(
    log: Log, metrics: ProcessorMetrics
) -> None:
    log.put(TURNS, 1_000, turn(1_000, Role.USER))
    log.put(TURNS, 2_000, turn(2_000, Role.ASSISTANT, done=True))
    log.put(FEEDBACK, 3_000, thumb(3_000, "assistant-2000"))
    outcome = log.tick(33_002)
    (output,) = outcome.outputs
    assert (output.topic, output.key) == (SEGMENTS, SESSION.encode())
    segment = CODEC.decode(output.value, TrajectorySegment)
    assert (segment.closed_by, segment.closed_at) == (ClosedBy.END, 33_000)
    assert outcome.due_ms == [33_000]
    assert outcome.applied == {TURNS: 2, FEEDBACK: 1}
    assert metrics.value(names.SEGMENTS, closed_by="end") == 1
    assert list(outcome.changes) != []


def test_a_restart_goes_on_from_entries_and_meta_as_if_nothing_had_happened(
    metrics: ProcessorMetrics,
) -> None:
    def run(restart: bool) -> bytes | None:
        log = new_log(metrics)
        log.put(TURNS, 1_000, turn(1_000, Role.USER))
        before = log.tick(1_500)
        if restart:
            log.processor = new_processor(metrics, log)
            entries = [(key, value) for key, value in before.changes.items() if value is not None]
            log.processor.restore(entries, before.meta)
        log.put(TURNS, 2_000, turn(2_000, Role.ASSISTANT, done=True))
        (output,) = log.tick(40_000).outputs
        return output.value

    assert run(restart=True) == run(restart=False)


def test_broken_records_become_dead_letters_once_they_are_passed(
    log: Log, metrics: ProcessorMetrics
) -> None:
    log.put(TURNS, 1_000, turn(1_000, Role.USER))
    broken = log.put(TURNS, 1_100, b"\xff", headers=(("h", b"1"),))
    empty = log.put(FEEDBACK, 900, None)
    first = log.processor.drain(1_000)
    assert [(d.topic, d.offset, d.reason) for d in dead(list(first.outputs))] == [
        (FEEDBACK, empty, DeadLetterReason.NULL_VALUE)
    ]
    second = log.tick(1_200)
    (letter,) = dead(list(second.outputs))
    assert (letter.offset, letter.value, letter.key) == (broken, b"\xff", b"key")
    assert letter.time == 1_100
    assert metrics.value(names.DEAD_LETTERS, reason="undecodable") == 1
    assert log.tick(1_300).outputs == []


def test_an_oversized_record_is_kept_cut(metrics: ProcessorMetrics) -> None:
    log = new_log(metrics, max_bytes=200_000)
    log.put(TURNS, 1_000, b"{" + bytes(300_000))
    (letter,) = dead(list(log.tick(1_200).outputs))
    assert letter.reason is DeadLetterReason.OVERSIZED
    assert letter.attributes["value_bytes"] == "300001"


def test_a_segment_that_no_record_can_hold_becomes_a_dead_letter(
    metrics: ProcessorMetrics,
) -> None:
    log = new_log(metrics, max_bytes=deadletters.OVERHEAD_BYTES + 100)
    log.put(TURNS, 1_000, turn(1_000, Role.USER))
    log.put(TURNS, 2_000, turn(2_000, Role.ASSISTANT, done=True))
    (letter,) = dead(list(log.tick(40_000).outputs))
    assert letter.reason is DeadLetterReason.OVERSIZED
    assert (letter.topic, letter.offset) == (TURNS, 1)
    assert "align.max_bytes" in letter.message


def test_a_misplaced_record_is_published_again_once(log: Log, metrics: ProcessorMetrics) -> None:
    value = turn(1_000, Role.USER, STRANGER)
    offset = log.put(TURNS, 1_000, value, headers=(("h", None),))
    (again,) = log.tick(1_200).outputs
    assert (again.topic, again.partition, again.key) == (TURNS, 3, STRANGER.encode())
    assert again.value == value
    assert dict(again.headers)[ORIGIN_OFFSET] == str(offset).encode()
    assert metrics.value(names.MISPLACED, topic=TURNS) == 1
    log.put(TURNS, 1_300, value, headers=((ORIGIN_TOPIC, b"t"),))
    (letter,) = dead(list(log.tick(1_400).outputs))
    assert letter.reason is DeadLetterReason.INVALID
    assert "belongs to partition 3" in letter.message


def test_a_misplaced_record_that_no_room_is_left_for_becomes_a_dead_letter(
    metrics: ProcessorMetrics,
) -> None:
    value = turn(1_000, Role.USER, STRANGER)
    for room, topic in ((len(value) + 400, TURNS), (len(value) + 20, DEAD_LETTERS)):
        log = new_log(metrics, input_max_bytes=room)
        log.put(TURNS, 1_000, value)
        (output,) = log.tick(1_200).outputs
        assert output.topic == topic
    (letter,) = dead([output])
    assert (letter.reason, letter.value) == (DeadLetterReason.OVERSIZED, value)
    assert metrics.value(names.MISPLACED, topic=TURNS) == 1


def json_turn(**fields: object) -> bytes:
    known = {
        "event_id": "e",
        "session_id": SESSION,
        "turn_id": "t",
        "role": "assistant",
        "content": "text",
        "event_time": 1_000,
        "source": "test",
    }
    return msgspec.json.encode(known | fields)


@pytest.mark.parametrize(
    "value",
    [
        json_turn(token_ids=[1 << 31]),
        json_turn(prompt_token_ids=[-1 << 63]),
        json_turn(sampling={"top_k": 1 << 31}),
        json_turn(event_time=0).replace(b'"event_time":0', b'"event_time":' + b"9" * 30),
        json_turn(token_ids=[0]).replace(b"[0]", b"[" + b"9" * 30 + b"]"),
        json_turn(sampling={"seed": 0}).replace(b":0}", b":" + b"9" * 30 + b"}"),
        json_turn(session_id=SESSION + "x" * MAX_KEY_BYTES),
        json_turn(user_id="x" * MAX_KEY_BYTES),
        json_turn(policy="ü" * (MAX_KEY_BYTES // 2)),
    ],
)
def test_what_could_never_be_written_again_is_a_dead_letter_at_once(log: Log, value: bytes) -> None:
    log.put(TURNS, 1_000, value)
    (letter,) = dead(list(log.tick(1_200).outputs))
    assert (letter.reason, letter.value) == (DeadLetterReason.INVALID, value)


def test_ids_as_long_as_they_may_be_pass_through(log: Log) -> None:
    known = len(SESSION) + len("default")
    user = "ü" * ((MAX_KEY_BYTES - known) // 2)
    log.put(TURNS, 1_000, json_turn(user_id=user, session_done=True))
    (output,) = log.tick(40_000).outputs
    assert (output.topic, output.key) == (SEGMENTS, user.encode())


def test_a_rejected_record_keeps_its_bytes_and_a_duplicate_is_counted(
    log: Log, metrics: ProcessorMetrics
) -> None:
    value = turn(1_000, Role.USER)
    log.put(TURNS, 1_000, value)
    log.put(TURNS, 1_001, value)
    future = turn(9_000_000, Role.USER)
    log.put(TURNS, 1_002, future, headers=(("h", b"1"),))
    (letter,) = dead(list(log.tick(1_200).outputs))
    assert letter.reason is DeadLetterReason.FUTURE_TIMESTAMP
    assert (letter.value, letter.key) == (future, b"key")
    assert [header.key for header in letter.headers] == ["h"]
    assert metrics.value(names.DUPLICATES) == 1


def test_feedback_that_died_waiting_is_encoded_again(log: Log) -> None:
    log.put(FEEDBACK, 1_000, thumb(1_000, "nobody"))
    log.tick(2_000)
    (letter,) = dead(list(log.tick(3_700_000).outputs))
    assert letter.reason is DeadLetterReason.UNMATCHED_FEEDBACK
    assert letter.attributes == {"value": "encoded again"}
    assert CODEC.decode(letter.value, FeedbackEvent).turn_id == "nobody"


def test_ticks_are_wanted_while_records_wait_or_something_is_due(log: Log) -> None:
    assert not log.processor.status().needs_tick(0)
    log.put(TURNS, 1_000, turn(1_000, Role.USER))
    log.processor.drain(1_000)
    assert log.processor.buffered(TURNS) == 1
    assert log.processor.status().needs_tick(0)
    log.tick(1_100)
    assert log.processor.buffered(TURNS) == 0
    assert not log.processor.status().needs_tick(1_200)
    assert log.processor.status().needs_tick(2_000_000)
