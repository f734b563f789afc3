"""The filters over many users: each changes what comes out, and only while it is on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from processors.reward.crowd import TEMPLATES_TOGETHER, Templates
from processors.reward.machine import (
    Effect,
    EmitReview,
    EmitScored,
    Observed,
    RewardState,
    StateEntry,
    StateKey,
    restore,
    step,
    take_changes,
)
from streams.contracts import ReviewRequest, ScoredSegment, TrajectorySegment
from streams.settings import RewardSettings
from tests.unit.processors.reward.builders import (
    HOUR_MS,
    reply,
    review,
    segment,
    thumb,
)

SETTINGS = RewardSettings()
WORDS = "You can reset it under settings, account, security."


def run(
    segments: Iterable[TrajectorySegment], state: RewardState | None = None, **settings: Any
) -> list[Effect]:
    effects: list[Effect] = []
    state = state or RewardState()
    for item in segments:
        state, new = step(state, item, RewardSettings(**settings))
        effects.extend(new)
    return effects


def scored(effects: Iterable[Effect]) -> list[ScoredSegment]:
    return [effect.scored for effect in effects if isinstance(effect, EmitScored)]


def asked(effects: Iterable[Effect]) -> list[ReviewRequest]:
    return [effect.review for effect in effects if isinstance(effect, EmitReview)]


def credibilities(effects: Iterable[Effect]) -> list[float]:
    return [reward.credibility for item in scored(effects) for reward in item.rewards]


def rated(
    name: str, user: str, value: float, *, at: int = HOUR_MS, words: str = "", **more: Any
) -> TrajectorySegment:
    """Segment ``name`` of one reply, rated by its user, closed at ``at``."""
    given = thumb(f"f-{name}", value, event_time=at - 10, **more)
    return segment(
        [reply(f"a-{name}", given, reply=words or f"Answer {name}.")],
        segment_id=name,
        session_id=f"session-{name}",
        user_id=user,
        closed_at=at,
    )


def everybody(users: int = 6, each: int = 2) -> list[TrajectorySegment]:
    """Users who rate a few replies each, up and down, far apart."""
    return [
        rated(f"{user}-{n}", f"u{user}", 1.0 if n % 2 == 0 else -1.0, at=HOUR_MS + 100 * user + n)
        for user in range(users)
        for n in range(each)
    ]


# --- Floods -----------------------------------------------------------------------------------


def flood(user: str = "loud", count: int = 30, **more: Any) -> list[TrajectorySegment]:
    """One rating after the other, an hour's worth, ten minutes apart by event time."""
    return [
        rated(f"loud-{n}", user, (-1.0) ** n, at=HOUR_MS + 5_000 + n * 90_000, **more)
        for n in range(count)
    ]


def test_a_rater_who_floods_is_held_and_only_then() -> None:
    effects = run([*everybody(), *flood()])
    found = credibilities(effects)[12:]
    assert found == [1.0] * 19 + [0.0] * 11
    (first, *_) = asked(effects)
    assert first.attributes["filter"] == "flood"
    assert "anomaly (flood): 20 ratings by user loud, 2.0 by each of 6 others" in first.reason
    assert credibilities(run([*everybody(), *flood()], filter_flood=False)) == [1.0] * 42


@pytest.mark.parametrize(("users", "count"), [(4, 30), (6, 19)])
def test_no_flood_without_others_to_compare_or_enough_ratings(users: int, count: int) -> None:
    assert 0.0 not in credibilities(run([*everybody(users), *flood(count=count)]))


