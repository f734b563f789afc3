from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.ppo.objectives import (
    blend,
    charged,
    distillation,
    group_relative,
    on_tokens,
    verdicts,
)

TWO = torch.tensor([[True, True, False]])

turns = st.lists(
    st.tuples(st.sampled_from([-1.0, 0.0, 1.0]), st.integers(-1, 3)), min_size=1, max_size=20
)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_rewards_become_verdicts() -> None:
    assert verdicts(doubles(0.05, -1.2, 0.0, 1.0)).tolist() == [1.0, -1.0, 0.0, 1.0]


def test_group_relative_by_hand() -> None:
    # Three good, one bad: mean 1/2, variance 4 * (1/4, 1/4, 1/4, 9/4) / 4 / 3 = 1.
    got = group_relative(doubles(1, 1, -1, 0, 1), torch.zeros(5).long(), scale=True)
    assert got.tolist() == pytest.approx([0.5, 0.5, -1.5, 0.0, 0.5], abs=1e-7)
    centred = group_relative(doubles(1, -1, -1, 0), torch.zeros(4).long(), scale=False)
    assert centred.tolist() == pytest.approx([4 / 3, -2 / 3, -2 / 3, 0.0], abs=1e-12)


def test_groups_are_judged_apart() -> None:
    verdict, groups = doubles(1, 1, -1, -1, -1, 1), torch.tensor([3, 3, 3, -1, -1, 0])
    got = group_relative(verdict, groups, scale=False)
    # The second group was all bad, the third is one reply: neither says which is better.
    assert got.tolist() == pytest.approx([2 / 3, 2 / 3, -4 / 3, 0.0, 0.0, 0.0], abs=1e-12)
    scaled = group_relative(verdict, groups, scale=True)
    expected = [1 / math.sqrt(3), 1 / math.sqrt(3), -2 / math.sqrt(3), 0.0, 0.0, 0.0]
    assert scaled.tolist() == pytest.approx(expected, abs=1e-7)


@given(turns, st.booleans())
def test_the_advantages_of_a_group_sum_to_zero(rows: list[tuple[float, int]], scale: bool) -> None:
    verdict = doubles(*(verdict for verdict, _ in rows))
    groups = torch.tensor([group for _, group in rows])
    got = group_relative(verdict, groups, scale=scale)
    assert bool(torch.isfinite(got).all())
    assert not got[verdict == 0].any()
    for group in sorted(set(groups.tolist())):
        members = verdict[(groups == group) & (verdict != 0)]
        relative = got[(groups == group) & (verdict != 0)]
        assert float(relative.sum()) == pytest.approx(0.0, abs=1e-9)
        # Within a group good stands above bad.
        if len(set(members.tolist())) == 2:
            assert float(relative[members > 0].min()) > 0 > float(relative[members < 0].max())
        else:
            assert not relative.any()


@given(turns, st.lists(st.integers(0, 50), min_size=20, max_size=20))
def test_who_else_is_in_the_update_but_unjudged_changes_nothing(
    rows: list[tuple[float, int]], order: list[int]
) -> None:
    verdict = doubles(*(verdict for verdict, _ in rows))
    groups = torch.tensor([group for _, group in rows])
    alone = group_relative(verdict, groups, scale=True)
    padded = torch.cat([verdict, torch.zeros(4, dtype=torch.float64)])
    among = group_relative(padded, torch.cat([groups, torch.tensor(order[:4])]), scale=True)
    # The order in which torch adds depends on how many there are: the last digit may differ.
    torch.testing.assert_close(among[: len(alone)], alone, rtol=1e-12, atol=1e-12)
    assert not among[len(alone) :].any()


def test_a_turns_advantage_stands_on_each_of_its_tokens() -> None:
    index = torch.tensor([[0, 0, 1], [2, 99, 99]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    got = on_tokens(doubles(1.5, -2.0, 0.25), index, mask)
    assert got.tolist() == [[1.5, 1.5, -2.0], [0.25, 0.0, 0.0]]


def test_distillation_by_hand() -> None:
    teacher = torch.tensor([[-1.0, -9.0, -0.5, math.nan]], dtype=torch.float64)
    old = torch.tensor([[-3.0, -1.0, -0.75, -1.0]], dtype=torch.float64)
    taught = torch.tensor([[True, True, True, False]])
    got = distillation(teacher, old, taught, bound=5.0)
    assert got[0].tolist() == pytest.approx([2.0, -5.0, 0.25, 0.0], abs=1e-12)


@given(st.lists(st.floats(-50, 0), min_size=1, max_size=9), st.floats(0.1, 10))
def test_a_teacher_that_thinks_as_the_policy_teaches_nothing(
    logprobs: list[float], bound: float
) -> None:
    row = torch.tensor([logprobs])
    got = distillation(row, row.clone(), torch.ones_like(row).bool(), bound=bound)
    assert torch.equal(got, torch.zeros_like(row))


def test_the_penalty_is_charged_where_it_arises() -> None:
    advantages = torch.tensor([[1.0, -1.0, math.nan]], dtype=torch.float64)
    kl = torch.tensor([[0.5, -0.25, math.inf]], dtype=torch.float64)
    got = charged(advantages, kl, TWO, kl_coef=0.2)
    assert got[0].tolist() == pytest.approx([0.9, -0.95, 0.0], abs=1e-12)


def test_a_blend_is_the_weighted_sum() -> None:
    parts = [(0.5, doubles(1, -2)), (2.0, doubles(3, 0.5)), (1.0, doubles(-1, 1))]
    assert blend(parts).tolist() == pytest.approx([5.5, 1.0], abs=1e-12)


@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=9), st.integers(0, 2))
def test_one_part_of_weight_one_is_that_part_bit_for_bit(row: list[float], place: int) -> None:
    pure = torch.tensor(row)
    parts = [(0.0, torch.full_like(pure, math.nan))] * 3
    parts[place] = (1.0, pure)
    assert torch.equal(blend(parts), pure)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_tokens_poison_nothing(poison: float) -> None:
    row = torch.tensor([[0.5, -0.5, poison]])
    assert bool(torch.isfinite(charged(row, row, TWO, kl_coef=0.1)).all())
    assert bool(torch.isfinite(distillation(row, row, TWO, bound=1.0)).all())
