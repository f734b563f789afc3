from __future__ import annotations

import pytest
import torch

from learner.ppo.diagnostics import METRICS, effective_sample_size, explained_variance

MASK = torch.tensor([[True, True, True, False]])


def test_explained_variance_of_perfect_constant_and_opposed_values() -> None:
    returns = torch.tensor([[1.0, 2.0, 3.0, 99.0]])
    assert explained_variance(returns, returns, MASK) == pytest.approx(1.0)
    assert explained_variance(torch.full_like(returns, 7.0), returns, MASK) == pytest.approx(0.0)
    assert explained_variance(-returns, returns, MASK) == pytest.approx(-3.0)


def test_explained_variance_is_unknown_when_returns_are_equal() -> None:
    assert explained_variance(torch.zeros(1, 4), torch.ones(1, 4), MASK) is None


def test_effective_sample_size() -> None:
    assert effective_sample_size(torch.ones(1, 4), MASK) == pytest.approx(1.0)
    uneven = torch.tensor([[1.0, 0.0, 0.0, 5.0]])
    assert effective_sample_size(uneven, MASK) == pytest.approx(1 / 3)
    assert effective_sample_size(torch.zeros(1, 4), MASK) == 1.0


def test_every_metric_is_explained_in_a_sentence() -> None:
    for name, meaning in METRICS.items():
        assert "/" in name
        assert meaning.endswith("."), name
