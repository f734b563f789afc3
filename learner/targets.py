"""From a scored rollout to what training aims at: advantages by mode, weights, returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.batch import TrainingSample
from learner.ppo.advantages import Advantages, gae
from learner.ppo.diagnostics import effective_sample_size, explained_variance
from learner.ppo.kl import estimate_kl, penalised_rewards
from learner.ppo.losses import importance_weights
from learner.ppo.masks import masked_fill, masked_mean, masked_sum, masked_var, whiten
from learner.ppo.objectives import (
    blend,
    charged,
    distillation,
    group_relative,
    on_tokens,
    verdicts,
)
from learner.rollout import NO_PART, Rollout
from streams.settings import LearnerSettings

RECORDED_GAP = "stale/recorded_gap"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    """What training aims at, ``[samples, tokens]`` each.

    Args:
        critic: Advantages before whitening, and the value head's targets; None in modes
            without a critic.
        advantages: What the policy loss uses: the mode's, or the blend of several.
        reference_kl: Estimator k1, old policy to reference.
        importance: Truncated weights of old to behaviour policy.
        weights: Factors of the policy loss: `importance` (where the loss does not hold the ratio
            to the behaviour policy itself), less for negative advantages if so set.
        anchor_logprobs: What the clipped ratio is to.
    """

    critic: Advantages | None
    advantages: Tensor
    reference_kl: Tensor
    importance: Tensor
    weights: Tensor
    anchor_logprobs: Tensor


def make_targets(rollout: Rollout, settings: LearnerSettings) -> Targets:
    """The targets of a scored rollout, as ``settings.mode`` says.

    ``learner.stale_objective`` decides how stale data count: ``decoupled`` clips the ratio of
    new to old policy and weighs tokens with the truncated ratio of old to behaviour policy;
    ``behaviour`` clips the ratio of new to behaviour policy itself, so that a token whose
    ratio has left the range by staleness alone has no pull any more.
    """
    mask = rollout.loss_mask
    kl = estimate_kl(rollout.old_logprobs, rollout.reference_logprobs, mask, "k1")
    ppo_weight, grpo_weight, opd_weight = settings.mode_weights
    critic = _critic(rollout, kl, settings) if ppo_weight else None
    parts: list[tuple[float, Tensor]] = []
    if critic is not None:
        raw = critic.advantages
        parts.append((ppo_weight, whiten(raw, mask) if settings.whiten_advantages else raw))
    for weight, advantages in (
        (grpo_weight, _group_relative(rollout, settings)),
        (opd_weight, _distillation(rollout, settings)),
    ):
        parts.append((weight, charged(advantages, kl, mask, kl_coef=settings.kl_coef)))
    advantages = blend(parts)
    importance = importance_weights(
        rollout.old_logprobs,
        rollout.behaviour_logprobs,
        rollout.known,
        cap=settings.importance_weight_cap,
    )
    asymmetry = torch.where(advantages < 0, settings.negative_advantage_weight, 1.0)
    anchored = settings.stale_objective == "behaviour"
    return Targets(
        critic=critic,
        advantages=advantages,
        reference_kl=kl,
        importance=importance,
        weights=asymmetry if anchored else importance * asymmetry,
        anchor_logprobs=(
            torch.where(rollout.known, rollout.behaviour_logprobs, rollout.old_logprobs)
            if anchored
            else rollout.old_logprobs
        ),
    )


def _critic(rollout: Rollout, kl: Tensor, settings: LearnerSettings) -> Advantages:
    rewards = penalised_rewards(rollout.rewards, kl, rollout.loss_mask, kl_coef=settings.kl_coef)
    return gae(
        rewards,
        rollout.old_values,
        rollout.loss_mask,
        gamma=settings.gamma,
        gae_lambda=settings.gae_lambda,
        bootstrap=_next_values(rollout),
    )


def _next_values(rollout: Rollout) -> Tensor:
    """V of the state each sample leads to; 0 for conversations that ended.

    Of a conversation that was cut into parts that is the state in which the next part's first
    token was chosen, as it would be without the cut. Where nothing follows, it is the state
    after the last token.
    """
    following = rollout.old_values[:, 0][rollout.next_part.clamp(min=0)]
    after = torch.where(rollout.next_part == NO_PART, rollout.final_values, following)
    return masked_fill(after, ~rollout.terminal)


def _group_relative(rollout: Rollout, settings: LearnerSettings) -> Tensor:
    groups = rollout.turn_versions
    if settings.grpo_group == "update":
        groups = torch.zeros_like(groups)
    per_turn = group_relative(
        verdicts(rollout.turn_rewards), groups, scale=settings.whiten_advantages
    )
    return on_tokens(per_turn, rollout.turn_index, rollout.loss_mask)


def _distillation(rollout: Rollout, settings: LearnerSettings) -> Tensor:
    return distillation(
        rollout.teacher_logprobs,
        rollout.old_logprobs,
        rollout.taught,
        bound=settings.opd_advantage_bound,
    )


# --- metrics ----------------------------------------------------------------------------------


def sample_metrics(samples: Sequence[TrainingSample], rollout: Rollout) -> dict[str, float]:
    """What went into the update."""
    turns = [turn for sample in samples for turn in sample.turns]
    tokens = float(rollout.loss_mask.sum())
    return {
        "rewards/mean": sum(turn.reward for turn in turns) / len(turns),
        "rewards/nonzero_share": sum(turn.reward != 0.0 for turn in turns) / len(turns),
        "batch/samples": float(len(samples)),
        "batch/turns": float(len(turns)),
        "batch/tokens": tokens,
        "batch/context_tokens": float(sum(len(s.token_ids) for s in samples)) - tokens,
        "batch/truncated_share": sum(sample.truncated for sample in samples) / len(samples),
    }


def rollout_metrics(
    rollout: Rollout, targets: Targets, settings: LearnerSettings
) -> dict[str, float]:
    """What policies thought of it before training, and what was made of that."""
    mask, kl = rollout.loss_mask, targets.reference_kl
    samples = mask.shape[0]
    reference_k3 = estimate_kl(rollout.old_logprobs, rollout.reference_logprobs, mask, "k3")
    return {
        "losses/entropy": float(masked_mean(rollout.entropies, mask)),
        "kl/reference_k1": float(masked_mean(kl, mask)),
        "kl/reference_k3": float(masked_mean(reference_k3, mask)),
        "kl/reference_k1_per_sample": float(masked_sum(kl, mask)) / samples,
        "rewards/kl_penalty": settings.kl_coef * float(masked_sum(kl, mask)) / samples,
        "advantages/mean": float(masked_mean(targets.advantages, mask)),
        "advantages/std": float(masked_var(targets.advantages, mask)) ** 0.5,
        **_stale_metrics(rollout, targets, settings),
        **_critic_metrics(rollout, targets),
        **_mode_metrics(rollout, settings),
    }


def _stale_metrics(
    rollout: Rollout, targets: Targets, settings: LearnerSettings
) -> dict[str, float]:
    mask, weights = rollout.loss_mask, targets.importance
    missing = mask & ~rollout.known
    high = settings.clip_coef_high or settings.clip_coef
    uncapped = importance_weights(
        rollout.old_logprobs, rollout.behaviour_logprobs, rollout.known, cap=float("inf")
    )
    capped = (rollout.known & (uncapped > settings.importance_weight_cap)).float()
    outside = ((uncapped < 1.0 - settings.clip_coef) | (uncapped > 1.0 + high)).float()
    return {
        "stale/importance_weight": float(masked_mean(weights, mask)),
        "stale/capped_share": float(masked_mean(capped, mask)),
        "stale/clipped_share": float(masked_mean(outside, mask)),
        "stale/effective_sample_size": effective_sample_size(weights, mask),
        "stale/share_recomputed_logprobs": float(masked_mean(rollout.recomputed.float(), mask)),
        "stale/share_missing_logprobs": float(masked_mean(missing.float(), mask)),
    }


def recorded_gap(rollout: Rollout, current_version: int | None) -> dict[str, float]:
    """How far the log-probabilities that a server recorded are from ours for the same weights.

    Args:
        rollout: Scored.
        current_version: The version whose weights are the old policy.

    Returns:
        Nothing if no turn of that version came with its log-probabilities.
    """
    if current_version is None:
        return {}
    versions = on_tokens(rollout.turn_versions, rollout.turn_index, rollout.loss_mask)
    fresh = rollout.given & (versions == current_version)
    if not bool(fresh.any()):
        return {}
    gap = (rollout.old_logprobs - rollout.behaviour_logprobs).abs()
    return {RECORDED_GAP: float(masked_mean(gap, fresh))}


def _critic_metrics(rollout: Rollout, targets: Targets) -> dict[str, float]:
    critic, mask = targets.critic, rollout.loss_mask
    if critic is None:
        return {}
    metrics = {
        "rewards/return": float(masked_mean(critic.returns, mask)),
        "rewards/advantage_std": float(masked_var(critic.advantages, mask)) ** 0.5,
    }
    explained = explained_variance(rollout.old_values, critic.returns, mask)
    if explained is not None:
        metrics["losses/explained_variance"] = explained
    return metrics


def _mode_metrics(rollout: Rollout, settings: LearnerSettings) -> dict[str, float]:
    _, grpo_weight, opd_weight = settings.mode_weights
    metrics: dict[str, float] = {}
    if grpo_weight:
        verdict = verdicts(rollout.turn_rewards)
        metrics["grpo/judged_share"] = float((verdict != 0).float().mean())
        metrics["grpo/good_share"] = float(masked_mean((verdict > 0).float(), verdict != 0))
    if opd_weight:
        gap = masked_fill(rollout.teacher_logprobs - rollout.old_logprobs, rollout.taught)
        metrics["opd/taught_share"] = float(masked_mean(rollout.taught.float(), rollout.loss_mask))
        metrics["opd/teacher_gap"] = float(masked_mean(gap, rollout.taught))
        bounded = (gap.abs() > settings.opd_advantage_bound).float()
        metrics["opd/bounded_share"] = float(masked_mean(bounded, rollout.taught))
    return metrics


__all__ = [
    "RECORDED_GAP",
    "Targets",
    "make_targets",
    "recorded_gap",
    "rollout_metrics",
    "sample_metrics",
]
