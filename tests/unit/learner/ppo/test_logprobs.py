from __future__ import annotations

import pytest
import torch
from torch import Tensor

from learner.ppo.logprobs import linear_logprobs
from learner.ppo.losses import entropy

WIDTH, VOCABULARY, TOKENS = 6, 17, 11


def _inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, WIDTH, generator=draw)
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw)
    bias = torch.randn(VOCABULARY, generator=draw)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=draw)
    temperatures = 0.5 + torch.rand(TOKENS, generator=draw)
    return hidden, weight, bias, targets, temperatures


@pytest.mark.parametrize("chunk_tokens", [1, 4, 11, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_equal_plain_autograd(chunk_tokens: int, with_bias: bool) -> None:
    hidden, weight, bias, targets, temperatures = _inputs()
    ours, plain = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    used_bias = bias if with_bias else None
    scores = linear_logprobs(
        ours, weight, targets, temperatures, bias=used_bias, chunk_tokens=chunk_tokens
    )
    logits = plain @ weight.T + (bias if with_bias else 0.0)
    scaled = logits / temperatures[:, None]
    logprobs = torch.log_softmax(scaled, dim=1).gather(1, targets[:, None])[:, 0]
    entropies = entropy(scaled)
    torch.testing.assert_close(scores.logprobs, logprobs, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(scores.entropies, entropies, atol=1e-6, rtol=1e-5)

    slopes = torch.linspace(-1, 2, TOKENS)
    (scores.logprobs * slopes + scores.entropies * slopes.flip(0)).sum().backward()  # type: ignore[no-untyped-call]
    (logprobs * slopes + entropies * slopes.flip(0)).sum().backward()  # type: ignore[no-untyped-call]
    assert ours.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(ours.grad, plain.grad, atol=2e-6, rtol=1e-5)


def test_without_a_gradient_of_the_entropy_the_rest_is_the_same() -> None:
    hidden, weight, bias, targets, temperatures = _inputs()
    ours, whole = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    scores = linear_logprobs(
        ours, weight, targets, temperatures, bias=bias, chunk_tokens=4, entropy_gradient=False
    )
    expected = linear_logprobs(whole, weight, targets, temperatures, bias=bias, chunk_tokens=4)
    assert torch.equal(scores.logprobs, expected.logprobs)
    assert torch.equal(scores.entropies, expected.entropies)
    assert not scores.entropies.requires_grad
    scores.logprobs.sum().backward()  # type: ignore[no-untyped-call]
    expected.logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert ours.grad is not None
    assert whole.grad is not None
    assert torch.equal(ours.grad, whole.grad)


def test_half_precision_states_are_scored_in_float32() -> None:
    hidden, weight, _, targets, temperatures = _inputs()
    half = hidden.bfloat16().requires_grad_()
    scores = linear_logprobs(half, weight.bfloat16(), targets, temperatures)
    assert scores.logprobs.dtype == torch.float32
    exact = linear_logprobs(half.detach().float(), weight.bfloat16().float(), targets, temperatures)
    assert torch.equal(scores.logprobs, exact.logprobs)
    scores.logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16


def test_no_tokens_are_no_problem() -> None:
    _, weight, _, _, _ = _inputs()
    scores = linear_logprobs(
        torch.zeros(0, WIDTH, requires_grad=True),
        weight,
        torch.zeros(0, dtype=torch.long),
        torch.ones(0),
    )
    assert scores.logprobs.shape == (0,)
