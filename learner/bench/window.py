"""What the learner's window takes, and whether arrivals wait for training.

A feed with a real window, codec and thread reads segments that are made as it asks for them, in
place of a Kafka consumer. Three parts, one after the other:

1. *idle*: the window is filled, and filled once more, as fast as it takes arrivals;
2. *training*: updates run in the main thread, on samples of that window, with arrivals at a
   steady rate;
3. *memory*: what the full window takes, and by how much the process grew while the whole
   content changed.

*append* is what arrivals and trainer meet in: from the batch decoded and packed to the batch in
the window, the wait for the lock included.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import psutil
from msgspec.structs import replace

from learner.feed import Feed
from learner.kafka import Outgoing
from learner.model import load_base
from learner.trainer import PpoTrainer
from learner.window import Packed, Uses, Window, sample
from streams.bench.machine import describe_machine
from streams.bench.report import Goal, Report, percentile
from streams.clock import SystemClock
from streams.contracts import (
    ClosedBy,
    Message,
    Role,
    ScoredSegment,
    Step,
    StepReward,
    TrajectorySegment,
)
from streams.errors import LearnerError, UpdateStoppedError
from streams.serde import Codec, build_codec
from streams.settings import Settings

OnStep = Callable[[str], None]

APPEND_P99_MS = 10.0
GROWTH = 0.05
POLL_GAP_S = 10.0
"""The shortest session timeout in use is 10 s (``kafka.session_timeout_ms``)."""

_TEMPLATES = 40
_USER_TOKENS = 16
_REPLY_TOKENS = 16
_SPECIAL = 3
"""Ids below are not those of words."""
_SEED = 1
_WAIT_S = 0.05
_FILLED_WITHIN_S = 3_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """What to measure.

    Attributes:
        segments: The window's cap.
        turns: Replies in each segment, each with what the user said before.
        rate: Arrivals a second during the updates.
        seconds: After how long these end, at the next micro-batch.
    """

    segments: int = 3_000
    turns: int = 40
    rate: float = 20.0
    seconds: float = 60.0


def run(settings: Settings, plan: WindowPlan, on_step: OnStep) -> Report:
    """Measure; see the module.

    Raises:
        ModelError: The base model cannot be loaded.
        LearnerError: Arrivals stand still.
    """
    machine = describe_machine()
    on_step(f"loading {settings.model.base}")
    base = load_base(settings.model, settings.data_dir)
    trainer = PpoTrainer(base, settings.learner, settings.model)
    codec = build_codec()
    source = _Arrivals(codec, plan.turns, base.chat.vocabulary_size)
    window = Window(
        max_segments=plan.segments,
        max_tokens=settings.learner.window_tokens,
        max_uses=settings.learner.max_updates_per_segment,
    )
    stopping = threading.Event()
    feed = _TimedFeed(
        consumer=source,
        topic=_Arrivals.topic,
        policy=settings.learner.policy,
        window=window,
        codec=codec,
        writer=_NoWriter(),
        dead_letters="dead",
        clock=SystemClock(),
        stopping=stopping,
    )
    try:
        return _measure(settings, plan, on_step, machine, trainer, source, feed)
    finally:
        feed.stop()


def _measure(
    settings: Settings,
    plan: WindowPlan,
    on_step: OnStep,
    machine: Mapping[str, Any],
    trainer: PpoTrainer,
    source: _Arrivals,
    feed: _TimedFeed,
) -> Report:
    feed.start(None, lambda _: {})
    on_step(f"filling the window with {plan.segments} segments of {plan.turns} replies")
    source.allow(plan.segments)
    _wait_for(source, feed, plan.segments)
    source.allow(plan.segments)
    _wait_for(source, feed, 2 * plan.segments)
    full = _rss()
    idle = feed.figures()
    on_step(f"updates, with {plan.rate:g} arrivals a second, for {plan.seconds:g} s")
    feed.forget()
    source.pace(plan.rate)
    trained = _train(settings, plan, trainer, feed)
    training = feed.figures() | {"seconds": [trained]}
    source.pace(None)
    on_step("filling the window once more")
    arrived = source.given
    source.allow(plan.segments)
    _wait_for(source, feed, arrived + plan.segments)
    # What an update took stays with the process and is none of the window's.
    before = _rss()
    source.allow(plan.segments)
    _wait_for(source, feed, arrived + 2 * plan.segments)
    status, after = feed.status(), _rss()
    memory = {
        "segments": [float(status.segments)],
        "tokens": [float(status.tokens)],
        "packed_mb": [status.held_bytes / 1e6],
        "process_mb": [full / 1e6],
        "growth": [after / before - 1.0],
    }
    subjects = {"idle": idle, "training": training, "memory": memory}
    return Report(
        bench="window",
        machine=machine,
        subjects=subjects,
        goals=(
            Goal("segments held", float(plan.segments), memory["segments"][0]),
            Goal(
                "tokens held, share of the cap",
                1.0,
                status.tokens / settings.learner.window_tokens,
                at_most=True,
            ),
            Goal("growth while the content changed", GROWTH, memory["growth"][0], at_most=True),
            Goal(
                "append p99 ms during an update",
                APPEND_P99_MS,
                training["append_p99_ms"][0],
                at_most=True,
            ),
            Goal(
                "longest time between two polls during an update, s",
                POLL_GAP_S,
                training["poll_gap_max_ms"][0] / 1e3,
                at_most=True,
            ),
        ),
    )  # fmt: skip


def _train(settings: Settings, plan: WindowPlan, trainer: PpoTrainer, feed: Feed) -> float:
    """Update after update on what is in the window, until the time is up; how long it took."""
    began, rng = time.monotonic(), random.Random(_SEED)

    def is_over() -> bool:
        return time.monotonic() - began > plan.seconds

    with contextlib.suppress(UpdateStoppedError):
        while not is_over():
            drawn = sample(feed.seal().snapshot.candidates, settings.learner.batch_segments, rng)
            segments = [candidate.scored for candidate in drawn]
            trainer.train(segments, 0, _no_adapter, is_over)
    return time.monotonic() - began


def _no_adapter(version: int) -> Any:
    raise AssertionError(f"version {version} wrote none of this")


def _rss() -> float:
    return float(psutil.Process().memory_info().rss)


def _wait_for(source: _Arrivals, feed: Feed, count: int) -> None:
    deadline = time.monotonic() + _FILLED_WITHIN_S
    while sum(feed.status().arrivals.values()) < count:
        if time.monotonic() > deadline:
            raise LearnerError(f"{source.given} of {count} arrivals came in an hour")
        time.sleep(_WAIT_S)


class _TimedFeed(Feed):
    """A feed that notes how long its appends take and how far apart its polls are."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self._appends_ms: list[float] = []
        self._source: _Arrivals = fields["consumer"]

    def append(
        self,
        arrived: Sequence[Packed],
        past_uses: Mapping[str, Uses],
        records: Sequence[Any],
        *,
        dead_letters: int,
    ) -> None:
        began = time.perf_counter()
        super().append(arrived, past_uses, records, dead_letters=dead_letters)
        if arrived:
            self._appends_ms.append((time.perf_counter() - began) * 1e3)

    def forget(self) -> None:
        """Begin anew."""
        self._appends_ms.clear()
        self._source.gaps_ms.clear()

    def figures(self) -> dict[str, list[float]]:
        """What was noted since."""
        appends = list(self._appends_ms)
        return {
            "appends": [float(len(appends))],
            "append_p50_ms": [percentile(appends, 0.5)],
            "append_p99_ms": [percentile(appends, 0.99)],
            "append_max_ms": [max(appends)],
            "poll_gap_max_ms": [max(list(self._source.gaps_ms), default=0.0)],
        }


