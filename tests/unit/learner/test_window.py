from __future__ import annotations

import gc
import random
import tracemalloc
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from learner.window import Arrival, Candidate, Snapshot, Window, sample, segment_tokens
from streams.contracts import Message, Role, ScoredSegment, SourceRef, StepReward
from tests.unit.learner.fakes import add, at, packed, scored

MAX_SEGMENTS, MAX_TOKENS, MAX_USES, MAX_SESSION_USES = 4, 40, 2, 3


def window(**changes: int) -> Window:
    limits = {"max_segments": MAX_SEGMENTS, "max_tokens": MAX_TOKENS, "max_uses": MAX_USES}
    limits |= changes
    return Window(
        max_segments=limits["max_segments"],
        max_tokens=limits["max_tokens"],
        max_uses=limits["max_uses"],
        max_session_uses=limits.get("max_session_uses"),
    )


def ids(snapshot: Snapshot) -> list[str]:
    return [c.segment_id for c in snapshot.candidates]


@dataclass
class Naive:
    """The window's rules, told again over plain lists, oldest first."""

    held: list[tuple[SourceRef, ScoredSegment]] = field(default_factory=list)
    marks: list[tuple[SourceRef, ScoredSegment]] = field(default_factory=list)
    unsealed: set[SourceRef] = field(default_factory=set)
    uses: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    added: list[SourceRef] = field(default_factory=list)
    min_version: int = 0

    def usable(self) -> list[tuple[SourceRef, ScoredSegment]]:
        return [(ref, new) for ref, new in self.held if self._usable(new)]

    def _usable(self, new: ScoredSegment) -> bool:
        (version,) = {step.policy_version for step in new.segment.steps}
        fresh = version is None or version >= self.min_version
        rested = len(self.uses[new.segment.segment_id]) < MAX_USES
        session = new.segment.session_id
        of_session = [s.segment.segment_id for _, s in self.held if s.segment.session_id == session]
        used = set().union(*(self.uses[segment_id] for segment_id in of_session))
        return fresh and rested and len(used) < MAX_SESSION_USES

    def add(self, ref: SourceRef, new: ScoredSegment) -> None:
        segment = new.segment
        same = [s for _, s in self.held + self.marks if s.segment.segment_id == segment.segment_id]
        if any(s.segment.revision >= segment.revision for s in same):
            return
        held_before = self.held
        self.held = [h for h in self.held if h[1] not in same]
        self.marks = [m for m in self.marks if m[1] not in same]
        self.added.append(ref)
        if new.trainable:
            before = [(r, s) for r, s in held_before if s in same]
            if not before or before[0][0] in self.unsealed or _earned(before[0][1]) != _earned(new):
                self.unsealed.add(ref)
            self.held.append((ref, new))
        else:
            self.marks.append((ref, new))
        self.held = self.held[-MAX_SEGMENTS:]
        self.marks = self.marks[-MAX_SEGMENTS:]
        while len(self.held) > 1 and sum(segment_tokens(s) for _, s in self.held) > MAX_TOKENS:
            self.held.pop(0)
        here = {s.segment.segment_id for _, s in self.held}
        for gone in self.uses.keys() - here:
            del self.uses[gone]

    def stale_share(self) -> float:
        tokens = [(segment_tokens(s), s.segment.steps[0].policy_version) for _, s in self.held]
        old = sum(n for n, version in tokens if version is not None and version < self.min_version)
        return old / max(sum(n for n, _ in tokens), 1)

    def refs(self) -> list[SourceRef]:
        here = {ref for ref, _ in self.held + self.marks}
        return [ref for ref in self.added if ref in here]


def _earned(scored_segment: ScoredSegment) -> list[float]:
    return [reward.reward for reward in scored_segment.rewards]


