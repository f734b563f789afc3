from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from processors.reward.agent import RewardProcessor
from processors.reward.formulas import score_segment
from processors.runtime.decoding import MAX_KEY_BYTES
from processors.runtime.records import Outcome, Record
from streams import metrics as names
from streams.contracts import (
    TICK_HEADER,
    AttributedBy,
    ClosedBy,
    DeadLetter,
    DeadLetterReason,
    FeedbackKind,
    ScoredSegment,
    Step,
    StepFeedback,
    TrajectorySegment,
)
from streams.metrics import ProcessorMetrics
from streams.serde import build_codec
from streams.settings import RewardSettings
from streams.topics import DEAD_LETTERS, SCORED, SEGMENTS

CODEC = build_codec()


def segment(number: int, revision: int = 0, *, closed_at: int = 50_000, user: str = "u") -> bytes:
    thumb = StepFeedback(
        event_id=f"f{number}",
        kind=FeedbackKind.THUMB,
        event_time=2_000,
        delay_ms=1_000,
        attributed_by=AttributedBy.TURN_ID,
        source="test",
        value=1.0,
    )
    return CODEC.encode(
        TrajectorySegment(
            segment_id=f"seg{number}",
            revision=revision,
            session_id="s",
            user_id=user,
            source="test",
            ordinal=number,
            closed_by=ClosedBy.END,
            closed_at=closed_at + number,
            first_closed_at=closed_at + number,
            settle_ms=30_000,
            first_event_time=1_000,
            last_event_time=2_000,
            digest="d",
            steps=(Step(turn_id="a", reply="hello", event_time=1_000, feedback=(thumb,)),),
        )
    )


def new_processor(metrics: ProcessorMetrics) -> RewardProcessor:
    return RewardProcessor(RewardSettings(), CODEC, metrics, 1_000_000)


def feed(processor: RewardProcessor, *values: bytes | None, first: int = 0) -> None:
    records = [
        Record(topic=SEGMENTS, partition=0, offset=first + n, timestamp=9, key=b"u", value=value)
        for n, value in enumerate(values)
    ]
    processor.feed(SEGMENTS, records)


def kept(outcome: Outcome) -> list[tuple[bytes, bytes]]:
    return [(key, value) for key, value in outcome.changes.items() if value is not None]


def test_a_segment_is_scored_under_the_key_it_came_with() -> None:
    metrics = ProcessorMetrics("reward")
    processor = new_processor(metrics)
    feed(processor, segment(1))
    outcome = processor.drain(10)
    (output,) = outcome.outputs
    assert (output.topic, output.key) == (SCORED, b"u")
    scored = CODEC.decode(output.value, ScoredSegment)
    assert scored.segment.segment_id == "seg1"
    assert scored.rewards[0].reward > 0
    assert metrics.value(names.SCORED, trainable="true") == 1
    assert metrics.value(names.NONZERO) == 1
    assert outcome.applied == {SEGMENTS: 0}


def test_a_known_revision_is_counted_and_dropped_also_after_a_restart() -> None:
    metrics = ProcessorMetrics("reward")
    processor = new_processor(metrics)
    feed(processor, segment(1, 1))
    before = processor.drain(10)
    restarted = new_processor(metrics)
    restarted.restore(kept(before), before.meta)
    feed(restarted, segment(1, 0), segment(1, 1), segment(1, 2), first=1)
    outcome = restarted.drain(10)
    (output,) = outcome.outputs
    assert CODEC.decode(output.value, ScoredSegment).segment.revision == 2
    assert metrics.value(names.DUPLICATES) == 2


def test_a_restart_gives_the_same_bytes() -> None:
    metrics = ProcessorMetrics("reward")
    straight, first = new_processor(metrics), new_processor(metrics)
    feed(straight, segment(1), segment(2), segment(3))
    expected = [output.value for output in straight.drain(10).outputs]
    feed(first, segment(1), segment(2))
    before = first.drain(10)
    second = new_processor(metrics)
    second.restore(kept(before), before.meta)
    feed(second, segment(3), first=2)
    after = second.drain(10)
    assert [output.value for output in (*before.outputs, *after.outputs)] == expected


def test_broken_segments_become_dead_letters_and_the_rest_is_scored() -> None:
    processor = new_processor(ProcessorMetrics("reward"))
    feed(processor, b"\xff", None, segment(1))
    outputs = processor.drain(10).outputs
    assert [output.topic for output in outputs] == [DEAD_LETTERS, DEAD_LETTERS, SCORED]
    letters = [CODEC.decode(output.value, DeadLetter) for output in outputs[:2]]
    assert [letter.reason for letter in letters] == [
        DeadLetterReason.UNDECODABLE,
        DeadLetterReason.NULL_VALUE,
    ]


