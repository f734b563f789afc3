"""Logs of one input partition, made to collide: what the aligners are compared on.

One generator writes every log. It takes its decisions from a ``Chooser``: from a
``random.Random`` for bulk runs (:func:`random_log`), or from hypothesis, which can then make
a failing log smaller (:func:`logs`). Durations come from the settings, give or take a
millisecond, so that events meet gaps, settle windows and horizons exactly.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from hypothesis import strategies as st
from msgspec.structs import replace

from streams.contracts import (
    DialogueTurn,
    FeedbackEvent,
    FeedbackKind,
    Role,
    Sampling,
    ToolCall,
    TurnType,
)
from streams.settings import AlignSettings

TURNS_TOPIC = "dialogue.turns"
FEEDBACK_TOPIC = "dialogue.feedback"
PARTITION = 3
BASE_MS = 1_000_000
YEAR_2099_MS = 4_070_908_800_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One record of an input topic partition, as a consumer sees it.

    ``timestamp_ms`` is the Kafka timestamp, which may step back. ``record`` is None for a
    tick and for a record that cannot be decoded: it only moves the running maximum.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    record: DialogueTurn | FeedbackEvent | None


@dataclass(frozen=True, slots=True)
class Log:
    """Both topics of one partition, in offset order, and the clock at which to look."""

    turns: tuple[LogRecord, ...]
    feedback: tuple[LogRecord, ...]
    final_clock_ms: int


def dense_settings(**changes: int) -> AlignSettings:
    """Settings of a few milliseconds, under which a short log meets every rule."""
    dense = {
        "settle_ms": 5,
        "gap_ms": 20,
        "max_open_ms": 60,
        "max_steps": 3,
        "max_bytes": 60,
        "attribution_window_ms": 30,
        "orphan_wait_ms": 40,
        "horizon_ms": 150,
        "max_skew_ms": 10,
        "max_context_bytes": 40,
    }
    return AlignSettings.model_validate(dense | changes)


SETTINGS_VARIANTS: tuple[AlignSettings, ...] = (
    dense_settings(),
    dense_settings(orphan_wait_ms=90),
    dense_settings(settle_ms=0, max_skew_ms=0),
    dense_settings(settle_ms=20, max_skew_ms=40),
    dense_settings(gap_ms=60, max_steps=1),
    dense_settings(horizon_ms=100, attribution_window_ms=200),
    dense_settings(attribution_window_ms=0, orphan_wait_ms=0, max_context_bytes=0),
    dense_settings(max_steps=100, max_bytes=100_000, max_context_bytes=100_000),
    dense_settings(horizon_ms=1_000),
    AlignSettings(),
)
"""Settings at the edges of what is allowed, the plain dense ones first, real ones last."""


def is_reply(turn: DialogueTurn) -> bool:
    return turn.role is Role.ASSISTANT and turn.turn_type is TurnType.MAIN


class Chooser(Protocol):
    """Where the generator takes its decisions from."""

    def integer(self, low: int, high: int) -> int:
        """A number from ``low`` to ``high``, both included."""
        ...

    def choice(self, options: Sequence[T]) -> T:
        """One of the options; the first is the plainest."""
        ...

    def chance(self, percent: int) -> bool:
        """True in about ``percent`` of a hundred cases."""
        ...


class RandomChooser:
    """Decisions from a seeded generator."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def integer(self, low: int, high: int) -> int:
        return self._rng.randint(low, high)

    def choice(self, options: Sequence[T]) -> T:
        return options[self._rng.randrange(len(options))]

    def chance(self, percent: int) -> bool:
        return self._rng.randrange(100) < percent