ARRIVALS = st.tuples(
    st.just("add"),
    st.integers(0, 6),
    st.integers(0, 3),
    st.booleans(),
    st.integers(0, 30),
    st.none() | st.integers(0, 3),
    st.sampled_from([1.0, -1.0]),
)
VERSIONS = st.tuples(st.just("require"), st.integers(0, 3))
OPERATIONS = st.lists(
    st.one_of(ARRIVALS, ARRIVALS, VERSIONS, st.just(("seal",)), st.just(("use",))), max_size=40
)


@given(OPERATIONS)
def test_behaves_as_the_naive_model(operations: list[tuple[object, ...]]) -> None:
    real, naive = window(max_session_uses=MAX_SESSION_USES), Naive()
    for offset, operation in enumerate(operations):
        match operation:
            case ("add", *_):
                arrival = _arrival(operation)
                add(real, at(offset), arrival)
                naive.add(at(offset), arrival)
            case ("seal",):
                snapshot = real.seal()
                assert snapshot.new_segments == _news(naive)
                assert [(c.ref, c.open().scored) for c in snapshot.candidates] == naive.usable()
                assert list(snapshot.refs) == naive.refs()
                assert snapshot.stale_share == pytest.approx(naive.stale_share())
                naive.unsealed.clear()
            case ("require", int(version)):
                real.require_version(version)
                naive.min_version = version
            case _:
                used = real.segment_ids()[:2]
                real.record_use(used, offset)
                for segment_id in used:
                    naive.uses[segment_id].add(offset)
        assert len(real) == len(naive.held)
        assert real.tokens == sum(segment_tokens(s) for _, s in naive.held)
        assert real.new_segments == _news(naive)
        assert real.available_segments == len(naive.usable())


def _news(naive: Naive) -> int:
    return sum(ref in naive.unsealed for ref, _ in naive.usable())


def _arrival(operation: Any) -> ScoredSegment:
    _, number, revision, trainable, tokens, version, reward = operation
    return scored(
        f"s{number}",
        revision=revision,
        trainable=trainable,
        tokens=tokens,
        policy_version=version,
        reward=reward,
        session=f"session-{number % 3}",
    )


@given(OPERATIONS)
def test_is_rebuilt_from_the_records_it_names(operations: list[tuple[object, ...]]) -> None:
    real, log = window(), {}
    for offset, operation in enumerate(operations):
        if operation[0] != "add":
            continue
        log[at(offset)] = _arrival(operation)
        add(real, at(offset), log[at(offset)])
    before = real.seal()
    rebuilt = window()
    for ref in before.refs:
        add(rebuilt, ref, log[ref])
    after = rebuilt.seal()
    assert after.candidates == before.candidates
    assert after.refs == before.refs


def test_a_revision_that_arrives_before_an_update_replaces_its_predecessor() -> None:
    held = window()
    add(held, at(0), scored("a"))
    add(held, at(1), scored("b"))
    assert add(held, at(2), scored("a", revision=1)) is Arrival.REPLACED
    assert held.new_segments == 2
    assert ids(held.seal()) == ["b", "a"]


@pytest.mark.parametrize(("reward", "news"), [(1.0, 0), (-1.0, 1), (0.5, 1)])
def test_a_later_revision_is_news_if_its_rewards_changed(reward: float, news: int) -> None:
    held = window()
    add(held, at(0), scored("a"))
    add(held, at(1), scored("b"))
    held.seal()
    held.record_use(["a"], 1)
    assert add(held, at(2), scored("a", revision=1, reward=reward)) is Arrival.REPLACED
    assert held.new_segments == news
    snapshot = held.seal()
    assert ids(snapshot) == ["b", "a"]
    assert snapshot.new_segments == news
    assert snapshot.candidates[1].revision == 1


def test_a_revision_with_another_directive_is_news() -> None:
    held = window()
    add(held, at(0), scored("a"))
    held.seal()
    revised = scored("a", revision=1)
    (reward,) = revised.rewards
    add(held, at(1), replace(revised, rewards=(replace(reward, directives=("shorter",)),)))
    assert held.new_segments == 1


