"""How far feedback is believed, from what its rater said before.

Theory of operation. Of every user we keep a bounded history: their latest rating of each
reply (``Opinion``), what else they claim of it (``formulas.CLAIMS``, an ``Opinion`` with a kind),
and what people decided about such feedback (``Decision``). A history
belongs to one record key of ``trajectory.segments`` (a user, else a session) and holds every
rater who spoke there. A segment's revision replaces all that the revision before had put
there, so nothing counts twice. It has the newest ``history_ratings``, and all of the segments
that are known (``history_segments``): what was found of a rating stands when it shows again.

Ratings of one rater are ordered by event time. These filters look at them, first wins; at claims
the first two:

1. *Decision*: a review upheld the rating (counts in full) or rejected it (counts nothing).
2. *Anomaly*: it stood out from what all raters send when it first showed
   (``processors.reward.crowd``). It counts nothing until a review decides.
3. *Row*: it stands in an unbroken run of at least ``negatives_in_a_row`` negative ratings.
   It counts nothing until a review decides. A rating of 0 or more, or an upheld one, breaks
   the run.
4. *Departure*: the share of negatives among the rater's last ``rate_window`` ratings, up to
   this one, is more than ``rate_departure`` away from the share among those before, of which
   there must be ``rate_history_min``, of ``history_ratings`` in all. It counts
   ``rate_departure_weight``.

Anomalies enter no row and no share, rejected ratings no share. Row and departure leave alone
the negative ratings that showed while many raters turned negative together
(``Opinion.suspended``).

Pure: no clock, no randomness, no I/O.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from processors.reward.crowd import RATING, Anomaly, NewFeedback
from processors.reward.formulas import (
    CLAIMS,
    Credibility,
    Given,
    default_rater,
    latest_claims,
    latest_ratings,
    of_kinds,
    rater_of,
    readable,
)
from streams.contracts import FeedbackKind, ReviewRequest, StepFeedback, TrajectorySegment
from streams.reviews import (
    FILTER_ATTRIBUTE,
    RATER_ATTRIBUTE,
    REPLIES_ATTRIBUTE,
    REVIEW_ATTRIBUTE,
    UNTIL_DECIDED,
)
from streams.settings import RewardSettings

REVIEW_KINDS = (FeedbackKind.REVIEW,)

RECALLED = 16
"""How many times ``history_ratings`` are kept at most, of segments that may be revised."""

MAX_NAMED = 5
"""How many feedback ids a reason names; a request always has all."""


class RequestPlace(Struct, frozen=True, kw_only=True, gc=False):
    """The review request a rating is part of, and the reply it was made at."""

    event_id: str
    segment_id: str
    turn_id: str


class Opinion(Struct, frozen=True, kw_only=True, gc=False):
    """A rater's latest rating of one reply, or their latest claim of one kind about it.

    Args:
        event_id: The feedback.
        segment_id: The segment that showed it.
        session_id: That segment's session.
        turn_id: The reply.
        rater: Who (``formulas.rater_of``).
        user_id: The rater's user id, if there is one.
        value: The rating, in [-1, 1]; of a claim what it says.
        event_time: When it was given, ms; of a claim that was sent again, the first time.
        closed_at: ``closed_at`` of the revision that showed it, ms.
        request: The review request it is part of.
        anomaly: The filter that found that it stands out, and on what numbers.
        suspended: The numbers for which row and departure do not look at it.
        kind: Of a claim, which it is; None of a rating.
    """

    event_id: str
    segment_id: str
    session_id: str
    turn_id: str
    rater: str
    value: float
    event_time: int
    closed_at: int
    user_id: str | None = None
    request: RequestPlace | None = None
    anomaly: tuple[str, str] | None = None
    suspended: str | None = None
    kind: FeedbackKind | None = None


class Decision(Struct, frozen=True, kw_only=True, gc=False):
    """What a ``review`` decided: about the request it names, else about its reply.

    Args:
        event_id: The review.
        segment_id: The segment that showed it.
        turn_id: The reply it is on.
        upheld: Whether the ratings count in full; else they count nothing.
        event_time: When it was given, ms.
        closed_at: ``closed_at`` of the revision that showed it, ms.
        request_id: The request it names, if any.
    """

    event_id: str
    segment_id: str
    turn_id: str
    upheld: bool
    event_time: int
    closed_at: int
    request_id: str | None = None


T = TypeVar("T", Opinion, Decision)


class History(Struct, frozen=True, kw_only=True, gc=False):
    """What is kept under one key, each in order of event time.

    Args:
        opinions: Ratings.
        decisions: What reviews decided.
        claims: Other feedback, of segments that may be revised.
    """

    opinions: tuple[Opinion, ...] = ()
    decisions: tuple[Decision, ...] = ()
    claims: tuple[Opinion, ...] = ()


# --- What a segment adds ----------------------------------------------------------------------


class Shown(Struct, frozen=True, gc=False):
    """What a segment shows about one reply that somebody gave feedback on.

    Args:
        turn_id: The reply.
        reply: Its text.
        ratings: Each rater's latest rating of it.
        claims: What else each rater claims of it (``formulas.latest_claims``); nothing of a reply
            off the branch, which earns no reward.
        reviews: The reviews on it.
    """

    turn_id: str
    reply: str
    ratings: Mapping[str, tuple[StepFeedback, float]]
    claims: Mapping[tuple[str, FeedbackKind], tuple[StepFeedback, float]]
    reviews: Given


def shown(segment: TrajectorySegment) -> tuple[Shown, ...]:
    """Of every reply with feedback, on the branch or off it, what was given."""
    rater = default_rater(segment)
    found: list[Shown] = []
    for turn_id, reply, feedback, on_branch in _replies(segment):
        if feedback:
            given = readable(feedback)
            found.append(
                Shown(
                    turn_id,
                    reply,
                    latest_ratings(given, rater),
                    latest_claims(given, rater) if on_branch else {},
                    of_kinds(given, REVIEW_KINDS),
                )
            )
    return tuple(found)


def amend(history: History, segment: TrajectorySegment, replies: Sequence[Shown]) -> History:
    """``history`` with what ``segment`` shows in place of what its earlier revision showed.

    Args:
        history: Before.
        segment: The segment.
        replies: What it shows (``shown``).
    """
    if not replies and history == History():
        return history
    decided = _decisions(segment, replies)
    if decided or history.decisions:
        decisions = [d for d in history.decisions if d.segment_id != segment.segment_id]
        decisions += decided
        decisions.sort(key=decision_order)
        history = replace(history, decisions=tuple(decisions))
    return replace(
        history,
        opinions=_amended(history.opinions, segment, _opinions(segment, _ratings(replies))),
        claims=_amended(history.claims, segment, _opinions(segment, _claims(replies))),
    )


def _amended(
    before: tuple[Opinion, ...], segment: TrajectorySegment, new: Sequence[Opinion]
) -> tuple[Opinion, ...]:
    if not (before or new):
        return before
    known = _of_segment(before, segment)
    kept = [o for o in before if o.segment_id != segment.segment_id]
    # What is kept is in order.
    if new:
        kept += [_as_known(o, known.get(_identity_of(o))) for o in new]
        kept.sort(key=opinion_order)
    return tuple(kept)


Identity = str | tuple[str, str, FeedbackKind]
"""The id of a rating; the reply, rater and kind of a claim: sent again it says nothing new."""


def _identity(event_id: str, turn_id: str, rater: str, kind: FeedbackKind | None) -> Identity:
    return event_id if kind is None else (turn_id, rater, kind)


def _identity_of(opinion: Opinion) -> Identity:
    return _identity(opinion.event_id, opinion.turn_id, opinion.rater, opinion.kind)


def _of_segment(opinions: Iterable[Opinion], segment: TrajectorySegment) -> dict[Identity, Opinion]:
    return {_identity_of(o): o for o in opinions if o.segment_id == segment.segment_id}


TELLING = frozenset({FeedbackKind.OUTCOME, FeedbackKind.DIRECTIVE})
"""Claims that say more than that something happened: who decided about one did not see another.
A review must name the request that it decides."""


def _as_known(opinion: Opinion, known: Opinion | None) -> Opinion:
    """``opinion`` with what was found about it when it first showed."""
    if known is None:
        return opinion
    if opinion.kind in TELLING and opinion.event_id != known.event_id:
        return replace(opinion, anomaly=known.anomaly)
    return replace(
        opinion,
        event_time=known.event_time,
        request=known.request,
        anomaly=known.anomaly,
        suspended=known.suspended,
    )


def counted_for(feedback: StepFeedback, owner: str, settings: RewardSettings) -> tuple[str, bool]:
    """Who ``feedback`` is counted for among all, and whether that is a guest (``crowd``).

    Args:
        feedback: In a conversation of ``owner``.
        owner: Its user, else the conversation itself.
        settings: The sources that are believed whom they name.
    """
    rater = rater_of(feedback, owner)
    if rater == owner or feedback.source in settings.verified_sources:
        return rater, False
    return f"{rater} as a guest of {owner}", True


def new_feedback(
    history: History,
    segment: TrajectorySegment,
    replies: Sequence[Shown],
    settings: RewardSettings,
) -> tuple[NewFeedback, ...]:
    """The ratings in ``segment`` that ``history`` has not seen, in the order shown, then claims."""
    known = _of_segment((*history.opinions, *history.claims), segment)
    owner = default_rater(segment)
    found: list[NewFeedback] = []
    for on, who, kind, item, value in (*_ratings(replies), *_claims(replies)):
        if _identity(item.event_id, on.turn_id, who, kind) in known:
            continue
        rater, guest = counted_for(item, owner, settings)
        found.append(
            NewFeedback(
                feedback=item,
                value=value,
                rater=rater,
                turn_id=on.turn_id,
                reply=on.reply,
                sort=_sort(kind),
                guest=guest,
            )
        )
    return tuple(found)


def _sort(kind: FeedbackKind | None) -> str:
    """What a claim of this kind, or a rating, is counted with."""
    return RATING if kind is None else CLAIMS[kind]


def mark_anomalies(history: History, segment_id: str, held: Mapping[str, Anomaly]) -> History:
    """``history`` with what was found about feedback in a segment, by event id, noted on it."""
    if not held:
        return history
    return replace(
        history,
        opinions=_marked(history.opinions, segment_id, held),
        claims=_marked(history.claims, segment_id, held),
    )


def _marked(
    opinions: Sequence[Opinion], segment_id: str, held: Mapping[str, Anomaly]
) -> tuple[Opinion, ...]:
    return tuple(
        replace(o, anomaly=(held[o.event_id].filter, held[o.event_id].reason))
        if o.segment_id == segment_id and o.event_id in held
        else o
        for o in opinions
    )


def turned_negative(
    history: History, segment_id: str, new: Iterable[str], settings: RewardSettings
) -> tuple[str, ...]:
    """New ratings that a per-user filter finds to turn negative, one of each rater: event ids.

    Args:
        history: With the segment in it.
        segment_id: Where the new ratings are.
        new: Their event ids.
        settings: The filters; whether they are on does not matter here.
    """
    fresh = set(new)
    found: list[str] = []
    who = {o.rater for o in history.opinions if o.value < 0 and o.segment_id == segment_id}
    for opinions in _by_rater(history.opinions, who):
        rows = _rows(opinions, history.decisions, settings)
        for index, opinion in enumerate(opinions):
            if (
                opinion.segment_id == segment_id
                and opinion.event_id in fresh
                and opinion.value < 0
                and opinion.anomaly is None
                and (
                    _in_a_row(opinion, rows) is not None
                    or _departs(opinions[: index + 1], history.decisions, settings) is not None
                )
            ):
                found.append(opinion.event_id)
                break
    return tuple(found)


def suspend(history: History, segment_id: str, new: Iterable[str], reason: str) -> History:
    """``history`` with row and departure told to leave these new ratings alone."""
    fresh = set(new)
    return replace(
        history,
        opinions=tuple(
            replace(o, suspended=reason)
            if o.segment_id == segment_id and o.event_id in fresh
            else o
            for o in history.opinions
        ),
    )


def trim(history: History, *, since_ms: int, at_most: int, recalled: Collection[str]) -> History:
    """``history`` without what closed before ``since_ms``, and with the newest of the rest.

    What was found of a rating must stand as long as a revision may show it: one that was
    forgotten would be new, and believed.

    Args:
        history: Before.
        since_ms: What closed earlier is left out.
        at_most: So many ratings, and so many decisions, are kept wherever they are from.
        recalled: The segments of which more are kept: up to ``RECALLED`` times as many in all.
            Of claims only theirs are kept: nothing else goes by them.

    Returns:
        ``history`` itself if nothing is left out.
    """
    opinions = _newest(history.opinions, since_ms, at_most, recalled)
    decisions = _newest(history.decisions, since_ms, at_most, recalled)
    claims = [c for c in history.claims if c.closed_at >= since_ms and c.segment_id in recalled]
    claims = claims[-RECALLED * at_most :]
    before = len(history.opinions), len(history.decisions), len(history.claims)
    if (len(opinions), len(decisions), len(claims)) == before:
        return history
    return History(opinions=tuple(opinions), decisions=tuple(decisions), claims=tuple(claims))


def _newest(items: Sequence[T], since_ms: int, at_most: int, recalled: Collection[str]) -> list[T]:
    kept = [item for item in items if item.closed_at >= since_ms]
    if len(kept) <= at_most:
        return kept
    older = [item for item in kept[:-at_most] if item.segment_id in recalled]
    return (older + kept[-at_most:])[-RECALLED * at_most :]


def opinion_order(opinion: Opinion) -> tuple[int, str, str]:
    """By event time."""
    return opinion.event_time, opinion.segment_id, opinion.event_id


def decision_order(decision: Decision) -> tuple[int, str, str]:
    """By event time."""
    return decision.event_time, decision.segment_id, decision.event_id


def _replies(
    segment: TrajectorySegment,
) -> Iterator[tuple[str, str, tuple[StepFeedback, ...], bool]]:
    """Every reply: turn id, text, feedback, and whether it is on the branch."""
    for step in segment.steps:
        yield step.turn_id, step.reply, step.feedback, True
        for alternative in step.alternatives:
            yield alternative.turn_id, alternative.reply, alternative.feedback, False
    for reply in segment.off_branch:
        yield reply.turn_id, reply.reply, reply.feedback, False


Said = tuple[Shown, str, FeedbackKind | None, StepFeedback, float]
"""A reply, a rater, the kind of a claim (None of a rating), the feedback and what it says."""


def _ratings(replies: Sequence[Shown]) -> list[Said]:
    return [
        (on, who, None, item, value) for on in replies for who, (item, value) in on.ratings.items()
    ]


def _claims(replies: Sequence[Shown]) -> list[Said]:
    return [
        (on, who, kind, item, value)
        for on in replies
        for (who, kind), (item, value) in on.claims.items()
    ]


def _opinions(segment: TrajectorySegment, said: Iterable[Said]) -> list[Opinion]:
    return [
        Opinion(
            event_id=item.event_id,
            segment_id=segment.segment_id,
            session_id=segment.session_id,
            turn_id=on.turn_id,
            rater=who,
            value=value,
            event_time=item.event_time,
            closed_at=segment.closed_at,
            user_id=item.user_id or segment.user_id,
            kind=kind,
        )
        for on, who, kind, item, value in said
    ]


def _decisions(segment: TrajectorySegment, replies: Sequence[Shown]) -> list[Decision]:
    return [
        Decision(
            event_id=item.event_id,
            segment_id=segment.segment_id,
            turn_id=on.turn_id,
            upheld=value > 0,
            event_time=item.event_time,
            closed_at=segment.closed_at,
            request_id=item.attributes.get(REVIEW_ATTRIBUTE),
        )
        for on in replies
        for item, value in on.reviews
    ]


# --- Judging ----------------------------------------------------------------------------------


def judge(history: History, segment_id: str, settings: RewardSettings) -> dict[str, Credibility]:
    """The credibility of each piece of feedback in ``segment_id`` that is not believed in full.

    Returns:
        By feedback event id. What was upheld is listed too, at full weight with its reason.
    """
    beliefs: dict[str, Credibility] = {}
    for claim in history.claims:
        # A review on a reply is about its ratings, and about claims only where they are held.
        if claim.segment_id == segment_id and claim.anomaly is not None:
            belief = _decided(claim, history.decisions) or _anomalous(claim)
            if belief is not None:
                beliefs[claim.event_id] = belief
    who = {o.rater for o in history.opinions if o.segment_id == segment_id}
    for opinions in _by_rater(history.opinions, who):
        rows = _rows(opinions, history.decisions, settings)
        for index, opinion in enumerate(opinions):
            if opinion.segment_id != segment_id:
                continue
            belief = (
                _decided(opinion, history.decisions)
                or _anomalous(opinion)
                or _exempt(opinion)
                or (settings.filter_row and _in_a_row(opinion, rows))
                or (
                    settings.filter_departure
                    and _departs(opinions[: index + 1], history.decisions, settings)
                )
                or None
            )
            if belief is not None:
                beliefs[opinion.event_id] = belief
    return beliefs


def request_reviews(
    history: History, segment: TrajectorySegment, settings: RewardSettings
) -> tuple[History, tuple[ReviewRequest, ...]]:
    """Ask for a review of every row and anomaly with feedback nobody was asked about yet.

    A request is made at the row's last such rating in ``segment``, or, if it has none there,
    at its last one; a review on that reply makes a revision that is scored anew.

    Returns:
        The history with the feedback marked as asked about, and the requests.
    """
    places: dict[tuple[str, str], RequestPlace] = {}
    requests: list[ReviewRequest] = []
    who = {o.rater for o in history.opinions if o.value < 0 or o.anomaly is not None}
    groups = [
        group
        for opinions in _by_rater(history.opinions, who)
        for group in _groups(opinions, history.decisions, settings)
    ]
    claims = [claim for claim in history.claims if claim.anomaly is not None]
    for held in _by_rater(claims, {claim.rater for claim in claims}):
        groups += _anomalies(held)
    for group, what, why in groups:
        waiting = [o for o in group if o.request is None and not _decided(o, history.decisions)]
        if not waiting:
            continue
        at = max(waiting, key=lambda o: (o.segment_id == segment.segment_id, opinion_order(o)))
        request = _request(waiting, at, what, why, segment)
        place = RequestPlace(
            event_id=request.event_id, segment_id=at.segment_id, turn_id=at.turn_id
        )
        places |= {(o.segment_id, o.event_id): place for o in waiting}
        requests.append(request)
    if not places:
        return history, ()
    return replace(
        history,
        opinions=_asked(history.opinions, places),
        claims=_asked(history.claims, places),
    ), tuple(requests)


def _asked(
    opinions: Sequence[Opinion], places: Mapping[tuple[str, str], RequestPlace]
) -> tuple[Opinion, ...]:
    return tuple(
        replace(o, request=places[o.segment_id, o.event_id])
        if (o.segment_id, o.event_id) in places
        else o
        for o in opinions
    )


Group = tuple[tuple[Opinion, ...], str, str]
"""Feedback of one rater to be decided together, with the filter's name and its numbers."""


