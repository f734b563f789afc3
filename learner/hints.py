"""What a user asked for after a reply, put where the teacher reads it before that reply.

In mode ``opd`` the teacher is the same network, but its prompt holds the hint: the words with
which the user said what they would rather have had. What the teacher then thinks of each
sampled token, beyond what the policy thought, is what the hint teaches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from learner.chat import Chat
from streams.contracts import Role, ScoredSegment, Step, StepReward

HintSource = Literal["directive", "next_user_turn"]
"""``directive``: what the reward record kept as directives; ``next_user_turn``: these, else
whatever the user said next."""

HINT_FORMAT = "{content}\n\n(What the user asked for afterwards: {hint})"
"""The user message of the teacher's prompt."""


def hint_of(step: Step, reward: StepReward | None, source: HintSource) -> str | None:
    """What the user asked for after a reply; None if nothing, or nothing to go by.

    A step with feedback that is held back (credibility below 1) gives no hint: who floods or
    contradicts everybody must not steer by words either.

    Args:
        step: The reply and what followed.
        reward: Its reward record, if there is one.
        source: Where to look.
    """
    if reward is not None and reward.credibility < 1.0:
        return None
    texts = [] if reward is None else [text.strip() for text in reward.directives]
    said = step.next_user_turn
    if source == "next_user_turn" and not any(texts) and said is not None:
        texts = [said.content.strip()]
    return "\n".join(filter(None, texts)) or None


def teaches(scored: ScoredSegment, source: HintSource | None) -> bool:
    """Whether there is anything to learn from a segment.

    Those that the scorer finds trainable, and with a `source` of hints also those whose rewards
    are all 0 but that hold a hint: words teach where nobody rated.
    """
    if scored.trainable:
        return True
    if source is None or any(reward.reward != 0.0 for reward in scored.rewards):
        return False
    rewards = {reward.turn_id: reward for reward in scored.rewards}
    return any(hint_of(step, rewards.get(step.turn_id), source) for step in scored.segment.steps)


def hinted(
    messages: Sequence[Mapping[str, Any]], hint: str
) -> tuple[Mapping[str, Any], ...] | None:
    """The messages with the hint in the last one of a user; None if there is none."""
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if message["role"] == Role.USER:
            content = HINT_FORMAT.format(content=message["content"], hint=hint)
            return (*messages[:index], {**message, "content": content}, *messages[index + 1 :])
    return None


def teacher_prompt(
    chat: Chat,
    messages: Sequence[Mapping[str, Any]],
    prompt_ids: Sequence[int],
    hint: str,
    *,
    max_hint_tokens: int,
) -> tuple[int, ...] | None:
    """The policy's prompt with the hint in it.

    A recorded prompt may hold more than the messages say (a system prompt of the server's
    own), so it is not rendered anew: what follows the first token that the hint changes is
    exchanged.

    Args:
        chat: Renders and tokenizes.
        messages: What the reply answered, as rendered for the policy.
        prompt_ids: The policy's prompt.
        hint: What the user asked for afterwards.
        max_hint_tokens: A longer text is no hint.

    Returns:
        Its token ids; None if the hint is too long, has no place, or the prompt does not end
        as its messages are rendered.

    Raises:
        ModelError: The template refuses the messages.
    """
    with_hint = hinted(messages, hint)
    if with_hint is None or len(chat.encode(hint)) > max_hint_tokens:
        return None
    plain, changed = chat.render_prompt(messages), chat.render_prompt(with_hint)
    common = _common(plain, changed)
    rest = plain[common:]
    if not rest or tuple(prompt_ids[-len(rest) :]) != rest:
        return None
    return (*prompt_ids[: -len(rest)], *changed[common:])


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    for ours, theirs in zip(left, right, strict=False):
        if ours != theirs:
            break
        length += 1
    return length


__all__ = ["HINT_FORMAT", "HintSource", "hint_of", "hinted", "teacher_prompt", "teaches"]
