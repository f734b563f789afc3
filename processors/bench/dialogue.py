"""Makes conversations for benches: turns and feedback as gateways write them. Pure.

What is in them, as shares of what could have it (:class:`DialoguePlan` names none of these,
so that every bench and every machine meets the same dialogue):

- messages of 200 to 400 bytes; a quarter of the replies carry 40 to 90 token ids with their
  log-probabilities, as a policy server that returns them does;
- feedback for a third of the replies, 2 to 40 s after them, a tenth of it 2 to 9 minutes
  after; seven tenths names its reply, the rest is attributed by time; a twentieth is changed
  by a second event that supersedes it;
- half of the conversations end with ``session_done``, a tenth pause for long, one reply in
  fifty is regenerated;
- one record in fifty arrives up to 5 s late, so out of order; one in two hundred twice.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from streams.contracts import DialogueTurn, FeedbackEvent, FeedbackKind, Role, Sampling

WITH_TOKENS = 0.25
WITH_FEEDBACK = 1 / 3
LATE_FEEDBACK = 0.1
BY_TURN_ID = 0.7
SUPERSEDED = 0.05
DONE = 0.5
PAUSED = 0.1
REGENERATED = 0.02
MEAN_EXCHANGES = 4.0
OUT_OF_ORDER = 0.02
TWICE = 0.005

REPLY_MS = (500, 6_000)
_POOL_WORDS = 40_000
_POOL_TOKENS = 20_000
_VOCABULARY = 49_152
_WORDS = (
    "about after again answer because before better between book change choose city clear could "
    "country different does early enough every example explain family find first from garden "
    "give have help house idea important instead keep kind know language large later learn "
    "leave letter light line listen little long look make many maybe mean morning move much "
    "music name need never next night number often once only open order other paper people "
    "perhaps place please point possible question quick rather reason remember right river same "
    "school second seem several short should show simple slowly small something sometimes soon "
    "sound start still story street such table take than thank their there think three through "
    "time today together try under understand until very wait walk want water week well what "
    "when where which while white whole why window with without word work world would write "
    "wrong year yes yesterday young"
)
WORDS = tuple(_WORDS.split())
"""What texts of benches are made of."""
_KINDS = (
    (FeedbackKind.THUMB, 60),
    (FeedbackKind.RATING, 15),
    (FeedbackKind.CORRECTION, 10),
    (FeedbackKind.DWELL, 8),
    (FeedbackKind.COPY, 4),
    (FeedbackKind.FOLLOW_UP, 3),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DialoguePlan:
    """How much dialogue, and how dense.

    Attributes:
        talking: Conversations that go on at any time; when one ends another begins.
        begin_ms: When the first ones begin, Unix milliseconds.
        think_ms: The mean time a user takes for the next message.
        seed: Of the random choices; equal plans make equal dialogue.
        longest: Most exchanges of one conversation.
        pause_ms: How long a pause is; by default longer than the aligner's default gap.
        ramp_ms: Within this time the first conversations begin.
        prefix: In front of every session id, to tell several plans' sessions apart.
    """

    talking: int
    begin_ms: int
    think_ms: int = 12_000
    seed: int = 1
    longest: int = 24
    pause_ms: int = 360_000
    ramp_ms: int = 60_000
    prefix: str = "session"


def talking_for(turns_per_s: float, think_ms: int, pause_ms: int) -> int:
    """How many conversations at any time give so many turns a second, about."""
    exchange_ms = think_ms + sum(REPLY_MS) / 2
    conversation_ms = MEAN_EXCHANGES * exchange_ms + PAUSED * pause_ms
    return max(1, round(turns_per_s * conversation_ms / 1000 / (2 * MEAN_EXCHANGES)))


@dataclass(frozen=True, slots=True)
class Event:
    """A record and when it arrives, Unix milliseconds."""

    arrival_ms: int
    record: DialogueTurn | FeedbackEvent


@dataclass(order=True, slots=True)
class _Queued:
    arrival_ms: int
    number: int
    event: Event = field(compare=False)


class _Writer:
    """Writes one conversation after another."""

    def __init__(self, plan: DialoguePlan) -> None:
        self._plan = plan
        self._random = random.Random(plan.seed)
        rng = self._random
        self._text = " ".join(rng.choices(WORDS, k=_POOL_WORDS))
        self._tokens = tuple(rng.randrange(_VOCABULARY) for _ in range(_POOL_TOKENS))
        self._logprobs = tuple(-rng.expovariate(1.0) for _ in range(_POOL_TOKENS))
        self._kinds = [kind for kind, _ in _KINDS]
        self._weights = [weight for _, weight in _KINDS]
        self._conversations = 0

    def conversation(self, begin_ms: int) -> tuple[list[Event], int]:
        """All events of one conversation, in no order, and when the next one may begin."""
        rng, plan = self._random, self._plan
        self._conversations += 1
        session = f"{plan.prefix}-{self._conversations:08d}-{self._id()[:12]}"
        user = f"user-{rng.randrange(max(1, plan.talking * 4)):06d}"
        exchanges = min(plan.longest, 1 + int(rng.expovariate(1 / 3.5)))
        pause_before = rng.randrange(1, exchanges) if self._chance(PAUSED, exchanges > 1) else 0
        done = rng.random() < DONE
        events: list[Event] = []
        parent: str | None = None
        at_ms = begin_ms
        for number in range(exchanges):
            if number and number == pause_before:
                at_ms += plan.pause_ms
            ends = done and number == exchanges - 1
            at_ms, parent = self._exchange(events, session, user, parent, at_ms, ends=ends)
            at_ms += int(rng.uniform(0.3, 1.7) * plan.think_ms)
        return self._disturbed(events), at_ms

    def _exchange(
        self,
        events: list[Event],
        session: str,
        user: str,
        parent: str | None,
        at_ms: int,
        *,
        ends: bool,
    ) -> tuple[int, str]:
        """A message and its reply, or two if it is regenerated; their feedback."""
        rng = self._random
        prompt = self._turn(session, user, Role.USER, parent, at_ms)
        events.append(self._sent(prompt))
        replies = 2 if rng.random() < REGENERATED else 1
        for number in range(replies):
            at_ms += rng.randrange(*REPLY_MS)
            last = number == replies - 1
            reply = self._reply(session, user, prompt, at_ms, ends=ends and last)
            events.append(self._sent(reply))
            if rng.random() < WITH_FEEDBACK:
                self._feedback(events, reply)
        return at_ms, reply.turn_id

    def _turn(
        self, session: str, user: str, role: Role, parent: str | None, at_ms: int
    ) -> DialogueTurn:
        return DialogueTurn(
            event_id=f"turn-{self._id()}",
            session_id=session,
            turn_id=f"t-{self._id()[:24]}",
            parent_turn_id=parent,
            request_id=f"chatcmpl-{self._id()[:24]}",
            role=role,
            content=self._words(),
            event_time=at_ms,
            source="gateway",
            user_id=user,
        )

    def _reply(
        self, session: str, user: str, prompt: DialogueTurn, at_ms: int, *, ends: bool
    ) -> DialogueTurn:
        turn = self._turn(session, user, Role.ASSISTANT, prompt.turn_id, at_ms)
        version = self._random.randrange(1, 8)
        turn = replace(
            turn,
            session_done=ends,
            model=f"policy-v{version}",
            policy_version=version,
            finish_reason="stop",
        )
        if self._random.random() >= WITH_TOKENS:
            return turn
        count = self._random.randrange(40, 91)
        start = self._random.randrange(_POOL_TOKENS - count)
        return replace(
            turn,
            token_ids=self._tokens[start : start + count],
            behaviour_logprobs=self._logprobs[start : start + count],
            sampling=Sampling(temperature=0.7, top_p=0.95, max_tokens=256),
        )

    def _feedback(self, events: list[Event], reply: DialogueTurn) -> None:
        rng = self._random
        late = rng.random() < LATE_FEEDBACK
        delay_ms = rng.randrange(120_000, 540_000) if late else rng.randrange(2_000, 40_000)
        (kind,) = rng.choices(self._kinds, self._weights)
        corrected = kind is FeedbackKind.CORRECTION
        given = FeedbackEvent(
            event_id=f"feedback-{self._id()}",
            session_id=reply.session_id,
            event_time=reply.event_time + delay_ms,
            kind=kind,
            source="gateway",
            turn_id=reply.turn_id if rng.random() < BY_TURN_ID else None,
            value=None if corrected else float(rng.choice((-1, 1))),
            text=self._words()[:120] if corrected else None,
            user_id=reply.user_id,
        )
        events.append(self._sent(given))
        if rng.random() < SUPERSEDED:
            again = replace(
                given,
                event_id=f"feedback-{self._id()}",
                event_time=given.event_time + rng.randrange(500, 4_000),
                value=float(rng.choice((-1, 1))),
                supersedes=given.event_id,
            )
            events.append(self._sent(again))

    def _sent(self, record: DialogueTurn | FeedbackEvent) -> Event:
        return Event(record.event_time + self._random.randrange(5, 50), record)

    def _disturbed(self, events: list[Event]) -> list[Event]:
        """The events, some of them late and some of them twice."""
        rng = self._random
        arrived: list[Event] = []
        for event in events:
            late_ms = rng.randrange(200, 5_000) if rng.random() < OUT_OF_ORDER else 0
            arrived.append(Event(event.arrival_ms + late_ms, event.record))
            if rng.random() < TWICE:
                again_ms = late_ms + rng.randrange(1_000, 3_000)
                arrived.append(Event(event.arrival_ms + again_ms, event.record))
        return arrived

    def _chance(self, share: float, possible: bool) -> bool:
        return possible and self._random.random() < share

    def _words(self) -> str:
        length = self._random.randrange(200, 401)
        start = self._random.randrange(len(self._text) - length)
        return self._text[start : start + length]

    def _id(self) -> str:
        return f"{self._random.getrandbits(128):032x}"


def conversations(plan: DialoguePlan) -> Iterator[Event]:
    """Endless dialogue in the order of its arrival; the same for the same plan."""
    writer = _Writer(plan)
    spread = random.Random(plan.seed + 1)
    begins = [plan.begin_ms + spread.randrange(max(1, plan.ramp_ms)) for _ in range(plan.talking)]
    heapq.heapify(begins)
    queue: list[_Queued] = []
    number = 0
    while True:
        events, next_ms = writer.conversation(begins[0])
        heapq.heapreplace(begins, next_ms)
        for event in events:
            number += 1
            heapq.heappush(queue, _Queued(event.arrival_ms, number, event))
        while queue and queue[0].arrival_ms < begins[0]:
            yield heapq.heappop(queue).event


__all__ = ["WORDS", "DialoguePlan", "Event", "conversations", "talking_for"]
