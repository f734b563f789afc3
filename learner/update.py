"""One PPO update of a policy that is a LoRA adapter on a base model.

What is decided here, and why:

* The *reference* policy is the bare base model (adapter off), also when training goes on from
  an adapter: what the penalty anchors to does not move with restarts.
* The KL to it is part of the reward, per token, estimator k1: unbiased, and advantages then
  know what drifting costs. The loss has no KL term.
* *Old* log-probabilities are computed at the start of the update in the very micro-batches
  in which the first epoch trains, so that its ratios are exactly 1.
* Stale data: the clipped ratio is new to old; old to behaviour is a truncated constant weight.
* Losses are means over the minibatch's tokens, however it is cut into micro-batches.
* The norms of the adapter's and the value head's gradients are clipped apart: the head's is
  larger by orders of magnitude at first, and would scale the policy's away.
* How far an update went is measured after its last step, by one more pass over its samples:
  what the loss saw on the way lags a step behind.
* An update that fails or is stopped leaves everything as it was before.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from torch import Tensor, nn

from learner.adapters import fill_adapter, read_config, read_weights, save_adapter
from learner.batch import TrainingSample
from learner.model import BaseModel
from learner.policy import PolicyNetwork, Scores, TokenRow
from learner.ppo.advantages import Advantages, gae
from learner.ppo.diagnostics import effective_sample_size, explained_variance
from learner.ppo.kl import KlEstimator, estimate_kl, k3, penalised_rewards
from learner.ppo.losses import PolicyLoss, ValueLoss, importance_weights, policy_loss, value_loss
from learner.ppo.masks import aggregate, masked_fill, masked_mean, masked_sum, masked_var, whiten
from streams.errors import ArtifactError, LearnerError, RegistryError, UpdateStoppedError
from streams.settings import LearnerSettings, ModelSettings

log = logging.getLogger(__name__)

BASE_VERSION = 0
"""The policy version that is the base model without an adapter."""

EARLY_STOP_FACTOR = 1.5
"""An update ends when approx_kl exceeds this many times ``target_kl`` (Spinning Up's rule)."""

_STATE_FORMAT = 1

LoadVersion = Callable[[int], Path]
"""Gives the folder with a version's adapter files, verified.

Raises ArtifactError or RegistryError if there is no such version any more.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What an update did.

    Args:
        metrics: See `learner.ppo.diagnostics.METRICS`.
        optimizer_step: Optimizer steps made since training began.
        updates: Updates made since training began.
        early_stopped: Whether approx_kl ended it before its last step.
    """

    metrics: dict[str, float]
    optimizer_step: int
    updates: int
    early_stopped: bool


class PpoUpdater:
    """Holds the policy in training and makes one update after the other.

    Not for use by several threads; an update takes seconds to minutes.

    Args:
        base: The base model; it belongs to this updater from now on.
        settings: Of the update.
        model_settings: Shape of the adapter.

    Raises:
        ModelError: The base model cannot be trained this way.
    """

    def __init__(
        self, base: BaseModel, settings: LearnerSettings, model_settings: ModelSettings
    ) -> None:
        self.base = base
        self.network = PolicyNetwork(base, model_settings, settings)
        self._settings = settings
        self._model_settings = model_settings
        self._optimizer = torch.optim.Adam(
            [
                {"params": self.network.adapter_parameters(), "lr": settings.learning_rate},
                {
                    "params": list(self.network.value_head.parameters()),
                    "lr": settings.value_learning_rate,
                },
            ]
        )
        self._generator = torch.Generator().manual_seed(settings.seed)
        self._updates = 0
        self._optimizer_step = 0
        self._should_stop: Callable[[], bool] = _never

    @property
    def updates(self) -> int:
        """Updates made since training began."""
        return self._updates

    @property
    def optimizer_step(self) -> int:
        """Optimizer steps made since training began."""
        return self._optimizer_step

    def update(
        self,
        samples: Sequence[TrainingSample],
        *,
        current_version: int | None = None,
        load_version: LoadVersion | None = None,
        generator: torch.Generator | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> UpdateResult:
        """One update on all of `samples`.

        Args:
            samples: What to train on.
            current_version: The version whose weights the policy has now; turns it chose
                need no recomputation.
            load_version: Where the adapters of other versions are, for turns that came
                without log-probabilities; None leaves those unknown (weight 1).
            generator: Decides the order of samples; the updater's own if None.
            should_stop: Asked before every micro-batch; once it says True, the update ends.

        Raises:
            LearnerError: There are no samples, the numbers stopped being finite, or there is
                not enough memory. Everything is then as it was before.
            UpdateStoppedError: `should_stop` said so. Everything is then as it was before.
        """
        if not samples:
            raise LearnerError("an update needs at least one sample")
        generator = generator or self._generator
        before, order = self.state_dict(), generator.get_state()
        self._should_stop = should_stop or _never
        try:
            return self._update(samples, current_version, load_version, generator)
        except BaseException as error:
            self._optimizer.zero_grad(set_to_none=True)
            self.load_state_dict(before)
            generator.set_state(order)
            if isinstance(error, torch.OutOfMemoryError | MemoryError):
                raise LearnerError(
                    f"not enough memory for an update: {error}; lower "
                    "learner.micro_batch_segments, learner.max_sequence_tokens or "
                    "learner.logprob_chunk_tokens, or set learner.gradient_checkpointing"
                ) from error
            raise
        finally:
            self._should_stop = _never

    def _go_on_or_stop(self) -> None:
        """Called before every micro-batch: the places where an update can end early."""
        if self._should_stop():
            raise UpdateStoppedError(
                "the update was interrupted by a stop; the next start makes it again"
            )

    def state_dict(self) -> dict[str, Any]:
        """Everything the next update depends on, copied: tensors, numbers and text.

        Can be written with ``torch.save`` and read with ``weights_only=True``. Restored on a
        CPU, later updates equal those of the uninterrupted run bit for bit.
        """
        return {
            "format": _STATE_FORMAT,
            "identity": self._identity(),
            "adapter": self._adapter_tensors(),
            "value_head": copy.deepcopy(self.network.value_head.state_dict()),
            "optimizer": copy.deepcopy(self._optimizer.state_dict()),
            "generator": self._generator.get_state(),
            "updates": self._updates,
            "optimizer_step": self._optimizer_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to what `state_dict` returned.

        Raises:
            LearnerError: It is no such state, or one of another base model or adapter shape.
        """
        if state.get("format") != _STATE_FORMAT:
            raise LearnerError(
                f"cannot restore a learner state of format {state.get('format')!r}; this "
                f"version reads format {_STATE_FORMAT}"
            )
        ours = self._identity()
        for name, theirs in dict(state["identity"]).items():
            if ours.get(name) != theirs:
                raise LearnerError(
                    f"cannot restore a learner state with {name} {theirs}: it is "
                    f"{ours.get(name)} now"
                )
        try:
            fill_adapter(self.network.model, state["adapter"])
            self.network.value_head.load_state_dict(state["value_head"])
            self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
            self._generator.set_state(state["generator"].cpu())
        except (ArtifactError, KeyError, RuntimeError, ValueError) as error:
            raise LearnerError(f"cannot restore the learner state: {error}") from error
        self._updates = int(state["updates"])
        self._optimizer_step = int(state["optimizer_step"])

    def save_adapter(self, folder: Path) -> dict[str, str]:
        """Write the adapter's files; returns the SHA-256 of each.

        Raises:
            ArtifactError: They cannot be written.
        """
        return save_adapter(self.network.model, folder, base_model_id=self.base.model_id)

    # --- the steps of an update -----------------------------------------------------------

    def _update(
        self,
        samples: Sequence[TrainingSample],
        current_version: int | None,
        load_version: LoadVersion | None,
        generator: torch.Generator,
    ) -> UpdateResult:
        # 1. Cut the samples into minibatches and these into micro-batches.
        lengths = [len(sample.token_ids) for sample in samples]
        plan = self._plan(lengths, generator)
        micro_batches = [micro for minibatch in plan for micro in minibatch]
        # 2. Score them as they are: frozen layers, reference, old policy, behaviour.
        rows = self._rows(samples, micro_batches)
        rollout = self._score_all(samples, rows, micro_batches, current_version, load_version)
        # 3. Rewards and values become advantages.
        targets = self._targets(rollout)
        # 4. Train.
        self._set_learning_rates()
        totals = self._train(rows, rollout, targets, plan, lengths, generator)
        # 5. Measure how far that went.
        moved = self._moved(rows, rollout, micro_batches)
        self._updates += 1
        # 6. Report.
        metrics = {
            **self._charts(),
            **moved,
            **_sample_metrics(samples, rollout),
            **_rollout_metrics(rollout, targets, self._settings),
            **totals.metrics(),
        }
        return UpdateResult(
            metrics=metrics,
            optimizer_step=self._optimizer_step,
            updates=self._updates,
            early_stopped=totals.early_stop,
        )

    def _plan(self, lengths: Sequence[int], generator: torch.Generator) -> _Plan:
        """Minibatches drawn at random, each cut into micro-batches of like lengths."""
        count = min(self._settings.minibatches, len(lengths))
        order = torch.randperm(len(lengths), generator=generator)
        size = self._settings.micro_batch_segments
        plan: _Plan = []
        for minibatch in torch.tensor_split(order, count):
            by_length = sorted(minibatch.tolist(), key=lambda index: (lengths[index], index))
            plan.append([by_length[i : i + size] for i in range(0, len(by_length), size)])
        return plan

    def _rows(
        self, samples: Sequence[TrainingSample], micro_batches: Sequence[Sequence[int]]
    ) -> list[TokenRow]:
        rows = [self.network.row(sample) for sample in samples]
        if self.network.shares_frozen_layers:
            for micro in micro_batches:
                self._go_on_or_stop()
                states = self.network.frozen_states([rows[index] for index in micro])
                for index, state in zip(micro, states, strict=True):
                    rows[index] = replace(rows[index], states=state)
        return rows

    def _score_all(
        self,
        samples: Sequence[TrainingSample],
        rows: Sequence[TokenRow],
        micro_batches: Sequence[Sequence[int]],
        current_version: int | None,
        load_version: LoadVersion | None,
    ) -> _Rollout:
        rollout = _Rollout.of(samples, self.network.device)
        with torch.no_grad():
            for micro in micro_batches:
                self._go_on_or_stop()
                some = [rows[index] for index in micro]
                mask = rollout.loss_mask[micro]
                reference = self.network.score(some, reference=True)
                rollout.reference_logprobs[micro] = _spread(reference.logprobs, mask)
                old = self.network.score(some)
                rollout.old_logprobs[micro] = _spread(old.logprobs, mask)
                rollout.old_values[micro] = _spread(old.values, mask)
                rollout.entropies[micro] = _spread(old.entropies, mask)
                rollout.final_values[micro] = old.final_values
            self._recompute_behaviour(samples, rows, rollout, current_version, load_version)
        return rollout

    def _recompute_behaviour(
        self,
        samples: Sequence[TrainingSample],
        rows: Sequence[TokenRow],
        rollout: _Rollout,
        current_version: int | None,
        load_version: LoadVersion | None,
    ) -> None:
        """Fill in log-probabilities that did not come with their turns, where that can be done."""
        for version, wanted in _missing_by_version(samples, rollout).items():
            if version == current_version:
                logprobs = rollout.old_logprobs
            elif version == BASE_VERSION:
                logprobs = rollout.reference_logprobs
            elif load_version is None:
                continue
            else:
                try:
                    tensors = self._version_tensors(load_version(version))
                    logprobs = self._score_with(tensors, rows, rollout, wanted)
                except (ArtifactError, RegistryError) as error:
                    log.warning("behaviour stays unknown version=%d reason=%s", version, error)
                    continue
            rollout.behaviour_logprobs[wanted] = logprobs[wanted]
            rollout.recomputed.logical_or_(wanted)

    def _version_tensors(self, folder: Path) -> dict[str, Tensor]:
        config = read_config(folder)
        shape = (config.r, float(config.lora_alpha))
        ours = (self._model_settings.lora_rank, self._model_settings.lora_alpha)
        if shape != ours:
            raise ArtifactError(
                f"the adapter in {folder} has rank and alpha {shape}, the learner's has {ours}"
            )
        return read_weights(folder)

    def _score_with(
        self,
        tensors: Mapping[str, Tensor],
        rows: Sequence[TokenRow],
        rollout: _Rollout,
        wanted: Tensor,
    ) -> Tensor:
        """Log-probabilities under other adapter weights, of the samples that `wanted` touches."""
        own = self._adapter_tensors()
        logprobs = torch.zeros_like(rollout.old_logprobs)
        touched = wanted.any(dim=1).nonzero()[:, 0].tolist()
        touched.sort(key=lambda index: (len(rows[index].token_ids), index))
        size = self._settings.micro_batch_segments
        try:
            fill_adapter(self.network.model, tensors)
            for start in range(0, len(touched), size):
                self._go_on_or_stop()
                micro = touched[start : start + size]
                scores = self.network.score([rows[index] for index in micro])
                logprobs[micro] = _spread(scores.logprobs, rollout.loss_mask[micro])
        finally:
            fill_adapter(self.network.model, own)
        return logprobs

    def _targets(self, rollout: _Rollout) -> _Targets:
        settings, mask = self._settings, rollout.loss_mask
        kl = estimate_kl(rollout.old_logprobs, rollout.reference_logprobs, mask, "k1")
        rewards = penalised_rewards(rollout.rewards, kl, mask, kl_coef=settings.kl_coef)
        raw = gae(
            rewards,
            rollout.old_values,
            mask,
            gamma=settings.gamma,
            gae_lambda=settings.gae_lambda,
            bootstrap=masked_fill(rollout.final_values, ~rollout.terminal),
        )
        advantages = whiten(raw.advantages, mask) if settings.whiten_advantages else raw.advantages
        importance = importance_weights(
            rollout.old_logprobs,
            rollout.behaviour_logprobs,
            rollout.known,
            cap=settings.importance_weight_cap,
        )
        asymmetry = torch.where(advantages < 0, settings.negative_advantage_weight, 1.0)
        return _Targets(
            raw=raw,
            advantages=advantages,
            reference_kl=kl,
            importance=importance,
            weights=importance * asymmetry,
        )

    def _train(
        self,
        rows: Sequence[TokenRow],
        rollout: _Rollout,
        targets: _Targets,
        first_plan: _Plan,
        lengths: Sequence[int],
        generator: torch.Generator,
    ) -> _Totals:
        totals = _Totals()
        for epoch in range(self._settings.epochs):
            plan = first_plan if epoch == 0 else self._plan(lengths, generator)
            totals.begin_epoch()
            for minibatch in plan:
                approx_kl = self._accumulate(rows, rollout, targets, minibatch, totals)
                target_kl = self._settings.target_kl
                if target_kl is not None and approx_kl > EARLY_STOP_FACTOR * target_kl:
                    self._optimizer.zero_grad(set_to_none=True)
                    totals.early_stop = True
                    return totals
                self._step(totals)
        return totals

    def _accumulate(
        self,
        rows: Sequence[TokenRow],
        rollout: _Rollout,
        targets: _Targets,
        minibatch: Sequence[Sequence[int]],
        totals: _Totals,
    ) -> float:
        """Gradient of the minibatch's mean loss; returns its approximate KL (k3, old to new)."""
        settings = self._settings
        tokens = float(sum(int(rollout.loss_mask[micro].sum()) for micro in minibatch))
        kl_sum = 0.0
        for micro in minibatch:
            self._go_on_or_stop()
            mask = rollout.loss_mask[micro]
            scores = self.network.score([rows[index] for index in micro])
            policy = policy_loss(
                _spread(scores.logprobs, mask),
                rollout.old_logprobs[micro],
                targets.advantages[micro],
                mask,
                clip_low=settings.clip_coef,
                clip_high=settings.clip_coef_high or settings.clip_coef,
                dual_clip=settings.dual_clip,
                weights=targets.weights[micro],
            )
            value = value_loss(
                _spread(scores.values, mask),
                rollout.old_values[micro],
                targets.raw.returns[micro],
                mask,
                value_clip=settings.value_clip,
            )
            loss = self._mean_loss(policy, value, scores, mask, tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            kl_sum += totals.add(policy, value, mask)
        return kl_sum / max(tokens, 1.0)

    @torch.no_grad()
    def _moved(
        self,
        rows: Sequence[TokenRow],
        rollout: _Rollout,
        micro_batches: Sequence[Sequence[int]],
    ) -> dict[str, float]:
        """KL of the policy before the update to the one it has become."""
        mask = rollout.loss_mask
        logprobs = torch.zeros_like(rollout.old_logprobs)
        for micro in micro_batches:
            self._go_on_or_stop()
            scores = self.network.score([rows[index] for index in micro])
            logprobs[micro] = _spread(scores.logprobs, mask[micro])
        estimators: tuple[KlEstimator, ...] = ("k1", "k3")
        return {
            f"kl/update_{name}": float(
                masked_mean(estimate_kl(rollout.old_logprobs, logprobs, mask, name), mask)
            )
            for name in estimators
        }

    def _mean_loss(
        self, policy: PolicyLoss, value: ValueLoss, scores: Scores, mask: Tensor, tokens: float
    ) -> Tensor:
        settings = self._settings
        loss = aggregate(policy.losses, mask, total=tokens)
        loss = loss + settings.vf_coef * aggregate(value.losses, mask, total=tokens)
        if settings.ent_coef:
            entropies = _spread(scores.entropies, mask)
            loss = loss - settings.ent_coef * aggregate(entropies, mask, total=tokens)
        return loss

    def _step(self, totals: _Totals) -> None:
        norms = [
            float(nn.utils.clip_grad_norm_(group["params"], self._settings.max_grad_norm))
            for group in self._optimizer.param_groups
        ]
        if not all(torch.isfinite(torch.tensor(norms))):
            raise LearnerError(
                f"the gradient is not finite (norms {norms}); rewards, log-probabilities or "
                "the model hold a value that is not a number"
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._optimizer_step += 1
        totals.stepped(*norms)

    # --- small things ---------------------------------------------------------------------

    def _set_learning_rates(self) -> None:
        factor = decay_factor(
            self._updates,
            decay_updates=self._settings.learning_rate_decay_updates,
            floor=self._settings.learning_rate_floor / self._settings.learning_rate,
        )
        rates = (self._settings.learning_rate, self._settings.value_learning_rate)
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor

    def _charts(self) -> dict[str, float]:
        adapter, head = self._optimizer.param_groups
        return {
            "charts/learning_rate": float(adapter["lr"]),
            "charts/value_learning_rate": float(head["lr"]),
            "charts/optimizer_step": float(self._optimizer_step),
            "charts/updates": float(self._updates),
        }

    def _identity(self) -> dict[str, Any]:
        return {
            "base_digest": self.base.base_digest,
            "lora_rank": self._model_settings.lora_rank,
            "lora_alpha": self._model_settings.lora_alpha,
            "lora_first_layer": self._model_settings.lora_first_layer,
        }

    def _adapter_tensors(self) -> dict[str, Tensor]:
        tensors = get_peft_model_state_dict(self.network.model, save_embedding_layers=False)
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _never() -> bool:
    return False


def decay_factor(updates: int, *, decay_updates: int, floor: float) -> float:
    """``max(1 - updates / decay_updates, floor)``: linear decay of a learning rate.

    Args:
        updates: Updates made before this one.
        decay_updates: After how many it would be 0.
        floor: The share of the rate that stays; more than 1 counts as 1.
    """
    return max(1.0 - updates / decay_updates, min(floor, 1.0))


_Plan = list[list[list[int]]]
"""Minibatches of micro-batches of sample indices."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rollout:
    """What is known before training, ``[samples, tokens]`` with chosen tokens only.

    All are filled in by the updater, in place, before training begins.
    """

    loss_mask: Tensor
    rewards: Tensor
    behaviour_logprobs: Tensor
    given: Tensor
    recomputed: Tensor
    old_logprobs: Tensor
    reference_logprobs: Tensor
    old_values: Tensor
    entropies: Tensor
    final_values: Tensor
    terminal: Tensor

    @property
    def known(self) -> Tensor:
        """Bool: the behaviour policy's log-probability is known."""
        return self.given | self.recomputed

    @classmethod
    def of(cls, samples: Sequence[TrainingSample], device: torch.device) -> _Rollout:
        shape = (len(samples), max(len(sample.positions) for sample in samples))

        def matrix(rows: Sequence[Sequence[float]]) -> Tensor:
            out = torch.zeros(shape, dtype=torch.float32)
            for index, row in enumerate(rows):
                out[index, : len(row)] = torch.tensor(row, dtype=torch.float32)
            return out.to(device)

        def empty() -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        return cls(
            loss_mask=matrix([[1.0] * len(s.positions) for s in samples]).bool(),
            rewards=matrix([s.rewards for s in samples]),
            behaviour_logprobs=matrix([s.behaviour_logprobs for s in samples]),
            given=matrix([s.behaviour_mask for s in samples]).bool(),
            recomputed=empty().bool(),
            old_logprobs=empty(),
            reference_logprobs=empty(),
            old_values=empty(),
            entropies=empty(),
            final_values=torch.zeros(len(samples), device=device),
            terminal=torch.tensor([s.terminal for s in samples], device=device),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Targets:
    """What training aims at, ``[samples, tokens]`` each."""

    raw: Advantages
    advantages: Tensor
    reference_kl: Tensor
    importance: Tensor
    weights: Tensor


@dataclass(slots=True)
class _Totals:
    """Sums over an update's minibatches, made into means in the end."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    epoch_sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    tokens: float = 0.0
    epoch_tokens: float = 0.0
    epochs: int = 0
    steps: int = 0
    initial_ratio_error: float = 0.0
    early_stop: bool = False

    def begin_epoch(self) -> None:
        self.epochs += 1
        self.epoch_tokens = 0.0
        self.epoch_sums.clear()

    def add(self, policy: PolicyLoss, value: ValueLoss, mask: Tensor) -> float:
        """Count a micro-batch; returns the sum of its tokens' approximate KL (k3)."""
        with torch.no_grad():
            tokens = float(mask.sum())
            self.tokens += tokens
            self.epoch_tokens += tokens
            self.sums["policy_loss"] += float(policy.losses.detach().sum())
            self.sums["value_loss"] += float(value.losses.detach().sum())
            self.sums["clipfrac"] += float(policy.clipped.sum())
            self.sums["dual_clipfrac"] += float(policy.dual_clipped.sum())
            self.sums["value_clipfrac"] += float(value.clipped.sum())
            log_ratio = policy.log_ratio.detach()
            approx_kl = float(k3(torch.zeros_like(log_ratio), log_ratio).sum())
            self.epoch_sums["old_approx_kl"] += float(-log_ratio.sum())
            self.epoch_sums["approx_kl"] += approx_kl
            if self.steps == 0:
                error = float((policy.ratio.detach() - 1.0).abs().max())
                self.initial_ratio_error = max(self.initial_ratio_error, error)
            return approx_kl

    def stepped(self, adapter_norm: float, value_norm: float) -> None:
        self.steps += 1
        self.sums["grad_norm"] += adapter_norm
        self.sums["value_grad_norm"] += value_norm

    def metrics(self) -> dict[str, float]:
        tokens, epoch_tokens = max(self.tokens, 1.0), max(self.epoch_tokens, 1.0)
        steps = max(self.steps, 1)
        return {
            "losses/policy_loss": self.sums["policy_loss"] / tokens,
            "losses/value_loss": self.sums["value_loss"] / tokens,
            "losses/clipfrac": self.sums["clipfrac"] / tokens,
            "losses/dual_clipfrac": self.sums["dual_clipfrac"] / tokens,
            "losses/value_clipfrac": self.sums["value_clipfrac"] / tokens,
            "losses/old_approx_kl": self.epoch_sums["old_approx_kl"] / epoch_tokens,
            "losses/approx_kl": self.epoch_sums["approx_kl"] / epoch_tokens,
            "losses/grad_norm": self.sums["grad_norm"] / steps,
            "losses/value_grad_norm": self.sums["value_grad_norm"] / steps,
            "losses/initial_ratio_error": self.initial_ratio_error,
            "batch/epochs": float(self.epochs),
            "batch/optimizer_steps": float(self.steps),
            "batch/early_stop": float(self.early_stop),
        }


def _spread(flat: Tensor, mask: Tensor) -> Tensor:
    """``[chosen of all rows]`` laid out as ``[rows, tokens]``, 0 where the mask is False."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)


def _missing_by_version(samples: Sequence[TrainingSample], rollout: _Rollout) -> dict[int, Tensor]:
    """For each version, which tokens it chose whose log-probability did not come along."""
    missing: dict[int, Tensor] = {}
    for index, column, version in _missing_turns(samples):
        if version not in missing:
            missing[version] = torch.zeros_like(rollout.loss_mask)
        missing[version][index, column] = True
    return missing


def _missing_turns(samples: Sequence[TrainingSample]) -> Iterator[tuple[int, slice, int]]:
    for index, sample in enumerate(samples):
        column = 0
        for turn in sample.turns:
            length = turn.end - turn.start
            if turn.behaviour_logprobs is None and turn.policy_version is not None:
                yield index, slice(column, column + length), turn.policy_version
            column += length


def _sample_metrics(samples: Sequence[TrainingSample], rollout: _Rollout) -> dict[str, float]:
    turns = [turn for sample in samples for turn in sample.turns]
    tokens = float(rollout.loss_mask.sum())
    return {
        "rewards/mean": sum(turn.reward for turn in turns) / len(turns),
        "rewards/nonzero_share": sum(turn.reward != 0.0 for turn in turns) / len(turns),
        "batch/samples": float(len(samples)),
        "batch/turns": float(len(turns)),
        "batch/tokens": tokens,
        "batch/context_tokens": float(sum(len(s.token_ids) for s in samples)) - tokens,
    }


def _rollout_metrics(
    rollout: _Rollout, targets: _Targets, settings: LearnerSettings
) -> dict[str, float]:
    mask, kl = rollout.loss_mask, targets.reference_kl
    samples = mask.shape[0]
    reference_k3 = estimate_kl(rollout.old_logprobs, rollout.reference_logprobs, mask, "k3")
    weights, cap = targets.importance, settings.importance_weight_cap
    missing = mask & ~rollout.known
    metrics = {
        "losses/entropy": float(masked_mean(rollout.entropies, mask)),
        "kl/reference_k1": float(masked_mean(kl, mask)),
        "kl/reference_k3": float(masked_mean(reference_k3, mask)),
        "kl/reference_k1_per_sample": float(masked_sum(kl, mask)) / samples,
        "rewards/kl_penalty": settings.kl_coef * float(masked_sum(kl, mask)) / samples,
        "rewards/return": float(masked_mean(targets.raw.returns, mask)),
        "rewards/advantage_std": float(masked_var(targets.raw.advantages, mask)) ** 0.5,
        "stale/importance_weight": float(masked_mean(weights, mask)),
        "stale/capped_share": float(masked_mean((weights >= cap).float(), mask)),
        "stale/effective_sample_size": effective_sample_size(weights, mask),
        "stale/share_recomputed_logprobs": float(masked_mean(rollout.recomputed.float(), mask)),
        "stale/share_missing_logprobs": float(masked_mean(missing.float(), mask)),
    }
    explained = explained_variance(rollout.old_values, targets.raw.returns, mask)
    if explained is not None:
        metrics["losses/explained_variance"] = explained
    return metrics


__all__ = [
    "BASE_VERSION",
    "EARLY_STOP_FACTOR",
    "LoadVersion",
    "PpoUpdater",
    "UpdateResult",
    "decay_factor",
]
