"""Votes, limits, tries, the breaker and the cache, with a judge that does as told."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from processors.reward.judge.breaker import Breaker
from processors.reward.judge.cache import VerdictCache
from processors.reward.judge.client import make_ask
from processors.reward.judge.service import JudgeService
from processors.reward.judge.verdicts import Question, Rubric, Verdict
from streams import metrics as names
from streams.contracts import FeedbackEvent
from streams.errors import JudgeBusyError, JudgeError, JudgeRefusedError, SettingsError
from streams.metrics import ProcessorMetrics
from streams.serde import build_codec
from streams.settings import JudgeSettings
from tests.unit.processors.reward.builders import reply, segment

RUBRIC = Rubric("Judge it.", "digest")


class Judge:
    """Answers as told, and counts how often and how many at a time it was asked."""

    def __init__(self, answer: Callable[[int], str]) -> None:
        self._answer = answer
        self.asked = 0
        self.at_once = 0
        self._now = 0

    async def __call__(self, rubric: Rubric, question: Question) -> str:
        self.asked += 1
        self._now += 1
        self.at_once = max(self.at_once, self._now)
        try:
            await asyncio.sleep(0)
            return self._answer(self.asked)
        finally:
            self._now -= 1


class Time:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds
        await asyncio.sleep(0)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[VerdictCache]:
    with VerdictCache(tmp_path / "sub" / "judge.db") as made:
        yield made


class Bench:
    """A service with its clock and its counters."""

    def __init__(self, ask: Any, cache: VerdictCache, **settings: Any) -> None:
        self.time = Time()
        self.metrics = ProcessorMetrics("judge")
        self.service = JudgeService(
            JudgeSettings(url="http://judge/v1", **settings),
            RUBRIC,
            ask,
            cache,
            self.metrics,
            now_s=self.time,
            sleep=self.time.sleep,
        )

    async def judge(self, *turns: str) -> tuple[FeedbackEvent, ...]:
        return await self.service.judge(segment([reply(t, reply=f"text of {t}") for t in turns]))

    def outcomes(self, outcome: str) -> float:
        return self.metrics.value(names.JUDGEMENTS, outcome=outcome)


async def test_three_votes_make_a_verdict(cache: VerdictCache) -> None:
    judge = Judge(lambda n: f"VERDICT: {-1 if n == 2 else 1}")
    bench = Bench(judge, cache)
    (event,) = await bench.judge("a1")
    assert (event.value, judge.asked) == (1.0, 3)
    assert bench.outcomes("good") == 1


async def test_what_was_judged_is_never_asked_again(cache: VerdictCache) -> None:
    judge = Judge(lambda n: "VERDICT: -1")
    first = await Bench(judge, cache).judge("a1", "a2")
    bench = Bench(judge, cache)
    assert await bench.judge("a1", "a2") == first
    assert judge.asked == 6
    assert bench.outcomes("cached") == 2


def test_the_cache_outlives_its_process(tmp_path: Path) -> None:
    with VerdictCache(tmp_path / "judge.db") as cache:
        cache.put("k", Verdict((1, 0, -1)))
    with VerdictCache(tmp_path / "judge.db") as cache:
        assert cache.get("k") == Verdict((1, 0, -1))
        assert cache.get("other") is None
    (tmp_path / "judge.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(JudgeError, match="cannot be used"):
        VerdictCache(tmp_path / "judge.db")


async def test_no_more_than_so_many_are_asked_at_once(cache: VerdictCache) -> None:
    judge = Judge(lambda n: "VERDICT: 1")
    await Bench(judge, cache, concurrency=2).judge("a1", "a2", "a3")
    assert (judge.asked, judge.at_once) == (9, 2)


def down(_: int) -> str:
    raise ConnectionError("refused")


async def test_a_judge_that_fails_gives_a_reason_and_no_verdict(cache: VerdictCache) -> None:
    bench = Bench(Judge(down), cache, votes=1, breaker_failures=9)
    (event,) = await bench.judge("a1")
    assert event.value is None
    assert event.text == "ConnectionError: refused (after 2 tries)"
    assert bench.outcomes("failed") == 1


async def test_an_answer_without_verdict_is_tried_again(cache: VerdictCache) -> None:
    judge = Judge(lambda n: "VERDICT: 1" if n == 2 else "I cannot tell.")
    (event,) = await Bench(judge, cache, votes=1).judge("a1")
    assert (event.value, judge.asked) == (1.0, 2)


def _exits(_: int) -> str:
    sys.exit("enough")


def _gives_up(_: int) -> str:
    raise TimeoutError("of its own")


class OddError(BaseException):
    """An error that is no ``Exception``."""


def _raises_oddly(_: int) -> str:
    raise OddError("odd")


def _cancels(_: int) -> str:
    raise asyncio.CancelledError("a task of its own")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda _: None, "TypeError: a judge answers in words, not with NoneType"),
        (lambda _: b"VERDICT: 1", "TypeError: a judge answers in words, not with bytes"),
        (_exits, "SystemExit: enough"),
        (_gives_up, "TimeoutError: of its own"),
        (_raises_oddly, "OddError: odd"),
        (_cancels, "CancelledError: a task of its own"),
        (lambda _: "", "the answer has no line VERDICT"),
        (lambda _: "VERDICT: 7", "the answer has no line VERDICT"),
        (lambda _: "\ud800", "the answer has no line VERDICT"),
    ],
)
async def test_whatever_a_judge_answers_the_others_are_judged(
    cache: VerdictCache, answer: Any, says: str
) -> None:
    judge = Judge(lambda n: answer(n) if n == 1 else "VERDICT: 1")
    bench = Bench(judge, cache, votes=1, tries=1, concurrency=1)
    failed, judged = await bench.judge("a1", "a2")
    assert failed.value is None
    assert failed.text is not None
    assert failed.text.startswith(says)
    assert judged.value == 1.0
    for event in (failed, judged):
        assert build_codec().decode(build_codec().encode(event), FeedbackEvent) == event


async def test_a_judge_that_never_answers_times_out(cache: VerdictCache) -> None:
    async def silent(rubric: Rubric, question: Question) -> str:
        await asyncio.Event().wait()
        return ""

    bench = Bench(silent, cache, votes=1, tries=1, timeout_ms=5)
    (event,) = await bench.judge("a1")
    assert event.text == "timeout: no answer in 0.005 s (after 1 tries)"


async def test_after_failures_in_a_row_the_judge_is_left_alone_until_it_is_back(
    cache: VerdictCache,
) -> None:
    judge = Judge(lambda n: down(n) if n <= 4 else "VERDICT: 1")
    bench = Bench(judge, cache, votes=1, tries=9, concurrency=1, breaker_failures=3)
    (event,) = await bench.judge("a1")
    assert event.value == 1.0
    assert bench.time.slept == [60.0, 60.0]
    assert judge.asked == 5
    assert bench.metrics.shown(names.JUDGE_BREAKER) == 0


def busy(retry_after_s: float | None) -> Callable[[int], str]:
    def answer(_: int) -> str:
        raise JudgeBusyError("RateLimitError: 429", retry_after_s)

    return answer


@pytest.mark.parametrize(
    ("retry_after_s", "rest_s"), [(7.0, 7.0), (0.0, 1.0), (None, 60.0), (86_400.0, 60.0)]
)
async def test_a_judge_that_is_asked_too_much_is_asked_later_and_no_verdict_is_lost(
    cache: VerdictCache,
    caplog: pytest.LogCaptureFixture,
    retry_after_s: float | None,
    rest_s: float,
) -> None:
    judge = Judge(lambda n: busy(retry_after_s)(n) if n <= 6 else "VERDICT: 1")
    bench = Bench(judge, cache, votes=1, tries=1, concurrency=1, breaker_failures=2)
    (event,) = await bench.judge("a1")
    assert event.value == 1.0
    assert bench.time.slept == [rest_s] * 6
    assert bench.metrics.shown(names.JUDGE_BREAKER) == 0
    assert "left alone" in caplog.text


async def test_a_judge_that_is_always_asked_too_much_blocks_nobody_for_ever(
    cache: VerdictCache,
) -> None:
    bench = Bench(Judge(busy(1.0)), cache, votes=1, tries=2)
    (event,) = await bench.judge("a1")
    assert event.text == "RateLimitError: 429 (after 2 tries)"


async def test_no_verdict_is_lost_while_a_judge_is_away(cache: VerdictCache) -> None:
    judge = Judge(lambda n: down(n) if n <= 18 else "VERDICT: 1")
    bench = Bench(judge, cache, votes=1, tries=2, concurrency=1, breaker_failures=2)
    events = await bench.judge("a1", "a2", "a3")
    # Two tries are used up before anybody can know; from then on one asks whether it is back.
    assert [event.value for event in events] == [1.0, 1.0, 1.0]
    assert len(bench.time.slept) == 17


async def test_those_that_were_asked_at_the_same_time_lose_no_verdict_either(
    cache: VerdictCache,
) -> None:
    judge = Judge(lambda n: down(n) if n <= 20 else "VERDICT: 1")
    bench = Bench(judge, cache, votes=3, tries=2, concurrency=8, breaker_failures=3)
    events = await bench.judge("a1", "a2", "a3", "a4")
    assert [event.value for event in events] == [1.0] * 4


async def test_a_question_that_brings_the_judge_down_is_given_up(cache: VerdictCache) -> None:
    bench = Bench(Judge(down), cache, votes=1, tries=2, concurrency=1, breaker_failures=1)
    (event,) = await bench.judge("a1")
    assert event.text == "ConnectionError: refused (after 2 tries)"


async def test_a_question_that_is_refused_is_asked_once_and_closes_no_door(
    cache: VerdictCache,
) -> None:
    def answer(number: int) -> str:
        if 1 < number <= 4:
            raise JudgeRefusedError("BadRequestError: too long")
        return "VERDICT: 1"

    judge = Judge(answer)
    bench = Bench(judge, cache, votes=1, tries=5, concurrency=1, breaker_failures=2)
    events = await bench.judge("a0", "a1", "a2", "a3", "a4")
    assert [event.value for event in events] == [1.0, None, None, None, 1.0]
    assert events[1].text == "BadRequestError: too long"
    assert (judge.asked, bench.time.slept) == (5, [])


async def test_a_judge_that_refuses_everything_from_the_start_costs_no_verdict(
    cache: VerdictCache, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(number: int) -> str:
        if number <= 12:
            raise JudgeRefusedError("BadRequestError: no parameter max_tokens")
        return "VERDICT: 1"

    bench = Bench(Judge(answer), cache, votes=3, tries=2, breaker_failures=3)
    events = await bench.judge("a1", "a2", "a3")
    assert [event.value for event in events] == [1.0] * 3
    assert "left alone for 60000 ms: BadRequestError: no parameter max_tokens" in caplog.text
    assert bench.outcomes("failed") == 0


async def test_the_log_says_why_the_judge_is_left_alone(
    cache: VerdictCache, caplog: pytest.LogCaptureFixture
) -> None:
    await Bench(Judge(down), cache, votes=1, tries=2, breaker_failures=2).judge("a1")
    assert "failed 2 times in a row" in caplog.text
    assert "ConnectionError: refused" in caplog.text


async def test_the_log_says_when_it_is_away_for_another_reason(
    cache: VerdictCache, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(number: int) -> str:
        raise ConnectionError("refused") if number <= 4 else PermissionError("wrong key")

    await Bench(Judge(answer), cache, votes=1, tries=2, breaker_failures=2).judge("a1")
    # Once for each reason, however often it is tried.
    assert [record.getMessage() for record in caplog.records if "away" in record.message] == [
        "the judge is still away, for another reason: PermissionError: wrong key"
    ]
    assert caplog.text.count("left alone") == 1


async def test_a_judge_that_is_stopped_ends(cache: VerdictCache) -> None:
    started = asyncio.Event()

    async def silent(rubric: Rubric, question: Question) -> str:
        started.set()
        await asyncio.Event().wait()
        return ""

    running = asyncio.ensure_future(Bench(silent, cache, votes=1).judge("a1"))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def test_one_call_tries_while_the_others_wait() -> None:
    breaker = Breaker(failures=2, pause_s=10)
    for _ in range(2):
        assert breaker.wait_s(0) == 0
        breaker.failed(0)
    assert breaker.open
    assert breaker.wait_s(4) == 6
    assert breaker.wait_s(10) == 0
    assert breaker.wait_s(10) == 1
    breaker.failed(11)
    assert breaker.wait_s(12) == 9
    assert breaker.wait_s(21) == 0
    breaker.succeeded()
    assert not breaker.open
    assert breaker.wait_s(21) == 0


def test_a_success_ends_a_row_of_failures() -> None:
    breaker = Breaker(failures=2, pause_s=10)
    for _ in range(5):
        breaker.failed(0)
        breaker.succeeded()
    assert not breaker.open


def test_there_must_be_a_judge_and_only_one() -> None:
    with pytest.raises(SettingsError, match=r"judge\.url"):
        make_ask(JudgeSettings())
    with pytest.raises(ValueError, match="two judges"):
        JudgeSettings(url="http://j/v1", plugin="p")