def _groups(
    opinions: Sequence[Opinion], decisions: Sequence[Decision], settings: RewardSettings
) -> list[Group]:
    """Of one rater's ratings."""
    groups: list[Group] = []
    if settings.filter_row:
        for row in _rows(opinions, decisions, settings):
            why = f"{len(row)} negative ratings in a row by {row[-1].rater}"
            groups.append((row, "row", why))
    return groups + _anomalies(opinions)


def _anomalies(opinions: Iterable[Opinion]) -> list[Group]:
    """What the same filter found among the same sort of feedback in one segment is one group."""
    found: dict[tuple[str, str, str], list[Opinion]] = {}
    for opinion in opinions:
        if opinion.anomaly is not None:
            group = opinion.segment_id, opinion.anomaly[0], _sort(opinion.kind)
            found.setdefault(group, []).append(opinion)
    groups: list[Group] = []
    for (_, name, _), together in found.items():
        numbers = together[-1].anomaly
        assert numbers is not None
        groups.append((tuple(together), name, f"anomaly ({name}): {numbers[1]}"))
    return groups


def _request(
    waiting: Sequence[Opinion], at: Opinion, what: str, why: str, segment: TrajectorySegment
) -> ReviewRequest:
    event_ids = tuple(opinion.event_id for opinion in waiting)
    identity = json.dumps(
        [segment.policy, at.segment_id, at.turn_id, *event_ids], separators=(",", ":")
    )
    return ReviewRequest(
        event_id=hashlib.sha256(identity.encode()).hexdigest()[:32],
        session_id=at.session_id,
        segment_id=at.segment_id,
        turn_id=at.turn_id,
        feedback_event_ids=event_ids,
        reason=f"{why}{UNTIL_DECIDED} a review on reply {at.turn_id} upholds them "
        "(value above 0) or rejects them",
        event_time=segment.closed_at,
        policy=segment.policy,
        user_id=at.user_id,
        attributes={
            FILTER_ATTRIBUTE: what,
            RATER_ATTRIBUTE: at.rater,
            REPLIES_ATTRIBUTE: json.dumps(
                sorted({(o.session_id, o.segment_id, o.turn_id) for o in waiting}),
                separators=(",", ":"),
            ),
        },
    )


