from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.ppo.masks import (
    Aggregation,
    aggregate,
    masked_fill,
    masked_mean,
    masked_sum,
    masked_var,
    whiten,
)

LOSSES = torch.tensor([[1.0, 2.0, 0.0], [3.0, 4.0, 5.0], [7.0, 0.0, 0.0]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)

rows = st.lists(st.tuples(st.floats(-50, 50, width=32), st.booleans()), min_size=3, max_size=12)


@pytest.mark.parametrize(
    ("how", "expected"),
    [("token_mean", 3.666667), ("sequence_sum", 7.333333), ("sequence_mean", 4.166667)],
)
def test_aggregation_matches_the_executed_oracle(how: Aggregation, expected: float) -> None:
    assert float(aggregate(LOSSES, MASK, how)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("how", "total"), [("token_mean", 6.0), ("sequence_sum", 3.0), ("sequence_mean", 3.0)]
)
def test_parts_divided_by_the_whole_add_up_to_it(how: Aggregation, total: float) -> None:
    parts = sum(
        float(aggregate(LOSSES[i : i + 1], MASK[i : i + 1], how, total=total)) for i in range(3)
    )
    assert parts == pytest.approx(float(aggregate(LOSSES, MASK, how)), abs=1e-6)


def test_whitening_uses_mean_and_bessel_variance_of_counting_positions() -> None:
    values, mask = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([False, True, True, False])
    assert float(masked_mean(values, mask)) == 2.5
    assert float(masked_var(values, mask)) == 0.5
    white = whiten(values, mask)
    assert white.tolist() == pytest.approx([0.0, -0.5 / math.sqrt(0.5), 0.5 / math.sqrt(0.5), 0.0])


def test_whitening_without_shift_keeps_the_mean_in_scale() -> None:
    values, mask = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([False, True, True, False])
    white = whiten(values, mask, shift_mean=False)
    assert float(masked_mean(white, mask)) == pytest.approx(2.5 / math.sqrt(0.5), abs=1e-5)


@given(rows)
def test_whitened_values_have_masked_mean_zero(row: list[tuple[float, bool]]) -> None:
    values = torch.tensor([value for value, _ in row], dtype=torch.float64)
    mask = torch.tensor([counts for _, counts in row])
    white = whiten(values, mask)
    assert float(masked_mean(white, mask)) == pytest.approx(0.0, abs=1e-6)
    assert float(white[~mask].abs().sum()) == 0.0


@given(rows, st.integers(0, 5))
def test_padding_changes_no_reduction(row: list[tuple[float, bool]], extra: int) -> None:
    values = torch.tensor([value for value, _ in row], dtype=torch.float64)
    mask = torch.tensor([counts for _, counts in row])
    padded = torch.cat([values, torch.full((extra,), math.nan, dtype=torch.float64)])
    padded_mask = torch.cat([mask, torch.zeros(extra, dtype=torch.bool)])
    for reduce in (masked_sum, masked_mean, masked_var):
        assert float(reduce(padded, padded_mask)) == pytest.approx(float(reduce(values, mask)))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_positions_poison_neither_value_nor_gradient(poison: float) -> None:
    values = torch.tensor([1.0, poison, 3.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    total = masked_sum(values, mask) + masked_mean(values, mask) + masked_var(values, mask)
    total = total + whiten(values, mask).sum() + aggregate(values[None], mask[None])
    total.backward()  # type: ignore[no-untyped-call]
    assert math.isfinite(total.item())
    assert values.grad is not None
    assert torch.isfinite(values.grad).all()
    assert float(values.grad[1]) == 0.0


def test_an_overflowing_masked_exponent_has_no_nan_gradient() -> None:
    values = torch.tensor([1.0, 1e4], requires_grad=True)
    mask = torch.tensor([True, False])
    masked_fill(values, mask).exp().sum().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([math.e, 0.0])


def test_nothing_counting_gives_zero() -> None:
    values, mask = torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2, dtype=torch.bool)
    assert float(masked_mean(values, mask)) == 0.0
    assert float(masked_var(values, mask)) == 0.0
    assert float(aggregate(values, mask, "token_mean")) == 0.0
    assert float(aggregate(values, mask, "sequence_mean")) == 0.0
