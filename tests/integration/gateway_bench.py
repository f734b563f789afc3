"""A gateway as a process, a policy server that does as told, and what Kafka holds."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
import yaml
from confluent_kafka import Consumer, TopicPartition
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from streams.contracts import DialogueTurn, FeedbackEvent
from streams.serde import build_codec
from streams.topics import FEEDBACK, TURNS

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0
VERSION = 7
PROMPT_IDS = (101, 102, 103)


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait for ``condition``; fails the test after the deadline."""
    waiting = threading.Event()
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, f"not within {deadline_s:g} s: {what}"
        waiting.wait(0.01)


@dataclass
class Script:
    """What the policy server does for one model.

    Attributes:
        parts: What it sends, one write each. A ``threading.Event`` holds it up until set.
        status: HTTP status.
        media_type: Content type.
        dies: Whether it cuts the connection at the end.
    """

    parts: Sequence[bytes | threading.Event]
    status: int = 200
    media_type: str = "text/event-stream"
    dies: bool = False
    headers: dict[str, str] = field(default_factory=dict)


def event(data: Any) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


DONE = event("[DONE]")


def chunk(delta: dict[str, Any], **choice: Any) -> dict[str, Any]:
    """A chunk as our own policy server sends it."""
    return {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": f"default-v{VERSION}",
        "policy_version": VERSION,
        "tokenizer_digest": "tok",
        "template_digest": "tpl",
        "choices": [{"index": 0, "delta": delta, "finish_reason": None, **choice}],
    }


def stream_of(*words: str, end: bool = True) -> list[bytes]:
    """The events of a reply, a token a word; its end too unless told otherwise."""
    first = chunk({"role": "assistant", "content": ""}) | {"prompt_token_ids": list(PROMPT_IDS)}
    said = [
        chunk({"content": word}, token_ids=[n], token_logprobs=[-0.25 * (n + 1)])
        for n, word in enumerate(words)
    ]
    ending = [event(chunk({}, finish_reason="stop")), DONE] if end else []
    return [event(first), *map(event, said), *ending]


class PolicyServer:
    """Answers by the script of the request's model; without one it echoes the last message."""

    def __init__(self) -> None:
        self.scripts: dict[str, Script] = {}
        self.asked: list[dict[str, Any]] = []
        self.hung_up = threading.Event()
        self.app = FastAPI()
        self.app.post("/v1/chat/completions")(self._chat)
        self.app.get("/v1/models")(self._models)

    async def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "default", "object": "model"}]}

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        script = self.scripts.get(body["model"])
        headers = {"X-Clawstream-Policy-Version": str(VERSION)}
        if script is None:
            reply = f"echo {body['messages'][-1]['content']}"
            if not body.get("stream"):
                return JSONResponse(whole(reply), headers=headers)
            script = Script(stream_of("echo ", reply.removeprefix("echo ")))
        return StreamingResponse(
            self._play(script), script.status, headers | script.headers, script.media_type
        )

    async def _play(self, script: Script) -> AsyncIterator[bytes]:
        try:
            for part in script.parts:
                if isinstance(part, bytes):
                    yield part
                    continue
                async with asyncio.timeout(DEADLINE_S):
                    while not part.is_set():
                        await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.hung_up.set()
            raise
        if script.dies:
            raise ConnectionError("told to")


