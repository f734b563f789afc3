"""The gateway's HTTP side: an OpenAI-compatible proxy and two doors for events."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import sqlite3
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from streams.clock import Clock
from streams.contracts import DialogueTurn, FeedbackEvent
from streams.errors import OversizedError, RecordError
from streams.gateway.conversation import BadMessageError
from streams.gateway.events import parse_events
from streams.gateway.publisher import SpoolingPublisher
from streams.gateway.reply import ReplyBuilder, without_extensions
from streams.gateway.service import CLIENT_KEYS, Caller, Exchange, GatewayService
from streams.settings import AlignSettings, GatewaySettings

logger = logging.getLogger(__name__)

T = TypeVar("T", DialogueTurn, FeedbackEvent)

TURN_ID_HEADER = "X-Clawstream-Turn-Id"
SESSION_ID_HEADER = "X-Clawstream-Session-Id"
VERSION_HEADER = "X-Clawstream-Policy-Version"
_ASKED = "return_token_ids"
_DONE = "data: [DONE]"


class Gateway:
    """The routes and what they share.

    Args:
        service: Makes events of what passes through.
        publisher: Where they go; started and stopped with the application.
        upstream: Client of the policy server, its base URL set.
        settings: Keys, policy and source.
        align: For the bound on an event's time.
        clock: Tells the time.
    """

    def __init__(
        self,
        service: GatewayService,
        publisher: SpoolingPublisher,
        upstream: httpx.AsyncClient,
        settings: GatewaySettings,
        align: AlignSettings,
        clock: Clock,
    ) -> None:
        self._service = service
        self._publisher = publisher
        self._upstream = upstream
        self._settings = settings
        self._align = align
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._metrics = CollectorRegistry()
        self._replies = Counter(
            "clawstream_gateway_replies",
            "Replies by how they ended",
            ["end"],
            registry=self._metrics,
        )
        self._accepted = Counter(
            "clawstream_gateway_events",
            "Events accepted by kind",
            ["kind"],
            registry=self._metrics,
        )
        Gauge(
            "clawstream_gateway_spooled_events",
            "Events that wait on disk for Kafka",
            registry=self._metrics,
        ).set_function(lambda: publisher.spooled)

    def build(self) -> FastAPI:
        """The ASGI application."""
        app = FastAPI(title="clawstream gateway", lifespan=self._lifespan)
        app.post("/v1/chat/completions")(self.chat)
        app.get("/v1/models")(self.models)
        app.post("/v1/turns", status_code=202)(self.turns)
        app.post("/v1/feedback", status_code=202)(self.feedback)
        app.get("/health")(self.health)
        app.get("/metrics")(self.metrics)
        app.exception_handler(HTTPException)(_error_response)
        return app

    async def chat(self, request: Request) -> Response:
        """Pass a chat request on; its turns are durable before the client sees the end."""
        caller = self._caller(request)
        body = await _json(request)
        if not isinstance(body, dict):
            raise HTTPException(400, "the body must be a JSON object")
        try:
            exchange = self._service.open(body, request.headers, caller)
        except BadMessageError as error:
            raise HTTPException(400, str(error)) from error
        prompt = asyncio.ensure_future(self._service.publish_prompt(exchange))
        try:
            answer = await self._ask(body)
        except BaseException:
            await _durable(prompt)
            raise
        if answer.status_code != httpx.codes.OK:
            await _durable(prompt)
            await answer.aread()
            return Response(answer.content, answer.status_code, media_type="application/json")
        if body.get("stream"):
            return await self._streamed(exchange, answer, prompt, asked=bool(body.get(_ASKED)))
        return await self._whole(exchange, answer, prompt, asked=bool(body.get(_ASKED)))

    async def models(self, request: Request) -> Response:
        """The policy server's models."""
        self._caller(request)
        try:
            answer = await self._upstream.get("models")
        except httpx.HTTPError as error:
            raise self._bad_gateway(error) from error
        return Response(answer.content, answer.status_code, media_type="application/json")

    async def turns(self, request: Request) -> dict[str, Any]:
        """Take over turns that were spoken elsewhere."""
        return await self._take(request, DialogueTurn, "turn")

    async def feedback(self, request: Request) -> dict[str, Any]:
        """Take over feedback."""
        return await self._take(request, FeedbackEvent, "feedback")

    async def health(self) -> dict[str, Any]:
        """Alive, and whether events wait on disk."""
        return {"status": "ok", "spooled_events": self._publisher.spooled}

    async def metrics(self) -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(self._metrics), media_type="text/plain; version=0.0.4")

    @asynccontextmanager
    async def _lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        self._publisher.start()
        yield
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._publisher.stop()
        await self._upstream.aclose()

    async def _take(self, request: Request, record_type: type[T], kind: str) -> dict[str, Any]:
        caller = self._caller(request)
        try:
            events = parse_events(
                await _json(request),
                record_type,
                source=caller.source,
                policy=self._settings.policy,
                now_ms=self._clock.now_ms(),
                max_skew_ms=self._align.max_skew_ms,
            )
            await _durable(self._service.publish(events))
        except OversizedError as error:
            raise HTTPException(413, str(error)) from error
        except RecordError as error:
            raise HTTPException(422, str(error)) from error
        self._accepted.labels(kind).inc(len(events))
        return {"accepted": len(events), "event_ids": [event.event_id for event in events]}

    def _caller(self, request: Request) -> Caller:
        keys = self._settings.api_keys
        if not keys:
            return Caller(request.headers.get("x-source") or self._settings.source)
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        for source, key in keys.items():
            if hmac.compare_digest(given.encode(), key.get_secret_value().encode()):
                return Caller(source)
        raise HTTPException(401, "unknown API key: send one of gateway.api_keys as Bearer token")

    async def _ask(self, body: Mapping[str, Any]) -> httpx.Response:
        asked = {key: value for key, value in body.items() if key not in CLIENT_KEYS}
        asked[_ASKED] = True
        request = self._upstream.build_request("POST", "chat/completions", json=asked)
        try:
            return await self._upstream.send(request, stream=True)
        except httpx.HTTPError as error:
            raise self._bad_gateway(error) from error

    def _bad_gateway(self, error: httpx.HTTPError) -> HTTPException:
        return HTTPException(
            502,
            f"the policy server at {self._settings.upstream_url} does not answer "
            f"({type(error).__name__}); check gateway.upstream_url",
        )

    async def _whole(
        self,
        exchange: Exchange,
        answer: httpx.Response,
        prompt: asyncio.Future[None],
        *,
        asked: bool,
    ) -> Response:
        try:
            body = json.loads(await answer.aread())
        except (httpx.HTTPError, ValueError) as error:
            await _durable(prompt)
            raise HTTPException(502, f"the policy server broke off: {error!r}") from error
        reply = ReplyBuilder()
        reply.feed(body)
        await _durable(prompt)
        await _durable(self._service.publish_reply(exchange, reply))
        self._replies.labels("done").inc()
        headers = _headers(exchange, reply.policy_version)
        return JSONResponse(_stamped(body, exchange, reply, asked=asked), headers=headers)

    async def _streamed(
        self,
        exchange: Exchange,
        answer: httpx.Response,
        prompt: asyncio.Future[None],
        *,
        asked: bool,
    ) -> Response:
        stream = _Stream(self, exchange, answer, prompt, asked=asked)
        version = answer.headers.get(VERSION_HEADER)
        headers = _headers(exchange, int(version) if version else None)
        return StreamingResponse(stream.run(), media_type="text/event-stream", headers=headers)

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Finish ``work`` even though the request that caused it is gone."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(
        self, exchange: Exchange, reply: ReplyBuilder, prompt: asyncio.Future[None], *, end: str
    ) -> None:
        """Make prompt and reply durable."""
        await _durable(prompt)
        await self._service.publish_reply(exchange, reply, hung_up=end == "hung_up")
        self._replies.labels(end).inc()


