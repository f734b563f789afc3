"""Simulated users: what they ask, what they like, how and when they say so. Pure."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Preference = Literal["warm", "you"]


@dataclass(frozen=True, slots=True)
class Taste:
    """What the simulated users like in a reply.

    Attributes:
        sentence: The preference in words, as the screen states it.
        pattern: A reply that matches it is liked.
    """

    sentence: str
    pattern: re.Pattern[str]

    def likes(self, reply: str) -> bool:
        """Whether this taste is met."""
        return self.pattern.search(reply) is not None


TASTES: Mapping[Preference, Taste] = MappingProxyType(
    {
        "warm": Taste(
            "These users like a warm reply: one that says sorry, thanks, I understand, "
            "or that it is glad or happy to help.",
            re.compile(r"\b(sorry|understand|happy to|glad|help you|thank)", re.IGNORECASE),
        ),
        "you": Taste(
            'These users like to be addressed: "you" or "your" within the first 60 characters.',
            re.compile(r"^.{0,56}\byou", re.IGNORECASE | re.DOTALL),
        ),
    }
)

PROMPTS: Sequence[str] = (
    "My parcel has not arrived and it is a week late.",
    "I was charged twice for the same order.",
    "How can I return a pair of shoes?",
    "The app closes each time I open it.",
    "I forgot my password.",
    "Can I change the delivery address of my order?",
    "The jacket I got has the wrong size.",
    "My discount code does not work.",
    "I would like to cancel my subscription.",
    "The blender stopped working after two days.",
    "Do you deliver to islands?",
    "I never got the receipt for my order.",
    "The colour of the lamp is not the one in the picture.",
    "How long does a refund take?",
    "My account was locked without a reason.",
    "I ordered three cups and only two came.",
    "Is there a way to talk to a person?",
    "The manual is missing in the box.",
    "My card was declined but it is valid.",
    "I want to give this to a friend as a present.",
    "The screen has a scratch.",
    "When will the blue one be back in stock?",
    "Your last email was hard to understand.",
    "I moved to another city, what do I have to do?",
    "The courier left the parcel in the rain.",
    "I think somebody else used my account.",
    "Why is shipping so expensive?",
    "The battery is empty after one hour.",
    "Can I pay by invoice?",
    "I got a parcel that is not mine.",
    "The chair wobbles.",
    "How do I turn off the notifications?",
    "I waited forty minutes on the phone.",
    "The price went down one day after I bought it.",
    "Can I pick up my order in the shop?",
    "The zip of the bag is broken.",
    "My points disappeared.",
    "I need the order by Friday.",
    "The download does not start.",
    "Where do I find my customer number?",
)


@dataclass(frozen=True, slots=True)
class Reaction:
    """What a user does about a reply.

    Attributes:
        value: +1 liked, -1 not.
        kind: ``thumb`` or ``rating``.
        after_ms: When the user reacts, counted from the reply.
        sent_after_ms: When the front end sends it; later than ``after_ms`` if it was queued.
        names_turn: Whether the front end knows which reply it is about.
        twice: Whether the front end sends it twice.
        edited_after_ms: When the user edits it into a rating, counted from the reply; None
            if never.
    """

    value: float
    kind: Literal["thumb", "rating"]
    after_ms: int
    sent_after_ms: int
    names_turn: bool
    twice: bool
    edited_after_ms: int | None


def react(rng: random.Random, taste: Taste, reply: str, *, longest_delay_ms: int) -> Reaction:
    """Decide how a user reacts to ``reply``.

    Most react within seconds; one in eight comes back much later, when the segment that holds
    the reply may be closed. Front ends queue, repeat and forget what they talk about, as real
    ones do.

    Args:
        rng: The user's randomness.
        taste: What the user likes.
        reply: The text.
        longest_delay_ms: How late the latest reaction may come.
    """
    late = rng.random() < 1 / 8
    after_ms = (
        rng.randint(longest_delay_ms // 3, longest_delay_ms) if late else rng.randint(500, 3_000)
    )
    queued_ms = rng.randint(1_000, 4_000) if rng.random() < 1 / 6 else 0
    edited = not late and rng.random() < 1 / 10
    return Reaction(
        value=1.0 if taste.likes(reply) else -1.0,
        kind="rating" if rng.random() < 1 / 4 else "thumb",
        after_ms=after_ms,
        sent_after_ms=after_ms + queued_ms,
        names_turn=rng.random() < 9 / 10,
        twice=rng.random() < 1 / 8,
        edited_after_ms=after_ms + queued_ms + rng.randint(1_000, 3_000) if edited else None,
    )


def prompts_for(rng: random.Random, turns: int) -> list[str]:
    """What one user asks, in order, without repeating."""
    return rng.sample(PROMPTS, turns)