def test_a_revision_that_only_adds_a_silent_reply_is_no_news() -> None:
    held = window()
    first = replace(scored("a"), rewards=())
    add(held, at(0), first)
    held.seal()
    add(held, at(1), scored("a", revision=1, reward=0.0))
    assert held.new_segments == 0
    two = scored("a", revision=2, reward=0.0)
    other = replace(two.segment.steps[0], turn_id="another")
    add(held, at(2), replace(two, segment=replace(two.segment, steps=(*two.segment.steps, other))))
    assert held.new_segments == 1


def test_what_teaches_is_the_owners_to_say() -> None:
    held = window()
    assert add(held, at(0), scored("a", trainable=False)) is Arrival.UNTRAINABLE
    taking = Window(max_segments=4, max_tokens=40, max_uses=2, teaches=lambda _: True)
    assert add(taking, at(0), scored("a", trainable=False)) is Arrival.ADDED
    assert ids(taking.seal()) == ["a"]


def test_uses_of_one_that_comes_back_are_told() -> None:
    held = window()
    add(held, at(0), scored("a", revision=1), past_uses=frozenset(range(MAX_USES)))
    add(held, at(1), scored("b", revision=1), past_uses=frozenset(range(MAX_USES - 1)))
    assert (held.available_segments, held.new_segments) == (1, 1)
    # What is here knows better.
    add(held, at(2), scored("b", revision=2), past_uses=frozenset(range(MAX_USES)))
    assert held.available_segments == 1
    assert ("a" in held, "c" in held) == (True, False)


@pytest.mark.parametrize("revision", [0, 1])
def test_an_equal_or_lower_revision_changes_nothing(revision: int) -> None:
    held = window()
    add(held, at(0), scored("a", revision=1))
    assert add(held, at(1), scored("a", revision=revision)) is Arrival.STALE
    assert [c.ref for c in held.seal().candidates] == [at(0)]


def test_a_segment_that_is_no_longer_trainable_leaves_and_stays_away() -> None:
    held = window()
    add(held, at(0), scored("a"))
    assert add(held, at(1), scored("a", revision=1, trainable=False)) is Arrival.UNTRAINABLE
    assert add(held, at(2), scored("a")) is Arrival.STALE
    assert len(held) == 0
    assert held.new_segments == 0


def test_what_becomes_trainable_is_no_mark_any_more() -> None:
    held = window()
    add(held, at(0), scored("a", trainable=False))
    assert held.seal().refs == (at(0),)
    assert add(held, at(1), scored("a", revision=1)) is Arrival.ADDED
    assert held.seal().refs == (at(1),)


def test_the_oldest_go_first_beyond_the_caps() -> None:
    held = window()
    for number in range(MAX_SEGMENTS + 1):
        add(held, at(number), scored(f"s{number}"))
    assert held.segment_ids() == tuple(f"s{number}" for number in range(1, MAX_SEGMENTS + 1))
    for number in range(10, 10 + MAX_SEGMENTS + 1):
        add(held, at(number), scored(f"m{number}", trainable=False))
    # Marks have a cap of their own: the oldest is forgotten, and could come again.
    assert [ref.offset for ref in held.seal().refs] == [1, 2, 3, 4, 11, 12, 13, 14]
    assert add(held, at(20), scored("m11")) is Arrival.STALE
    assert add(held, at(21), scored("m10")) is Arrival.ADDED


def test_the_cap_of_tokens_is_inclusive() -> None:
    held = window()
    add(held, at(0), scored("a", tokens=MAX_TOKENS - 10))
    add(held, at(1), scored("b", tokens=10))
    assert held.segment_ids() == ("a", "b")
    add(held, at(2), scored("c", tokens=1))
    assert held.segment_ids() == ("b", "c")
    assert held.tokens == 11


