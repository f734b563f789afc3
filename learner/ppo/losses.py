"""The losses of PPO, per token; `masks.aggregate` makes one number of them.

Three policies appear. The *behaviour* policy chose the tokens, possibly some versions ago;
the *old* (proximal) policy is the one this update started from; the *new* one is being
trained. The ratio that is clipped is new to old; old to behaviour is a constant weight
(the decoupled objective of Hilton et al. 2021, arXiv 2110.00641).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.ppo.kl import MAX_LOG_RATIO
from learner.ppo.masks import masked_fill


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The clipped objective and what its clipping did.

    Args:
        losses: ``[batch, time]``, to be minimised; 0 where the mask does not count.
        ratio: ``[batch, time]``, new to old; 1 where the mask does not count.
        log_ratio: ``[batch, time]``, before ``exp``; 0 where the mask does not count.
        clipped: Bool ``[batch, time]``, |ratio - 1| is beyond its side's bound.
        dual_clipped: Bool ``[batch, time]``, the loss is at the dual clip's bound.
    """

    losses: Tensor
    ratio: Tensor
    log_ratio: Tensor
    clipped: Tensor
    dual_clipped: Tensor


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """Clipped surrogate with an upper bound for bad actions that became likely.

    With ``r = exp(log p_new - log p_old)``::

        L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
        L = min(L, -A dual_clip)   where A < 0

    Schulman et al. 2017 (arXiv 1707.06347), equation 7; the second line is Ye et al. 2020
    (arXiv 1912.09729), equation 5. Where a bound is active there is no gradient.

    Args:
        logprobs: ``[batch, time]``, of the policy in training.
        old_logprobs: ``[batch, time]``, of the policy the update started from.
        advantages: ``[batch, time]``.
        loss_mask: Bool, ``[batch, time]``.
        clip_low: How far below 1 the ratio may go.
        clip_high: How far above 1 it may go.
        dual_clip: Bound of the ratio for negative advantages, above 1; None for none.
        weights: ``[batch, time]``, constant factors such as `importance_weights`; None is 1.
    """
    kept_logprobs = masked_fill(logprobs, loss_mask)
    log_ratio = (kept_logprobs - masked_fill(old_logprobs, loss_mask)).clamp(
        -MAX_LOG_RATIO, MAX_LOG_RATIO
    )
    ratio = log_ratio.exp()
    gain = masked_fill(advantages, loss_mask)
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    losses = torch.maximum(-gain * ratio, -gain * bounded)
    dual_clipped = torch.zeros_like(loss_mask)
    if dual_clip is not None:
        ceiling = -gain * dual_clip
        dual_clipped = (gain < 0) & (losses > ceiling)
        losses = torch.where(dual_clipped, ceiling, losses)
    if weights is not None:
        losses = losses * masked_fill(weights, loss_mask).detach()
    return PolicyLoss(
        losses=masked_fill(losses, loss_mask),
        ratio=ratio,
        log_ratio=log_ratio,
        clipped=((ratio < 1.0 - clip_low) | (ratio > 1.0 + clip_high)) & loss_mask,
        dual_clipped=dual_clipped & loss_mask,
    )


def importance_weights(
    old_logprobs: Tensor, behaviour_logprobs: Tensor, known: Tensor, *, cap: float
) -> Tensor:
    """``min(p_old / p_behaviour, cap)``, detached; 1 where the behaviour is not known.

    Truncated importance sampling (Ionides 2008; IMPALA's rho, arXiv 1802.01561): stale data
    count for what the current policy would still do, and no token for more than `cap`.

    Args:
        old_logprobs: ``[batch, time]``.
        behaviour_logprobs: ``[batch, time]``.
        known: Bool, ``[batch, time]``; True = `behaviour_logprobs` holds a real value.
        cap: The largest weight.
    """
    log_ratio = masked_fill(old_logprobs, known) - masked_fill(behaviour_logprobs, known)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return masked_fill(ratio.clamp(max=cap), known, fill=1.0).detach()


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """The value head's error and where its clipping decided.

    Args:
        losses: ``[batch, time]``, half squared errors; 0 where the mask does not count.
        clipped: Bool ``[batch, time]``, the clipped error was the larger one.
    """

    losses: Tensor
    clipped: Tensor


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    *,
    value_clip: float | None,
) -> ValueLoss:
    """``max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2``.

    The pessimistic value clip of the original PPO code (Engstrom et al. 2020, arXiv
    2005.12729, section 3).

    Args:
        values: ``[batch, time]``, of the head in training.
        old_values: ``[batch, time]``, of the head the update started from.
        returns: ``[batch, time]``.
        loss_mask: Bool, ``[batch, time]``.
        value_clip: How far a value may move in one update; None for the plain square.
    """
    kept, target = masked_fill(values, loss_mask), masked_fill(returns, loss_mask)
    squared = (kept - target) ** 2
    if value_clip is None:
        return ValueLoss(0.5 * squared, torch.zeros_like(loss_mask))
    old = masked_fill(old_values, loss_mask)
    bounded = torch.maximum(torch.minimum(kept, old + value_clip), old - value_clip)
    bounded_squared = (bounded - target) ** 2
    return ValueLoss(
        losses=0.5 * torch.maximum(squared, bounded_squared),
        clipped=(bounded_squared > squared) & loss_mask,
    )


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of the distribution over the last axis: ``-sum p log p``.

    Args:
        logits: ``[..., vocabulary]``; -inf marks what cannot be chosen and adds nothing.

    Returns:
        ``[...]``.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    # 0 * log 0 is 0 here, and has no gradient.
    possible = torch.isfinite(logprobs)
    safe = masked_fill(logprobs, possible)
    return -masked_fill(safe.exp() * safe, possible).sum(dim=-1)


__all__ = [
    "PolicyLoss",
    "ValueLoss",
    "entropy",
    "importance_weights",
    "policy_loss",
    "value_loss",
]
