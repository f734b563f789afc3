"""The policy server as its clients see it: real sockets, the plain OpenAI client, Kafka."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from openai import BadRequestError, NotFoundError, OpenAI
from prometheus_client import CollectorRegistry

from learner.model import BaseModel
from learner.serving.adapters import AdapterTable
from learner.serving.api import VERSION_HEADER, Server, build_app
from learner.serving.engine import Engine
from learner.serving.metrics import ServeMetrics
from learner.serving.watcher import VersionWatcher, watching_consumer
from streams.clock import ManualClock
from streams.contracts import ModelVersion, VersionStatus
from streams.kafka.clients import make_producer
from streams.serde import build_codec
from streams.settings import KafkaSettings
from tests.conftest import CreateTopics
from tests.unit.learner.serving.harness import (
    DEADLINE_S,
    Adapter,
    Oracle,
    make_table,
    running_engine,
    tiny_base,
    write_adapter,
)

MESSAGES: list[Any] = [{"role": "user", "content": "hello there"}]
REPOSITORY = Path(__file__).parents[2]
SERVE_LOG = "serve.log"


@dataclass(frozen=True)
class Running:
    """A server in this process, and its inside."""

    url: str
    base: BaseModel
    table: AdapterTable
    engine: Engine
    metrics: ServeMetrics
    client: OpenAI

    def drawn(self) -> float:
        """Tokens drawn for replies that have ended."""
        registry = self.metrics.registry
        labels = {"kind": "completion"}
        return registry.get_sample_value("clawstream_serve_tokens_total", labels) or 0.0

    def prompt(self, messages: Sequence[Any]) -> tuple[int, ...]:
        return self.base.render_prompt(messages)


@contextmanager
def serving(
    folder: Path, *, max_batch: int = 4, keep_versions: int = 3, endless: bool = False
) -> Iterator[Running]:
    """A server; in an ``endless`` one no reply ends before its token limit."""
    base = tiny_base(folder)
    table = make_table(base, keep_versions=keep_versions)
    metrics = ServeMetrics(CollectorRegistry())
    options: dict[str, Any] = {"max_batch": max_batch, "batch_wait_ms": 2, "metrics": metrics}
    if endless:
        options["end_token_ids"] = frozenset()
    with running_engine(base, table, **options) as engine:
        server = Server(
            base=base,
            table=table,
            engine=engine,
            metrics=metrics,
            clock=ManualClock(1_700_000_000_000),
            new_seed=iter(range(1, 1_000_000)).__next__,
            max_new_tokens=24,
        )
        with (
            _listening(build_app(server)) as url,
            OpenAI(
                base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
            ) as client,
        ):
            yield Running(url, base, table, engine, metrics, client)


@contextmanager
def _listening(app: Any) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def wait_until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    waiting = threading.Event()
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, "the condition did not come true"
        waiting.wait(0.01)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    root = tmp_path_factory.mktemp("adapters")
    folders = [root / f"v{version}" for version in range(1, 7)]
    return [
        Adapter(version, folder, write_adapter(folder, seed=version))
        for version, folder in enumerate(folders, start=1)
    ]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory, adapters: list[Adapter]) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("oracle"), adapters)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with serving(tmp_path) as running:
        yield running


def test_the_plain_client_gets_a_whole_reply(server: Running, oracle: Oracle) -> None:
    reply = server.client.chat.completions.create(
        model="live", messages=MESSAGES, temperature=0, max_tokens=10
    )
    expected = oracle.greedy(0, server.prompt(MESSAGES), 10)
    choice = reply.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == server.base.chat.decode(expected)
    assert choice.finish_reason == ("stop" if expected[-1] == 2 else "length")
    assert reply.model == "tiny-random"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(expected)
    assert reply.usage.prompt_tokens == len(server.prompt(MESSAGES))


def test_the_plain_client_gets_the_same_reply_as_a_stream(server: Running) -> None:
    whole = server.client.chat.completions.create(
        model="live", messages=MESSAGES, temperature=0.8, seed=7, max_tokens=20
    )
    chunks = list(
        server.client.chat.completions.create(
            model="live",
            messages=MESSAGES,
            temperature=0.8,
            seed=7,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == (
        whole.choices[0].finish_reason
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_token_ids_and_logprobs_are_what_the_learner_computes(
    server: Running, adapters: list[Adapter], oracle: Oracle
) -> None:
    server.table.load(1, adapters[0].folder, sha256=adapters[0].files)
    server.table.go_live(1)
    body = _post(server, temperature=0.7, top_p=0.9, seed=3, return_token_ids=True).json()
    choice = body["choices"][0]
    assert tuple(body["prompt_token_ids"]) == server.prompt(MESSAGES)
    expected = oracle.logprobs(1, body["prompt_token_ids"], choice["token_ids"], 0.7)
    assert choice["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert body["policy_version"] == 1
    assert body["model"] == "default-v1"
    assert body["tokenizer_digest"] == server.base.tokenizer_digest
    assert body["template_digest"] == server.base.template_digest


def test_a_stream_carries_the_same_ids_and_knows_its_version_before_it_begins(
    server: Running, adapters: list[Adapter]
) -> None:
    server.table.load(1, adapters[0].folder)
    server.table.go_live(1)
    fields = {"temperature": 1.0, "seed": 11, "max_tokens": 30, "return_token_ids": True}
    whole = _post(server, **fields).json()
    with _stream(server, **fields) as response:
        assert response.headers[VERSION_HEADER] == "1"
        chunks = list(_chunks(response))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [i for c in choices for i in c["token_ids"]] == whole["choices"][0]["token_ids"]
    assert [p for c in choices for p in c["token_logprobs"]] == pytest.approx(
        whole["choices"][0]["token_logprobs"], abs=1e-5
    )
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    assert {chunk["policy_version"] for chunk in chunks} == {1}


def test_standard_logprobs_come_when_asked_for(server: Running) -> None:
    reply = server.client.chat.completions.create(
        model="live", messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=3, seed=1
    )
    assert reply.choices[0].logprobs is not None
    entries = reply.choices[0].logprobs.content
    assert entries
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob <= entry.top_logprobs[0].logprob <= 0


def test_what_is_not_supported_is_refused_the_openai_way(server: Running) -> None:
    with pytest.raises(BadRequestError) as caught:
        server.client.chat.completions.create(model="live", messages=MESSAGES, n=2)
    assert caught.value.param == "n"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(NotFoundError) as missing:
        server.client.chat.completions.create(model="default-v9", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(BadRequestError) as too_long:
        server.client.chat.completions.create(model="live", messages=MESSAGES, max_tokens=1_000_000)
    assert too_long.value.code == "context_length_exceeded"


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/nothing"), ("PUT", "/v1/models")])
def test_paths_that_are_not_there_are_refused_the_openai_way(
    server: Running, method: str, path: str
) -> None:
    answer = httpx.request(method, f"{server.url}{path}")
    assert answer.status_code in (404, 405)
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_adapters_come_and_go_as_with_vllm(
    server: Running, adapters: list[Adapter], scheme: str
) -> None:
    load = {"lora_name": "default-v1", "lora_path": f"{scheme}{adapters[0].folder}"}
    assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=load).status_code == 200
    models = {model.id: model.model_dump() for model in server.client.models.list()}
    assert models["tiny-random"]["parent"] is None
    assert models["default-v1"]["parent"] == "tiny-random"
    assert models["default-v1"]["root"] == str(adapters[0].folder)
    assert models["tiny-random"]["live"]
    assert _post(server, model="default-v1").headers[VERSION_HEADER] == "1"
    unload = {"lora_name": "default-v1"}
    assert httpx.post(f"{server.url}/v1/unload_lora_adapter", json=unload).status_code == 200
    assert [model.id for model in server.client.models.list()] == ["tiny-random"]
    assert httpx.post(f"{server.url}/v1/unload_lora_adapter", json=unload).status_code == 404


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"lora_name": "other-v1", "lora_path": "/tmp"}, "lora_name"),
        ({"lora_name": "default-v1"}, "lora_path"),
        ({"lora_name": "default-v1", "lora_path": "/nowhere"}, "lora_path"),
    ],
)
def test_an_adapter_that_cannot_be_loaded_is_refused(
    server: Running, fields: dict[str, str], param: str
) -> None:
    answer = httpx.post(f"{server.url}/v1/load_lora_adapter", json=fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert _post(server).status_code == 200


def test_health_and_metrics_tell_what_goes_on(server: Running) -> None:
    _post(server)
    health = httpx.get(f"{server.url}/health").json()
    assert (health["status"], health["live_version"], health["watching"]) == ("ok", 0, None)
    assert "clawstream_serve_requests" in httpx.get(f"{server.url}/metrics").text
    server.engine.stop(0)
    assert httpx.get(f"{server.url}/health").status_code == 503
    assert _post(server).status_code == 503


def test_thirty_requests_during_swaps_are_each_answered_by_one_version(
    tmp_path: Path, adapters: list[Adapter], oracle: Oracle
) -> None:
    """No request is refused, and every reply is, token by token, the greedy reply of the
    version that its header names: no swap ever mixes two versions in one reply."""
    with serving(tmp_path, max_batch=8, keep_versions=2) as server:
        stop, swaps = threading.Event(), [0]

        def swap() -> None:
            while not stop.is_set():
                adapter = adapters[swaps[0] % len(adapters)]
                server.table.load(adapter.version, adapter.folder, sha256=adapter.files)
                server.table.go_live(adapter.version)
                swaps[0] += 1

        def converse(number: int) -> list[tuple[tuple[int, ...], httpx.Response]]:
            done = []
            for turn in range(2):
                messages = [{"role": "user", "content": f"question {number} " * (1 + number % 5)}]
                answer = _post(
                    server,
                    messages=messages,
                    temperature=0,
                    max_tokens=12 + turn,
                    return_token_ids=True,
                )
                done.append((server.prompt(messages), answer))
            return done

        swapper = threading.Thread(target=swap)
        swapper.start()
        try:
            with ThreadPoolExecutor(30) as pool:
                answers = [pair for done in pool.map(converse, range(30)) for pair in done]
        finally:
            stop.set()
            swapper.join()
    versions = set()
    for index, (prompt, answer) in enumerate(answers):
        assert answer.status_code == 200
        body = answer.json()
        version = int(answer.headers[VERSION_HEADER])
        versions.add(version)
        assert body["policy_version"] == version
        assert body["choices"][0]["token_ids"] == oracle.greedy(version, prompt, 12 + index % 2)
    assert swaps[0] > len(adapters)
    assert len(versions) > 2


def test_fifty_clients_of_which_many_hang_up_while_versions_come_and_go(
    tmp_path: Path, adapters: list[Adapter], oracle: Oracle
) -> None:
    """Who stays gets the reply of one version; who leaves, in the queue or in the middle of a
    stream, leaves nothing behind: no row, no version held, no refusal of anybody else."""
    with serving(tmp_path, max_batch=6, keep_versions=2) as server:
        stop = threading.Event()

        def swap() -> None:
            number = 0
            while not stop.is_set():
                adapter = adapters[number % len(adapters)]
                server.table.load(adapter.version, adapter.folder, sha256=adapter.files)
                server.table.go_live(adapter.version)
                number += 1

        def converse(number: int) -> tuple[tuple[int, ...], httpx.Response] | None:
            messages = [{"role": "user", "content": f"question {number} é 世界"}]
            asked = {"messages": messages, "temperature": 0, "max_tokens": 12}
            if number % 5 == 1:
                with contextlib.suppress(httpx.TimeoutException):
                    httpx.post(_url(server), json=_body(**asked), timeout=0.01 * (1 + number))
                return None
            if number % 5 == 3:
                with _stream(server, **asked) as response:
                    next(response.iter_lines())
                return None
            return server.prompt(messages), _post(server, return_token_ids=True, **asked)

        swapper = threading.Thread(target=swap)
        swapper.start()
        try:
            with ThreadPoolExecutor(50) as pool:
                answers = [one for one in pool.map(converse, range(50)) if one is not None]
        finally:
            stop.set()
            swapper.join()
        assert len(answers) == 30
        for prompt, answer in answers:
            assert answer.status_code == 200
            version = int(answer.headers[VERSION_HEADER])
            assert answer.json()["choices"][0]["token_ids"] == oracle.greedy(version, prompt, 12)
        wait_until(lambda: server.engine.running == 0 and server.engine.waiting == 0)
        # Nobody holds a version any more: all but the kept ones can go.
        wait_until(lambda: not server.table._users)
        assert len(server.table.versions()) <= 1 + 2


@pytest.mark.parametrize(
    ("lora_path", "said"),
    [("\0", "is no path"), ("/dev/null", "cannot read"), ("x" * 5_000, "cannot read")],
)
def test_a_path_that_is_none_is_refused(server: Running, lora_path: str, said: str) -> None:
    body = {"lora_name": "default-v1", "lora_path": lora_path}
    answer = httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=DEADLINE_S)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_an_unforeseen_error_is_told_the_openai_way(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(AdapterTable, "bind", lambda _table, _name: fail(None))
    answer = _post(server)
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert (error["type"], error["message"].split(";")[0]) == (
        "server_error",
        "the policy server failed: ZeroDivisionError",
    )
    monkeypatch.undo()
    assert _post(server, max_tokens=2).status_code == 200


def test_a_reply_keeps_its_version_although_a_newer_one_goes_live(
    server: Running, adapters: list[Adapter], oracle: Oracle
) -> None:
    for adapter in adapters[:2]:
        server.table.load(adapter.version, adapter.folder)
    server.table.go_live(1)
    with _stream(server, temperature=0, max_tokens=200, return_token_ids=True) as response:
        chunks = _chunks(response)
        seen = [next(chunks), next(chunks)]
        server.table.go_live(2)
        assert _post(server, temperature=0).json()["policy_version"] == 2
        seen.extend(chunks)
    ids = [i for chunk in seen for i in chunk["choices"][0]["token_ids"]]
    assert ids == oracle.greedy(1, server.prompt(MESSAGES), 200)


ENDLESS: dict[str, Any] = {"max_tokens": 3_500, "temperature": 0}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_row(tmp_path: Path, stream: bool) -> None:
    with serving(tmp_path, max_batch=1, endless=True) as server:
        if stream:
            with _stream(server, **ENDLESS) as response:
                lines = response.iter_lines()
                next(lines)
                wait_until(lambda: server.engine.running == 1)
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(_url(server), json=_body(**ENDLESS), timeout=0.5)
        wait_until(lambda: server.engine.running == 0 and server.engine.waiting == 0)
        assert _post(server, max_tokens=2).status_code == 200
        assert server.drawn() < ENDLESS["max_tokens"]


def test_a_client_that_hangs_up_in_the_queue_leaves_it(tmp_path: Path) -> None:
    with (
        serving(tmp_path, max_batch=1, endless=True) as server,
        _stream(server, **ENDLESS) as running,
    ):
        # Kept: an iterator that is thrown away closes the stream.
        lines = running.iter_lines()
        next(lines)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(_url(server), json=_body(), timeout=0.2)
        wait_until(lambda: server.engine.waiting == 0)
        assert server.engine.running == 1


def _url(server: Running) -> str:
    return f"{server.url}/v1/chat/completions"


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": "live", "messages": MESSAGES} | fields


def _post(server: Running, **fields: Any) -> httpx.Response:
    return httpx.post(_url(server), json=_body(**fields), timeout=DEADLINE_S)


@contextmanager
def _stream(server: Running, **fields: Any) -> Iterator[httpx.Response]:
    body = _body(stream=True, **fields)
    with httpx.stream("POST", _url(server), json=body, timeout=DEADLINE_S) as response:
        yield response


def _chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream has no end mark")


# Kafka


@pytest.mark.broker
def test_versions_of_a_real_topic_go_live_and_roll_back(
    tmp_path: Path,
    adapters: list[Adapter],
    kafka_bootstrap: str,
    create_topics: CreateTopics,
    unique_name: Callable[[str], str],
) -> None:
    topic = unique_name("model.versions")
    codec = build_codec()
    create_topics({topic: (1, {"cleanup.policy": "compact"})})

    def publish(adapter: Adapter, status: VersionStatus, base: BaseModel, **fields: Any) -> None:
        values: dict[str, Any] = {
            "event_id": f"{adapter.version}-{status}",
            "version": adapter.version,
            "status": status,
            "base_model_id": base.model_id,
            "base_model_digest": base.base_digest,
            "tokenizer_digest": base.tokenizer_digest,
            "template_digest": base.template_digest,
            "event_time": 1_000,
            "adapter_uri": adapter.folder.as_uri(),
            "adapter_files": dict(adapter.files),
        }
        producer = make_producer(KafkaSettings(), kafka_bootstrap)
        producer.produce(
            topic, key="default", value=codec.encode(ModelVersion(**(values | fields)))
        )
        assert producer.flush(DEADLINE_S) == 0

    with serving(tmp_path) as server:
        publish(adapters[0], VersionStatus.LIVE, server.base)
        watcher = VersionWatcher(
            make_consumer=lambda: watching_consumer(KafkaSettings(), kafka_bootstrap),
            topic=topic,
            codec=codec,
            base=server.base,
            table=server.table,
            metrics=server.metrics,
            retry_ms=60_000,
        )
        watcher.start()
        try:
            assert watcher.wait_caught_up(DEADLINE_S)
            assert _post(server).headers[VERSION_HEADER] == "1"
            publish(adapters[1], VersionStatus.LIVE, server.base)
            wait_until(lambda: _post(server, max_tokens=1).headers[VERSION_HEADER] == "2")
            publish(adapters[1], VersionStatus.ROLLED_BACK, server.base, previous_live=1)
            wait_until(lambda: _post(server, max_tokens=1).headers[VERSION_HEADER] == "1")
        finally:
            watcher.stop()


# The process


@contextmanager
def _process(folder: Path, **environment: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    env = {
        **os.environ,
        "CLAWSTREAM_DATA_DIR": str(folder),
        "CLAWSTREAM_MODEL__BASE": "tiny-random",
        "CLAWSTREAM_MODEL__NUM_THREADS": "1",
        **environment,
    }
    with (folder / SERVE_LOG).open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "learner.serving", "--port", "0"],
            cwd=REPOSITORY,
            env=env,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_the_process_serves_the_base_without_kafka_and_ends_running_replies(
    tmp_path: Path,
) -> None:
    with _process(tmp_path, CLAWSTREAM_SERVE__SHUTDOWN_GRACE_MS="60000") as (process, ready):
        assert ready["event"] == "ready"
        assert (ready["model"], ready["live_version"], ready["watching"]) == (
            "tiny-random",
            0,
            False,
        )
        url = f"{ready['url']}/v1/chat/completions"
        body = _body(stream=True, max_tokens=300, temperature=0)
        with httpx.stream("POST", url, json=body, timeout=DEADLINE_S) as response:
            chunks = _chunks(response)
            next(chunks)
            process.send_signal(signal.SIGTERM)
            last = list(chunks)[-1]
        assert last["choices"][0]["finish_reason"] in ("length", "stop")
        assert process.wait(DEADLINE_S) == 0
        assert "no Kafka" in (tmp_path / SERVE_LOG).read_text(encoding="utf-8")


@pytest.mark.model
def test_the_real_model_answers_sensibly(model_data_dir: Path) -> None:
    with _process(model_data_dir, CLAWSTREAM_MODEL__BASE="smollm2-135m") as (process, ready):
        with OpenAI(base_url=f"{ready['url']}/v1", api_key="none", timeout=DEADLINE_S) as client:
            reply = client.chat.completions.create(
                model="live",
                messages=[{"role": "user", "content": "What is the capital of France?"}],
                temperature=0,
                max_tokens=24,
            )
        assert "Paris" in (reply.choices[0].message.content or "")
        assert reply.choices[0].finish_reason == "stop"
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
