"""One log, consumed live, replayed, and shared by two workers: the same segments, byte for byte.

The log has what late feedback does to segments: revisions, edits, retractions; and what goes
wrong: duplicates, conflicts, feedback for replies that never come. The ticks are whatever
the workers put into it.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from streams.contracts import (
    DeadLetter,
    DeadLetterReason,
    DialogueTurn,
    FeedbackEvent,
    FeedbackKind,
    Role,
    TrajectorySegment,
)
from streams.errors import RecordError
from streams.serde import build_codec
from streams.settings import AlignSettings
from tests.conftest import CreateTopics
from tests.integration.align_worker import topics_of
from tests.integration.harness import Bench, WorkerProcess, wait_until
from tests.oracle.aligner import OracleResult, run_oracle
from tests.oracle.logs import LogRecord

pytestmark = pytest.mark.broker

PARTITIONS = 4
RULES = AlignSettings(
    settle_ms=150,
    gap_ms=400,
    max_open_ms=1_200,
    attribution_window_ms=2_000,
    orphan_wait_ms=500,
    horizon_ms=3_000,
    max_skew_ms=500,
)
ARRIVALS = {"message.timestamp.type": "LogAppendTime"}
CODEC = build_codec()
SETTLED_S = 90.0

Event = DialogueTurn | FeedbackEvent
Written = Counter[tuple[str, int, bytes]]
"""How often each (segment id, revision, bytes) was written."""

Died = Counter[tuple[str, int, int, str]]
"""How often each (topic, partition, offset, reason) went to the dead letters."""


@dataclass(frozen=True)
class Sent:
    """What a user's front end sends: when, after the conversation began, and what."""

    after_ms: int
    event: Event
    happened_before_ms: int = 0


def conversation(name: str, rng: random.Random) -> list[Sent]:
    """A prompt, its reply, and what people and networks make of it."""

    def turn(turn_id: str, role: Role, **more: object) -> DialogueTurn:
        fields: dict[str, object] = {
            "event_id": f"{name}-{turn_id}",
            "session_id": name,
            "turn_id": f"{name}-{turn_id}",
            "role": role,
            "content": f"{turn_id} of {name}",
            "event_time": 0,
            "source": "test",
        }
        return DialogueTurn(**fields | more)  # type: ignore[arg-type]

    def note(event_id: str, **more: object) -> FeedbackEvent:
        fields: dict[str, object] = {
            "event_id": f"{name}-{event_id}",
            "session_id": name,
            "event_time": 0,
            "kind": FeedbackKind.THUMB,
            "source": "test",
            "value": 1.0,
        }
        return FeedbackEvent(**fields | more)  # type: ignore[arg-type]

    reply_id = f"{name}-a1"
    prompt = turn("u1", Role.USER)
    reply = turn("a1", Role.ASSISTANT, request_id="r1", session_done=rng.random() < 0.3)
    thumb = note("f1", turn_id=reply_id)
    sent = [Sent(0, prompt), Sent(60, reply), Sent(rng.choice((20, 100, 250)), thumb)]
    maybe = {
        "by time": Sent(150, note("f2")),
        "late": Sent(900, note("f3", turn_id=reply_id, kind=FeedbackKind.RATING, value=0.5)),
        "edited": Sent(1_000, note("f4", supersedes=f"{name}-f1", value=-1.0)),
        "retracted": Sent(
            1_300, note("f5", supersedes=f"{name}-f1", kind=FeedbackKind.RETRACTION, value=None)
        ),
        "duplicated": Sent(180, prompt),
        "repeated": Sent(1_100, thumb),
        "conflicting": Sent(200, replace(thumb, value=0.25)),
        "for nobody": Sent(120, note("f6", turn_id=f"{name}-a9")),
        "regenerated": Sent(140, turn("a2", Role.ASSISTANT, parent_turn_id=f"{name}-u1")),
        "retried": Sent(130, turn("a3", Role.ASSISTANT, request_id="r1")),
        "late turn": Sent(800, turn("u0", Role.USER), happened_before_ms=770),
        "continued": Sent(300, turn("u2", Role.USER)),
        "from the future": Sent(90, turn("u3", Role.USER), happened_before_ms=-60_000),
    }
    return sent + [event for event in maybe.values() if rng.random() < 0.35]