def _by_rater(opinions: Sequence[Opinion], raters: Iterable[str]) -> list[tuple[Opinion, ...]]:
    """All opinions of each of these raters, who are in the order of their names."""
    return [tuple([o for o in opinions if o.rater == rater]) for rater in sorted(raters)]


def _decision_on(opinion: Opinion, decisions: Iterable[Decision]) -> Decision | None:
    """The latest decision about ``opinion``; ``decisions`` are in order."""
    found: Decision | None = None
    for decision in decisions:
        if _is_about(decision, opinion):
            found = decision
    return found


def _is_about(decision: Decision, opinion: Opinion) -> bool:
    request = opinion.request
    if decision.request_id is not None:
        return request is not None and request.event_id == decision.request_id
    # Who decided about a rating on the reply may not have seen what is claimed there.
    if opinion.kind in TELLING or (
        opinion.kind is not None and opinion.event_time > decision.event_time
    ):
        return False
    place = (decision.segment_id, decision.turn_id)
    if place == (opinion.segment_id, opinion.turn_id):
        return True
    return request is not None and place == (request.segment_id, request.turn_id)


def _decided(opinion: Opinion, decisions: Iterable[Decision]) -> Credibility | None:
    decision = _decision_on(opinion, decisions)
    if decision is None:
        return None
    what = "upheld" if decision.upheld else "rejected"
    return Credibility(
        weight=1.0 if decision.upheld else 0.0,
        filter="review",
        reason=f"credibility: {_name(opinion)} by {opinion.rater} was {what} by review "
        f"{decision.event_id}",
    )


