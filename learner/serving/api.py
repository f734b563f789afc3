"""The HTTP face: OpenAI's chat completions, vLLM's adapter endpoints, health and metrics.

A request is admitted before its answer begins, so the header ``X-Clawstream-Policy-Version``
is right even for a stream. Load never refuses a request; it waits as long as its client does.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from learner.model import BaseModel
from learner.serving.adapters import AdapterTable, Binding, PolicyVersion
from learner.serving.engine import Engine, GenerationRequest, Progress, SampledToken, Ticket
from learner.serving.metrics import ServeMetrics
from learner.serving.protocol import (
    ChatRequest,
    ReplyFrame,
    error_body,
    parse_object,
    parse_request,
)
from learner.serving.sampling import SamplingParameters
from streams.clock import Clock
from streams.errors import (
    ArtifactError,
    ModelError,
    RequestRefusedError,
    ServingError,
    UnknownModelError,
)
from streams.registry.artifacts import local_path

VERSION_HEADER = "X-Clawstream-Policy-Version"
CLIENT_GONE = 499
"""The status, never seen by anybody, of an answer whose client has hung up."""
_SEED_BITS = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What the endpoints work with.

    Args:
        base: Tokenizer, chat template and digests.
        table: The loaded versions.
        engine: Generates; started and stopped by whoever made it.
        metrics: What ``/metrics`` shows.
        clock: Tells when a reply was created.
        new_seed: Seeds the replies of requests that bring none.
        max_new_tokens: The longest reply of a request that names no limit.
        watching: Whether the watcher has a broker; None if there is no watcher.
    """

    base: BaseModel
    table: AdapterTable
    engine: Engine
    metrics: ServeMetrics
    clock: Clock
    new_seed: Callable[[], int]
    max_new_tokens: int
    watching: Callable[[], bool] | None = None

    @property
    def context_tokens(self) -> int:
        """How many tokens prompt and reply may have together."""
        return int(self.base.model.config.max_position_embeddings)


def build_app(server: Server) -> FastAPI:
    """The server's application."""
    app = FastAPI(title="clawstream policy server", docs_url=None, redoc_url=None)
    _add_errors(app, server)
    _add_chat(app, server)
    _add_models(app, server)
    _add_adapters(app, server)
    _add_operations(app, server)
    return app


def _add_chat(app: FastAPI, server: Server) -> None:
    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        wanted = parse_request(await request.body())
        exchange = _admit(server, wanted)
        watch = asyncio.create_task(_cancel_when_gone(request, exchange))
        headers = {VERSION_HEADER: str(exchange.frame.policy_version)}
        if wanted.stream:
            include_usage = (
                wanted.stream_options is not None and wanted.stream_options.include_usage
            )
            events = _events(exchange, watch, include_usage=include_usage)
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        try:
            return await _whole_reply(exchange, headers)
        finally:
            exchange.ticket.cancel()
            await _end(watch)


def _add_models(app: FastAPI, server: Server) -> None:
    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(server, v) for v in server.table.versions()]}

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> dict[str, Any]:
        binding = server.table.bind(name)
        binding.release()
        return _card(server, binding.version)


def _card(server: Server, version: PolicyVersion) -> dict[str, Any]:
    return {
        "id": version.name,
        "object": "model",
        "created": version.loaded_at_ms // 1000,
        "owned_by": "clawstream",
        "root": version.root,
        "parent": version.parent,
        "max_model_len": server.context_tokens,
        "policy": server.table.policy,
        "policy_version": version.version,
        "live": version == server.table.live,
    }


