"""Retries and drops: records published again, and marks, in Kafka transactions.

One command acts at a time: each begins by taking the transactional id over, reads the letters and
marks that are there then, and commits the records together with their marks. So a retry that is
killed has either published a record and marked its letter or done neither, and two that run at
once cannot both retry a letter: the later one fences the earlier off or sees its marks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streams.contracts import DeadLetter
from streams.dlq.log import read_ledger, read_letters
from streams.dlq.model import (
    MARK_HEADER,
    MAX_ATTEMPTS,
    Case,
    Ledger,
    Mark,
    Place,
    Plan,
    Selector,
    Target,
    plan_retry,
    with_retry_headers,
)
from streams.errors import BrokerError, DeadLetterError
from streams.topics import DEAD_LETTERS

if TYPE_CHECKING:
    from confluent_kafka import Message, Producer

    from streams.serde import Codec
    from streams.settings import Settings

CHUNK_LETTERS = 500
CHUNK_BYTES = 16 * 1024 * 1024
"""What one transaction publishes at most; a larger letter has one of its own."""

_TIMEOUT_S = 60.0
_MAX_BYTES = "max.message.bytes"
_TAKEN_OVER = (
    "another dlq command took over while this one ran; see `clawstream dlq list`, then try again"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Author:
    """Who acts, when and why; kept with each mark."""

    at_ms: int
    actor: str | None = None
    note: str | None = None


OnCommit = Callable[[Sequence[Mark]], None]


class Desk:
    """Acts on the letters of one topic.

    Args:
        settings: Where Kafka is.
        codec: Reads letters.
        topic: The topic of dead letters.
    """

    def __init__(self, settings: Settings, codec: Codec, topic: str = DEAD_LETTERS) -> None:
        self._settings = settings
        self._codec = codec
        self._topic = topic

    def ledger(self) -> Ledger:
        """All letters and marks there are now."""
        return read_ledger(self._settings, self._codec, self._topic)

    def plan(
        self, selector: Selector, *, max_attempts: int = MAX_ATTEMPTS, force: bool = False
    ) -> Plan:
        """What a retry would do now; changes nothing.

        Raises:
            DeadLetterError: A letter that was named is not there, or cannot be retried.
        """
        cases = selector.chosen(self.ledger().cases())
        targets = self._targets({case.letter.origin.topic for case in cases})
        found = plan_retry(cases, targets, max_attempts=max_attempts, force=force)
        if selector.places and found.refused:
            lines = [f"  {item.case.letter.origin}: {item.why}" for item in found.refused]
            raise DeadLetterError("nothing was retried:\n" + "\n".join(lines))
        return found

    def retry(
        self,
        selector: Selector,
        author: Author,
        *,
        max_attempts: int = MAX_ATTEMPTS,
        force: bool = False,
        on_commit: OnCommit = lambda marks: None,
    ) -> Plan:
        """Publish records again, each to its partition, in the order in which they came.

        Returns:
            What was done.

        Raises:
            DeadLetterError: As ``plan``; or another command took over.
            BrokerError: Kafka did not take them; what ``on_commit`` was told is done.
        """
        with self._acting() as producer:
            found = self.plan(selector, max_attempts=max_attempts, force=force)
            for chunk in _chunks(found.retry):
                letters = dict(
                    read_letters(self._settings, self._codec, [case.letter.at for case in chunk])
                )
                with _transaction(producer):
                    marks = _republish(producer, chunk, letters, author)
                    self._write(producer, chunk, marks)
                on_commit(marks)
        return found

    def drop(self, selector: Selector, author: Author) -> list[Mark]:
        """Mark open letters as done with; nothing is deleted.

        Raises:
            DeadLetterError: A letter that was named is not there, or another command took over.
            BrokerError: Kafka did not take the marks; none was set.
        """
        with self._acting() as producer:
            cases = [
                case for case in selector.chosen(self.ledger().cases()) if case.state == "open"
            ]
            marks = [_mark(case, "dropped", author) for case in cases]
            if marks:
                with _transaction(producer):
                    self._write(producer, cases, marks)
        return marks

    def _write(self, producer: Producer, cases: Sequence[Case], marks: Sequence[Mark]) -> None:
        """Put each mark into its letter's partition."""
        deliveries = _Deliveries()
        for case, mark in zip(cases, marks, strict=True):
            _produce(
                producer,
                self._topic,
                partition=case.letter.at.partition,
                key=str(case.letter.origin).encode(),
                headers=[(MARK_HEADER, mark.to_json())],
                on_delivery=deliveries.expect(),
            )
        deliveries.wait(producer)

    def _targets(self, topics: set[str]) -> dict[str, Target]:
        from streams.kafka.admin import Admin
        from streams.kafka.clients import resolve_bootstrap

        kafka = self._settings.kafka
        found = Admin(kafka, resolve_bootstrap(self._settings)).describe(tuple(sorted(topics)))
        return {
            name: Target(
                partitions=topic.partitions,
                max_bytes=min(int(topic.config[_MAX_BYTES]), kafka.max_message_bytes),
            )
            for name, topic in found.items()
        }

    @contextmanager
    def _acting(self) -> Iterator[Producer]:
        """A transactional producer; whoever held its id before cannot commit any more."""
        from confluent_kafka import KafkaException

        from streams.kafka.clients import describe_error, make_producer, resolve_bootstrap

        bootstrap = resolve_bootstrap(self._settings)
        # Raised out of `flush`, it would meet the deliveries' own errors there.
        heard: list[BrokerError] = []
        producer = make_producer(
            self._settings.kafka,
            bootstrap,
            on_error=heard.append,
            overrides={"transactional.id": f"clawstream-dlq-{self._topic}"},
        )
        try:
            producer.init_transactions(_TIMEOUT_S)
            yield producer
        except KafkaException as error:
            if _is_fenced(error.args[0]):
                raise DeadLetterError(_TAKEN_OVER) from error
            raise (heard or [describe_error(error.args[0], bootstrap)])[0] from error


