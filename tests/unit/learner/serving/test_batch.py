from __future__ import annotations

import torch
from transformers import DynamicCache

from learner.model import BaseModel
from learner.serving.batch import CachedRows, pad_prompts

PROMPTS = ([5, 6, 7, 8, 9], [10, 11], [12])


def prefill(base: BaseModel, prompts: list[list[int]]) -> CachedRows:
    padded = pad_prompts(prompts, base.device)
    cache = DynamicCache()
    with torch.inference_mode():
        base.model(
            input_ids=padded.input_ids,
            attention_mask=padded.mask,
            position_ids=padded.position_ids,
            past_key_values=cache,
        )
    return CachedRows(cache, padded.mask)


def following(base: BaseModel, cached: CachedRows, tokens: list[int]) -> torch.Tensor:
    """Logits after one more token a row."""
    with torch.inference_mode():
        output = base.model(
            input_ids=torch.tensor([[token] for token in tokens]),
            attention_mask=cached.extended_mask(),
            position_ids=cached.next_positions(),
            past_key_values=cached.cache,
        )
    logits: torch.Tensor = output.logits[:, -1]
    return logits


def alone(base: BaseModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = base.model(input_ids=torch.tensor([ids])).logits[0, -1]
    return logits


def test_padding_is_on_the_left_and_positions_start_at_each_rows_first_token() -> None:
    padded = pad_prompts([[5, 6, 7], [8]], torch.device("cpu"))
    assert padded.input_ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert padded.mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert padded.position_ids.tolist() == [[0, 1, 2], [0, 0, 0]]


def test_rows_of_a_padded_batch_are_as_if_alone(base: BaseModel) -> None:
    cached = prefill(base, [list(prompt) for prompt in PROMPTS])
    logits = following(base, cached, [20, 21, 22])
    for row, (prompt, token) in enumerate(zip(PROMPTS, (20, 21, 22), strict=True)):
        torch.testing.assert_close(logits[row], alone(base, [*prompt, token]), atol=1e-5, rtol=0)


def test_a_longer_row_can_join_shorter_ones_and_the_other_way_round(base: BaseModel) -> None:
    long, short = prefill(base, [list(PROMPTS[0])]), prefill(base, [list(PROMPTS[1])])
    for first, second, prompts in (
        (long, short, (PROMPTS[0], PROMPTS[1])),
        (short, long, (PROMPTS[1], PROMPTS[0])),
    ):
        logits = following(base, first.joined(second), [30, 31])
        for row, prompt in enumerate(prompts):
            expected = alone(base, [*prompt, 30 + row])
            torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=0)


def test_rows_that_leave_take_their_columns_along(base: BaseModel) -> None:
    cached = prefill(base, [list(prompt) for prompt in PROMPTS]).kept([2, 1])
    assert cached.mask.tolist() == [[0, 1], [1, 1]]
    logits = following(base, cached, [40, 41])
    for row, prompt in enumerate((PROMPTS[2], PROMPTS[1])):
        expected = alone(base, [*prompt, 40 + row])
        torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=0)
