"""Where advantages come from when no critic says, and how several sources become one.

Every mode trains with the same clipped loss (`losses.policy_loss`) on the same samples; modes
differ in the advantage of a token alone::

    ppo     whitened GAE of the penalised rewards                       `advantages.gae`
    grpo    A_turn - kl_coef * kl_t                                     `group_relative`
    opd     clip(log p_teacher - log p_old, +-bound) - kl_coef * kl_t   `distillation`
    hybrid  w_ppo * A_ppo + w_grpo * A_grpo + w_opd * A_opd             `blend`

Without a critic nothing spreads a penalty over the tokens before it, so the KL to the reference
is charged where it arises: ``-kl_t`` as a constant advantage is the score-function gradient of
that token's KL. It is itself a distillation, with the reference as the teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from learner.ppo.masks import masked_fill, masked_mean, whiten

Grouping = Literal["update", "version"]


def verdicts(rewards: Tensor) -> Tensor:
    """Binary rewards: 1 for a good reply, -1 for a bad one, 0 for one nobody judged.

    Args:
        rewards: ``[turns]``, of either sign.
    """
    return rewards.sign()


def group_relative(verdict: Tensor, groups: Tensor, *, scale: bool) -> Tensor:
    """How much better a reply was judged than its group: one advantage per reply.

    With ``b_i`` the verdict of reply i and g its group, over the judged replies of g::

        A_i = (b_i - mean_g b) / sqrt(var_g b + 1e-8)       (Bessel's variance)

    Shao et al. 2024 (arXiv 2402.03300), section 4.1.2, with groups of logged replies in place
    of several replies to one prompt. Replies that nobody judged have no advantage and do not
    count in their group. The advantages of a group sum to 0; where all were judged alike
    (or one alone) they are all 0: nothing says which is better.

    Args:
        verdict: ``[turns]``, as `verdicts` gives them.
        groups: ``[turns]``, integers; equal ones are one group.
        scale: Whether to divide by the spread; without, rare verdicts are not amplified
            (Liu et al. 2025, arXiv 2503.20783).

    Returns:
        ``[turns]``.
    """
    judged = verdict != 0
    advantages = torch.zeros_like(verdict)
    for group in sorted(set(groups.tolist())):
        members = judged & (groups == group)
        relative = (
            whiten(verdict, members)
            if scale
            else masked_fill(verdict - masked_mean(verdict, members), members)
        )
        advantages = advantages + relative
    return advantages


def on_tokens(per_turn: Tensor, turn_index: Tensor, loss_mask: Tensor) -> Tensor:
    """Each turn's number on each of its tokens; ``[batch, time]``, 0 elsewhere.

    Args:
        per_turn: ``[turns]``.
        turn_index: Long ``[batch, time]``, which turn a token belongs to.
        loss_mask: Bool ``[batch, time]``; `turn_index` means nothing elsewhere.
    """
    return masked_fill(per_turn[masked_fill(turn_index, loss_mask)], loss_mask)


def distillation(
    teacher_logprobs: Tensor, old_logprobs: Tensor, taught: Tensor, *, bound: float
) -> Tensor:
    """``clip(log p_teacher - log p_old, -bound, bound)`` of the sampled tokens, 0 elsewhere.

    On-policy distillation: the score-function gradient of the reverse KL of student to teacher
    (Agarwal et al. 2024, arXiv 2306.13649), token by token and without looking ahead. Where the
    teacher thinks as the old policy does, there is nothing to learn: exactly 0.

    Args:
        teacher_logprobs: ``[batch, time]``, of the same tokens after the teacher's prompt, at
            the same temperature.
        old_logprobs: ``[batch, time]``, of the policy the update started from.
        taught: Bool ``[batch, time]``; True = the teacher had a hint about this token's reply.
        bound: Nats; a token that the teacher rules out says no more than this.
    """
    gap = masked_fill(teacher_logprobs, taught) - masked_fill(old_logprobs, taught)
    return gap.clamp(-bound, bound)


def charged(advantages: Tensor, kl: Tensor, loss_mask: Tensor, *, kl_coef: float) -> Tensor:
    """``A_t - kl_coef * kl_t`` on counting tokens, 0 elsewhere; ``[batch, time]``.

    Args:
        advantages: ``[batch, time]``.
        kl: ``[batch, time]``, estimator k1, old policy to reference.
        loss_mask: Bool ``[batch, time]``.
        kl_coef: Weight of the penalty, as in `kl.penalised_rewards`.
    """
    return masked_fill(advantages - kl_coef * kl, loss_mask)


def blend(parts: Sequence[tuple[float, Tensor]]) -> Tensor:
    """``sum_i w_i A_i`` over the parts whose weight is not 0; ``[batch, time]``.

    One part of weight 1 is returned as it is, bit for bit.

    Args:
        parts: At least one of them with a weight other than 0.
    """
    weighted = [advantages * weight for weight, advantages in parts if weight != 0.0]
    total = weighted[0]
    for advantages in weighted[1:]:
        total = total + advantages
    return total


__all__ = [
    "Grouping",
    "blend",
    "charged",
    "distillation",
    "group_relative",
    "on_tokens",
    "verdicts",
]
