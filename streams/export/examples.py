"""Scored segments into preferences and demonstrations, in TRL's conversational shapes. Pure.

A *preference* (TRL's DPO, explicit prompt)::

    {"prompt": [message, …], "chosen": [message], "rejected": [message], "source": {…}}

A *demonstration* (TRL's SFT, prompt and completion, so that only the reply is learned)::

    {"prompt": [message, …], "completion": [message], "source": {…}}

A message is ``{"role": …, "content": …}``, with ``tool_calls`` or ``tool_call_id`` if it has any.
``source`` says where the example comes from; TRL passes over it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streams.contracts import (
    BranchReply,
    FeedbackKind,
    Message,
    Role,
    ScoredSegment,
    Step,
    StepFeedback,
    StepReward,
    ToolCall,
)

ChatMessage = dict[str, Any]

WHOLE = frozenset({None, "stop", "eos", "end_turn", "tool_calls", "function_call"})
"""How a reply ends that is whole. Nobody should learn to end as one that was cut short."""

_ROLES = frozenset({Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL})
_ANSWERED = frozenset({"user", "tool"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What is good enough.

    Attributes:
        min_credibility: A rating counts if it was believed so far (0 to 1), a demonstration if its
            step was.
        min_margin: How much better the chosen reply must have been rated, if both were rated.
        min_reward: The least reward of a demonstration.
    """

    min_credibility: float = 0.5
    min_margin: float = 0.0
    min_reward: float = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One line of a file.

    Attributes:
        content: What it holds.
        digest: Of everything but ``source``: the same example from elsewhere has the same.
    """

    content: Mapping[str, Any]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Something that became no example, and why (a short name, to count by)."""

    why: str


Found = Example | Skipped


def preferences(scored: ScoredSegment, rules: Rules) -> Iterator[Found]:
    """One example for each reply that the user had regenerated, if it can be said which is better.

    Both rated: the one rated better. Only the reply the user went on with rated: it is the better
    one if that was good; if it was bad, both may be. It is not rated: the user had asked again, so
    it is the better one unless the other was rated good, and the other one is if its own reward
    is below 0 besides. With a reward below 0 and nothing good of the other, both may be bad.
    """
    for place in _places(scored):
        for alternative in place.step.alternatives:
            yield _preference(scored, place, alternative, rules)


