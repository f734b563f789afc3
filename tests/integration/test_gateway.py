"""The gateway as its clients see it: a process of its own, a real broker, the ``openai`` client."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from streams.contracts import DialogueTurn, FeedbackEvent, FeedbackKind, Role, TurnType
from streams.gateway.app import SESSION_ID_HEADER, TURN_ID_HEADER, VERSION_HEADER
from streams.gateway.spool import Spool
from streams.kafka.admin import apply_inventory
from streams.ports import free_ports
from streams.serde import build_codec
from streams.settings import KafkaSettings
from streams.topics import FEEDBACK, load_inventory
from tests.integration.gateway_bench import (
    DEADLINE_S,
    DONE,
    PROMPT_IDS,
    VERSION,
    GatewayProcess,
    Log,
    PolicyServer,
    Script,
    chunk,
    event,
    serving,
    stream_of,
    wait_until,
    whole,
)

pytestmark = pytest.mark.broker

MAX_BODY_BYTES = 6 * 1024 * 1024
HI: list[Any] = [{"role": "user", "content": "hi"}]
FULL_DISK_BYTES = 256 * 1024


@pytest.fixture(scope="module")
def bootstrap(kafka_bootstrap: str) -> str:
    apply_inventory(KafkaSettings(), kafka_bootstrap, load_inventory())
    return kafka_bootstrap


@pytest.fixture(scope="module")
def log(bootstrap: str) -> Iterator[Log]:
    reader = Log(bootstrap)
    yield reader
    reader.close()


@pytest.fixture(scope="module")
def policy() -> PolicyServer:
    return PolicyServer()


@pytest.fixture(scope="module")
def policy_url(policy: PolicyServer) -> Iterator[str]:
    with serving(policy.app) as url:
        yield url


@pytest.fixture(scope="module")
def gateway(
    bootstrap: str, policy_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """The gateway that most tests share."""
    folder = tmp_path_factory.mktemp("gateway")
    running = GatewayProcess(folder, bootstrap, policy_url, max_body_bytes=MAX_BODY_BYTES)
    yield running
    assert running.terminate() == 0
    assert "Traceback" not in running.log


@pytest.fixture
def session() -> str:
    return f"s-{uuid.uuid4().hex}"


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=DEADLINE_S) as made:
        yield made


@pytest.fixture
def ai(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    with openai_client(gateway.url) as made:
        yield made


@pytest.fixture
def script(policy: PolicyServer) -> Callable[..., str]:
    """``script(*parts, **how)`` makes the policy server play them; returns the model to ask."""

    def add(*parts: Any, **how: Any) -> str:
        model = f"model-{uuid.uuid4().hex}"
        policy.scripts[model] = Script(parts, **how)
        return model

    return add


def openai_client(url: str, key: str = "none", retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=retries, timeout=DEADLINE_S)


@contextmanager
def running(*arguments: Any, **options: Any) -> Iterator[GatewayProcess]:
    started = GatewayProcess(*arguments, **options)
    try:
        yield started
    finally:
        started.close()


def ask(
    client: httpx.Client, session: str | None, messages: Any = None, **more: Any
) -> httpx.Response:
    headers = more.pop("headers", {}) | ({"X-Session-Id": session} if session else {})
    body = {"model": "echo", "messages": messages or HI, **more}
    return client.post("/v1/chat/completions", json=body, headers=headers)


def events_of(answer: httpx.Response) -> list[Any]:
    """The data of a streamed answer; ``[DONE]`` stays text."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def said(events: list[Any]) -> str:
    deltas = [e["choices"][0]["delta"] for e in events if e != "[DONE]" and e.get("choices")]
    return "".join(delta.get("content") or "" for delta in deltas)


def replies(turns: list[DialogueTurn]) -> list[DialogueTurn]:
    return [turn for turn in turns if turn.role is Role.ASSISTANT]


