"""Rows of different lengths and ages in one key-value cache.

Every row ends in the last column; shorter rows are padded on the left and masked there, and
each row counts its positions from its own first token. So a row's numbers do not depend on
who shares the batch: rows can join, leave and be re-padded between any two steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache


@dataclass(frozen=True, slots=True)
class PaddedPrompts:
    """Prompts padded on the left, all of shape ``[rows, columns]``, int64."""

    input_ids: Tensor
    mask: Tensor
    position_ids: Tensor


def pad_prompts(prompts: Sequence[Sequence[int]], device: torch.device) -> PaddedPrompts:
    """Lay prompts into one tensor; the padding is masked, its id and position are 0."""
    columns = max(len(prompt) for prompt in prompts)
    ids = torch.zeros((len(prompts), columns), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, columns - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
        mask[row, columns - len(prompt) :] = 1
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return PaddedPrompts(ids.to(device), mask.to(device), positions.to(device))


@dataclass(frozen=True, slots=True)
class CachedRows:
    """The keys and values of some rows.

    Args:
        cache: One layer each; tensors of shape ``[rows, heads, columns, width]``.
        mask: Shape ``[rows, columns]``, int64; 1 where a real token is.
    """

    cache: Any
    mask: Tensor

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return int(self.mask.shape[0])

    def next_positions(self) -> Tensor:
        """The position of each row's next token, shape ``[rows, 1]``."""
        return self.mask.sum(dim=1, keepdim=True)

    def extended_mask(self) -> Tensor:
        """The mask with one more real column, for the token that is fed next."""
        return pad(self.mask, (0, 1), value=1)

    def joined(self, other: CachedRows) -> CachedRows:
        """These rows and, below them, the other's."""
        columns = max(self.mask.shape[1], other.mask.shape[1])
        first, second = self._widened(columns), other._widened(columns)
        layers = [
            (torch.cat([mine[0], theirs[0]]), torch.cat([mine[1], theirs[1]]))
            for mine, theirs in zip(first._layers(), second._layers(), strict=True)
        ]
        return CachedRows(DynamicCache(layers), torch.cat([first.mask, second.mask]))

    def kept(self, rows: Sequence[int]) -> CachedRows:
        """Only these rows, in this order, without columns that none of them uses."""
        index = torch.tensor(rows, dtype=torch.long, device=self.mask.device)
        mask = self.mask.index_select(0, index)
        unused = int((mask.sum(dim=0) == 0).long().cumprod(dim=0).sum())
        layers = [
            (
                keys.index_select(0, index)[:, :, unused:].contiguous(),
                values.index_select(0, index)[:, :, unused:].contiguous(),
            )
            for keys, values in self._layers()
        ]
        return CachedRows(DynamicCache(layers), mask[:, unused:].contiguous())

    def _widened(self, columns: int) -> CachedRows:
        missing = columns - self.mask.shape[1]
        if missing == 0:
            return self
        layers = [
            (pad(keys, (0, 0, missing, 0)), pad(values, (0, 0, missing, 0)))
            for keys, values in self._layers()
        ]
        return CachedRows(DynamicCache(layers), pad(self.mask, (missing, 0)))

    def _layers(self) -> list[tuple[Tensor, Tensor]]:
        return [(layer.keys, layer.values) for layer in self.cache.layers]