def _add_adapters(app: FastAPI, server: Server) -> None:
    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: Request) -> PlainTextResponse:
        fields = parse_object(await request.body())
        name, path = _text(fields, "lora_name"), _text(fields, "lora_path")
        version = _version_in(name, server.table.policy)
        await asyncio.to_thread(server.table.load, version, local_path(path))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(request: Request) -> PlainTextResponse:
        name = _text(parse_object(await request.body()), "lora_name")
        await asyncio.to_thread(server.table.unload, name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise RequestRefusedError(f"{name} must be given, as text", param=name)
    return value


def _version_in(name: str, policy: str) -> int:
    match = re.fullmatch(rf"{re.escape(policy)}-v([1-9]\d{{0,11}})", name)
    if match is None:
        raise RequestRefusedError(
            f"adapters are named {policy}-v1, {policy}-v2 and so on, each name for one set of "
            f"weights for ever; {name!r} is not",
            param="lora_name",
        )
    return int(match[1])


def _add_operations(app: FastAPI, server: Server) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        alive = server.engine.alive
        watching = None if server.watching is None else server.watching()
        body = {
            "status": "ok" if alive else "stopped",
            "model": server.base.model_id,
            "policy": server.table.policy,
            "live_version": server.table.live.version,
            "running": server.engine.running,
            "waiting": server.engine.waiting,
            "watching": watching,
        }
        return JSONResponse(body, status_code=200 if alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        text = generate_latest(server.metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)


def _add_errors(app: FastAPI, server: Server) -> None:
    def answer(status: int, body: dict[str, Any]) -> JSONResponse:
        server.metrics.requests.labels("refused").inc()
        return JSONResponse(body, status_code=status)

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        return answer(
            error.status_code, error_body(str(error.detail), kind=kind, param=None, code=None)
        )

    @app.exception_handler(RequestRefusedError)
    async def refused(_: Request, error: RequestRefusedError) -> JSONResponse:
        body = error_body(
            str(error), kind="invalid_request_error", param=error.param, code=error.code
        )
        return answer(400, body)

    @app.exception_handler(UnknownModelError)
    async def unknown(_: Request, error: UnknownModelError) -> JSONResponse:
        kind = "invalid_request_error"
        return answer(404, error_body(str(error), kind=kind, param="model", code="model_not_found"))

    @app.exception_handler(ArtifactError)
    @app.exception_handler(ModelError)
    async def unusable(_: Request, error: Exception) -> JSONResponse:
        kind = "invalid_request_error"
        code = "unusable_adapter"
        return answer(400, error_body(str(error), kind=kind, param="lora_path", code=code))

    @app.exception_handler(ServingError)
    async def cannot(_: Request, error: ServingError) -> JSONResponse:
        status = 400 if server.engine.alive else 503
        kind = "invalid_request_error" if status == 400 else "server_error"
        return answer(status, error_body(str(error), kind=kind, param=None, code=None))

    @app.exception_handler(Exception)
    async def unforeseen(_: Request, error: Exception) -> JSONResponse:
        # The server's own log has the traceback: the middleware above raises it again.
        message = f"the policy server failed: {type(error).__name__}; its log says more"
        server.metrics.requests.labels("error").inc()
        return JSONResponse(
            error_body(message, kind="server_error", param=None, code=None), status_code=500
        )


# One exchange


@dataclass(frozen=True, slots=True)
class _Exchange:
    """An admitted request and the steps of its reply, as they come."""

    frame: ReplyFrame
    ticket: Ticket
    steps: asyncio.Queue[Progress]

    async def progress(self) -> AsyncIterator[Progress]:
        while True:
            step = await self.steps.get()
            yield step
            if step.finish_reason is not None:
                return


def _admit(server: Server, wanted: ChatRequest) -> _Exchange:
    """Bind the request to its version and put it into the queue."""
    prompt = _prompt(server, wanted)
    limit = _limit(server, wanted, len(prompt))
    binding = server.table.bind(wanted.model)
    steps: asyncio.Queue[Progress] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def listen(step: Progress) -> None:
        # The loop is closed when a reply outlives the server; nobody listens then.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(steps.put_nowait, step)

    frame = _frame(server, wanted, binding, prompt)
    generation = GenerationRequest(
        prompt_token_ids=prompt,
        max_new_tokens=limit,
        binding=binding,
        sampling=_sampling(server, wanted),
        stop=tuple(wanted.stop or ()),
    )
    return _Exchange(frame, server.engine.submit(generation, listen), steps)


def _prompt(server: Server, wanted: ChatRequest) -> tuple[int, ...]:
    try:
        return server.base.render_prompt([message.for_template() for message in wanted.messages])
    except ModelError as error:
        raise RequestRefusedError(str(error), param="messages") from error


def _limit(server: Server, wanted: ChatRequest, prompt_tokens: int) -> int:
    room = server.context_tokens - prompt_tokens
    limit = wanted.token_limit or min(server.max_new_tokens, room)
    if room < 1 or limit > room:
        raise RequestRefusedError(
            f"this model reads {server.context_tokens} tokens at most; the messages have "
            f"{prompt_tokens} and {max(limit, 1)} more are asked for",
            param="messages" if room < 1 else "max_tokens",
            code="context_length_exceeded",
        )
    return limit


def _sampling(server: Server, wanted: ChatRequest) -> SamplingParameters:
    seed = server.new_seed() if wanted.seed is None else wanted.seed
    return SamplingParameters(
        temperature=1.0 if wanted.temperature is None else wanted.temperature,
        top_p=1.0 if wanted.top_p is None else wanted.top_p,
        seed=seed & _SEED_BITS,
        top_logprobs=wanted.top_logprobs or 0,
    )


def _frame(
    server: Server, wanted: ChatRequest, binding: Binding, prompt: tuple[int, ...]
) -> ReplyFrame:
    chat = server.base.chat
    return ReplyFrame(
        reply_id=f"chatcmpl-{uuid.uuid4().hex}",
        created=server.clock.now_ms() // 1000,
        model=binding.version.name,
        policy_version=binding.version.version,
        tokenizer_digest=server.base.tokenizer_digest,
        template_digest=server.base.template_digest,
        prompt_token_ids=prompt,
        token_text=lambda token_id: chat.decode([token_id], skip_special_tokens=False),
        logprobs=bool(wanted.logprobs),
        return_token_ids=bool(wanted.return_token_ids),
    )


async def _whole_reply(exchange: _Exchange, headers: dict[str, str]) -> Response:
    text, tokens = "", list[SampledToken]()
    async for step in exchange.progress():
        text += step.text
        tokens.extend(step.tokens)
        if step.finish_reason == "error":
            return JSONResponse(_failure(step), status_code=500, headers=headers)
        if step.finish_reason == "cancelled":
            return Response(status_code=CLIENT_GONE)
        if step.finish_reason is not None:
            return JSONResponse(
                exchange.frame.body(text, tokens, step.finish_reason), headers=headers
            )
    raise AssertionError("a reply ends with a finish reason")


async def _events(
    exchange: _Exchange, watch: asyncio.Task[None], *, include_usage: bool
) -> AsyncIterator[bytes]:
    """The reply as server-sent events.

    Tokens whose text is still held back travel with the next piece of text, so that every
    chunk but the last shows something.
    """
    try:
        yield _event(exchange.frame.opening_chunk())
        held: list[SampledToken] = []
        drawn = 0
        async for step in exchange.progress():
            if step.finish_reason in ("error", "cancelled"):
                yield _event(_failure(step))
                return
            drawn += len(step.tokens)
            held.extend(step.tokens)
            if step.text or step.finish_reason is not None:
                yield _event(exchange.frame.chunk(step.text, held, step.finish_reason))
                held = []
        if include_usage:
            yield _event(exchange.frame.usage_chunk(drawn))
        yield b"data: [DONE]\n\n"
    finally:
        exchange.ticket.cancel()
        await _end(watch)


def _event(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode(errors="replace")


def _failure(step: Progress) -> dict[str, Any]:
    message = step.error or "the reply was cut off: the policy server is shutting down"
    return error_body(message, kind="server_error", param=None, code=step.finish_reason)


async def _cancel_when_gone(request: Request, exchange: _Exchange) -> None:
    """Give the row back as soon as the client hangs up, also while it waits for a row."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    exchange.ticket.cancel()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


__all__ = ["CLIENT_GONE", "VERSION_HEADER", "Server", "build_app"]