class TestAReply:
    def test_whole_carries_its_ids(self, ai: openai.OpenAI, log: Log, session: str) -> None:
        raw = ai.chat.completions.with_raw_response.create(
            model="echo",
            messages=HI,
            temperature=0.5,
            user="u",
            extra_headers={"X-Session-Id": session},
        )
        prompt, reply = log.turns(session)
        assert raw.headers[TURN_ID_HEADER] == reply.turn_id
        assert raw.headers[SESSION_ID_HEADER] == session
        assert raw.headers[VERSION_HEADER] == str(VERSION)
        answer = raw.parse()
        assert answer.choices[0].message.content == reply.content == "echo hi"
        assert answer.to_dict()["clawstream"] == {
            "turn_id": reply.turn_id,
            "session_id": session,
            "policy_version": VERSION,
        }
        assert (prompt.role, prompt.content, prompt.user_id) == (Role.USER, "hi", "u")
        assert reply.parent_turn_id == prompt.turn_id
        assert (reply.token_ids, reply.behaviour_logprobs) == ((1, 2), (-0.5, -1.0))
        assert (reply.prompt_token_ids, reply.policy_version) == (PROMPT_IDS, VERSION)
        assert (reply.finish_reason, reply.turn_type) == ("stop", TurnType.MAIN)
        assert reply.sampling is not None
        assert reply.sampling.temperature == 0.5

    def test_streamed_carries_them_in_each_chunk(
        self, ai: openai.OpenAI, log: Log, session: str, script: Callable[..., str]
    ) -> None:
        with ai.chat.completions.create(
            model=script(*stream_of("Hel", "lo")),
            messages=HI,
            stream=True,
            extra_headers={"X-Session-Id": session},
        ) as stream:
            chunks: list[Any] = [part.to_dict() for part in stream]
            headers = stream.response.headers
        (reply,) = replies(log.turns(session))
        assert said(chunks) == "Hello"
        assert {json.dumps(c["clawstream"]) for c in chunks} == {
            json.dumps({"turn_id": reply.turn_id, "session_id": session, "policy_version": VERSION})
        }
        assert headers[TURN_ID_HEADER] == reply.turn_id
        assert headers[VERSION_HEADER] == str(VERSION)
        assert (reply.content, reply.token_ids) == ("Hello", (0, 1))
        assert reply.behaviour_logprobs == (-0.25, -0.5)

    def test_is_in_kafka_when_done_arrives(
        self, client: httpx.Client, log: Log, session: str, script: Callable[..., str]
    ) -> None:
        body = {"model": script(*stream_of("a", "b")), "messages": HI, "stream": True}
        headers = {"X-Session-Id": session}
        with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    assert [turn.content for turn in log.turns(session)] == ["hi", "ab"]
                    break
            else:
                raise AssertionError("no [DONE] came")

    @pytest.mark.parametrize("stream", [True, False])
    def test_shows_extensions_to_those_who_asked(
        self, client: httpx.Client, session: str, stream: bool
    ) -> None:
        shown = ask(client, session, stream=stream, return_token_ids=True).text
        hidden = ask(client, session, stream=stream).text
        for key in ("token_ids", "token_logprobs", "prompt_token_ids", "tokenizer_digest"):
            assert f'"{key}"' in shown
            assert f'"{key}"' not in hidden

    def test_to_a_client_that_hangs_up_is_marked(
        self,
        client: httpx.Client,
        log: Log,
        session: str,
        script: Callable[..., str],
        policy: PolicyServer,
    ) -> None:
        policy.hung_up.clear()
        model = script(*stream_of("one", "two", end=False), threading.Event())
        body = {"model": model, "messages": HI, "stream": True}
        headers = {"X-Session-Id": session, "X-Session-Done": "true"}
        with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            next(line for line in answer.iter_lines() if '"two"' in line)
        wait_until(lambda: bool(replies(log.turns(session))), "the marked turn")
        (reply,) = replies(log.turns(session))
        assert (reply.content, reply.token_ids) == ("onetwo", (0, 1))
        assert reply.finish_reason == "client_disconnected"
        assert reply.attributes == {"client_disconnected": "true"}
        assert not reply.session_done
        wait_until(policy.hung_up.is_set, "the policy server is told")

    def test_to_a_client_that_left_before_it_came_whole_is_marked(
        self,
        gateway: GatewayProcess,
        log: Log,
        session: str,
        script: Callable[..., str],
        policy: PolicyServer,
    ) -> None:
        gate = threading.Event()
        model = script(gate, json.dumps(whole("late")).encode(), media_type="application/json")
        address = httpx.URL(gateway.url)
        hasty = HTTPConnection(address.host, address.port, timeout=DEADLINE_S)
        body = json.dumps({"model": model, "messages": HI})
        headers = {"X-Session-Id": session, "Content-Type": "application/json"}
        hasty.request("POST", "/v1/chat/completions", body, headers)
        wait_until(lambda: model in [one["model"] for one in policy.asked], "it is asked")
        hasty.close()
        gate.set()
        wait_until(lambda: bool(replies(log.turns(session))), "the marked turn")
        (reply,) = replies(log.turns(session))
        assert (reply.content, reply.attributes) == ("late", {"client_disconnected": "true"})

    def test_regenerated_has_the_same_parent(
        self, client: httpx.Client, log: Log, session: str
    ) -> None:
        for _ in range(2):
            assert ask(client, session).status_code == 200
        turns = log.turns(session)
        assert [turn.role for turn in turns] == [Role.USER, Role.ASSISTANT, Role.ASSISTANT]
        assert {turn.parent_turn_id for turn in replies(turns)} == {turns[0].turn_id}
        assert len({turn.event_id for turn in turns}) == 3

    def test_calls_tools(
        self, client: httpx.Client, log: Log, session: str, script: Callable[..., str]
    ) -> None:
        calls = [
            {"index": 0, "id": "c1", "type": "function", "function": {"name": "add"}},
            {"index": 0, "function": {"arguments": '{"a"'}},
            {"index": 1, "id": "c2", "function": {"name": "sub", "arguments": "{}"}},
            {"index": 0, "function": {"arguments": ": 1}"}},
        ]
        chunks = [event(chunk({"tool_calls": [call]})) for call in calls]
        usage = event(chunk({}) | {"choices": [], "usage": {"total_tokens": 3}})
        end = event(chunk({}, finish_reason="tool_calls"))
        events = events_of(
            ask(client, session, model=script(*chunks, end, usage, DONE), stream=True)
        )
        assert events[-1] == "[DONE]"
        assert events[-2]["usage"] == {"total_tokens": 3}
        (reply,) = replies(log.turns(session))
        assert [(c.id, c.name, c.arguments) for c in reply.tool_calls or ()] == [
            ("c1", "add", '{"a": 1}'),
            ("c2", "sub", "{}"),
        ]
        tools = [
            {**c, "type": "function"}
            for c in (
                {"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}},
                {"id": "c2", "function": {"name": "sub", "arguments": "{}"}},
            )
        ]
        result = {"role": "tool", "tool_call_id": "c1", "content": "2"}
        ask(client, session, [*HI, {"role": "assistant", "tool_calls": tools}, result])
        tool_turn = log.turns(session)[2]
        assert (tool_turn.role, tool_turn.tool_call_id) == (Role.TOOL, "c1")
        assert tool_turn.parent_turn_id == reply.turn_id

    def test_survives_any_cut_into_packets(
        self, client: httpx.Client, log: Log, session: str, script: Callable[..., str]
    ) -> None:
        text = "né\u2028\u0085 😀 会话"
        data = b": ping\r\n\r\n" + b"".join(stream_of(text)).replace(b"\n\n", b"\r\n\r\n")
        parts = [data[i : i + 3] for i in range(0, len(data), 3)]
        events = events_of(ask(client, session, model=script(*parts), stream=True))
        assert said(events) == text
        assert replies(log.turns(session))[0].content == text

    def test_may_cut_a_character_in_two(
        self, client: httpx.Client, log: Log, session: str, script: Callable[..., str]
    ) -> None:
        halves = [f"data: {json.dumps(chunk({'content': c}))}\n\n".encode() for c in "\ud83d\ude00"]
        alone = f"data: {json.dumps(chunk({'content': chr(0xD83D)}))}\n\n".encode()
        model = script(*halves, alone, *stream_of()[1:])
        events = events_of(ask(client, session, model=model, stream=True))
        assert said(events) == "\ud83d\ude00\ud83d"
        assert replies(log.turns(session))[0].content == "😀\ufffd"

    def test_with_log_probabilities_that_are_no_numbers_goes_through(
        self, client: httpx.Client, log: Log, session: str, script: Callable[..., str]
    ) -> None:
        odd = chunk({"content": "a"}, token_ids=[1], token_logprobs=[float("-inf")])
        model = script(event(odd), *stream_of()[1:])
        assert events_of(ask(client, session, model=model, stream=True))[-1] == "[DONE]"
        (reply,) = replies(log.turns(session))
        assert (reply.token_ids, reply.behaviour_logprobs) == ((1,), None)


BROKEN = {
    "it dies": Script(stream_of("some", end=False), dies=True),
    "it just ends": Script(stream_of("some", end=False)),
    "it sends no JSON": Script([*stream_of("some", end=False), b"data: <html>\n\n", DONE]),
    "it sends no object": Script([*stream_of("some", end=False), event([1]), DONE]),
    "it sends no UTF-8": Script([*stream_of("some", end=False), b"data: \xff\n\n", DONE]),
    "it nests deeply": Script([*stream_of("some", end=False), b"data: " + b"[" * 99_999 + b"\n"]),
    "it says so": Script([*stream_of("some", end=False), event({"error": {"message": "oom"}})]),
}
NOTHING = {
    "a page": Script([b"<html>\n\nhello</html>"], media_type="text/html"),
    "nothing": Script([]),
    "at once an error": Script([event({"error": "oom"}), DONE]),
}


class TestAPolicyServerThatFails:
    @pytest.mark.parametrize("how", BROKEN)
    def test_in_a_stream_leaves_a_marked_turn(
        self, client: httpx.Client, log: Log, policy: PolicyServer, session: str, how: str
    ) -> None:
        policy.scripts[session] = BROKEN[how]
        events = events_of(ask(client, session, model=session, stream=True))
        assert events[-1]["error"]["code"] == 502
        (reply,) = replies(log.turns(session))
        assert (reply.content, reply.finish_reason) == ("some", "broken_off")
        assert reply.attributes == {"broken_off": "true"}

    @pytest.mark.parametrize("what", NOTHING)
    def test_from_the_start_leaves_the_prompt_alone(
        self, client: httpx.Client, log: Log, policy: PolicyServer, session: str, what: str
    ) -> None:
        policy.scripts[session] = NOTHING[what]
        (only,) = events_of(ask(client, session, model=session, stream=True))
        assert only["error"]["code"] == 502
        assert [turn.role for turn in log.turns(session)] == [Role.USER]

    @pytest.mark.parametrize(
        ("body", "status"),
        [
            (b"<html>", 200), (b"[]", 200), (b"{}", 200), (b'{"choices": 5}', 200),
            (b'{"choices": []}', 200), (b"", 200),
            (b"<html>", 503), (b'{"error": {"message": "no"}}', 401), (b"", 307),
        ],
    )  # fmt: skip
    def test_whole_is_a_bad_gateway(
        self,
        client: httpx.Client,
        session: str,
        script: Callable[..., str],
        body: bytes,
        status: int,
    ) -> None:
        answer = ask(client, session, model=script(body, status=status, media_type="text/html"))
        assert answer.status_code == (503 if status == 503 else 502)
        assert answer.json()["error"]["type"] == "api_error"

    def test_by_refusing_is_passed_on(
        self, client: httpx.Client, session: str, script: Callable[..., str]
    ) -> None:
        said_no = {"error": {"message": "slow down", "type": "rate", "code": 429}}
        model = script(
            json.dumps(said_no).encode(),
            status=429,
            media_type="application/json",
            headers={"Retry-After": "3"},
        )
        answer = ask(client, session, model=model)
        assert (answer.status_code, answer.json()) == (429, said_no)
        assert answer.headers["retry-after"] == "3"

    def test_in_odd_shapes_hurts_nobody(
        self, client: httpx.Client, log: Log, session: str, script: Callable[..., str]
    ) -> None:
        odd = {
            "model": 5, "policy_version": "x", "prompt_token_ids": "x", "tokenizer_digest": [],
            "choices": [
                None, 5, {"index": 3, "delta": {"content": "other"}},
                {"index": 0, "delta": "x", "logprobs": 5, "token_ids": ["x"], "finish_reason": 5},
                {"index": 0, "delta": {"content": 5, "tool_calls": [None, {"index": "x"}]}},
            ],
        }  # fmt: skip
        model = script(event(odd), *stream_of("fine")[1:], headers={VERSION_HEADER: "x" * 40})
        events = events_of(ask(client, session, model=model, stream=True))
        assert events[-1] == "[DONE]"
        (reply,) = replies(log.turns(session))
        assert (reply.content, reply.token_ids) == ("fine", None)

    def test_by_being_away_is_a_bad_gateway_and_the_prompt_is_there_once(
        self, tmp_path: Path, bootstrap: str, log: Log, session: str
    ) -> None:
        with (
            running(tmp_path, bootstrap, f"http://127.0.0.1:{free_ports(1)[0]}") as gateway,
            openai_client(gateway.url, retries=2) as ai,
            pytest.raises(openai.InternalServerError) as caught,
        ):
            ai.chat.completions.create(
                model="m", messages=HI, extra_headers={"X-Session-Id": session}
            )
        assert caught.value.status_code == 502
        assert "gateway.upstream_url" in caught.value.message
        assert [turn.role for turn in log.turns(session)] == [Role.USER]


class TestWhatAClientSends:
    @pytest.mark.parametrize(
        "data",
        [
            b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
            b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
            b'{"messages": [{"role": "user", "content": "x"}], "seed": 1' + b"0" * 5_000 + b"}",
            b"[" * 100_000,
            b"\xff",
            b"",
            b"[]",
            b'{"messages": [{"role": "user", "content": "x"}], "n": 2}',
            b'{"messages": [{"role": "user", "content": "x"}], "session_id": "a\\r\\nb: c"}',
            b'{"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}',
        ],
        ids=range(10),
    )
    def test_is_refused_in_openais_words(self, client: httpx.Client, data: bytes) -> None:
        answer = client.post("/v1/chat/completions", content=data)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"

    @pytest.mark.parametrize("header", ["X-Session-Id", "X-Feedback-Message-Id", "X-User-Id"])
    def test_too_long_an_id_is_refused(self, client: httpx.Client, header: str) -> None:
        assert ask(client, None, headers={header: "x" * 513}).status_code == 400

    def test_odd_numbers_are_recorded_as_unknown(
        self, client: httpx.Client, log: Log, session: str
    ) -> None:
        odd = {"temperature": True, "top_k": "x", "max_tokens": 2**40, "seed": 2**70, "top_p": []}
        assert ask(client, session, **odd).status_code == 200
        sampling = replies(log.turns(session))[0].sampling
        assert sampling is not None
        assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (None, None, None)
        assert (sampling.seed, sampling.top_p) == (None, None)

    def test_any_text_comes_through(self, client: httpx.Client, log: Log, session: str) -> None:
        text = "\u0000 \u2028 😀 \ufeff 会话 \u202e"
        answer = ask(client, session, [{"role": "user", "content": text}])
        assert answer.json()["choices"][0]["message"]["content"] == f"echo {text}"
        assert [turn.content for turn in log.turns(session)] == [text, f"echo {text}"]

    def test_a_session_id_is_the_same_in_header_and_body(
        self, client: httpx.Client, log: Log, session: str
    ) -> None:
        named = f"会话-{session}"
        in_body = ask(client, None, session_id=named, stream=True)
        in_header = client.post(
            "/v1/chat/completions",
            json={"model": "echo", "messages": HI},
            headers=[(b"x-session-id", named.encode())],
        )
        for answer in (in_body, in_header):
            assert answer.status_code == 200
            assert answer.headers[SESSION_ID_HEADER] == named
        assert len(replies(log.turns(named))) == 2

    def test_a_body_too_large_is_refused(self, client: httpx.Client, session: str) -> None:
        def parts() -> Iterator[bytes]:
            for _ in range(9):
                yield b" " * (MAX_BODY_BYTES // 8)

        for content in (b" " * (MAX_BODY_BYTES + 1), parts()):
            answer = client.post("/v1/feedback", content=content)
            assert answer.status_code == 413
            assert "gateway.max_body_bytes" in answer.json()["error"]["message"]

    def test_a_client_that_leaves_while_it_sends_is_no_error(
        self, gateway: GatewayProcess, client: httpx.Client
    ) -> None:
        url = httpx.URL(gateway.url)
        head = b"POST /v1/feedback HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
        with socket.create_connection((url.host, url.port or 0)) as sending:
            sending.sendall(head)
        assert client.get("/health").status_code == 200
        assert "Exception in ASGI" not in gateway.log

    def test_a_record_too_large_is_refused_and_holds_up_nothing(
        self, client: httpx.Client, log: Log, session: str
    ) -> None:
        large = "x" * (4 * 1024 * 1024)
        assert ask(client, session, [{"role": "user", "content": large}]).status_code == 413
        event_ = {"session_id": session, "kind": "directive", "text": large}
        assert client.post("/v1/feedback", json=event_).status_code == 413
        assert client.get("/health").json() == {"status": "ok", "spooled_events": 0}
        almost = "x" * (4 * 1024 * 1024 - 4_096)
        event_ = {"session_id": session, "kind": "directive", "text": almost}
        assert client.post("/v1/feedback", json=event_).status_code == 202
        assert [found.text == almost for found in log.feedback(session)] == [True]

    def test_a_reply_id_used_twice_names_one_reply(
        self, client: httpx.Client, log: Log, session: str
    ) -> None:
        headers = {"X-Feedback-Message-Id": "m1"}
        stamps = [
            ask(client, session, headers=headers).json()["clawstream"]["turn_id"] for _ in range(2)
        ]
        found = replies(log.turns(session))
        assert [turn.turn_id for turn in found] == stamps
        assert stamps[0] == "m1" != stamps[1]
        assert "m1" not in {turn.event_id for turn in found}

    def test_an_empty_message_id_is_a_side_call(
        self, client: httpx.Client, log: Log, session: str
    ) -> None:
        ask(client, session, headers={"X-Feedback-Message-Id": ""})
        assert {turn.turn_type for turn in log.turns(session)} == {TurnType.SIDE}

    def test_an_unknown_path_is_refused_in_openais_words(self, client: httpx.Client) -> None:
        answer = client.get("/v1/nothing")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404)

    def test_models_are_the_policy_servers(self, ai: openai.OpenAI) -> None:
        assert [model.id for model in ai.models.list()] == ["default"]


class TestWithoutASessionId:
    def test_a_conversation_goes_on(self, client: httpx.Client, log: Log) -> None:
        first_words = uuid.uuid4().hex
        messages = [{"role": "user", "content": first_words}]
        first = ask(client, None, messages).json()
        messages += [first["choices"][0]["message"], {"role": "user", "content": "more"}]
        second = ask(client, None, messages).json()
        session = first["clawstream"]["session_id"]
        assert second["clawstream"]["session_id"] == session
        assert [turn.content for turn in log.turns(session)] == [
            first_words, f"echo {first_words}", "more", "echo more",
        ]  # fmt: skip

    @pytest.mark.parametrize(
        "headers", [{"X-User-Id": "other"}, {"Authorization": "Bearer other"}], ids=str
    )
    def test_a_stranger_does_not_go_on_with_it(
        self, client: httpx.Client, headers: dict[str, str]
    ) -> None:
        messages = [{"role": "user", "content": uuid.uuid4().hex}]
        first = ask(client, None, messages).json()
        messages += [first["choices"][0]["message"], {"role": "user", "content": "mine"}]
        stranger = ask(client, None, messages, headers=headers).json()
        assert stranger["clawstream"]["session_id"] != first["clawstream"]["session_id"]

    def test_a_retry_stays_in_its_session(self, client: httpx.Client, log: Log) -> None:
        messages = [{"role": "user", "content": uuid.uuid4().hex}]
        headers = {"X-Request-Id": uuid.uuid4().hex}
        for _ in range(2):
            ask(client, None, messages, headers=headers)
        (session,) = log.sessions_with(messages[0]["content"])
        turns = log.turns(session)
        assert [turn.role for turn in turns] == [Role.USER, Role.ASSISTANT, Role.ASSISTANT]
        assert {turn.request_id for turn in turns} == {headers["X-Request-Id"]}


def test_forty_streams_at_once(
    gateway: GatewayProcess, log: Log, session: str, script: Callable[..., str]
) -> None:
    gate = threading.Event()
    sessions = [f"{session}-{number}" for number in range(40)]
    words = [f"w{n} " for n in range(20)]
    model = script(*stream_of(*words[:10], end=False), gate, *stream_of(*words[10:])[1:])

    async def one(client: httpx.AsyncClient, session_id: str) -> str:
        body = {"model": model, "messages": HI, "stream": True}
        headers = {"X-Session-Id": session_id}
        answer = await client.post("/v1/chat/completions", json=body, headers=headers)
        return said(events_of(answer))

    async def all_of_them() -> list[str]:
        async with httpx.AsyncClient(
            base_url=gateway.url, timeout=DEADLINE_S, limits=httpx.Limits(max_connections=None)
        ) as client:
            tasks = [asyncio.create_task(one(client, session_id)) for session_id in sessions]
            while not await prompts_are_there():
                await asyncio.sleep(0.05)
            gate.set()
            return await asyncio.gather(*tasks)

    async def prompts_are_there() -> bool:
        return all(await asyncio.to_thread(log.turns_of, sessions))

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(asyncio.run, all_of_them()).result(DEADLINE_S) == ["".join(words)] * 40
    for prompt, reply in log.turns_of(sessions):
        assert (prompt.content, reply.content) == ("hi", "".join(words))
        assert reply.parent_turn_id == prompt.turn_id


def test_two_requests_at_once_share_their_prompt(
    client: httpx.Client, log: Log, session: str, script: Callable[..., str]
) -> None:
    gate = threading.Event()
    model = script(gate, *stream_of("a"))
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(ask, client, session, model=model, stream=True) for _ in range(2)]
        gate.set()
        assert [said(events_of(one.result(DEADLINE_S))) for one in both] == ["a", "a"]
    turns = log.turns(session)
    assert [turn.role for turn in turns] == [Role.USER, Role.ASSISTANT, Role.ASSISTANT]


