"""What a segment looks like: branch, steps, threads, context (ALIGNMENT §2, §4). Pure.

The byte-level choices are numbered in docs/decisions/0001-segment-bytes.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

import msgspec
from msgspec.structs import replace

from processors.feedback_align.bodies import Bodies
from processors.feedback_align.model import Feedback, Segment, Session, Turn, order
from streams.contracts import (
    BranchReply,
    DialogueTurn,
    Message,
    Role,
    SourceRef,
    Step,
    StepFeedback,
    TrajectorySegment,
)
from streams.settings import AlignSettings

_json = msgspec.json.Encoder().encode


def segment_id(session: Session, ordinal: int, first: Turn) -> str:
    """The identity of a segment (decision 0001.3)."""
    name = [session.policy, session.session_id, ordinal, first.turn_id, first.event_id]
    parts = [*name, first.key[1]]
    return sha256(_json(parts)).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Branch:
    """The shape of a segment's conversation.

    Attributes:
        kept: Turns of the continued branch in order, without those dropped as retries.
        off: Main turns off the branch.
        parents: The offset of each main turn's parent, by offset; None for the first.
    """

    kept: list[Turn]
    off: list[Turn]
    parents: dict[int, int | None]


def branch_of(turns: Iterable[Turn], bodies: Bodies) -> Branch:
    """Find the continued branch: the last main turn and its ancestors.

    Args:
        turns: A segment's, in order.
        bodies: Where their content is.
    """
    main = [turn for turn in turns if turn.main]
    parents = _parents(main, bodies)
    on: set[int] = set()
    cursor = main[-1].offset if main else None
    while cursor is not None:
        on.add(cursor)
        cursor = parents[cursor]
    branch = [turn for turn in main if turn.offset in on]
    off = [turn for turn in main if turn.offset not in on]
    return Branch(_without_retries(branch, bodies), off, parents)


def _parents(main: Iterable[Turn], bodies: Bodies) -> dict[int, int | None]:
    parents: dict[int, int | None] = {}
    earlier: dict[str, int] = {}
    before: int | None = None
    for turn in main:
        named = bodies.turn(turn.offset).parent_turn_id
        parents[turn.offset] = earlier.get(named, before) if named is not None else before
        earlier[turn.turn_id] = before = turn.offset
    return parents


def _without_retries(branch: list[Turn], bodies: Bodies) -> list[Turn]:
    """Of replies to one request the last, of its other equal turns the first."""
    kept: dict[object, Turn] = {}
    for turn in branch:
        body = bodies.turn(turn.offset)
        if body.request_id is None:
            kept[turn.offset] = turn
        elif turn.reply:
            kept[body.request_id] = turn
        else:
            kept.setdefault((body.request_id, body.role, body.content), turn)
    if len(kept) == len(branch):
        return branch
    return sorted(kept.values(), key=order)


def shown_feedback(segment: Segment, held: Iterable[Feedback]) -> dict[int, list[Feedback]]:
    """The feedback that a segment shows, in order, by the offset of the reply.

    Feedback linked by ``supersedes`` is one thread; the segment's member with the greatest key
    stands for it, and a retraction in that place shows nothing.

    Args:
        segment: Its facts.
        held: All feedback that the session holds: a thread may run through feedback that is
            not in this segment (decision 0001.19).
    """
    if not any(feedback.supersedes is not None for feedback in segment.feedback):
        shown: Iterable[Feedback] = segment.feedback
    else:
        shown = _last_of_threads(segment.feedback, held)
    by_reply: dict[int, list[Feedback]] = {}
    for feedback in shown:
        assert feedback.target is not None
        by_reply.setdefault(feedback.target.offset, []).append(feedback)
    return by_reply


def _last_of_threads(feedback: Sequence[Feedback], held: Iterable[Feedback]) -> list[Feedback]:
    roots: dict[str, str] = {}

    def root(name: str) -> str:
        while (above := roots.setdefault(name, name)) != name:
            roots[name] = roots[above]
            name = above
        return name

    for item in (*feedback, *held):
        if item.supersedes is not None:
            roots[root(item.event_id)] = root(item.supersedes)
    last = {root(item.event_id): item for item in feedback}
    return [item for item in feedback if last[root(item.event_id)] is item and not item.retraction]


def _held_feedback(session: Session, at: int, settings: AlignSettings) -> Iterator[Feedback]:
    """Feedback that is open, pending, or in a segment visible at ``at``."""
    yield from session.unpublished.values()
    for segment in session.segments:
        if segment.visible_at(at, settings.horizon_ms):
            yield from segment.feedback


def build(
    session: Session,
    segment: Segment,
    closed_at: int,
    next_user: Turn | None,
    bodies: Bodies,
    settings: AlignSettings,
) -> TrajectorySegment:
    """The segment as it is published.

    Args:
        session: Its session.
        segment: Its facts, with everything that goes in.
        closed_at: Of this revision.
        next_user: The user turn after it, for steps that no user turn of its own follows.
        bodies: Where content is.
        settings: The aligner's.
    """
    held = _held_feedback(session, closed_at, settings)
    steps, off_branch = _content(segment, held, next_user, bodies)
    event_times = [turn.key[0] for turn in segment.turns]
    return TrajectorySegment(
        segment_id=segment.segment_id,
        revision=segment.revision,
        policy=session.policy,
        session_id=session.session_id,
        user_id=segment.user_id,
        source=segment.source,
        ordinal=segment.ordinal,
        closed_by=segment.closed_by,
        closed_at=closed_at,
        first_closed_at=segment.first_closed_ms,
        settle_ms=settings.settle_ms,
        first_event_time=event_times[0],
        last_event_time=event_times[-1],
        steps=steps,
        off_branch=off_branch,
        lineage=_lineage(segment),
        digest=sha256(_json(steps)).hexdigest(),
    )


def _lineage(segment: Segment) -> tuple[SourceRef, ...]:
    facts: list[Turn | Feedback] = [*segment.turns, *segment.feedback]
    places = sorted((fact.topic, fact.partition, fact.offset) for fact in facts)
    return tuple(SourceRef(topic=t, partition=p, offset=o) for t, p, o in places)


def _content(
    segment: Segment, held: Iterable[Feedback], next_user: Turn | None, bodies: Bodies
) -> tuple[tuple[Step, ...], tuple[BranchReply, ...]]:
    branch = branch_of(segment.turns, bodies)
    shown = shown_feedback(segment, held)
    steps: list[Step] = []
    placed: set[int] = set()
    context = _carried_messages(segment.carried, bodies)
    followers = _next_user_turns(branch.kept, next_user)
    for turn, follower in zip(branch.kept, followers, strict=True):
        body = bodies.turn(turn.offset)
        if not turn.reply:
            context.append(message(body))
            continue
        rivals = _alternatives(turn, branch, bodies)
        placed.update(rival.offset for rival in (turn, *rivals))
        steps.append(
            _step(
                body,
                tuple(context),
                _show(turn, shown, bodies),
                tuple(_branch_reply(rival, shown, bodies) for rival in rivals),
                message(bodies.turn(follower.offset)) if follower is not None else None,
                first=not steps,
            )
        )
        context.clear()
    off_branch = tuple(
        _branch_reply(turn, shown, bodies)
        for turn in segment.turns
        if turn.offset in shown and turn.offset not in placed
    )
    return tuple(steps), off_branch


def _next_user_turns(kept: Sequence[Turn], after: Turn | None) -> list[Turn | None]:
    """For each turn the first user turn after it."""
    followers: list[Turn | None] = []
    for turn in reversed(kept):
        followers.append(after)
        if turn.role is Role.USER:
            after = turn
    followers.reverse()
    return followers


def _alternatives(step: Turn, branch: Branch, bodies: Bodies) -> list[Turn]:
    if not branch.off:
        return []
    parent = branch.parents[step.offset]
    request = bodies.turn(step.offset).request_id
    return [
        turn
        for turn in branch.off
        if turn.reply
        and branch.parents[turn.offset] == parent
        and (request is None or bodies.turn(turn.offset).request_id != request)
    ]


def _step(
    body: DialogueTurn,
    context: tuple[Message, ...],
    feedback: tuple[StepFeedback, ...],
    alternatives: tuple[BranchReply, ...],
    next_user_turn: Message | None,
    *,
    first: bool,
) -> Step:
    return Step(
        turn_id=body.turn_id,
        reply=body.content,
        event_time=body.event_time,
        context=context,
        tool_calls=body.tool_calls,
        model=body.model,
        policy_version=body.policy_version,
        token_ids=body.token_ids,
        behaviour_logprobs=body.behaviour_logprobs,
        prompt_token_ids=body.prompt_token_ids if first else None,
        sampling=body.sampling,
        finish_reason=body.finish_reason,
        tokenizer_digest=body.tokenizer_digest,
        template_digest=body.template_digest,
        feedback=feedback,
        alternatives=alternatives,
        next_user_turn=next_user_turn,
        attributes=body.attributes,
    )


def _branch_reply(turn: Turn, shown: dict[int, list[Feedback]], bodies: Bodies) -> BranchReply:
    body = bodies.turn(turn.offset)
    return BranchReply(
        turn_id=body.turn_id,
        reply=body.content,
        event_time=body.event_time,
        policy_version=body.policy_version,
        feedback=_show(turn, shown, bodies),
    )


def _show(turn: Turn, shown: dict[int, list[Feedback]], bodies: Bodies) -> tuple[StepFeedback, ...]:
    return tuple(_step_feedback(item, turn, bodies) for item in shown.get(turn.offset, ()))


def _step_feedback(feedback: Feedback, turn: Turn, bodies: Bodies) -> StepFeedback:
    body = bodies.feedback(feedback.offset)
    assert feedback.attributed_by is not None
    return StepFeedback(
        event_id=body.event_id,
        kind=body.kind,
        event_time=body.event_time,
        delay_ms=body.event_time - turn.key[0],
        attributed_by=feedback.attributed_by,
        source=body.source,
        value=body.value,
        text=body.text,
        tags=body.tags,
        supersedes=body.supersedes,
        user_id=body.user_id,
        attributes=body.attributes,
    )


def message(body: DialogueTurn) -> Message:
    """A turn as context."""
    return Message(
        turn_id=body.turn_id,
        role=body.role,
        content=body.content,
        event_time=body.event_time,
        tool_calls=body.tool_calls,
        tool_call_id=body.tool_call_id,
    )


def carried_from(segment: Segment, bodies: Bodies, max_bytes: int) -> tuple[int, ...]:
    """The offsets of what a segment hands on to the one that continues it (decision 0001.10)."""
    branch = branch_of(segment.turns, bodies)
    turns = dict(_still_there(segment.carried, bodies))
    turns.update((turn.offset, bodies.turn(turn.offset)) for turn in branch.kept)
    offsets = list(turns)
    return tuple(offsets[index] for index in shorten(list(turns.values()), max_bytes))


def _still_there(offsets: Iterable[int], bodies: Bodies) -> Iterator[tuple[int, DialogueTurn]]:
    """What is carried, on and on, may be older than what the log keeps."""
    for offset in offsets:
        body = bodies.carried(offset)
        if body is not None:
            yield offset, body


def _carried_messages(offsets: Iterable[int], bodies: Bodies) -> list[Message]:
    there = _still_there(offsets, bodies)
    return [replace(message(body), carried=True) for _, body in there]


def shorten(turns: Sequence[DialogueTurn], max_bytes: int) -> list[int]:
    """Which turns are left when the oldest are dropped until the contents fit.

    A system message in first place stays as long as anything else can go.

    Returns:
        Their places in ``turns``.
    """
    sizes = [len(item.content.encode()) for item in turns]
    total = sum(sizes)
    leading = 1 if turns and turns[0].role is Role.SYSTEM else 0
    start = leading
    while total > max_bytes and start < len(turns):
        total -= sizes[start]
        start += 1
    head = range(leading) if total <= max_bytes else ()
    return [*head, *range(start, len(turns))]
