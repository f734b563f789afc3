"""State to bytes and back: one record per session, one per partition.

A session's bytes hold its facts, bodies and places; what can be derived (sums, indexes, due
times) is not written but computed anew. Facts refer to each other by offset and ordinal.
Decoding gives a session that goes on exactly like the one that was encoded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar

import msgspec

from processors.feedback_align.model import (
    Fact,
    Feedback,
    HeldBodies,
    Key,
    Life,
    Run,
    Segment,
    Session,
    Turn,
)
from processors.feedback_align.watermark import Position
from streams.contracts import (
    AttributedBy,
    ClosedBy,
    DialogueTurn,
    FeedbackEvent,
    Message,
    Role,
)
from streams.errors import StateError

_FORMAT: Literal[1] = 1
_NONE = -1
"""No offset, no ordinal."""

T = TypeVar("T")


class _Turn(msgspec.Struct, array_like=True, frozen=True):
    place: int
    offset: int
    event_id: str
    turn_id: str
    key: Key
    stamp: int
    role: Role
    main: bool
    reply: bool
    session_done: bool
    size: int
    digest: bytes
    life: Life
    segment: int
    body: DialogueTurn | None


class _Feedback(msgspec.Struct, array_like=True, frozen=True):
    place: int
    offset: int
    event_id: str
    key: Key
    stamp: int
    turn_id: str | None
    supersedes: str | None
    retraction: bool
    digest: bytes
    life: Life
    target: int
    attributed_by: AttributedBy | None
    segment: int
    body: FeedbackEvent | None


class _Segment(msgspec.Struct, array_like=True, frozen=True):
    ordinal: int
    segment_id: str
    source: str
    user_id: str | None
    closed_by: ClosedBy
    first_closed_ms: int
    first_event_time: int
    boundary: Key
    carried: tuple[Message, ...]
    revision: int
    fading: bool


class _Session(msgspec.Struct, array_like=True, frozen=True):
    format: Literal[1]
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
    places: list[tuple[str, int]]
    segments: list[_Segment]
    turns: list[_Turn]
    feedback: list[_Feedback]


class _Partition(msgspec.Struct, array_like=True, frozen=True):
    format: Literal[1]
    clock_ms: int
    positions: dict[str, tuple[int, int]]


_encode = msgspec.msgpack.Encoder().encode
_session_decoder = msgspec.msgpack.Decoder(_Session)
_partition_decoder = msgspec.msgpack.Decoder(_Partition)


def encode_session(session: Session) -> bytes:
    """One session's state as bytes."""
    places: dict[tuple[str, int], int] = {}
    turns, feedback = _facts(session)

    def place(fact: Fact) -> int:
        return places.setdefault((fact.topic, fact.partition), len(places))

    bodies = session.bodies
    turn_images = [_turn_image(fact, place(fact), bodies) for fact in turns]
    feedback_images = [_feedback_image(fact, place(fact), bodies) for fact in feedback]
    segments = [_segment_image(item, fading=True) for item in session.fading]
    segments += [_segment_image(item, fading=False) for item in session.segments]
    return _encode(
        _Session(
            _FORMAT,
            session.policy,
            session.session_id,
            session.applied,
            session.now_ms,
            session.ordinal,
            session.last_accepted_ms,
            session.last_closed_ms,
            session.user_id,
            session.lost,
            session.boundaries,
            list(places),
            segments,
            turn_images,
            feedback_images,
        )
    )


def _facts(session: Session) -> tuple[list[Turn], list[Feedback]]:
    """All facts of a session: held, and those that are known by id alone."""
    closed = (*session.fading, *session.segments)
    feedback = [*session.unpublished.values(), *(f for s in closed for f in s.feedback)]
    turns = list(session.turns)
    for ghost in session.ghosts:
        if isinstance(ghost, Turn):
            turns.append(ghost)
        else:
            feedback.append(ghost)
    return turns, feedback


def _turn_image(fact: Turn, place: int, bodies: HeldBodies) -> _Turn:
    return _Turn(
        place,
        fact.offset,
        fact.event_id,
        fact.turn_id,
        fact.key,
        fact.stamp,
        fact.role,
        fact.main,
        fact.reply,
        fact.session_done,
        fact.size,
        fact.digest,
        fact.life,
        fact.segment.ordinal if fact.segment is not None else _NONE,
        bodies.turns.get(fact.offset),
    )


def _feedback_image(fact: Feedback, place: int, bodies: HeldBodies) -> _Feedback:
    return _Feedback(
        place,
        fact.offset,
        fact.event_id,
        fact.key,
        fact.stamp,
        fact.turn_id,
        fact.supersedes,
        fact.retraction,
        fact.digest,
        fact.life,
        _link(fact.target),
        fact.attributed_by,
        fact.segment.ordinal if fact.segment is not None else _NONE,
        bodies.notes.get(fact.offset),
    )


def _link(fact: Fact | None) -> int:
    if fact is None or fact.life is Life.DEAD or fact.life is Life.FORGOTTEN:
        return _NONE
    return fact.offset


def _segment_image(segment: Segment, *, fading: bool) -> _Segment:
    return _Segment(
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
        fading,
    )