class ReplayBench(Bench):
    """One pair of input topics, and aligners under names of their own."""

    def __init__(self, bootstrap: str, folder: Path, prefix: str) -> None:
        super().__init__(bootstrap, folder)
        self.prefix = prefix
        self.inputs = topics_of(prefix)

    def start(self, app: str, name: str | None = None) -> WorkerProcess:
        """Another worker of an application that reads the inputs."""
        align = RULES.model_dump()
        config = self.config(name or app, align=align, worker={"max_batch_records": 50})
        return self.worker(
            "tests.integration.align_worker",
            f"{self.prefix}-{app}",
            str(config),
            self.prefix,
            name=name or app,
        )

    def converse(self, sent: list[tuple[float, Sent]]) -> None:
        """Send each event at its time."""
        began = time.monotonic()
        for at_s, one in sorted(sent, key=lambda item: item[0]):
            # Nothing can be waited for here: the events' own times make the log.
            time.sleep(max(0.0, began + at_s - time.monotonic()))
            event = replace(
                one.event, event_time=time.time_ns() // 1_000_000 - one.happened_before_ms
            )
            turn = isinstance(event, DialogueTurn)
            topic = self.inputs.turns if turn else self.inputs.feedback
            self.producer.produce(topic, key=event.session_id, value=CODEC.encode(event, topic))
            self.producer.poll(0)
        assert self.producer.flush(60) == 0

    def log(self, partition: int, topic: str) -> list[LogRecord]:
        return [
            LogRecord(topic, partition, r.offset, r.timestamp, _decoded(r.value, topic))
            for r in self.read(topic, PARTITIONS)
            if r.partition == partition
        ]

    def ticks(self) -> int:
        """How many the workers have put into the log."""
        topics = (self.inputs.turns, self.inputs.feedback)
        return sum(record.value is None for t in topics for record in self.read(t, PARTITIONS))

    def expected(self) -> tuple[Written, Died]:
        """What the rules make of the log as it is now, to its end and beyond."""
        written: Written = Counter()
        died: Died = Counter()
        for partition in range(PARTITIONS):
            result = self._judged(partition)
            written.update(map(_written, result.segments))
            died.update((t, p, o, str(reason)) for t, p, o, reason in result.dead_letters)
        return written, died

    def _judged(self, partition: int) -> OracleResult:
        turns, feedback = (
            self.log(partition, topic) for topic in (self.inputs.turns, self.inputs.feedback)
        )
        return run_oracle(turns, feedback, RULES, final_clock_ms=1 << 62)

    def written(self, app: str) -> tuple[Written, Died]:
        """What an application has put out so far."""
        topics = topics_of(f"{self.prefix}-{app}")
        segments = [
            (CODEC.decode(r.value, TrajectorySegment), r.value or b"")
            for r in self.read(topics.segments, PARTITIONS)
        ]
        dead = [
            CODEC.decode(r.value, DeadLetter) for r in self.read(topics.dead_letters, PARTITIONS)
        ]
        return (
            Counter((s.segment_id, s.revision, data) for s, data in segments),
            Counter((d.topic, d.partition, d.offset, str(d.reason)) for d in dead),
        )

    def assert_equal(self, app: str, expected: tuple[Written, Died]) -> None:
        """Wait until an application has put out as much as expected; it is the same."""
        wanted = sum(counter.total() for counter in expected)
        topics = topics_of(f"{self.prefix}-{app}")

        def is_there() -> bool:
            outputs = (self.read(t, PARTITIONS) for t in (topics.segments, topics.dead_letters))
            return sum(map(len, outputs)) >= wanted

        wait_until(is_there, f"all outputs of {app}", SETTLED_S, 0.3)
        assert self.written(app) == expected


def _decoded(value: bytes | None, topic: str) -> Event | None:
    try:
        if topic.endswith("turns"):
            return CODEC.decode(value, DialogueTurn)
        return CODEC.decode(value, FeedbackEvent)
    except RecordError:
        return None


def _written(segment: TrajectorySegment) -> tuple[str, int, bytes]:
    return segment.segment_id, segment.revision, CODEC.encode(segment)