def test_the_newest_stays_however_large() -> None:
    held = window()
    add(held, at(0), scored("a"))
    add(held, at(1), scored("b", tokens=MAX_TOKENS + 1))
    assert ids(held.seal()) == ["b"]


def test_a_snapshot_does_not_change() -> None:
    held = window()
    add(held, at(0), scored("a"))
    snapshot = held.seal()
    add(held, at(1), scored("a", revision=1))
    held.record_use(["a"], 1)
    assert [c.open() for c in snapshot.candidates] == [Candidate(ref=at(0), scored=scored("a"))]


def test_a_used_up_segment_is_neither_sampled_nor_news() -> None:
    held = window()
    add(held, at(0), scored("a"))
    add(held, at(1), scored("b"))
    held.restore_uses({"a": frozenset(range(MAX_USES))})
    assert (held.available_segments, held.new_segments) == (1, 1)
    assert [c.ref for c in held.seal().candidates] == [at(1)]


def test_segments_that_no_version_used_are_restored_unused() -> None:
    held = window(max_uses=1)
    add(held, at(0), scored("a"))
    held.restore_uses({"b": frozenset({1})})
    assert held.available_segments == 1


def test_a_stale_segment_is_not_sampled_until_its_version_is_near_again() -> None:
    held = window()
    for offset, version in enumerate([0, 1, None]):
        add(held, at(offset), scored(f"s{offset}", policy_version=version))
    held.require_version(1)
    snapshot = held.seal()
    assert [c.ref for c in snapshot.candidates] == [at(1), at(2)]
    assert snapshot.stale_share == pytest.approx(1 / 3)
    held.require_version(0)
    snapshot = held.seal()
    assert (len(snapshot.candidates), snapshot.stale_share) == (3, 0.0)
    assert window().seal().stale_share == 0.0
    alone = window()
    add(alone, at(0), scored("a", tokens=1, policy_version=0))
    alone.require_version(1)
    assert alone.seal().stale_share == 1.0


def test_a_session_is_spent_by_updates_whichever_of_its_segments_they_used() -> None:
    held = window(max_session_uses=2)
    for offset, name in enumerate("abc"):
        add(held, at(offset), scored(name, session="one" if name < "c" else "other"))
    held.record_use(["a", "b", "c"], 1)
    assert held.available_segments == 3
    held.record_use(["b"], 2)
    assert ids(held.seal()) == ["c"]
    # What came later is the session's as well, until what was used has left.
    add(held, at(3), scored("d", session="one"))
    assert (ids(held.seal()), held.new_segments) == (["c"], 0)
    add(held, at(4), scored("b", revision=1, trainable=False))
    assert ids(held.seal()) == ["a", "c", "d"]
    held.restore_uses({"a": frozenset({7}), "d": frozenset({8})})
    assert ids(held.seal()) == ["c"]
    held.restore_uses({"a": frozenset({7}), "d": frozenset({7})})
    assert ids(held.seal()) == ["a", "c", "d"]


def test_uses_follow_a_revision() -> None:
    held = window(max_uses=1)
    add(held, at(0), scored("a"))
    held.record_use(["a", "gone"], 1)
    add(held, at(1), scored("a", revision=1, reward=-1.0))
    assert (held.available_segments, held.new_segments) == (0, 0)


def test_samples_uniformly_without_replacement() -> None:
    drawn: Counter[str] = Counter()
    rng = random.Random(3)
    pool = packed("abcdef")
    for _ in range(3_000):
        chosen = [c.scored.segment.segment_id for c in sample(pool, 2, rng)]
        assert len(set(chosen)) == 2
        drawn.update(chosen)
    # 3,000 draws of 2 out of 6: mean 1,000, standard deviation 26.
    assert all(abs(count - 1_000) < 130 for count in drawn.values())


def test_a_sample_of_a_small_pool_is_the_pool() -> None:
    pool = packed("abc")
    drawn = sample(pool, 10, random.Random(0))
    assert sorted(drawn, key=lambda c: c.ref) == [one.open() for one in pool]


