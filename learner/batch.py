"""From a scored segment to what an update trains on.

A segment becomes one token sequence: the first prompt, the first reply, what came between,
the second reply, and so on. Sampled token ids are used as they are; text is tokenized only
where no ids came with it. What lies between two replies is cut out of the rendered
conversation: the template's text up to the first reply is a prefix of its text up to the
second, so the difference is what the template and the users added, and it begins at a
special token, where tokenizing a part gives the same ids as tokenizing the whole.

Some templates rewrite earlier replies when a later prompt is rendered (they drop a reply's
reasoning, say). Then there is no such prefix, the later reply was sampled after a text that
does not contain the earlier one, and no single sequence holds both as they happened. The
segment is cut there: the later reply begins a new sample with its own freshly rendered
prompt, and the sample before it ends without being terminal, so that its value bootstraps.

Sequences that are too long lose whole messages from the front, never a part of a reply. A
shortened context is not the one the reply was sampled in, so recorded log-probabilities no
longer belong to it and are left out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from learner.chat import Chat, chat_message, tool_call_entry
from streams.contracts import ClosedBy, Message, Role, ScoredSegment, Step
from streams.errors import LearnerError, ModelError

log = logging.getLogger(__name__)

TERMINAL = frozenset({ClosedBy.END, ClosedBy.GAP})
"""Segments closed so are conversations that ended; others were cut in the middle."""

OnMismatch = Literal["refuse", "rerender"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One reply within a sample's tokens.

    Args:
        turn_id: The reply's turn.
        start: Position of its first token in the sample.
        end: Position after its last trainable token.
        reward: What it earned; belongs to the token at ``end - 1``.
        temperature: At which its tokens were drawn. Greedy replies (0) and unknown ones
            count as 1, the temperature at which servers report their log-probabilities.
        policy_version: The version that chose it; 0 is the base model, None is unknown.
        behaviour_logprobs: One per token, at `temperature`; None if they did not come with
            the turn or do not belong to this context.
    """

    turn_id: str
    start: int
    end: int
    reward: float
    temperature: float = 1.0
    policy_version: int | None = None
    behaviour_logprobs: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.start < self.end:
            raise LearnerError(
                f"turn {self.turn_id} spans tokens {self.start} to {self.end}: a reply needs a "
                "token, and a context to be chosen in"
            )
        given = self.behaviour_logprobs
        if given is not None and len(given) != self.end - self.start:
            raise LearnerError(
                f"turn {self.turn_id} has {self.end - self.start} tokens, but {len(given)} "
                "log-probabilities"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """A conversation, or a part of one, ready for an update.

    Args:
        sample_id: The segment's id, with ``#n`` for its n-th part if it had to be cut.
        segment_id: The segment it was made from.
        revision: Of that segment.
        token_ids: The whole sequence; it ends with the last trainable token.
        turns: Its replies, in order, without overlap.
        terminal: Whether nothing more could have come after it. If not, the value after the
            last token stands in for what did.
        truncated: Whether leading messages were dropped to make it fit.
    """

    sample_id: str
    segment_id: str
    revision: int
    token_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    terminal: bool
    truncated: bool = False

    def __post_init__(self) -> None:
        ends = [0, *(turn.end for turn in self.turns)]
        ordered = all(turn.start >= end for turn, end in zip(self.turns, ends, strict=False))
        if not self.turns or not ordered or ends[-1] != len(self.token_ids):
            raise LearnerError(
                f"sample {self.sample_id}: its turns must be in order, apart, and the last one "
                f"must end with its {len(self.token_ids)} tokens"
            )

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """True = chosen by the policy and trained on; as long as `token_ids`."""
        mask = [False] * len(self.token_ids)
        for turn in self.turns:
            mask[turn.start : turn.end] = [True] * (turn.end - turn.start)
        return tuple(mask)

    @property
    def positions(self) -> tuple[int, ...]:
        """Where `loss_mask` is True. The fields below have one entry per position."""
        return tuple(p for turn in self.turns for p in range(turn.start, turn.end))

    @property
    def rewards(self) -> tuple[float, ...]:
        """Each turn's reward on its last token, 0 on the others."""
        return tuple(
            turn.reward if p == turn.end - 1 else 0.0
            for turn in self.turns
            for p in range(turn.start, turn.end)
        )

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperature each token was drawn at."""
        return tuple(turn.temperature for turn in self.turns for _ in range(turn.start, turn.end))

    @property
    def behaviour_logprobs(self) -> tuple[float, ...]:
        """Log-probability under the policy that chose the token; 0 where not given."""
        return tuple(
            logprob
            for turn in self.turns
            for logprob in turn.behaviour_logprobs or (0.0,) * (turn.end - turn.start)
        )

    @property
    def behaviour_mask(self) -> tuple[bool, ...]:
        """True = `behaviour_logprobs` was given."""
        return tuple(
            turn.behaviour_logprobs is not None
            for turn in self.turns
            for _ in range(turn.start, turn.end)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltSamples:
    """What became of a segment.

    Args:
        samples: None, one, or several if the template rewrites earlier replies.
        skipped: Why there are none; None if there are.
    """

    samples: tuple[TrainingSample, ...] = ()
    skipped: str | None = None


def build_samples(
    scored: ScoredSegment,
    chat: Chat,
    *,
    tokenizer_digest: str,
    template_digest: str,
    max_sequence_tokens: int,
    on_mismatch: OnMismatch = "refuse",
) -> BuiltSamples:
    """Turn a scored segment into training samples.

    Args:
        scored: The segment and its rewards. A step without a reward earns 0.
        chat: The base model's tokenizer and template.
        tokenizer_digest: Of the base model.
        template_digest: Of the base model.
        max_sequence_tokens: Longer sequences lose leading messages.
        on_mismatch: What to do with turns recorded under another tokenizer or template:
            ``refuse`` raises, ``rerender`` uses their text and drops their ids and
            log-probabilities.

    Returns:
        The samples, or why there are none: ``untrainable`` with the scorer's reason, no
        replies, messages the template cannot render, ids of another tokenizer, replies too
        long even without history.

    Raises:
        LearnerError: A digest differs and `on_mismatch` is ``refuse``.
    """
    segment = scored.segment
    if not scored.trainable:
        return BuiltSamples(skipped=f"untrainable: {scored.untrainable_reason or 'not said'}")
    if not segment.steps:
        return BuiltSamples(skipped="no replies on the continued branch")
    steps = [
        _checked(step, tokenizer_digest, template_digest, on_mismatch) for step in segment.steps
    ]
    rewards = {reward.turn_id: reward.reward for reward in scored.rewards}
    try:
        parts = list(_Builder(chat, steps, rewards, max_sequence_tokens).parts())
    except ModelError as error:
        return BuiltSamples(skipped=str(error))
    if not parts:
        return BuiltSamples(
            skipped=f"no reply fits into {max_sequence_tokens} tokens with the message it answers"
        )
    whole = len(parts) == 1
    ended = segment.closed_by in TERMINAL
    return BuiltSamples(
        samples=tuple(
            TrainingSample(
                sample_id=segment.segment_id if whole else f"{segment.segment_id}#{number}",
                segment_id=segment.segment_id,
                revision=segment.revision,
                token_ids=tuple(part.token_ids),
                turns=tuple(part.turns),
                terminal=ended and part.last_step == len(steps) - 1,
                truncated=part.truncated,
            )
            for number, part in enumerate(parts)
        )
    )


@dataclass(slots=True)
class _Part:
    token_ids: list[int]
    turns: list[Turn]
    last_step: int
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class _Rendered:
    """The template's text around one reply.

    Args:
        prompt: Up to where the reply begins.
        reply: The reply's own text.
        closing: What follows the reply up to the end of its message.
    """

    prompt: str
    reply: str
    closing: str

    @property
    def whole(self) -> str:
        return self.prompt + self.reply + self.closing


class _Builder:
    """Builds the parts of one segment."""

    def __init__(
        self,
        chat: Chat,
        steps: Sequence[Step],
        rewards: Mapping[str, float],
        max_sequence_tokens: int,
    ) -> None:
        self._chat = chat
        self._steps = steps
        self._rewards = rewards
        self._limit = max_sequence_tokens
        self._vocabulary = chat.vocabulary_size
        self._end_text = chat.decode([chat.eos_token_id], skip_special_tokens=False)
        self._messages: list[dict[str, Any]] = []
        self._replies: list[int] = []
        for step in steps:
            self._messages.extend(_for_chat(message) for message in step.context)
            self._replies.append(len(self._messages))
            self._messages.append(_reply_message(step))

    def parts(self) -> Iterator[_Part]:
        """The segment as few sequences as its template and the limit allow."""
        begin = 0
        while begin < len(self._steps):
            part = self._fit(begin)
            if part is not None:
                yield part
            begin = part.last_step + 1 if part is not None else begin + 1

    def _fit(self, begin: int) -> _Part | None:
        """The part that starts at step `begin`; with less context, or less steps, if need be."""
        whole = self._sequence(begin, begin_message=0)
        if len(whole.token_ids) <= self._limit:
            return whole
        for stop in range(whole.last_step, begin - 1, -1):
            for begin_message in self._cuts(stop):
                first = max(begin, self._first_step_after(begin_message))
                part = self._sequence(first, begin_message=begin_message, stop=stop)
                if len(part.token_ids) <= self._limit:
                    return part
        return None

    def _cuts(self, last_step: int) -> Iterator[int]:
        """Messages a shortened conversation may begin with: those of users, oldest first."""
        for index in range(1, self._replies[last_step]):
            if self._messages[index]["role"] == Role.USER:
                yield index

    def _first_step_after(self, message: int) -> int:
        return sum(reply < message for reply in self._replies)

    def _sequence(self, begin: int, *, begin_message: int, stop: int | None = None) -> _Part:
        """Steps from `begin` on in one sequence, as far as replies can be spliced in."""
        truncated = begin_message > 0
        rendered = self._render(begin, begin_message)
        recorded = self._steps[begin].prompt_token_ids if begin == 0 and not truncated else None
        prompt = recorded or self._chat.encode(rendered.prompt)
        self._require_known(prompt, self._steps[begin])
        part = _Part(list(prompt), [], begin, truncated)
        self._append_reply(part, begin, rendered)
        last = len(self._steps) - 1 if stop is None else stop
        for index in range(begin + 1, last + 1):
            following = self._render(index, begin_message)
            if not following.prompt.startswith(rendered.whole):
                log.info("cannot splice the reply turn_id=%s", self._steps[index].turn_id)
                break
            between = rendered.closing + following.prompt[len(rendered.whole) :]
            part.token_ids.extend(self._between(part.token_ids[-1], between))
            self._append_reply(part, index, following)
            part.last_step, rendered = index, following
        return part

    def _between(self, last_id: int, text: str) -> tuple[int, ...]:
        """Tokens between two replies; the end of turn is not repeated if it was sampled."""
        if last_id == self._chat.eos_token_id:
            text = text.removeprefix(self._end_text)
        return self._chat.encode(text)

    def _append_reply(self, part: _Part, index: int, rendered: _Rendered) -> None:
        step = self._steps[index]
        ids = step.token_ids
        if not ids:
            ids = self._chat.encode(rendered.reply)
            if step.finish_reason != "length" and rendered.closing.startswith(self._end_text):
                ids = (*ids, self._chat.eos_token_id)
        if not ids:
            raise ModelError(f"the reply of turn {step.turn_id} has no tokens")
        self._require_known(ids, step)
        start = len(part.token_ids)
        part.token_ids.extend(ids)
        part.turns.append(
            Turn(
                turn_id=step.turn_id,
                start=start,
                end=start + len(ids),
                reward=self._rewards.get(step.turn_id, 0.0),
                temperature=_temperature(step),
                policy_version=step.policy_version,
                behaviour_logprobs=None if part.truncated else _behaviour(step),
            )
        )

    def _require_known(self, ids: Sequence[int], step: Step) -> None:
        if not 0 <= min(ids) <= max(ids) < self._vocabulary:
            raise ModelError(
                f"turn {step.turn_id} has token ids beyond the vocabulary of {self._vocabulary}; "
                "they are another tokenizer's"
            )

    def _render(self, index: int, begin_message: int) -> _Rendered:
        """The conversation up to and with one reply, in the template's text."""
        reply = self._replies[index]
        before = [*self._leading_system(begin_message), *self._messages[begin_message:reply]]
        prompt = self._chat.render_text(before)
        whole = self._chat.render_text(
            [*before, self._messages[reply]], add_generation_prompt=False
        )
        if not whole.startswith(prompt):
            # The template shows this reply otherwise than it was generated; it can be trained
            # on as it was, but nothing can be spliced behind it.
            return _Rendered(prompt, str(self._messages[reply]["content"]), self._end_text)
        rest = whole[len(prompt) :]
        end = rest.rfind(self._end_text)
        if end < 0:
            content = str(self._messages[reply]["content"])
            end = len(content) if rest.startswith(content) else len(rest)
        return _Rendered(prompt, rest[:end], rest[end:])

    def _leading_system(self, begin_message: int) -> list[dict[str, Any]]:
        first = self._messages[0]
        return [first] if begin_message > 0 and first["role"] == Role.SYSTEM else []


def _checked(
    step: Step, tokenizer_digest: str, template_digest: str, on_mismatch: OnMismatch
) -> Step:
    """The step as it may be used with this tokenizer and template."""
    for name, recorded, ours in (
        ("tokenizer", step.tokenizer_digest, tokenizer_digest),
        ("chat template", step.template_digest, template_digest),
    ):
        if recorded is None or recorded == ours:
            continue
        if on_mismatch == "refuse":
            raise LearnerError(
                f"turn {step.turn_id} was recorded with another {name} ({recorded[:12]}…, ours "
                f"is {ours[:12]}…); train on the base model that served it, or set "
                "learner.digest_mismatch to rerender"
            )
        return replace(step, token_ids=None, prompt_token_ids=None, behaviour_logprobs=None)
    return step


def _for_chat(message: Message) -> dict[str, Any]:
    if message.role is Role.UNKNOWN:
        raise ModelError(f"turn {message.turn_id} has a role that is not known here")
    return chat_message(message)


def _reply_message(step: Step) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": step.reply}
    if step.tool_calls:
        message["tool_calls"] = [tool_call_entry(call) for call in step.tool_calls]
    return message


def _temperature(step: Step) -> float:
    given = step.sampling.temperature if step.sampling is not None else None
    return given if given is not None and given > 0.0 else 1.0


def _behaviour(step: Step) -> tuple[float, ...] | None:
    given = step.behaviour_logprobs
    if not given or not step.token_ids or len(given) != len(step.token_ids):
        return None
    return given if all(math.isfinite(logprob) for logprob in given) else None


__all__ = [
    "BuiltSamples",
    "OnMismatch",
    "TERMINAL",
    "TrainingSample",
    "Turn",
    "build_samples",
]