class TestEvents:
    def test_good_ones_are_accepted(self, client: httpx.Client, log: Log, session: str) -> None:
        turn = {"session_id": session, "turn_id": "t1", "role": "assistant", "content": "x"}
        assert client.post("/v1/turns", json=turn).status_code == 202
        thumbs = [
            {"session_id": session, "kind": "thumb", "value": -1, "turn_id": "t1"},
            {"session_id": session, "kind": "copy", "event_id": "e2", "event_time": 10**12},
        ]
        answer = client.post("/v1/feedback", json=thumbs)
        assert answer.status_code == 202
        assert [found.turn_id for found in log.turns(session)] == ["t1"]
        found = log.feedback(session)
        assert [one.event_id for one in found] == answer.json()["event_ids"]
        assert [(one.kind, one.source) for one in found] == [
            (FeedbackKind.THUMB, "gateway"),
            (FeedbackKind.COPY, "gateway"),
        ]
        assert found[1].event_time == 10**12

    @pytest.mark.parametrize(
        ("change", "status"),
        [
            ({"session_id": None}, 422), ({"session_id": ""}, 422), ({"session_id": "a\nb"}, 422),
            ({"session_id": " a"}, 422), ({"session_id": "x" * 513}, 422),
            ({"event_time": "2026-01-01"}, 422), ({"event_time": 1.5}, 422),
            ({"event_time": -1}, 422), ({"event_time": 1_700_000_000}, 422),
            ({"event_time": 4_070_908_800_000}, 422), ({"event_time": 2**70}, 422),
            ({"value": "up"}, 422), ({"value": True}, 422),
            ({"tags": "x"}, 422), ({"attributes": {"a": 1}}, 422), ({"kind": 5}, 422),
            ({"more": 1}, 422),
        ],
        ids=str,
    )  # fmt: skip
    def test_bad_ones_are_refused_all_together(
        self, client: httpx.Client, log: Log, session: str, change: dict[str, Any], status: int
    ) -> None:
        good = {"session_id": session, "kind": "copy"}
        bad = {k: v for k, v in {**good, **change}.items() if v is not None}
        answer = client.post("/v1/feedback", json=[good, bad])
        assert answer.status_code == status
        assert "[1]" in answer.json()["error"]["message"]
        assert log.feedback(session) == []

    def test_what_is_no_number_is_no_json(self, client: httpx.Client, session: str) -> None:
        body = f'{{"session_id": "{session}", "kind": "thumb", "value": NaN}}'
        assert client.post("/v1/feedback", content=body).status_code == 400