def test_segments_that_no_scored_segment_can_hold_become_dead_letters() -> None:
    def changed(**fields: object) -> bytes:
        return msgspec.json.encode(
            msgspec.to_builtins(CODEC.decode(segment(1), TrajectorySegment)) | fields
        )

    broken = [
        changed(closed_at=0).replace(b'"closed_at":0', b'"closed_at":' + b"9" * 30),
        changed(settle_ms=1 << 63),
        changed(user_id="u" * (MAX_KEY_BYTES + 1)),
    ]
    processor = new_processor(ProcessorMetrics("reward"))
    feed(processor, *broken, segment(1))
    outputs = processor.drain(10).outputs
    assert [output.topic for output in outputs] == [*[DEAD_LETTERS] * len(broken), SCORED]
    letters = [CODEC.decode(output.value, DeadLetter) for output in outputs[:-1]]
    assert {letter.reason for letter in letters} == {DeadLetterReason.INVALID}
    assert [letter.value for letter in letters] == broken


def test_a_scored_segment_that_cannot_be_written_is_a_dead_letter_and_not_counted() -> None:
    metrics = ProcessorMetrics("reward")
    tokens = Step(turn_id="a", reply="x", event_time=1, token_ids=(1 << 40,))
    made = replace(CODEC.decode(segment(1), TrajectorySegment), steps=(tokens,))
    processor = new_processor(metrics)
    record = Record(topic=SEGMENTS, partition=0, offset=0, timestamp=9, key=b"u", value=b"raw")
    output = processor._scored(score_segment(made, RewardSettings(), {}), b"u", record)
    letter = CODEC.decode(output.value, DeadLetter)
    assert (letter.reason, letter.value) == (DeadLetterReason.INVALID, b"raw")
    assert metrics.value(names.SCORED, trainable="false") == 0


def test_a_drain_applies_no_more_than_it_may() -> None:
    processor = new_processor(ProcessorMetrics("reward"))
    feed(processor, segment(1), segment(2), segment(3))
    first = processor.drain(2)
    assert (first.records, first.more, first.applied) == (2, True, {SEGMENTS: 1})
    assert processor.buffered(SEGMENTS) == 1
    assert processor.status().tick_after_ms is None
    second = processor.drain(2)
    assert (second.records, second.more) == (1, False)


def test_the_clock_is_that_of_the_partition_before_the_restart() -> None:
    processor = new_processor(ProcessorMetrics("reward"))
    assert processor.status().clock_ms is None
    feed(processor, segment(7))
    before = processor.drain(10)
    assert processor.status().clock_ms == 50_007
    restarted = new_processor(ProcessorMetrics("reward"))
    # Without any entry: the clock does not hang on whose history is left.
    restarted.restore([], before.meta)
    assert restarted.status().clock_ms == 50_007
    assert restarted.drain(10).meta == before.meta


def test_a_tick_is_passed_and_another_null_value_is_a_dead_letter() -> None:
    processor = new_processor(ProcessorMetrics("reward"))
    tick = Record(topic=SEGMENTS, partition=0, offset=0, timestamp=9, headers=((TICK_HEADER, b""),))
    processor.feed(SEGMENTS, [tick])
    outcome = processor.drain(10)
    assert (outcome.outputs, outcome.applied, outcome.records) == ([], {SEGMENTS: 0}, 1)
    feed(processor, None, first=1)
    (output,) = processor.drain(10).outputs
    assert CODEC.decode(output.value, DeadLetter).reason is DeadLetterReason.NULL_VALUE


def size_of(entries: Mapping[bytes, bytes]) -> int:
    return sum(len(key) + len(value) for key, value in entries.items())


def test_a_user_who_was_forgotten_is_null_in_the_changelog() -> None:
    processor = new_processor(ProcessorMetrics("reward"))
    feed(processor, segment(1))
    before = dict(kept(processor.drain(10)))
    assert processor.status().state_bytes == size_of(before)
    long_after = 50_000 + 4 * RewardSettings().history_ms
    feed(processor, segment(2, closed_at=long_after, user="other"), first=1)
    outcome = processor.drain(10)
    gone = {key for key, value in outcome.changes.items() if value is None}
    assert gone
    assert gone <= before.keys()
    left = {key: value for key, value in before.items() if key not in gone} | dict(kept(outcome))
    status = processor.status()
    wanted = (1, len(left), size_of(left))
    assert (status.sessions, status.state_entries, status.state_bytes) == wanted
    restarted = new_processor(ProcessorMetrics("reward"))
    restarted.restore(left.items(), outcome.meta)
    assert restarted.status() == status
