"""Load of the oracle's kind, in real time: scripts of conversations, many at once.

A script is a short log of :mod:`tests.oracle.logs` (interleaved sessions, out of order,
duplicates, conflicts, retries, branches, retractions, strays), or a conversation whose
feedback comes after its segment was closed. Its times are shifted to the moment it begins.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from confluent_kafka import KafkaError, Message, Producer
from msgspec.structs import replace

from streams.contracts import DeadLetterReason, DialogueTurn, FeedbackEvent, FeedbackKind, Role
from streams.kafka.clients import partition_for
from streams.serde import Codec, build_codec
from streams.settings import AlignSettings
from tests.oracle.logs import BASE_MS, YEAR_2099_MS, random_log

Event = DialogueTurn | FeedbackEvent

SCRIPT_RECORDS = 16
OVERSIZED_BYTES = 200_000
"""More than the outputs' topics take in these tests, less than the inputs' do."""

EXPECTED_REASON = "expected-reason"
"""Header of a record that can only become a dead letter: for which reason."""

MISPLACED = "sent-to-the-wrong-partition"
"""Header of a record sent to another partition than its session's."""

DELIVERY_S = 900


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is sent.

    Attributes:
        scripts: How many conversations run at once; each sends about 7 records a second.
        late: Percent of the scripts whose feedback comes after their segment closed.
        echo: Percent of the records after which something sent before is sent again.
        skew: Percent of the records that claim to be of 1970 or 2099.
        poison: Percent of the records after which one that cannot be used is sent.
        misplaced: Percent of the records sent to a wrong partition.
        silent: Partitions to which nothing is sent.
        seed: Of all decisions.
    """

    scripts: int = 24
    late: int = 35
    echo: int = 0
    skew: int = 0
    poison: int = 0
    misplaced: int = 1
    silent: frozenset[int] = frozenset()
    seed: int = 7


@dataclass(frozen=True, slots=True)
class Line:
    """One event of a script, its times relative to the script's beginning."""

    at_ms: int
    event: Event


@dataclass(frozen=True, slots=True)
class Poison:
    """A value nobody can use, and the reason it must be refused for."""

    value: bytes | None
    reason: DeadLetterReason


POISON = (
    Poison(b"\xffno record", DeadLetterReason.UNDECODABLE),
    Poison(b'{"event_id": ', DeadLetterReason.UNDECODABLE),
    Poison(b"", DeadLetterReason.UNDECODABLE),
    Poison(None, DeadLetterReason.NULL_VALUE),
    Poison(b"\xc3\x01" + bytes(8) + b"body", DeadLetterReason.UNKNOWN_SCHEMA),
    Poison(b"\x00" + bytes(4) + b"body", DeadLetterReason.UNKNOWN_SCHEMA),
    Poison(b'{"event_id": "e"}', DeadLetterReason.INVALID),
    Poison(b"\xff" * OVERSIZED_BYTES, DeadLetterReason.OVERSIZED),
)


def oracle_script(rng: random.Random, settings: AlignSettings, name: str) -> list[Line]:
    """A log of the oracle's generator, both topics in the order of their arrivals."""
    log = random_log(rng, settings, SCRIPT_RECORDS)
    start = max(BASE_MS, 8 * settings.horizon_ms)
    lines = []
    for entries in (log.turns, log.feedback):
        arrivals = accumulate((entry.timestamp_ms for entry in entries), max)
        for arrival, entry in zip(arrivals, entries, strict=True):
            if entry.record is not None:
                lines.append(Line(arrival - start, _renamed(entry.record, name, start)))
    return sorted(lines, key=lambda line: line.at_ms)


def _renamed(event: Event, name: str, start: int) -> Event:
    time_ms = event.event_time
    if 0 < time_ms < YEAR_2099_MS:
        time_ms -= start
    return replace(event, session_id=f"{name}-{event.session_id}", event_time=time_ms)