def test_the_same_generator_draws_the_same() -> None:
    pool = packed("abcdef")
    assert sample(pool, 3, random.Random(5)) == sample(pool, 3, random.Random(5))


def test_tokens_are_counted_where_known_and_estimated_elsewhere() -> None:
    known = scored("a", tokens=7)
    (step,) = known.segment.steps
    message = Message(turn_id="u", role=Role.USER, content="é" * 5, event_time=0)
    text = replace(step, token_ids=None, reply="x" * 9, context=(message,))
    estimated = replace(known, segment=replace(known.segment, steps=(text,)))
    prompted = replace(step, prompt_token_ids=(1, 2, 3, 4, 5), context=(message,))
    counted = replace(known, segment=replace(known.segment, steps=(prompted,)))
    assert segment_tokens(known) == 7
    assert segment_tokens(estimated) == 3 + 3
    assert segment_tokens(counted) == 7 + 5


def conversation(turns: int, *, nested: bool = True) -> ScoredSegment:
    """So many replies of three tokens; each prompt is all that came before and two tokens, or,
    if not nested, begins otherwise."""
    (first,) = scored("a", tokens=3).segment.steps
    so_far: tuple[int, ...] = ()
    steps = []
    for number in range(turns):
        prompt = (*so_far, 1_000 + number, 7) if nested else (2_000 + number, *so_far)
        steps.append(
            replace(first, turn_id=f"t{number}", prompt_token_ids=prompt, token_ids=(5, number, 6))
        )
        so_far = (*prompt, 5, number, 6)
    whole = scored("a")
    return replace(
        whole,
        segment=replace(whole.segment, steps=tuple(steps)),
        rewards=tuple(StepReward(turn_id=step.turn_id, reward=0.1 / 3) for step in steps),
    )


def test_a_prompt_that_repeats_the_conversation_counts_what_is_new_in_it() -> None:
    assert segment_tokens(conversation(1)) == 5
    assert segment_tokens(conversation(40)) == 40 * 5
    # Anew each time: an update cannot read them as one conversation either.
    assert segment_tokens(conversation(3, nested=False)) == (1 + 3) + (5 + 3) + (9 + 3)


def test_a_packed_segment_opens_as_it_was_and_holds_repeated_prompts_once() -> None:
    whole = conversation(40)
    one = window().pack(at(3), whole)
    assert one.open() == Candidate(ref=at(3), scored=whole)
    assert (one.segment_id, one.revision, one.tokens) == ("a", 0, 200)
    in_prompts = sum(len(step.prompt_token_ids or ()) for step in whole.segment.steps)
    assert in_prompts > 19 * one.tokens
    # Less than a byte for each: as objects they take 36.
    assert len(one.data) < in_prompts


def test_what_teaches_nothing_is_kept_as_a_mark_alone() -> None:
    one = window().pack(at(0), scored("a", trainable=False))
    assert (one.teaches, one.tokens, one.data) == (False, 0, b"")


def test_memory_is_flat_while_segments_come_and_go() -> None:
    held = window(max_segments=50, max_tokens=10**6)
    whole = conversation(10)

    def turn_over(first: int) -> int:
        for number in range(first, first + 200):
            segment = replace(whole.segment, segment_id=f"s{number}")
            add(held, at(number), replace(whole, segment=segment, trainable=number % 4 > 0))
            held.record_use(held.segment_ids()[:1], number)
        held.seal()
        assert len(held) == 50
        assert held.tokens == 50 * 50
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        turn_over(10_000)
        full = turn_over(10_200)
        later = [turn_over(10_200 + 200 * round_) for round_ in range(1, 6)]
    finally:
        tracemalloc.stop()
    assert max(later) < full * 1.1
    kept = [c.data for c in held.seal().candidates]
    assert held.held_bytes == sum(map(len, kept)) > 0
