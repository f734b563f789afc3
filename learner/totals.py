"""Sums over an update's minibatches, made into means in the end."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from learner.ppo.kl import MAX_LOG_RATIO, k3
from learner.ppo.losses import PolicyLoss, ValueLoss
from learner.ppo.masks import masked_fill
from learner.team import Team

_OF_TOKENS = ("policy_loss", "clipfrac", "dual_clipfrac", "value_loss", "value_clipfrac")
_OF_EPOCH = ("old_approx_kl", "approx_kl")
"""Sums over tokens; the others are over steps, which all processes make alike."""


@dataclass(slots=True)
class Totals:
    """What an update did so far."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    epoch_sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    tokens: float = 0.0
    epoch_tokens: float = 0.0
    epochs: int = 0
    steps: int = 0
    initial_ratio_error: float = 0.0
    early_stop: bool = False

    def begin_epoch(self) -> None:
        """From here on `epoch_sums` are of a new epoch."""
        self.epochs += 1
        self.epoch_tokens = 0.0
        self.epoch_sums.clear()

    @torch.no_grad()
    def add(
        self,
        policy: PolicyLoss,
        value: ValueLoss | None,
        logprobs: Tensor,
        old_logprobs: Tensor,
        mask: Tensor,
    ) -> float:
        """Count a micro-batch; returns the sum of its tokens' KL of old to new policy (k3)."""
        tokens = float(mask.sum())
        self.tokens += tokens
        self.epoch_tokens += tokens
        self.sums["policy_loss"] += float(policy.losses.detach().sum())
        self.sums["clipfrac"] += float(policy.clipped.sum())
        self.sums["dual_clipfrac"] += float(policy.dual_clipped.sum())
        if value is not None:
            self.sums["value_loss"] += float(value.losses.detach().sum())
            self.sums["value_clipfrac"] += float(value.clipped.sum())
        log_ratio = masked_fill(logprobs.detach() - old_logprobs, mask).clamp(
            -MAX_LOG_RATIO, MAX_LOG_RATIO
        )
        approx_kl = float(k3(torch.zeros_like(log_ratio), log_ratio).sum())
        self.epoch_sums["old_approx_kl"] += float(-log_ratio.sum())
        self.epoch_sums["approx_kl"] += approx_kl
        if self.steps == 0:
            error = float((log_ratio.exp() - 1.0).abs().max())
            self.initial_ratio_error = max(self.initial_ratio_error, error)
        return approx_kl

    def stepped(self, adapter_norm: float, value_norm: float) -> None:
        """Count an optimizer step."""
        self.steps += 1
        self.sums["grad_norm"] += adapter_norm
        self.sums["value_grad_norm"] += value_norm

    def of_all(self, team: Team) -> Totals:
        """What all processes of a team did together; each counted its own micro-batches."""
        # By name, not by what is there: a process may have had nothing that counts.
        parts = [self.sums[name] for name in _OF_TOKENS]
        parts += [self.epoch_sums[name] for name in _OF_EPOCH]
        together = torch.tensor([*parts, self.tokens, self.epoch_tokens], dtype=torch.float64)
        team.add((together,))
        *summed, tokens, epoch_tokens = together.tolist()
        of_tokens = dict(zip(_OF_TOKENS, summed, strict=False))
        of_epoch = dict(zip(_OF_EPOCH, summed[len(_OF_TOKENS) :], strict=True))
        return replace(
            self,
            sums=defaultdict(float, {**self.sums, **of_tokens}),
            epoch_sums=defaultdict(float, of_epoch),
            tokens=tokens,
            epoch_tokens=epoch_tokens,
            initial_ratio_error=team.largest(self.initial_ratio_error),
        )

    def metrics(self, *, critic: bool) -> dict[str, float]:
        """Means, under the names that `diagnostics.METRICS` explains.

        Args:
            critic: Whether there was a value head to report on.
        """
        tokens, epoch_tokens = max(self.tokens, 1.0), max(self.epoch_tokens, 1.0)
        steps = max(self.steps, 1)
        metrics = {
            "losses/policy_loss": self.sums["policy_loss"] / tokens,
            "losses/clipfrac": self.sums["clipfrac"] / tokens,
            "losses/dual_clipfrac": self.sums["dual_clipfrac"] / tokens,
            "losses/old_approx_kl": self.epoch_sums["old_approx_kl"] / epoch_tokens,
            "losses/approx_kl": self.epoch_sums["approx_kl"] / epoch_tokens,
            "losses/grad_norm": self.sums["grad_norm"] / steps,
            "losses/initial_ratio_error": self.initial_ratio_error,
            "batch/epochs": float(self.epochs),
            "batch/optimizer_steps": float(self.steps),
            "batch/early_stop": float(self.early_stop),
        }
        if critic:
            metrics |= {
                "losses/value_loss": self.sums["value_loss"] / tokens,
                "losses/value_clipfrac": self.sums["value_clipfrac"] / tokens,
                "losses/value_grad_norm": self.sums["value_grad_norm"] / steps,
            }
        return metrics


__all__ = ["Totals"]