def test_keys_tell_sources_apart(
    tmp_path: Path, bootstrap: str, policy_url: str, log: Log, session: str
) -> None:
    keys = {"web": "secret-w", "app": "secret-a"}
    with (
        running(
            tmp_path, bootstrap, policy_url, api_keys=keys, deciding_sources=["web"]
        ) as gateway,
        httpx.Client(base_url=gateway.url, timeout=DEADLINE_S) as client,
        openai_client(gateway.url, "secret-a") as ai,
    ):
        for headers in ({}, {"Authorization": "Bearer secret"}, {"Authorization": "secret-w"}):
            assert ask(client, session, headers=headers).status_code == 401
            assert client.post("/v1/feedback", json={}, headers=headers).status_code == 401
            assert client.get("/v1/models", headers=headers).status_code == 401
        ai.chat.completions.create(
            model="echo",
            messages=HI,
            extra_headers={"X-Session-Id": session, "X-Source": "web"},
        )
        forged = {"session_id": session, "kind": "copy", "source": "web"}
        own = {"Authorization": "bearer secret-a"}
        assert client.post("/v1/feedback", json=forged, headers=own).status_code == 422
        mine = forged | {"source": "app"}
        assert client.post("/v1/feedback", json=mine, headers=own).status_code == 202
        for kind in ("review", "judgement"):
            decided = {"session_id": session, "kind": kind, "value": 1}
            refused = client.post("/v1/feedback", json=[mine, decided], headers=own)
            assert refused.status_code == 403
            assert "gateway.deciding_sources" in refused.json()["error"]["message"]
        trusted = {"Authorization": "Bearer secret-w"}
        review = {"session_id": session, "kind": "review", "value": 1}
        assert client.post("/v1/feedback", json=review, headers=trusted).status_code == 202
    assert {turn.source for turn in log.turns(session)} == {"app"}
    assert [one.source for one in log.feedback(session)] == ["app", "web"]


