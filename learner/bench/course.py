"""One run of our learner in the learning bench: talk, align, score, update, and again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from learner.bench.pipeline import DryPipeline
from learner.bench.preset import (
    MAX_NEW_TOKENS,
    TASTE,
    TEMPERATURE,
    Job,
    Round,
    align_settings,
    draw_seed,
    draws_of,
    learner_settings,
    model_settings,
    reward_settings,
)
from learner.bench.sampling import Reply, draw_replies
from learner.bench.users import Opinion, honest_reward, opinions, prompts_of
from learner.model import BaseModel, load_base
from learner.trainer import PpoTrainer
from learner.window import Window, sample
from streams.contracts import (
    DialogueTurn,
    FeedbackEvent,
    FeedbackKind,
    Role,
    Sampling,
    ScoredSegment,
    SourceRef,
)
from streams.errors import RegistryError
from streams.serde import build_codec
from streams.topics import SCORED

HINT = "Please be warmer. Say that you are sorry, or thank me, or that you are glad to help."
"""What a user says after a reply that it dislikes, where words teach."""

BEGIN_MS = 1_767_225_600_000
"""When the conversations begin: the same moment in each run."""

ROUND_MS = 30 * 60_000
"""From one round to the next on the log's clock: by then all of a round has closed."""

_CLOSED_MS = 20 * 60_000
_TALK_MS = 10_000
_BETWEEN_MS = 100
_REPLY_MS = 1_000
_THUMB_MS = 5_000
_HINT_MS = 8_000
_LATE_MS = 1_000
_KL = "kl/reference_k1_per_sample"


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation of one question and one reply.

    Attributes:
        name: Its session.
        at_ms: When it begins.
        prompt: The question.
        text: The reply's text.
        reply: The reply as drawn.
    """

    name: str
    at_ms: int
    prompt: str
    text: str
    reply: Reply


class Course:
    """The learner's window, sampler and trainer behind the pipeline, without a broker.

    Args:
        job: What to run; no rival's.

    Raises:
        ModelError: The base model cannot be loaded or trained.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._settings = learner_settings(job)
        self._base = load_base(model_settings(job), job.data)
        self._trainer = PpoTrainer(self._base, self._settings, model_settings(job))
        self._pipeline = DryPipeline(build_codec(), align_settings(), reward_settings())
        self._window = Window(
            max_segments=self._settings.window_segments,
            max_tokens=self._settings.window_tokens,
            max_uses=self._settings.max_updates_per_segment,
        )
        self._sampler = random.Random(job.seed)
        self._users = random.Random(f"users/{job.seed}")
        self._version = 0
        self._scored = 0
        self._late: list[FeedbackEvent] = []

    def rounds(self) -> Iterator[Round]:
        """Play the job's rounds, one at a time."""
        for update in range(self._job.updates):
            began_s = time.monotonic()
            talks = self._talk(update)
            liked = [TASTE.likes(talk.text) for talk in talks]
            said = opinions(self._job.condition, liked, self._users)
            for scored in self._through_pipeline(update, talks, said):
                self._window.add(self._window.pack(self._next_ref(), scored))
            kl = None if self._job.subject == "frozen" else self._learn()
            yield Round(
                update=update,
                reward=honest_reward(liked),
                kl=kl,
                seconds=time.monotonic() - began_s,
            )

    def _talk(self, update: int) -> list[Talk]:
        prompts = prompts_of(self._job.seed, update, self._job.replies)
        chat = self._base.chat
        rendered = [chat.render_prompt([{"role": "user", "content": p}]) for p in prompts]
        seed = draw_seed(self._job, update)
        replies = draw_replies(self._base.model, rendered, draws_of(self._base), seed)
        begin_ms = BEGIN_MS + update * ROUND_MS + _TALK_MS
        return [
            Talk(
                f"s{update}-{number}",
                begin_ms + number * _BETWEEN_MS,
                prompt,
                chat.decode(reply.token_ids),
                reply,
            )
            for number, (prompt, reply) in enumerate(zip(prompts, replies, strict=True))
        ]

    def _through_pipeline(
        self, update: int, talks: Sequence[Talk], said: Sequence[Opinion | None]
    ) -> list[ScoredSegment]:
        records: list[DialogueTurn | FeedbackEvent] = [*self._late]
        self._late = []
        next_round_ms = BEGIN_MS + (update + 1) * ROUND_MS
        for talk, opinion in zip(talks, said, strict=True):
            hint = HINT if self._job.hints and opinion and opinion.value < 0.0 else None
            records.extend(turns_of(talk, self._base, self._version, hint))
            if opinion is None:
                continue
            at_ms = next_round_ms + _LATE_MS if opinion.late else talk.at_ms + _THUMB_MS
            (self._late if opinion.late else records).append(thumb_of(talk, opinion, at_ms))
        return self._pipeline.take(records, BEGIN_MS + update * ROUND_MS + _CLOSED_MS)

    def _learn(self) -> float | None:
        """Update if there is anything to learn from; the KL of the policy before it."""
        drawn = sample(self._window.seal().candidates, self._settings.batch_segments, self._sampler)
        if not drawn:
            return None
        segments = [candidate.scored for candidate in drawn]
        trained = self._trainer.train(segments, self._version, _no_adapter, lambda: False)
        if trained is None:
            return None
        self._version += 1
        self._window.record_use(trained.used, self._version)
        self._window.require_version(self._version - self._settings.max_version_gap)
        return trained.metrics[_KL]

    def _next_ref(self) -> SourceRef:
        self._scored += 1
        return SourceRef(topic=SCORED, partition=0, offset=self._scored - 1)


