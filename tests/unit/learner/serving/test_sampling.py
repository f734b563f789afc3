from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from learner.serving.sampling import SamplingParameters, distribution, draw, nucleus

PROBABILITIES = torch.tensor([0.1, 0.5, 0.15, 0.25])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([0.0, math.log(3.0)])
    assert distribution(logits, 1.0).exp().tolist() == pytest.approx([0.25, 0.75])
    assert distribution(logits, 0.5).exp().tolist() == pytest.approx([0.1, 0.9])


def test_temperature_zero_takes_the_most_likely_and_reports_temperature_one() -> None:
    drawn = draw(PROBABILITIES.log(), SamplingParameters(temperature=0.0), generator(0))
    assert drawn.token_id == 1
    assert drawn.logprob == pytest.approx(math.log(0.5))


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.4, [1]), (0.5, [1]), (0.51, [1, 3]), (0.75, [1, 3]), (0.9, [1, 2, 3]), (1e-9, [1])],
)
def test_nucleus_keeps_the_smallest_set_with_the_mass(top_p: float, kept: list[int]) -> None:
    left = nucleus(PROBABILITIES, top_p)
    assert left.nonzero().flatten().tolist() == kept
    assert left[kept].tolist() == PROBABILITIES[kept].tolist()


def test_draws_follow_the_distribution() -> None:
    source, counts = generator(1), [0] * 4
    for _ in range(4_000):
        counts[draw(PROBABILITIES.log(), SamplingParameters(), source).token_id] += 1
    assert [count / 4_000 for count in counts] == pytest.approx(PROBABILITIES.tolist(), abs=0.03)


def test_top_p_cuts_the_draw_but_not_the_reported_logprob() -> None:
    parameters = SamplingParameters(top_p=0.6)
    source = generator(2)
    drawn = [draw(PROBABILITIES.log(), parameters, source) for _ in range(200)]
    assert {item.token_id for item in drawn} == {1, 3}
    for item in drawn:
        assert item.logprob == pytest.approx(math.log(PROBABILITIES[item.token_id]), abs=1e-6)


def test_the_same_seed_draws_the_same_tokens() -> None:
    def run(seed: int) -> list[int]:
        source = generator(seed)
        return [draw(PROBABILITIES.log(), SamplingParameters(), source).token_id for _ in range(50)]

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_half_precision_logits_are_normalised_in_single_precision() -> None:
    logits = torch.linspace(-8, 8, 50_000).to(torch.bfloat16)
    total = distribution(logits, 0.7).exp().sum()
    assert float(total) == pytest.approx(1.0, abs=1e-4)


def test_top_logprobs_are_the_most_likely_tokens_in_order() -> None:
    parameters = replace(SamplingParameters(), top_logprobs=3)
    drawn = draw(PROBABILITIES.log(), parameters, generator(0))
    assert [token for token, _ in drawn.top] == [1, 3, 2]
    assert [math.exp(logprob) for _, logprob in drawn.top] == pytest.approx([0.5, 0.25, 0.15])
