"""TRL's PPO as a subject of both benches. Runs in the environment of ``trl_ppo.lock``.

Its trainer does everything in one loop over batches of prompts, so that loop is what runs here.
Two functions that the loop calls are replaced: the one that generates replies, and the one
that asks a reward model. Old log-probabilities are those of the generation, as always there.

In the speed bench the value model is what its users get: a second, whole backbone that is
trained. In the learning bench it gets a better chance: its backbone is frozen and its head
starts at 0 with a rate of its own, as ours does; a backbone trained at the adapter's rate would
go to pieces.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification
from trl.experimental.ppo import PPOConfig, PPOTrainer
from trl.experimental.ppo import ppo_trainer as trl_module

from learner.adapters import lora_config
from learner.bench import preset, rollouts
from learner.bench.preset import Job, Round
from learner.bench.rivals import Talks, logits_for, pad_left, pad_right, vocabulary_of
from learner.bench.rollouts import SpeedJob, SpeedRollout
from learner.model import BaseModel, load_base
from streams.settings import ModelSettings


@dataclass(frozen=True, slots=True)
class Generated:
    """Replies to the prompts of a batch.

    Args:
        replies: Their tokens.
        logprobs: Of each token, at the temperature of the draw.
        rewards: What each reply earned.
    """

    replies: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]]
    rewards: Sequence[float]


Source = Callable[[Any, int], Generated]
"""Replies of the given policy in the given batch, counted from 0."""


class _NoRewardModel(nn.Module):
    """Stands for the users in the trainer's arguments; it is never run."""


