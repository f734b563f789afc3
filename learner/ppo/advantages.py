"""Generalised advantage estimation over conversations.

Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
2016 (arXiv 1506.02438), equations 11 and 16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.ppo.masks import masked_fill


@dataclass(frozen=True, slots=True)
class Advantages:
    """What each action was worth, beyond what was expected and in all.

    Args:
        advantages: ``[batch, time]``, 0 where the mask does not count.
        returns: ``[batch, time]``, advantage plus value: the target of the value head.
    """

    advantages: Tensor
    returns: Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    bootstrap: Tensor | None = None,
) -> Advantages:
    """Advantages of the policy's tokens, as if the other tokens were not there.

    Over the counting positions alone::

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lambda * A_{t+1}
        R_t     = A_t + V_t

    A conversation interleaves the policy's tokens with those of users, tools and the chat
    template. These are no actions: the next value and the running advantage are carried
    across them unchanged, neither discounted nor replaced. What `rewards` and `values` hold
    there is never looked at, so a reward must sit on a counting token (its turn's last one).

    Args:
        rewards: ``[batch, time]``.
        values: ``[batch, time]``, V of the state in which the token was chosen.
        loss_mask: Bool, ``[batch, time]``; True = a token the policy chose.
        gamma: Discount per chosen token.
        gae_lambda: 0 gives the one-step error, 1 the return minus the value.
        bootstrap: ``[batch]``, V of the state that conversations which were cut rather than ended
            led to; 0 for those that ended. None is 0 for all.
    """
    rewards, values = masked_fill(rewards, loss_mask), masked_fill(values, loss_mask)
    next_value = torch.zeros_like(values[:, 0]) if bootstrap is None else bootstrap.to(values)
    running = torch.zeros_like(next_value)
    columns: list[Tensor] = []
    for time in range(values.shape[1] - 1, -1, -1):
        counts, value = loss_mask[:, time], values[:, time]
        delta = rewards[:, time] + gamma * next_value - value
        advantage = delta + gamma * gae_lambda * running
        running = torch.where(counts, advantage, running)
        next_value = torch.where(counts, value, next_value)
        columns.append(running)
    stacked = torch.stack(columns[::-1], dim=1) if columns else torch.zeros_like(values)
    advantages = masked_fill(stacked, loss_mask)
    return Advantages(advantages, masked_fill(advantages + values, loss_mask))


__all__ = ["Advantages", "gae"]