def late_script(rng: random.Random, settings: AlignSettings, name: str) -> list[Line]:
    """A conversation that ends, and what comes after its segment was closed.

    A thumb within the settle window, a rating and its retraction or correction later, a turn
    that happened between the others, and something beyond the horizon.
    """
    settle, horizon = settings.settle_ms, settings.horizon_ms
    closed = 2 * settle + 200

    def turn(at: int, turn_id: str, role: Role, happened: int, done: bool = False) -> Line:
        event = DialogueTurn(
            event_id=f"{turn_id}-e",
            session_id=name,
            turn_id=turn_id,
            role=role,
            content=f"{role} says {turn_id} " + "x" * rng.randrange(40),
            event_time=happened,
            source="gateway",
            session_done=done,
        )
        return Line(at, event)

    def feedback(at: int, event_id: str, kind: FeedbackKind, **fields: str) -> Line:
        event = FeedbackEvent(
            event_id=event_id,
            session_id=name,
            event_time=at,
            kind=kind,
            value=rng.choice((1.0, -1.0)),
            source="gateway",
            **fields,  # type: ignore[arg-type]
        )
        return Line(at, event)

    lines = [
        turn(0, "u1", Role.USER, 0),
        turn(40, "a1", Role.ASSISTANT, 40, done=True),
        feedback(100, "f1", FeedbackKind.THUMB, turn_id="a1"),
    ]
    rated = closed + rng.randrange(2 * settle)
    lines.append(feedback(rated, "f2", FeedbackKind.RATING, turn_id="a1"))
    if rng.random() < 0.5:
        kind = rng.choice((FeedbackKind.RETRACTION, FeedbackKind.CORRECTION))
        lines.append(feedback(rated + rng.randrange(3 * settle), "f3", kind, supersedes="f2"))
    if rng.random() < 0.5:
        lines.append(turn(rated + rng.randrange(3 * settle), "a0", Role.ASSISTANT, 20))
    if rng.random() < 0.3:
        lines.append(feedback(horizon * 3 // 4, "f4", FeedbackKind.OUTCOME, turn_id="a1"))
    if rng.random() < 0.1:
        lines.append(feedback(horizon + 2 * closed, "f5", FeedbackKind.THUMB, turn_id="a1"))
    return sorted(lines, key=lambda line: line.at_ms)


class Load:
    """Sends scripts to both input topics until it is stopped.

    Args:
        bootstrap: Where.
        topics: The turns' and the feedback's topic.
        partitions: How many each has.
        settings: The rules whose durations the scripts play with.
        plan: What is sent.
        codec: Writes the records.
    """

    def __init__(
        self,
        bootstrap: str,
        topics: tuple[str, str],
        partitions: int,
        settings: AlignSettings,
        plan: LoadPlan,
        codec: Codec | None = None,
    ) -> None:
        self.sent = 0
        self.codec = codec or build_codec()
        self._topics = topics
        self._partitions = partitions
        self._settings = settings
        self._plan = plan
        self._rng = random.Random(plan.seed)
        self._names = 0
        self._errors: list[str] = []
        self._sent_before: deque[tuple[str, str, bytes]] = deque(maxlen=400)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self._failure: BaseException | None = None
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "linger.ms": 5,
                "message.max.bytes": 4_000_000,
                "message.timeout.ms": DELIVERY_S * 1000,
                "reconnect.backoff.max.ms": 500,
                "log_level": 0,
            }
        )

    def start(self) -> Load:
        """Begin to send."""
        self._thread.start()
        return self

    def __enter__(self) -> Load:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.stop()
        else:
            self._stopped.set()

    def stop(self, timeout_s: float = 120.0) -> None:
        """Send nothing more and wait until Kafka has all of it.

        Raises:
            AssertionError: Kafka did not take all of it.
        """
        self._stopped.set()
        self._thread.join(timeout_s)
        left = self._producer.flush(timeout_s)
        if self._failure is not None:
            raise self._failure
        assert left == 0, f"{left} records of the load were not taken within {timeout_s:.0f} s"
        assert not self._errors, f"the load lost records: {self._errors[:3]}"

    def _run(self) -> None:
        try:
            self._send_scripts()
        except BaseException as error:
            self._failure = error

    def _send_scripts(self) -> None:
        running: list[tuple[float, int, Iterator[Line], int, Line]] = []
        for number in range(self._plan.scripts):
            # Spread out, or all scripts would be at the same point of their lives.
            self._begin(running, time.monotonic() + number * 0.05)
        while not self._stopped.is_set():
            due, _, lines, start_ms, line = running[0]
            wait_s = due - time.monotonic()
            if wait_s > 0:
                self._producer.poll(0)
                self._stopped.wait(min(wait_s, 0.05))
                continue
            heapq.heappop(running)
            self._send(line, start_ms)
            following = next(lines, None)
            if following is None:
                self._begin(running, time.monotonic())
            else:
                at = due + (following.at_ms - line.at_ms) / 1000
                self._push(running, at, lines, start_ms, following)

    def _begin(
        self, running: list[tuple[float, int, Iterator[Line], int, Line]], at: float
    ) -> None:
        lines = iter(self._script())
        first = next(lines)
        start_ms = time.time_ns() // 1_000_000 + round((at - time.monotonic()) * 1000)
        self._push(running, at + first.at_ms / 1000, lines, start_ms, first)

    def _push(
        self,
        running: list[tuple[float, int, Iterator[Line], int, Line]],
        at: float,
        lines: Iterator[Line],
        start_ms: int,
        line: Line,
    ) -> None:
        self._names += 1
        heapq.heappush(running, (at, self._names, lines, start_ms, line))

    def _script(self) -> list[Line]:
        self._names += 1
        is_late = self._rng.randrange(100) < self._plan.late
        make: Callable[[random.Random, AlignSettings, str], list[Line]]
        make = late_script if is_late else oracle_script
        lines: list[Line] = []
        while not lines:
            lines = make(self._rng, self._settings, f"c{self._names}")
        return lines

    def _send(self, line: Line, start_ms: int) -> None:
        event = self._dated(line.event, start_ms)
        topic = self._topics[isinstance(event, FeedbackEvent)]
        value = self.codec.encode(event, topic)
        key = event.session_id
        if partition_for(key.encode(), self._partitions) in self._plan.silent:
            return
        if self._chance(self._plan.misplaced):
            wrong = (partition_for(key.encode(), self._partitions) + 1) % self._partitions
            self.produce(topic, key, value, wrong, {MISPLACED: b""})
        else:
            self.produce(topic, key, value)
        self._sent_before.append((topic, key, value))
        if self._chance(self._plan.echo):
            self.produce(*self._rng.choice(self._sent_before))
        if self._chance(self._plan.poison):
            self.poison()

    def _dated(self, event: Event, start_ms: int) -> Event:
        time_ms = event.event_time
        if self._chance(self._plan.skew):
            time_ms = self._rng.choice((0, 1, YEAR_2099_MS))
        elif time_ms != 0 and time_ms < YEAR_2099_MS:
            time_ms += start_ms
        return replace(event, event_time=time_ms)

    def _chance(self, percent: int) -> bool:
        return percent > 0 and self._rng.randrange(100) < percent

    def poison(self) -> None:
        """Send something that cannot be used."""
        poison = self._rng.choice(POISON)
        topic = self._rng.choice(self._topics)
        partition = self._rng.randrange(self._partitions)
        headers = {EXPECTED_REASON: poison.reason.encode()}
        self.produce(topic, "poison", poison.value, partition, headers)

    def produce(
        self,
        topic: str,
        key: str,
        value: bytes | None,
        partition: int | None = None,
        headers: dict[str, bytes] | None = None,
    ) -> None:
        """Send one record; to the partition of its key if none is named."""
        if partition is None:
            partition = partition_for(key.encode(), self._partitions)
        while True:
            try:
                self._producer.produce(
                    topic,
                    key=key,
                    value=value,
                    partition=partition,
                    headers=dict(headers or {}),
                    on_delivery=self._delivered,
                )
                break
            except BufferError:
                self._producer.poll(0.1)
        self.sent += 1
        self._producer.poll(0)

    def _delivered(self, error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            self._errors.append(str(error))
