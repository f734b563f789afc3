"""Estimators of KL(p || q) from samples of p, and what is made of them.

John Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html, 2020). A number
called KL means nothing until estimator, reference policy and unit are named; here the unit is
always nats per token, and every caller names the other two.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from learner.ppo.masks import masked_fill

KlEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Differences of log-probabilities are clamped to this before ``exp``: e^20 is 5e8, beyond
which a ratio says no more and float32 is soon at its end."""


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """``log p - log q``: unbiased, of either sign, large variance. Any shape."""
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """``(log p - log q)^2 / 2``: biased, never negative, small variance. Any shape."""
    return 0.5 * (logprobs - reference_logprobs) ** 2


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """``q/p - 1 - log(q/p)``: unbiased and never negative. Any shape."""
    log_ratio = (reference_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1 keeps the digits that exp(x) - 1 loses near 0, where these numbers live.
    return torch.expm1(log_ratio) - log_ratio


def estimate_kl(
    logprobs: Tensor, reference_logprobs: Tensor, loss_mask: Tensor, estimator: KlEstimator
) -> Tensor:
    """Per-token KL of the policy that chose the tokens to `reference_logprobs`'s policy.

    Args:
        logprobs: ``[batch, time]``, log p of the tokens that p chose.
        reference_logprobs: ``[batch, time]``, log q of the same tokens.
        loss_mask: Bool, ``[batch, time]``.
        estimator: Which of the three.

    Returns:
        ``[batch, time]``, 0 where the mask does not count.
    """
    estimate = {"k1": k1, "k2": k2, "k3": k3}[estimator]
    kept = estimate(masked_fill(logprobs, loss_mask), masked_fill(reference_logprobs, loss_mask))
    return masked_fill(kept, loss_mask)


def penalised_rewards(rewards: Tensor, kl: Tensor, loss_mask: Tensor, *, kl_coef: float) -> Tensor:
    """``r_t - kl_coef * kl_t`` on counting tokens, 0 elsewhere; ``[batch, time]``.

    The penalty of Ziegler et al. 2019 (arXiv 1909.08593), section 2: part of the reward, so
    that advantages know that drifting costs later, not a term of the loss.
    """
    return masked_fill(rewards - kl_coef * kl, loss_mask)


__all__ = [
    "KlEstimator",
    "MAX_LOG_RATIO",
    "estimate_kl",
    "k1",
    "k2",
    "k3",
    "penalised_rewards",
]
