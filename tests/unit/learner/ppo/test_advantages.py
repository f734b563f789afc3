from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.ppo.advantages import gae
from learner.ppo.masks import whiten

REWARDS = torch.tensor([[0, 0, 0.1, 0.1, 0.1, 0, 0, 0.1, 1, 0, 0]], dtype=torch.float64)
LOSS_MASK = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0]], dtype=torch.bool)
EXACT = [-0.53465088, -1.575904, -2.8832, -4.56, -8.0]
"""By hand: 1 - 9; .1 + .9 * 9 - 7 + .72 * -8; and so on backwards."""
# The executed functions computed in float32, whose rounding has grown to 1.2e-6 in the end.
RAW = [-0.534652, -1.575905, -2.883201, -4.56, -8.0]
RETURNS = [3.465348, 3.424095, 3.116799, 2.44, 1.0]
WHITENED = [1.017078, 0.661231, 0.214464, -0.358579, -1.534194]

steps = st.lists(
    st.tuples(st.floats(-3, 3), st.floats(-3, 3), st.booleans()), min_size=1, max_size=14
)
shares = st.floats(0, 1)


def _values(unknown: float) -> Tensor:
    x = unknown
    return torch.tensor([[x, x, 4, 5, 6, x, x, 7, 9, 0, 0]], dtype=torch.float64)


def _tensors(row: list[tuple[float, float, bool]]) -> tuple[Tensor, Tensor, Tensor]:
    rewards = torch.tensor([[reward for reward, _, _ in row]], dtype=torch.float64)
    values = torch.tensor([[value for _, value, _ in row]], dtype=torch.float64)
    return rewards, values, torch.tensor([[counts for _, _, counts in row]])


def _naive(
    rewards: list[float], values: list[float], gamma: float, lam: float, bootstrap: float
) -> list[float]:
    """Equation 16 as a sum, for an uninterrupted run of tokens."""
    later = [*values[1:], bootstrap][: len(values)]
    deltas = [r + gamma * n - v for r, v, n in zip(rewards, values, later, strict=True)]
    return [
        sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


@pytest.mark.parametrize("unknown", [0.0, 3.0, -1e9, math.nan, math.inf])
def test_multi_turn_oracle_whatever_stands_on_masked_tokens(unknown: float) -> None:
    result = gae(REWARDS, _values(unknown), LOSS_MASK, gamma=0.9, gae_lambda=0.8)
    assert result.advantages[LOSS_MASK].tolist() == pytest.approx(EXACT, abs=1e-12)
    assert result.advantages[LOSS_MASK].tolist() == pytest.approx(RAW, abs=2e-6)
    assert result.returns[LOSS_MASK].tolist() == pytest.approx(RETURNS, abs=2e-6)
    white = whiten(result.advantages, LOSS_MASK)
    assert white[LOSS_MASK].tolist() == pytest.approx(WHITENED, abs=1e-6)
    assert float(result.advantages[~LOSS_MASK].abs().sum()) == 0.0


def test_single_turn_returns_oracle() -> None:
    row = torch.tensor([[0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    result = gae(row, row, torch.ones(1, 4, dtype=torch.bool), gamma=0.9, gae_lambda=0.95)
    assert result.returns[0].tolist() == pytest.approx([0.657923, 0.7695, 0.9, 1.0], abs=1e-6)


@given(steps, shares, shares, st.floats(-3, 3))
def test_equals_the_sum_over_counting_tokens_alone(
    row: list[tuple[float, float, bool]], gamma: float, lam: float, bootstrap: float
) -> None:
    rewards, values, mask = _tensors(row)
    after = torch.tensor([bootstrap], dtype=torch.float64)
    result = gae(rewards, values, mask, gamma=gamma, gae_lambda=lam, bootstrap=after)
    kept = [(reward, value) for reward, value, counts in row if counts]
    expected = _naive([r for r, _ in kept], [v for _, v in kept], gamma, lam, bootstrap)
    assert result.advantages[mask].tolist() == pytest.approx(expected, abs=1e-9)
    assert torch.allclose(result.returns, torch.where(mask, result.advantages + values, 0.0))


@given(steps, shares)
def test_lambda_zero_is_the_one_step_error(
    row: list[tuple[float, float, bool]], gamma: float
) -> None:
    rewards, values, mask = _tensors(row)
    result = gae(rewards, values, mask, gamma=gamma, gae_lambda=0.0)
    r, v = rewards[mask], values[mask]
    following = torch.cat([v[1:], torch.zeros(1, dtype=torch.float64)])[: len(v)]
    assert torch.allclose(result.advantages[mask], r + gamma * following - v)


@given(steps, shares)
def test_lambda_one_is_the_return_minus_the_value(
    row: list[tuple[float, float, bool]], gamma: float
) -> None:
    rewards, values, mask = _tensors(row)
    result = gae(rewards, values, mask, gamma=gamma, gae_lambda=1.0)
    running, returns = 0.0, []
    for reward in reversed(rewards[mask].tolist()):
        running = reward + gamma * running
        returns.append(running)
    assert result.returns[mask].tolist() == pytest.approx(returns[::-1], abs=1e-9)


@given(steps, st.integers(0, 14), st.integers(1, 4))
def test_masked_tokens_anywhere_change_nothing(
    row: list[tuple[float, float, bool]], where: int, extra: int
) -> None:
    where = min(where, len(row))
    longer = [*row[:where], *[(9.0, -9.0, False)] * extra, *row[where:]]
    short, long = _tensors(row), _tensors(longer)
    before = gae(*short, gamma=0.9, gae_lambda=0.8)
    after = gae(*long, gamma=0.9, gae_lambda=0.8)
    assert torch.equal(before.advantages[short[2]], after.advantages[long[2]])


def test_rows_of_a_batch_do_not_meet() -> None:
    rewards = torch.cat([REWARDS, REWARDS * 2])
    values = torch.cat([_values(0.0), _values(1.0)])
    mask = torch.cat([LOSS_MASK, torch.ones_like(LOSS_MASK)])
    batched = gae(rewards, values, mask, gamma=0.9, gae_lambda=0.8)
    for i in range(2):
        alone = gae(
            rewards[i : i + 1], values[i : i + 1], mask[i : i + 1], gamma=0.9, gae_lambda=0.8
        )
        assert torch.equal(batched.advantages[i], alone.advantages[0])
