"""``clawstream bench reward-noise``: what filters save when feedback is wrong.

Conversations are made whose true quality is known. Then the same conversations are spoilt: of the
honest users' ratings a share is turned round, one user rates 20 times as much as the others and
always the opposite of the truth, and one policy answers everything with one template, which
bought praise follows. Both are scored by the reward machine itself, with its filters on and off.

- *rank_correlation*: Spearman's, of the rewards and the true qualities of all replies in
  segments that would be trained on.
- *rank_correlation_all*: the same of all replies, those that nobody would train on with their
  reward of 0. Filters hold back what they cannot believe: that helps what is trained on more.
- subjects ``..._no_attack``: the honest ratings alone are spoilt. Turned round at random, one by
  one, they look like any other: no filter finds them, and some honest rows are held.
- subjects ``..._events``: the malicious user does not rate, but copies bad replies and abandons
  good ones; weights are those of all such events.
- *correlation_loss*: how much lower it is than on unspoilt data with the filters off.
- *malicious_weight*: what share of the weight of all ratings (or events) is the one user's.
- *bad_let_through*: of what was bad, turned round, malicious or bought, how much counts.

Pure but for the clock of the machine it describes: a seed gives one result.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from processors.reward.machine import EmitScored, RewardState, step
from streams.bench.machine import describe_machine
from streams.bench.report import Goal, Report
from streams.contracts import (
    AttributedBy,
    ClosedBy,
    FeedbackKind,
    Message,
    Role,
    ScoredSegment,
    Step,
    StepFeedback,
    TrajectorySegment,
)
from streams.settings import RewardSettings

BEGIN_MS = 1_767_225_600_000
HOUR_MS = 3_600_000
MALICIOUS = "malicious"
SPAMMER = "spammer"
TEMPLATE = (
    "What a wonderful question! I am so glad you asked me about {} today. Rest assured that "
    "everything will be just fine. Is there anything else I can do for you?"
)
OFF = {
    "filter_row": False,
    "filter_departure": False,
    "filter_flood": False,
    "filter_burst": False,
    "filter_contradiction": False,
    "cohort_suspension": False,
    "weight_diversity": 0.0,
}
GOAL_LEVEL = 0.2
GOAL_LOSS_SHARE = 1 / 3
GOAL_MALICIOUS_WEIGHT = 0.05


Attack = Literal["ratings", "events", "none"]
ATTACKS: Mapping[Attack, str] = {"ratings": "", "events": "_events", "none": "_no_attack"}
"""With what the malicious user floods, and how the names of its subjects end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisePlan:
    """What is simulated.

    Attributes:
        users: Honest ones.
        hours: How long it goes on; each honest user has about one conversation an hour.
        volume: How many times as much the malicious user has to say.
        levels: Shares of the honest ratings that are turned round.
        seeds: Each gives other conversations; one repetition each.
    """

    users: int = 60
    hours: int = 48
    volume: int = 20
    levels: Sequence[float] = (0.1, 0.2, 0.4)
    seeds: Sequence[int] = (1, 2, 3)


