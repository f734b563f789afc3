"""Random logs, dense in everything that can go wrong, with times of a few milliseconds."""

from __future__ import annotations

from random import Random

from msgspec.structs import replace

from processors.feedback_align.machine import Advance, Arrival, Input
from streams.contracts import DialogueTurn, FeedbackEvent, FeedbackKind, Role, TurnType
from streams.settings import AlignSettings
from streams.topics import FEEDBACK, TURNS

TINY = AlignSettings(
    settle_ms=30,
    gap_ms=50,
    max_open_ms=120,
    max_steps=3,
    max_bytes=60,
    attribution_window_ms=100,
    orphan_wait_ms=90,
    horizon_ms=230,
    max_skew_ms=20,
    max_context_bytes=24,
)
_ROLES = (Role.USER,) * 4 + (Role.ASSISTANT,) * 5 + (Role.SYSTEM, Role.TOOL)


def random_log(seed: int, length: int = 60, sessions: int = 2) -> list[Input]:
    """A merged log with clock advances in between, and an end that settles everything."""
    source = _Source(Random(seed), sessions)
    inputs: list[Input] = []
    arrival = 1_000
    for _ in range(length):
        jump = source.rng.choices((0, 1, 8, 25, 60, 250, 600), (5, 6, 6, 4, 2, 1, 0.3))[0]
        if jump and source.rng.random() < 0.5:
            inputs.append(Advance(arrival + source.rng.randrange(jump)))
        arrival += jump
        inputs.append(source.next(arrival))
    inputs.append(Advance(arrival + 5_000))
    return _merged(inputs)


def _merged(inputs: list[Input]) -> list[Input]:
    """At equal arrivals turns before feedback, as the merger hands them out."""

    def place(item: Input) -> tuple[int, int, int]:
        if isinstance(item, Advance):
            return (item.clock_ms, 2, 0)
        return (item.arrival_ms, int(item.topic == FEEDBACK), item.offset)

    return sorted(inputs, key=place)


class _Source:
    def __init__(self, rng: Random, sessions: int) -> None:
        self.rng = rng
        self.sessions = sessions
        self.offsets = {TURNS: 0, FEEDBACK: 0}
        self.sent: list[DialogueTurn | FeedbackEvent] = []
        self.recent = [f"t{number}" for number in range(5)]

    def next(self, arrival: int) -> Arrival:
        rng = self.rng
        if self.sent and rng.random() < 0.06:
            record = rng.choice(self.sent)
            if rng.random() < 0.3:
                record = replace(record, source="other")
        elif rng.random() < 0.55:
            record = self._turn(arrival)
        else:
            record = self._feedback(arrival)
        self.sent.append(record)
        topic = TURNS if isinstance(record, DialogueTurn) else FEEDBACK
        self.offsets[topic] += 1
        return Arrival(topic, 0, self.offsets[topic], arrival, record)

    def _time(self, arrival: int) -> int:
        rng = self.rng
        shift = rng.choices((0, -10, -60, -200, 10, 25), (12, 4, 3, 2, 1, 0.3))[0]
        return arrival + shift + (rng.randrange(-3, 4) if shift else 0)

    def _turn(self, arrival: int) -> DialogueTurn:
        rng = self.rng
        role = rng.choice(_ROLES)
        turn_id = f"t{rng.randrange(40)}"
        parent = rng.choice(self.recent) if rng.random() < 0.5 else None
        self.recent = [*self.recent[1:], turn_id]
        return DialogueTurn(
            event_id=f"e{rng.randrange(50)}",
            session_id=f"s{rng.randrange(self.sessions)}",
            turn_id=turn_id,
            role=role,
            content=rng.choice(("hi", "what?", "äöü", "a longer text")),
            event_time=self._time(arrival),
            source="gen",
            parent_turn_id=parent,
            request_id=rng.choice((None, None, "r1", "r2")),
            user_id=rng.choice((None, None, "v", "w")),
            turn_type=TurnType.SIDE if rng.random() < 0.15 else TurnType.MAIN,
            session_done=rng.random() < 0.08,
            token_ids=(1, 2) if role is Role.ASSISTANT and rng.random() < 0.5 else None,
            prompt_token_ids=(7,) if role is Role.ASSISTANT else None,
        )

    def _feedback(self, arrival: int) -> FeedbackEvent:
        rng = self.rng
        supersedes = f"e{rng.randrange(50)}"
        kind = rng.choice((FeedbackKind.THUMB, FeedbackKind.THUMB, FeedbackKind.RETRACTION))
        return FeedbackEvent(
            event_id=f"e{rng.randrange(50)}",
            session_id=f"s{rng.randrange(self.sessions)}",
            event_time=self._time(arrival),
            kind=kind,
            source="gen",
            turn_id=rng.choice(self.recent) if rng.random() < 0.5 else None,
            supersedes=supersedes if rng.random() < 0.4 else None,
            value=rng.choice((None, 0.0, 1.0)),
        )
