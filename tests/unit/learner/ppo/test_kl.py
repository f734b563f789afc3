from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.ppo.kl import KlEstimator, estimate_kl, k1, k2, k3, penalised_rewards

LOGPROBS = torch.tensor([0.5, 0.7, 0.9], dtype=torch.float64)
REFERENCE = torch.tensor([0.4, 0.5, 0.6], dtype=torch.float64)
logprobs = st.floats(-80, 0)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [0.1, 0.2, 0.3]),
        ("k2", [0.005, 0.02, 0.045]),
        ("k3", [0.004837, 0.018731, 0.040818]),
    ],
)
def test_estimators_match_the_executed_oracle(
    estimator: KlEstimator, expected: list[float]
) -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    got = estimate_kl(LOGPROBS[None], REFERENCE[None], mask, estimator)
    assert got[0].tolist() == pytest.approx(expected, abs=1e-6)


@given(logprobs, logprobs)
def test_k2_and_k3_are_never_negative_and_finite(policy: float, reference: float) -> None:
    p, q = torch.tensor(policy), torch.tensor(reference)
    assert float(k2(p, q)) >= 0.0
    assert float(k3(p, q)) >= 0.0
    assert math.isfinite(float(k3(p, q)))


def test_k1_and_k3_estimate_the_exact_divergence() -> None:
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    q = torch.tensor([0.25, 0.25, 0.25, 0.25], dtype=torch.float64)
    exact = float((p * (p.log() - q.log())).sum())
    # The expectation over p of an unbiased estimator is the divergence itself.
    for estimator in (k1, k3):
        assert float((p * estimator(p.log(), q.log())).sum()) == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("poison", [math.nan, -math.inf])
def test_masked_tokens_poison_nothing(estimator: KlEstimator, poison: float) -> None:
    policy = torch.tensor([[-1.0, poison]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    kl = estimate_kl(policy, torch.tensor([[-2.0, poison]]), mask, estimator)
    kl.sum().backward()  # type: ignore[no-untyped-call]
    assert policy.grad is not None
    assert torch.isfinite(policy.grad).all()
    assert float(kl[0, 1].detach()) == 0.0


def test_the_penalty_is_taken_off_every_counting_token() -> None:
    rewards = torch.tensor([[0.0, 1.0, 5.0]])
    kl = torch.tensor([[0.5, -0.5, 7.0]])
    mask = torch.tensor([[True, True, False]])
    assert penalised_rewards(rewards, kl, mask, kl_coef=0.2)[0].tolist() == pytest.approx(
        [-0.1, 1.1, 0.0]
    )
