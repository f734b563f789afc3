"""What should become of ratings in the light of all others, read slowly from ``docs/rewards.md``.

As ``tests.oracle.reward``, with the filters over many users: floods, bursts, contradictions, the
cohort, and words that are used again. Nothing is counted up. What is kept is the list of all that
showed, in order, with what was found of it then; for each new rating every filter reads the list
from its beginning. Histories must be long enough to hold all there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from streams.contracts import FeedbackKind, StepFeedback, TrajectorySegment
from tests.oracle.reward import Asked, Oracle, Rating

SORTS = {
    FeedbackKind.RATING: "rating",
    FeedbackKind.COPY: "event",
    FeedbackKind.REGENERATE: "event",
    FeedbackKind.ABANDON: "event",
    FeedbackKind.CORRECTION: "signal",
    FeedbackKind.CONFIRMATION: "signal",
    FeedbackKind.REPETITION: "signal",
    FeedbackKind.DIRECTIVE: "signal",
    FeedbackKind.OUTCOME: "outcome",
}
"""What is counted together."""

TELLING = (FeedbackKind.OUTCOME, FeedbackKind.DIRECTIVE)
"""What says more than that something happened."""

KEPT_WINDOWS = 2
"""Windows for which identical feedback and opinions of the same words are remembered."""


@dataclass
class Shown:
    """A rating or claim as it first showed.

    Args:
        at: Place of its segment in the log.
        policy: Whose reply it is about.
        window: The window its segment closed in.
        counted_in: The newest window of the policy then: late ones count there.
        rater: Who gave it; a guest in the name of whose conversation it was given in.
        guest: Whether it is a guest.
        item: The feedback.
        counts: Whether it counts for its source.
        value: What it says.
        words: What the reply is known by.
        turned: Whether it was found to turn negative.
        agrees: Whether it agrees with most others; None where too few or no clear majority spoke.
    """

    at: int
    policy: str
    window: int
    counted_in: int
    rater: str
    item: StepFeedback
    value: float
    words: str
    turned: bool = False
    agrees: bool | None = None
    counts: bool = True
    guest: bool = False

    @property
    def sort(self) -> str:
        return SORTS[self.item.kind]

    @property
    def sign(self) -> int:
        return (self.value > 0) - (self.value < 0)

    @property
    def is_long(self) -> bool:
        """Whether its text has 24 bytes."""
        return len((self.item.text or "").strip().encode()) >= 24

    @property
    def kind_of(self) -> tuple[object, ...]:
        """Equal for identical feedback; without a long text only one rater's is."""
        text = (self.item.text or "").strip()
        tags = tuple(sorted(self.item.tags))
        who = None if self.is_long else self.rater
        return self.policy, self.item.kind, self.value, text, tags, self.item.source, who