class PpoLoop:
    """TRL's loop over replies that come from elsewhere.

    Args:
        base: The base model; it gets the adapter.
        settings: The adapter's shape.
        config: Of the trainer.
        prompts: Those of each batch; as many batches as the configuration asks for.
        source: Where replies come from.
        value_rate: Rate of the value model's head, which then is all of it that is trained.
    """

    def __init__(
        self,
        base: BaseModel,
        settings: ModelSettings,
        config: PPOConfig,
        prompts: Sequence[Sequence[Sequence[int]]],
        source: Source,
        *,
        value_rate: float | None = None,
    ) -> None:
        self._pad = base.chat.pad_token_id
        self._vocabulary = vocabulary_of(base)
        self._source = source
        self._batch = 0
        self._rewards: list[float] = []
        self._ask_model = trl_module.get_reward
        self._nobody = _NoRewardModel()
        value_model = _value_model(base)
        lora = lora_config(base.model, settings)
        torch.manual_seed(config.seed)
        rows = len(prompts[0])
        self.trainer = PPOTrainer(
            args=config,
            processing_class=base.tokenizer,
            model=base.model,
            ref_model=None,
            reward_model=self._nobody,
            value_model=value_model,
            # Only counted: the loop reads the prompts below.
            train_dataset=Dataset.from_dict({"input_ids": [[0]] * rows}),
            eval_dataset=Dataset.from_dict({"input_ids": [[0]] * rows}),
            peft_config=lora,
        )
        if value_rate is not None:
            _train_head_only(self.trainer, value_model, value_rate)
        self.trainer.dataloader = [{"input_ids": pad_left(p, self._pad)[0]} for p in prompts]

    def run(self) -> None:
        """All batches."""
        before = trl_module.batch_generation, trl_module.get_reward
        trl_module.batch_generation, trl_module.get_reward = self._generate, self._reward
        try:
            # It writes to standard output, which is for results here.
            with contextlib.redirect_stdout(sys.stderr):
                self.trainer.train()
        finally:
            trl_module.batch_generation, trl_module.get_reward = before

    def _generate(self, policy: Any, queries: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        policy.eval()
        generated = self._source(policy, self._batch)
        policy.train()
        self._batch += 1
        self._rewards = list(generated.rewards)
        replies, _mask = pad_right(generated.replies, self._pad)
        logits = logits_for(replies, generated.logprobs, self._vocabulary)
        return torch.cat([queries, replies], dim=1), logits

    def _reward(self, model: Any, ids: Tensor, pad: int, context: int) -> tuple[Any, Any, Any]:
        if model is self._nobody:
            given, self._rewards = self._rewards[: len(ids)], self._rewards[len(ids) :]
            return None, torch.tensor(given), None
        values: tuple[Any, Any, Any] = self._ask_model(model, ids, pad, context)
        return values


def _value_model(base: BaseModel) -> Any:
    """A second backbone with the base model's weights, and a head of one output."""
    config = copy.deepcopy(base.model.config)
    config.num_labels = 1
    model: Any = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
    backbone = getattr(model, model.base_model_prefix)
    backbone.load_state_dict(getattr(base.model, base.model.base_model_prefix).state_dict())
    return model


def _train_head_only(trainer: Any, value_model: Any, rate: float) -> None:
    """Freeze the value model's backbone, let its head start at 0 with a rate of its own."""
    value_model.requires_grad_(False)
    value_model.score.requires_grad_(True)
    nn.init.zeros_(value_model.score.weight)
    head = {id(p) for p in value_model.score.parameters()}
    groups = trainer.optimizer.param_groups
    for group in groups:
        group["params"] = [p for p in group["params"] if p.requires_grad and id(p) not in head]
    trainer.optimizer.add_param_group(
        {
            **{k: v for k, v in groups[0].items() if k != "params"},
            "params": list(value_model.score.parameters()),
            "lr": rate,
            "initial_lr": rate,
        }
    )
    scheduler = trainer.lr_scheduler
    trainer.lr_scheduler = type(scheduler)(trainer.optimizer, lambda _: 1.0)


class SpeedUpdate:
    """The subject of the speed bench."""

    def __init__(self, job: SpeedJob) -> None:
        self._job = job
        self.vocabulary = vocabulary_of(self._load())

    def prepared(self, given: Sequence[SpeedRollout]) -> Callable[[], object]:
        """One update on these, to be called once."""
        job = self._job
        even = -math.log(self.vocabulary)
        generated = Generated(
            replies=[one.reply for one in given],
            logprobs=[[even] * len(one.reply) for one in given],
            rewards=[one.reward for one in given],
        )
        config = _config(
            per_device_train_batch_size=job.micro_batch,
            gradient_accumulation_steps=max(1, len(given) // job.micro_batch),
            num_mini_batches=1,
            num_ppo_epochs=job.epochs,
            total_episodes=len(given),
            local_rollout_forward_batch_size=job.micro_batch,
            learning_rate=rollouts.LEARNING_RATE,
            kl_coef=rollouts.KL_COEF,
            temperature=1.0,
            response_length=max(len(one.reply) for one in given),
            seed=job.seed,
        )
        prompts = [[one.prompt for one in given]]
        return PpoLoop(self._load(), job.model, config, prompts, lambda *_: generated).run

    def _load(self) -> BaseModel:
        return load_base(self._job.model, Path(self._job.data_dir))


def play(job: Job, on_round: Callable[[Round], None]) -> None:
    """The subject of the learning bench."""
    settings = preset.model_settings(job)
    base = load_base(settings, job.data)
    talks = Talks(job, base)
    config = _config(
        per_device_train_batch_size=job.replies,
        gradient_accumulation_steps=1,
        num_mini_batches=preset.MINIBATCHES,
        num_ppo_epochs=preset.EPOCHS,
        total_episodes=job.replies * job.updates,
        local_rollout_forward_batch_size=job.replies,
        learning_rate=preset.LEARNING_RATE,
        kl_coef=preset.KL_COEF,
        cliprange=preset.CLIP_COEF,
        vf_coef=0.5,
        lam=preset.LAMBDA,
        temperature=preset.TEMPERATURE,
        response_length=preset.MAX_NEW_TOKENS,
        stop_token="eos",
        seed=job.seed,
    )
    course = _Course(talks, on_round)
    prompts = [talks.prompts(update) for update in range(job.updates)]
    rate = preset.VALUE_LEARNING_RATE
    loop = PpoLoop(base, settings, config, prompts, course.talk, value_rate=rate)
    loop.trainer.log = course.note
    course.begin()
    loop.run()


class _Course:
    """Follows the loop from outside: what was said, and what the trainer reports of it."""

    def __init__(self, talks: Talks, on_round: Callable[[Round], None]) -> None:
        self._talks = talks
        self._on_round = on_round
        self._began_s = 0.0
        self._update = 0
        self._reward = 0.0

    def begin(self) -> None:
        """The next round begins now."""
        self._began_s = time.monotonic()

    def talk(self, policy: Any, update: int) -> Generated:
        """A `Source`."""
        told = self._talks.hold(policy, update)
        self._update, self._reward = update, told.reward
        return Generated(
            replies=[reply.token_ids for reply in told.replies],
            logprobs=[reply.logprobs for reply in told.replies],
            rewards=told.rewards,
        )

    def note(self, metrics: dict[str, float], *_: Any) -> None:
        """Takes the trainer's report of a round that is over."""
        self._on_round(
            Round(
                update=self._update,
                reward=self._reward,
                kl=metrics["objective/kl"],
                seconds=time.monotonic() - self._began_s,
            )
        )
        self.begin()


def _config(**values: Any) -> PPOConfig:
    """The trainer's configuration: nothing is saved, shown or generated by itself."""
    return PPOConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-ppo-"),
        lr_scheduler_type="constant",
        num_sample_generations=0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        **values,
    )


__all__ = ["Generated", "PpoLoop", "SpeedUpdate", "play"]
