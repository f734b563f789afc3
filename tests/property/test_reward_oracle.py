"""The reward machine against a slow reading of its rules, over random logs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from processors.reward.codec import decode_entry, decode_key, encode_entry, encode_key
from processors.reward.machine import (
    EmitReview,
    EmitScored,
    RewardState,
    restore,
    step,
    take_changes,
)
from streams.settings import RewardSettings
from tests.oracle.reward import Asked, Oracle
from tests.property.test_reward import ALONE, Plan, log_of, plan

WIDE: RewardSettings = ALONE.model_copy(
    update={"history_ratings": 1_000, "history_segments": 1_000, "history_ms": 10**12}
)
"""Small bounds for the filters, and a history that holds all there is."""


@settings(max_examples=300)
@given(plans=st.lists(plan, max_size=30), stops=st.sets(st.integers(0, 29)))
def test_the_machine_does_what_the_rules_say_restarted_or_not(
    plans: list[Plan], stops: set[int]
) -> None:
    oracle, state = Oracle(WIDE), RewardState()
    written: dict[bytes, bytes] = {}
    for number, segment in enumerate(log_of(plans)):
        accepted = oracle.accepts(segment)
        state, effects = step(state, segment, WIDE)
        assert bool(effects) is accepted
        if not accepted:
            continue
        (scored,) = [effect.scored for effect in effects if isinstance(effect, EmitScored)]
        reviews = [effect.review for effect in effects if isinstance(effect, EmitReview)]
        weights, asked = oracle.apply(segment)
        found = {w.event_id: (w.weight, w.filter) for r in scored.rewards for w in r.weighed}
        assert found == weights
        assert [Asked(r.segment_id, r.turn_id, r.feedback_event_ids) for r in reviews] == asked
        for request, wanted in zip(reviews, asked, strict=True):
            oracle.asked_as(segment, wanted, request.event_id)
        changed, forgotten = take_changes(state)
        written |= {encode_key(key): encode_entry(entry) for key, entry in changed.items()}
        for key in forgotten:
            written.pop(encode_key(key), None)
        if number in stops:
            state = restore((decode_key(k), decode_entry(v)) for k, v in written.items())
