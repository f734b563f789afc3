"""The application in this process: Kafka, disk and policy server are the test's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from streams.clock import ManualClock
from streams.contracts import DialogueTurn, FeedbackEvent, FeedbackKind, Role
from streams.errors import SpoolError
from streams.gateway.app import Gateway
from streams.gateway.publisher import DeliveryError, Refused, SpoolingPublisher
from streams.gateway.service import GatewayService
from streams.gateway.spool import Envelope, Spool
from streams.serde import build_codec
from streams.settings import AlignSettings, GatewaySettings
from streams.topics import TURNS

CODEC = build_codec()
ANSWER = {"choices": [{"index": 0, "message": {"content": "hello"}, "finish_reason": "stop"}]}
HELLO = b'data: {"choices": [{"index": 0, "delta": {"content": "hello"}}]}\n\n'
CHAT = {"messages": [{"role": "user", "content": "hi"}], "session_id": "s"}


class Kafka:
    """Holds every record up until ``open``, or refuses it."""

    def __init__(self) -> None:
        self.away = False
        self.open = asyncio.Event()
        self.open.set()
        self.sent: list[Envelope] = []

    async def send(self, envelopes: Sequence[Envelope]) -> Sequence[Refused]:
        await self.open.wait()
        if self.away:
            raise DeliveryError("away")
        self.sent.extend(envelopes)
        return ()

    @property
    def turns(self) -> list[DialogueTurn]:
        return [CODEC.decode(e.value, DialogueTurn) for e in self.sent if e.topic == TURNS]


class Disk(Spool):
    """May be full."""

    full = False

    def append(self, envelopes: Sequence[Envelope]) -> None:
        if self.full:
            raise SpoolError("the disk is full")
        super().append(envelopes)


class Bench:
    """A gateway, and everything around it."""

    def __init__(self, folder: Path) -> None:
        self.kafka = Kafka()
        self.disk = Disk(folder / "spool.db")
        self.asked: list[httpx.Request] = []
        self.policy: Callable[[httpx.Request], httpx.Response] = lambda _: httpx.Response(
            200, json=ANSWER
        )
        publisher = SpoolingPublisher(self.kafka, self.disk)
        settings = GatewaySettings(request_timeout_ms=5_000, max_body_bytes=1_000)
        clock = ManualClock(1_700_000_000_000)
        upstream = httpx.AsyncClient(
            transport=httpx.MockTransport(self._answer),
            base_url="http://policy/v1/",
        )
        service = GatewayService(CODEC, publisher, clock, "default", {TURNS: 500})
        self.app = Gateway(service, publisher, upstream, settings, AlignSettings(), clock).build()

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        return self.policy(request)

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.post(path, json=body, headers=headers)

    async def chat(self, **more: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", CHAT | more)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.app.router.lifespan_context(self.app):
            yield


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.disk.close()


async def test_neither_kafka_nor_disk_means_nothing_is_accepted(bench: Bench) -> None:
    bench.kafka.away = bench.disk.full = True
    event = {"session_id": "s", "kind": "copy"}
    for answer in (await bench.chat(), await bench.post("/v1/feedback", event)):
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "the disk is full"
    bench.kafka.away = bench.disk.full = False
    assert (await bench.chat()).status_code == 200
    assert [turn.role for turn in bench.kafka.turns] == [Role.USER, Role.ASSISTANT]


async def test_outcomes_become_feedback_on_their_reply(bench: Bench) -> None:
    body = [
        {"session_id": "s", "turn_id": "t", "outcome": "bought"},
        {"session_id": "s", "turn_id": "u", "value": -0.5},
    ]
    answer = await bench.post("/v1/outcomes", body, **{"X-Source": "shop"})
    assert (answer.status_code, answer.json()["accepted"]) == (202, 2)
    events = [CODEC.decode(e.value, FeedbackEvent) for e in bench.kafka.sent]
    assert [(e.kind, e.turn_id, e.value, e.source) for e in events] == [
        (FeedbackKind.OUTCOME, "t", 1.0, "shop"),
        (FeedbackKind.OUTCOME, "u", -0.5, "shop"),
    ]
    assert [e.event_id for e in events] == answer.json()["event_ids"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ([], "the list is empty"),
        ([{"session_id": "s", "turn_id": "t", "outcome": "bought"}, {}], "[1]: session_id"),
        ({"session_id": "s", "turn_id": "t", "outcome": "stolen"}, "[0]: outcome: 'stolen'"),
    ],
)
async def test_of_outcomes_all_or_none_are_taken(bench: Bench, body: Any, says: str) -> None:
    answer = await bench.post("/v1/outcomes", body)
    assert answer.status_code == 422
    assert says in answer.json()["error"]["message"]
    assert bench.kafka.sent == []


async def test_a_prompt_too_large_never_reaches_the_policy_server(bench: Bench) -> None:
    messages = [{"role": "user", "content": "x" * 600}]
    for _ in range(2):
        assert (await bench.chat(messages=messages)).status_code == 413
    assert (bench.kafka.sent, bench.asked) == ([], [])


async def test_a_reply_too_large_is_an_error_and_its_id_stays_free(bench: Bench) -> None:
    large = {"choices": [{"index": 0, "message": {"content": "x" * 600}}]}
    bench.policy = lambda _: httpx.Response(200, json=large)
    headers = {"X-Feedback-Message-Id": "m"}
    assert (await bench.post("/v1/chat/completions", CHAT, **headers)).status_code == 413
    bench.policy = lambda _: httpx.Response(200, json=ANSWER)
    assert (await bench.post("/v1/chat/completions", CHAT, **headers)).status_code == 200
    assert [turn.turn_id for turn in bench.kafka.turns][1:] == ["m"]


async def test_a_reply_waits_for_a_prompt_that_another_request_publishes(bench: Bench) -> None:
    bench.kafka.open.clear()
    both = [asyncio.create_task(bench.chat()) for _ in range(2)]
    async with asyncio.timeout(10):
        while len(bench.asked) < 2:
            await asyncio.sleep(0)
    bench.kafka.open.set()
    assert [answer.status_code for answer in await asyncio.gather(*both)] == [200, 200]
    assert [turn.role for turn in bench.kafka.turns] == [
        Role.USER,
        Role.ASSISTANT,
        Role.ASSISTANT,
    ]


async def test_a_prompt_that_is_lost_takes_the_requests_behind_it_along(bench: Bench) -> None:
    bench.kafka.away = bench.disk.full = True
    bench.kafka.open.clear()
    both = [asyncio.create_task(bench.chat()) for _ in range(2)]
    async with asyncio.timeout(10):
        while len(bench.asked) < 2:
            await asyncio.sleep(0)
    bench.kafka.open.set()
    assert [answer.status_code for answer in await asyncio.gather(*both)] == [503, 503]
    assert bench.kafka.sent == []


async def test_a_stream_cut_by_the_end_of_the_process_is_recorded(bench: Bench) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield HELLO
        await asyncio.Event().wait()

    bench.policy = lambda _: httpx.Response(200, content=endless())
    came = asyncio.Event()

    async def send(message: Any) -> None:
        if b"hello" in message.get("body", b""):
            came.set()

    messages = [
        {"type": "http.request", "body": json.dumps(CHAT | {"stream": True}).encode()},
    ]

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [],
        "query_string": b"", "asgi": {},
    }  # fmt: skip
    async with bench.running():
        request = asyncio.create_task(bench.app(scope, receive, send))
        await came.wait()
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    prompt, reply = bench.kafka.turns
    assert (prompt.content, reply.content) == ("hi", "hello")
    assert reply.attributes == {"broken_off": "true"}


async def test_a_body_that_never_comes_is_not_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        started.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/v1/feedback", "headers": [],
        "query_string": b"", "asgi": {},
    }  # fmt: skip
    monkeypatch.setattr(asyncio, "timeout", lambda _seconds: _real_timeout(0.01))
    await bench.app(scope, receive, send)
    assert started[0]["status"] == 408


_real_timeout = asyncio.timeout


async def test_an_error_nobody_thought_of_is_in_openais_words(bench: Bench) -> None:
    def fails(_request: httpx.Request) -> httpx.Response:
        raise ZeroDivisionError("oops")

    bench.policy = fails
    answer = await bench.chat()
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "api_error")