@contextmanager
def _transaction(producer: Producer) -> Iterator[None]:
    from confluent_kafka import KafkaException

    producer.begin_transaction()
    try:
        yield
        producer.commit_transaction(_TIMEOUT_S)
    except BaseException:
        try:
            producer.abort_transaction(_TIMEOUT_S)
        except KafkaException as error:
            # A fenced producer cannot abort, and need not: its successor has. What failed
            # before only followed from it.
            if _is_fenced(error.args[0]):
                raise DeadLetterError(_TAKEN_OVER) from error
        raise


def _republish(
    producer: Producer,
    chunk: Sequence[Case],
    letters: dict[Place, DeadLetter],
    author: Author,
) -> list[Mark]:
    """Produce each record; the marks say where each was put."""
    deliveries = _Deliveries()
    for case in chunk:
        dead = letters[case.letter.at]
        _produce(
            producer,
            case.letter.origin.topic,
            partition=case.letter.origin.partition,
            key=dead.key,
            value=dead.value,
            headers=with_retry_headers(dead.headers, case),
            on_delivery=deliveries.expect(),
        )
    places = deliveries.wait(producer)
    return [
        _mark(case, "retried", author, place) for case, place in zip(chunk, places, strict=True)
    ]


def _mark(case: Case, action: Any, author: Author, landed: Place | None = None) -> Mark:
    return Mark(
        letter=case.letter.identity,
        action=action,
        at_ms=author.at_ms,
        actor=author.actor,
        note=author.note,
        attempt=0 if landed is None else case.attempt + 1,
        root=case.root,
        landed=landed,
    )


class _Deliveries:
    """Waits for every record of a transaction, and keeps where each was put."""

    def __init__(self) -> None:
        self._places: list[Place | None] = []
        self._failures: list[Any] = []

    def expect(self) -> Callable[[Any, Message], None]:
        """The callback of the next record."""
        number = len(self._places)
        self._places.append(None)

        def delivered(error: Any, message: Message) -> None:
            if error is not None:
                self._failures.append(error)
                return
            self._places[number] = Place(
                message.topic() or "", message.partition() or 0, message.offset() or 0
            )

        return delivered

    def wait(self, producer: Producer) -> list[Place]:
        """Where each was put, in order.

        Raises:
            BrokerError: Kafka did not take one.
            DeadLetterError: Another command took over.
        """
        unsent = producer.flush(_TIMEOUT_S)
        if any(_is_fenced(failure) for failure in self._failures):
            raise DeadLetterError(_TAKEN_OVER)
        places = [place for place in self._places if place is not None]
        if unsent or self._failures or len(places) < len(self._places):
            why = f": {self._failures[0].str()}" if self._failures else f" in {_TIMEOUT_S:.0f} s"
            raise BrokerError(
                f"Kafka did not take {len(self._places) - len(places)} of {len(self._places)} "
                f"records{why}; none of them was published, try again"
            )
        return places


def _produce(producer: Producer, topic: str, **record: Any) -> None:
    while True:
        try:
            producer.produce(topic, **record)
            return
        except BufferError:
            producer.poll(0.1)


def _chunks(cases: Sequence[Case]) -> Iterator[list[Case]]:
    chunk: list[Case] = []
    size = 0
    for case in cases:
        more = case.letter.size_bytes or 0
        if chunk and (len(chunk) >= CHUNK_LETTERS or size + more > CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(case)
        size += more
    if chunk:
        yield chunk


def _is_fenced(error: Any) -> bool:
    from confluent_kafka import KafkaError

    fenced = (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH)
    return error.code() in fenced


__all__ = ["Author", "Desk"]
