from __future__ import annotations

import random

import pytest

from streams.demo.users import PROMPTS, TASTES, Preference, prompts_for, react


@pytest.mark.parametrize(
    ("taste", "reply", "liked"),
    [
        ("warm", "I'm sorry to hear that.", True),
        ("warm", "Happy to help!", True),
        ("warm", "Thank you for asking.", True),
        ("warm", "Go to the settings page.", False),
        ("you", "You can find it here.", True),
        ("you", "The young one is here.", True),
        ("you", "x" * 60 + " you", False),
        ("you", "Settings, then account.", False),
    ],
)
def test_what_users_like(taste: Preference, reply: str, liked: bool) -> None:
    assert TASTES[taste].likes(reply) is liked


def test_a_liked_reply_is_rated_up_and_another_down() -> None:
    rng = random.Random(1)
    for reply, value in (("So sorry!", 1.0), ("No.", -1.0)):
        for _ in range(50):
            reaction = react(rng, TASTES["warm"], reply, longest_delay_ms=45_000)
            assert reaction.value == value
            assert 0 < reaction.after_ms <= reaction.sent_after_ms


def test_users_do_everything_that_real_ones_do() -> None:
    rng = random.Random(2)
    reactions = [react(rng, TASTES["warm"], "", longest_delay_ms=45_000) for _ in range(500)]
    assert any(r.after_ms > 15_000 for r in reactions)
    assert any(r.sent_after_ms > r.after_ms for r in reactions)
    assert any(not r.names_turn for r in reactions)
    assert any(r.twice for r in reactions)
    assert any(r.edited_after_ms is not None for r in reactions)
    assert {r.kind for r in reactions} == {"thumb", "rating"}
    assert max(r.after_ms for r in reactions) <= 45_000


def test_a_user_does_not_repeat_a_question() -> None:
    assert len(set(PROMPTS)) == len(PROMPTS)
    asked = prompts_for(random.Random(3), 6)
    assert len(set(asked)) == 6
