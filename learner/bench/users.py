"""Simulated users of the learning bench: what they ask, what they say about replies. Pure.

A *condition* is what happens to the users' honest opinions on their way to the learner. The
reward that is reported is always the honest one: it says what the policy has become.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from streams.demo.users import PROMPTS

Condition = Literal["clean", "flipped20", "sparse", "late", "shuffled"]

FLIPPED_SHARE = 0.2
SPARSE_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Opinion:
    """What a user says about a reply.

    Attributes:
        value: +1 or -1.
        late: Whether it comes only once the segment with the reply is closed, and the policy
            has been updated without it.
    """

    value: float
    late: bool = False


def honest_reward(liked: Sequence[bool]) -> float:
    """The mean of +1 for each reply that was liked and -1 for each that was not."""
    return sum(1.0 if like else -1.0 for like in liked) / len(liked)


def opinions(
    condition: Condition, liked: Sequence[bool], rng: random.Random
) -> list[Opinion | None]:
    """What the users say about each reply; None says nothing.

    * ``clean``: each says what it thinks.
    * ``flipped20``: one in five says the opposite.
    * ``sparse``: one in five says anything.
    * ``late``: each says what it thinks, but late.
    * ``shuffled``: what they think, dealt to the replies at random: nothing to learn.

    Args:
        condition: Which of these.
        liked: Which replies met the users' taste.
        rng: The condition's randomness; draws the same numbers whatever was liked.
    """
    values = [1.0 if like else -1.0 for like in liked]
    if condition == "flipped20":
        return [Opinion(-v if rng.random() < FLIPPED_SHARE else v) for v in values]
    if condition == "sparse":
        return [Opinion(v) if rng.random() < SPARSE_SHARE else None for v in values]
    if condition == "shuffled":
        rng.shuffle(values)
    return [Opinion(v, late=condition == "late") for v in values]


def prompts_of(seed: int, update: int, count: int) -> list[str]:
    """What is asked before an update: the same for every subject with this seed."""
    rng = random.Random(f"prompts/{seed}/{update}")
    whole, rest = divmod(count, len(PROMPTS))
    return [*PROMPTS] * whole + rng.sample(PROMPTS, rest)


__all__ = [
    "FLIPPED_SHARE",
    "SPARSE_SHARE",
    "Condition",
    "Opinion",
    "honest_reward",
    "opinions",
    "prompts_of",
]