def _anomalous(opinion: Opinion) -> Credibility | None:
    if opinion.anomaly is None:
        return None
    name, numbers = opinion.anomaly
    return Credibility(
        weight=0.0,
        filter=name,
        reason=f"credibility: {_name(opinion)} is held as an anomaly ({name}) until a review "
        f"decides: {numbers}",
    )


def _name(opinion: Opinion) -> str:
    kind = "rating" if opinion.kind is None else opinion.kind.value
    return f"{kind} {opinion.event_id}"


def _exempt(opinion: Opinion) -> Credibility | None:
    if opinion.suspended is None:
        return None
    return Credibility(
        weight=1.0,
        filter="cohort",
        reason=f"credibility: rating {opinion.event_id} counts in full, the filters of single "
        f"users are suspended: {opinion.suspended}",
    )


def _rows(
    opinions: Sequence[Opinion], decisions: Sequence[Decision], settings: RewardSettings
) -> list[tuple[Opinion, ...]]:
    """Runs of negative ratings that are long enough, from one rater's ordered ``opinions``."""
    if sum(opinion.value < 0 for opinion in opinions) < settings.negatives_in_a_row:
        return []
    runs: list[list[Opinion]] = [[]]
    for opinion in opinions:
        if opinion.anomaly is not None:
            continue
        if opinion.value >= 0 or (decisions and _upheld(opinion, decisions)):
            runs.append([])
        elif opinion.suspended is None:
            runs[-1].append(opinion)
    return [tuple(run) for run in runs if len(run) >= settings.negatives_in_a_row]


