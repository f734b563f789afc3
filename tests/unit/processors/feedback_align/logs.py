"""A small language for input logs: records with times in seconds, fed to the machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from processors.feedback_align.machine import (
    Advance,
    Arrival,
    Effect,
    EmitSegment,
    HeldBack,
    Input,
    PartitionState,
    Reject,
    new_state,
    step,
)
from processors.feedback_align.model import Session
from streams.contracts import (
    DialogueTurn,
    FeedbackEvent,
    FeedbackKind,
    Role,
    TrajectorySegment,
)
from streams.settings import AlignSettings
from streams.topics import FEEDBACK, TURNS

SECOND = 1_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
START = 1_000_000_000_000
SETTINGS = AlignSettings()


def at(text: str) -> int:
    """Milliseconds of ``[-][h:]m:ss`` after the start of the log."""
    sign = -1 if text.startswith("-") else 1
    total = 0
    for part in text.lstrip("-").split(":"):
        total = total * 60 + int(part)
    return START + sign * total * SECOND


class Log:
    """Feeds one partition; offsets count up, one per record of each topic."""

    def __init__(self, settings: AlignSettings = SETTINGS) -> None:
        self.settings = settings
        self.state: PartitionState = new_state()
        self.effects: list[Effect] = []
        self._offsets = {TURNS: 0, FEEDBACK: 0}

    def turn(
        self, name: str, time: str, arrival: str | None = None, **fields: Any
    ) -> tuple[Effect, ...]:
        """A turn: ``u…`` user, ``a…`` assistant, ``s…`` system, ``t…`` tool; id = name."""
        return self.put(make_turn(name, at(time), **fields), at(arrival or time))

    def feedback(
        self, name: str, time: str, arrival: str | None = None, **fields: Any
    ) -> tuple[Effect, ...]:
        """A feedback event, a thumb unless ``kind`` is given."""
        return self.put(make_feedback(name, at(time), **fields), at(arrival or time))

    def put(self, record: DialogueTurn | FeedbackEvent, arrival_ms: int) -> tuple[Effect, ...]:
        topic = TURNS if isinstance(record, DialogueTurn) else FEEDBACK
        offset = self._offsets[topic]
        self._offsets[topic] += 1
        return self.apply(Arrival(topic, 0, offset, arrival_ms, record))

    def put_feedback_at(self, second: int) -> None:
        """A thumb on a1, so many seconds after 1:00."""
        time_ms = at("1:00") + second * SECOND
        self.put(make_feedback(f"late-{second}", time_ms, turn_id="a1"), time_ms)

    def until(self, time: str) -> list[TrajectorySegment]:
        """Move the clock; the segments published by it."""
        return segments(self.apply(Advance(at(time))))

    def apply(self, event: Input) -> tuple[Effect, ...]:
        self.state, effects = step(self.state, event, self.settings)
        self.effects.extend(effects)
        return effects

    @property
    def segments(self) -> list[TrajectorySegment]:
        return segments(self.effects)

    @property
    def rejects(self) -> list[tuple[str, str, int]]:
        """(event_id, reason, time) of each dead letter."""
        return [
            (e.arrival.record.event_id, e.reason.value, e.time_ms)
            for e in self.effects
            if isinstance(e, Reject)
        ]

    @property
    def held_back(self) -> list[int]:
        return [e.count for e in self.effects if isinstance(e, HeldBack)]

    @property
    def session(self) -> Session:
        (session,) = self.state.sessions.values()
        return session


def segments(effects: Iterable[Effect]) -> list[TrajectorySegment]:
    return [effect.segment for effect in effects if isinstance(effect, EmitSegment)]


_ROLES = {"u": Role.USER, "a": Role.ASSISTANT, "s": Role.SYSTEM, "t": Role.TOOL}


def make_turn(name: str, event_time: int, **fields: Any) -> DialogueTurn:
    values: dict[str, Any] = {
        "event_id": f"e-{name}",
        "session_id": "s",
        "turn_id": name,
        "role": _ROLES.get(name[0], Role.UNKNOWN),
        "content": f"text of {name}",
        "event_time": event_time,
        "source": "test",
    }
    return DialogueTurn(**(values | fields))


def make_feedback(name: str, event_time: int, **fields: Any) -> FeedbackEvent:
    values: dict[str, Any] = {
        "event_id": name,
        "session_id": "s",
        "event_time": event_time,
        "kind": FeedbackKind.THUMB,
        "source": "test",
        "value": 1.0,
    }
    return FeedbackEvent(**(values | fields))


def when(segment: TrajectorySegment) -> tuple[int, str, int]:
    """(closed_at, closed_by, revision)."""
    return segment.closed_at, segment.closed_by.value, segment.revision


def shown(segment: TrajectorySegment) -> dict[str, list[str]]:
    """Feedback ids by the turn id of their reply, wherever it is listed."""
    places = {step.turn_id: step.feedback for step in segment.steps}
    for step_ in segment.steps:
        places |= {reply.turn_id: reply.feedback for reply in step_.alternatives}
    places |= {reply.turn_id: reply.feedback for reply in segment.off_branch}
    return {name: [item.event_id for item in items] for name, items in places.items() if items}