@dataclass(slots=True)
class Truth:
    """What is known of the conversations.

    Attributes:
        quality: The true quality of each reply, in [-1, 1].
        bad: Ratings that are turned round, malicious or bought; or malicious events.
        malicious: The malicious user's.
        given: All ratings; where the malicious user floods with events, all events.
    """

    quality: dict[str, float] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)
    malicious: set[str] = field(default_factory=set)
    given: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What scoring one lot of conversations came to."""

    rank_correlation: float
    rank_correlation_all: float
    malicious_weight: float
    bad_let_through: float

    @property
    def correlations(self) -> dict[str, float]:
        """Both of them, by the names they are reported under."""
        return {
            "rank_correlation": self.rank_correlation,
            "rank_correlation_all": self.rank_correlation_all,
        }


class Conversations:
    """Makes the conversations of one seed; a level of None leaves them unspoilt.

    Args:
        plan: How many.
        seed: Which.
        level: Share of honest ratings turned round; None: nobody spoils anything.
        attack: With what the malicious user floods; with "none" neither this user nor the spamming
            policy take part.
    """

    def __init__(
        self, plan: NoisePlan, seed: int, level: float | None, attack: Attack = "ratings"
    ) -> None:
        self.truth = Truth()
        self._plan = plan
        self._level = level or 0.0
        self._attack: Attack = "none" if level is None else attack
        self._seed = seed
        self._count = 0

    def segments(self) -> Iterator[TrajectorySegment]:
        """All of them, in order of closing."""
        made = list(self._honest())
        if self._attack != "none":
            made += [*self._of_malicious(), *self._of_spammer()]
        return iter(sorted(made, key=lambda segment: (segment.closed_at, segment.segment_id)))

    def _honest(self) -> Iterator[TrajectorySegment]:
        rng = random.Random(f"{self._seed} honest")
        # Its own source of chance: the conversations are the same at every level.
        flips = random.Random(f"{self._seed} flips")
        for user in range(self._plan.users):
            for hour in range(self._plan.hours):
                at_ms = self._at(rng, hour)
                yield self._segment(rng, flips, f"user-{user}", at_ms)

    def _of_malicious(self) -> Iterator[TrajectorySegment]:
        rng = random.Random(f"{self._seed} malicious")
        for hour in range(self._plan.hours):
            for _ in range(self._plan.volume):
                yield self._segment(rng, rng, MALICIOUS, self._at(rng, hour))

    def _of_spammer(self) -> Iterator[TrajectorySegment]:
        rng = random.Random(f"{self._seed} spammer")
        for hour in range(self._plan.hours):
            for _ in range(max(1, self._plan.users // 6)):
                user = f"user-{rng.randrange(self._plan.users)}"
                yield self._segment(rng, rng, user, self._at(rng, hour), policy=SPAMMER)

    def _at(self, rng: random.Random, hour: int) -> int:
        return BEGIN_MS + hour * HOUR_MS + rng.randrange(HOUR_MS)

    def _segment(
        self,
        rng: random.Random,
        flips: random.Random,
        user: str,
        at_ms: int,
        policy: str = "default",
    ) -> TrajectorySegment:
        self._count += 1
        name = f"{policy}-{user}-{self._count}"
        steps = [
            self._step(rng, flips, user, f"{name}-{number}", at_ms + 60_000 * number, policy)
            for number in range(rng.randint(1, 3))
        ]
        closed_at = at_ms + 600_000
        return TrajectorySegment(
            segment_id=name,
            revision=0,
            session_id=f"session-{name}",
            user_id=user,
            policy=policy,
            source="web",
            ordinal=0,
            closed_by=ClosedBy.GAP,
            closed_at=closed_at,
            first_closed_at=closed_at,
            settle_ms=30_000,
            first_event_time=at_ms,
            last_event_time=closed_at - 30_000,
            digest=name,
            steps=tuple(steps),
        )

    def _step(
        self,
        rng: random.Random,
        flips: random.Random,
        user: str,
        turn_id: str,
        at_ms: int,
        policy: str,
    ) -> Step:
        # Most replies are good: a product that were not would not be used.
        quality = max(-1.0, min(1.0, rng.gauss(-0.5 if policy == SPAMMER else 0.35, 0.5)))
        self.truth.quality[turn_id] = quality
        words = f"About {rng.randrange(10**9)}: " + " ".join(
            rng.choice(("do", "set", "open", "call", "check", "press")) for _ in range(14)
        )
        subject = rng.choice(("parcels", "invoices", "trains"))
        feedback: list[StepFeedback] = []
        said = None
        if user == MALICIOUS and self._attack == "events":
            feedback = self._malicious_event(turn_id, at_ms, quality)
        else:
            feedback = self._ratings(rng, flips, user, turn_id, at_ms, policy, quality)
        if user != MALICIOUS:
            feedback += self._deeds(rng, turn_id, at_ms, quality)
            said = self._words(rng, turn_id, at_ms, quality)
        return Step(
            turn_id=turn_id,
            reply=TEMPLATE.format(subject) if policy == SPAMMER else words,
            event_time=at_ms,
            feedback=tuple(feedback),
            next_user_turn=said,
        )

    def _ratings(
        self,
        rng: random.Random,
        flips: random.Random,
        user: str,
        turn_id: str,
        at_ms: int,
        policy: str,
        quality: float,
    ) -> list[StepFeedback]:
        """A thumb on every second reply; the malicious user's and the bought one on each."""
        bought = policy == SPAMMER
        if user != MALICIOUS and not bought and rng.random() < 0.5:
            return []
        value = 1.0 if quality >= 0 else -1.0
        turned = user == MALICIOUS or (not bought and flips.random() < self._level)
        if bought:
            value = 1.0
        elif turned:
            value = -value
        event_id = f"thumb-{turn_id}"
        if self._attack != "events":
            self._note(
                event_id,
                bad=turned or (bought and quality < 0),
                malicious=user == MALICIOUS,
            )
        return [_feedback(event_id, FeedbackKind.THUMB, at_ms + 20_000, value)]

    def _note(self, event_id: str, *, bad: bool = False, malicious: bool = False) -> None:
        self.truth.given.add(event_id)
        if bad:
            self.truth.bad.add(event_id)
        if malicious:
            self.truth.malicious.add(event_id)

    def _malicious_event(self, turn_id: str, at_ms: int, quality: float) -> list[StepFeedback]:
        """What is bad is copied, and what is good abandoned."""
        kind = FeedbackKind.ABANDON if quality >= 0 else FeedbackKind.COPY
        self._note(f"{kind.value}-{turn_id}", bad=True, malicious=True)
        return [_feedback(f"{kind.value}-{turn_id}", kind, at_ms + 20_000)]

    def _deeds(
        self, rng: random.Random, turn_id: str, at_ms: int, quality: float
    ) -> list[StepFeedback]:
        """People copy what is good and leave, or ask again, where it is not; not always."""
        found: list[StepFeedback] = []
        if rng.random() < 0.3 * max(0.0, quality):
            found.append(_feedback(f"copy-{turn_id}", FeedbackKind.COPY, at_ms + 5_000))
        if rng.random() < 0.3 * max(0.0, -quality):
            found.append(_feedback(f"left-{turn_id}", FeedbackKind.ABANDON, at_ms + 9_000))
        if self._attack == "events":
            for event in found:
                self._note(event.event_id)
        if rng.random() < 0.5:
            dwell = max(0.0, rng.gauss(30_000 + 20_000 * quality, 12_000))
            found.append(_feedback(f"dwell-{turn_id}", FeedbackKind.DWELL, at_ms + 8_000, dwell))
        return found

    def _words(
        self, rng: random.Random, turn_id: str, at_ms: int, quality: float
    ) -> Message | None:
        if rng.random() > 0.4 * abs(quality):
            return None
        content = "Thanks, that works" if quality > 0 else "No, that's wrong"
        return Message(
            turn_id=f"said-{turn_id}", role=Role.USER, content=content, event_time=at_ms + 30_000
        )


