"""State to bytes and back: an entry per session, per closed segment and per partition.

A session's own entry (its head) holds what is open or pending and what orders the rest; each
closed segment has an entry of its own, so that a session that goes on for days is not written
whole whenever something happens to it. Entries hold facts and places in the log, never
content. What can be derived (sums, indexes, due times) is computed anew. The facts of a turn
never change and are encoded once.

Decoding gives a session that goes on exactly like the one that was encoded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from processors.feedback_align.model import (
    Fact,
    Feedback,
    Key,
    Life,
    Packed,
    Position,
    Run,
    Segment,
    Session,
    Source,
    Turn,
    order,
)
from streams.contracts import AttributedBy, ClosedBy, Role
from streams.errors import StateError

_FORMAT: Literal[2] = 2
_NONE = -1
"""No offset, no ordinal, no time."""

_MAIN, _REPLY, _DONE = 1, 2, 4

T = TypeVar("T")


class _Turn(msgspec.Struct, array_like=True, frozen=True, gc=False):
    offset: int
    event_id: str
    turn_id: str
    event_time: int
    arrival_ms: int
    role: Role
    flags: int
    size: int
    digest: bytes


class _Feedback(msgspec.Struct, array_like=True, frozen=True, gc=False):
    offset: int
    event_id: str
    event_time: int
    arrival_ms: int
    turn_id: str | None
    supersedes: str | None
    retraction: bool
    digest: bytes
    target: int
    attributed_by: AttributedBy | None
    segment: int


class _Head(msgspec.Struct, array_like=True, frozen=True):
    format: Literal[2]
    due_ms: int
    open_since_ms: int
    policy: str
    session_id: str
    applied: Key
    now_ms: int
    ordinal: int
    last_accepted_ms: int
    last_closed_ms: int
    user_id: str | None
    lost: Key | None
    boundaries: list[Key]
    segments: int
    fading: list[int]
    turns: list[tuple[int, msgspec.Raw]]
    feedback: list[_Feedback]


class _Segment(msgspec.Struct, array_like=True, frozen=True, tag=0):
    format: Literal[2]
    ordinal: int
    segment_id: str
    source: str
    user_id: str | None
    closed_by: ClosedBy
    first_closed_ms: int
    first_event_time: int
    boundary: Key
    carried: tuple[int, ...]
    revision: int
    turns: list[msgspec.Raw]
    feedback: list[_Feedback]


class _Ghosts(msgspec.Struct, array_like=True, frozen=True, tag=1):
    format: Literal[2]
    ordinal: int
    turns: list[msgspec.Raw]
    feedback: list[_Feedback]


class _Outline(msgspec.Struct, array_like=True, frozen=True):
    """What a head begins with: all that is needed of a session that is not due."""

    format: Literal[2]
    due_ms: int
    open_since_ms: int


class _Partition(msgspec.Struct, array_like=True, frozen=True):
    format: Literal[2]
    clock_ms: int
    positions: dict[str, tuple[int, int]]


_encode = msgspec.msgpack.Encoder().encode
_turn_decoder = msgspec.msgpack.Decoder(_Turn)
_head_decoder = msgspec.msgpack.Decoder(_Head)
_outline_decoder = msgspec.msgpack.Decoder(_Outline)
_entry_decoder = msgspec.msgpack.Decoder(_Segment | _Ghosts)
_partition_decoder = msgspec.msgpack.Decoder(_Partition)


# Encoding


def encode_head(session: Session) -> bytes:
    """A session's own entry, with ``open_since_ms`` as it stands there."""
    runs = session.runs if len(session.runs) == 1 else sorted(session.runs, key=_by_first)
    turns = [(_NONE, turn.image or _image(turn)) for run in runs for turn in run.turns]
    for segment in session.revisable.values():
        turns += [
            (segment.ordinal, turn.image or _image(turn)) for turn in segment.pending.turns.values()
        ]
    since = session.open_since_ms
    return _encode(
        (
            _FORMAT,
            _NONE if session.due_ms is None else session.due_ms,
            _NONE if since is None else since,
            session.policy,
            session.session_id,
            session.applied,
            session.now_ms,
            session.ordinal,
            session.last_accepted_ms,
            session.last_closed_ms,
            session.user_id,
            session.lost,
            # What the entries of closed segments tell does not grow the head.
            [item for item in session.boundaries if item not in session.owners],
            len(session.segments),
            [segment.ordinal for segment in session.fading],
            turns,
            [_feedback_image(item) for item in session.unpublished.values()],
        )
    )


