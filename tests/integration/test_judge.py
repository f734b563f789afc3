"""The judge against a real broker and an endpoint that speaks the chat API."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from processors.reward.judge.cache import VerdictCache
from processors.reward.judge.client import make_ask
from processors.reward.judge.service import JudgeService
from processors.reward.judge.verdicts import read_rubric
from processors.reward.judge.worker import JudgeWorker
from streams import metrics as names
from streams.clock import ManualClock
from streams.contracts import FeedbackEvent, FeedbackKind, TrajectorySegment
from streams.kafka.clients import make_producer
from streams.kafka.reading import read_records
from streams.metrics import ProcessorMetrics
from streams.serde import build_codec
from streams.settings import JudgeSettings, KafkaSettings, Settings
from tests.conftest import CreateTopics
from tests.integration.harness import DEADLINE_S
from tests.unit.processors.reward.builders import HOUR_MS, reply, segment

pytestmark = pytest.mark.broker

CODEC = build_codec()


class Endpoint:
    """A chat endpoint on a free port; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.failing = False
        self.answers: list[tuple[int, bytes]] = []
        """What to answer first: status and body."""
        self.held = threading.Event()
        """A reply that says "wait" is judged once this is set."""
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.asked.append(body)
                good = "good" in body["messages"][-1]["content"]
                if "wait" in body["messages"][-1]["content"]:
                    endpoint.held.wait(DEADLINE_S)
                answer = {
                    "id": "c",
                    "object": "chat.completion",
                    "created": 1,
                    "model": body["model"],
                    "choices": [
                        {
                            "index": 0,
                            "finish_reason": "stop",
                            "message": {
                                "role": "assistant",
                                "content": f"Seen.\nVERDICT: {1 if good else -1}",
                            },
                        }
                    ],
                }
                status, text = 200, json.dumps(answer).encode()
                if endpoint.failing:
                    status, text = 500, b"{}"
                elif endpoint.answers:
                    status, text = endpoint.answers.pop(0)
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Retry-After", "1")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def close(self) -> None:
        self.held.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    yield made
    made.close()


class JudgeBench:
    """A judge over topics of its own."""

    def __init__(self, bootstrap: str, folder: Path, prefix: str, url: str) -> None:
        self.prefix = prefix
        self.folder = folder
        judge = JudgeSettings(url=url, model="m", votes=3, tries=1, breaker_failures=50)
        self.settings = Settings(kafka=KafkaSettings(bootstrap_servers=bootstrap), judge=judge)
        self.metrics = ProcessorMetrics("judge")
        self.clock = ManualClock(HOUR_MS)
        self._producer = make_producer(self.settings.kafka, bootstrap)

    def produce(self, *segments: TrajectorySegment) -> None:
        for item in segments:
            self._producer.produce(f"{self.prefix}.segments", key="u", value=CODEC.encode(item))
        assert self._producer.flush(DEADLINE_S) == 0

    def published(self) -> list[FeedbackEvent]:
        topic = f"{self.prefix}.feedback"
        return list(read_records(self.settings, topic, FeedbackEvent, CODEC))

    async def run_until(self, group: str, count: int) -> list[FeedbackEvent]:
        """Run the judge until there are so many judgements in all; returns them."""
        stop = asyncio.Event()
        with VerdictCache(self.folder / "judge.db") as cache:
            service = JudgeService(
                self.settings.judge,
                read_rubric(None),
                make_ask(self.settings.judge),
                cache,
                self.metrics,
            )
            worker = JudgeWorker(
                self.settings,
                service,
                CODEC,
                self.metrics,
                group=f"{self.prefix}.{group}",
                segments=f"{self.prefix}.segments",
                feedback=f"{self.prefix}.feedback",
                clock=self.clock,
            )
            running = asyncio.ensure_future(worker.run(stop))
            try:
                async with asyncio.timeout(DEADLINE_S):
                    while len(await asyncio.to_thread(self.published)) < count:
                        done, _ = await asyncio.wait((running,), timeout=0.2)
                        assert not done, running.exception()
            finally:
                stop.set()
                await running
        return self.published()


