"""A signal, a component and a judge, as small as they can be."""

from __future__ import annotations

import re
from collections.abc import Sequence

from streams.contracts import Step, TrajectorySegment
from streams.settings import RewardSettings

_ESCALATION = re.compile(r"\b(?:real person|human agent|your manager)\b|人工客服", re.IGNORECASE)

BRIEF_CHARS = 400
LONG_CHARS = 2_000


def escalation(text: str) -> str | None:
    """A signal: the user asks for somebody else."""
    found = _ESCALATION.search(text)
    return None if found is None else found.group()


def brevity(
    step: Step, segment: TrajectorySegment, settings: RewardSettings
) -> tuple[float | None, Sequence[str]]:
    """A component: 1 for a brief reply, falling to -1 for a long one."""
    if not step.reply:
        return None, ()
    over = (len(step.reply) - BRIEF_CHARS) / (LONG_CHARS - BRIEF_CHARS)
    value = 1.0 - 2.0 * min(1.0, max(0.0, over))
    return value, (f"{len(step.reply)} characters",)


async def polite(prompt: str, timeout_s: float) -> str:
    """A judge: content with a reply that says please or thanks."""
    # Before it stand the rubric and the conversation, which are not what is judged.
    reply = prompt.rpartition("REPLY:")[2]
    kind = re.search(r"\b(?:please|thank you|glad)\b", reply, re.IGNORECASE)
    return "VERDICT: 1" if kind else "VERDICT: 0"