def whole(content: str, **more: Any) -> dict[str, Any]:
    """A plain answer as our own policy server gives it."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": content},
        "finish_reason": "stop",
        "token_ids": [1, 2],
        "token_logprobs": [-0.5, -1.0],
    }
    answer = chunk({}) | {"object": "chat.completion", "prompt_token_ids": list(PROMPT_IDS)}
    return answer | {"choices": [choice]} | more


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """``app`` on a free port, in a thread."""
    config = uvicorn.Config(
        app, port=0, log_config=None, access_log=False, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started, "the policy server listens")
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


class GatewayProcess:
    """``python -m streams.gateway``, its log in a file.

    Args:
        folder: For its settings, data and log.
        bootstrap: Where Kafka is, or is not.
        upstream_url: The policy server, without ``/v1``.
        gateway: Further keys of the section ``gateway``.
        file_bytes: The largest file it may write: a disk that fills up.
    """

    def __init__(
        self,
        folder: Path,
        bootstrap: str,
        upstream_url: str,
        file_bytes: int | None = None,
        **gateway: Any,
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "gateway.yaml"
        values = {
            "data_dir": str(folder / "data"),
            "kafka": {"bootstrap_servers": bootstrap},
            "gateway": {"upstream_url": f"{upstream_url}/v1", **gateway},
        }
        config.write_text(yaml.safe_dump(values), encoding="utf-8")
        self._log = folder / "gateway.log"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "streams.gateway", "--port", "0", "--config", str(config)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST")},
                preexec_fn=None if file_bytes is None else lambda: _limit_files(file_bytes),
            )
        self.url = self._ready()["url"]

    @property
    def log(self) -> str:
        """What it logged."""
        return self._log.read_text(encoding="utf-8")

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self._reap()

    def terminate(self) -> int:
        """SIGTERM; returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self._reap()

    def close(self) -> None:
        """End it if it still runs."""
        if self.process.returncode is None:
            self.kill()

    def _reap(self) -> int:
        code = self.process.wait(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def _ready(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self._reap()
            raise AssertionError(f"the gateway did not start:\n{self.log[-2000:]}")
        found: dict[str, Any] = json.loads(line)
        assert found["event"] == "ready"
        return found


def _limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


class Log:
    """Reads what the input topics hold, by session."""

    def __init__(self, bootstrap: str) -> None:
        self._codec = build_codec()
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "gateway-tests",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 10,
            }
        )
        self._values: list[tuple[bytes, bytes]] = []
        self._turns: list[DialogueTurn] = []
        self._feedback: list[FeedbackEvent] = []
        metadata = self._consumer.list_topics(timeout=DEADLINE_S)
        self._next = {
            (topic, partition): 0
            for topic in (TURNS, FEEDBACK)
            for partition in metadata.topics[topic].partitions
        }
        self._consumer.assign([TopicPartition(t, p, 0) for t, p in self._next])

    def turns(self, session_id: str) -> list[DialogueTurn]:
        """The session's turns that are in Kafka now, in its order."""
        self._read()
        return [turn for turn in self._turns if turn.session_id == session_id]

    def feedback(self, session_id: str) -> list[FeedbackEvent]:
        """Like ``turns``."""
        self._read()
        return [event for event in self._feedback if event.session_id == session_id]

    def turns_of(self, session_ids: Iterable[str]) -> list[list[DialogueTurn]]:
        """Like ``turns``, for many at once."""
        self._read()
        found: dict[str, list[DialogueTurn]] = {session_id: [] for session_id in session_ids}
        for turn in self._turns:
            if turn.session_id in found:
                found[turn.session_id].append(turn)
        return list(found.values())

    def values(self, session_id: str) -> list[bytes]:
        """What the session's records are, byte for byte."""
        self._read()
        return [value for key, value in self._values if key == session_id.encode()]

    def sessions_with(self, content: str) -> set[str]:
        """Sessions in which somebody said ``content``."""
        self._read()
        return {turn.session_id for turn in self._turns if turn.content == content}

    def close(self) -> None:
        """End the consumer."""
        self._consumer.close()

    def _read(self) -> None:
        until = {
            (t, p): self._consumer.get_watermark_offsets(TopicPartition(t, p), DEADLINE_S)[1]
            for t, p in self._next
        }
        deadline = time.monotonic() + DEADLINE_S
        while any(self._next[place] < until[place] for place in until):
            assert time.monotonic() < deadline, "the topics could not be read to their end"
            for message in self._consumer.consume(500, 0.05):
                assert message.error() is None
                topic, partition, offset = message.topic(), message.partition(), message.offset()
                assert topic is not None
                assert partition is not None
                assert offset is not None
                self._next[topic, partition] = offset + 1
                key, value = message.key(), message.value()
                if not isinstance(value, bytes) or not isinstance(key, bytes):
                    continue
                self._values.append((key, value))
                if topic == TURNS:
                    self._turns.append(self._codec.decode(value, DialogueTurn))
                else:
                    self._feedback.append(self._codec.decode(value, FeedbackEvent))