@dataclass
class CrowdOracle(Oracle):
    """The log so far, everything that showed, and what was found of it.

    Args:
        settings: The filters.
    """

    alarm: bool = False
    shown: list[Shown] = field(default_factory=list)
    sweeps: list[tuple[int, int]] = field(default_factory=list)
    found: dict[tuple[str, str, str], tuple[str, str]] = field(default_factory=dict)
    alarmed: dict[str, tuple[int, bool]] = field(default_factory=dict)
    replies: dict[str, list[tuple[str, str, tuple[str, ...]]]] = field(default_factory=dict)
    first: dict[tuple[str, str, str], tuple[int, str]] = field(default_factory=dict)

    def apply(self, segment: TrajectorySegment) -> tuple[dict[str, tuple[float, str]], list[Asked]]:
        """See ``Oracle``; ``alarm`` says whether one is raised."""
        self._look(segment)
        ratings = self._ratings(segment)
        rows = [row for rater in self._raters(ratings) for row in self._rows(segment, rater)]
        weights = self._weights(segment, ratings, rows) | self._held_claims(segment)
        return weights, [*self._to_ask(segment, rows), *self._to_ask_of_claims(segment)]

    def _look(self, segment: TrajectorySegment) -> None:
        """Take a segment into the log, and look at what shows in it for the first time."""
        before = self._latest(segment)
        at = len(self.log)
        self.log.append(segment)
        now = {one.name for one in self._given_in(segment)}
        for name in before - now:
            place = self._key(segment), segment.segment_id, name
            for known in (self.found, self.asked, self.first):
                known.pop(place, None)
        for one in self._given_in(segment):
            place = self._key(segment), segment.segment_id, one.name
            _, event = self.first.get(place, (0, ""))
            if one.kind in TELLING and event != one.event:
                # Another order, another instruction: nobody has seen it yet.
                self.asked.pop(place, None)
                self.first.pop(place, None)
            at_first, _ = self.first.get(place, (one.at, ""))
            self.first[place] = at_first, one.event
        places = self._places(segment, before)
        new = [self._show(segment, at, place) for place in places if self._is_seen(place[0])]
        ratings = [one for one in new if one.sort == "rating" and not one.guest]
        self.alarm = self._cohort(segment, ratings) if ratings else False
        newest = max(map(self._window, self.log))
        if newest != max(map(self._window, self.log[:-1]), default=0):
            self.sweeps.append((at, newest))

    # What shows

    def _window(self, segment: TrajectorySegment) -> int:
        return segment.closed_at // self.settings.crowd_window_ms

    def _latest(self, segment: TrajectorySegment) -> set[str]:
        """Names of what the newest revision so far shows."""
        known = [s for s in self._newest(segment) if s.segment_id == segment.segment_id]
        return {one.name for s in known for one in self._given_in(s)}

    def _given(self, segment: TrajectorySegment) -> list[Rating]:
        return self._ratings(segment) + self._claims(segment)

    def _given_in(self, segment: TrajectorySegment) -> list[Rating]:
        return [r for r in self._given(segment) if r.segment == segment.segment_id]

    def _claims(self, segment: TrajectorySegment) -> list[Rating]:
        """Of each kind the latest claim by each rater about each reply."""
        last: dict[tuple[str, str], Rating] = {}
        for known in self._newest(segment):
            for step in known.steps:
                for item in sorted(step.feedback, key=lambda f: f.event_time):
                    if SORTS.get(item.kind, "rating") == "rating":
                        continue
                    if item.kind is FeedbackKind.OUTCOME and abs(item.value or 0.0) > 1:
                        continue
                    rater, value = self._rater(known, item), item.value or 0.0
                    one = Rating(
                        item.event_time, known.segment_id, item.event_id, rater, value,
                        step.turn_id, item.kind,
                    )  # fmt: skip
                    place = self._key(known), known.segment_id, one.name
                    at_first, event = self.first.get(place, (one.at, ""))
                    if one.kind not in TELLING or event == one.event:
                        one = replace(one, at=at_first)
                    last[known.segment_id, one.name] = one
        return sorted(last.values(), key=lambda r: (r.at, r.segment, r.event))

    def _places(
        self, segment: TrajectorySegment, known: set[str]
    ) -> list[tuple[StepFeedback, str, str]]:
        """Feedback, turn and reply of all that is new, ratings first, in the order shown."""
        found: list[tuple[StepFeedback, str, str]] = []
        items = {
            (step.turn_id, item.event_id): (item, step)
            for step in segment.steps
            for item in step.feedback
        }
        new = [one for one in self._given_in(segment) if one.name not in known]
        for is_claim in (False, True):
            for step in segment.steps:
                mine = [
                    one
                    for one in new
                    if one.turn == step.turn_id
                    and (one.kind is not FeedbackKind.RATING) is is_claim
                ]
                for one in mine:
                    item, _ = items[step.turn_id, one.event]
                    found.append((item, step.turn_id, step.reply))
        return found

    @classmethod
    def _rater(cls, segment: TrajectorySegment, item: StepFeedback) -> str:
        return f"user {item.user_id}" if item.user_id else cls._owner(segment)

    @staticmethod
    def _owner(segment: TrajectorySegment) -> str:
        return f"user {segment.user_id}" if segment.user_id else f"session {segment.session_id}"

    def _is_seen(self, item: StepFeedback) -> bool:
        believed = item.source in self.settings.verified_sources
        return not (believed and item.kind is FeedbackKind.OUTCOME)

    def _show(
        self, segment: TrajectorySegment, at: int, place: tuple[StepFeedback, str, str]
    ) -> Shown:
        item, turn_id, reply = place
        owner, name = self._owner(segment), self._rater(segment, item)
        guest = name != owner and item.source not in self.settings.verified_sources
        window = self._window(segment)
        plain = " ".join(reply.split()).casefold()
        alive = self._alive_policy(segment.policy, SORTS[item.kind], at)
        counted_in = max([window, *(s.counted_in for s in alive)])
        one = Shown(
            at=at,
            policy=segment.policy,
            window=window,
            counted_in=counted_in,
            rater=f"{name} at {owner}" if guest else name,
            guest=guest,
            item=item,
            value=item.value or 0.0,
            words=plain if len(plain) >= 20 else f"turn {turn_id}",
        )
        one.agrees = self._agrees(one) if one.sort == "rating" and not one.guest else None
        self.shown.append(one)
        found = self._flood(one) or self._burst(one)
        one.counts = not found
        found = found or self._flood_of_source(one) or self._contradiction(one)
        if found:
            (name,) = {r.name for r in self._given_in(segment) if r.event == item.event_id}
            self.found[self._key(segment), segment.segment_id, name] = ("held", found)
        return one

    # Remembering

    def _alive(self, entries: Sequence[Shown], at: int, windows: str = "window") -> list[Shown]:
        """Those since what was remembered of such was last forgotten.

        It is forgotten whenever the partition's time enters a window more than ``KEPT_WINDOWS``
        behind which the last one lies.
        """
        start = 0
        for place, newest in self.sweeps:
            past = [n for n, s in enumerate(entries) if s.at <= place < at]
            if past and newest - KEPT_WINDOWS > getattr(entries[past[-1]], windows):
                start = max(start, past[-1] + 1)
        return list(entries[start:])

    def _alive_policy(self, policy: str, sort: str, at: int) -> list[Shown]:
        mine = [s for s in self.shown if (s.policy, s.sort) == (policy, sort) and not s.guest]
        return self._alive(mine, at, "counted_in")

    # The filters

    def _flood(self, one: Shown) -> str:
        settings = self.settings
        if not settings.filter_flood:
            return ""
        everyone = self._alive_policy(one.policy, one.sort, one.at)
        now, before = one.counted_in, one.counted_in - 1
        recent = [s for s in everyone if s.counted_in in (now, before)]
        # A rater's own two windows are those they rated in.
        sort = [s for s in self.shown if (s.policy, s.sort) == (one.policy, one.sort)]
        mine = [s for s in sort if s.rater == one.rater]
        own = [s for s in mine if s.counted_in in (now, before)]
        raters = {s.rater for s in recent} - {one.rater}
        theirs = [s for s in recent if s.rater != one.rater]
        average = len(theirs) / len(raters) if raters else 0.0
        factor = settings.flood_factor if one.sort == "rating" else settings.flood_claims_factor
        if (
            len(raters) >= settings.flood_raters_min
            and len(own) >= settings.flood_ratings_min
            and len(own) > factor * average
        ):
            return "flood"
        return ""

    def _flood_of_source(self, one: Shown) -> str:
        settings = self.settings
        if one.sort == "outcome" or not settings.filter_flood:
            return ""
        source = [
            s
            for s in self.shown
            if (s.policy, s.sort, s.item.source) == (one.policy, one.sort, one.item.source)
            and s.counts
        ]
        counts: dict[int, int] = {}
        for s in source:
            newest = max([s.window, *counts])
            counts[newest] = counts.get(newest, 0) + 1
        newest = max(counts)
        finished, usual = self._usual(counts, newest)
        if (
            finished >= settings.flood_source_windows_min
            and counts[newest] >= settings.flood_ratings_min
            and counts[newest] > settings.flood_factor * usual
        ):
            return "flood"
        return ""

    def _usual(self, counts: dict[int, int], newest: int) -> tuple[int, float]:
        """Windows with any, and what is usual: floods count only up to what is none.

        It follows what is more within six windows, what is less within a week of them.
        """
        average, finished = 0.0, 0
        for window in sorted(set(counts) - {newest}):
            finished += 1
            sent = float(counts[window])
            if finished > self.settings.flood_source_windows_min:
                least, factor = self.settings.flood_ratings_min, self.settings.flood_factor
                sent = min(sent, max(least, factor * average))
            average += (sent - average) / min(finished, 6 if sent > average else 168)
        return finished, average

    def _burst(self, one: Shown) -> str:
        alike = [s for s in self.shown if s.kind_of == one.kind_of]
        if one.sort != "rating":
            # Of one segment the first.
            alike = [s for n, s in enumerate(alike) if s.at not in {a.at for a in alike[:n]}]
            if one not in alike:
                return ""
        times = [s.item.event_time for s in self._alive(alike, one.at)]
        enough = self.settings.burst_texts if one.is_long else self.settings.burst_ratings
        last = times[-enough:]
        near = [t for t in last if abs(t - one.item.event_time) <= self.settings.burst_window_ms]
        is_one = self.settings.filter_burst and one.sort != "outcome" and len(near) >= enough
        return "burst" if is_one else ""

    def _agrees(self, one: Shown) -> bool | None:
        said = [
            s
            for s in self.shown
            if (s.policy, s.words) == (one.policy, one.words) and s.sort == "rating" and not s.guest
        ]
        signs: dict[str, int] = {}
        for s in self._alive(said, one.at):
            signs.pop(s.rater, None)
            signs[s.rater] = s.sign
        others = [sign for rater, sign in list(signs.items())[-32:] if rater != one.rater]
        if len(others) < self.settings.contradiction_others_min or not one.sign:
            return None
        for sign in (1, -1):
            if others.count(sign) >= 0.75 * len(others):
                return one.sign == sign
        return None

    def _contradiction(self, one: Shown) -> str:
        settings = self.settings
        if not settings.filter_contradiction or one.sort != "rating" or one.guest:
            return ""
        agreed = against = 0
        newest = -1
        for s in self.shown:
            if (s.policy, s.rater, s.sort) != (one.policy, one.rater, "rating"):
                continue
            if newest >= 0 and s.counted_in > newest + 1:
                agreed, against = agreed // 2, against // 2
            newest = s.counted_in
            agreed += s.agrees is True
            against += s.agrees is False
        compared = agreed + against
        if (
            compared < settings.contradiction_ratings_min
            or against < settings.contradiction_share * compared
        ):
            return ""
        return "contradiction"

    # The cohort

    def _cohort(self, segment: TrajectorySegment, new: Sequence[Shown]) -> bool:
        """Find who turned negative, and suspend the filters of single users if many did."""
        settings, policy = self.settings, segment.policy
        by_event = {s.item.event_id: s for s in new}
        mine = self._ratings(segment)
        for rater in self._raters(mine):
            rows = self._rows(segment, rater)
            for rating in rater:
                one = by_event.get(rating.event)
                if (
                    one is not None
                    and rating.segment == segment.segment_id
                    and rating.value < 0
                    and self._found(segment, rating) is None
                    and (
                        any(rating in row for row in rows) or self._departs(segment, rater, rating)
                    )
                ):
                    one.turned = True
        everyone = self._alive_policy(policy, "rating", len(self.log) - 1)
        newest = everyone[-1].counted_in
        turned = self._in_two_windows(everyone, newest, turned=True)
        active = self._in_two_windows(everyone, newest)
        suspended = (
            settings.cohort_suspension
            and len(turned) >= settings.cohort_raters_min
            and len(turned) >= settings.cohort_share * max(1, len(active))
        )
        if suspended:
            for one in new:
                place = self._key(segment), segment.segment_id, one.item.event_id
                self.found.setdefault(place, ("suspended", "cohort"))
        at = len(self.log) - 1
        known_at, was = self.alarmed.get(policy, (-1, False))
        forgotten = any(
            0 <= known_at <= place < at
            and sweep - KEPT_WINDOWS
            > max(
                s.counted_in
                for s in self.shown
                if (s.policy, s.sort, s.guest) == (policy, "rating", False) and s.at <= place
            )
            for place, sweep in self.sweeps
        )
        self.alarmed[policy] = at, suspended
        return suspended and (forgotten or not was)

    @staticmethod
    def _in_two_windows(
        everyone: Sequence[Shown], newest: int, *, turned: bool = False
    ) -> set[str]:
        return {
            s.rater
            for s in everyone
            if s.counted_in in (newest, newest - 1) and (s.turned or not turned)
        }

    # What follows for the ratings of a user

    def _found(self, segment: TrajectorySegment, rating: Rating) -> tuple[str, str] | None:
        return self.found.get((self._key(segment), rating.segment, rating.event))

    def _rows(self, segment: TrajectorySegment, ratings: list[Rating]) -> list[list[Rating]]:
        return super()._rows(segment, [r for r in ratings if self._in_sequence(segment, r)])

    def _in_sequence(self, segment: TrajectorySegment, rating: Rating) -> bool:
        """Whether a row goes on or ends with it; else it is as if it were not there."""
        found = self._found(segment, rating)
        if found is None:
            return True
        if found[0] == "held":
            return False
        return rating.value >= 0 or self._decision(segment, rating) is True

    def _departs(self, segment: TrajectorySegment, rater: list[Rating], rating: Rating) -> bool:
        counted = [
            r
            for r in rater
            if r == rating
            or self._decision(segment, r) is not None
            or (self._found(segment, r) or ("", ""))[0] != "held"
        ]
        return super()._departs(segment, counted, rating)

    def _weights(
        self, segment: TrajectorySegment, ratings: list[Rating], rows: list[list[Rating]]
    ) -> dict[str, tuple[float, str]]:
        weights = super()._weights(segment, ratings, rows)
        for rating in ratings:
            found = self._found(segment, rating)
            here = rating.segment == segment.segment_id
            if here and found is not None and self._decision(segment, rating) is None:
                weights[rating.event] = (float(found[0] == "suspended"), found[1])
        return weights

    def _to_ask(self, segment: TrajectorySegment, rows: list[list[Rating]]) -> list[Asked]:
        groups: list[list[Rating]] = []
        for rater in self._raters(self._ratings(segment)):
            groups += [row for row in rows if row[0].rater == rater[0].rater]
            held: dict[tuple[str, str], list[Rating]] = {}
            for rating in rater:
                found = self._found(segment, rating)
                if found is not None and found[0] == "held":
                    held.setdefault((rating.segment, found[1]), []).append(rating)
            groups += held.values()
        return super()._to_ask(segment, groups)

    # What follows for the claims of a user

    def _is_held(self, segment: TrajectorySegment, claim: Rating) -> bool:
        return (self._key(segment), claim.segment, claim.name) in self.found

    def _held_claims(self, segment: TrajectorySegment) -> dict[str, tuple[float, str]]:
        """What claims in ``segment`` count that are held, or were until they were decided."""
        weights: dict[str, tuple[float, str]] = {}
        for claim in self._claims(segment):
            if claim.segment == segment.segment_id and self._is_held(segment, claim):
                _, name = self.found[self._key(segment), claim.segment, claim.name]
                decision = self._decision(segment, claim)
                weights[claim.event] = (
                    (0.0, name) if decision is None else (float(decision), "review")
                )
        return weights

    def _to_ask_of_claims(self, segment: TrajectorySegment) -> list[Asked]:
        groups: list[list[Rating]] = []
        for rater in self._raters(self._claims(segment)):
            held: dict[tuple[str, str, str], list[Rating]] = {}
            for claim in rater:
                if self._is_held(segment, claim):
                    _, name = self.found[self._key(segment), claim.segment, claim.name]
                    held.setdefault((claim.segment, name, SORTS[claim.kind]), []).append(claim)
            groups += held.values()
        return super()._to_ask(segment, groups)

    # Words used again

    def repeated(self, segment: TrajectorySegment) -> dict[str, int]:
        """In how many other sessions the words, the opening or the end of each reply stood."""
        latest = self.replies.setdefault(segment.policy, [])
        counts: dict[str, int] = {}
        added: list[tuple[str, str, tuple[str, ...]]] = []
        for step in {step.turn_id: step for step in segment.steps}.values():
            parts = self._parts(step.reply.split())
            others = [
                {
                    s
                    for _, s, known in latest
                    if s != segment.session_id and known[n : n + 1] == (p,)
                }
                for n, p in enumerate(parts)
            ]
            counts[step.turn_id] = max(map(len, others), default=0)
            seen = any(t == step.turn_id and s == segment.session_id for t, s, _ in latest)
            if parts and not seen:
                added.append((step.turn_id, segment.session_id, parts))
        self.replies[segment.policy] = [*latest, *added][-self.settings.diversity_replies :]
        return {turn_id: count for turn_id, count in counts.items() if count}

    @staticmethod
    def _parts(words: list[str]) -> tuple[str, ...]:
        if len(words) < 6:
            return ()
        whole = " ".join(words)
        return (
            (whole,) if len(words) <= 12 else (whole, " ".join(words[:12]), " ".join(words[-12:]))
        )


__all__ = ["CrowdOracle", "Shown"]
