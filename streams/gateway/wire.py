"""JSON over HTTP as the gateway reads and writes it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
from fastapi import HTTPException, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from streams.errors import ServingError


async def read_json(request: Request, *, max_bytes: int, timeout_s: float) -> Any:
    """The body of a request.

    What msgspec refuses would fail later: lone surrogates and NaN cannot be recorded, and
    deep nesting exhausts the stack.

    Raises:
        HTTPException: 413 it is larger than ``max_bytes``, 408 it takes longer than
            ``timeout_s`` to arrive, 400 it is not JSON or not all of it arrived.
    """
    try:
        async with asyncio.timeout(timeout_s):
            data = await _bounded(request, max_bytes)
    except TimeoutError as error:
        raise HTTPException(408, f"the body did not arrive within {timeout_s:g} s") from error
    except ClientDisconnect as error:
        raise HTTPException(400, "the client left before its body had arrived") from error
    try:
        return msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not valid JSON: {error}") from error


async def _bounded(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "")
    received = bytearray()
    total = int(announced) if announced.isdigit() else 0
    if total <= 2 * max_bytes:
        total = 0
        # A little too much is read to its end: a client that is still sending when the
        # connection closes may never see the answer.
        async for part in request.stream():
            total += len(part)
            if total <= max_bytes:
                received += part
            elif total > 2 * max_bytes:
                break
    if total > max_bytes:
        raise HTTPException(
            413, f"the body is larger than gateway.max_body_bytes = {max_bytes}; send less"
        )
    return bytes(received)


def parse_answer(data: str | bytes) -> dict[str, Any]:
    """One JSON object of a policy server; more lenient than for clients.

    Raises:
        ServingError: It is none.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ServingError(f"the policy server sent no JSON: {error}") from error
    if not isinstance(body, dict):
        raise ServingError(f"the policy server sent no object: {str(body)[:80]!r}")
    return body


def dump_json(body: Any) -> str:
    """JSON in ASCII, so that halves of a character that come in two chunks pass."""
    return json.dumps(body, separators=(",", ":"))


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """``body`` as an answer."""
    return Response(dump_json(body), status, headers, media_type="application/json")


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """An error in the words of the OpenAI API."""
    kind = "invalid_request_error" if status < 500 else "api_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