def test_kafka_away_and_a_kill_lose_nothing(
    tmp_path: Path, bootstrap: str, policy_url: str, log: Log, session: str
) -> None:
    dead = f"127.0.0.1:{free_ports(1)[0]}"
    contents: list[str] = []
    with running(tmp_path, dead, policy_url) as gateway:
        with httpx.Client(base_url=gateway.url, timeout=DEADLINE_S) as client:
            contents += converse(client, session, contents)
            thumb = {"session_id": session, "kind": "thumb", "value": 1}
            assert client.post("/v1/feedback", json=thumb).status_code == 202
        gateway.kill()
    with running(tmp_path, bootstrap, policy_url) as gateway:
        with httpx.Client(base_url=gateway.url, timeout=DEADLINE_S) as client:
            contents += converse(client, session, contents)
            wait_until(
                lambda: client.get("/health").json()["spooled_events"] == 0, "the spool is sent"
            )
        assert gateway.terminate() == 0
    assert [turn.content for turn in log.turns(session)] == contents
    assert len(log.feedback(session)) == 1


def converse(client: httpx.Client, session: str, before: list[str]) -> list[str]:
    """Two more questions; returns what was said."""
    all_said = list(before)
    for number in range(2):
        all_said.append(f"question {len(before)} {number}")
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(all_said)]
        all_said.append(said(events_of(ask(client, session, messages, stream=True))))
    return all_said[len(before) :]


