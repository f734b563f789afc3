"""Outcomes that come days later, through aligner and reward with a horizon of seven days."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import pytest

from processors.feedback_align.agent import AlignProcessor
from processors.reward.agent import RewardProcessor
from processors.runtime.records import Output, Record
from streams.contracts import (
    TICK_HEADER,
    DeadLetter,
    DeadLetterReason,
    DialogueTurn,
    FeedbackEvent,
    FeedbackKind,
    Role,
    ScoredSegment,
)
from streams.metrics import ProcessorMetrics
from streams.outcomes import Defaults, read_outcome
from streams.serde import build_codec
from streams.settings import Settings, load_settings
from streams.topics import DEAD_LETTERS, FEEDBACK, SCORED, SEGMENTS, TURNS

SETTINGS_FILE = Path(__file__).parents[3] / "docs" / "examples" / "outcomes-7-days.yaml"
CODEC = build_codec()
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
T0 = 1_767_225_600_000
SESSIONS = 200
ALIGN_BYTES_MAX = 350
REWARD_BYTES_MAX = 100
RATED_BYTES_MAX = 450, 300
"""Of state for each closed session, and of the aligner's and the reward's for one that was rated;
docs/front-ends.md has the figures."""


@dataclass
class Pipeline:
    """Aligner and reward of one partition, without Kafka."""

    settings: Settings
    records: dict[tuple[str, int], Record] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    scored: list[ScoredSegment] = field(default_factory=list)
    dead: list[DeadLetter] = field(default_factory=list)

    def __post_init__(self) -> None:
        metrics, room = ProcessorMetrics("test"), 1_000_000
        self.aligner = AlignProcessor(0, 1, self.settings.align, CODEC, metrics, room, self)
        self.reward = RewardProcessor(self.settings.reward, CODEC, metrics, room)
        self.aligner.restore((), None)
        self.reward.restore((), None)

    def read(self, topic: str, partition: int, offsets: Sequence[int]) -> Iterator[Record]:
        """As ``records.LogReader``."""
        return (self.records[topic, offset] for offset in offsets)

    def put(self, topic: str, at_ms: int, key: str, value: bytes | None) -> Record:
        offset = self.ends.get(topic, 0)
        self.ends[topic] = offset + 1
        headers = ((TICK_HEADER, b""),) if value is None else ()
        record = Record(
            topic=topic,
            partition=0,
            offset=offset,
            timestamp=at_ms,
            key=key.encode(),
            value=value,
            headers=headers,
        )
        self.records[topic, offset] = record
        return record

    def turn(self, at_ms: int, session: str, number: int, role: Role) -> None:
        made = DialogueTurn(
            event_id=f"{session}-{number}-e",
            session_id=session,
            turn_id=f"{session}-{number}",
            role=role,
            # Replies that differ: those of one template would have a reward of their own.
            content=sha256(f"{session} {number}".encode()).hexdigest()[:60],
            event_time=at_ms,
            source="shop",
            user_id=f"user-{session}",
            session_done=role is Role.ASSISTANT,
        )
        self.aligner.feed(TURNS, [self.put(TURNS, at_ms, session, CODEC.encode(made))])

    def thumb(self, at_ms: int, session: str) -> None:
        event = FeedbackEvent(
            event_id=sha256(session.encode()).hexdigest()[:32],
            session_id=session,
            turn_id=f"{session}-1",
            event_time=at_ms,
            kind=FeedbackKind.THUMB,
            value=1.0,
            source="shop",
        )
        self.aligner.feed(FEEDBACK, [self.put(FEEDBACK, at_ms, session, CODEC.encode(event))])

    def outcome(self, at_ms: int, session: str, name: str) -> None:
        item = {"session_id": session, "turn_id": f"{session}-1", "outcome": name}
        defaults = Defaults(
            source="shop",
            policy="default",
            now_ms=at_ms,
            latest_ms=at_ms,
            values=self.settings.gateway.outcomes,
        )
        event = read_outcome(item, defaults)
        self.aligner.feed(FEEDBACK, [self.put(FEEDBACK, at_ms, session, CODEC.encode(event))])

    def run_until(self, at_ms: int) -> None:
        """Move the clock, and hand on whatever is due."""
        for topic in (TURNS, FEEDBACK):
            self.aligner.feed(topic, [self.put(topic, at_ms, "tick", None)])
        more = True
        while more:
            outcome = self.aligner.drain(1_000)
            more = outcome.more
            for output in outcome.outputs:
                self._hand_on(output, at_ms)

    def _hand_on(self, output: Output, at_ms: int) -> None:
        if output.topic == DEAD_LETTERS:
            self.dead.append(CODEC.decode(output.value, DeadLetter))
            return
        assert output.topic == SEGMENTS
        key = (output.key or b"").decode()
        self.reward.feed(SEGMENTS, [self.put(SEGMENTS, at_ms, key, output.value)])
        for made in self.reward.drain(1_000).outputs:
            if made.topic == SCORED:
                self.scored.append(CODEC.decode(made.value, ScoredSegment))


def talked(*, rated: bool) -> Pipeline:
    """A pipeline that has seen all sessions close, each with a thumb on its reply if ``rated``."""
    made = Pipeline(load_settings(SETTINGS_FILE, environ={}))
    for number in range(SESSIONS):
        at_ms = T0 + 1_000 * number
        made.turn(at_ms, f"s{number}", 0, Role.USER)
        made.turn(at_ms + 500, f"s{number}", 1, Role.ASSISTANT)
        if rated:
            made.thumb(at_ms + 900, f"s{number}")
    made.run_until(T0 + HOUR_MS)
    assert len(made.scored) == SESSIONS
    assert all(scored.trainable is rated for scored in made.scored)
    return made


@pytest.fixture
def pipeline() -> Pipeline:
    return talked(rated=False)


def test_an_outcome_six_days_later_is_a_revision_with_its_reward(pipeline: Pipeline) -> None:
    pipeline.outcome(T0 + 6 * DAY_MS, "s3", "bought")
    pipeline.outcome(T0 + 6 * DAY_MS + 1, "s4", "returned")
    pipeline.run_until(T0 + 6 * DAY_MS + HOUR_MS)
    revised = pipeline.scored[SESSIONS:]
    assert [(s.segment.session_id, s.segment.revision) for s in revised] == [("s3", 1), ("s4", 1)]
    assert [s.rewards[0].reward for s in revised] == [1.0, -1.0]
    assert all(scored.trainable for scored in revised)
    assert any("(bought): +1" in line for line in revised[0].rewards[0].reasons)


def test_an_outcome_after_the_horizon_is_a_dead_letter_and_nothing_else(pipeline: Pipeline) -> None:
    late = T0 + 7 * DAY_MS + HOUR_MS
    pipeline.run_until(late)
    pipeline.outcome(late + 1, "s3", "bought")
    pipeline.run_until(late + 2 * HOUR_MS)
    assert len(pipeline.scored) == SESSIONS
    assert [letter.reason for letter in pipeline.dead] == [DeadLetterReason.UNMATCHED_FEEDBACK]


def test_an_outcome_that_is_sent_twice_counts_once(pipeline: Pipeline) -> None:
    for _ in range(2):
        pipeline.outcome(T0 + DAY_MS, "s3", "bought")
    pipeline.run_until(T0 + DAY_MS + HOUR_MS)
    assert len(pipeline.scored) == SESSIONS + 1
    assert pipeline.dead == []


def test_what_waiting_for_a_week_takes_and_that_it_is_given_back(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline.run_until(T0 + 6 * DAY_MS)
    align, reward = pipeline.aligner.status(), pipeline.reward.status()
    with capsys.disabled():
        print(
            f"\nstate for each closed session: aligner {align.state_bytes / SESSIONS:.0f} bytes, "
            f"reward {reward.state_bytes / SESSIONS:.0f} bytes"
        )
    assert align.sessions == SESSIONS
    assert 0 < align.state_bytes / SESSIONS < ALIGN_BYTES_MAX
    assert 0 < reward.state_bytes / SESSIONS < REWARD_BYTES_MAX
    pipeline.run_until(T0 + 8 * DAY_MS)
    pipeline.run_until(T0 + 8 * DAY_MS + HOUR_MS)
    assert pipeline.aligner.status().sessions == 0


def test_what_waiting_for_a_week_takes_where_each_reply_was_rated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pipeline = talked(rated=True)
    pipeline.run_until(T0 + 6 * DAY_MS)
    # What is kept for a few windows alone goes when the partition's clock moves on.
    pipeline.outcome(T0 + 6 * DAY_MS, "s3", "bought")
    pipeline.run_until(T0 + 6 * DAY_MS + HOUR_MS)
    align, reward = pipeline.aligner.status(), pipeline.reward.status()
    with capsys.disabled():
        print(
            f"\nstate for each rated session: aligner {align.state_bytes / SESSIONS:.0f} bytes, "
            f"reward {reward.state_bytes / SESSIONS:.0f} bytes"
        )
    assert ALIGN_BYTES_MAX < align.state_bytes / SESSIONS < RATED_BYTES_MAX[0]
    assert REWARD_BYTES_MAX < reward.state_bytes / SESSIONS < RATED_BYTES_MAX[1]
