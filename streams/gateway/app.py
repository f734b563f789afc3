"""The gateway's HTTP side: an OpenAI-compatible proxy and three doors for events."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar
from weakref import WeakSet

import httpx
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.exceptions import HTTPException as AnyHTTPException

from streams.clock import Clock
from streams.contracts import DialogueTurn, FeedbackEvent
from streams.errors import (
    ClawstreamError,
    ForbiddenError,
    OversizedError,
    RecordError,
    RequestRefusedError,
    ServingError,
)
from streams.gateway.background import Background
from streams.gateway.events import parse_events, parse_outcomes, refuse_decisions
from streams.gateway.ids import header_text, header_value, usable_id
from streams.gateway.publisher import SpoolingPublisher
from streams.gateway.reply import ReplyBuilder, without_extensions
from streams.gateway.service import CLIENT_KEYS, Caller, Ending, Exchange, GatewayService
from streams.gateway.streaming import Record, StreamedReply, StreamedResponse
from streams.gateway.wire import error_body, json_response, parse_answer, read_json
from streams.outcomes import Defaults
from streams.settings import AlignSettings, GatewaySettings

logger = logging.getLogger(__name__)

T = TypeVar("T", DialogueTurn, FeedbackEvent)

TURN_ID_HEADER = "X-Clawstream-Turn-Id"
SESSION_ID_HEADER = "X-Clawstream-Session-Id"
VERSION_HEADER = "X-Clawstream-Policy-Version"
_ASKED = "return_token_ids"
_VERSION = re.compile(r"[0-9]{1,18}")
_PASSED_ON = ("retry-after",)
_OURS_TO_MEND = (401, 403)
"""Answers that are about the gateway's own access, not the client's."""
_STATUS: tuple[tuple[type[ClawstreamError], int], ...] = (
    (RequestRefusedError, 400),
    (ForbiddenError, 403),
    (ServingError, 502),
    (OversizedError, 413),
    (RecordError, 422),
    (ClawstreamError, 503),
)
"""What each of our errors is to a client; the first that fits."""


class Gateway:
    """The routes and what they share.

    Args:
        service: Makes events of what passes through.
        publisher: Where they go; started and stopped with the application.
        upstream: Client of the policy server, its base URL set.
        settings: Keys, policy, source and bounds.
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
        self._background = Background()
        self._streams: WeakSet[StreamedReply] = WeakSet()
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
        app.post("/v1/outcomes", status_code=202)(self.outcomes)
        app.get("/health")(self.health)
        app.get("/metrics")(self.metrics)
        for kind in (AnyHTTPException, ClawstreamError, Exception):
            app.exception_handler(kind)(_error_response)
        return app

    async def chat(self, request: Request) -> Response:
        """Pass a chat request on; its turns are durable before the client sees the end."""
        caller = self._caller(request)
        body = await self._json(request)
        if not isinstance(body, dict):
            raise HTTPException(400, "the body must be a JSON object")
        exchange = self._service.open(body, request.headers, caller)
        envelopes = self._service.encode_prompt(exchange)
        prompt = self._background.start(self._service.publish_prompt(exchange, envelopes))
        try:
            answer = await self._ask(body)
        except BaseException:
            self._service.abandon_reply(exchange)
            await asyncio.shield(prompt)
            raise
        if answer.status_code != httpx.codes.OK:
            self._service.abandon_reply(exchange)
            await asyncio.shield(prompt)
            return await _refusal(answer)
        record = self._recording(exchange, prompt)
        asked = bool(body.get(_ASKED))
        if body.get("stream"):
            return self._streamed(exchange, answer, record, asked=asked)
        return await self._whole(request, exchange, answer, record, asked=asked)

    async def models(self, request: Request) -> Response:
        """The policy server's models."""
        self._caller(request)
        answer = await self._send(self._upstream.build_request("GET", "models"))
        if answer.status_code != httpx.codes.OK:
            return await _refusal(answer)
        return json_response(await _object(answer))

    async def turns(self, request: Request) -> dict[str, Any]:
        """Take over turns that were spoken elsewhere."""
        return await self._take(request, DialogueTurn, "turn")

    async def feedback(self, request: Request) -> dict[str, Any]:
        """Take over feedback."""
        return await self._take(request, FeedbackEvent, "feedback")

    async def outcomes(self, request: Request) -> dict[str, Any]:
        """Take over outcomes: one or a list, all or none."""
        caller = self._caller(request)
        body = await self._json(request)
        now_ms = self._clock.now_ms()
        defaults = Defaults(
            source=caller.source,
            policy=self._settings.policy,
            now_ms=now_ms,
            latest_ms=now_ms + self._align.max_skew_ms,
            values=self._settings.outcomes,
        )
        own_source_only = bool(self._settings.api_keys)
        events = parse_outcomes(body, defaults, own_source_only=own_source_only)
        return await self._publish(events, "outcome")

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
        for reply in tuple(self._streams):
            reply.settle(Ending.BROKEN)
        await self._background.drain()
        await self._publisher.stop()
        await self._upstream.aclose()

    async def _take(self, request: Request, record_type: type[T], kind: str) -> dict[str, Any]:
        caller = self._caller(request)
        events = parse_events(
            await self._json(request),
            record_type,
            source=caller.source,
            policy=self._settings.policy,
            now_ms=self._clock.now_ms(),
            max_skew_ms=self._align.max_skew_ms,
            own_source_only=bool(self._settings.api_keys),
        )
        if self._settings.api_keys and caller.source not in self._settings.deciding_sources:
            refuse_decisions(events, caller.source)
        return await self._publish(events, kind)

    async def _publish(
        self, events: Sequence[DialogueTurn | FeedbackEvent], kind: str
    ) -> dict[str, Any]:
        await asyncio.shield(self._background.start(self._service.publish(events)))
        self._accepted.labels(kind).inc(len(events))
        return {"accepted": len(events), "event_ids": [event.event_id for event in events]}

    def _caller(self, request: Request) -> Caller:
        authorization = header_text(request.headers, "authorization") or ""
        address = request.client.host if request.client is not None else ""
        origin = f"{address} {hashlib.sha256(authorization.encode()).hexdigest()}"
        keys = self._settings.api_keys
        if not keys:
            named = usable_id("X-Source", header_text(request.headers, "x-source"))
            return Caller(named or self._settings.source, origin)
        scheme, _, given = authorization.partition(" ")
        for source, key in keys.items():
            is_right = hmac.compare_digest(given.strip().encode(), key.get_secret_value().encode())
            if is_right and scheme.lower() == "bearer":
                return Caller(source, origin)
        raise HTTPException(401, "unknown API key: send one of gateway.api_keys as Bearer token")

    async def _json(self, request: Request) -> Any:
        return await read_json(
            request,
            max_bytes=self._settings.max_body_bytes,
            timeout_s=self._settings.request_timeout_ms / 1000,
        )

    async def _ask(self, body: Mapping[str, Any]) -> httpx.Response:
        asked = {key: value for key, value in body.items() if key not in CLIENT_KEYS}
        asked[_ASKED] = True
        try:
            request = self._upstream.build_request("POST", "chat/completions", json=asked)
        except ValueError as error:
            raise HTTPException(400, f"the body cannot be passed on: {error}") from error
        return await self._send(request)

    async def _send(self, request: httpx.Request) -> httpx.Response:
        try:
            return await self._upstream.send(request, stream=True)
        except httpx.HTTPError as error:
            raise ServingError(
                f"the policy server at {self._settings.upstream_url} does not answer "
                f"({type(error).__name__}); check gateway.upstream_url"
            ) from error

    def _recording(self, exchange: Exchange, prompt: asyncio.Future[None]) -> Record:
        async def record(reply: ReplyBuilder, end: Ending) -> None:
            self._replies.labels(end.name.lower()).inc()
            try:
                await asyncio.shield(prompt)
                if end is not Ending.BROKEN or reply.has_begun:
                    await self._service.publish_reply(exchange, reply, end)
                    return
            except ClawstreamError:
                self._service.abandon_reply(exchange)
                raise
            self._service.abandon_reply(exchange)

        return record

    async def _whole(
        self,
        request: Request,
        exchange: Exchange,
        answer: httpx.Response,
        record: Record,
        *,
        asked: bool,
    ) -> Response:
        reply, end = ReplyBuilder(), Ending.BROKEN
        try:
            body = await _object(answer)
            if not (isinstance(body.get("choices"), list) and body["choices"]):
                raise ServingError(f"the policy server sent no choices: {str(body)[:200]}")
            reply.feed(body)
            end = Ending.HUNG_UP if await request.is_disconnected() else Ending.DONE
        finally:
            await asyncio.shield(self._background.start(record(reply, end)))
        headers = _headers(exchange, reply.policy_version)
        return json_response(_stamped(body, exchange, reply, asked=asked), headers=headers)

    def _streamed(
        self, exchange: Exchange, answer: httpx.Response, record: Record, *, asked: bool
    ) -> Response:
        def stamp(chunk: dict[str, Any], reply: ReplyBuilder) -> dict[str, Any]:
            return _stamped(chunk, exchange, reply, asked=asked)

        reply = StreamedReply(answer, stamp, record, self._background)
        self._streams.add(reply)
        version = answer.headers.get(VERSION_HEADER, "")
        return StreamedResponse(
            reply,
            _headers(exchange, int(version) if _VERSION.fullmatch(version) else None),
            self._settings.request_timeout_ms / 1000,
        )


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
    headers = {
        TURN_ID_HEADER: header_value(exchange.turn_id),
        SESSION_ID_HEADER: header_value(exchange.session_id),
    }
    if policy_version is not None:
        headers[VERSION_HEADER] = str(policy_version)
    return headers