def turns_of(
    talk: Talk, base: BaseModel, version: int, hint: str | None = None
) -> list[DialogueTurn]:
    """Question, reply and, if there is one, the hint after it, as the gateway would write them."""
    question = _said(talk, "u", talk.prompt, talk.at_ms)
    reply = DialogueTurn(
        event_id=f"{talk.name}-a",
        session_id=talk.name,
        turn_id=f"{talk.name}-a",
        parent_turn_id=question.turn_id,
        role=Role.ASSISTANT,
        content=talk.text,
        event_time=talk.at_ms + _REPLY_MS,
        source="bench",
        session_done=hint is None,
        policy_version=version,
        token_ids=talk.reply.token_ids,
        behaviour_logprobs=talk.reply.logprobs,
        prompt_token_ids=talk.reply.prompt_ids,
        sampling=Sampling(temperature=TEMPERATURE, top_p=1.0, max_tokens=MAX_NEW_TOKENS),
        finish_reason="stop" if talk.reply.ended else "length",
        tokenizer_digest=base.tokenizer_digest,
        template_digest=base.template_digest,
    )
    if hint is None:
        return [question, reply]
    said = _said(talk, "h", hint, talk.at_ms + _HINT_MS)
    return [question, reply, replace(said, parent_turn_id=reply.turn_id, session_done=True)]


def _said(talk: Talk, name: str, content: str, at_ms: int) -> DialogueTurn:
    """A turn of the user."""
    return DialogueTurn(
        event_id=f"{talk.name}-{name}",
        session_id=talk.name,
        turn_id=f"{talk.name}-{name}",
        role=Role.USER,
        content=content,
        event_time=at_ms,
        source="bench",
    )


def thumb_of(talk: Talk, opinion: Opinion, at_ms: int) -> FeedbackEvent:
    """The user's thumb as a front end would send it."""
    return FeedbackEvent(
        event_id=f"{talk.name}-f",
        session_id=talk.name,
        turn_id=f"{talk.name}-a",
        event_time=at_ms,
        kind=FeedbackKind.THUMB,
        value=opinion.value,
        source="bench",
    )


def play(job: Job, on_round: Callable[[Round], None]) -> None:
    """Play a job's rounds.

    Raises:
        ModelError: The base model cannot be loaded or trained.
    """
    for played in Course(job).rounds():
        on_round(played)


def _no_adapter(version: int) -> Path:
    raise RegistryError(f"the bench keeps no adapter of version {version}")


__all__ = ["Course", "Talk", "play", "thumb_of", "turns_of"]
