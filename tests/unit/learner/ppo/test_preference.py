from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.ppo.preference import preference_loss, reply_nll


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_preference_loss_by_hand() -> None:
    # Margins (-1 - -4) - (-2 - -3) = 2 and (-5 - -1) - 0 = -4, times .5.
    got = preference_loss(double(-1, -5), double(-4, -1), double(-2, -1), double(-3, -1), beta=0.5)
    assert got.tolist() == pytest.approx(
        [math.log1p(math.exp(-1)), math.log1p(math.exp(2))], abs=1e-12
    )


@given(st.floats(-500, 0), st.floats(-500, 0), st.floats(0.01, 2))
def test_where_policy_and_reference_agree_it_is_log_two(
    chosen: float, rejected: float, beta: float
) -> None:
    c, r = double(chosen), double(rejected)
    assert float(preference_loss(c, r, c, r, beta=beta)) == pytest.approx(math.log(2), abs=1e-9)


@given(st.floats(-2_000, 0), st.floats(-2_000, 0))
def test_it_falls_with_the_margin_and_stays_finite(chosen: float, rejected: float) -> None:
    c, r, zero = double(chosen).requires_grad_(), double(rejected).requires_grad_(), double(0)
    loss = preference_loss(c, r, zero, zero, beta=1.0)
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert c.grad is not None
    assert r.grad is not None
    assert -1.0 <= float(c.grad) <= 0.0 <= float(r.grad) <= 1.0
    assert float(c.grad) == -float(r.grad)
    assert math.isfinite(float(loss.detach()))


def test_reply_nll_counts_its_own_tokens_alone() -> None:
    logprobs = torch.tensor([[-1.0, -3.0, math.nan], [-2.0, math.inf, -math.inf], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    logprobs.requires_grad_()
    got = reply_nll(logprobs, mask)
    assert got.tolist() == pytest.approx([2.0, 2.0, 0.0], abs=1e-7)
    got.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-0.5, -0.5, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
