"""Dead letters and what became of them. Pure.

A letter is known by what it is about: stage, reason and the place of the record. What people do
about letters is kept beside them in the same topic, as *marks*: records with a null value and
the header ``clawstream-dlq-mark``, which readers of dead letters skip. A mark is younger than its
letter and in its partition, so no retention deletes it first.

A retried record carries four headers that name where it first stood, the letter it comes from and
the how manieth attempt it is. Should it die again, its new letter is known by these headers or,
where a stage kept none, by the place at which the mark says that it was put.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from streams.contracts import DeadLetter, RecordHeader
from streams.errors import DeadLetterError

MARK_HEADER = "clawstream-dlq-mark"
"""On a record with a null value: a mark, as JSON."""

RETRY_TOPIC = "clawstream-retry-topic"
RETRY_PARTITION = "clawstream-retry-partition"
RETRY_OFFSET = "clawstream-retry-offset"
"""Where a retried record first stood."""
RETRY_LETTER = "clawstream-retry-letter"
"""Partition and offset of the letter it was taken from, as ``2/17``."""
RETRY_ATTEMPT = "clawstream-retry-attempt"
"""Which attempt it is, from 1."""

RETRY_HEADERS = frozenset({RETRY_TOPIC, RETRY_PARTITION, RETRY_OFFSET, RETRY_LETTER, RETRY_ATTEMPT})

MAX_ATTEMPTS = 3
"""How often a record is tried again unless told otherwise."""

RECORD_OVERHEAD_BYTES = 256
"""What Kafka's own fields of a batch of one record take at most, header lengths included."""

State = Literal["open", "retried", "dropped"]
Action = Literal["retried", "dropped"]


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """The coordinates of a record, written ``topic/partition/offset``."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"

    @classmethod
    def parse(cls, text: str) -> Place:
        """The place that ``text`` names.

        Raises:
            DeadLetterError: It names none.
        """
        topic, _, rest = text.partition("/")
        partition, _, offset = rest.partition("/")
        if topic and partition.isdecimal() and offset.isdecimal():
            return cls(topic, int(partition), int(offset))
        raise DeadLetterError(
            f"{text!r} names no letter: write topic/partition/offset of the record, as "
            "`clawstream dlq list --letters` shows it, for example dialogue.turns/0/123"
        )


@dataclass(frozen=True, slots=True, order=True)
class Identity:
    """What makes two letters the same one."""

    origin: Place
    stage: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A dead letter without the bytes it keeps.

    Attributes:
        at: Where the letter is.
        origin: Where the record stood that it keeps.
        timestamp: The record's Kafka timestamp; None if the letter keeps no record of a topic.
        size_bytes: Of key, value and headers as kept; None where there is no value.
        attempt: Which attempt the record was, by its headers; 0 for one never retried.
        root: Where the record first stood, by its headers.
    """

    at: Place
    origin: Place
    stage: str
    reason: str
    message: str
    time_ms: int
    timestamp: int | None
    size_bytes: int | None
    attributes: Mapping[str, str]
    attempt: int
    root: Place

    @property
    def identity(self) -> Identity:
        """What makes it the same letter as another."""
        return Identity(self.origin, self.stage, self.reason)

    @property
    def obstacle(self) -> str | None:
        """Why what it keeps cannot be published again, and where the record stands; else None."""
        whole = f"the record stands at {self.origin} as long as its topic keeps it"
        cut = [name for name in _CUT if name in self.attributes]
        if cut:
            what = ", ".join(f"{_CUT[name]} ({self.attributes[name]})" for name in cut)
            return f"it was too large to be kept whole: {what}; {whole}"
        if self.timestamp is None:
            return f"it keeps what {self.stage} made, not a record of {self.origin.topic}"
        if self.size_bytes is None:
            return "the record had no value, so it would come back as it is"
        return None


