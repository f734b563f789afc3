"""What passes between the runtime and a processor: plain data and one Protocol."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from processors.runtime.status import ProcessorStatus
from streams.contracts import TICK_HEADER

Headers = Sequence[tuple[str, bytes | None]]

_BATCH_BYTES = 128
"""Kafka's own fields of a batch (61) and of the record in it (at most 46)."""

_FRAMING_BYTES = 10
"""Two lengths of at most 5 bytes in front of a header's key and value."""


class RawRecord(Protocol):
    """One consumed record as the driver delivers it; nothing is decoded yet."""

    @property
    def topic(self) -> str: ...

    @property
    def partition(self) -> int: ...

    @property
    def offset(self) -> int: ...

    @property
    def timestamp(self) -> int:
        """The Kafka timestamp in milliseconds: the arrival in a LogAppendTime topic."""
        ...

    @property
    def key(self) -> bytes | None: ...

    @property
    def value(self) -> bytes | None: ...

    @property
    def headers(self) -> Headers: ...


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A raw record made by hand, for tests and for replays."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None = None
    value: bytes | None = None
    headers: Headers = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A record to produce.

    ``partition`` None means murmur2 of the key, as Java's client does.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    partition: int | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()

    def most_bytes(self) -> int:
        """An upper bound of what a record batch that holds this record alone takes."""
        headers = sum(len(k.encode()) + len(v or b"") + _FRAMING_BYTES for k, v in self.headers)
        return _BATCH_BYTES + len(self.key or b"") + len(self.value or b"") + headers


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What applying the next records of a partition's log came to.

    Attributes:
        outputs: Records to produce, in order.
        changes: State entries that changed since the last outcome; None means forgotten.
        meta: The processor's own state of the whole partition (clocks, maxima).
        applied: Per topic, the offset of the last record applied so far; topics of which
            nothing was applied since the restore may be left out.
        due_ms: When outputs were due that were caused by time and not by a record.
        records: How many records this outcome applied.
        more: Whether another drain would apply more without further input.
    """

    applied: Mapping[str, int]
    outputs: Sequence[Output] = ()
    changes: Mapping[bytes, bytes | None] = field(default_factory=dict)
    meta: bytes = b""
    due_ms: Sequence[int] = ()
    records: int = 0
    more: bool = False


class LogReader(Protocol):
    """Reads single records of the log again."""

    def read(self, topic: str, partition: int, offsets: Sequence[int]) -> Iterator[Record]:
        """The records at these rising offsets, those that are gone left out. Blocks.

        Raises:
            BrokerError: Kafka does not answer.
        """
        ...


class PartitionProcessor(Protocol):
    """The logic of one input partition. It reads no clock, and does no I/O but through a
    ``LogReader``.

    ``restore``, ``feed`` and ``drain`` are called in a thread of the processor's own, so
    what blocks there keeps nothing else of the worker waiting. The rest is asked at any time
    from another thread and must be answered from what the last of those calls left.

    The runtime calls ``restore`` once, then ``feed`` and ``drain`` in turn, never at the same
    time. What ``drain`` returns is written in one transaction before the next call, so the
    state is always that of a prefix of the merged input log.
    """

    def restore(self, entries: Iterable[tuple[bytes, bytes]], meta: bytes | None) -> None:
        """Take over what an earlier owner of the partition left.

        Args:
            entries: The state's latest entries, in no particular order.
            meta: The last outcome's ``meta``, or None for a partition never processed.

        Raises:
            StateError: An entry cannot be decoded.
        """
        ...

    def feed(self, topic: str, records: Sequence[RawRecord]) -> None:
        """Take the next records of ``topic``, in offset order, none of them fed before.

        A broken record must not raise: it becomes a dead letter of the outcome that
        applies it.
        """
        ...

    def drain(self, limit: int) -> Outcome:
        """Apply at most about ``limit`` of the records that may be applied by now."""
        ...

    def buffered(self, topic: str) -> int:
        """Records of ``topic`` that were fed and not yet applied."""
        ...

    def status(self) -> ProcessorStatus:
        """Where it stands."""
        ...


def is_tick(record: RawRecord) -> bool:
    """Whether ``record`` only moves the clock: a null value and the tick header."""
    return record.value is None and any(name == TICK_HEADER for name, _ in record.headers)