def _owned(worker: WorkerProcess) -> set[int]:
    """The partitions that a worker said last it owns."""
    said = re.findall(r"owns partitions \[([\d, ]*)\]", worker.output())
    return {int(number) for number in said[-1].split(",")} if said and said[-1] else set()


@pytest.fixture
def bench(
    kafka_bootstrap: str,
    create_topics: CreateTopics,
    unique_name: Callable[[str], str],
    tmp_path: Path,
) -> Iterator[ReplayBench]:
    prefix = unique_name("replay")
    topics = {f"{prefix}.{side}": (PARTITIONS, ARRIVALS) for side in ("turns", "feedback")}
    for app in ("live", "shared", "again", "twice"):
        topics |= {
            f"{prefix}-{app}.segments": (PARTITIONS, {}),
            f"{prefix}-{app}.dead": (PARTITIONS, {}),
            f"{prefix}-{app}.state": (PARTITIONS, {"cleanup.policy": "compact"}),
        }
    create_topics(topics)
    made = ReplayBench(kafka_bootstrap, tmp_path, prefix)
    yield made
    made.stop_all()


def test_live_replayed_and_shared_runs_write_the_same(bench: ReplayBench) -> None:
    rng = random.Random(20)
    live, first = bench.start("live"), bench.start("shared", "shared-1")
    live.wait_ready(60)
    first.wait_ready(60)
    second = _rebalance_while_users_converse(bench, first, rng)
    part = conversations("after", 60, over_s=1.5, rng=rng)
    bench.converse(part)

    expected = bench.expected()
    assert_it_is_worth_comparing(*expected)
    bench.assert_equal("live", expected)
    bench.assert_equal("shared", expected)
    for worker in (live, first, second):
        assert worker.process.poll() is None
        worker.kill()

    again = bench.start("again")
    pair = [bench.start("twice", f"twice-{n}") for n in (1, 2)]
    bench.assert_equal("again", expected)
    bench.assert_equal("twice", expected)
    assert _owned(again) == set(range(PARTITIONS))
    wait_until(lambda: _is_shared(*pair), "two workers share the replay", 60)
    assert bench.ticks() > 0
    # Those that the replays added change nothing.
    assert bench.expected() == expected
    for app in ("live", "shared", "again", "twice"):
        assert bench.written(app) == expected


def conversations(
    prefix: str, count: int, over_s: float, rng: random.Random
) -> list[tuple[float, Sent]]:
    """What so many users send, who begin at random moments, and when."""
    sent: list[tuple[float, Sent]] = []
    for number in range(count):
        begins_s = rng.uniform(0, over_s)
        events = conversation(f"{prefix}-{number}", rng)
        sent.extend((begins_s + one.after_ms / 1000, one) for one in events)
    return sent


def _rebalance_while_users_converse(
    bench: ReplayBench, first: WorkerProcess, rng: random.Random
) -> WorkerProcess:
    """A second worker joins, and users converse until both have their share."""
    shared = threading.Event()

    def users() -> None:
        part = 0
        while part < 2 or not shared.is_set():
            bench.converse(conversations(f"part{part}", 30, over_s=1.0, rng=rng))
            part += 1

    busy = threading.Thread(target=users)
    busy.start()
    try:
        second = bench.start("shared", "shared-2")
        wait_until(lambda: _is_shared(first, second), "two workers share the work", 60)
    finally:
        shared.set()
        busy.join()
    return second


def _is_shared(first: WorkerProcess, second: WorkerProcess) -> bool:
    one, other = _owned(first), _owned(second)
    return bool(one and other) and not one & other and one | other == set(range(PARTITIONS))


def assert_it_is_worth_comparing(written: Written, died: Died) -> None:
    assert written.total() == len(written) > 150
    segments = [CODEC.decode(data, TrajectorySegment) for _, _, data in written]
    assert sum(1 for segment in segments if segment.revision > 1) > 5
    assert {str(segment.closed_by) for segment in segments} >= {"gap", "end"}
    assert any(step.alternatives for segment in segments for step in segment.steps)
    assert {reason for *_, reason in died} >= {
        DeadLetterReason.CONFLICTING_DUPLICATE,
        DeadLetterReason.FUTURE_TIMESTAMP,
        DeadLetterReason.UNMATCHED_FEEDBACK,
    }
