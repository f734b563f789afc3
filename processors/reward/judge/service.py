"""Judges segments: votes, limits, tries and the breaker. Knows no Kafka."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from processors.reward.judge.breaker import Breaker
from processors.reward.judge.cache import VerdictCache
from processors.reward.judge.verdicts import (
    Question,
    Rubric,
    Verdict,
    failure,
    judgement,
    questions,
    read_vote,
)
from processors.reward.plugins import OURS, describe
from streams import metrics as names
from streams.contracts import FeedbackEvent, TrajectorySegment
from streams.errors import JudgeBusyError, JudgeError, JudgeRefusedError
from streams.metrics import ProcessorMetrics
from streams.settings import JudgeSettings

logger = logging.getLogger(__name__)

OUTCOMES = {1: "good", 0: "tie", -1: "bad"}

PATIENCE = 20
"""How often a vote is put off by a judge that is away, or is asked too much, before that counts as
a try: a question that itself brings the judge down must not be asked for ever."""


class Ask(Protocol):
    """Asks the judge once."""

    async def __call__(self, rubric: Rubric, question: Question) -> str:
        """Its words.

        Raises:
            JudgeBusyError: It is asked too much.
            JudgeRefusedError: It is there, but does not take this question.
            Exception: Whatever else went wrong.
        """
        ...


class JudgeService:
    """Judges the replies of segments.

    Args:
        settings: Votes, limits and tries.
        rubric: What the judge goes by.
        ask: Asks it once.
        cache: Verdicts given before.
        metrics: Counters.
        now_s: A clock that never goes back, seconds.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        settings: JudgeSettings,
        rubric: Rubric,
        ask: Ask,
        cache: VerdictCache,
        metrics: ProcessorMetrics,
        *,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._settings = settings
        self._rubric = rubric
        self._ask = ask
        self._cache = cache
        self._metrics = metrics
        self._now_s = now_s
        self._sleep = sleep
        self._room = asyncio.Semaphore(settings.concurrency)
        self._breaker = Breaker(settings.breaker_failures, settings.breaker_pause_ms / 1_000)
        self._why_away = ""
        self._ever_answered = False

    async def judge(self, segment: TrajectorySegment) -> tuple[FeedbackEvent, ...]:
        """A judgement for each reply of ``segment`` that has none: a verdict, or why not."""
        asked = questions(segment, self._rubric, self._settings)
        return tuple(await asyncio.gather(*(self._judgement(segment, q) for q in asked)))

    async def _judgement(self, segment: TrajectorySegment, question: Question) -> FeedbackEvent:
        verdict = self._cache.get(question.key)
        if verdict is not None:
            self._metrics.add(names.JUDGEMENTS, outcome="cached")
            return judgement(segment, question, verdict, self._settings)
        try:
            votes = await asyncio.gather(
                *(self._vote(question) for _ in range(self._settings.votes))
            )
        except JudgeError as error:
            self._metrics.add(names.JUDGEMENTS, outcome="failed")
            logger.warning("no verdict on reply %s: %s", question.turn_id, error)
            return failure(segment, question, str(error), self._settings)
        verdict = Verdict(tuple(votes))
        self._cache.put(question.key, verdict)
        self._metrics.add(names.JUDGEMENTS, outcome=OUTCOMES[verdict.value])
        return judgement(segment, question, verdict, self._settings)

    async def _vote(self, question: Question) -> int:
        """One vote.

        Raises:
            JudgeRefusedError: The judge does not take the question.
            JudgeError: No try gave one.
        """
        last, tried, put_off = "never asked", 0, 0
        while tried < self._settings.tries:
            async with self._room:
                await self._wait_for_breaker()
                was_away = self._breaker.open
                try:
                    return read_vote(await self._answer(question))
                except JudgeRefusedError:
                    raise
                except JudgeError as error:
                    last = str(error)
                    # Away, or asked too much, it did not look at the question: that is no try, as
                    # long as it ends some day.
                    if (was_away or self._breaker.open) and put_off < PATIENCE:
                        put_off += 1
                    else:
                        tried += 1
        raise JudgeError(f"{last} (after {self._settings.tries} tries)")

    async def _answer(self, question: Question) -> str:
        timeout_s = self._settings.timeout_ms / 1_000
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                answer: object = await self._ask(self._rubric, question)
            if not isinstance(answer, str):
                raise TypeError(f"a judge answers in words, not with {type(answer).__name__}")
        except JudgeBusyError as error:
            self._rest(error)
            raise
        except JudgeRefusedError as error:
            if not self._ever_answered:
                # It may refuse every question, for a parameter that its model does not know: that
                # must not be taken for so many questions that have no verdict.
                self._failed(str(error))
                raise JudgeError(str(error)) from error
            self._answered()
            raise
        except OURS:
            raise
        # The library, the network or a plugin may fail in any way; each is a failed try. A plugin
        # that calls ``sys.exit``, or lets a cancellation of its own escape, must not end the judge.
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            why = describe(error)
            if limit.expired():
                why = f"timeout: no answer in {timeout_s:g} s"
            elif isinstance(error, JudgeError):
                why = str(error)
            self._failed(why)
            raise JudgeError(why) from error
        self._ever_answered = True
        self._answered()
        return answer

    def _answered(self) -> None:
        self._breaker.succeeded()
        self._metrics.set(names.JUDGE_BREAKER, 0)

    def _rest(self, error: JudgeBusyError) -> None:
        """Ask nothing for as long as it wants, or for a pause; never longer than that."""
        pause_s = self._settings.breaker_pause_ms / 1_000
        wanted_s = pause_s if error.retry_after_s is None else max(1.0, error.retry_after_s)
        rest_s = min(pause_s, wanted_s)
        if not self._breaker.open:
            logger.warning("the judge is asked too much: left alone for %g s: %s", rest_s, error)
        self._breaker.rest(self._now_s(), rest_s)
        self._metrics.set(names.JUDGE_BREAKER, 1)

    def _failed(self, why: str) -> None:
        was_open = self._breaker.open
        self._breaker.failed(self._now_s())
        self._metrics.set(names.JUDGE_BREAKER, float(self._breaker.open))
        if not self._breaker.open:
            return
        if not was_open:
            logger.warning(
                "the judge failed %d times in a row: left alone for %d ms: %s",
                self._settings.breaker_failures,
                self._settings.breaker_pause_ms,
                why,
            )
        elif why != self._why_away:
            logger.warning("the judge is still away, for another reason: %s", why)
        self._why_away = why

    async def _wait_for_breaker(self) -> None:
        while (wait_s := self._breaker.wait_s(self._now_s())) > 0:
            await self._sleep(wait_s)


def _is_cancelled() -> bool:
    """Whether somebody wants this task to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


__all__ = ["Ask", "JudgeService"]