async def _object(answer: httpx.Response) -> dict[str, Any]:
    async with aclosing(answer):
        try:
            return parse_answer(await answer.aread())
        except httpx.HTTPError as error:
            raise ServingError(f"the policy server broke off: {error!r}") from error


async def _refusal(answer: httpx.Response) -> Response:
    """What the policy server says instead of a reply, in the words of the OpenAI API."""
    status = answer.status_code
    try:
        body = await _object(answer)
    except ServingError as error:
        body = error_body(status, f"the policy server answered {status}: {error}")
    if status in _OURS_TO_MEND or status < httpx.codes.BAD_REQUEST:
        said = str(body.get("error") or body)[:500]
        raise ServingError(
            f"the policy server answered {status} ({said}); check gateway.upstream_url and "
            "gateway.upstream_api_key"
        )
    headers = {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}
    return json_response(body, status, headers)


async def _error_response(_request: Request, error: Exception) -> Response:
    if isinstance(error, AnyHTTPException):
        body = error_body(error.status_code, str(error.detail))
        return json_response(body, error.status_code, dict(error.headers or {}))
    status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
    param = error.param if isinstance(error, RequestRefusedError) else None
    return json_response(error_body(status, str(error), param), status)


__all__ = ["Gateway", "SESSION_ID_HEADER", "TURN_ID_HEADER", "VERSION_HEADER"]
