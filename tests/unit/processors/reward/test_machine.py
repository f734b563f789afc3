"""The machine: revisions, rows of negatives, departures, reviews, forgetting, the codec."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from processors.reward.codec import decode_entry, decode_key, encode_entry, encode_key
from processors.reward.credibility import History, Opinion, judge
from processors.reward.machine import (
    Effect,
    EmitReview,
    EmitScored,
    Observed,
    RewardState,
    record_key,
    restore,
    step,
    take_changes,
)
from processors.reward.users import Note, NoteKey, UserHistory, UserKey
from streams.contracts import (
    BranchReply,
    ReviewRequest,
    ScoredSegment,
    StepFeedback,
    TrajectorySegment,
)
from streams.errors import StateError
from streams.settings import RewardSettings
from tests.unit.processors.reward.builders import HOUR_MS, reply, review, segment, thumb

SETTINGS = RewardSettings()
DAY_MS = 24 * HOUR_MS


def run(
    segments: Iterable[TrajectorySegment],
    settings: RewardSettings = SETTINGS,
    state: RewardState | None = None,
) -> tuple[list[ScoredSegment], list[ReviewRequest]]:
    effects: list[Effect] = []
    state = state or RewardState()
    for item in segments:
        state, new = step(state, item, settings)
        effects.extend(new)
    scored = [effect.scored for effect in effects if isinstance(effect, EmitScored)]
    return scored, [effect.review for effect in effects if isinstance(effect, EmitReview)]


def rated(number: int, *given: StepFeedback, **more: Any) -> TrajectorySegment:
    """Segment number ``number``: one reply with this feedback, closed at that hour."""
    fields: dict[str, Any] = {"segment_id": f"s{number}", "closed_at": number * HOUR_MS}
    return segment([reply(f"a{number}", *given)], **(fields | more))


def thumbs(*values: float, start: int = 1, **more: Any) -> list[TrajectorySegment]:
    """One segment for each thumb, an hour apart."""
    return [
        rated(n, thumb(f"f{n}", value, event_time=n * HOUR_MS), **more)
        for n, value in enumerate(values, start)
    ]


def rewards(scored: Iterable[ScoredSegment]) -> list[float]:
    return [reward.reward for item in scored for reward in item.rewards]


# --- Revisions --------------------------------------------------------------------------------


def test_a_known_or_lower_revision_does_nothing() -> None:
    state, first = step(RewardState(), rated(1, thumb("f1", 1), revision=1), SETTINGS)
    take_changes(state)
    for revision in (1, 0):
        state, effects = step(state, rated(1, thumb("f1", -1), revision=revision), SETTINGS)
        assert effects == ()
    assert take_changes(state) == ({}, frozenset())
    assert [type(effect) for effect in first] == [EmitScored, Observed]


def test_a_higher_revision_is_scored_and_replaces_what_the_user_had_said() -> None:
    before = thumbs(-1, -1)
    edited = rated(2, thumb("f2b", 1), revision=1, closed_at=3 * HOUR_MS)
    after = rated(4, thumb("f4", -1, event_time=4 * HOUR_MS))
    scored, reviews = run([*before, edited, after])
    assert rewards(scored) == pytest.approx([-0.4, -0.4, 0.4, -0.4])
    assert reviews == []


def test_a_revised_rating_is_not_counted_twice() -> None:
    first, second = thumbs(-1, -1)
    again = rated(2, thumb("f2", -1, event_time=2 * HOUR_MS), revision=1, closed_at=3 * HOUR_MS)
    scored, reviews = run([first, second, again])
    assert rewards(scored) == pytest.approx([-0.4, -0.4, -0.4])
    assert reviews == []


def test_the_key_is_the_user_else_the_session() -> None:
    assert record_key(segment()) == "u1"
    assert record_key(segment(user_id=None)) == "session-1"
    _, (effect,) = step(RewardState(), segment(user_id=None), SETTINGS)
    assert isinstance(effect, EmitScored)
    assert effect.key == "session-1"


# --- Three negatives in a row -----------------------------------------------------------------


def test_three_negatives_in_one_segment_are_held_and_sent_to_review() -> None:
    steps = [reply(f"a{n}", thumb(f"f{n}", -1, event_time=n)) for n in (1, 2, 3)]
    (scored,), (request,) = run([segment(steps)])
    assert rewards([scored]) == [0.0, 0.0, 0.0]
    assert [r.credibility for r in scored.rewards] == [0.0, 0.0, 0.0]
    assert not scored.trainable
    assert any(
        "3 negative ratings in a row by user u1 (f1, f2, f3)" in line
        for line in scored.rewards[0].reasons
    )
    assert request.feedback_event_ids == ("f1", "f2", "f3")
    assert (request.segment_id, request.turn_id, request.user_id) == ("s1", "a3", "u1")
    assert request.event_time == HOUR_MS


def test_a_row_over_segments_holds_the_third_and_what_follows() -> None:
    scored, reviews = run(thumbs(-1, -1, -1, -1))
    assert rewards(scored) == pytest.approx([-0.4, -0.4, 0.0, 0.0])
    assert [r.feedback_event_ids for r in reviews] == [("f1", "f2", "f3"), ("f4",)]
    assert len({r.event_id for r in reviews}) == 2


@pytest.mark.parametrize("between", [0.5, 1.0])
def test_a_rating_that_is_not_negative_breaks_the_row(between: float) -> None:
    scored, reviews = run(thumbs(-1, -1, between, -1, -1))
    assert rewards(scored)[-1] == pytest.approx(-0.4)
    assert reviews == []


def test_a_row_is_counted_by_event_time_not_by_arrival() -> None:
    one, two, three, four = thumbs(-1, -1, 1, -1)
    scored, reviews = run([one, two, four, three])
    assert rewards(scored) == pytest.approx([-0.4, -0.4, 0.0, 0.4])
    assert len(reviews) == 1


def test_a_review_is_asked_for_where_it_makes_a_revision_that_helps() -> None:
    one, two, three = thumbs(-1, -1, -1)
    _, (request,) = run([one, three, two])
    assert (request.segment_id, request.turn_id) == ("s2", "a2")
    assert request.feedback_event_ids == ("f1", "f2", "f3")


def test_rows_of_different_raters_and_policies_are_apart() -> None:
    others = [
        rated(n, thumb(f"f{n}", -1, event_time=n, user_id=f"rater-{n % 2}")) for n in range(1, 5)
    ]
    assert run(others)[1] == []
    apart = [*thumbs(-1, -1), *thumbs(-1, -1, start=3, policy="other")]
    assert run(apart)[1] == []


def test_ratings_of_replies_off_the_branch_count_in_a_row() -> None:
    bad = [
        BranchReply(turn_id=f"b{n}", reply="x", event_time=0,
                    feedback=(thumb(f"f{n}", -1, event_time=n),))
        for n in (1, 2)
    ]  # fmt: skip
    steps = [reply("a3", thumb("f3", -1, event_time=3), alternatives=(bad[0],))]
    (scored,), (request,) = run([segment(steps, off_branch=(bad[1],))])
    assert rewards([scored]) == [0.0]
    assert request.feedback_event_ids == ("f1", "f2", "f3")


def test_the_same_row_is_asked_about_once() -> None:
    *_, third = three = thumbs(-1, -1, -1)
    again = rated(3, *third.steps[0].feedback, revision=1, closed_at=4 * HOUR_MS)
    scored, reviews = run([*three, again])
    assert rewards(scored)[-1] == 0.0
    assert len(reviews) == 1


# --- Reviews ----------------------------------------------------------------------------------


def decided(value: float, **more: Any) -> TrajectorySegment:
    """Segment 3 again, with a review on its reply."""
    return rated(
        3,
        thumb("f3", -1, event_time=3 * HOUR_MS),
        review("r1", value, event_time=4 * HOUR_MS, **more),
        revision=1,
        closed_at=5 * HOUR_MS,
    )


def test_an_upheld_row_counts_again_and_ends_the_row() -> None:
    scored, reviews = run([*thumbs(-1, -1, -1), decided(1), *thumbs(-1, -1, start=6)])
    assert rewards(scored) == pytest.approx([-0.4, -0.4, 0.0, -0.4, -0.4, -0.4])
    assert len(reviews) == 1
    assert any("upheld by review r1" in line for line in scored[3].rewards[0].reasons)


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_rejected_row_counts_nothing(value: float) -> None:
    scored, _ = run([*thumbs(-1, -1, -1), decided(value)])
    assert rewards(scored)[-1] == 0.0
    assert any("rejected by review r1" in line for line in scored[-1].rewards[0].reasons)


def test_a_review_decides_the_whole_request_also_in_other_segments() -> None:
    second = rated(2, thumb("f2", -1, event_time=2 * HOUR_MS), revision=1, closed_at=6 * HOUR_MS)
    scored, _ = run([*thumbs(-1, -1, -1), second])
    assert rewards(scored)[-1] == 0.0
    scored, _ = run([*thumbs(-1, -1, -1), decided(1), second])
    assert rewards(scored)[-1] == pytest.approx(-0.4)


def test_a_review_may_name_its_request_from_another_reply() -> None:
    _, (request,) = run(thumbs(-1, -1, -1))
    elsewhere = rated(
        4,
        review("r1", 1, event_time=4 * HOUR_MS, attributes={"review": request.event_id}),
    )
    third = rated(3, thumb("f3", -1, event_time=3 * HOUR_MS), revision=1, closed_at=6 * HOUR_MS)
    scored, _ = run([*thumbs(-1, -1, -1), elsewhere, third])
    assert rewards(scored)[-1] == pytest.approx(-0.4)


def test_a_review_that_names_another_request_decides_nothing_here() -> None:
    scored, _ = run([*thumbs(-1, -1, -1), decided(1, attributes={"review": "another"})])
    assert rewards(scored)[-1] == 0.0


def test_a_withdrawn_review_holds_the_row_again() -> None:
    withdrawn = rated(3, thumb("f3", -1, event_time=3 * HOUR_MS), revision=2, closed_at=7 * HOUR_MS)
    scored, reviews = run([*thumbs(-1, -1, -1), decided(1), withdrawn])
    assert rewards(scored)[-2:] == pytest.approx([-0.4, 0.0])
    assert len(reviews) == 1


def test_the_latest_review_decides() -> None:
    both = rated(
        3,
        thumb("f3", -1, event_time=3 * HOUR_MS),
        review("r1", 1, event_time=4 * HOUR_MS),
        review("r2", -1, event_time=5 * HOUR_MS),
        revision=1,
        closed_at=6 * HOUR_MS,
    )
    assert rewards(run([*thumbs(-1, -1, -1), both])[0])[-1] == 0.0


def test_any_rating_can_be_rejected() -> None:
    rejected = rated(1, thumb("f1", 1, event_time=10), review("r1", -1, event_time=20))
    (scored,), reviews = run([rejected])
    assert rewards([scored]) == [0.0]
    assert reviews == []


# --- Departure from the own history -----------------------------------------------------------


def test_a_rate_that_departs_from_the_history_counts_half() -> None:
    # Of the last five ratings 0, 1, 1, 2 are negative, of those before none.
    scored, _ = run(thumbs(*[1.0] * 15, -1, 1, -1))
    assert rewards(scored)[-3:] == pytest.approx([-0.4, 0.4, -0.2])
    assert scored[-1].rewards[0].credibility == 0.5
    assert any(
        "counts 0.5: 2 of the last 5 ratings by user u1 are negative, 0 of the 13 before, "
        "more than 30% apart" in line
        for line in scored[-1].rewards[0].reasons
    )


def test_a_departure_needs_enough_history() -> None:
    # 14 ratings: nine before the window of five, one too few.
    assert rewards(run(thumbs(*[1.0] * 11, -1, 1, -1))[0])[-1] == pytest.approx(-0.4)
    assert rewards(run(thumbs(*[1.0] * 12, -1, 1, -1))[0])[-1] == pytest.approx(-0.2)


def test_exactly_the_limit_does_not_depart() -> None:
    settings = RewardSettings(rate_departure=0.4)
    assert rewards(run(thumbs(*[1.0] * 15, -1, 1, -1), settings)[0])[-1] == pytest.approx(-0.4)


def test_a_user_who_turns_friendly_departs_too() -> None:
    grumpy = [-1.0, -1.0, 1.0] * 5
    scored, _ = run(thumbs(*grumpy, 1, 1, 1, 1))
    assert rewards(scored)[-1] == pytest.approx(0.2)


def test_rejected_ratings_are_no_history() -> None:
    # Ten rejected negatives would be a history that five positives depart from.
    rejected = [
        rated(n, thumb(f"f{n}", -1, event_time=n), review(f"r{n}", -1, event_time=n))
        for n in range(1, 11)
    ]
    scored, _ = run([*rejected, *thumbs(1, 1, 1, 1, 1, start=20)])
    assert rewards(scored)[-5:] == pytest.approx([0.4] * 5)


# --- Bounds and forgetting --------------------------------------------------------------------


def test_what_is_remembered_of_a_user_is_bounded() -> None:
    settings = RewardSettings(history_ratings=20, history_segments=7)
    state = RewardState()
    for item in thumbs(*[1.0] * 50):
        state, _ = step(state, item, settings)
    (user,) = state.users.values()
    assert [o.event_id for o in user.history.opinions] == [f"f{n}" for n in range(31, 51)]
    assert [mark.segment_id for mark in user.marks] == [f"s{n}" for n in range(44, 51)]


LATER = [1.0, -1.0] * 40
"""More ratings than the filters look back."""


@pytest.mark.parametrize("later", [[1.0], LATER])
def test_what_was_found_of_a_rating_stands_in_a_revision(later: list[float]) -> None:
    state = RewardState()
    scored, (request,) = run(thumbs(-1, -1, -1), state=state)
    run(thumbs(*later, start=5), state=state)
    third = thumb("f3", -1, event_time=3 * HOUR_MS)
    again = rated(3, third, revision=1, closed_at=100 * HOUR_MS)
    state, effects = step(state, again, SETTINGS)
    (revised,) = [effect.scored for effect in effects if isinstance(effect, EmitScored)]
    assert scored[-1].rewards[0].weighed[0].filter == "row"
    assert [(w.weight, w.filter) for w in revised.rewards[0].weighed] == [(0.0, "row")]
    # It is not new: neither monitoring nor the crowd counts it once more.
    assert not any(isinstance(effect, Observed) for effect in effects)
    named = {"review": request.event_id}
    rejected = review("r", -1, event_time=101 * HOUR_MS, attributes=named)
    decided = rated(3, third, rejected, revision=2, closed_at=102 * HOUR_MS)
    (revised,), _ = run([decided], state=state)
    assert [(w.weight, w.filter) for w in revised.rewards[0].weighed] == [(0.0, "review")]


def test_a_flooder_frees_nothing_by_what_comes_later() -> None:
    state = RewardState()
    others = [
        rated(n, thumb(f"o{n}", 1, event_time=0), user_id=f"u{n}", closed_at=HOUR_MS)
        for n in range(1, 9)
    ]
    flood = [
        rated(n, thumb(f"f{n}", -1, event_time=n), user_id="m", closed_at=HOUR_MS + n)
        for n in range(100, 200)
    ]
    run([*others, *flood], state=state)
    early = rated(130, thumb("f130", -1, event_time=130), user_id="m", revision=1, closed_at=DAY_MS)
    (scored,), _ = run([early], state=state)
    assert [w.filter for w in scored.rewards[0].weighed] == ["flood"]


def test_a_rating_is_compared_with_no_more_than_history_ratings() -> None:
    settings = RewardSettings(history_ratings=15)
    scored, _ = run(thumbs(*[-1.0, -1.0, 1.0] * 3, *[1.0] * 15, -1, 1, -1), settings)
    assert [w.filter for w in scored[-1].rewards[0].weighed] == ["departure"]
    assert "2 of the last 5" in str(scored[-1].rewards[0].weighed[0].reason)
    assert "0 of the 10 before" in str(scored[-1].rewards[0].weighed[0].reason)


def test_a_good_rating_ends_a_row_whenever_it_was_given() -> None:
    opinions = [
        Opinion(
            event_id=f"f{n}",
            segment_id=f"s{n}",
            session_id="s",
            turn_id=f"a{n}",
            rater="user u1",
            value=value,
            event_time=n,
            closed_at=n,
            suspended="5 of 8" if value > 0 else None,
        )
        for n, value in enumerate((-1.0, -1.0, 1.0, -1.0))
    ]
    assert judge(History(opinions=tuple(opinions)), "s3", SETTINGS) == {}


def test_old_ratings_of_a_user_are_dropped_by_closing_time() -> None:
    settings = RewardSettings(history_ms=DAY_MS)
    late = thumbs(-1, start=40)
    scored, reviews = run([*thumbs(-1, -1), *late], settings)
    assert rewards(scored)[-1] == pytest.approx(-0.4)
    assert reviews == []
    assert len(run([*thumbs(-1, -1), *late])[1]) == 1


def test_a_silent_user_is_forgotten_once_others_are_two_histories_ahead() -> None:
    settings = RewardSettings(history_ms=DAY_MS)
    state, _ = step(RewardState(), rated(1, user_id="gone"), settings)
    state, _ = step(state, rated(40, user_id="here"), settings)
    assert take_changes(state)[1] == frozenset()
    state, _ = step(state, rated(60, user_id="here"), settings)
    changed, forgotten = take_changes(state)
    assert forgotten == {NoteKey("default", "gone", "s1")}
    assert set(state.users) == {UserKey("default", "here")}
    assert set(changed) == {NoteKey("default", "here", "s60")}


def test_a_forgotten_user_who_comes_back_is_written_not_deleted() -> None:
    settings = RewardSettings(history_ms=DAY_MS)
    state = RewardState()
    for number, user in ((1, "gone"), (60, "here"), (61, "gone")):
        state, _ = step(state, rated(number, user_id=user), settings)
    changed, forgotten = take_changes(state)
    assert forgotten == {NoteKey("default", "gone", "s1")}
    notes = {(key.key, key.segment_id) for key in changed if isinstance(key, NoteKey)}
    assert notes == {("here", "s60"), ("gone", "s61")}


def test_a_segment_out_of_order_does_not_set_a_users_clock_back() -> None:
    state = RewardState()
    for item in (*thumbs(1, start=40), *thumbs(1, start=2)):
        state, _ = step(state, item, SETTINGS)
    (user,) = state.users.values()
    assert user.clock_ms == 40 * HOUR_MS


def test_changes_are_taken_once_and_restore_the_state() -> None:
    state = RewardState()
    written: dict[bytes, bytes] = {}
    for item in [*thumbs(-1, -1, -1), decided(1), rated(9, user_id="u2")]:
        state, _ = step(state, item, SETTINGS)
        changed, forgotten = take_changes(state)
        written |= {encode_key(who): encode_entry(user) for who, user in changed.items()}
        for key in forgotten:
            written.pop(encode_key(key))
    assert take_changes(state) == ({}, frozenset())
    restored = restore((decode_key(k), decode_entry(v)) for k, v in written.items())
    assert restored.users == state.users
    assert restored.crowd.entries == state.crowd.entries
    assert restored.clock_ms == state.clock_ms == 9 * HOUR_MS


def test_a_segment_of_a_user_with_a_long_history_writes_its_own_note_alone() -> None:
    settings = RewardSettings(history_ratings=20, history_segments=7)
    state = RewardState()
    for item in thumbs(*[1.0] * 49):
        state, _ = step(state, item, settings)
    take_changes(state)
    state, _ = step(state, thumbs(1.0, start=50)[0], settings)
    changed, forgotten = take_changes(state)
    notes = {
        key.segment_id: entry
        for key, entry in changed.items()
        if isinstance(key, NoteKey) and isinstance(entry, Note)
    }
    # One rating and one mark fall out of what is kept.
    assert set(notes) == {"s50", "s43"}
    assert notes["s43"].revision is None
    gone = {key for key in forgotten if isinstance(key, NoteKey)}
    assert gone == {NoteKey("default", "u1", "s30")}
    assert len(encode_entry(notes["s50"])) < 100


def test_a_history_that_was_written_as_a_whole_is_written_anew_as_notes() -> None:
    known = RewardState()
    for item in thumbs(-1, -1):
        known, _ = step(known, item, SETTINGS)
    who = UserKey("default", "u1")
    state = restore([(who, known.users[who])])
    assert state.users == known.users
    state, _ = step(state, thumbs(-1, start=3)[0], SETTINGS)
    changed, forgotten = take_changes(state)
    assert forgotten == {who}
    of_user = {key: entry for key, entry in changed.items() if isinstance(key, NoteKey)}
    assert {key.segment_id for key in of_user} == {"s1", "s2", "s3"}
    assert restore(of_user.items()).users == state.users


def test_a_history_written_as_a_whole_is_forgotten_as_a_whole() -> None:
    settings = RewardSettings(history_ms=DAY_MS)
    known, _ = step(RewardState(), rated(1, user_id="gone"), settings)
    gone = UserKey("default", "gone")
    state = restore([(gone, known.users[gone])])
    state, _ = step(state, rated(60, user_id="here"), settings)
    _, forgotten = take_changes(state)
    assert gone in forgotten
    assert set(state.users) == {UserKey("default", "here")}


# --- Codec ------------------------------------------------------------------------------------


def test_damaged_or_unknown_state_is_refused() -> None:
    good = encode_entry(UserHistory(clock_ms=5))
    assert decode_entry(good) == UserHistory(clock_ms=5)
    for bad in (b"", bytes((9,)) + good[1:], good[:-1], good[:1] + b"\x93"):
        with pytest.raises(StateError, match="reward state"):
            decode_entry(bad)
    with pytest.raises(StateError, match="a key cannot be read"):
        decode_key(b"\xff")
