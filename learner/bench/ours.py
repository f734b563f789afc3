"""Our update and the ceiling above it, as subjects of the speed bench."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from learner.batch import TrainingSample, Turn
from learner.bench.rollouts import SHAPE_OF_SMOLLM2, SpeedJob, SpeedRollout
from learner.bench.shape import load_shape
from learner.model import BaseModel, load_base
from learner.policy import PolicyNetwork
from learner.update import BASE_VERSION, PpoUpdater, UpdateResult


def load(job: SpeedJob) -> BaseModel:
    """The job's base model.

    Raises:
        ModelError: It cannot be loaded, or not on that device.
    """
    if job.base == SHAPE_OF_SMOLLM2:
        return load_shape(job.model)
    return load_base(job.model, Path(job.data_dir))


def samples_of(rollouts: Sequence[SpeedRollout]) -> list[TrainingSample]:
    """The rollouts as the learner trains on them, written by the policy it has."""
    return [
        TrainingSample(
            sample_id=f"r{number}",
            segment_id=f"r{number}",
            revision=0,
            token_ids=(*rollout.prompt, *rollout.reply),
            turns=(
                Turn(
                    turn_id=f"r{number}",
                    start=len(rollout.prompt),
                    end=len(rollout),
                    reward=rollout.reward,
                    policy_version=BASE_VERSION,
                ),
            ),
            terminal=True,
        )
        for number, rollout in enumerate(rollouts)
    ]


class OurUpdate:
    """One update after the other by our learner."""

    def __init__(self, job: SpeedJob) -> None:
        self.base = load(job)
        self.updater = PpoUpdater(self.base, job.learner, job.model)
        self.samples: list[TrainingSample] = []

    def prepared(self, rollouts: Sequence[SpeedRollout]) -> Callable[[], UpdateResult]:
        """One update on these, to be called once."""
        self.samples = samples_of(rollouts)
        return partial(self.updater.update, self.samples, current_version=BASE_VERSION)


class Ceiling:
    """As many forward and backward passes over the same micro-batches, and nothing else.

    No reference, no old policy, no critic, no measuring: what an update could cost at least.
    """

    def __init__(self, job: SpeedJob) -> None:
        self.base = load(job)
        self._network = PolicyNetwork(self.base, job.model, job.learner)
        parameters = self._network.adapter_parameters()
        self._optimizer = torch.optim.Adam(parameters, lr=job.learner.learning_rate)
        self._job = job

    def prepared(self, rollouts: Sequence[SpeedRollout]) -> Callable[[], None]:
        """The passes over these, to be called once."""
        return partial(self._run, rollouts)

    def _run(self, rollouts: Sequence[SpeedRollout]) -> None:
        samples = sorted(samples_of(rollouts), key=lambda sample: len(sample.token_ids))
        size = self._job.micro_batch
        rows = [self._network.row(sample) for sample in samples]
        for _ in range(self._job.epochs):
            for start in range(0, len(rows), size):
                scores = self._network.score(rows[start : start + size])
                (-scores.logprobs.mean()).backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)


__all__ = ["Ceiling", "OurUpdate", "load", "samples_of"]
