"""One update of a policy that is a LoRA adapter on a base model.

All modes run through the same steps with the same clipped loss; what differs is where
advantages come from (`learner.targets`). What is decided here, and why:

* The *reference* policy is the bare base model (adapter off), also when training goes on from
  an adapter: what the penalty anchors to does not move with restarts.
* The KL to it is part of the reward, per token, estimator k1: unbiased, and advantages then
  know what drifting costs. Without a critic it is taken off the token's own advantage. The
  loss has no KL term.
* *Old* log-probabilities are computed at the start of the update in the very micro-batches
  in which the first epoch trains, so that its ratios are exactly 1.
* Stale data: the clipped ratio is new to old; old to behaviour is a truncated constant weight
  (or, if so set, the clipped ratio is new to behaviour).
* The teacher of mode ``opd`` is the policy before the update, which has read the hint.
* Losses are means over the minibatch's tokens, however it is cut into micro-batches.
* The norms of the adapter's and the value head's gradients are clipped apart: the head's is
  larger by orders of magnitude at first, and would scale the policy's away.
* How far an update went is measured after its last step, by one more pass over some of its
  samples (`measure_every`): what the loss saw on the way lags a step behind.
* An update that fails or is stopped leaves everything as it was before.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from learner.adapters import fill_adapter, read_config, read_weights, save_adapter
from learner.batch import TrainingSample
from learner.model import BaseModel
from learner.policy import PolicyNetwork, Scores, TokenRow
from learner.ppo.kl import KlEstimator, estimate_kl
from learner.ppo.losses import PolicyLoss, ValueLoss, policy_loss, value_loss
from learner.ppo.masks import aggregate, masked_mean
from learner.rates import rate_factor
from learner.rollout import Rollout, TeacherRow, missing_by_version, spread, teacher_rows
from learner.targets import (
    Targets,
    make_targets,
    recorded_gap,
    rollout_metrics,
    sample_metrics,
)
from learner.team import Alone, Team
from learner.totals import Totals
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
        team: The processes that make updates together; this one alone if None. All make the
            same calls.

    Raises:
        ModelError: The base model cannot be trained this way.
    """

    def __init__(
        self,
        base: BaseModel,
        settings: LearnerSettings,
        model_settings: ModelSettings,
        team: Team | None = None,
    ) -> None:
        self._team = team or Alone()
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
        if self._team.largest(float(self._should_stop())):
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
            "adapter": self.network.adapter_tensors(),
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
                    f"{ours.get(name)} now; set the model back as it was, or choose another "
                    "learner.policy"
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
        # 2. Score them as they are: frozen layers, reference, old policy, teacher, behaviour.
        rows = self._rows(samples, micro_batches)
        rollout = self._score_all(samples, rows, micro_batches, current_version, load_version)
        # 3. What they say becomes advantages, as the mode wants.
        targets = make_targets(rollout, self._settings)
        # 4. Train.
        self._set_learning_rates()
        totals = self._train(rows, rollout, targets, plan, lengths, generator)
        # 5. Measure how far that went.
        moved = self._moved(rows, rollout, self._measured(lengths))
        self._updates += 1
        # 6. Report.
        metrics = {
            **self._charts(),
            **moved,
            **sample_metrics(samples, rollout),
            **rollout_metrics(rollout, targets, self._settings),
            **recorded_gap(rollout, current_version),
            **totals.of_all(self._team).metrics(critic=targets.critic is not None),
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
                finished = self.network.with_states([rows[index] for index in micro])
                for index, row in zip(micro, finished, strict=True):
                    rows[index] = row
        return rows

    def _score_all(
        self,
        samples: Sequence[TrainingSample],
        rows: Sequence[TokenRow],
        micro_batches: Sequence[Sequence[int]],
        current_version: int | None,
        load_version: LoadVersion | None,
    ) -> Rollout:
        rollout = Rollout.of(samples, self.network.device)
        with torch.no_grad():
            for micro, counts in self._team.turns(micro_batches):
                self._go_on_or_stop()
                some = [rows[index] for index in micro]
                mask = rollout.loss_mask[micro]
                reference = self.network.score(some, reference=True)
                old = self.network.score(some)
                if not counts:
                    continue
                rollout.reference_logprobs[micro] = spread(reference.logprobs, mask)
                rollout.old_logprobs[micro] = spread(old.logprobs, mask)
                rollout.old_values[micro] = spread(old.values, mask)
                rollout.entropies[micro] = spread(old.entropies, mask)
                rollout.final_values[micro] = old.final_values
            self._team.add(
                (
                    rollout.reference_logprobs,
                    rollout.old_logprobs,
                    rollout.old_values,
                    rollout.entropies,
                    rollout.final_values,
                )
            )
            if self._settings.mode_weights[2]:
                self._ask_teacher(samples, rollout)
            self._recompute_behaviour(samples, rows, rollout, current_version, load_version)
        return rollout

    def _ask_teacher(self, samples: Sequence[TrainingSample], rollout: Rollout) -> None:
        """Fill in what the teacher, which has read the hints, thinks of the replies."""
        rows, size = teacher_rows(samples), self._settings.micro_batch_segments
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        for some, counts in self._team.turns(parts):
            self._go_on_or_stop()
            scores = self.network.score(
                self.network.with_states([self._teacher_row(row) for row in some]),
                reference=self._settings.opd_teacher == "reference",
            )
            if not counts:
                continue
            lengths = [len(row.token_ids) - row.start for row in some]
            for row, logprobs in zip(some, torch.split(scores.logprobs, lengths), strict=True):
                rollout.teacher_logprobs[row.sample, row.columns] = logprobs
        for row in rows:
            rollout.taught[row.sample, row.columns] = True
        self._team.add((rollout.teacher_logprobs,))

    def _teacher_row(self, row: TeacherRow) -> TokenRow:
        length = len(row.token_ids)
        device = self.network.device
        return TokenRow(
            token_ids=torch.tensor(row.token_ids, device=device),
            positions=torch.arange(row.start, length, device=device),
            temperatures=torch.full((length - row.start,), row.temperature, device=device),
        )

    def _recompute_behaviour(
        self,
        samples: Sequence[TrainingSample],
        rows: Sequence[TokenRow],
        rollout: Rollout,
        current_version: int | None,
        load_version: LoadVersion | None,
    ) -> None:
        """Fill in log-probabilities that did not come with their turns, where that can be done."""
        for version, wanted in missing_by_version(samples, rollout).items():
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
        rollout: Rollout,
        wanted: Tensor,
    ) -> Tensor:
        """Log-probabilities under other adapter weights, of the samples that `wanted` touches."""
        own = self.network.adapter_tensors()
        logprobs = torch.zeros_like(rollout.old_logprobs)
        touched = wanted.any(dim=1).nonzero()[:, 0].tolist()
        touched.sort(key=lambda index: (len(rows[index].token_ids), index))
        size = self._settings.micro_batch_segments
        try:
            fill_adapter(self.network.model, tensors)
            parts = [touched[start : start + size] for start in range(0, len(touched), size)]
            for micro, counts in self._team.turns(parts):
                self._go_on_or_stop()
                scores = self.network.score([rows[index] for index in micro])
                if not counts:
                    continue
                logprobs[micro] = spread(scores.logprobs, rollout.loss_mask[micro])
        finally:
            fill_adapter(self.network.model, own)
        self._team.add((logprobs,))
        return logprobs

    def _train(
        self,
        rows: Sequence[TokenRow],
        rollout: Rollout,
        targets: Targets,
        first_plan: _Plan,
        lengths: Sequence[int],
        generator: torch.Generator,
    ) -> Totals:
        totals = Totals()
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
        rollout: Rollout,
        targets: Targets,
        minibatch: Sequence[Sequence[int]],
        totals: Totals,
    ) -> float:
        """Gradient of the minibatch's mean loss; returns its approximate KL (k3, old to new)."""
        settings = self._settings
        tokens = float(sum(int(rollout.loss_mask[micro].sum()) for micro in minibatch))
        kl_sum = 0.0
        for micro, counts in self._team.turns(minibatch):
            self._go_on_or_stop()
            mask = rollout.loss_mask[micro]
            scores = self.network.score([rows[index] for index in micro])
            logprobs = spread(scores.logprobs, mask)
            policy = policy_loss(
                logprobs,
                targets.anchor_logprobs[micro],
                targets.advantages[micro],
                mask,
                clip_low=settings.clip_coef,
                clip_high=settings.clip_coef_high or settings.clip_coef,
                dual_clip=self._dual_clip(),
                weights=targets.weights[micro],
            )
            value = self._value_loss(scores, rollout, targets, micro)
            loss = self._mean_loss(policy, value, scores, mask, tokens)
            if not counts:
                loss = 0.0 * loss
            loss.backward()  # type: ignore[no-untyped-call]
            if counts:
                kl_sum += totals.add(policy, value, logprobs, rollout.old_logprobs[micro], mask)
        summed = torch.tensor([kl_sum], dtype=torch.float64, device=self.network.device)
        self._team.add((*self._gradients(), summed))
        return float(summed) / max(tokens, 1.0)

    def _gradients(self) -> list[Tensor]:
        return [
            parameter.grad
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]

    def _dual_clip(self) -> float:
        """Bound of the ratio for bad tokens; the ratio to the behaviour policy is truncated."""
        settings = self._settings
        if settings.stale_objective == "behaviour":
            return min(settings.dual_clip, settings.importance_weight_cap)
        return settings.dual_clip

    def _value_loss(
        self, scores: Scores, rollout: Rollout, targets: Targets, micro: Sequence[int]
    ) -> ValueLoss | None:
        if targets.critic is None:
            return None
        return value_loss(
            spread(scores.values, rollout.loss_mask[micro]),
            rollout.old_values[micro],
            targets.critic.returns[micro],
            rollout.loss_mask[micro],
            value_clip=self._settings.value_clip,
        )

    @torch.no_grad()
    def _moved(
        self,
        rows: Sequence[TokenRow],
        rollout: Rollout,
        micro_batches: Sequence[Sequence[int]],
    ) -> dict[str, float]:
        """KL of the policy before the update to the one it has become, on these samples."""
        seen = torch.zeros_like(rollout.loss_mask)
        for micro in micro_batches:
            seen[micro] = True
        mask = rollout.loss_mask & seen
        logprobs = torch.zeros_like(rollout.old_logprobs)
        for micro, counts in self._team.turns(micro_batches):
            self._go_on_or_stop()
            scores = self.network.score([rows[index] for index in micro])
            if counts:
                logprobs[micro] = spread(scores.logprobs, mask[micro])
        self._team.add((logprobs,))
        estimators: tuple[KlEstimator, ...] = ("k1", "k3")
        return {
            f"kl/update_{name}": float(
                masked_mean(estimate_kl(rollout.old_logprobs, logprobs, mask, name), mask)
            )
            for name in estimators
        }

    def _measured(self, lengths: Sequence[int]) -> Sequence[Sequence[int]]:
        """Every n-th sample by length, in micro-batches; at least one."""
        every, size = self._settings.measure_every, self._settings.micro_batch_segments
        by_length = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
        chosen = by_length[min(every // 2, len(lengths) - 1) :: every]
        return [chosen[start : start + size] for start in range(0, len(chosen), size)]

    def _mean_loss(
        self,
        policy: PolicyLoss,
        value: ValueLoss | None,
        scores: Scores,
        mask: Tensor,
        tokens: float,
    ) -> Tensor:
        settings = self._settings
        loss = aggregate(policy.losses, mask, total=tokens)
        if value is not None:
            loss = loss + settings.vf_coef * aggregate(value.losses, mask, total=tokens)
        if settings.ent_coef:
            entropies = spread(scores.entropies, mask)
            loss = loss - settings.ent_coef * aggregate(entropies, mask, total=tokens)
        return loss

    def _step(self, totals: Totals) -> None:
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
        factor = rate_factor(
            self._updates,
            schedule=self._settings.learning_rate_schedule,
            decay_updates=self._settings.learning_rate_decay_updates,
            warmup_updates=self._settings.learning_rate_warmup_updates,
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


def _never() -> bool:
    return False


_Plan = list[list[list[int]]]
"""Minibatches of micro-batches of sample indices."""


__all__ = [
    "BASE_VERSION",
    "EARLY_STOP_FACTOR",
    "LoadVersion",
    "PpoUpdater",
    "UpdateResult",
]