def _by_first(run: Run) -> Key:
    return run.turns[0].key


def encode_touched(session: Session) -> dict[int, bytes | None]:
    """The entries of closed segments that changed, by ordinal; None for one that is gone."""
    changes: dict[int, bytes | None] = {}
    if not session.touched:
        return changes
    closed = {item.ordinal: item for item in (*session.segments, *session.fading)}
    for ordinal in sorted(session.touched):
        segment = closed.get(ordinal)
        if segment is not None:
            data = _encode_segment(segment)
        elif ordinal in session.ghosts:
            data = _encode_ghosts(ordinal, session.ghosts[ordinal])
        else:
            session.entries.pop(ordinal, None)
            changes[ordinal] = None
            continue
        session.entries[ordinal] = changes[ordinal] = data
    session.touched.clear()
    return changes


def _encode_segment(segment: Segment) -> bytes:
    return _encode(
        (
            0,
            _FORMAT,
            segment.ordinal,
            segment.segment_id,
            segment.source,
            segment.user_id,
            segment.closed_by,
            segment.first_closed_ms,
            segment.first_event_time,
            segment.boundary,
            segment.carried,
            segment.revision,
            [turn.image or _image(turn) for turn in segment.turns],
            [_feedback_image(item) for item in segment.feedback],
        )
    )


def _encode_ghosts(ordinal: int, facts: Iterable[Fact]) -> bytes:
    turns: list[msgspec.Raw] = []
    feedback: list[tuple[Any, ...]] = []
    for fact in facts:
        if isinstance(fact, Turn):
            turns.append(fact.image or _image(fact))
        else:
            feedback.append(_feedback_image(fact))
    return _encode((1, _FORMAT, ordinal, turns, feedback))


def _image(turn: Turn) -> msgspec.Raw:
    """The facts of a turn, encoded and kept."""
    flags = turn.main * _MAIN + turn.reply * _REPLY + turn.session_done * _DONE
    event_time, arrival_ms, _ = turn.key
    turn.image = msgspec.Raw(
        _encode(
            (
                turn.offset,
                turn.event_id,
                turn.turn_id,
                event_time,
                arrival_ms,
                turn.role,
                flags,
                turn.size,
                turn.digest,
            )
        )
    )
    return turn.image


def _feedback_image(item: Feedback) -> tuple[Any, ...]:
    return (
        item.offset,
        item.event_id,
        item.key[0],
        item.key[1],
        item.turn_id,
        item.supersedes,
        item.retraction,
        item.digest,
        _link(item.target),
        item.attributed_by,
        item.segment.ordinal if item.segment is not None else _NONE,
    )


def _link(target: Turn | None) -> int:
    return _NONE if target is None or target.life is Life.FORGOTTEN else target.offset


# Decoding


def pack(head: bytes, entries: dict[int, bytes]) -> Packed:
    """A session as its entries, with what must be known of it without unpacking.

    Raises:
        StateError: The head is none, or of another format. Whether the rest of it is one is
            seen when it is unpacked.
    """
    image = _decode(_outline_decoder, head, "a session")
    due_ms = None if image.due_ms == _NONE else image.due_ms
    since = None if image.open_since_ms == _NONE else image.open_since_ms
    return Packed(head, entries, due_ms, None, since)


def pack_session(session: Session) -> Packed:
    """A session whose entries are as it is now; its objects are taken apart."""
    session.dissolve()
    return Packed(
        session.head, session.entries, session.due_ms, session.scheduled_ms, session.open_since_ms
    )