def demonstrations(scored: ScoredSegment, rules: Rules) -> Iterator[Found]:
    """One example for each reply whose reward is high and was believed."""
    for place in _places(scored):
        yield _demonstration(scored, place, rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A step in its conversation."""

    step: Step
    prompt: list[ChatMessage] | None
    reward: StepReward | None


def _places(scored: ScoredSegment) -> Iterator[_Place]:
    """Every step with all that was said before it; no prompt if it cannot be told."""
    if scored.segment.encryption is not None:
        return
    rewards = {reward.turn_id: reward for reward in scored.rewards}
    said: list[ChatMessage] = []
    known = True
    for step in scored.segment.steps:
        known = known and all(message.role in _ROLES for message in step.context)
        said += [_message(message) for message in step.context]
        answers = bool(said) and said[-1]["role"] in _ANSWERED
        yield _Place(
            step=step,
            prompt=list(said) if known and answers else None,
            reward=rewards.get(step.turn_id),
        )
        said.append(_reply(step.reply, step.tool_calls))


def _preference(
    scored: ScoredSegment, place: _Place, alternative: BranchReply, rules: Rules
) -> Found:
    step = place.step
    if place.prompt is None:
        return Skipped(why="no question")
    if step.tool_calls:
        # What the alternative called is not recorded; text against a call would teach nothing.
        return Skipped(why="tool call")
    if not step.reply.strip() or not alternative.reply.strip():
        return Skipped(why="empty reply")
    if step.finish_reason not in WHOLE:
        return Skipped(why="unfinished reply")
    if step.reply == alternative.reply:
        return Skipped(why="same reply")
    better = _better(place, alternative, rules)
    if better is None:
        return Skipped(why="undecided")
    chosen, rejected = step.reply, alternative.reply
    if not better.step:
        chosen, rejected = rejected, chosen
    return _example(
        {
            "prompt": place.prompt,
            "chosen": [_reply(chosen)],
            "rejected": [_reply(rejected)],
        },
        _source(scored, step) | {"alternative": alternative.turn_id, "decided_by": better.by},
    )


@dataclass(frozen=True, slots=True)
class _Better:
    """Whether the step's reply is the better one, and what says so."""

    step: bool
    by: str


def _better(place: _Place, alternative: BranchReply, rules: Rules) -> _Better | None:
    weights = {
        item.event_id: item.weight for item in (place.reward.weighed if place.reward else ())
    }
    ours = _rating(place.step.feedback, weights, rules.min_credibility)
    theirs = _rating(alternative.feedback, weights, rules.min_credibility)
    reward = place.reward.reward if place.reward is not None else 0.0
    if ours is not None and theirs is not None:
        margin = ours - theirs
        return None if abs(margin) <= rules.min_margin else _Better(margin > 0, "ratings")
    if ours is not None:
        return _Better(True, "rating") if ours > 0 else None
    if theirs is not None and theirs >= 0:
        return _Better(False, "rating") if theirs > 0 and reward < 0 else None
    if reward < 0:
        return None
    return _Better(True, "regenerated" if theirs is None else "rating")


def _demonstration(scored: ScoredSegment, place: _Place, rules: Rules) -> Found:
    step, reward = place.step, place.reward
    if place.prompt is None:
        return Skipped(why="no question")
    if reward is None or reward.reward < rules.min_reward:
        return Skipped(why="reward")
    if reward.credibility < rules.min_credibility:
        return Skipped(why="credibility")
    if step.finish_reason not in WHOLE:
        return Skipped(why="unfinished reply")
    if not step.reply.strip() and not step.tool_calls:
        return Skipped(why="empty reply")
    return _example(
        {"prompt": place.prompt, "completion": [_reply(step.reply, step.tool_calls)]},
        _source(scored, step) | {"reward": reward.reward, "credibility": reward.credibility},
    )


def _rating(
    feedback: Sequence[StepFeedback], weights: Mapping[str, float], min_credibility: float
) -> float | None:
    """The mean of each rater's latest rating that was believed, in [-1, 1]; None without one."""
    latest: dict[str | None, float] = {}
    for item in feedback:
        value = _value(item)
        if value is not None and weights.get(item.event_id, 1.0) >= min_credibility:
            latest[item.user_id] = value
    return math.fsum(latest.values()) / len(latest) if latest else None


def _value(item: StepFeedback) -> float | None:
    if item.value is None or not math.isfinite(item.value):
        return None
    if item.kind is FeedbackKind.THUMB:
        return math.copysign(1.0, item.value) if item.value else None
    if item.kind is not FeedbackKind.RATING:
        return None
    try:
        least = float(item.attributes.get("scale_min", -1.0))
        most = float(item.attributes.get("scale_max", 1.0))
    except ValueError:
        return None
    if not (least < most and least <= item.value <= most):
        return None
    return 2.0 * (item.value - least) / (most - least) - 1.0


def _source(scored: ScoredSegment, step: Step) -> dict[str, Any]:
    segment = scored.segment
    return {
        "policy": segment.policy,
        "session": segment.session_id,
        "segment": segment.segment_id,
        "revision": segment.revision,
        "turn": step.turn_id,
        "version": step.policy_version,
        "formula": scored.formula_id,
    }


def _example(content: dict[str, Any], source: dict[str, Any]) -> Example:
    canonical = json.dumps(content, ensure_ascii=False, sort_keys=True)
    digest = hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()
    return Example(content={**content, "source": source}, digest=digest)


def _message(message: Message) -> ChatMessage:
    made: ChatMessage = {"role": str(message.role), "content": message.content}
    if message.tool_calls:
        made["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    return made


def _reply(content: str, tool_calls: Sequence[ToolCall] | None = None) -> ChatMessage:
    made: ChatMessage = {"role": "assistant", "content": content}
    if tool_calls:
        made["tool_calls"] = [_tool_call(call) for call in tool_calls]
    return made


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


__all__ = ["Example", "Found", "Rules", "Skipped", "demonstrations", "preferences"]
