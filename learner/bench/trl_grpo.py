"""TRL's GRPO as a subject of both benches. Runs in the environment of ``trl_grpo.lock``.

The trainer is made as its users make it; its own loss, its own scoring of the old and the
reference policy, its own optimizer. What is ours is where the replies and their rewards come
from, handed over in the form that its generation step returns them.

A group, for GRPO, is several replies to one prompt. Live dialogue has one, so the group is the
whole batch, as with our ``grpo`` mode: the advantage of a reply is its reward less the batch's
mean, over the batch's deviation.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from learner.adapters import lora_config
from learner.bench import preset, rollouts
from learner.bench.preset import Job, Round
from learner.bench.rivals import Talks, pad_left, pad_right, vocabulary_of
from learner.bench.rollouts import SpeedJob, SpeedRollout
from learner.model import BaseModel, load_base
from streams.settings import ModelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What both benches choose differently.

    Attributes:
        epochs: Passes over a batch (``num_iterations``).
        minibatches: Optimizer steps in one pass.
        micro_batch: Replies of one forward and backward pass.
        beta: Weight of the KL to the reference.
        learning_rate: Constant.
        clip: ``epsilon``.
        max_grad_norm: Bound of the gradient's norm.
        temperature: At which replies are drawn and scored.
        seed: Of the adapter.
    """

    epochs: int
    minibatches: int
    micro_batch: int
    beta: float
    learning_rate: float
    clip: float
    max_grad_norm: float
    temperature: float
    seed: int


class GrpoUpdate:
    """One update after the other on replies that are given.

    Args:
        base: The base model; it gets the adapter.
        settings: The adapter's shape.
        recipe: Of the update.
        replies: In each update.
    """

    def __init__(
        self, base: BaseModel, settings: ModelSettings, recipe: Recipe, replies: int
    ) -> None:
        self._recipe = recipe
        self._pad = base.chat.pad_token_id
        self._folder = tempfile.TemporaryDirectory()
        accumulated = max(1, replies // recipe.minibatches // recipe.micro_batch)
        args = GRPOConfig(
            output_dir=self._folder.name,
            per_device_train_batch_size=recipe.micro_batch,
            gradient_accumulation_steps=accumulated,
            steps_per_generation=accumulated * recipe.minibatches,
            num_generations=recipe.micro_batch,
            num_iterations=recipe.epochs,
            beta=recipe.beta,
            epsilon=recipe.clip,
            learning_rate=recipe.learning_rate,
            lr_scheduler_type="constant",
            max_grad_norm=recipe.max_grad_norm,
            temperature=recipe.temperature,
            seed=recipe.seed,
            use_cpu=base.device.type == "cpu",
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
        )
        torch.manual_seed(recipe.seed)
        self.trainer = GRPOTrainer(
            model=base.model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["-"] * replies}),
            processing_class=base.tokenizer,
            peft_config=lora_config(base.model, settings),
        )
        self.trainer.create_optimizer()
        self.trainer.current_gradient_accumulation_steps = accumulated
        self._generator = torch.Generator().manual_seed(recipe.seed)

    @property
    def model(self) -> Any:
        """The policy."""
        return self.trainer.model

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        replies: Sequence[Sequence[int]],
        rewards: Sequence[float],
    ) -> float:
        """One update; the KL of the policy before it to the base model, k1, nats per reply."""
        batch = self._scored(prompts, replies, rewards)
        mask = batch["completion_mask"]
        gap = (batch["old_per_token_logps"] - batch["ref_per_token_logps"]) * mask
        trainer, recipe = self.trainer, self._recipe
        trainer.model.train()
        for _ in range(recipe.epochs):
            order = torch.randperm(len(replies), generator=self._generator)
            for minibatch in torch.tensor_split(order, recipe.minibatches):
                for micro in torch.split(minibatch, recipe.micro_batch):
                    part = {
                        name: value if value.dim() == 0 else value[micro]
                        for name, value in batch.items()
                    }
                    trainer._compute_loss(trainer.model, part).backward()
                parameters = [p for p in trainer.model.parameters() if p.requires_grad]
                torch.nn.utils.clip_grad_norm_(parameters, recipe.max_grad_norm)
                trainer.optimizer.step()
                trainer.optimizer.zero_grad()
        return float(gap.sum() / len(replies))

    @torch.no_grad()
    def _scored(
        self,
        prompts: Sequence[Sequence[int]],
        replies: Sequence[Sequence[int]],
        rewards: Sequence[float],
    ) -> Mapping[str, Tensor]:
        """What the trainer's generation step would return for these."""
        trainer = self.trainer
        prompt_ids, prompt_mask = pad_left(prompts, self._pad)
        reply_ids, reply_mask = pad_right(replies, self._pad)
        earned = torch.tensor(rewards)
        advantages = (earned - earned.mean()) / (earned.std() + 1e-4)
        ids = torch.cat([prompt_ids, reply_ids], dim=1)
        mask = torch.cat([prompt_mask, reply_mask], dim=1)
        trainer.model.eval()

        def logps() -> Tensor:
            scored = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, mask, reply_ids.size(1), self._recipe.micro_batch
            )
            found: Tensor = scored[0]
            return found

        old = logps()
        with trainer.accelerator.unwrap_model(trainer.model).disable_adapter():
            reference = logps()
        return {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": reply_ids,
            "completion_mask": reply_mask,
            "advantages": advantages,
            "old_per_token_logps": old,
            "ref_per_token_logps": reference,
            "num_items_in_batch": reply_mask.sum(),
        }


class SpeedUpdate:
    """The subject of the speed bench."""

    def __init__(self, job: SpeedJob) -> None:
        base = load_base(job.model, Path(job.data_dir))
        recipe = Recipe(
            epochs=job.epochs,
            minibatches=1,
            micro_batch=job.micro_batch,
            beta=rollouts.KL_COEF,
            learning_rate=rollouts.LEARNING_RATE,
            clip=job.learner.clip_coef,
            max_grad_norm=job.learner.max_grad_norm,
            temperature=1.0,
            seed=job.seed,
        )
        self._update = GrpoUpdate(base, job.model, recipe, job.rollouts)
        self.vocabulary = vocabulary_of(base)

    def prepared(self, given: Sequence[SpeedRollout]) -> Callable[[], object]:
        """One update on these, to be called once."""
        return partial(
            self._update.run,
            [one.prompt for one in given],
            [one.reply for one in given],
            [one.reward for one in given],
        )


def play(job: Job, on_round: Callable[[Round], None]) -> None:
    """The subject of the learning bench."""
    settings = preset.model_settings(job)
    base = load_base(settings, job.data)
    recipe = Recipe(
        epochs=preset.EPOCHS,
        minibatches=preset.MINIBATCHES,
        micro_batch=job.minibatch,
        beta=preset.KL_COEF,
        learning_rate=preset.LEARNING_RATE,
        clip=preset.CLIP_COEF,
        max_grad_norm=preset.MAX_GRAD_NORM,
        temperature=preset.TEMPERATURE,
        seed=job.seed,
    )
    update = GrpoUpdate(base, settings, recipe, job.replies)
    talks = Talks(job, base)
    for number in range(job.updates):
        began_s = time.monotonic()
        update.model.eval()
        told = talks.hold(update.model, number)
        kl = update.run(
            [reply.prompt_ids for reply in told.replies],
            [reply.token_ids for reply in told.replies],
            told.rewards,
        )
        seconds = time.monotonic() - began_s
        on_round(Round(update=number, reward=told.reward, kl=kl, seconds=seconds))


__all__ = ["GrpoUpdate", "Recipe", "SpeedUpdate", "play"]
