"""The rollouts on which the speed of learners is measured, and what to do with them. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, get_args

from learner.bench.preset import LORA_ALPHA, LORA_RANK
from learner.model import TINY
from streams.settings import LearnerSettings, ModelSettings

SpeedSubject = Literal["ours", "trl_ppo", "trl_grpo", "ceiling"]
SPEED_SUBJECTS: tuple[SpeedSubject, ...] = get_args(SpeedSubject)

FIRST_TOKEN = 3
"""Below are padding and the ends of turns of the models used here."""

KL_COEF = 0.05
LEARNING_RATE = 1e-5

SHAPE_OF_SMOLLM2 = "smollm2-shape"
"""Names a model of SmolLM2-135M's shape with random weights, for machines without its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedJob:
    """One measurement.

    Attributes:
        subject: What is measured.
        base: The base model, as ``model.base``, or `SHAPE_OF_SMOLLM2`.
        data_dir: Where converted models are.
        rollouts: How many.
        prompt_tokens: Mean length of prompts; lengths are spread from half to one and a half.
        reply_tokens: Likewise of replies.
        epochs: Passes over them in one update.
        micro_batch: Rollouts of one forward and backward pass.
        threads: Of torch.
        device: ``cpu`` or ``cuda``.
        dtype: ``float32`` or ``bfloat16``.
        memory_fraction: How much of a GPU's memory may be taken.
        compiled: Whether the decoder's layers go through ``torch.compile``.
        seed: Of rollouts and adapter.
    """

    subject: SpeedSubject
    base: str
    data_dir: str
    rollouts: int = 8
    prompt_tokens: int = 128
    reply_tokens: int = 128
    epochs: int = 2
    micro_batch: int = 4
    threads: int = 2
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    memory_fraction: float = 1.0
    compiled: bool = False
    seed: int = 1

    @property
    def model(self) -> ModelSettings:
        """Base model and adapter, on all layers."""
        return ModelSettings(
            base=TINY if self.base == SHAPE_OF_SMOLLM2 else self.base,
            device=self.device,
            dtype=self.dtype,
            num_threads=self.threads,
            cuda_memory_fraction=self.memory_fraction,
            lora_rank=LORA_RANK,
            lora_alpha=LORA_ALPHA,
        )

    @property
    def learner(self) -> LearnerSettings:
        """Our learner's."""
        return LearnerSettings(
            micro_batch_segments=self.micro_batch,
            epochs=self.epochs,
            learning_rate=LEARNING_RATE,
            learning_rate_schedule="constant",
            kl_coef=KL_COEF,
            compile_layers=self.compiled,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True)
class SpeedRollout:
    """A prompt, a reply to it and what it earned."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    reward: float

    def __len__(self) -> int:
        """Its tokens."""
        return len(self.prompt) + len(self.reply)


def rollouts_of(job: SpeedJob, vocabulary: int) -> list[SpeedRollout]:
    """The rollouts of a job, the same in every process: what tokens say costs no time."""
    rng = random.Random(job.seed)

    def tokens(mean: int) -> tuple[int, ...]:
        length = rng.randint(max(1, mean // 2), mean + mean // 2)
        return tuple(rng.randrange(FIRST_TOKEN, vocabulary) for _ in range(length))

    return [
        SpeedRollout(tokens(job.prompt_tokens), tokens(job.reply_tokens), rng.choice((-1.0, 1.0)))
        for _ in range(job.rollouts)
    ]


__all__ = [
    "KL_COEF",
    "LEARNING_RATE",
    "SHAPE_OF_SMOLLM2",
    "SPEED_SUBJECTS",
    "SpeedJob",
    "SpeedRollout",
    "SpeedSubject",
    "rollouts_of",
]
