"""The whole learner with a real network: restarts change nothing, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from learner.loop import Trained
from learner.model import load_base
from learner.trainer import PpoTrainer
from streams.contracts import Message, Role, ScoredSegment
from streams.registry import verify
from streams.settings import LearnerSettings, ModelSettings
from tests.unit.learner.fakes import scored
from tests.unit.learner.test_loop import Bench

MODEL = ModelSettings(base="tiny-random", device="cpu", lora_rank=2, num_threads=1)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def talk(number: int) -> ScoredSegment:
    """A segment of text, of a length of its own, with a directive in every third."""
    made = scored(f"s{number}", reward=1.0 - number % 3, policy_version=0)
    asked = Message(turn_id="u", role=Role.USER, content="x" * (number % 5 + 1), event_time=0)
    (step,), (reward,) = made.segment.steps, made.rewards
    step = replace(step, context=(asked,), token_ids=None, reply="y" * (number % 4 + 1))
    reward = replace(reward, directives=("shorter",) * (number % 3 == 0))
    return replace(made, segment=replace(made.segment, steps=(step,)), rewards=(reward,))


def trainer(mode: str) -> PpoTrainer:
    settings = LearnerSettings(
        learning_rate=1e-3, micro_batch_segments=2, minibatches=2, learning_rate_decay_updates=4
    ).model_copy(update={"mode": mode})
    return PpoTrainer(load_base(MODEL, Path("unused")), settings, MODEL)


class Delivering(PpoTrainer):
    """Lets the next batch arrive during each update but the last."""

    batches: list[list[ScoredSegment]]
    bench: Bench

    def train(
        self,
        segments: Sequence[ScoredSegment],
        current_version: int,
        adapter_of: Callable[[int], Path],
        should_stop: Callable[[], bool],
    ) -> Trained | None:
        if self.batches:
            self.bench.arrive(*self.batches.pop(0))
        return super().train(segments, current_version, adapter_of, should_stop)


def traces(bench: Bench) -> list[Any]:
    """Everything an update leaves behind that a later one depends on."""
    checkpoint = bench.registry.latest_checkpoint("default")
    assert checkpoint is not None
    state = torch.load(
        verify(checkpoint.state_uri, checkpoint.state_files) / "state.pt", weights_only=True
    )
    optimizer = state["updater"]["optimizer"]["state"]
    return [
        [(v.adapter_files, v.metrics, v.segments_digest) for v in bench.registry.versions()],
        bench.offsets(),
        checkpoint.window,
        checkpoint.rng,
        state["rng"].tolist(),
        state["updater"]["generator"].tolist(),
        [tensor.tolist() for entry in optimizer.values() for tensor in entry.values()],
    ]


@pytest.mark.parametrize("mode", ["ppo", "hybrid"])
def test_restarts_change_nothing(mode: str, tmp_path: Path) -> None:
    straight, resumed = Bench(tmp_path / "a"), Bench(tmp_path / "b")
    batches = [[talk(n) for n in range(first, first + 6)] for first in (0, 6, 12)]
    options: dict[str, Any] = {"batch_segments": 5}

    straight.arrive(*batches[0])
    held = trainer(mode)
    held.__class__ = Delivering
    assert isinstance(held, Delivering)
    held.batches, held.bench = batches[1:], straight
    assert straight.run(held, **options, max_updates=3) == 3

    for batch in [batches[0], *[[talk(n) for n in range(f, f + 6)] for f in (6, 12)]]:
        resumed.arrive(*batch)
        assert resumed.run(trainer(mode), **options) == 1
    assert traces(resumed) == traces(straight)
    for bench in (straight, resumed):
        bench.registry.close()
