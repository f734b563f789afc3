from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.ppo.losses import entropy, importance_weights, policy_loss, value_loss

RATIOS = torch.tensor([[0.5, 0.9, 1.1, 1.25, 1.5, 4.0]], dtype=torch.float64)
ALL = torch.ones_like(RATIOS, dtype=torch.bool)


def _losses(sign: float, logprobs: Tensor | None = None) -> Tensor:
    new = RATIOS.log() if logprobs is None else logprobs
    return policy_loss(
        new,
        torch.zeros_like(RATIOS),
        torch.full_like(RATIOS, sign),
        ALL,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=3.0,
    ).losses


@pytest.mark.parametrize(
    ("sign", "expected"),
    [
        (1.0, [-0.5, -0.9, -1.1, -1.25, -1.28, -1.28]),
        (-1.0, [0.8, 0.9, 1.1, 1.25, 1.5, 3.0]),
    ],
)
def test_clip_and_dual_clip_match_the_executed_oracle(sign: float, expected: list[float]) -> None:
    assert _losses(sign)[0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("sign", "flows"),
    [(1.0, [1, 1, 1, 1, 0, 0]), (-1.0, [0, 1, 1, 1, 1, 0])],
)
def test_no_gradient_where_a_bound_decides(sign: float, flows: list[int]) -> None:
    logprobs = RATIOS.log().requires_grad_()
    _losses(sign, logprobs).sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert (logprobs.grad[0] != 0).int().tolist() == flows


def test_the_ratio_of_equal_policies_is_exactly_one() -> None:
    logprobs = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, 5, dtype=torch.bool)
    loss = policy_loss(logprobs, logprobs, logprobs, mask, clip_low=0.2, clip_high=0.2)
    assert torch.equal(loss.ratio, torch.ones(3, 5))
    assert torch.equal(loss.losses, -logprobs)
    assert not loss.clipped.any()


def test_clipped_counts_both_sides_and_only_counting_tokens() -> None:
    mask = ALL.clone()
    mask[0, 5] = False
    loss = policy_loss(
        RATIOS.log(), torch.zeros_like(RATIOS), RATIOS, mask, clip_low=0.2, clip_high=0.28
    )
    assert loss.clipped[0].tolist() == [True, False, False, False, True, False]
    assert not loss.dual_clipped.any()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e4])
def test_masked_tokens_poison_neither_loss_nor_gradient(poison: float) -> None:
    logprobs = torch.tensor([[-1.0, poison]], requires_grad=True)
    other = torch.tensor([[-1.5, -poison]])
    mask = torch.tensor([[True, False]])
    loss = policy_loss(
        logprobs, other, other, mask, clip_low=0.2, clip_high=0.2, dual_clip=3.0, weights=other
    )
    loss.losses.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(loss.losses).all()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


@given(st.floats(-200, 0), st.floats(-200, 0), st.floats(-5, 5))
def test_extreme_ratios_stay_finite(new: float, old: float, advantage: float) -> None:
    one = torch.ones(1, 1, dtype=torch.bool)
    logprobs = torch.tensor([[new]], requires_grad=True)
    loss = policy_loss(
        logprobs,
        torch.tensor([[old]]),
        torch.tensor([[advantage]]),
        one,
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=3.0,
    )
    loss.losses.sum().backward()  # type: ignore[no-untyped-call]
    assert math.isfinite(float(loss.losses.detach()))
    assert logprobs.grad is not None
    assert math.isfinite(float(logprobs.grad))
    if advantage < 0:
        assert float(loss.losses.detach()) <= -advantage * 3.0 + 1e-5


def test_importance_weights_are_truncated_detached_and_one_where_unknown() -> None:
    old = torch.tensor([[math.log(0.5), math.log(0.9), -1.0, -1.0]], requires_grad=True)
    behaviour = torch.tensor([[math.log(0.25), math.log(0.1), math.nan, 0.0]])
    known = torch.tensor([[True, True, False, True]])
    weights = importance_weights(old, behaviour, known, cap=2.5)
    assert weights[0].tolist() == pytest.approx([2.0, 2.5, 1.0, math.exp(-1.0)], abs=1e-6)
    assert not weights.requires_grad


def test_weights_scale_the_loss_without_a_gradient_of_their_own() -> None:
    logprobs = torch.zeros_like(RATIOS, requires_grad=True)
    weights = torch.full_like(RATIOS, 0.5, requires_grad=True)
    loss = policy_loss(
        logprobs,
        torch.zeros_like(RATIOS),
        torch.ones_like(RATIOS),
        ALL,
        clip_low=0.2,
        clip_high=0.2,
        weights=weights,
    )
    loss.losses.sum().backward()  # type: ignore[no-untyped-call]
    assert loss.losses[0].tolist() == pytest.approx([-0.5] * 6)
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([-0.5] * 6)
    assert weights.grad is None


def test_value_clip_takes_the_larger_error() -> None:
    values = torch.tensor([[1.0, 2.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    # Moves of .5 and .1 from the old values, of which only the first is clipped, and the
    # clipped error is the smaller one: (1 + 4) / 4.
    far = value_loss(values, torch.tensor([[0.5, 1.9]]), torch.zeros(1, 2), mask, value_clip=0.2)
    assert float(far.losses.mean()) == pytest.approx(1.25, abs=1e-6)
    assert not far.clipped.any()
    # Both are clipped to .2; the clipped error is the larger one for the second alone.
    near = value_loss(values, torch.zeros(1, 2), torch.tensor([[0.5, 1.9]]), mask, value_clip=0.2)
    assert near.losses[0].tolist() == pytest.approx([0.125, 0.5 * 1.7**2], abs=1e-6)
    assert near.clipped[0].tolist() == [False, True]


def test_value_loss_without_clip_is_half_the_square() -> None:
    loss = value_loss(
        torch.tensor([[3.0, math.nan]]),
        torch.zeros(1, 2),
        torch.tensor([[1.0, 1.0]]),
        torch.tensor([[True, False]]),
        value_clip=None,
    )
    assert loss.losses[0].tolist() == [2.0, 0.0]


def test_no_value_gradient_where_the_clip_decides() -> None:
    values = torch.tensor([[1.0, 2.0]], requires_grad=True)
    loss = value_loss(
        values,
        torch.zeros(1, 2),
        torch.tensor([[0.5, 1.9]]),
        torch.ones(1, 2, dtype=torch.bool),
        value_clip=0.2,
    )
    loss.losses.sum().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    assert values.grad[0].tolist() == pytest.approx([0.5, 0.0])


def test_entropy_of_known_distributions() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, -math.inf, -math.inf, -math.inf]])
    logits.requires_grad_()
    got = entropy(logits)
    assert got.tolist() == pytest.approx([math.log(4), 0.0], abs=1e-6)
    got.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
