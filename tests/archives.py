"""Archives made by hand, without a broker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from streams.archive.columns import Columns, Row
from streams.archive.files import FileWriter, Footer, Source
from streams.archive.layout import FileName
from streams.archive.store import LocalStore, Store
from streams.contracts import (
    AttributedBy,
    ClosedBy,
    DialogueTurn,
    FeedbackKind,
    Message,
    Record,
    Role,
    ScoredSegment,
    SourceRef,
    Step,
    StepFeedback,
    StepReward,
    TrajectorySegment,
)
from streams.serde import build_codec, load_schemas
from streams.topics import SCORED, TURNS

SOURCE = Source(partitions=2, max_message_bytes=1_000_000, topic_id="abc")
CODEC = build_codec()
NOON_MS = 1_795_953_600_000


def write_file(
    store: Store,
    rows: Sequence[Row],
    *,
    start: int | None = None,
    end: int | None = None,
    expected: type[Record] | None = DialogueTurn,
    aged_out_from: int | None = None,
) -> Footer:
    """Write rows of one partition as one file of an archive."""
    first = rows[0]
    name = FileName(first.topic, first.partition, first.offset if start is None else start)
    with store.workspace(first.topic) as folder:
        writer = FileWriter(
            path=folder / "made.tmp",
            name=name,
            source=SOURCE,
            columns=Columns(expected, CODEC, load_schemas()),
            aged_out_from=aged_out_from,
        )
        for row in rows:
            writer.add(row)
        footer = writer.finish(writer.end if end is None else end)
        store.publish(writer.path, name)
    return footer


def turn(number: int, **changes: object) -> DialogueTurn:
    """A turn; even ones are of users, odd ones of the policy."""
    fields: dict[str, object] = {
        "event_id": f"e{number}",
        "session_id": f"s{number // 4}",
        "turn_id": f"t{number}",
        "role": Role.USER if number % 2 == 0 else Role.ASSISTANT,
        "content": f"turn {number}",
        "event_time": NOON_MS + number * 1_000,
        "source": "test",
        "policy_version": number % 3 if number % 2 else None,
    }
    return DialogueTurn(**(fields | changes))  # type: ignore[arg-type]


def rows(count: int, *, start: int = 0, partition: int = 0, topic: str = TURNS) -> list[Row]:
    """Rows with turns as values."""
    return [
        Row(
            topic=topic,
            partition=partition,
            offset=offset,
            timestamp=NOON_MS + offset * 1_000 + 500,
            timestamp_type="LogAppendTime",
            key=turn(offset).session_id.encode(),
            value=CODEC.encode(turn(offset)),
            headers=(("trace", b"\x00\xff"), ("trace", None), ("empty", b"")),
        )
        for offset in range(start, start + count)
    ]


def small_archive(folder: Path) -> LocalStore:
    """Turns of ten conversations, and their scored segments, as an archiver leaves them."""
    store = LocalStore(folder)
    for partition in range(2):
        write_file(store, rows(10, partition=partition))
        write_file(store, rows(10, start=10, partition=partition))
    write_file(store, list(_scored_rows()), expected=ScoredSegment)
    return store


def scored(number: int, **changes: object) -> ScoredSegment:
    """A segment of one step with a thumb, and its reward."""
    asked = Message(
        turn_id=f"q{number}", role=Role.USER, content=f"question {number}", event_time=NOON_MS
    )
    thumb = StepFeedback(
        event_id=f"f{number}",
        kind=FeedbackKind.THUMB,
        event_time=NOON_MS + 2_000,
        delay_ms=1_000,
        attributed_by=AttributedBy.TURN_ID,
        source="test",
        value=1.0 if number % 3 else -1.0,
    )
    step = Step(
        turn_id=f"a{number}",
        reply=f"answer {number}",
        event_time=NOON_MS + 1_000,
        context=(asked,),
        policy_version=number % 3,
        feedback=(thumb,),
    )
    segment = TrajectorySegment(
        segment_id=f"g{number}",
        revision=0,
        session_id=f"s{number}",
        source="test",
        ordinal=0,
        closed_by=ClosedBy.END,
        closed_at=NOON_MS + 60_000,
        first_closed_at=NOON_MS + 60_000,
        settle_ms=30_000,
        first_event_time=NOON_MS,
        last_event_time=NOON_MS + 2_000,
        digest="d",
        user_id=f"u{number % 4}",
        steps=(step,),
        lineage=(SourceRef(topic=TURNS, partition=0, offset=number),),
    )
    reward = StepReward(turn_id=f"a{number}", reward=0.4 if number % 3 else -0.4)
    fields: dict[str, object] = {
        "segment": segment,
        "formula_id": "composite-1",
        "config_hash": "h",
        "trainable": True,
        "rewards": (reward,),
    }
    return ScoredSegment(**(fields | changes))  # type: ignore[arg-type]


def _scored_rows() -> Iterator[Row]:
    for number in range(12):
        yield Row(
            topic=SCORED,
            partition=0,
            offset=number,
            timestamp=NOON_MS + 60_000,
            key=b"u",
            value=CODEC.encode(scored(number)),
        )
