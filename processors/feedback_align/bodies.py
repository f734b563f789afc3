"""Where the content of events is: near at hand, or back in the input log.

The state holds facts; content is needed when a segment is built or rebuilt. An event is named
by its offset, since a partition's turns all stand in one topic and its feedback in another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Generic, Protocol, TypeVar

from streams.contracts import DialogueTurn, FeedbackEvent
from streams.errors import StateError

_RECORD_BYTES = 1_024
"""What a decoded record takes beside its content, about."""

AHEAD_BYTES = 4 * 1024 * 1024
"""Of what is read back before it is asked for, about so much is held."""

_NUMBER_BYTES = 36
"""What a number and its place in a tuple take."""


class Bodies(Protocol):
    """Gives the content of accepted events."""

    def keep_turn(self, offset: int, record: DialogueTurn) -> None:
        """Take the content of a turn just accepted."""
        ...

    def keep_feedback(self, offset: int, record: FeedbackEvent) -> None:
        """Take the content of feedback just accepted."""
        ...

    def turn(self, offset: int) -> DialogueTurn:
        """The turn at this offset.

        Raises:
            StateError: It is not in the log any more.
        """
        ...

    def feedback(self, offset: int) -> FeedbackEvent:
        """The feedback at this offset.

        Raises:
            StateError: It is not in the log any more.
        """
        ...

    def carried(self, offset: int) -> DialogueTurn | None:
        """A turn that ``want`` was told is carried; None if it is not in the log any more."""
        ...

    def want(
        self, turns: Iterable[int], feedback: Iterable[int], carried: Iterable[int] = ()
    ) -> None:
        """Say what will be asked for next, so that it can be fetched together.

        Raises:
            StateError: Some of it, of what is not carried, is not in the log any more.
        """
        ...


@dataclass(slots=True, eq=False)
class HeldBodies:
    """All content, kept: for tests and small logs."""

    turns: dict[int, DialogueTurn] = field(default_factory=dict)
    notes: dict[int, FeedbackEvent] = field(default_factory=dict)

    def keep_turn(self, offset: int, record: DialogueTurn) -> None:
        self.turns[offset] = record

    def keep_feedback(self, offset: int, record: FeedbackEvent) -> None:
        self.notes[offset] = record

    def turn(self, offset: int) -> DialogueTurn:
        return self.turns[offset]

    def feedback(self, offset: int) -> FeedbackEvent:
        return self.notes[offset]

    def carried(self, offset: int) -> DialogueTurn | None:
        return self.turns.get(offset)

    def want(
        self, turns: Iterable[int], feedback: Iterable[int], carried: Iterable[int] = ()
    ) -> None:
        """Nothing to fetch."""


T = TypeVar("T", DialogueTurn, FeedbackEvent)

Read = Callable[[Sequence[int]], Iterable[tuple[int, T]]]
"""Reads the events at these offsets, rising, from the log; leaves out what is gone."""


Offsets = tuple[Sequence[int], Sequence[int]]
"""Of turns, and of feedback."""


class _Shelf(Generic[T]):
    """One topic's content: what came last up to a limit, and what was read back.

    Reading back costs a seek, however much is read there: when anything is missing, what
    will be asked for next is fetched with it and held until the next time.
    """

    def __init__(
        self, topic: str, read: Read[T], max_bytes: int, ahead: Callable[[], Iterable[int]]
    ) -> None:
        self.topic = topic
        self.fetched = 0
        self._read: Read[T] = read
        self._max_bytes = max_bytes
        self._ahead = ahead
        self._bytes = 0
        self._recent: dict[int, tuple[T, int]] = {}
        self._held: dict[int, T] = {}
        self._asked: set[int] = set()
        self._gone: set[int] = set()

    def keep(self, offset: int, record: T) -> None:
        size = memory_of(record)
        recent = self._recent
        recent[offset] = (record, size)
        self._bytes += size
        while self._bytes > self._max_bytes and len(recent) > 1:
            # The oldest first: it is most likely closed and done with.
            self._bytes -= recent.pop(next(iter(recent)))[1]

    def get(self, offset: int) -> T:
        recent = self._recent.get(offset)
        if recent is not None:
            return recent[0]
        if offset not in self._held:
            self._fetch({offset}, self._asked | {offset})
        return self._held[offset]

    def find(self, offset: int) -> T | None:
        """What is at hand; ``want`` was told of it."""
        found = self._recent.get(offset)
        return self._held.get(offset) if found is None else found[0]

    def want(self, offsets: Iterable[int], welcome: Iterable[int] = ()) -> None:
        """Have ``offsets`` at hand, and of ``welcome`` what there is."""
        needed = set(offsets)
        self._asked = needed.union(welcome)
        missing = self._asked.difference(self._recent, self._held)
        lacking = needed.intersection(missing)
        if lacking or not missing <= self._gone:
            self._fetch(lacking, self._asked)

    def _fetch(self, needed: set[int], asked: set[int]) -> None:
        """Read back what is not at hand of ``asked``, and some of what comes next."""
        kept = asked.union(self._ahead())
        held = {offset: self._held[offset] for offset in kept if offset in self._held}
        room = AHEAD_BYTES - sum(map(memory_of, held.values()))
        missing = kept.difference(self._recent, held)
        gone = asked.intersection(missing)
        for offset, record in self._read(sorted(missing)):
            self.fetched += 1
            gone.discard(offset)
            if offset in asked or room > 0:
                held[offset] = record
                room -= memory_of(record)
        self._held, self._gone = held, gone
        if not needed.isdisjoint(gone):
            lost = sorted(needed & gone)
            raise StateError(
                f"{self.topic}: the records at offsets {lost[:5]} (of {len(lost)}) are needed "
                "to build a segment and are gone from the log: its retention must be longer "
                "than align.horizon_ms + align.max_open_ms. Restore them, or start with "
                "another application id and an empty changelog"
            )


def memory_of(record: DialogueTurn | FeedbackEvent) -> int:
    """About how many bytes a record takes in memory."""
    size = _RECORD_BYTES
    if isinstance(record, DialogueTurn):
        size += getsizeof(record.content)
        for numbers in (record.token_ids, record.behaviour_logprobs, record.prompt_token_ids):
            if numbers:
                size += _NUMBER_BYTES * len(numbers)
        if record.tool_calls:
            size += sum(getsizeof(call.arguments) for call in record.tool_calls)
    elif record.text:
        size += getsizeof(record.text)
    if record.attributes:
        size += sum(map(getsizeof, record.attributes.values()))
    return size


class CachedBodies:
    """The content that came last, up to a limit; what is older is read back from the log.

    Args:
        source: Where the events stand.
        read_turns: Reads turns back.
        read_feedback: Reads feedback back.
        max_bytes: About how much of it to keep in memory.
        ahead: Offsets of the turns and of the feedback that will probably be asked for next.
    """

    def __init__(
        self,
        source: tuple[str, str],
        read_turns: Read[DialogueTurn],
        read_feedback: Read[FeedbackEvent],
        max_bytes: int,
        ahead: Callable[[], Offsets] = lambda: ([], []),
    ) -> None:
        turns_topic, feedback_topic = source
        # Feedback is small and less.
        share = max_bytes // 5
        self._turns = _Shelf(turns_topic, read_turns, max_bytes - share, lambda: ahead()[0])
        self._notes = _Shelf(feedback_topic, read_feedback, share, lambda: ahead()[1])
        self.keep_turn = self._turns.keep
        self.keep_feedback = self._notes.keep
        self.turn = self._turns.get
        self.carried = self._turns.find
        self.feedback = self._notes.get

    def want(
        self, turns: Iterable[int], feedback: Iterable[int], carried: Iterable[int] = ()
    ) -> None:
        self._turns.want(turns, carried)
        self._notes.want(feedback)

    @property
    def fetched(self) -> int:
        """Records read back so far."""
        return self._turns.fetched + self._notes.fetched


__all__ = ["Bodies", "CachedBodies", "HeldBodies"]
