"""Losses of labelled replies, one per example."""

from __future__ import annotations

from torch import Tensor, nn

from learner.ppo.masks import masked_fill


def preference_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
) -> Tensor:
    """How clearly the policy prefers the chosen replies, compared with the reference.

    With log-probabilities of whole replies::

        m = (log p(c) - log p(r)) - (log q(c) - log q(r))
        L = -log sigmoid(beta * m)

    Direct preference optimisation, Rafailov et al. 2023 (arXiv 2305.18290), equation 7.

    Args:
        chosen: Any shape, log p of the better reply, summed over its tokens.
        rejected: The same shape, of the worse one.
        reference_chosen: The same shape, log q of the better one under the reference.
        reference_rejected: The same shape, of the worse one.
        beta: How much a nat of margin counts, above 0: small ones drift further.

    Returns:
        The same shape, log 2 where policy and reference agree.
    """
    margin = (chosen - rejected) - (reference_chosen - reference_rejected)
    return -nn.functional.logsigmoid(beta * margin)


def reply_nll(logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Cross-entropy of each reply, mean over its own tokens: ``-sum_t log p_t / n``.

    Args:
        logprobs: ``[replies, time]``.
        loss_mask: Bool ``[replies, time]``; True = a token of the reply.

    Returns:
        ``[replies]``; 0 for one without tokens.
    """
    counts = loss_mask.sum(dim=1).clamp(min=1)
    return -masked_fill(logprobs, loss_mask).sum(dim=1) / counts


__all__ = ["preference_loss", "reply_nll"]