def content_of(packed: Packed) -> tuple[list[int], list[int]]:
    """As ``Session.content``, of a packed session.

    Raises:
        StateError: An entry is damaged, or of another format.
    """
    image = _decode(_head_decoder, packed.head, "a session")
    turns = [_turn_decoder.decode(raw).offset for _, raw in image.turns]
    feedback = [item.offset for item in image.feedback]
    concerned = {ordinal for ordinal, _ in image.turns}
    concerned.update(item.segment for item in image.feedback)
    if _NONE in concerned:
        concerned.add(max(packed.entries, default=_NONE))
    for ordinal in concerned.intersection(packed.entries):
        entry = _decode(_entry_decoder, packed.entries[ordinal], "a closed segment")
        if isinstance(entry, _Segment):
            turns.extend(_turn_decoder.decode(raw).offset for raw in entry.turns)
            turns.extend(entry.carried)
            feedback.extend(item.offset for item in entry.feedback)
    return turns, feedback


def unpack(packed: Packed, source: Source) -> Session:
    """The session that was encoded. What is due next must be reckoned anew.

    Raises:
        StateError: An entry is damaged, of another format, or missing.
    """
    image = _decode(_head_decoder, packed.head, "a session")
    session = Session(
        policy=image.policy,
        session_id=image.session_id,
        applied=image.applied,
        now_ms=image.now_ms,
        ordinal=image.ordinal,
        last_accepted_ms=image.last_accepted_ms,
        last_closed_ms=image.last_closed_ms,
        user_id=image.user_id,
        lost=image.lost,
        scheduled_ms=packed.scheduled_ms,
        entries=packed.entries,
        head=packed.head,
        open_since_ms=packed.open_since_ms,
    )
    return _Unpacking(session, source).run(image)


class _Unpacking:
    """Puts one session together from its entries."""

    def __init__(self, session: Session, source: Source) -> None:
        self._session = session
        self._source = source
        self._segments: dict[int, Segment] = {}
        self._turns: dict[int, Turn] = {}
        self._feedback: list[Feedback] = []
        self._known: list[Fact] = []

    def run(self, image: _Head) -> Session:
        session = self._session
        published = self._restore_entries()
        fading = set(image.fading)
        # Ordinals count closings.
        ordinals = sorted(self._segments)
        session.segments = [self._segments[n] for n in ordinals if n not in fading]
        session.fading = [self._segments[n] for n in image.fading if n in self._segments]
        if len(session.segments) != image.segments or len(session.fading) != len(fading):
            raise StateError(
                f"the state of session {session.session_id} has {len(ordinals)} closed segments "
                f"and not {image.segments + len(fading)}: the changelog lost records; rebuild "
                "the state from the input topics"
            )
        session.boundaries = sorted([*image.boundaries, *session.owners])
        self._restore_open(image)
        for segment, items in published:
            for item in items:
                feedback = self._new_feedback(item, Life.PUBLISHED)
                feedback.segment = segment
                segment.feedback.append(feedback)
        session.turns = sorted(self._turns.values(), key=order)
        self._restore_indexes()
        _restore_runs(session)
        return session

    def _restore_entries(self) -> list[tuple[Segment, list[_Feedback]]]:
        published: list[tuple[Segment, list[_Feedback]]] = []
        for data in self._session.entries.values():
            entry = _decode(_entry_decoder, data, "a closed segment")
            if isinstance(entry, _Ghosts):
                ghosts: list[Fact] = [self._new_turn(raw, Life.FORGOTTEN) for raw in entry.turns]
                ghosts.extend(self._new_feedback(item, Life.FORGOTTEN) for item in entry.feedback)
                self._session.ghosts[entry.ordinal] = ghosts
                continue
            segment = self._new_segment(entry)
            published.append((segment, entry.feedback))
        return published

    def _new_segment(self, entry: _Segment) -> Segment:
        segment = Segment(
            ordinal=entry.ordinal,
            segment_id=entry.segment_id,
            source=entry.source,
            user_id=entry.user_id,
            closed_by=entry.closed_by,
            first_closed_ms=entry.first_closed_ms,
            first_event_time=entry.first_event_time,
            boundary=entry.boundary,
            turns=[self._new_turn(raw, Life.PUBLISHED) for raw in entry.turns],
            carried=entry.carried,
            revision=entry.revision,
        )
        for turn in segment.turns:
            turn.segment = segment
            self._turns[turn.offset] = turn
        self._segments[entry.ordinal] = self._session.owners[entry.boundary] = segment
        return segment

    def _restore_open(self, image: _Head) -> None:
        for ordinal, raw in image.turns:
            turn = self._new_turn(raw, Life.OPEN if ordinal == _NONE else Life.PENDING)
            self._turns[turn.offset] = turn
            if ordinal != _NONE:
                turn.segment = segment = self._segments[ordinal]
                segment.pending.turns[turn.offset] = turn
                self._mark_revisable(segment)
        for item in image.feedback:
            life = Life.OPEN if item.segment == _NONE else Life.PENDING
            feedback = self._new_feedback(item, life)
            self._session.unpublished[feedback.offset] = feedback
            if item.segment != _NONE:
                feedback.segment = segment = self._segments[item.segment]
                segment.pending.feedback[feedback.offset] = feedback
                self._mark_revisable(segment)

    def _mark_revisable(self, segment: Segment) -> None:
        segment.pending.stale = True
        self._session.revisable[segment.ordinal] = segment

    def _new_turn(self, raw: msgspec.Raw, life: Life) -> Turn:
        image = _turn_decoder.decode(raw)
        key = (image.event_time, image.arrival_ms, image.offset)
        turn = Turn(
            self._source.turns_topic,
            self._source.partition,
            image.offset,
            image.event_id,
            image.turn_id,
            key,
            max(image.event_time, image.arrival_ms),
            image.role,
            image.flags & _MAIN != 0,
            image.flags & _REPLY != 0,
            image.flags & _DONE != 0,
            image.size,
            image.digest,
            life,
            # A copy, or it would keep the whole entry that it was read from.
            image=raw.copy(),
        )
        self._known.append(turn)
        return turn

    def _new_feedback(self, image: _Feedback, life: Life) -> Feedback:
        feedback = Feedback(
            self._source.feedback_topic,
            self._source.partition,
            image.offset,
            image.event_id,
            (image.event_time, image.arrival_ms, image.offset),
            max(image.event_time, image.arrival_ms),
            image.turn_id,
            image.supersedes,
            image.retraction,
            image.digest,
            life,
            self._turns.get(image.target),
            image.attributed_by,
        )
        self._known.append(feedback)
        return feedback

    def _restore_indexes(self) -> None:
        """What finds facts by id; of two with one id the later is the known one."""
        session = self._session
        for fact in sorted(self._known, key=_by_arrival):
            session.events[fact.event_id] = fact
            if isinstance(fact, Turn):
                if fact.life is not Life.FORGOTTEN:
                    session.turn_ids[fact.turn_id] = fact
            elif fact.life is Life.OPEN or fact.life is Life.PENDING:
                if fact.target is None:
                    session.orphans[fact.offset] = fact
                if fact.supersedes is not None:
                    session.superseders.setdefault(fact.supersedes, {})[fact.offset] = fact


