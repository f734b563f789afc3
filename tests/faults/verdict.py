"""What the topics must hold by the oracle, against what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from processors.feedback_align.agent import (
    ORIGIN_OFFSET,
    ORIGIN_PARTITION,
    ORIGIN_TOPIC,
    AlignTopics,
)
from processors.runtime.records import Record
from streams.contracts import (
    TICK_HEADER,
    DeadLetter,
    DialogueTurn,
    FeedbackEvent,
    TrajectorySegment,
)
from streams.errors import RecordError
from streams.serde import Codec
from streams.settings import AlignSettings
from tests.faults.load import EXPECTED_REASON, MISPLACED
from tests.oracle.aligner import run_oracle
from tests.oracle.logs import LogRecord

FOREVER_MS = 2**62

Coordinates = tuple[str, int, int]
Letter = tuple[str, int, int, str]
"""Coordinates of a record and the reason it is a dead letter for."""


@dataclass(frozen=True)
class Outcome:
    """What came of the inputs.

    Attributes:
        segments: The bytes of every segment and revision.
        dead_letters: Coordinates and reason of each dead letter.
        republished: The coordinates misplaced records were found at, once per copy.
    """

    segments: Counter[bytes] = field(default_factory=Counter)
    dead_letters: Counter[Letter] = field(default_factory=Counter)
    republished: Counter[Coordinates] = field(default_factory=Counter)

    def total(self) -> int:
        """How many outputs."""
        return self.segments.total() + self.dead_letters.total() + self.republished.total()


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far the topics are from the oracle.

    Attributes:
        events: Records that were sent to the inputs; ticks and copies do not count.
        segments: Segments and revisions expected.
        revisions: Revisions expected.
        dead_letters: Dead letters expected.
        lost: Outputs that are not there.
        duplicated: Ids (segment and revision, dead record, republished record) there twice.
        wrong: Outputs that nothing explains.
        example: One of what is lost or wrong, for a person.
    """

    events: int
    segments: int
    revisions: int
    dead_letters: int
    lost: int
    duplicated: int
    wrong: int
    example: str = ""

    @property
    def exact(self) -> bool:
        """Whether the topics hold exactly what they must."""
        return self.lost == self.duplicated == self.wrong == 0

    @property
    def exact_by_id(self) -> bool:
        """Whether they do for a reader that drops ids it knows."""
        return self.lost == self.wrong == 0


