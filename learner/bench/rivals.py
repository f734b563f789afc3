"""What the rivals of both benches share. Runs in their environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from learner.bench.preset import TASTE, Job, draw_seed, draws_of
from learner.bench.sampling import Reply, draw_replies
from learner.bench.users import honest_reward, prompts_of
from learner.model import BaseModel

_FAR_BELOW = -1e4
"""A logit that draws nothing."""


@dataclass(frozen=True, slots=True)
class Told:
    """One round of conversations: the replies and, honestly, what users think of them."""

    replies: Sequence[Reply]
    rewards: Sequence[float]

    @property
    def reward(self) -> float:
        """The mean."""
        return honest_reward([reward > 0 for reward in self.rewards])


class Talks:
    """The conversations that our learner has too: same prompts, same draws, same users."""

    def __init__(self, job: Job, base: BaseModel) -> None:
        self._job = job
        self._base = base

    def prompts(self, update: int) -> list[tuple[int, ...]]:
        """What is asked before an update, as token ids."""
        asked = prompts_of(self._job.seed, update, self._job.replies)
        return [self._base.chat.render_prompt([{"role": "user", "content": p}]) for p in asked]

    def hold(self, model: Any, update: int) -> Told:
        """Let ``model`` answer."""
        seed = draw_seed(self._job, update)
        replies = draw_replies(model, self.prompts(update), draws_of(self._base), seed)
        texts = [self._base.chat.decode(reply.token_ids) for reply in replies]
        return Told(replies, [1.0 if TASTE.likes(text) else -1.0 for text in texts])


def vocabulary_of(base: BaseModel) -> int:
    """Token ids of the model are below this."""
    return int(base.model.get_output_embeddings().weight.shape[0])


def pad_left(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Rows in a rectangle that end together, and the mask of what they hold; int64 both."""
    longest = max(map(len, rows))
    ids = [[pad] * (longest - len(row)) + [*row] for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(mask)


def pad_right(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Likewise, of rows that begin together."""
    longest = max(map(len, rows))
    ids = [[*row] + [pad] * (longest - len(row)) for row in rows]
    mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
    return torch.tensor(ids), torch.tensor(mask)


def logits_for(replies: Tensor, logprobs: Sequence[Sequence[float]], vocabulary: int) -> Tensor:
    """``[rows, tokens, vocabulary]``: logits under which the tokens had these log-probabilities.

    TRL's PPO takes the logits of the draw, a large tensor, and asks of them nothing but the chosen
    tokens' log-probabilities; one other token gets what is left of the probability.
    """
    logits = torch.full((*replies.shape, vocabulary), _FAR_BELOW)
    for row, values in enumerate(logprobs):
        own = replies[row, : len(values)]
        chosen = torch.tensor(values).clamp(max=-1e-6)
        columns = torch.arange(len(values))
        logits[row, columns, (own + 1) % vocabulary] = torch.log(-torch.expm1(chosen))
        logits[row, columns, own] = chosen
    return logits


__all__ = ["Talks", "Told", "logits_for", "pad_left", "pad_right", "vocabulary_of"]