class _NoWriter:
    """Nothing here becomes a dead letter."""

    def write(self, records: Sequence[Outgoing]) -> None:
        raise LearnerError(f"{len(records)} records could not be used")


class _Record:
    """A Kafka message, as far as the feed looks at one."""

    def __init__(self, offset: int, value: bytes) -> None:
        self._offset, self._value = offset, value

    def error(self) -> None:
        return None

    def topic(self) -> str:
        return _Arrivals.topic

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset

    def value(self) -> bytes:
        return self._value

    def headers(self) -> None:
        return None


class _Arrivals:
    """Stands in for a consumer: as many segments as are allowed, or so many a second."""

    topic = "scored"
    _MOST = 50

    def __init__(self, codec: Codec, turns: int, vocabulary: int) -> None:
        self._codec = codec
        rng = random.Random(_SEED)
        self._templates = [conversation(turns, rng, vocabulary) for _ in range(_TEMPLATES)]
        self._allowed = 0
        self._rate: float | None = None
        self._since = 0.0
        self._base = 0
        self._polled: float | None = None
        self.given = 0
        self.gaps_ms: list[float] = []

    def allow(self, count: int) -> None:
        """Let so many more come as fast as they are taken."""
        self._allowed += count

    def pace(self, rate: float | None) -> None:
        """Let so many a second come from now on; None ends it."""
        self._base, self._since, self._rate = self.given, time.monotonic(), rate
        self._allowed = self.given

    def list_topics(self, topic: str, timeout: float) -> Any:
        found = SimpleNamespace(error=None, partitions={0: None})
        return SimpleNamespace(topics={topic: found})

    def get_watermark_offsets(self, partition: Any, timeout: float) -> tuple[int, int]:
        return 0, 0

    def assign(self, partitions: Sequence[Any]) -> None:
        """Everything comes from one partition."""

    def close(self) -> None:
        """There is nothing to close."""

    def consume(self, count: int, timeout: float) -> list[_Record]:
        now = time.perf_counter()
        if self._polled is not None:
            self.gaps_ms.append((now - self._polled) * 1e3)
        due = self._due()
        if due <= 0:
            time.sleep(min(timeout, _WAIT_S))
        made = [self._make() for _ in range(min(due, count, self._MOST))]
        self._polled = time.perf_counter()
        return made

    def _due(self) -> int:
        if self._rate is None:
            return self._allowed - self.given
        return self._base + int(self._rate * (time.monotonic() - self._since)) - self.given

    def _make(self) -> _Record:
        number, self.given = self.given, self.given + 1
        whole = self._templates[number % len(self._templates)]
        segment = replace(whole.segment, segment_id=f"{number:032x}", session_id=f"s{number}")
        return _Record(number, self._codec.encode(replace(whole, segment=segment)))