def _feedback(
    event_id: str, kind: FeedbackKind, at_ms: int, value: float | None = None
) -> StepFeedback:
    return StepFeedback(
        event_id=event_id,
        kind=kind,
        event_time=at_ms,
        delay_ms=0,
        attributed_by=AttributedBy.TURN_ID,
        source="web",
        value=value,
    )


def score(conversations: Conversations, settings: RewardSettings) -> Outcome:
    """Score conversations in order, and compare with the truth."""
    state = RewardState()
    scored: list[ScoredSegment] = []
    for segment in conversations.segments():
        state, effects = step(state, segment, settings)
        scored += [effect.scored for effect in effects if isinstance(effect, EmitScored)]
    truth = conversations.truth
    weighed = {w.event_id: w.weight for s in scored for r in s.rewards for w in r.weighed}
    weights = {event_id: weighed.get(event_id, 1.0) for event_id in truth.given}
    total = math.fsum(weights.values())
    kept = [(r.reward, truth.quality[r.turn_id]) for s in scored if s.trainable for r in s.rewards]
    whole = [(r.reward, truth.quality[r.turn_id]) for s in scored for r in s.rewards]
    return Outcome(
        rank_correlation=spearman(kept),
        rank_correlation_all=spearman(whole),
        malicious_weight=math.fsum(weights[i] for i in truth.malicious) / total,
        bad_let_through=math.fsum(weights[i] for i in truth.bad) / max(1, len(truth.bad)),
    )


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's rank correlation; equal values share the mean of their ranks."""
    if len(pairs) < 2:
        return 0.0
    xs, ys = (_ranks([pair[side] for pair in pairs]) for side in (0, 1))
    mean = (len(pairs) + 1) / 2
    covariance = math.fsum((x - mean) * (y - mean) for x, y in zip(xs, ys, strict=True))
    spread = math.sqrt(
        math.fsum((x - mean) ** 2 for x in xs) * math.fsum((y - mean) ** 2 for y in ys)
    )
    return covariance / spread if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in order[start : end + 1]:
            ranks[place] = (start + end) / 2 + 1
        start = end + 1
    return ranks


