"""What should become of ratings, read slowly from the rules of ``docs/rewards.md``.

Nothing is kept up from record to record but the records themselves and the requests made: each
time everything is worked out anew from the whole log of a user. No line of it is the machine's.
Rows, departures and reviews of single users; filters over many users must be off, and the
history must hold all there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from streams.contracts import FeedbackKind, TrajectorySegment
from streams.settings import RewardSettings


@dataclass(frozen=True)
class Rating:
    """A rating, or of another kind a claim, as the newest revision of its segment shows it."""

    at: int
    segment: str
    event: str
    rater: str
    value: float
    turn: str
    kind: FeedbackKind = FeedbackKind.RATING

    @property
    def name(self) -> str:
        """Equal for the same rating; and for claims of one kind by one rater about one reply."""
        if self.kind is FeedbackKind.RATING:
            return self.event
        return f"{self.kind} of {self.turn} by {self.rater}"


@dataclass(frozen=True)
class Asked:
    """A request for review, without its id."""

    segment: str
    turn: str
    events: tuple[str, ...]


@dataclass
class Oracle:
    """The log so far, and what was asked about it.

    Args:
        settings: The filters.
    """

    settings: RewardSettings
    log: list[TrajectorySegment] = field(default_factory=list)
    asked: dict[tuple[str, str, str], tuple[str, Asked]] = field(default_factory=dict)

    def accepts(self, segment: TrajectorySegment) -> bool:
        """Whether it is a revision that was not there yet, nor a later one."""
        return all(
            known.revision < segment.revision
            for known in self._of_user(segment)
            if known.segment_id == segment.segment_id
        )

    def apply(self, segment: TrajectorySegment) -> tuple[dict[str, tuple[float, str]], list[Asked]]:
        """What each rating in ``segment`` counts, if not in full, and what is to be asked.

        ``asked_as`` must tell the ids of what was asked before the next call.
        """
        self.log.append(segment)
        ratings = self._ratings(segment)
        rows = [row for rater in self._raters(ratings) for row in self._rows(segment, rater)]
        return self._weights(segment, ratings, rows), self._to_ask(segment, rows)

    def asked_as(self, segment: TrajectorySegment, asked: Asked, request_id: str) -> None:
        """A request was made under this id."""
        for event in asked.events:
            (one,) = [r for r in self._given(segment) if r.event == event]
            self.asked[self._key(segment), one.segment, one.name] = request_id, asked

    # What there is

    @staticmethod
    def _key(segment: TrajectorySegment) -> str:
        return f"{segment.policy} {segment.user_id or segment.session_id}"

    def _of_user(self, segment: TrajectorySegment) -> list[TrajectorySegment]:
        return [known for known in self.log if self._key(known) == self._key(segment)]

    def _newest(self, segment: TrajectorySegment) -> list[TrajectorySegment]:
        latest = {known.segment_id: known for known in self._of_user(segment)}
        return list(latest.values())

    def _given(self, segment: TrajectorySegment) -> list[Rating]:
        """All that requests may be about."""
        return self._ratings(segment)

    def _ratings(self, segment: TrajectorySegment) -> list[Rating]:
        found: list[Rating] = []
        for known in self._newest(segment):
            default = f"user {known.user_id}" if known.user_id else f"session {known.session_id}"
            for step in known.steps:
                last: dict[str, Rating] = {}
                for item in sorted(step.feedback, key=lambda f: f.event_time):
                    value = item.value
                    if item.kind is not FeedbackKind.RATING or value is None or abs(value) > 1:
                        continue
                    rater = f"user {item.user_id}" if item.user_id else default
                    last[rater] = Rating(
                        item.event_time, known.segment_id, item.event_id, rater, value, step.turn_id
                    )
                found += last.values()
        return sorted(found, key=lambda r: (r.at, r.segment, r.event))

    @staticmethod
    def _raters(ratings: Sequence[Rating]) -> list[list[Rating]]:
        names = sorted({r.rater for r in ratings})
        return [[r for r in ratings if r.rater == name] for name in names]

    # What was decided

    def _decision(self, segment: TrajectorySegment, rating: Rating) -> bool | None:
        """Whether the latest review about ``rating`` upheld it; None if there is none."""
        known = self.asked.get((self._key(segment), rating.segment, rating.name))
        places = {(rating.segment, rating.turn)}
        if known is not None:
            places.add((known[1].segment, known[1].turn))
        is_claim = rating.kind is not FeedbackKind.RATING
        reviews = [
            (item.event_time, owner.segment_id, item.event_id, item.value > 0)
            for owner in self._newest(segment)
            for step in owner.steps
            for item in step.feedback
            if item.kind is FeedbackKind.REVIEW
            and item.value is not None
            and (owner.segment_id, step.turn_id) in places
            and not (is_claim and rating.at > item.event_time)
            and not self._must_be_named(rating)
        ]
        return max(reviews)[3] if reviews else None

    @staticmethod
    def _must_be_named(rating: Rating) -> bool:
        """Whether a review on its reply is not about it; these reviews name no request."""
        return rating.kind in (FeedbackKind.OUTCOME, FeedbackKind.DIRECTIVE)

    # The filters

    def _rows(self, segment: TrajectorySegment, ratings: list[Rating]) -> list[list[Rating]]:
        text = "".join(
            "n" if r.value < 0 and self._decision(segment, r) is not True else "." for r in ratings
        )
        rows: list[list[Rating]] = []
        place = 0
        for run in text.split("."):
            if len(run) >= self.settings.negatives_in_a_row:
                rows.append(ratings[place : place + len(run)])
            place += len(run) + 1
        return rows

    def _departs(self, segment: TrajectorySegment, rater: list[Rating], rating: Rating) -> bool:
        until = rater[: rater.index(rating)]
        history = [r for r in until if self._decision(segment, r) is not False] + [rating]
        window = self.settings.rate_window
        recent, before = history[-window:], history[:-window]
        if len(before) < self.settings.rate_history_min:
            return False
        now, then = (sum(r.value < 0 for r in part) / len(part) for part in (recent, before))
        return abs(now - then) > self.settings.rate_departure + 1e-9

    def _weights(
        self, segment: TrajectorySegment, ratings: list[Rating], rows: list[list[Rating]]
    ) -> dict[str, tuple[float, str]]:
        found: dict[str, tuple[float, str]] = {}
        for rating in (r for r in ratings if r.segment == segment.segment_id):
            decision = self._decision(segment, rating)
            mine = [r for r in ratings if r.rater == rating.rater]
            if decision is not None:
                found[rating.event] = (float(decision), "review")
            elif any(rating in row for row in rows):
                found[rating.event] = (0.0, "row")
            elif self._departs(segment, mine, rating):
                found[rating.event] = (self.settings.rate_departure_weight, "departure")
        return found

    def _to_ask(self, segment: TrajectorySegment, rows: list[list[Rating]]) -> list[Asked]:
        found: list[Asked] = []
        for row in rows:
            waiting = [
                r
                for r in row
                if (self._key(segment), r.segment, r.name) not in self.asked
                and self._decision(segment, r) is None
            ]
            if waiting:
                here = [r for r in waiting if r.segment == segment.segment_id] or waiting
                events = tuple(r.event for r in waiting)
                found.append(Asked(here[-1].segment, here[-1].turn, events))
        return found


__all__ = ["Asked", "Oracle", "Rating"]