def decode_session(data: bytes) -> Session:
    """The session that was encoded. Its due time is set by ``machine.restore_state``.

    Raises:
        StateError: The bytes are no session, or of a later format.
    """
    image = _decode(_session_decoder, data, "a session")
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
        boundaries=image.boundaries,
    )
    segments = _restore_segments(session, image.segments)
    turns = _restore_turns(session, image, segments)
    feedback = _restore_feedback(session, image, segments, turns)
    _restore_indexes(session, turns.values(), feedback)
    _restore_runs(session)
    return session


def _restore_segments(session: Session, images: Iterable[_Segment]) -> dict[int, Segment]:
    segments: dict[int, Segment] = {}
    for image in images:
        segment = Segment(
            ordinal=image.ordinal,
            segment_id=image.segment_id,
            source=image.source,
            user_id=image.user_id,
            closed_by=image.closed_by,
            first_closed_ms=image.first_closed_ms,
            first_event_time=image.first_event_time,
            boundary=image.boundary,
            turns=[],
            carried=image.carried,
            revision=image.revision,
        )
        segments[image.ordinal] = session.owners[image.boundary] = segment
        (session.fading if image.fading else session.segments).append(segment)
    return segments


def _restore_turns(
    session: Session, image: _Session, segments: dict[int, Segment]
) -> dict[int, Turn]:
    turns: dict[int, Turn] = {}
    for item in image.turns:
        topic, partition = image.places[item.place]
        turn = Turn(
            topic,
            partition,
            item.offset,
            item.event_id,
            item.turn_id,
            item.key,
            item.stamp,
            item.role,
            item.main,
            item.reply,
            item.session_done,
            item.size,
            item.digest,
            item.life,
            segments.get(item.segment),
        )
        turns[turn.offset] = turn
        if item.body is not None:
            session.bodies.turns[turn.offset] = item.body
        if turn.life is Life.FORGOTTEN:
            session.ghosts.append(turn)
            continue
        session.turns.append(turn)
        if turn.segment is not None:
            _put_in_segment(session, turn, turn.segment)
    return turns


def _put_in_segment(session: Session, fact: Fact, segment: Segment) -> None:
    if fact.life is Life.PUBLISHED:
        if isinstance(fact, Turn):
            segment.turns.append(fact)
        else:
            segment.feedback.append(fact)
        return
    if isinstance(fact, Turn):
        segment.pending.turns[fact.offset] = fact
    else:
        segment.pending.feedback[fact.offset] = fact
    segment.pending.stale = True
    session.revisable[segment.ordinal] = segment


def _restore_feedback(
    session: Session,
    image: _Session,
    segments: dict[int, Segment],
    turns: dict[int, Turn],
) -> list[Feedback]:
    found = {item.offset: _restore_facts(item, image, segments, turns) for item in image.feedback}
    for item in image.feedback:
        feedback = found[item.offset]
        if item.body is not None:
            session.bodies.notes[feedback.offset] = item.body
        if feedback.life is Life.FORGOTTEN:
            session.ghosts.append(feedback)
        elif feedback.segment is not None:
            _put_in_segment(session, feedback, feedback.segment)
    return list(found.values())


def _restore_facts(
    item: _Feedback, image: _Session, segments: dict[int, Segment], turns: dict[int, Turn]
) -> Feedback:
    topic, partition = image.places[item.place]
    return Feedback(
        topic,
        partition,
        item.offset,
        item.event_id,
        item.key,
        item.stamp,
        item.turn_id,
        item.supersedes,
        item.retraction,
        item.digest,
        item.life,
        turns.get(item.target),
        item.attributed_by,
        segments.get(item.segment),
    )


def _restore_indexes(session: Session, turns: Iterable[Turn], feedback: Iterable[Feedback]) -> None:
    """What finds facts by id; of two with one id the later is the known one."""
    facts: list[Fact] = [*turns, *feedback]
    for fact in sorted(facts, key=_by_arrival):
        session.events[fact.event_id] = fact
        if isinstance(fact, Turn):
            if fact.life is not Life.FORGOTTEN:
                session.turn_ids[fact.turn_id] = fact
        elif fact.life is Life.OPEN or fact.life is Life.PENDING:
            session.unpublished[fact.offset] = fact
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


def encode_partition(clock_ms: int, positions: Mapping[str, Position]) -> bytes:
    """The partition's own small state as bytes: the clock, and how far each topic is applied."""
    places = {topic: (item.offset, item.maximum_ms) for topic, item in positions.items()}
    return _encode(_Partition(_FORMAT, clock_ms, places))


def decode_partition(data: bytes) -> tuple[int, dict[str, Position]]:
    """The clock and the positions that were encoded.

    Raises:
        StateError: The bytes are no partition's state, or of a later format.
    """
    image = _decode(_partition_decoder, data, "a partition's state")
    positions = {topic: Position(*place) for topic, place in image.positions.items()}
    return image.clock_ms, positions


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes, what: str) -> T:
    try:
        image = decoder.decode(data)
    except msgspec.DecodeError as error:
        raise StateError(
            f"these {len(data)} bytes are not {what} of format {_FORMAT} ({error}): they were "
            "written by another version, or damaged; rebuild the state from the input topics"
        ) from error
    return image