class DrawChooser:
    """Decisions drawn by hypothesis, which shrinks each towards the plain side."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def choice(self, options: Sequence[T]) -> T:
        return options[self._draw(st.integers(0, len(options) - 1))]

    def chance(self, percent: int) -> bool:
        return self._draw(st.integers(0, 99)) >= 100 - percent


def random_log(rng: random.Random, settings: AlignSettings, n: int) -> Log:
    """A log of ``n`` records, the same for the same state of ``rng``."""
    return LogWriter(RandomChooser(rng), settings).write(n)


@st.composite
def logs(draw: st.DrawFn, settings: AlignSettings, max_size: int = 40) -> Log:
    """Logs of up to ``max_size`` records, for hypothesis."""
    return LogWriter(DrawChooser(draw), settings).write(max_size, stop_percent=3)


CONTENTS = ("", "a", "go on", "ünïcödé", "请再说一遍", "b" * 25, "c" * 58)
SESSIONS = (("default", "s1"), ("other", "s1"), ("default", "s2"), ("other", "s3"))
MISSING_IDS = ("missing-1", "missing-2")
LIVE_KINDS = (
    FeedbackKind.THUMB,
    FeedbackKind.RATING,
    FeedbackKind.CORRECTION,
    FeedbackKind.DWELL,
    FeedbackKind.OUTCOME,
    FeedbackKind.REVIEW,
    FeedbackKind.UNKNOWN,
)


@dataclass
class _SessionPast:
    """What the generator remembers of a session, to refer back to it."""

    turns: list[DialogueTurn] = field(default_factory=list)
    feedback: list[FeedbackEvent] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)
    spool_lag_ms: int = 0
    promised_turn_ids: list[str] = field(default_factory=list)
    promised_feedback_ids: list[str] = field(default_factory=list)

    @property
    def last_time(self) -> int | None:
        return self.turns[-1].event_time if self.turns else None


class LogWriter:
    """Writes one log, decision by decision."""

    def __init__(self, chooser: Chooser, settings: AlignSettings) -> None:
        self._pick = chooser
        self._settings = settings
        # Late enough that no event but those of 1970 happens before it.
        self._clock = max(BASE_MS, 8 * settings.horizon_ms)
        self._turns: list[LogRecord] = []
        self._feedback: list[LogRecord] = []
        self._past: dict[tuple[str, str], _SessionPast] = {}
        self._names = 0
        # A narrow log puts all into one session, where more collides.
        self._sessions = SESSIONS[: chooser.choice((1, 2, 4))]
        self._is_wild = chooser.chance(40)
        self._only_topic: str | None = None
        # Whose segments are about to be out of sight.
        self._looking_back: tuple[str, str] | None = None
        # A spool being flushed: whose, and when what is still in it happened.
        self._spool: tuple[tuple[str, str], list[int]] | None = None

    def write(self, size: int, stop_percent: int = 0) -> Log:
        """A log of ``size`` records, or fewer if it may stop before any of them.

        One decision per record, not one on the whole size, lets hypothesis drop a record
        from the middle of a failing log.
        """
        for _ in range(size):
            if stop_percent and not self._pick.chance(100 - stop_percent):
                break
            if self._spool is None:
                self._advance()
            self._write_record()
        return Log(tuple(self._turns), tuple(self._feedback), self._final_clock())

    # Time.

    def _spans(self) -> tuple[int, ...]:
        """Durations at which rules change their answer."""
        s = self._settings
        return (
            s.settle_ms,
            s.gap_ms,
            s.max_open_ms,
            s.attribution_window_ms,
            s.orphan_wait_ms,
            s.max_skew_ms,
            s.max_open_ms - s.settle_ms,
            s.gap_ms + s.settle_ms,
        )

    def _span(self) -> int:
        return max(0, self._pick.choice(self._spans()) + self._pick.choice((0, 1, -1)))

    def _advance(self) -> None:
        s = self._settings
        pace = self._pick.integer(0, 99)
        if pace < 35:
            return
        if pace < 92:
            self._clock += self._pick.integer(1, max(1, s.settle_ms))
        elif pace < 97 or not self._is_wild:
            self._clock += self._span()
        elif pace < 99:
            self._clock = max(self._clock, self._some_horizon())
        else:
            self._clock += s.horizon_ms + s.max_open_ms + self._pick.integer(0, s.horizon_ms)

    def _some_horizon(self) -> int:
        """About when something stops to be visible: a horizon after a turn may have closed."""
        s = self._settings
        begun = [session for session, past in self._past.items() if past.arrivals]
        since = self._clock
        if begun:
            self._looking_back = self._pick.choice(begun)
            since = self._past[self._looking_back].arrivals[-1]
        wait = self._pick.choice((s.gap_ms, s.settle_ms, s.max_open_ms))
        return since + wait + s.horizon_ms + self._pick.choice((0, 0, 1, -1))

    def _kafka_timestamp(self) -> int:
        if self._pick.chance(5):
            return self._clock - self._span()
        return self._clock

    def _final_clock(self) -> int:
        s = self._settings
        rest = self._pick.choice(
            (4 * s.horizon_ms, s.max_open_ms, s.gap_ms, s.settle_ms, 0, -s.max_open_ms)
        )
        return self._clock + rest + self._pick.choice((0, 1, -1))

    def _turn_time(self, past: _SessionPast) -> int:
        """When a turn happened: now, or near another turn, or beyond belief."""
        now = self._clock - past.spool_lag_ms
        mode = self._pick.integer(0, 99)
        if mode < 55 or (not self._is_wild and not self._pick.chance(30)):
            return now
        if mode < 70:
            return now - self._pick.integer(0, self._settings.gap_ms)
        if mode < 78 and past.last_time is not None:
            return min(past.last_time + self._span(), self._clock + self._settings.max_skew_ms)
        if mode < 88 and past.turns:
            return self._pick.choice(past.turns).event_time - self._pick.choice((0, 1, -1))
        if mode < 92 and past.turns:
            return past.turns[0].event_time - self._span()
        if mode < 98:
            return now + self._pick.integer(0, self._settings.max_skew_ms + 1)
        return self._unbelievable(now)

    def _feedback_time(self, past: _SessionPast, about: DialogueTurn | None) -> int:
        now = self._clock - past.spool_lag_ms
        mode = self._pick.integer(0, 99)
        if mode < 40 or (about is None and mode < 85):
            return now
        if about is not None and mode < 75:
            window = self._settings.attribution_window_ms
            return about.event_time + self._pick.choice((0, 1, -1, window, window + 1))
        if about is not None and mode < 85:
            return about.event_time + self._span()
        if mode < 97:
            return now + self._pick.integer(0, self._settings.max_skew_ms + 1)
        return self._unbelievable(now)

    def _unbelievable(self, now: int) -> int:
        return self._pick.choice((now - self._settings.horizon_ms, 0, YEAR_2099_MS))

    # Records.

    def _write_record(self) -> None:
        if self._spool is not None:
            self._flush_one()
            return
        if self._looking_back is not None:
            session, self._looking_back = self._looking_back, None
            self._append(self._late_feedback(session, self._past[session]))
            return
        elsewhere = self._pick.chance(50)
        session = self._pick.choice(self._sessions) if elsewhere else self._sessions[0]
        past = self._past.setdefault(session, _SessionPast())
        self._maybe_turn_a_page(past)
        kind = self._pick.integer(0, 99)
        if kind < 42:
            self._append(self._new_turn(session, past))
        elif kind < 50:
            self._append(self._another_reply(session, past))
        elif kind < 82:
            self._append(self._new_feedback(session, past))
        elif kind < 96:
            self._append(self._repeated(past) or self._new_turn(session, past))
        else:
            self._append_tick()

    def _maybe_turn_a_page(self, past: _SessionPast) -> None:
        """Now and then begin or end a spool, or a backlog on one topic only."""
        if self._pick.chance(4):
            spans = (0, self._settings.gap_ms, self._settings.max_open_ms)
            past.spool_lag_ms = self._pick.choice((*spans, self._settings.horizon_ms))
        if self._pick.chance(5):
            self._only_topic = self._pick.choice((None, TURNS_TOPIC, FEEDBACK_TOPIC))
        if self._pick.chance(1):
            self._fill_spool()

    def _fill_spool(self) -> None:
        """Let the records to come be those of a spool that is flushed at once."""
        s = self._settings
        at = self._clock - self._pick.choice((s.max_open_ms, s.gap_ms, s.horizon_ms))
        times = []
        for _ in range(self._pick.integer(3, 8)):
            times.append(min(at, self._clock))
            at += self._pick.choice((1, s.settle_ms, s.gap_ms, s.gap_ms + 1))
        self._spool = self._pick.choice(self._sessions), times

    def _flush_one(self) -> None:
        assert self._spool is not None
        session, times = self._spool
        past = self._past.setdefault(session, _SessionPast())
        at = times.pop(0)
        if not times:
            self._spool = None
        if self._pick.chance(75):
            turn = self._new_turn(session, past)
            self._append(replace(turn, event_time=at))
        else:
            self._append(replace(self._new_feedback(session, past), event_time=at))

    def _append(self, record: DialogueTurn | FeedbackEvent) -> None:
        past = self._past[record.policy, record.session_id]
        if isinstance(record, DialogueTurn):
            past.turns.append(record)
            past.arrivals.append(self._clock)
            self._append_to(self._turns, TURNS_TOPIC, record)
        else:
            past.feedback.append(record)
            self._append_to(self._feedback, FEEDBACK_TOPIC, record)

    def _append_tick(self) -> None:
        if self._pick.chance(50):
            self._append_to(self._turns, TURNS_TOPIC, None)
        else:
            self._append_to(self._feedback, FEEDBACK_TOPIC, None)

    def _append_to(
        self, log: list[LogRecord], topic: str, record: DialogueTurn | FeedbackEvent | None
    ) -> None:
        # A backlog on one topic: the other one's records all come with a later arrival.
        late = self._only_topic is not None and self._only_topic != topic
        timestamp = self._kafka_timestamp() + (self._settings.gap_ms if late else 0)
        # Offsets have holes, as after compaction or transactions.
        offset = (log[-1].offset if log else 6) + (2 if self._pick.chance(5) else 1)
        log.append(LogRecord(topic, PARTITION, offset, timestamp, record))

    def _name(self, kind: str) -> str:
        self._names += 1
        return f"{kind}{self._names}"

    def _maybe(self, percent: int, options: Sequence[T]) -> T | None:
        return self._pick.choice(options) if self._pick.chance(percent) else None

    # Turns.

    def _new_turn(self, session: tuple[str, str], past: _SessionPast) -> DialogueTurn:
        policy, session_id = session
        turn_id, role = self._turn_id(past), self._role(past)
        if turn_id in past.promised_turn_ids:
            past.promised_turn_ids.remove(turn_id)
            role = Role.ASSISTANT
        turn = DialogueTurn(
            event_id=self._name("e"),
            policy=policy,
            session_id=session_id,
            turn_id=turn_id,
            parent_turn_id=self._parent(past),
            request_id=self._maybe(30, ("r1", "r2", "r3")),
            role=role,
            content=self._pick.choice(CONTENTS),
            event_time=max(0, self._turn_time(past)),
            source=self._pick.choice(("gateway", "importer")),
            user_id=self._maybe(30, ("u1", "u2")),
            turn_type=TurnType.SIDE if self._pick.chance(8) else TurnType.MAIN,
            session_done=self._pick.chance(3),
        )
        return self._with_tokens(turn) if role is Role.ASSISTANT else turn

    def _another_reply(self, session: tuple[str, str], past: _SessionPast) -> DialogueTurn:
        """A reply to what a recent reply answered: regenerated, or sent again as a retry."""
        turn = self._new_turn(session, past)
        replies = [other for other in past.turns[-6:] if is_reply(other)]
        if not replies:
            return turn
        reply = self._pick.choice(replies)
        before = past.turns[: past.turns.index(reply)]
        parent = before[-1].turn_id if before else None
        return replace(
            turn,
            role=Role.ASSISTANT,
            turn_type=TurnType.MAIN,
            parent_turn_id=reply.parent_turn_id or parent,
            request_id=reply.request_id if self._pick.chance(40) else turn.request_id,
        )

    def _role(self, past: _SessionPast) -> Role:
        if self._pick.chance(2):
            return Role.UNKNOWN
        if self._pick.chance(30):
            return self._pick.choice(
                (Role.ASSISTANT, Role.ASSISTANT, Role.USER, Role.TOOL, Role.TOOL, Role.SYSTEM)
            )
        answers = bool(past.turns) and past.turns[-1].role is Role.USER
        return Role.ASSISTANT if answers else Role.USER

    def _turn_id(self, past: _SessionPast) -> str:
        if past.turns and self._pick.chance(3):
            return self._pick.choice(past.turns).turn_id
        if past.promised_turn_ids and self._pick.chance(50):
            return past.promised_turn_ids[-1]
        return self._name("t")

    def _parent(self, past: _SessionPast) -> str | None:
        if past.turns and self._pick.chance(30):
            return self._pick.choice(past.turns[-6:]).turn_id
        return self._maybe(4, MISSING_IDS)

    def _with_tokens(self, turn: DialogueTurn) -> DialogueTurn:
        if not self._pick.chance(40):
            return turn
        count = self._pick.integer(0, 3)
        return replace(
            turn,
            token_ids=tuple(range(count)),
            behaviour_logprobs=tuple(-0.5 for _ in range(count)),
            prompt_token_ids=self._maybe(50, ((7,), (), (7, 8, 9))),
            policy_version=self._maybe(50, (1, 2)),
            model=self._maybe(30, ("small",)),
            sampling=self._maybe(30, (Sampling(temperature=0.7), Sampling())),
            finish_reason=self._maybe(30, ("stop",)),
            tool_calls=self._maybe(20, ((ToolCall(id="c1", name="look", arguments="{}"),),)),
            tokenizer_digest=self._maybe(10, ("d1",)),
            template_digest=self._maybe(10, ("d2",)),
            attributes={"lang": "zh"} if self._pick.chance(10) else {},
        )

    # Feedback.

    def _new_feedback(self, session: tuple[str, str], past: _SessionPast) -> FeedbackEvent:
        policy, session_id = session
        about = self._about(past)
        event_id = self._feedback_id(past)
        is_awaited = event_id in past.promised_feedback_ids
        if is_awaited:
            past.promised_feedback_ids.remove(event_id)
        # What others already supersede would too often close a circle.
        supersedes = None if is_awaited and self._pick.chance(95) else self._supersedes(past)
        # Mostly a retraction names what it retracts.
        may_retract = supersedes is not None or self._pick.chance(10)
        retracts = may_retract and self._pick.chance(30)
        return FeedbackEvent(
            event_id=event_id,
            policy=policy,
            session_id=session_id,
            turn_id=self._feedback_turn_id(past, about),
            event_time=max(0, self._feedback_time(past, about)),
            kind=FeedbackKind.RETRACTION if retracts else self._pick.choice(LIVE_KINDS),
            value=self._maybe(60, (1.0, -1.0, 0.0)),
            text=self._maybe(20, ("nein", "不对")),
            tags=("tag",) if self._pick.chance(10) else (),
            supersedes=supersedes,
            source=self._pick.choice(("gateway", "importer")),
            user_id=self._maybe(30, ("u1", "u2")),
            attributes={"ui": "v2"} if self._pick.chance(10) else {},
        )

    def _late_feedback(self, session: tuple[str, str], past: _SessionPast) -> FeedbackEvent:
        """Mostly plain feedback on the last reply."""
        feedback = self._new_feedback(session, past)
        replies = [turn for turn in past.turns if is_reply(turn)]
        if not replies or self._pick.chance(20):
            return feedback
        return replace(
            feedback, turn_id=replies[-1].turn_id, supersedes=None, kind=FeedbackKind.THUMB
        )

    def _about(self, past: _SessionPast) -> DialogueTurn | None:
        """The turn a feedback is about: mostly a recent reply."""
        if past.turns and self._pick.chance(6):
            return self._pick.choice(past.turns)
        replies = [turn for turn in past.turns if is_reply(turn)]
        if not replies:
            return None
        return self._pick.choice(replies[-3:] if self._pick.chance(70) else replies)

    def _feedback_id(self, past: _SessionPast) -> str:
        if past.promised_feedback_ids and self._pick.chance(40):
            return past.promised_feedback_ids[-1]
        return self._name("f")

    def _feedback_turn_id(self, past: _SessionPast, about: DialogueTurn | None) -> str | None:
        mode = self._pick.integer(0, 99)
        if mode < 35:
            return None
        if mode < 90 and about is not None:
            return about.turn_id
        if mode < 97:
            past.promised_turn_ids.append(self._name("t"))
            return past.promised_turn_ids[-1]
        return self._pick.choice(MISSING_IDS)

    def _supersedes(self, past: _SessionPast) -> str | None:
        mode = self._pick.integer(0, 99)
        if mode < 60 or (mode < 85 and not past.feedback):
            return None
        if mode < 85:
            recent = past.feedback[-3:] if self._pick.chance(70) else past.feedback
            return self._pick.choice(recent).event_id
        if mode < 92:
            return self._pick.choice(MISSING_IDS)
        if mode < 98 or not past.turns:
            past.promised_feedback_ids.append(self._name("f"))
            return past.promised_feedback_ids[-1]
        return self._pick.choice(past.turns).event_id

    # Repetitions.

    def _repeated(self, past: _SessionPast) -> DialogueTurn | FeedbackEvent | None:
        """An event that was there before, as it was or with something changed."""
        before: list[DialogueTurn | FeedbackEvent] = [*past.turns, *past.feedback]
        if not before:
            return None
        record = self._pick.choice(before if self._pick.chance(50) else before[-4:])
        mode = self._pick.integer(0, 99)
        if mode < 60:
            return record
        if mode < 75:
            return self._changed(record)
        if mode < 85:
            return self._on_the_other_topic(record)
        if isinstance(record, DialogueTurn):
            # Under another turn id it is a retry, under its own a conflict.
            turn_id = self._name("t") if self._pick.chance(60) else record.turn_id
            return replace(
                record,
                event_id=self._name("e"),
                turn_id=turn_id,
                event_time=max(0, self._turn_time(past)),
            )
        return replace(record, event_id=self._name("f"))

    def _changed(self, record: DialogueTurn | FeedbackEvent) -> DialogueTurn | FeedbackEvent:
        if isinstance(record, DialogueTurn):
            return replace(record, content=record.content + "!")
        return replace(record, value=0.25)

    def _on_the_other_topic(
        self, record: DialogueTurn | FeedbackEvent
    ) -> DialogueTurn | FeedbackEvent:
        if isinstance(record, DialogueTurn):
            return FeedbackEvent(
                event_id=record.event_id,
                policy=record.policy,
                session_id=record.session_id,
                event_time=record.event_time,
                kind=FeedbackKind.THUMB,
                source=record.source,
                turn_id=record.turn_id,
            )
        return DialogueTurn(
            event_id=record.event_id,
            policy=record.policy,
            session_id=record.session_id,
            turn_id=self._name("t"),
            role=Role.ASSISTANT,
            content="b",
            event_time=record.event_time,
            source=record.source,
        )
