"""Drawing one token from one row of logits.

The log-probability that is reported is that of the distribution the learner trains on: the
softmax of ``logits / temperature`` over the whole vocabulary, in fp32, *before* ``top_p``
cuts its tail. At temperature 0 the token is the arg max; the log-probability is then that of
temperature 1, since the limit distribution puts everything on one token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.batch import GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How the tokens of one reply are drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    top_logprobs: int = 0

    @property
    def greedy(self) -> bool:
        """Whether each token is the most likely one."""
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class Draw:
    """One drawn token: its log-probability, and the most likely tokens with theirs."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def draw(logits: Tensor, parameters: SamplingParameters, generator: torch.Generator) -> Draw:
    """Draw a token.

    Args:
        logits: Shape ``[vocabulary]``, any float type.
        parameters: How to draw.
        generator: This reply's own random source, on the device of ``logits``. It is not
            used when the draw is greedy.
    """
    logprobs = distribution(logits, parameters.temperature)
    chosen = (
        int(torch.argmax(logprobs))
        if parameters.greedy
        else _sample(logprobs, parameters.top_p, generator)
    )
    return Draw(chosen, float(logprobs[chosen]), _top(logprobs, parameters.top_logprobs))


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities at a temperature (0 counts as 1), fp32, the shape of ``logits``."""
    scale = 1.0 if temperature < GREEDY_BELOW else temperature
    return torch.log_softmax(logits.float() / scale, dim=-1)


def _sample(logprobs: Tensor, top_p: float, generator: torch.Generator) -> int:
    probabilities = logprobs.exp()
    if top_p < 1.0:
        probabilities = nucleus(probabilities, top_p)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero all but the smallest set of most likely tokens that holds ``top_p`` of the mass.

    The most likely token always stays. The result is not normalised.
    Source: Holtzman et al., The Curious Case of Neural Text Degeneration, 2020.
    """
    ordered, order = torch.sort(probabilities, descending=True, stable=True)
    before = torch.cumsum(ordered, dim=-1) - ordered
    outside = before >= top_p
    outside[0] = False
    kept = probabilities.clone()
    kept[order[outside]] = 0.0
    return kept


def _top(logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    values, ids = torch.topk(logprobs, min(count, logprobs.shape[-1]))
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))