def test_a_full_disk_accepts_nothing_it_cannot_keep(
    tmp_path: Path, policy_url: str, session: str
) -> None:
    accepted: list[str] = []
    dead = f"127.0.0.1:{free_ports(1)[0]}"
    with running(tmp_path, dead, policy_url, file_bytes=FULL_DISK_BYTES) as gateway:
        with httpx.Client(base_url=gateway.url, timeout=DEADLINE_S) as client:
            for number in range(40):
                text = {"text": "x" * 20_000, "event_id": str(number)}
                event_ = {"session_id": session, "kind": "directive", **text}
                answer = client.post("/v1/feedback", json=event_)
                if answer.status_code != 202:
                    break
                accepted.append(str(number))
            assert answer.status_code == 503
            assert "gateway.spool_dir" in answer.json()["error"]["message"]
            (only,) = events_of(ask(client, session, stream=True))[-1:]
            assert "error" in only
            assert client.get("/health").status_code == 200
        gateway.kill()
    spool = Spool(tmp_path / "data" / "spool" / "gateway.db")
    kept = [envelope for envelope in spool.first(99)[1] if envelope.topic == FEEDBACK]
    spool.close()
    codec = build_codec()
    assert [codec.decode(e.value, FeedbackEvent).event_id for e in kept] == accepted != []