def _upheld(opinion: Opinion, decisions: Sequence[Decision]) -> bool:
    decision = _decision_on(opinion, decisions)
    return decision is not None and decision.upheld


def _in_a_row(opinion: Opinion, rows: Iterable[tuple[Opinion, ...]]) -> Credibility | None:
    for row in rows:
        if opinion in row:
            named = ", ".join(o.event_id for o in row[-MAX_NAMED:])
            more = "… " if len(row) > MAX_NAMED else ""
            return Credibility(
                weight=0.0,
                filter="row",
                reason=f"credibility: rating {opinion.event_id} counts nothing until a review "
                f"decides: {len(row)} negative ratings in a row by {opinion.rater} ({more}{named})",
            )
    return None


def _departs(
    opinions: Sequence[Opinion], decisions: Sequence[Decision], settings: RewardSettings
) -> Credibility | None:
    """Whether the rate up to the last of ``opinions`` departs from the one before."""
    earlier = (o for o in reversed(opinions[:-1]) if _counts(o, decisions))
    counted = [opinions[-1], *itertools.islice(earlier, settings.history_ratings - 1)][::-1]
    before, recent = counted[: -settings.rate_window], counted[-settings.rate_window :]
    if len(before) < settings.rate_history_min:
        return None
    now, then = _negatives(recent), _negatives(before)
    # Compared as whole numbers, so that exactly 30% does not depart by a rounding error.
    difference = abs(now * len(before) - then * len(recent))
    if difference <= settings.rate_departure * len(before) * len(recent) + 1e-9:
        return None
    last = opinions[-1]
    weight = settings.rate_departure_weight
    return Credibility(
        weight=weight,
        filter="departure",
        reason=f"credibility: rating {last.event_id} counts {weight:g}: {now} of the last "
        f"{len(recent)} ratings by {last.rater} are negative, {then} of the {len(before)} before, "
        f"more than {settings.rate_departure:.0%} apart",
    )


def _counts(opinion: Opinion, decisions: Sequence[Decision]) -> bool:
    decision = _decision_on(opinion, decisions) if decisions else None
    return opinion.anomaly is None if decision is None else decision.upheld


def _negatives(opinions: Iterable[Opinion]) -> int:
    return sum(opinion.value < 0 for opinion in opinions)


__all__ = [
    "Decision",
    "History",
    "Opinion",
    "RequestPlace",
    "Shown",
    "amend",
    "decision_order",
    "judge",
    "mark_anomalies",
    "new_feedback",
    "opinion_order",
    "request_reviews",
    "shown",
    "suspend",
    "trim",
    "turned_negative",
]
