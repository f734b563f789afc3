"""Lag over time: samples of all stages, and what they say together."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from streams.errors import BrokerError
from streams.kafka.clients import make_admin, make_consumer, resolve_bootstrap
from streams.lag.burrow import Sample, State, judge
from streams.lag.groups import (
    JUDGE,
    PEEKING,
    EventTime,
    PartitionLag,
    Stage,
    measure,
    members_of,
)
from streams.settings import Settings

if TYPE_CHECKING:
    from confluent_kafka import Consumer
    from confluent_kafka.admin import AdminClient

T = TypeVar("T")

GROUP = "clawstream-lag"
"""Named by its reader's consumer, which joins no group."""

OWN_POSITIONS = (
    "its positions are kept with its versions, not committed to Kafka: what lags was not used by "
    "any version yet"
)

Place = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class LagStatus:
    """One partition of one stage, over a window.

    Attributes:
        lag: The latest look at it.
        state: By Burrow's rules; ``UNKNOWN`` for a stage that commits nothing to Kafka.
        reason: The same in words.
        read_per_s: Records read, each second of the window; None with one look.
        written_per_s: Records written.
        time_lag_s: How long ago the oldest unread record arrived; 0 if there is none.
        event_time_lag_s: How long ago what it tells of happened; None where that is unknown.
        members: How many members its group has; None for a stage that commits nothing to Kafka.
    """

    lag: PartitionLag
    state: State
    reason: str
    read_per_s: float | None
    written_per_s: float | None
    time_lag_s: float | None
    event_time_lag_s: float | None
    members: int | None = None


class Watch:
    """Keeps the last looks at every stage.

    Args:
        look: Measures all stages now (``groups.measure``).
        members: How many members the group of each stage has; a stage that is left out
            commits nothing to Kafka.
        window: How many looks are kept.
        monotonic_s: A clock that only rises.
        now_s: Unix time.
    """

    def __init__(
        self,
        look: Callable[[], Sequence[PartitionLag]],
        members: Callable[[], Mapping[str, int]],
        *,
        window: int = 10,
        monotonic_s: Callable[[], float] = time.monotonic,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._look = look
        self._members = members
        self._window = window
        self._monotonic_s = monotonic_s
        self._now_s = now_s
        self._samples: dict[Place, deque[Sample]] = {}

    def take(self) -> list[LagStatus]:
        """Look once more, and judge.

        Raises:
            BrokerError: Kafka does not answer, or a topic is missing.
        """
        found = self._look()
        members = self._members()
        at_s = self._monotonic_s()
        known = self._samples
        self._samples = {}
        statuses = []
        for lag in found:
            place = (lag.stage, lag.topic, lag.partition)
            samples = known.get(place) or deque(maxlen=self._window)
            samples.append(Sample(at_s, lag.current, lag.end, lag.lag))
            self._samples[place] = samples
            statuses.append(self._status(lag, list(samples), members.get(lag.stage)))
        return statuses

    def settle(self, looks: int, interval_s: float) -> list[LagStatus]:
        """Look as often as a judgement takes; once if nothing lags. Blocks.

        Args:
            looks: At most.
            interval_s: Between two.

        Raises:
            BrokerError: As ``take``.
        """
        statuses = self.take()
        for _ in range(looks - 1):
            if all(status.lag.lag == 0 for status in statuses):
                break
            time.sleep(interval_s)
            statuses = self.take()
        return statuses

    def _status(
        self, lag: PartitionLag, window: Sequence[Sample], members: int | None
    ) -> LagStatus:
        state, reason = State.UNKNOWN, OWN_POSITIONS
        if members is not None:
            state, reason = judge(window, members)
        return LagStatus(
            lag=lag,
            state=state,
            reason=reason,
            read_per_s=_rate(window, [sample.current or 0 for sample in window]),
            written_per_s=_rate(window, [sample.end for sample in window]),
            time_lag_s=self._age_s(lag, lag.oldest_unread_ms),
            event_time_lag_s=self._age_s(lag, lag.oldest_event_ms),
            members=members,
        )

    def _age_s(self, lag: PartitionLag, then_ms: int | None) -> float | None:
        if lag.lag == 0:
            return 0.0
        return None if then_ms is None else max(0.0, self._now_s() - then_ms / 1000)


@contextmanager
def watching(
    settings: Settings,
    positions: Callable[[], Mapping[Stage, Mapping[tuple[str, int], int]]] = dict,
    *,
    window: int = 10,
    event_time: EventTime = lambda topic, value: None,
) -> Iterator[Watch]:
    """A watch over the stages of a cluster, the judge among them if the settings name one.

    Args:
        settings: Where Kafka is.
        positions: Where stages stand that do not commit to Kafka.
        window: How many looks are kept.
        event_time: Looks into an unread record.

    Raises:
        BrokerError: Kafka does not answer, or there is none to ask.
    """
    clients = _Clients(settings)
    clients.connect()
    also = (JUDGE,) if settings.judge.is_named else ()
    try:
        yield Watch(
            lambda: clients.ask(
                lambda admin, consumer, address: measure(
                    admin,
                    consumer,
                    positions(),
                    open_group=lambda group: make_consumer(settings.kafka, address, group=group),
                    address=address,
                    event_time=event_time,
                    also=also,
                )
            ),
            lambda: clients.ask(lambda admin, _, address: members_of(admin, address, also)),
            window=window,
        )
    finally:
        clients.close()


class _Clients:
    """An admin client and a consumer, made anew for the look after one that failed.

    An admin client of librdkafka's that lost a group's coordinator may wait for that connection
    for ever, long after the broker is back.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._made: tuple[AdminClient, Consumer, str] | None = None

    def connect(self) -> tuple[AdminClient, Consumer, str]:
        """Both, and the address they ask.

        Raises:
            BrokerError: There is no Kafka to ask.
        """
        if self._made is None:
            kafka, address = self._settings.kafka, resolve_bootstrap(self._settings)
            consumer = make_consumer(kafka, address, group=GROUP, overrides=PEEKING)
            self._made = make_admin(kafka, address), consumer, address
        return self._made

    def ask(self, question: Callable[[AdminClient, Consumer, str], T]) -> T:
        """The answer to a question.

        Raises:
            BrokerError: Kafka does not answer.
        """
        try:
            return question(*self.connect())
        except BrokerError:
            self.close()
            raise

    def close(self) -> None:
        """Let go of both; idempotent."""
        made, self._made = self._made, None
        if made is not None:
            made[1].close()


def _rate(window: Sequence[Sample], offsets: Sequence[int]) -> float | None:
    seconds = window[-1].at_s - window[0].at_s
    return (offsets[-1] - offsets[0]) / seconds if seconds > 0 else None


__all__ = ["LagStatus", "Watch", "watching"]
