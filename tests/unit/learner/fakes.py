"""Stand-ins that the learner's tests share: small, but doing real work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from confluent_kafka import KafkaError
from safetensors.torch import load_file, save_file

from learner.checkpoint import LearnerState
from learner.examples import ExampleFile
from learner.kafka import Outgoing
from learner.loop import Trained
from learner.publish import KL_METRIC, BaseIdentity, FinishedUpdate
from learner.warming import WarmStarted, WarmStartHooks
from learner.window import NEVER, Arrival, Candidate, Packed, Uses, Window, pack
from streams.contracts import (
    TICK_HEADER,
    ClosedBy,
    GateDecision,
    ModelVersion,
    ScoredSegment,
    SourceRef,
    Step,
    StepReward,
    TrajectorySegment,
)
from streams.errors import BrokerError, UpdateStoppedError
from streams.serde import build_codec

WEIGHTS = "adapter_model.safetensors"
BASE = BaseIdentity(
    model_id="fake",
    model_digest="b" * 64,
    tokenizer_digest="c" * 64,
    template_digest="d" * 64,
    adapter_rank=2,
    adapter_alpha=4.0,
)


def scored(
    segment_id: str,
    *,
    revision: int = 0,
    trainable: bool = True,
    policy: str = "default",
    tokens: int = 4,
    reward: float = 1.0,
    policy_version: int | None = None,
    session: str | None = None,
) -> ScoredSegment:
    """A segment of one step with ``tokens`` reply tokens."""
    step = Step(
        turn_id=f"{segment_id}-t",
        reply="reply",
        event_time=1_000,
        token_ids=tuple(range(tokens)),
        policy_version=policy_version,
    )
    segment = TrajectorySegment(
        segment_id=segment_id,
        revision=revision,
        session_id=session or f"session-{segment_id}",
        source="test",
        ordinal=0,
        closed_by=ClosedBy.END,
        closed_at=2_000,
        first_closed_at=2_000,
        settle_ms=0,
        first_event_time=1_000,
        last_event_time=1_000,
        digest="0" * 64,
        policy=policy,
        steps=(step,),
    )
    return ScoredSegment(
        segment=segment,
        formula_id="test",
        config_hash="0" * 64,
        trainable=trainable,
        untrainable_reason=None if trainable else "all rewards are 0",
        rewards=(StepReward(turn_id=step.turn_id, reward=reward),),
    )


def at(offset: int, partition: int = 0, topic: str = "scored") -> SourceRef:
    """Coordinates."""
    return SourceRef(topic=topic, partition=partition, offset=offset)


def no_adapter(version: int) -> Path:
    """For trainings of the base model, which ask for none."""
    raise AssertionError(f"asked for version {version}")


def never() -> bool:
    """For trainings that nothing stops."""
    return False


class FakeTrainer:
    """One weight vector, pushed with momentum by the mean reward and torch's noise.

    (torch's own optimizers take ten seconds to import what they need to compile.)
    """

    def __init__(self) -> None:
        self.weights = torch.zeros(3)
        self.momentum = torch.zeros(3)
        self.steps = 0
        self.warm_steps = 0
        self.kl = 0.01
        self.poison = False
        self.trained_on: list[tuple[str, ...]] = []

    @property
    def base(self) -> BaseIdentity:
        return BASE

    def train(
        self,
        segments: Sequence[ScoredSegment],
        current_version: int,
        adapter_of: Callable[[int], Path],
        should_stop: Callable[[], bool] = never,
    ) -> Trained | None:
        if should_stop():
            raise UpdateStoppedError("stopped")
        if current_version:
            adapter_of(current_version)
        usable = [s for s in segments if s.rewards[0].reward != 0]
        if not usable:
            return None
        mean = sum(s.rewards[0].reward for s in usable) / len(usable)
        self.momentum = 0.9 * self.momentum + mean + torch.rand(3)
        self.weights = self.weights + 0.1 * self.momentum
        if self.poison:
            self.weights[0] = float("nan")
        self.steps += 1
        self.trained_on.append(tuple(s.segment.segment_id for s in usable))
        return Trained(
            metrics={KL_METRIC: self.kl, "mean_reward": mean, "parent": float(current_version)},
            optimizer_step=self.steps,
            used=frozenset(self.trained_on[-1]),
        )

    @property
    def optimizer_step(self) -> int:
        return self.steps

    def warm_start(self, file: ExampleFile, hooks: WarmStartHooks) -> WarmStarted:
        """As many steps as there are examples, each adds one to the weights."""
        start, done = self.weights, 0
        if hooks.resume is not None:
            self.weights, done = hooks.resume["weights"].clone(), int(hooks.resume["step"])
        for step in range(done, len(file.examples)):
            if hooks.should_stop():
                hooks.save({"step": step, "weights": self.weights})
                self.weights = start
                raise UpdateStoppedError("stopped")
            self.weights = self.weights + 1
            self.warm_steps += 1
            hooks.shown(step + 1, len(file.examples), 1.0)
            hooks.save({"step": step + 1, "weights": self.weights})
        decision = GateDecision(name="warm_start_loss", passed=not self.poison)
        return WarmStarted(metrics={"warm_start/steps": float(done)}, gate=(decision,))

    def state_dict(self) -> Mapping[str, Any]:
        return {"weights": self.weights, "momentum": self.momentum, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weights, self.momentum = state["weights"].clone(), state["momentum"].clone()
        self.steps = state["steps"]

    def save_adapter(self, folder: Path) -> None:
        save_file({"weights": self.weights}, str(folder / WEIGHTS))
        (folder / "adapter_config.json").write_text("{}", encoding="utf-8")


@dataclass
class FakeWriter:
    """Keeps what it is given; fails ``failures`` times first."""

    records: list[Outgoing] = field(default_factory=list)
    failures: int = 0
    on_write: Callable[[], None] = lambda: None

    def write(self, records: Sequence[Outgoing]) -> None:
        self.on_write()
        if self.failures:
            self.failures -= 1
            raise BrokerError("Kafka is away")
        self.records.extend(records)

    def versions(self) -> list[ModelVersion]:
        """The version events written, decoded."""
        codec = build_codec()
        return [codec.decode(record.value, ModelVersion) for record in self.records]


def candidates(ids: Iterable[str]) -> tuple[Candidate, ...]:
    """One candidate per id, at offsets from 0."""
    return tuple(
        Candidate(ref=at(offset), scored=scored(segment_id))
        for offset, segment_id in enumerate(ids)
    )


def packed(ids: Iterable[str]) -> tuple[Packed, ...]:
    """The same, as a window holds them."""
    return tuple(pack(c.ref, c.scored, lambda _: True) for c in candidates(ids))


def add(
    window: Window, ref: SourceRef, segment: ScoredSegment, *, past_uses: Uses = NEVER
) -> Arrival:
    """Let a segment arrive in a window."""
    return window.add(window.pack(ref, segment), past_uses=past_uses)


def finished(trainer: FakeTrainer, **changes: Any) -> FinishedUpdate:
    """An update by ``trainer`` on two segments, offsets 0 to 2, ready to be published."""
    before = LearnerState.capture(trainer.state_dict())
    used = candidates(("a", "b"))
    trained = trainer.train([c.scored for c in used], 0, no_adapter)
    assert trained is not None
    made = FinishedUpdate(
        metrics=trained.metrics,
        optimizer_step=trained.optimizer_step,
        used=used,
        since=(at(0),),
        positions=(at(2),),
        window=(at(0), at(1)),
        rng=b"[]",
        sealed_at=5,
        reason="enough_segments",
        config_hash="e" * 64,
        save_adapter=trainer.save_adapter,
        before=before,
        after=LearnerState.capture(trainer.state_dict()),
    )
    return replace(made, **changes)


def stored_weights(folder: Path) -> list[float]:
    """The weights that ``FakeTrainer.save_adapter`` wrote."""
    values: list[float] = load_file(str(folder / WEIGHTS))["weights"].tolist()
    return values


def encoded(segment: ScoredSegment) -> bytes:
    """A segment as it is in Kafka."""
    return build_codec().encode(segment)


class _Message:
    def __init__(self, topic: str, offset: int, value: bytes | None) -> None:
        self._topic, self._offset, self._value = topic, offset, value

    def error(self) -> None:
        return None

    def topic(self) -> str:
        return self._topic

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes:
        return b"key"

    def value(self) -> bytes | None:
        return self._value

    def headers(self) -> list[tuple[str, bytes]] | None:
        return None

    def timestamp(self) -> tuple[int, int]:
        return (1, 3_000)


class _EndOfPartition(_Message):
    def error(self) -> Any:
        return KafkaError(KafkaError._PARTITION_EOF)


class Ticking(_Message):
    """A record of the aligner's clock, without a value."""

    def headers(self) -> list[tuple[str, bytes]]:
        return [("other", b""), (TICK_HEADER, b"")]


class Failing(_Message):
    """News of an error, at no offset; ``code`` decides which."""

    code = KafkaError._ALL_BROKERS_DOWN
    retriable = False

    def error(self) -> Any:
        return KafkaError(self.code, retriable=self.retriable)

    def offset(self) -> int:
        return -1_001


Entry = bytes | None | type[_Message]
"""What a log in memory holds: a value, or a message of another kind."""


class FakeConsumer:
    """Reads a list as a topic of one partition, whose records below ``low`` are gone."""

    def __init__(self, log: Sequence[Entry], topic: str, *, low: int = 0) -> None:
        self._log = log
        self._topic = topic
        self._low = low
        self._next: int | None = None
        self._end_told = -1
        self.closed = False

    def list_topics(self, topic: str, timeout: float) -> Any:
        assert topic == self._topic
        assert timeout > 0
        found = SimpleNamespace(error=None, partitions={0: None})
        return SimpleNamespace(topics={topic: found})

    def get_watermark_offsets(self, partition: Any, timeout: float) -> tuple[int, int]:
        assert partition.topic == self._topic
        assert timeout > 0
        return self._low, len(self._log)

    def assign(self, partitions: Sequence[Any]) -> None:
        self._next = max(partitions[0].offset, self._low) if partitions else None
        self._end_told = -1

    def consume(self, count: int, timeout: float) -> list[_Message]:
        if self._next is None:
            return []
        values = self._log[self._next : self._next + count]
        found = [
            value(self._topic, self._next + index, None)
            if isinstance(value, type)
            else _Message(self._topic, self._next + index, value)
            for index, value in enumerate(values)
        ]
        self._next += len(found)
        if not found and self._end_told != self._next:
            self._end_told = self._next
            return [_EndOfPartition(self._topic, self._next, None)]
        if not found:
            time.sleep(min(timeout, 0.01))
        return found

    def close(self) -> None:
        self._next = None
        self.closed = True