def test_a_second_gateway_on_one_spool_does_not_start(
    gateway: GatewayProcess, bootstrap: str, policy_url: str
) -> None:
    with pytest.raises(AssertionError, match="another gateway has it"):
        GatewayProcess(gateway.folder, bootstrap, policy_url)


def test_sigterm_lets_a_stream_end(
    tmp_path: Path,
    bootstrap: str,
    policy_url: str,
    log: Log,
    session: str,
    script: Callable[..., str],
) -> None:
    gate = threading.Event()
    model = script(*stream_of("one", end=False), gate, *stream_of("two")[1:])
    body = {"model": model, "messages": HI, "stream": True}
    with (
        running(tmp_path, bootstrap, policy_url) as gateway,
        httpx.Client(base_url=gateway.url, timeout=DEADLINE_S) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        headers = {"X-Session-Id": session}
        with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            lines = answer.iter_lines()
            next(line for line in lines if '"one"' in line)
            stopping = pool.submit(gateway.terminate)
            wait_until(lambda: "Shutting down" in gateway.log, "it stops")
            gate.set()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert stopping.result(DEADLINE_S) == 0
        assert "Traceback" not in gateway.log
    (reply,) = replies(log.turns(session))
    assert (reply.content, reply.finish_reason, reply.attributes) == ("onetwo", "stop", {})
