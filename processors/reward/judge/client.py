"""Asks a judge: an OpenAI-compatible endpoint, or a plugin."""

from __future__ import annotations

import math
from json import JSONDecodeError
from typing import Any, cast

from openai import APIStatusError, AsyncOpenAI, RateLimitError

from processors.reward.judge.service import Ask
from processors.reward.judge.verdicts import Question, Rubric, messages, prompt
from processors.reward.plugins import describe, load_judge
from streams.errors import JudgeBusyError, JudgeError, JudgeRefusedError, SettingsError
from streams.settings import JudgeSettings


def make_ask(settings: JudgeSettings) -> Ask:
    """What asks the judge that the settings name.

    Raises:
        SettingsError: They name none, or a plugin that is not installed.
        PluginError: The plugin cannot be imported.
    """
    if settings.plugin is not None:
        return _Plugin(settings)
    if settings.url is None:
        raise SettingsError("judge.url: name an OpenAI-compatible endpoint, or a judge.plugin")
    return _Endpoint(settings, settings.url)


class _Plugin:
    """A judge of another package."""

    def __init__(self, settings: JudgeSettings) -> None:
        assert settings.plugin is not None
        self._judge = load_judge(settings.plugin)
        self._timeout_s = settings.timeout_ms / 1_000

    async def __call__(self, rubric: Rubric, question: Question) -> str:
        return await self._judge(prompt(rubric, question), self._timeout_s)


class _Endpoint:
    """A judge behind ``POST <url>/chat/completions``."""

    def __init__(self, settings: JudgeSettings, url: str) -> None:
        self._settings = settings
        key = settings.api_key
        # Tries and timeouts are ours: the library's own would hide failures from the breaker.
        self._client = AsyncOpenAI(
            base_url=url,
            api_key=key.get_secret_value() if key is not None else "none",
            max_retries=0,
            timeout=settings.timeout_ms / 1_000,
        )

    async def __call__(self, rubric: Rubric, question: Question) -> str:
        """As ``Ask``.

        Raises:
            JudgeBusyError: It answers 429.
            JudgeRefusedError: It answers that there is something wrong with the question.
            JudgeError: What it answers is no chat completion.
        """
        try:
            answer: Any = await self._client.chat.completions.create(
                model=self._settings.model,
                messages=cast(Any, list(messages(rubric, question))),
                temperature=self._settings.temperature,
                max_tokens=self._settings.max_tokens,
            )
        except RateLimitError as error:
            raise JudgeBusyError(describe(error), _retry_after_s(error)) from error
        except APIStatusError as error:
            if error.status_code in _OF_THE_QUESTION:
                raise JudgeRefusedError(describe(error)) from error
            raise
        except JSONDecodeError as error:
            raise JudgeError(f"{_NO_COMPLETION}: {describe(error)}") from error
        try:
            content = answer.choices[0].message.content
        except (AttributeError, IndexError, TypeError):
            raise JudgeError(f"{_NO_COMPLETION}: {answer!r:.80}") from None
        return content or ""


_OF_THE_QUESTION = frozenset({400, 413, 422})
"""Answers that are about the question: it is too long, for example."""

_NO_COMPLETION = "judge.url answers with no chat completion; is it the endpoint up to /v1?"


def _retry_after_s(error: RateLimitError) -> float | None:
    """What the header ``Retry-After`` says, if it is a number of seconds."""
    try:
        seconds = float(error.response.headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


__all__ = ["make_ask"]