def test_a_source_that_sends_far_more_than_it_used_to_is_held() -> None:
    calm = [
        rated(f"calm-{hour}-{n}", f"u{n}", 1.0, at=hour * HOUR_MS + n, source="import")
        for hour in range(1, 26)
        for n in range(3)
    ]
    burst = [
        rated(f"many-{n}", f"x{n}", -1.0, at=26 * HOUR_MS + n * 60_000, source="import")
        for n in range(25)
    ]
    effects = run([*calm, *burst])
    assert credibilities(effects)[75:] == [1.0] * 19 + [0.0] * 6
    assert (
        "20 ratings from source import in a window, where 3.0 are usual" in asked(effects)[0].reason
    )
    assert 0.0 not in credibilities(run([*calm, *burst], filter_flood=False))
    other = [rated("other", "y", -1.0, at=26 * HOUR_MS + HOUR_MS // 2, source="web")]
    assert credibilities(run([*calm, *burst, *other]))[-1] == 1.0


def busy(hours: range, by_day: int, by_night: int, days: int) -> list[TrajectorySegment]:
    """Ratings by many users through one front end, more in these hours of the day; no weekends."""
    return [
        rated(f"{hour}-{n}", f"u{n}", 1.0, at=hour * HOUR_MS + n, source="web")
        for hour in range(24 * days)
        if hour // 24 % 7 < 5 or by_night
        for n in range(by_day if hour % 24 in hours and hour // 24 % 7 < 5 else by_night)
    ]


@pytest.mark.parametrize("by_night", [0, 2])
def test_a_front_end_with_nights_and_weekends_does_not_flood(by_night: int) -> None:
    days = busy(range(9, 17), 40, by_night, days=16)
    assert credibilities(run(days, weight_diversity=0.0)).count(0.0) == 0


def test_an_import_of_ratings_once_a_month_does_not_flood() -> None:
    imports = [
        rated(f"{month}-{n}", f"u{n}", 1.0, at=month * 30 * 24 * HOUR_MS + n, source="csv")
        for month in range(1, 7)
        for n in range(100)
    ]
    assert 0.0 not in credibilities(run(imports, history_ms=10**11))


def test_who_floods_through_a_front_end_does_not_have_everybody_held() -> None:
    calm = [
        rated(f"calm-{hour}-{n}", f"u{n}", 1.0, at=hour * HOUR_MS + n, source="web")
        for hour in range(1, 26)
        for n in range(10)
    ]
    loud = [
        rated(f"loud-{n}", "loud", (-1.0) ** n, at=26 * HOUR_MS + n * 20_000, source="web")
        for n in range(100)
    ]
    after = [
        rated(f"after-{n}", f"u{n}", 1.0, at=27 * HOUR_MS - 30 + n, source="web") for n in range(30)
    ]
    found = credibilities(run([*calm, *loud, *after]))
    assert found[-30:] == [1.0] * 30
    assert found[250:-30].count(0.0) > 70


def named(name: str, owner: str, value: float, *ids: str, words: str = "") -> TrajectorySegment:
    """A reply in a conversation of ``owner``, rated under other users' names."""
    given = [
        thumb(f"f-{name}-{i}", value, event_time=HOUR_MS + n, user_id=i) for n, i in enumerate(ids)
    ]
    return segment(
        [reply(f"a-{name}", *given, reply=words or f"Answer {name}.")],
        segment_id=name,
        session_id=f"session-{name}",
        user_id=owner,
        closed_at=HOUR_MS + 1,
    )


def test_who_speaks_in_others_names_speaks_for_nobody_else() -> None:
    framed = [named(f"x{n}", "loud", (-1.0) ** n, "victim") for n in range(40)]
    honest = [rated(f"v{n}", "victim", 1.0, at=HOUR_MS + 10_000 * (n + 1)) for n in range(5)]
    found = credibilities(run([*everybody(), *framed, *honest]))
    assert found[-5:] == [1.0] * 5
    assert found[12:-5].count(0.0) > 20
    # Under a new name each they are in nobody's average.
    many = [named(f"y{n}", "loud", 1.0, f"made-up-{n}") for n in range(60)]
    busy = [rated(f"b{n}", "busy", (-1.0) ** n, at=HOUR_MS + 90_000 * (n + 1)) for n in range(28)]
    found = credibilities(run([*everybody(each=6), *many, *busy]))
    assert found[-28:] == [1.0] * 28


def test_guests_cost_the_user_of_a_conversation_nothing() -> None:
    guests = [
        segment(
            [
                reply(
                    f"a{n}",
                    *(
                        thumb(f"f{n}-{i}", -1.0, event_time=60_000 * i, user_id=f"guest-{i}")
                        for i in range(n, 40, 4)
                    ),
                )
            ],
            segment_id=f"shared-{n}",
            user_id="alice",
            closed_at=HOUR_MS + n,
        )
        for n in range(4)
    ]
    own = [rated(f"own-{n}", "alice", 1.0, at=HOUR_MS + 90_000 * (n + 1)) for n in range(5)]
    assert credibilities(run([*everybody(), *guests, *own]))[12:] == [1.0] * 9


def test_people_who_talk_through_one_user_of_a_platform_are_no_flood() -> None:
    people = [named(f"p{n}", "bot", (-1.0) ** n, f"person-{n}") for n in range(120)]
    assert 0.0 not in credibilities(run([*everybody(), *people]))


def test_names_given_by_a_source_that_is_verified_are_raters_of_their_own() -> None:
    many = [named(f"y{n}", "channel", (-1.0) ** n, f"person-{n}") for n in range(40)]
    found = credibilities(run([*everybody(), *many], verified_sources=("test",)))
    assert 0.0 not in found


def test_made_up_names_are_no_majority_and_no_cohort() -> None:
    words = "Hello! How can I help you today?"
    voted = named("vote", "loud", -1.0, "x1", "x2", "x3", words=words)
    likes = [rated(f"l{n}", "fan", 1.0, at=HOUR_MS + 90_000 * n, words=words) for n in range(9)]
    assert 0.0 not in credibilities(run([voted, *likes]))[1:]
    angry = [named(f"c{n}", "loud", -1.0, *(f"x{i}" for i in range(6))) for n in range(3)]
    alarms = [e.alarm for e in run(angry) if isinstance(e, Observed)]
    assert alarms == [None] * 3


def test_who_contradicted_everybody_once_is_not_held_for_good() -> None:
    off: dict[str, Any] = {"filter_row": False, "cohort_suspension": False}
    later = [rated(f"later-{n}", "contrary", 1.0, at=(5 + n) * HOUR_MS) for n in range(3)]
    assert [weight for weight, _ in of_contrary(run([*contested(7), *later], **off))[-3:]] == [
        1.0
    ] * 3


def test_an_event_id_of_another_conversation_is_another_event() -> None:
    flood = [
        segment(
            [reply("a", thumb("fb-1", 1.0, event_time=n * 90_000))],
            segment_id=f"s{n}",
            session_id=f"session-{n}",
            user_id="loud",
            closed_at=HOUR_MS + n,
        )
        for n in range(25)
    ]
    state = RewardState()
    effects = run([*everybody(), *flood], state)
    assert len(asked(effects)) == 6
    again = segment(
        flood[0].steps,
        segment_id="s0",
        session_id="session-0",
        user_id="loud",
        revision=1,
        closed_at=2 * HOUR_MS - 1,
    )
    assert credibilities(run([again], state)) == [1.0]


def test_a_source_may_grow() -> None:
    grown = [
        rated(f"{hour}-{n}", f"u{n}", 1.0, at=hour * HOUR_MS + n, source="web")
        for hour, each in enumerate((*[10] * 24, 20, 40, 80, 120), start=1)
        for n in range(each)
    ]
    assert 0.0 not in credibilities(run(grown))


# --- Bursts -----------------------------------------------------------------------------------


def shouted(count: int, *, text: str | None, apart_ms: int = 1_000) -> list[TrajectorySegment]:
    return [
        rated(f"s{n}", f"u{n % 20}" if text else "u", 1.0, at=HOUR_MS + n * apart_ms, text=text)
        for n in range(count)
    ]


FIVE_STARS = "Best assistant ever, five stars!"


@pytest.mark.parametrize(
    ("text", "at_first"), [(FIVE_STARS, 4), ("这是我用过最好的助手", 4), (None, 9)]
)
def test_a_burst_of_identical_feedback_is_held(text: str | None, at_first: int) -> None:
    burst = shouted(12, text=text)
    effects = run(burst)
    assert credibilities(effects) == [1.0] * at_first + [0.0] * (12 - at_first)
    assert asked(effects)[0].attributes["filter"] == "burst"
    assert credibilities(run(burst, filter_burst=False)) == [1.0] * 12


@pytest.mark.parametrize("text", ["thank you so much!", "谢谢你的帮助", "👍"])
def test_what_many_people_write_is_no_burst_unless_one_does(text: str) -> None:
    assert 0.0 not in credibilities(run(shouted(20, text=text)))
    alone = [rated(f"s{n}", "u", 1.0, at=HOUR_MS + n, text=text) for n in range(12)]
    effects = run(alone)
    assert credibilities(effects) == [1.0] * 9 + [0.0] * 3
    assert f'"{text}" by user u from source' in asked(effects)[0].reason


def test_the_same_words_over_hours_are_no_burst() -> None:
    assert 0.0 not in credibilities(run(shouted(30, text=FIVE_STARS, apart_ms=60_000)))


def test_thumbs_without_words_by_many_users_are_no_burst() -> None:
    many = [rated(f"s{n}", f"u{n}", 1.0, at=HOUR_MS + n * 100) for n in range(40)]
    assert 0.0 not in credibilities(run(many))


# --- Contradiction ----------------------------------------------------------------------------


def contested(opposed: int, agreed: int = 0) -> list[TrajectorySegment]:
    """Replies that three users each liked, then rated by one who mostly does not."""
    found = []
    for n in range(opposed + agreed):
        words = f"{WORDS} Version {n} of the guide."
        at = HOUR_MS + n * 1_000
        found += [rated(f"{n}-{u}", f"u{u}", 1.0, at=at + u, words=words) for u in range(3)]
        value = 1.0 if n < agreed else -1.0
        found.append(rated(f"{n}-c", "contrary", value, at=at + 10, words=words))
    return found


def of_contrary(effects: Iterable[Effect]) -> list[tuple[float, str]]:
    return [
        (reward.credibility, reward.weighed[0].filter if reward.weighed else "")
        for item in scored(effects)
        for reward in item.rewards
        if item.segment.user_id == "contrary"
    ]


def test_a_user_who_contradicts_nearly_everybody_is_held() -> None:
    off: dict[str, Any] = {"filter_row": False, "cohort_suspension": False}
    effects = run(contested(7), **off)
    assert of_contrary(effects) == [(1.0, "")] * 4 + [(0.0, "contradiction")] * 3
    assert "the opposite of nearly everybody in 5 of 5" in asked(effects)[0].reason
    without = run(contested(7), **off, filter_contradiction=False)
    assert of_contrary(without) == [(1.0, "")] * 7


def test_a_user_who_often_agrees_is_not() -> None:
    off: dict[str, Any] = {"filter_row": False, "filter_departure": False}
    assert (0.0, "contradiction") not in of_contrary(run(contested(4, agreed=4), **off))


def test_short_replies_are_not_compared_across_conversations() -> None:
    items = []
    for n in range(7):
        at = HOUR_MS + n * 1_000
        items += [rated(f"{n}-{u}", f"u{u}", 1.0, at=at + u, words="Yes.") for u in range(3)]
        items.append(rated(f"{n}-c", "contrary", -1.0, at=at + 10, words="Yes."))
    assert (0.0, "contradiction") not in of_contrary(run(items, filter_row=False))


# --- The cohort -------------------------------------------------------------------------------


def turning(users: int, others: int = 0) -> list[TrajectorySegment]:
    """Users who give three negatives each, among others who are content."""
    content = [rated(f"ok-{n}", f"ok{n}", 1.0, at=HOUR_MS + n) for n in range(others)]
    angry = [
        rated(f"{user}-{n}", f"u{user}", -1.0, at=HOUR_MS + 1_000 * (user + 1) + n)
        for user in range(users)
        for n in range(3)
    ]
    return [*content, *angry]


def test_many_who_turn_negative_together_suspend_the_filters_of_single_users() -> None:
    effects = run(turning(7))
    held = [c for c in credibilities(effects) if c == 0.0]
    assert len(held) == 4
    assert credibilities(effects)[-3:] == [1.0, 1.0, 1.0]
    assert len(asked(effects)) == 4
    alarms = [e.alarm for e in effects if isinstance(e, Observed) and e.alarm is not None]
    assert alarms == ["5 of 5 raters turned negative together"]
    assert any("are suspended" in line for line in scored(effects)[-1].rewards[0].reasons)


def test_without_suspension_they_are_all_held() -> None:
    effects = run(turning(7), cohort_suspension=False)
    assert credibilities(effects).count(0.0) == 7
    assert not [e for e in effects if isinstance(e, Observed) and e.alarm is not None]


def test_a_few_among_many_are_no_news() -> None:
    assert credibilities(run(turning(5, others=20))).count(0.0) == 5


def test_what_was_suspended_stays_so_in_a_later_revision() -> None:
    state = RewardState()
    run(turning(7), state)
    last = turning(7)[-1]
    again = segment(
        last.steps,
        segment_id=last.segment_id,
        session_id=last.session_id,
        user_id=last.user_id,
        revision=1,
        closed_at=90 * HOUR_MS,
    )
    assert credibilities(run([again], state)) == [1.0]


def test_floods_stay_held_while_the_filters_are_suspended() -> None:
    angry = [rated(f"loud-{n}", "loud", -1.0, at=HOUR_MS + 50_000 + n * 90_000) for n in range(25)]
    found = credibilities(run([*turning(7), *angry]))[-25:]
    assert found[:19] == [1.0] * 19
    assert found[20:] == [0.0] * 5


# --- Switches of the filters of single users --------------------------------------------------


def test_the_row_has_a_switch() -> None:
    three = turning(1)
    assert credibilities(run(three)) == [1.0, 1.0, 0.0]
    effects = run(three, filter_row=False)
    assert credibilities(effects) == [1.0, 1.0, 1.0]
    assert asked(effects) == []


def test_the_departure_has_a_switch() -> None:
    values = [*[1.0] * 15, -1.0, 1.0, -1.0]
    items = [rated(f"{n}", "u", v, at=HOUR_MS * (n + 1)) for n, v in enumerate(values)]
    assert credibilities(run(items))[-1] == 0.5
    assert credibilities(run(items, filter_departure=False))[-1] == 1.0


# --- Held ratings, decided --------------------------------------------------------------------


def with_review(item: TrajectorySegment, value: float) -> TrajectorySegment:
    (only,) = item.steps
    return segment(
        [reply(only.turn_id, *only.feedback, review("r1", value, event_time=item.closed_at))],
        segment_id=item.segment_id,
        session_id=item.session_id,
        user_id=item.user_id,
        revision=1,
        closed_at=item.closed_at + HOUR_MS,
    )


@pytest.mark.parametrize(("value", "expected"), [(1.0, 1.0), (-1.0, 0.0)])
def test_a_held_anomaly_is_decided_by_a_review(value: float, expected: float) -> None:
    burst = shouted(5, text=FIVE_STARS)
    effects = run([*burst, with_review(burst[-1], value)])
    assert credibilities(effects)[-2:] == [0.0, expected]
    assert len(asked(effects)) == 1


def test_a_revision_neither_counts_again_nor_asks_again() -> None:
    burst = shouted(5, text=FIVE_STARS)
    item = burst[-1]
    again = segment(
        item.steps,
        segment_id=item.segment_id,
        session_id=item.session_id,
        user_id=item.user_id,
        revision=1,
        closed_at=item.closed_at + HOUR_MS,
    )
    effects = run([*burst, again])
    assert credibilities(effects)[-2:] == [0.0, 0.0]
    assert len(asked(effects)) == 1
    assert sum(len(e.ratings) for e in effects if isinstance(e, Observed)) == 5


def test_monitoring_sees_what_was_given_before_any_filter() -> None:
    (*_, last) = [e for e in run(turning(1)) if isinstance(e, Observed)]
    assert last.ratings == ((-1, "test"),)
    assert last.held == ("row",)


# --- Templates --------------------------------------------------------------------------------


def spam(count: int, words: Sequence[str] | str) -> list[TrajectorySegment]:
    return [
        segment(
            [reply(f"a{n}", reply=words if isinstance(words, str) else words[n])],
            segment_id=f"t{n}",
            session_id=f"session-t{n}",
            user_id=f"u{n}",
            closed_at=HOUR_MS + n,
        )
        for n in range(count)
    ]


def diversity(effects: Iterable[Effect]) -> list[float | None]:
    return [
        component.value
        for item in scored(effects)
        for component in item.rewards[0].components
        if component.name == "diversity"
    ]


OPENING = "As a helpful assistant I am always happy to assist you with every question about"


@pytest.mark.parametrize(
    "words",
    [
        "Great question! I am delighted to help you with everything today.",
        [f"{OPENING} subject number {'xyz'[n % 3]}{n} and so on." for n in range(20)],
        [f"Case {n}: please restart it now." for n in range(20)],
        "很高兴为您服务，请问还有什么可以帮您的吗",
    ],
)
def test_a_template_across_sessions_is_penalised(words: Sequence[str] | str) -> None:
    found = diversity(run(spam(20, words)))
    assert found[:4] == [None] * 4
    assert found[4] == pytest.approx(-1 / 9)
    assert found[-1] == -1.0
    assert diversity(run(spam(20, words), weight_diversity=0.0)) == []


def test_short_or_different_replies_are_no_template() -> None:
    assert set(diversity(run(spam(20, "Yes, of course.")))) == {None}
    different = [
        f"{chr(97 + n) * 3} is what you look for, I think {chr(97 + n)}" for n in range(20)
    ]
    assert set(diversity(run(spam(20, different)))) == {None}


def test_the_same_session_may_repeat_itself() -> None:
    items = [
        segment([reply(f"a{n}", reply=OPENING)], segment_id=f"t{n}", closed_at=HOUR_MS + n)
        for n in range(20)
    ]
    assert set(diversity(run(items))) == {None}


def test_a_new_reply_does_not_have_all_of_them_written_again() -> None:
    state = RewardState()
    different = [
        f"{chr(97 + n % 26) * 3} {chr(97 + n // 26)} is what you look for" for n in range(200)
    ]
    written: dict[StateKey, StateEntry] = {}
    for item in spam(200, different):
        run([item], state, diversity_replies=100)
        changed, forgotten = take_changes(state)
        parts = [entry for entry in changed.values() if isinstance(entry, Templates)]
        assert [len(part.replies) <= TEMPLATES_TOGETHER for part in parts] == [True]
        written = {k: v for k, v in (written | changed).items() if k not in forgotten}
    held = [entry for entry in written.values() if isinstance(entry, Templates)]
    assert 100 <= sum(len(part.replies) for part in held) < 100 + TEMPLATES_TOGETHER
    restored = restore(written.items())
    assert restored.crowd.index("default", 100).replies == state.crowd.index("default", 100).replies


def test_templates_are_forgotten_with_the_newest_of_them() -> None:
    state = RewardState()
    words = "Great question! I am delighted to help you with everything today."
    run(spam(40, words), state)
    month_ms = 31 * 24 * HOUR_MS

    def templates() -> int:
        return sum(isinstance(entry, Templates) for entry in state.crowd.entries.values())

    assert templates() == 2
    run([rated("later", "z", 1.0, at=2 * month_ms)], state)
    assert templates() == 0
    late = [
        segment([reply("b", reply=words)], segment_id="b", session_id="b", closed_at=3 * month_ms)
    ]
    assert diversity(run(late, state)) == [None]
    assert templates() == 1


# --- State ------------------------------------------------------------------------------------


def test_what_is_remembered_of_the_crowd_is_forgotten_in_time() -> None:
    state = RewardState()
    run([rated(f"{n}", f"u{n}", 1.0, text="thank you") for n in range(5)], state)
    kinds = {key.kind for key in state.crowd.entries}
    assert kinds == {"policy", "rater", "source", "echo", "words", "templates"} - {"templates"}
    run([rated("late", "z", 1.0, at=10 * HOUR_MS)], state)
    assert sum(key.kind == "words" for key in state.crowd.entries) == 1
    take_changes(state)
    run([rated("later", "z", 1.0, at=31 * 24 * HOUR_MS)], state)
    assert sum(key.kind == "rater" for key in state.crowd.entries) == 1
    changed, forgotten = take_changes(state)
    assert not set(changed) & forgotten