def conversation(turns: int, rng: random.Random, vocabulary: int) -> ScoredSegment:
    """A segment of so many replies, as a server records them: each with the whole conversation
    as its prompt's token ids, with log-probabilities, and every third one rated."""
    so_far: tuple[int, ...] = ()
    steps = []
    for number in range(turns):
        prompt = (*so_far, *_tokens(_USER_TOKENS, rng, vocabulary))
        reply = _tokens(_REPLY_TOKENS, rng, vocabulary)
        steps.append(
            Step(
                turn_id=f"reply-{number}",
                reply=_words(reply),
                event_time=1_000 * number,
                context=(
                    Message(
                        turn_id=f"user-{number}",
                        role=Role.USER,
                        content=_words(prompt[-_USER_TOKENS:]),
                        event_time=1_000 * number,
                    ),
                ),
                token_ids=reply,
                behaviour_logprobs=tuple(-rng.random() for _ in reply),
                prompt_token_ids=prompt,
                policy_version=0,
            )
        )
        so_far = (*prompt, *reply)
    return ScoredSegment(
        segment=TrajectorySegment(
            segment_id="",
            revision=0,
            session_id="",
            source="bench",
            ordinal=0,
            closed_by=ClosedBy.END,
            closed_at=0,
            first_closed_at=0,
            settle_ms=0,
            first_event_time=0,
            last_event_time=0,
            digest="0" * 64,
            steps=tuple(steps),
        ),
        formula_id="bench",
        config_hash="0" * 64,
        trainable=True,
        rewards=tuple(
            StepReward(turn_id=step.turn_id, reward=rng.choice((-1.0, 1.0))) for step in steps[::3]
        ),
    )


def _tokens(count: int, rng: random.Random, vocabulary: int) -> tuple[int, ...]:
    return tuple(rng.randrange(_SPECIAL, vocabulary) for _ in range(count))


def _words(tokens: Sequence[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


__all__ = ["WindowPlan", "conversation", "run"]
