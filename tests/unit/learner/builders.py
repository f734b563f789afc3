"""Segments and samples for the learner's tests, small enough to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from learner.batch import TrainingSample, Turn
from streams.contracts import (
    ClosedBy,
    Message,
    Role,
    ScoredSegment,
    Step,
    StepReward,
    TrajectorySegment,
)


def message(text: str, role: Role = Role.USER, **fields: Any) -> Message:
    return Message(turn_id=f"m-{text[:12]}", role=role, content=text, event_time=0, **fields)


def step(reply: str, *context: Message, **fields: Any) -> Step:
    return Step(turn_id=f"r-{reply[:12]}", reply=reply, event_time=0, context=context, **fields)


def scored(
    *steps: Step,
    rewards: Mapping[str, float] | None = None,
    closed_by: ClosedBy = ClosedBy.END,
    trainable: bool = True,
    reason: str | None = None,
) -> ScoredSegment:
    """A scored segment of these steps; `rewards` by turn id, none for the others."""
    segment = TrajectorySegment(
        segment_id="seg-1",
        revision=2,
        session_id="s",
        source="test",
        ordinal=0,
        closed_by=closed_by,
        closed_at=0,
        first_closed_at=0,
        settle_ms=0,
        first_event_time=0,
        last_event_time=0,
        digest="",
        steps=steps,
    )
    return ScoredSegment(
        segment=segment,
        formula_id="test",
        config_hash="",
        trainable=trainable,
        untrainable_reason=reason,
        rewards=tuple(
            StepReward(turn_id=turn_id, reward=reward)
            for turn_id, reward in (rewards or {}).items()
        ),
    )


def sample(
    name: str,
    prompt: Sequence[int],
    reply: Sequence[int],
    reward: float,
    *,
    terminal: bool = True,
    **turn_fields: Any,
) -> TrainingSample:
    """A conversation of one prompt and one reply."""
    return conversation(name, [(prompt, reply, reward)], terminal=terminal, **turn_fields)


def conversation(
    name: str,
    turns: Sequence[tuple[Sequence[int], Sequence[int], float]],
    *,
    terminal: bool = True,
    **turn_fields: Any,
) -> TrainingSample:
    """A conversation of several (prompt, reply, reward)."""
    ids: list[int] = []
    made: list[Turn] = []
    for number, (prompt, reply, reward) in enumerate(turns):
        start = len(ids) + len(prompt)
        ids.extend([*prompt, *reply])
        made.append(
            Turn(
                turn_id=f"{name}-{number}",
                start=start,
                end=len(ids),
                reward=reward,
                **turn_fields,
            )
        )
    return TrainingSample(
        sample_id=name,
        segment_id=name,
        revision=0,
        token_ids=tuple(ids),
        turns=tuple(made),
        terminal=terminal,
    )


__all__ = ["conversation", "message", "sample", "scored", "step"]
