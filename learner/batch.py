"""From a scored segment to what an update trains on.

A segment becomes one token sequence: the first prompt, the first reply, what came between,
the second reply, and so on. Sampled token ids are used as they are; text is tokenized only
where no ids came with it. A server gets the conversation as text with every request, so the
prompt of a later reply is the whole conversation rendered and tokenized anew; the same is
done here. If that prompt begins with all tokens so far, what follows them is what came
between, and one sequence holds both replies as they happened.

Often it does not: a reply's ids are not those its own text is tokenized to, a stop string was
cut off, the front end trimmed the text, the template drops a reply's reasoning later on. Then
the later reply was sampled after other tokens than the earlier one consists of, and no single
sequence is true to both; log-probabilities would belong to a context that never was. The
segment is cut there: the later reply begins a new sample with the prompt it was sampled
after, and the sample before it ends without being terminal, so that its value bootstraps.

A reply without a token (the client hung up at once) is context for what follows, if anything.

A conversation that is too long is cut between turns as well: a sample ends with the last reply
that fits, and bootstraps; the next one begins with the reply after it and as much of what came
before as half the limit holds. A shortened context is not the one the reply was sampled in, so
recorded log-probabilities no longer belong to it and are left out. A reply that does not fit
even with the message it answers alone is left out whole, never a part of it, and counted.

Replies that somebody else ended (the client hung up, the server broke off) are context: where
they ended was not the policy's choice. See `Interrupted`.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec.structs import replace

from learner.chat import Chat, chat_message, tool_call_entry
from learner.hints import HintSource, hint_of, teacher_prompt, teaches
from streams.contracts import ClosedBy, Message, Role, ScoredSegment, Step, StepReward
from streams.errors import LearnerError, ModelError

log = logging.getLogger(__name__)

TERMINAL = frozenset({ClosedBy.END, ClosedBy.GAP})
"""Segments closed so are conversations that ended; others were cut in the middle."""

GREEDY_BELOW = 1e-5
"""Temperatures under this draw the most likely token; log-probabilities are then reported,
and trained on, as those of temperature 1."""

MAX_REWARD = 1e4
"""Rewards are meant to be in [-1, 1]; beyond this the squared errors of the value head come
near the end of float32, and one segment would make every update fail that samples it."""

_LEAST_LOGPROB = -1e3
"""No token is ever drawn at less; servers write such numbers for minus infinity."""

_ROUNDING = 1e-3

_ENDED = frozenset({None, "stop", "eos", "end_turn", "tool_calls", "function_call"})
"""Finish reasons of replies that ended themselves; others were cut off before their end."""

_HUNG_UP = frozenset({"client_disconnected", "cancelled", "abort"})
_BROKEN = frozenset({"broken_off", "error"})

OnMismatch = Literal["refuse", "rerender"]

Interrupted = Literal["skip", "train"]
"""What becomes of replies that the client ended by hanging up: context only, or trained on as far
as they went (without an end of turn). Those that the server broke off are always context only."""


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
        teacher_prompt: Token ids after which a teacher with the user's hint reads the reply;
            None if there is no hint.
    """

    turn_id: str
    start: int
    end: int
    reward: float
    temperature: float = 1.0
    policy_version: int | None = None
    behaviour_logprobs: tuple[float, ...] | None = None
    teacher_prompt: tuple[int, ...] | None = None

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
        terminal: Whether nothing more could have come after it. If not, the value of the state
            it led to stands in for what did: of the next part's first, else after the last
            token.
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
        samples: None, one, or several if later replies were sampled after other tokens than
            the earlier ones consist of, or if they do not fit into one.
        skipped: Why there are none; None if there are.
        too_long: Replies left out because they do not fit.
        interrupted: Replies left out because somebody else ended them.
    """

    samples: tuple[TrainingSample, ...] = ()
    skipped: str | None = None
    too_long: int = 0
    interrupted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRules:
    """How samples are built.

    Args:
        max_sequence_tokens: Of one sample, and of a teacher's prompt with its reply.
        on_mismatch: What to do with turns recorded under another tokenizer or template:
            ``refuse`` raises, ``rerender`` uses their text and drops their ids and
            log-probabilities.
        interrupted: See `Interrupted`.
        hint: Where the teacher's hints come from; None builds no teacher prompts.
        max_hint_tokens: Longer texts are no hints.
    """

    max_sequence_tokens: int
    on_mismatch: OnMismatch = "refuse"
    interrupted: Interrupted = "skip"
    hint: HintSource | None = None
    max_hint_tokens: int = 256


def build_samples(
    scored: ScoredSegment,
    chat: Chat,
    *,
    tokenizer_digest: str,
    template_digest: str,
    rules: BuildRules,
) -> BuiltSamples:
    """Turn a scored segment into training samples.

    Args:
        scored: The segment and its rewards. A step without a reward earns 0.
        chat: The base model's tokenizer and template.
        tokenizer_digest: Of the base model.
        template_digest: Of the base model.
        rules: How.

    Returns:
        The samples, or why there are none: ``untrainable`` with the scorer's reason, no
        replies, messages the template cannot render, ids of another tokenizer, rewards that
        are no usable numbers, replies without tokens, cut off, or too long even without history.

    Raises:
        LearnerError: A digest differs and `rules.on_mismatch` is ``refuse``.
    """
    segment = scored.segment
    if not teaches(scored, rules.hint):
        return BuiltSamples(skipped=f"untrainable: {scored.untrainable_reason or 'not said'}")
    if not segment.steps:
        return BuiltSamples(skipped="no replies on the continued branch")
    steps = [
        _checked(step, tokenizer_digest, template_digest, rules.on_mismatch)
        for step in segment.steps
    ]
    rewards = {reward.turn_id: reward for reward in scored.rewards}
    for turn_id, reward in rewards.items():
        if not abs(reward.reward) <= MAX_REWARD:
            return BuiltSamples(skipped=f"turn {turn_id} has the reward {reward.reward}")
    try:
        builder = _Builder(chat, steps, rewards, rules)
        parts = list(builder.parts())
    except ModelError as error:
        return BuiltSamples(skipped=str(error))
    if not parts:
        return BuiltSamples(
            skipped=_nothing_left(builder, rules),
            too_long=builder.too_long,
            interrupted=builder.interrupted,
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
        ),
        too_long=builder.too_long,
        interrupted=builder.interrupted,
    )


def _nothing_left(builder: _Builder, rules: BuildRules) -> str:
    if builder.too_long:
        return (
            f"no reply fits, with the message it answers, into {rules.max_sequence_tokens} tokens"
        )
    return "every reply was cut off" if builder.interrupted else "no reply has tokens"


def reply_sample(
    chat: Chat, messages: Sequence[Mapping[str, Any]], reply: str, name: str
) -> TrainingSample:
    """A sample of one reply that is known as text: the conversation is context only.

    Args:
        chat: The base model's tokenizer and template.
        messages: What it answers, as OpenAI-compatible clients write it.
        reply: Its text; it ended itself.
        name: Its id.

    Raises:
        ModelError: The template refuses the messages.
    """
    message = {"role": "assistant", "content": reply}
    rendered = _render(chat, messages, message)
    prompt, ids = chat.encode(rendered.prompt), _ids_of_text(chat, rendered, ended=True)
    if not prompt or not ids:
        raise ModelError("the chat template shows nothing of the reply, or nothing before it")
    turn = Turn(turn_id=name, start=len(prompt), end=len(prompt) + len(ids), reward=0.0)
    return TrainingSample(
        sample_id=name,
        segment_id=name,
        revision=0,
        token_ids=(*prompt, *ids),
        turns=(turn,),
        terminal=True,
    )


@dataclass(slots=True)
class _Part:
    """A sample in the making; `last_step` is the last one in it, before the first if none is."""

    last_step: int
    truncated: bool
    token_ids: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Rendered:
    """The template's text around one reply.

    Args:
        messages: What the reply answers.
        prompt: Up to where the reply begins.
        reply: The reply's own text.
        closing: What follows the reply up to the end of its message.
    """

    messages: Sequence[Mapping[str, Any]]
    prompt: str
    reply: str
    closing: str


class _Builder:
    """Builds the parts of one segment."""

    def __init__(
        self,
        chat: Chat,
        steps: Sequence[Step],
        rewards: Mapping[str, StepReward],
        rules: BuildRules,
    ) -> None:
        self._chat = chat
        self._steps = steps
        self._rewards = rewards
        self._rules = rules
        self._limit = rules.max_sequence_tokens
        self._vocabulary = chat.vocabulary_size
        self._messages: list[dict[str, Any]] = []
        self._replies: list[int] = []
        self._first_rendered: tuple[int, ...] | None = None
        self.interrupted = sum(_is_interrupted(step, rules.interrupted) for step in steps)
        self.too_long = 0
        for step in steps:
            self._messages.extend(_for_chat(message) for message in step.context)
            self._replies.append(len(self._messages))
            self._messages.append(_reply_message(step))

    def parts(self) -> Iterator[_Part]:
        """The segment as few sequences as what happened and the limit allow."""
        begin = 0
        while begin < len(self._steps):
            part = self._fit(begin)
            if part is None:
                self.too_long += 1
                begin += 1
                continue
            if part.turns:
                yield part
            begin = part.last_step + 1

    def _fit(self, begin: int) -> _Part | None:
        """The part that starts at step `begin`, with less context if need be; None if that
        step's reply does not fit with any."""
        part = self._sequence(begin, 0)
        if part.last_step >= begin:
            return part
        cut = self._cut(begin)
        return None if cut is None else self._sequence(begin, cut)

    def _cut(self, step: int) -> int | None:
        """The user's message at which the context of a part that starts at `step` begins.

        The oldest with which the prompt fills no more than half the limit, so that replies to
        come find room; else the oldest with which the reply fits at all.
        """
        cuts = [i for i in range(1, self._replies[step]) if self._messages[i]["role"] == Role.USER]
        for most in (self._limit // 2, self._limit):
            place = bisect_left(cuts, True, key=self._fits(step, most))
            if place < len(cuts):
                return cuts[place]
        return None

    def _fits(self, step: int, most: int) -> Callable[[int], bool]:
        """Whether the step's prompt from a message on has at most `most` tokens and the reply
        fits behind it: once True, True for every later message."""

        def fits(message: int) -> bool:
            rendered = self._render(step, message)
            prompt = len(self._chat.encode(rendered.prompt))
            return prompt <= most and prompt + len(self._reply_ids(step, rendered)) <= self._limit

        return fits

    def _sequence(self, begin: int, begin_message: int) -> _Part:
        """As many steps from `begin` on as one sequence can be true to and the limit allows."""
        part = _Part(begin - 1, truncated=begin_message > 0)
        for index in range(begin, len(self._steps)):
            rendered = self._render(index, begin_message)
            reply = self._reply_ids(index, rendered)
            if reply:
                prompt = self._prompt_ids(index, rendered, part.truncated)
                known = len(part.token_ids)
                if list(prompt[:known]) != part.token_ids:
                    log.debug("a new sample begins turn_id=%s", self._steps[index].turn_id)
                    break
                if len(prompt) + len(reply) > self._limit:
                    break
                part.token_ids.extend(prompt[known:])
                self._append_reply(part, index, reply, rendered)
            part.last_step = index
        return part

    def _prompt_ids(self, index: int, rendered: _Rendered, truncated: bool) -> Sequence[int]:
        """The tokens a reply was sampled after; if `truncated`, those of what is left of them."""
        ids = self._chat.encode(rendered.prompt)
        if truncated:
            return ids
        recorded = self._steps[index].prompt_token_ids
        if recorded:
            self._require_known(recorded, self._steps[index])
            return recorded
        # A recorded first prompt knows what is not in the segment: an earlier part of the
        # conversation, the server's own system prompt. Later prompts began with it as well.
        first, first_rendered = self._first_prompt()
        if first and ids[: len(first_rendered)] == first_rendered:
            return (*first, *ids[len(first_rendered) :])
        return ids

    def _first_prompt(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The first reply's prompt as recorded, and as rendered here."""
        recorded = self._steps[0].prompt_token_ids
        if not recorded:
            return (), ()
        if self._first_rendered is None:
            self._first_rendered = self._chat.encode(self._render(0, 0).prompt)
        return recorded, self._first_rendered

    def _reply_ids(self, index: int, rendered: _Rendered) -> tuple[int, ...]:
        """A reply's tokens: the sampled ones, else those of its text, with the end of turn if
        it ended itself; none if it is context only."""
        step = self._steps[index]
        if _is_interrupted(step, self._rules.interrupted):
            return ()
        if step.token_ids:
            self._require_known(step.token_ids, step)
            return step.token_ids
        return _ids_of_text(self._chat, rendered, ended=step.finish_reason in _ENDED)

    def _append_reply(
        self, part: _Part, index: int, ids: Sequence[int], rendered: _Rendered
    ) -> None:
        step = self._steps[index]
        start = len(part.token_ids)
        reward = self._rewards.get(step.turn_id)
        teacher = self._teacher_prompt(step, reward, part.token_ids, rendered)
        if teacher is not None and len(teacher) + len(ids) > self._limit:
            teacher = None
        part.token_ids.extend(ids)
        part.turns.append(
            Turn(
                turn_id=step.turn_id,
                start=start,
                end=start + len(ids),
                reward=0.0 if reward is None else reward.reward,
                temperature=_temperature(step),
                policy_version=step.policy_version,
                behaviour_logprobs=None if part.truncated else _behaviour(step),
                teacher_prompt=teacher,
            )
        )

    def _teacher_prompt(
        self,
        step: Step,
        reward: StepReward | None,
        prompt: Sequence[int],
        rendered: _Rendered,
    ) -> tuple[int, ...] | None:
        rules = self._rules
        hint = None if rules.hint is None else hint_of(step, reward, rules.hint)
        if hint is None:
            return None
        return teacher_prompt(
            self._chat, rendered.messages, prompt, hint, max_hint_tokens=rules.max_hint_tokens
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
        return _render(self._chat, before, self._messages[reply])

    def _leading_system(self, begin_message: int) -> list[dict[str, Any]]:
        first = self._messages[0]
        return [first] if begin_message > 0 and first["role"] == Role.SYSTEM else []


def _render(chat: Chat, before: Sequence[Mapping[str, Any]], reply: Mapping[str, Any]) -> _Rendered:
    """The template's text around a reply to the messages before it."""
    end_text, content = _end_text(chat), str(reply["content"])
    prompt = chat.render_text(before)
    whole = chat.render_text([*before, reply], add_generation_prompt=False)
    if not whole.startswith(prompt):
        # The template shows this reply otherwise than it was generated; it can be trained
        # on as it was.
        return _Rendered(before, prompt, content, end_text)
    rest = whole[len(prompt) :]
    end = rest.rfind(end_text)
    if end < 0:
        end = len(content) if rest.startswith(content) else len(rest)
    return _Rendered(before, prompt, rest[:end], rest[end:])


def _ids_of_text(chat: Chat, rendered: _Rendered, *, ended: bool) -> tuple[int, ...]:
    """The tokens of a reply's text, with the end of turn if it `ended` itself."""
    ids = chat.encode(rendered.reply)
    if ended and rendered.closing.startswith(_end_text(chat)):
        ids = (*ids, chat.eos_token_id)
    return ids


def _end_text(chat: Chat) -> str:
    return chat.decode([chat.eos_token_id], skip_special_tokens=False)


def _is_interrupted(step: Step, interrupted: Interrupted) -> bool:
    """Whether somebody else ended a reply that had begun, so that it is context only."""
    reason = step.finish_reason
    cut = reason in _BROKEN or (reason in _HUNG_UP and interrupted == "skip")
    return cut and bool(step.token_ids or step.reply)


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
    return given if given is not None and given >= GREEDY_BELOW else 1.0


def _behaviour(step: Step) -> tuple[float, ...] | None:
    given = step.behaviour_logprobs
    if not given or not step.token_ids or len(given) != len(step.token_ids):
        return None
    # A rounding error above 0 is none of the sender's faults; a number that is no
    # log-probability is.
    usable = all(_LEAST_LOGPROB < logprob <= _ROUNDING for logprob in given)
    return tuple(min(logprob, 0.0) for logprob in given) if usable else None


__all__ = [
    "GREEDY_BELOW",
    "MAX_REWARD",
    "BuildRules",
    "BuiltSamples",
    "Interrupted",
    "OnMismatch",
    "TERMINAL",
    "TrainingSample",
    "Turn",
    "build_samples",
    "reply_sample",
]
