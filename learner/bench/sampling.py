"""Replies of a model to a batch of prompts, with what the learner wants to know of them.

Imports nothing but torch and transformers, so that a rival's environment can run it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig


@dataclass(frozen=True, slots=True)
class Draws:
    """How replies are drawn."""

    temperature: float
    max_new_tokens: int
    end_token_id: int
    pad_token_id: int


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply as it was drawn.

    Args:
        prompt_ids: What it answers.
        token_ids: Its tokens, the end of turn included if it ended itself.
        logprobs: One per token, at the temperature of the draw.
        ended: Whether it ended itself.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ended: bool


@torch.no_grad()
def draw_replies(
    model: Any, prompts: Sequence[Sequence[int]], draws: Draws, seed: int
) -> list[Reply]:
    """One reply to each prompt, all in one batch.

    The same weights, prompts and seed give the same replies. The global random generator is
    left as it was.

    Args:
        model: A causal language model of transformers in eval mode, with or without adapters.
        prompts: Token ids.
        draws: How to draw.
        seed: Of the draws.
    """
    device = next(model.parameters()).device
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), longest), draws.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        made = model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            generation_config=_config(draws),
        )
    scores = torch.stack(made.scores, dim=1).float()
    drawn = made.sequences[:, longest:]
    chosen = torch.log_softmax(scores, dim=2).gather(2, drawn[:, :, None])[:, :, 0]
    return [
        _reply(tuple(prompt), drawn[row].tolist(), chosen[row].tolist(), draws)
        for row, prompt in enumerate(prompts)
    ]


def _config(draws: Draws) -> GenerationConfig:
    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        temperature=draws.temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=draws.max_new_tokens,
        eos_token_id=draws.end_token_id,
        pad_token_id=draws.pad_token_id,
        return_dict_in_generate=True,
        output_scores=True,
    )


def _reply(prompt: tuple[int, ...], ids: list[int], logprobs: list[float], draws: Draws) -> Reply:
    ended = draws.end_token_id in ids
    length = ids.index(draws.end_token_id) + 1 if ended else len(ids)
    return Reply(prompt, tuple(ids[:length]), tuple(logprobs[:length]), ended)


__all__ = ["Draws", "Reply", "draw_replies"]
