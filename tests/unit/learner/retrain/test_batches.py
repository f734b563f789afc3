from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.retrain.batches import Limits, Usable, cut, seed_of
from streams.errors import LearnerError


def usable(count: int, sessions: int = 1_000) -> list[Usable]:
    return [
        Usable(segment_id=f"s{n}", revision=0, session_id=f"session-{n % sessions}")
        for n in range(count)
    ]


def limits(batch: int = 8, segment: int = 8, session: int = 8) -> Limits:
    return Limits(
        batch_segments=batch, max_updates_per_segment=segment, max_updates_per_session=session
    )


@given(count=st.integers(1, 60), batch=st.integers(1, 20), seed=st.integers(0, 2**63 - 1))
def test_a_pass_uses_each_segment_once_in_even_batches(count: int, batch: int, seed: int) -> None:
    found = cut(usable(count), limits(batch), updates=None, seed=seed)
    assert Counter(name for one in found for name in one) == Counter(
        one.segment_id for one in usable(count)
    )
    sizes = [len(one) for one in found]
    assert max(sizes) <= batch
    assert max(sizes) - min(sizes) <= 1
    assert found == cut(usable(count), limits(batch), updates=None, seed=seed)


def test_more_updates_are_more_passes_in_another_order() -> None:
    found = cut(usable(20), limits(10), updates=4, seed=1)
    assert [len(one) for one in found] == [10, 10, 10, 10]
    assert {*found[0], *found[1]} == {*found[2], *found[3]}
    assert found[:2] != found[2:]
    assert cut(usable(20), limits(10), updates=1, seed=1) == found[:1]


def test_no_segment_is_used_too_often() -> None:
    assert len(cut(usable(20), limits(10, segment=3), updates=6, seed=1)) == 6
    with pytest.raises(LearnerError, match="ask for at most 6"):
        cut(usable(20), limits(10, segment=3), updates=7, seed=1)


def test_a_session_is_used_in_so_many_updates_only() -> None:
    everything = [*usable(30, sessions=1), *usable(60)[30:]]
    found = cut(everything, limits(10, session=2), updates=None, seed=5)
    ours = {one.segment_id: one.session_id for one in everything}
    with_it = [one for one in found if any(ours[name] == "session-0" for name in one)]
    assert len(with_it) == 2
    assert {name for one in found for name in one} > {f"s{n}" for n in range(30, 60)}


def test_the_seed_depends_on_what_is_trained_on_alone() -> None:
    def seed(segments: list[Usable], base: int = 0, of: int = 0, policy: str = "p") -> int:
        return seed_of(segments, policy=policy, base_version=base, seed=of)

    some = usable(5)
    assert seed(some) == seed(some[::-1])
    newer = [Usable(segment_id="s0", revision=1, session_id="session-0"), *some[1:]]
    others = {seed(some[:4]), seed(newer), seed(some, 1), seed(some, 0, 1), seed(some, policy="q")}
    assert len(others | {seed(some)}) == 6
    assert all(0 <= one < 2**63 for one in others)
