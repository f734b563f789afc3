"""Log-probabilities of chosen tokens without the logits of a whole batch in memory.

A vocabulary of 50,000 makes the logits of 10,000 tokens 2 GB, and training keeps them twice.
Here they exist for one chunk of tokens at a time. What the backward pass needs of them, one
vector per token, is computed while they are there::

    d log p(y) / d h = (W_y - sum_v p_v W_v) / temperature
    d H / d h        = -sum_v p_v (log p_v + H) W_v / temperature

The second is left out where no loss asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of each token: how likely it was, and how open the choice.

    Args:
        logprobs: ``[tokens]``, float32.
        entropies: ``[tokens]``, float32, in nats.
    """

    logprobs: Tensor
    entropies: Tensor


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int = 1_024,
    entropy_gradient: bool = True,
) -> TokenScores:
    """``log softmax((hidden W^T + b) / temperature)`` at `targets`, and its entropy.

    Computed in float32 whatever the inputs are. Gradients reach `hidden` alone: the output
    layer is frozen.

    Args:
        hidden: ``[tokens, width]``, the states from which the tokens were chosen.
        weight: ``[vocabulary, width]``, the output layer.
        targets: ``[tokens]``, the tokens chosen.
        temperatures: ``[tokens]``, above 0; the same for every policy that is compared.
        bias: ``[vocabulary]`` or None.
        chunk_tokens: How many tokens' logits exist at a time.
        entropy_gradient: Whether the entropies have a gradient, which costs a third of all.
    """
    scores = _LinearLogprobs.apply(
        hidden, weight, targets, temperatures, bias, chunk_tokens, entropy_gradient
    )
    logprobs, entropies = cast(tuple[Tensor, Tensor], scores)
    return TokenScores(logprobs, entropies)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        bias: Tensor | None,
        chunk_tokens: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        wanted = bool(ctx.needs_input_grad[0])
        logprob_slopes = _slopes(hidden, wanted)
        entropy_slopes = _slopes(hidden, wanted and entropy_gradient)
        matrix = weight.float()
        for start in range(0, hidden.shape[0], chunk_tokens):
            part = slice(start, start + chunk_tokens)
            scale = temperatures[part].float().reciprocal()[:, None]
            target = targets[part][:, None]
            all_logprobs = _log_softmax(hidden[part].float(), matrix, bias, scale)
            probs = all_logprobs.exp()
            logprobs[part] = all_logprobs.gather(1, target)[:, 0]
            entropies[part] = -torch.linalg.vecdot(probs, all_logprobs, dim=1)
            if not wanted:
                continue
            mean_row = probs @ matrix
            logprob_slopes[part] = (matrix[target[:, 0]] - mean_row) * scale
            if entropy_gradient:
                weighted = probs.mul_(all_logprobs) @ matrix
                spread = weighted + entropies[part][:, None] * mean_row
                entropy_slopes[part] = -spread * scale
        ctx.save_for_backward(logprob_slopes, entropy_slopes)
        ctx.hidden_dtype = hidden.dtype
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logprob_slopes, entropy_slopes = ctx.saved_tensors
        logprob_grad, entropy_grad = grads
        total = logprob_grad[:, None] * logprob_slopes
        if len(entropy_slopes):
            total = total + entropy_grad[:, None] * entropy_slopes
        return total.to(ctx.hidden_dtype), None, None, None, None, None, None


def _slopes(hidden: Tensor, wanted: bool) -> Tensor:
    """Room for one gradient per token; none if it is not wanted."""
    rows = hidden.shape[0] if wanted else 0
    return torch.empty((rows, hidden.shape[1]), dtype=torch.float32, device=hidden.device)


def _log_softmax(hidden: Tensor, matrix: Tensor, bias: Tensor | None, scale: Tensor) -> Tensor:
    logits = hidden @ matrix.T
    if bias is not None:
        logits.add_(bias.float())
    return torch.log_softmax(logits.mul_(scale), dim=1)


__all__ = ["TokenScores", "linear_logprobs"]