def _by_arrival(fact: Fact) -> Key:
    return fact.key[1:]


def _restore_runs(session: Session) -> None:
    for turn in session.turns:
        if turn.life is not Life.OPEN:
            continue
        place = bisect_left(session.boundaries, turn.key)
        floor = session.boundaries[place - 1] if place else None
        if not session.runs or session.runs[-1].floor != floor:
            session.runs.append(Run(floor, stale=True))
        session.runs[-1].turns.append(turn)


# The partition


def encode_partition(clock_ms: int, positions: Mapping[str, Position]) -> bytes:
    """The partition's own small state as bytes: the clock, and how far each topic is applied."""
    places = {topic: (item.offset, item.maximum_ms) for topic, item in positions.items()}
    return _encode(_Partition(_FORMAT, clock_ms, places))


def decode_partition(data: bytes) -> tuple[int, dict[str, Position]]:
    """The clock and the positions that were encoded.

    Raises:
        StateError: The bytes are no partition's state, or of another format.
    """
    image = _decode(_partition_decoder, data, "a partition's state")
    positions = {topic: Position(*place) for topic, place in image.positions.items()}
    return image.clock_ms, positions


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes, what: str) -> T:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise StateError(
            f"these {len(data)} bytes are not {what} of format {_FORMAT} ({error}): they were "
            "written by another version, or damaged; rebuild the state from the input topics "
            "(another application id and an empty changelog)"
        ) from error
