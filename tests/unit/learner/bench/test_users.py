from __future__ import annotations

import random

import pytest

from learner.bench.users import Opinion, honest_reward, opinions, prompts_of
from streams.demo.users import PROMPTS

LIKED = [index % 3 == 0 for index in range(300)]
HONEST = [1.0 if like else -1.0 for like in LIKED]


def said(condition: str, seed: int = 1) -> list[Opinion | None]:
    return opinions(condition, LIKED, random.Random(seed))  # type: ignore[arg-type]


def values(condition: str) -> list[float]:
    return [opinion.value for opinion in said(condition) if opinion is not None]


def test_the_honest_reward_is_the_mean_of_likes_and_dislikes() -> None:
    assert honest_reward([True, True, True, False]) == 0.5
    assert honest_reward([False]) == -1.0


def test_clean_opinions_are_honest_and_prompt() -> None:
    assert said("clean") == [Opinion(value) for value in HONEST]


def test_late_opinions_are_honest() -> None:
    assert said("late") == [Opinion(value, late=True) for value in HONEST]


def test_one_in_five_opinions_is_flipped() -> None:
    flipped = sum(a != b for a, b in zip(values("flipped20"), HONEST, strict=True))
    assert 40 <= flipped <= 80


def test_one_in_five_replies_is_judged_honestly() -> None:
    pairs = [(o, v) for o, v in zip(said("sparse"), HONEST, strict=True) if o is not None]
    assert 40 <= len(pairs) <= 80
    assert all(opinion.value == value for opinion, value in pairs)


def test_shuffled_opinions_are_as_many_of_each_kind_but_of_other_replies() -> None:
    shuffled = values("shuffled")
    assert sorted(shuffled) == sorted(HONEST)
    agreeing = sum(a == b for a, b in zip(shuffled, HONEST, strict=True))
    # By chance 5 in 9 agree.
    assert 130 <= agreeing <= 200


@pytest.mark.parametrize("condition", ["flipped20", "sparse", "shuffled"])
def test_the_same_seed_says_the_same(condition: str) -> None:
    assert said(condition, 3) == said(condition, 3)
    assert said(condition, 3) != said(condition, 4)


def test_prompts_depend_on_seed_and_update_alone_and_do_not_repeat() -> None:
    asked = prompts_of(1, 0, 32)
    assert asked == prompts_of(1, 0, 32)
    assert len(set(asked)) == 32
    assert asked != prompts_of(2, 0, 32)
    assert asked != prompts_of(1, 1, 32)


def test_more_prompts_than_there_are_repeat_each_equally_often() -> None:
    asked = prompts_of(1, 0, 2 * len(PROMPTS) + 3)
    assert {asked.count(prompt) for prompt in PROMPTS} == {2, 3}
