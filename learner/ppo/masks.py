"""Masked reductions. In every mask here True means: this position counts.

Positions that do not count may hold anything, NaN and infinity included: their values and
their gradients never get through. That takes ``where`` *before* the arithmetic; multiplying
by a mask afterwards turns infinity into NaN, in the gradient even where the value looks right.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_sum", "sequence_mean"]
"""How per-token losses become one number.

``token_mean``: mean over all counting tokens; ``sequence_sum``: sum over each sequence's
tokens, mean over sequences; ``sequence_mean``: mean over each sequence's tokens, mean over
sequences.
"""


def masked_fill(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """`values` where `mask`, else `fill`; nothing flows through the rest.

    Args:
        values: Any shape.
        mask: Bool, the same shape.
        fill: What stands in for the rest.
    """
    return torch.where(mask, values, torch.full_like(values, fill))


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` over `mask`; shape ``[]``, 0 if nothing counts."""
    return masked_fill(values, mask).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of `values` over `mask`; shape ``[]``, 0 if nothing counts."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Sample variance (Bessel's n - 1) of `values` over `mask`; shape ``[]``.

    0 if fewer than two positions count.
    """
    mean = masked_mean(values, mask)
    squares = masked_sum((masked_fill(values, mask) - mean) ** 2, mask)
    return squares / (mask.sum() - 1).clamp(min=1)


def whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """``(x - mean) / sqrt(var + eps)`` over `mask`, 0 elsewhere.

    Args:
        values: ``[batch, time]`` (any shape will do).
        mask: Bool, the same shape.
        shift_mean: Whether the mean is taken off; without, only the scale changes.
        eps: Keeps equal values from dividing by zero.

    The variance has Bessel's correction, as in TRL and verl.
    """
    centred = masked_fill(values, mask) - masked_mean(values, mask)
    scaled = centred if shift_mean else masked_fill(values, mask)
    return masked_fill(scaled * torch.rsqrt(masked_var(values, mask) + eps), mask)


def aggregate(
    losses: Tensor, mask: Tensor, how: Aggregation = "token_mean", *, total: float | None = None
) -> Tensor:
    """One number from per-token losses; shape ``[]``.

    Args:
        losses: ``[batch, time]``.
        mask: Bool, ``[batch, time]``.
        how: See `Aggregation`.
        total: What to divide by in the end: counting tokens for ``token_mean``, sequences
            for the others; this batch's own number if None. Pass the number of the whole
            minibatch when its gradient is accumulated over parts of it: the parts then add
            up to the same gradient however they were cut.
    """
    kept = masked_fill(losses, mask)
    if how == "token_mean":
        count = float(mask.sum()) if total is None else total
        return kept.sum() / max(count, 1.0)
    per_sequence = kept.sum(dim=-1)
    if how == "sequence_mean":
        per_sequence = per_sequence / mask.sum(dim=-1).clamp(min=1)
    count = float(losses.shape[0]) if total is None else total
    return per_sequence.sum() / max(count, 1.0)


__all__ = [
    "Aggregation",
    "aggregate",
    "masked_fill",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "whiten",
]