class _Stream:
    """One streamed reply on its way through."""

    def __init__(
        self,
        gateway: Gateway,
        exchange: Exchange,
        answer: httpx.Response,
        prompt: asyncio.Future[None],
        *,
        asked: bool,
    ) -> None:
        self._gateway = gateway
        self._exchange = exchange
        self._answer = answer
        self._prompt = prompt
        self._asked = asked
        self._reply = ReplyBuilder()

    async def run(self) -> AsyncIterator[str]:
        """The client's lines. A client that hangs up leaves a marked turn."""
        finished = False
        try:
            async for line in self._lines():
                yield line
            await self._gateway.finish(self._exchange, self._reply, self._prompt, end="done")
            finished = True
            yield f"{_DONE}\n\n"
        except (httpx.HTTPError, ValueError, sqlite3.Error, RecordError) as error:
            logger.error("reply %s broke off: %s", self._exchange.turn_id, error)
            finished = True
            self._gateway.in_background(self._leave("broken"))
            yield f"data: {json.dumps(_error_body(502, f'the reply broke off: {error!r}'))}\n\n"
        finally:
            if not finished:
                self._gateway.in_background(self._leave("hung_up"))
            else:
                await self._answer.aclose()

    async def _leave(self, end: str) -> None:
        await self._answer.aclose()
        await self._gateway.finish(self._exchange, self._reply, self._prompt, end=end)

    async def _lines(self) -> AsyncIterator[str]:
        async for line in self._answer.aiter_lines():
            if not line.startswith("data:") or line.startswith(_DONE):
                continue
            chunk = json.loads(line.removeprefix("data:"))
            self._reply.feed(chunk)
            stamped = _stamped(chunk, self._exchange, self._reply, asked=self._asked)
            yield f"data: {json.dumps(stamped, ensure_ascii=False)}\n\n"


def _stamped(
    body: dict[str, Any], exchange: Exchange, reply: ReplyBuilder, *, asked: bool
) -> dict[str, Any]:
    shown = body if asked else without_extensions(body)
    stamp = {
        "turn_id": exchange.turn_id,
        "session_id": exchange.session_id,
        "policy_version": reply.policy_version,
    }
    return {**shown, "clawstream": stamp}


def _headers(exchange: Exchange, policy_version: int | None) -> dict[str, str]:
    headers = {TURN_ID_HEADER: exchange.turn_id, SESSION_ID_HEADER: exchange.session_id}
    if policy_version is not None:
        headers[VERSION_HEADER] = str(policy_version)
    return headers


async def _durable(work: Coroutine[Any, Any, None] | asyncio.Future[None]) -> None:
    """Await ``work`` to its end even if the client is gone, and map what can go wrong."""
    try:
        await asyncio.shield(work)
    except sqlite3.Error as error:
        raise HTTPException(
            503, f"neither Kafka nor the spool takes events ({error}); nothing was accepted"
        ) from error


async def _json(request: Request) -> Any:
    try:
        return await request.json()
    except ValueError as error:
        raise HTTPException(400, f"the body is not valid JSON: {error}") from error


def _error_body(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < httpx.codes.INTERNAL_SERVER_ERROR else "api_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


async def _error_response(_request: Request, error: Exception) -> JSONResponse:
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else str(error)
    return JSONResponse(_error_body(status, str(detail)), status)


__all__ = ["Gateway", "SESSION_ID_HEADER", "TURN_ID_HEADER", "VERSION_HEADER"]