@dataclass(frozen=True, slots=True)
class Judge:
    """Knows the rules and the topics.

    Attributes:
        topics: The aligner's topics.
        settings: The rules.
        codec: Reads records, writes segments as the aligner must.
    """

    topics: AlignTopics
    settings: AlignSettings
    codec: Codec

    def expected(
        self, records: Sequence[Record], unread: Collection[Coordinates] = frozenset()
    ) -> Outcome:
        """What must come of input records.

        Args:
            records: All records of both inputs, in order of offsets.
            unread: What retention deleted before anybody read it.
        """
        outcome = Outcome()
        logs: dict[int, dict[str, list[LogRecord]]] = {}
        for record in records:
            if (record.topic, record.partition, record.offset) in unread:
                continue
            inputs = (self.topics.turns, self.topics.feedback)
            log = logs.setdefault(record.partition, {topic: [] for topic in inputs})
            log[record.topic].append(self._entry(record, outcome))
        for log in logs.values():
            result = run_oracle(
                log[self.topics.turns], log[self.topics.feedback], self.settings, FOREVER_MS
            )
            outcome.segments.update(
                self.codec.encode(segment, self.topics.segments) for segment in result.segments
            )
            outcome.dead_letters.update(
                (*letter[:3], str(letter[3])) for letter in result.dead_letters
            )
        return outcome

    def _entry(self, record: Record, outcome: Outcome) -> LogRecord:
        """The record as the oracle reads it; what it cannot know is noted in ``outcome``."""
        headers = dict(record.headers)
        place = (record.topic, record.partition, record.offset)
        event: DialogueTurn | FeedbackEvent | None = None
        if EXPECTED_REASON in headers:
            reason = (headers[EXPECTED_REASON] or b"").decode()
            outcome.dead_letters[*place, reason] += 1
        elif MISPLACED in headers and ORIGIN_TOPIC not in headers:
            outcome.republished[place] += 1
        elif TICK_HEADER not in headers:
            event = self._decoded(record)
        return LogRecord(*place, record.timestamp, event)

    def _decoded(self, record: Record) -> DialogueTurn | FeedbackEvent:
        if record.topic == self.topics.turns:
            return self.codec.decode(record.value, DialogueTurn)
        return self.codec.decode(record.value, FeedbackEvent)

    def found(self, inputs: Iterable[Record], outputs: Iterable[Record]) -> Outcome:
        """What the topics hold: outputs, and copies of misplaced records among the inputs."""
        outcome = Outcome()
        for record in outputs:
            if record.topic == self.topics.segments:
                outcome.segments[record.value or b""] += 1
            else:
                letter = self.codec.decode(record.value, DeadLetter)
                place = (letter.topic, letter.partition, letter.offset)
                outcome.dead_letters[*place, str(letter.reason)] += 1
        for record in inputs:
            headers = dict(record.headers)
            if ORIGIN_TOPIC in headers:
                outcome.republished[origin_of(headers)] += 1
        return outcome

    def verdict(self, inputs: Sequence[Record], expected: Outcome, found: Outcome) -> Verdict:
        """Compare two outcomes of the same inputs."""
        lost = wrong = 0
        examples: list[str] = []
        pairs: tuple[tuple[Counter[Any], Counter[Any]], ...] = (
            (expected.segments, found.segments),
            (expected.dead_letters, found.dead_letters),
            (expected.republished, found.republished),
        )
        for must, holds in pairs:
            missing = list((must - holds).elements())
            extra = [item for item in holds if item not in must]
            lost += len(missing)
            wrong += len(extra)
            examples += [f"lost: {self._readable(item)}" for item in missing[:1]]
            examples += [f"wrong: {self._readable(item)}" for item in extra[:1]]
        return Verdict(
            events=sum(_is_sent(record) for record in inputs),
            segments=expected.segments.total(),
            revisions=sum(self.id_of(data)[1] > 0 for data in expected.segments.elements()),
            dead_letters=expected.dead_letters.total(),
            lost=lost,
            duplicated=self._duplicated(expected, found),
            wrong=wrong,
            example="; ".join(examples),
        )

    def id_of(self, data: bytes) -> tuple[str, int]:
        """A segment's id and revision."""
        try:
            segment = self.codec.decode(data, TrajectorySegment)
        except RecordError as error:
            return f"unreadable: {error}", 0
        return segment.segment_id, segment.revision

    def _duplicated(self, expected: Outcome, found: Outcome) -> int:
        # A session that was forgotten and came again has the same ids again.
        allowed = self._ids(expected)
        return sum(count > max(1, allowed[key]) for key, count in self._ids(found).items())

    def _ids(self, outcome: Outcome) -> Counter[object]:
        ids = Counter[object](self.id_of(data) for data in outcome.segments.elements())
        ids.update(letter[:3] for letter in outcome.dead_letters.elements())
        ids.update(("republished", place) for place in outcome.republished.elements())
        return ids

    def _readable(self, item: object) -> str:
        if isinstance(item, bytes):
            segment_id, revision = self.id_of(item)
            return f"segment {segment_id} revision {revision}"
        return str(item)


def origin_of(headers: dict[str, bytes | None]) -> Coordinates:
    """Where a copy of a misplaced record was found."""
    topic, partition, offset = (
        (headers[name] or b"").decode() for name in (ORIGIN_TOPIC, ORIGIN_PARTITION, ORIGIN_OFFSET)
    )
    return topic, int(partition), int(offset)


def _is_sent(record: Record) -> bool:
    headers = dict(record.headers)
    return TICK_HEADER not in headers and ORIGIN_TOPIC not in headers