@pytest.fixture
def bench(
    kafka_bootstrap: str,
    create_topics: CreateTopics,
    unique_name: Callable[[str], str],
    tmp_path: Path,
    endpoint: Endpoint,
) -> JudgeBench:
    prefix = unique_name("judge")
    create_topics({f"{prefix}.segments": (2, {}), f"{prefix}.feedback": (2, {})})
    return JudgeBench(kafka_bootstrap, tmp_path, prefix, endpoint.url)


def one(name: str, text: str) -> TrajectorySegment:
    return segment([reply(f"a-{name}", reply=text)], segment_id=name, session_id=f"s-{name}")


async def test_judgements_become_feedback_and_a_replay_asks_nothing(
    bench: JudgeBench, endpoint: Endpoint
) -> None:
    bench.produce(one("1", "a good reply"), one("2", "another"))
    first = await bench.run_until("one", 2)
    assert {(e.session_id, e.turn_id, e.value) for e in first} == {
        ("s-1", "a-1", 1.0),
        ("s-2", "a-2", -1.0),
    }
    assert {e.kind for e in first} == {FeedbackKind.JUDGEMENT}
    assert len(endpoint.asked) == 6
    assert endpoint.asked[0]["model"] == "m"
    assert "VERDICT: 1" in endpoint.asked[0]["messages"][0]["content"]

    again = await bench.run_until("a replay", 4)
    assert len(endpoint.asked) == 6
    assert len(again) == 4
    assert {event.event_id for event in again} == {event.event_id for event in first}


async def test_a_verdict_does_not_wait_for_those_that_take_longer(
    bench: JudgeBench, endpoint: Endpoint
) -> None:
    bench.produce(one("1", "please wait"), one("2", "a good reply"))
    (event,) = await bench.run_until("one", 1)
    assert event.session_id == "s-2"
    endpoint.held.set()
    both = await bench.run_until("one", 3)
    assert {event.session_id for event in both} == {"s-1", "s-2"}
    assert len({event.event_id for event in both}) == 2


async def test_what_no_judgement_can_reach_is_not_judged(
    bench: JudgeBench, endpoint: Endpoint
) -> None:
    horizon_ms = bench.settings.align.horizon_ms
    bench.clock.advance(horizon_ms + 1)
    old, new = one("1", "a good reply"), one("2", "a good reply")
    bench.produce(old, replace(new, first_closed_at=HOUR_MS + 1))
    (event,) = await bench.run_until("one", 1)
    assert event.session_id == "s-2"
    assert len(endpoint.asked) == 3
    assert bench.metrics.value(names.JUDGE_LATE) == 1


async def test_a_group_goes_on_where_it_stopped(bench: JudgeBench, endpoint: Endpoint) -> None:
    bench.produce(one("1", "a good reply"))
    await bench.run_until("one", 1)
    bench.produce(one("2", "another"))
    assert len(await bench.run_until("one", 2)) == 2


async def test_an_endpoint_that_fails_is_named_on_the_record(
    bench: JudgeBench, endpoint: Endpoint
) -> None:
    endpoint.failing = True
    bench.produce(one("1", "a good reply"))
    (event,) = await bench.run_until("one", 1)
    assert event.value is None
    assert "InternalServerError" in (event.text or "")


async def test_an_endpoint_that_is_asked_too_much_is_asked_later(
    bench: JudgeBench, endpoint: Endpoint
) -> None:
    endpoint.answers = [(429, b"{}")] * 4
    bench.produce(one("1", "a good reply"))
    (event,) = await bench.run_until("one", 1)
    assert event.value == 1.0
    assert not endpoint.answers


@pytest.mark.parametrize(
    "body",
    [b"<html></html>", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"message": null}]}'],
)
async def test_an_endpoint_that_speaks_something_else_is_named(
    bench: JudgeBench, endpoint: Endpoint, body: bytes
) -> None:
    endpoint.answers = [(200, body)] * 3
    bench.produce(one("1", "a good reply"))
    (event,) = await bench.run_until("one", 1)
    assert event.value is None
    assert "judge.url answers with no chat completion" in (event.text or "")
