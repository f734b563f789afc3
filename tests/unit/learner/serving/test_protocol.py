from __future__ import annotations

import json
from typing import Any

import pytest

from learner.serving.engine import SampledToken
from learner.serving.protocol import ReplyFrame, parse_request
from streams.errors import RequestRefusedError

MINIMAL: dict[str, Any] = {"model": "live", "messages": [{"role": "user", "content": "hi"}]}


def body(**fields: Any) -> bytes:
    return json.dumps(MINIMAL | fields).encode()


def refusal(data: bytes) -> RequestRefusedError:
    with pytest.raises(RequestRefusedError) as caught:
        parse_request(data)
    return caught.value


def test_a_minimal_request_leaves_the_rest_to_the_server() -> None:
    request = parse_request(body())
    assert request.model == "live"
    assert [message.for_template() for message in request.messages] == [
        {"role": "user", "content": "hi"}
    ]
    assert (request.temperature, request.token_limit, request.stop) == (None, None, None)


def test_content_parts_are_joined_and_developers_speak_as_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parse_request(body(messages=[{"role": "developer", "content": parts}]))
    assert request.messages[0].for_template() == {"role": "system", "content": "ab"}


def test_tool_calls_of_earlier_turns_reach_the_template() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    request = parse_request(body(messages=messages))
    assert [message.for_template() for message in request.messages] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize("stop", ["END", ["END"]])
def test_stop_is_one_text_or_several(stop: object) -> None:
    assert parse_request(body(stop=stop)).stop == ["END"]


def test_the_newer_name_of_the_token_limit_wins() -> None:
    assert parse_request(body(max_tokens=5, max_completion_tokens=7)).token_limit == 7
    assert parse_request(body(max_tokens=5)).token_limit == 5


def test_fields_that_ask_for_nothing_and_fields_of_others_are_let_through() -> None:
    request = parse_request(
        body(
            n=1,
            presence_penalty=0.0,
            tools=[],
            logit_bias={},
            response_format={"type": "text"},
            top_k=-1,
            user="u1",
            metadata={"a": "b"},
            session_id="s",
            functions=None,
        )
    )
    assert request.model == "live"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("logit_bias", {"5": 1}),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("top_k", 5),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("audio", {"voice": "x"}),
    ],
)
def test_what_is_not_done_is_refused_by_name(field: str, value: object) -> None:
    error = refusal(body(**{field: value}))
    assert (error.param, error.code) == (field, "unsupported_parameter")
    assert field in str(error)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "boss"}]}, "messages.1.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content",
        ),
        ({"stop": [""]}, "stop.0"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"seed": "x"}, "seed"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"model": None}, "model"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(fields: dict[str, Any], param: str) -> None:
    error = refusal(body(**fields))
    assert error.param is not None
    assert error.param.startswith(param)


def test_null_asks_for_what_absence_asks_for() -> None:
    optional = {"stop", "temperature", "max_tokens", "seed", "stream", "logprobs", "n", "tools"}
    assert parse_request(body(**dict.fromkeys(optional))) == parse_request(body())


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_a_missing_field_is_named(missing: str) -> None:
    data = json.dumps({key: value for key, value in MINIMAL.items() if key != missing}).encode()
    error = refusal(data)
    assert (error.param, error.code) == (missing, "missing_required_parameter")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff",
        b'{"temperature": NaN}',
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"seed": ' + b"9" * 5_000 + b"}",
    ],
    ids=range(10),
)
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    assert refusal(data).code == "invalid_json"


def frame(**options: Any) -> ReplyFrame:
    return ReplyFrame(
        reply_id="chatcmpl-1",
        created=5,
        model="default-v3",
        policy_version=3,
        tokenizer_digest="t",
        template_digest="c",
        prompt_token_ids=(7, 8),
        token_text=lambda token_id: {1: "a", 2: "<end>", 3: "\N{REPLACEMENT CHARACTER}"}[token_id],
        **options,
    )


TOKENS = (SampledToken(1, -0.5, top=((1, -0.5), (3, -1.0))), SampledToken(2, -0.25, is_end=True))


def test_the_end_token_counts_and_is_reported_by_id_only() -> None:
    answer = frame(logprobs=True, return_token_ids=True).body("a", TOKENS, "stop")
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "a"
    assert choice["token_ids"] == [1, 2]
    assert choice["token_logprobs"] == [-0.5, -0.25]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["a"]
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    assert answer["prompt_token_ids"] == [7, 8]


def test_half_a_character_has_no_bytes() -> None:
    entry = frame(logprobs=True).body("a", TOKENS, "stop")["choices"][0]["logprobs"]["content"][0]
    assert [(top["bytes"], top["logprob"]) for top in entry["top_logprobs"]] == [
        ([97], -0.5),
        (None, -1.0),
    ]


def test_a_plain_client_gets_no_token_ids_but_always_the_version() -> None:
    answer = frame().body("a", TOKENS, "stop")
    assert "prompt_token_ids" not in answer
    assert "token_ids" not in answer["choices"][0]
    assert answer["choices"][0]["logprobs"] is None
    assert (answer["policy_version"], answer["tokenizer_digest"]) == (3, "t")


def test_the_prompt_comes_with_the_first_chunk_only() -> None:
    shown = frame(return_token_ids=True)
    assert shown.opening_chunk()["prompt_token_ids"] == [7, 8]
    assert "prompt_token_ids" not in shown.chunk("a", TOKENS[:1], None)
    last = shown.usage_chunk(2)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2