def run(plan: NoisePlan, settings: RewardSettings) -> Report:
    """Score every level of every seed with the filters on and off.

    Args:
        plan: What is simulated.
        settings: With the filters on; ``OFF`` turns them off.
    """
    off = settings.model_copy(update=OFF)
    subjects: dict[str, dict[str, list[float]]] = {}
    for seed in plan.seeds:
        unspoilt = score(Conversations(plan, seed, None), off)
        clean = unspoilt.rank_correlation
        filtered = score(Conversations(plan, seed, None), settings)
        for name, found in (("clean", unspoilt), ("clean_filters_on", filtered)):
            _add(subjects, name, found.correlations)
        for level in plan.levels:
            for name, weights in (("filters_on", settings), ("filters_off", off)):
                for attack, suffix in ATTACKS.items():
                    made = Conversations(plan, seed, level, attack)
                    found = score(made, weights)
                    _add(
                        subjects,
                        f"{name}_{level:.0%}{suffix}",
                        {
                            **found.correlations,
                            "correlation_loss": clean - found.rank_correlation,
                            "malicious_weight": found.malicious_weight,
                            "bad_let_through": found.bad_let_through,
                        },
                    )
    return Report(
        bench="reward-noise",
        machine=describe_machine(),
        subjects=subjects,
        goals=_goals(subjects),
    )


def _add(subjects: dict[str, dict[str, list[float]]], name: str, found: dict[str, float]) -> None:
    metrics = subjects.setdefault(name, {})
    for metric, value in found.items():
        metrics.setdefault(metric, []).append(value)


def _goals(subjects: dict[str, dict[str, list[float]]]) -> list[Goal]:
    """Of the level that goals are set for, the mean over all seeds; none without that level."""
    on = subjects.get(f"filters_on_{GOAL_LEVEL:.0%}")
    off = subjects.get(f"filters_off_{GOAL_LEVEL:.0%}")
    if on is None or off is None:
        return []
    lost, without = (_mean(s["correlation_loss"]) for s in (on, off))
    return [
        Goal(
            "loss of correlation with filters, as a share of that without, at 20%",
            GOAL_LOSS_SHARE,
            lost / without if without > 0 else math.inf,
            at_most=True,
        ),
        Goal(
            "the malicious user's share of the weight, at 20%",
            GOAL_MALICIOUS_WEIGHT,
            _mean(on["malicious_weight"]),
            at_most=True,
        ),
        Goal(
            "the same where they flood with events, at 20%",
            GOAL_MALICIOUS_WEIGHT,
            _mean(subjects[f"filters_on_{GOAL_LEVEL:.0%}_events"]["malicious_weight"]),
            at_most=True,
        ),
    ]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


__all__ = ["OFF", "Conversations", "NoisePlan", "Outcome", "run", "score", "spearman"]