_CUT: Mapping[str, str] = {
    "value_bytes": "bytes of the value",
    "key_bytes": "bytes of the key",
    "headers_left_out": "headers",
    "value_omitted": "the value",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What was done about a letter.

    Attributes:
        letter: Which one.
        action: What was done.
        at_ms: When.
        actor: Who did it, if they said so.
        note: Why, if they said so.
        attempt: Which attempt it was; 0 for a dropped one.
        root: Where the record first stood.
        landed: Where the record was put; None for a dropped one.
    """

    letter: Identity
    action: Action
    at_ms: int
    root: Place
    attempt: int = 0
    actor: str | None = None
    note: str | None = None
    landed: Place | None = None

    def to_json(self) -> bytes:
        """The value of the mark's header."""
        return json.dumps(asdict(self), ensure_ascii=False, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Mark:
        """The mark in a header's value.

        Raises:
            DeadLetterError: There is none.
        """
        try:
            fields: dict[str, Any] = json.loads(data)
            letter = fields.pop("letter")
            landed = fields.pop("landed", None)
            return cls(
                letter=Identity(Place(**letter.pop("origin")), **letter),
                root=Place(**fields.pop("root")),
                landed=None if landed is None else Place(**landed),
                **fields,
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DeadLetterError(f"a mark cannot be read: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A letter and what became of it.

    Attributes:
        letter: The letter; the first one if the same was written more than once.
        copies: How many times it was written.
        mark: The mark that says what was done; None while it is open.
        attempt: How often its record had been retried before it died.
        root: Where its record first stood.
    """

    letter: Letter
    copies: int
    mark: Mark | None
    attempt: int
    root: Place

    @property
    def state(self) -> State:
        """What became of it."""
        return "open" if self.mark is None else self.mark.action


@dataclass(slots=True)
class Ledger:
    """Everything that a topic of dead letters says; feed it each record once."""

    unreadable: int = 0
    _letters: dict[Identity, list[Letter]] = field(default_factory=lambda: defaultdict(list))
    _marks: dict[Identity, Mark] = field(default_factory=dict)
    _landed: dict[Place, Mark] = field(default_factory=dict)

    def add(self, entry: Letter | Mark) -> None:
        """Take the next letter or mark."""
        if isinstance(entry, Letter):
            self._letters[entry.identity].append(entry)
            return
        self._marks[entry.letter] = entry
        if entry.landed is not None:
            self._landed[entry.landed] = entry

    def cases(self) -> list[Case]:
        """Every letter with what became of it, oldest first."""
        found = [self._case(identity) for identity in self._letters]
        return sorted(found, key=lambda case: (case.letter.time_ms, case.letter.identity))

    def _case(self, identity: Identity) -> Case:
        letters = self._letters[identity]
        first = letters[0]
        before = self._landed.get(first.origin)
        attempt, root = first.attempt, first.root
        if before is not None and before.attempt >= attempt:
            attempt, root = before.attempt, before.root
        return Case(
            letter=first,
            copies=len(letters),
            mark=self._marks.get(identity),
            attempt=attempt,
            root=root,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """Which letters are meant; every condition that is set must hold.

    Attributes:
        places: Places of records; all if empty.
        stage: Of this stage only.
        reason: For this reason only.
        topic: About records of this topic only.
        since_ms: Written from this time on.
        until_ms: Written before this time.
    """

    places: frozenset[Place] = frozenset()
    stage: str | None = None
    reason: str | None = None
    topic: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it means every letter."""
        return self == Selector()

    def chosen(self, cases: Iterable[Case]) -> list[Case]:
        """The cases meant, in their order.

        Raises:
            DeadLetterError: A place that was named has no letter.
        """
        known = list(cases)
        missing = self.places - {case.letter.origin for case in known}
        if missing:
            raise DeadLetterError(
                f"there is no letter about {', '.join(map(str, sorted(missing)))}; see "
                "`clawstream dlq list --letters --state all`"
            )
        return [case for case in known if self._means(case.letter)]

    def _means(self, letter: Letter) -> bool:
        return (
            (not self.places or letter.origin in self.places)
            and self.stage in (None, letter.stage)
            and self.reason in (None, letter.reason)
            and self.topic in (None, letter.origin.topic)
            and (self.since_ms is None or letter.time_ms >= self.since_ms)
            and (self.until_ms is None or letter.time_ms < self.until_ms)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A letter that is not retried, and why."""

    case: Case
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a retry is to do.

    Attributes:
        retry: The cases to publish again, in the order of their records.
        done: Those that were retried already.
        refused: Those that cannot or must not be.
    """

    retry: tuple[Case, ...]
    done: tuple[Case, ...]
    refused: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a retry must know of a topic: its partitions and the largest record it takes."""

    partitions: int
    max_bytes: int


def plan_retry(
    cases: Iterable[Case],
    targets: Mapping[str, Target],
    *,
    max_attempts: int = MAX_ATTEMPTS,
    force: bool = False,
) -> Plan:
    """Decide what is published again, and in which order.

    Args:
        cases: Those chosen.
        targets: The topics there are.
        max_attempts: A record that was retried so often is refused.
        force: Retry beyond that, and what was dropped.
    """
    retry: list[Case] = []
    done: list[Case] = []
    refused: list[Refusal] = []
    for case in cases:
        if case.state == "retried":
            done.append(case)
            continue
        why = _refusal(case, targets, max_attempts, force)
        if why is None:
            retry.append(case)
        else:
            refused.append(Refusal(case=case, why=why))
    return Plan(retry=tuple(in_order(retry)), done=tuple(done), refused=tuple(refused))


def _refusal(
    case: Case, targets: Mapping[str, Target], max_attempts: int, force: bool
) -> str | None:
    letter = case.letter
    if letter.obstacle is not None:
        return letter.obstacle
    if case.state == "dropped" and not force:
        return "it was dropped; --force retries it all the same"
    if case.attempt >= max_attempts and not force:
        return (
            f"its record died {case.attempt + 1} times (first at {case.root}), each time for a "
            "reason a further try will not mend by itself; see to the reason, then use --force"
        )
    target = targets.get(letter.origin.topic)
    if target is None:
        return f"there is no topic {letter.origin.topic} any more"
    if letter.origin.partition >= target.partitions:
        return f"{letter.origin.topic} has no partition {letter.origin.partition} any more"
    size = (letter.size_bytes or 0) + RECORD_OVERHEAD_BYTES + _headers_bytes(case)
    if size > target.max_bytes:
        return (
            f"with its headers it has about {size} bytes, more than {letter.origin.topic} takes "
            f"({target.max_bytes}, max.message.bytes)"
        )
    return None


def _headers_bytes(case: Case) -> int:
    return sum(len(key) + len(value) for key, value in retry_headers(case))


def in_order(cases: Iterable[Case]) -> Iterator[Case]:
    """Cases in the order in which their records came.

    Within a partition that is the order of offsets, between partitions that of timestamps.
    """
    by_partition: dict[tuple[str, int], list[Case]] = defaultdict(list)
    for case in cases:
        by_partition[case.letter.origin.topic, case.letter.origin.partition].append(case)
    streams = [
        sorted(group, key=lambda case: case.letter.origin.offset)
        for _, group in sorted(by_partition.items())
    ]
    return heapq.merge(*streams, key=lambda case: case.letter.timestamp or 0)


def retry_headers(case: Case) -> tuple[tuple[str, bytes], ...]:
    """The headers that the next attempt gets beside its own."""
    at = case.letter.at
    return (
        (RETRY_TOPIC, case.root.topic.encode()),
        (RETRY_PARTITION, str(case.root.partition).encode()),
        (RETRY_OFFSET, str(case.root.offset).encode()),
        (RETRY_LETTER, f"{at.partition}/{at.offset}".encode()),
        (RETRY_ATTEMPT, str(case.attempt + 1).encode()),
    )


def with_retry_headers(
    headers: Sequence[RecordHeader], case: Case
) -> list[tuple[str, bytes | None]]:
    """A record's own headers, those of an earlier attempt replaced by the next one's."""
    own = [(header.key, header.value) for header in headers if header.key not in RETRY_HEADERS]
    return [*own, *retry_headers(case)]


def letter_of(dead: DeadLetter, at: Place) -> Letter:
    """What a ledger keeps of a dead letter."""
    origin = Place(dead.topic, dead.partition, dead.offset)
    attempt, root = _history(dead.headers, origin)
    return Letter(
        at=at,
        origin=origin,
        stage=dead.stage,
        reason=str(dead.reason),
        message=dead.message,
        time_ms=dead.time,
        timestamp=dead.timestamp,
        size_bytes=None if dead.value is None else _size(dead),
        attributes=dead.attributes,
        attempt=attempt,
        root=root,
    )


def _size(dead: DeadLetter) -> int:
    headers = sum(len(h.key.encode()) + len(h.value or b"") + 10 for h in dead.headers)
    return len(dead.key or b"") + len(dead.value or b"") + headers


def _history(headers: Sequence[RecordHeader], origin: Place) -> tuple[int, Place]:
    """Attempt and first place by a record's headers; others than ours may have written them."""
    found = {header.key: (header.value or b"").decode(errors="replace") for header in headers}
    attempt = found.get(RETRY_ATTEMPT, "")
    partition, offset = found.get(RETRY_PARTITION, ""), found.get(RETRY_OFFSET, "")
    if not (attempt.isdecimal() and partition.isdecimal() and offset.isdecimal()):
        return 0, origin
    return int(attempt), Place(found.get(RETRY_TOPIC, ""), int(partition), int(offset))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Letters of one stage and reason.

    Attributes:
        letters: How many there are.
        open: How many of them nobody has done anything about.
        first_ms: Time of the oldest.
        last_ms: Time of the newest.
        topics: What their records were in.
        example: The newest one's message.
    """

    stage: str
    reason: str
    letters: int
    open: int
    retried: int
    dropped: int
    first_ms: int
    last_ms: int
    topics: tuple[str, ...]
    example: str


def grouped(cases: Iterable[Case]) -> list[Group]:
    """Cases by stage and reason, the most open ones first."""
    by_kind: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in cases:
        by_kind[case.letter.stage, case.letter.reason].append(case)
    groups = [_group(stage, reason, found) for (stage, reason), found in by_kind.items()]
    return sorted(groups, key=lambda group: (-group.open, group.stage, group.reason))


def _group(stage: str, reason: str, cases: Sequence[Case]) -> Group:
    newest = max(cases, key=lambda case: case.letter.time_ms).letter
    return Group(
        stage=stage,
        reason=reason,
        letters=len(cases),
        open=sum(case.state == "open" for case in cases),
        retried=sum(case.state == "retried" for case in cases),
        dropped=sum(case.state == "dropped" for case in cases),
        first_ms=min(case.letter.time_ms for case in cases),
        last_ms=newest.time_ms,
        topics=tuple(sorted({case.letter.origin.topic for case in cases})),
        example=newest.message,
    )


__all__ = [
    "MARK_HEADER",
    "MAX_ATTEMPTS",
    "RETRY_ATTEMPT",
    "RETRY_LETTER",
    "RETRY_OFFSET",
    "RETRY_PARTITION",
    "RETRY_TOPIC",
    "Case",
    "Group",
    "Identity",
    "Ledger",
    "Letter",
    "Mark",
    "Place",
    "Plan",
    "Refusal",
    "Selector",
    "Target",
    "grouped",
    "in_order",
    "letter_of",
    "plan_retry",
    "retry_headers",
    "with_retry_headers",
]
