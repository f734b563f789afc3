"""The processes that make one update together.

Every process holds the whole policy and all samples, draws the same plan, and works on every
n-th micro-batch. What comes of them is summed: log-probabilities before training, gradients
before each step. Sums are the same number in every process, and so are the steps; what one
process alone would have computed differs by rounding only.

A micro-batch is nobody's or somebody's, never shared, and all processes take equally many turns:
where there is none left, a process repeats one and what comes of it does not count. It would
have waited for the others anyway, and weights that are spread over the processes
(`learner.sharding`) need all of them at every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

T = TypeVar("T")


class Team(Protocol):
    """See the module. All members call the same methods in the same order."""

    @property
    def size(self) -> int:
        """How many processes there are."""
        ...

    def turns(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        """This process's items, and whether each counts; equally many in every process.

        Over all processes each item counts once.
        """
        ...

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Put the sum over all processes in the place of each tensor."""
        ...

    def largest(self, value: float) -> float:
        """The largest of the processes' values."""
        ...


class Alone:
    """A team of one process."""

    @property
    def size(self) -> int:
        return 1

    def turns(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        return [(item, True) for item in items]

    def add(self, tensors: Sequence[Tensor]) -> None:
        """The sum over one process is there already."""

    def largest(self, value: float) -> float:
        return value


class Processes:
    """A team over ``torch.distributed``'s default group, which must be there.

    Args:
        device: Where numbers are for that group: the CPU for gloo, a GPU for NCCL.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def size(self) -> int:
        return dist.get_world_size()

    def turns(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        rank, size = dist.get_rank(), dist.get_world_size()
        rounds = -(-len(items) // size)
        places = [rank + size * number for number in range(rounds)]
        return [(items[place % len(items)], place < len(items)) for place in places]

    def add(self, tensors: Sequence[Tensor]) -> None:
        # In the same order in every process, which a set is not.
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            # One message for all of them: each would wait for its own answer.
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in alike])
            flat = flat.to(self._device)
            dist.all_reduce(flat)
            parts = torch.split(flat, [tensor.numel() for tensor in alike])
            for tensor, part in zip(alike, parts, strict=True):
                tensor.detach().copy_(part.view_as(tensor))

    def largest(self, value: float) -> float:
        found = torch.tensor([value], dtype=torch.float32, device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return float(found)


__all__ = ["Alone", "Processes", "Team"]
