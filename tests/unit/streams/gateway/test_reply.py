from __future__ import annotations

from typing import Any

import pytest

from streams.contracts import Sampling
from streams.gateway.reply import ReplyBuilder, sampling_of, without_extensions


def chunk(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    choice_keys = ("token_ids", "token_logprobs", "finish_reason", "logprobs")
    choice = {k: more.pop(k) for k in choice_keys if k in more}
    return {"model": "default-v3", "choices": [{"index": 0, "delta": delta, **choice}], **more}


def test_a_stream_becomes_one_reply() -> None:
    reply = ReplyBuilder()
    reply.feed(chunk({"role": "assistant"}, prompt_token_ids=[9, 8], policy_version=7))
    reply.feed(chunk({"content": "Hel"}, token_ids=[1], token_logprobs=[-0.5]))
    reply.feed(chunk({"content": "lo"}, token_ids=[2, 3], token_logprobs=[-0.25, -1.0]))
    reply.feed(chunk({}, finish_reason="stop"))
    reply.feed({"choices": [], "usage": {"total_tokens": 5}})
    assert reply.content == "Hello"
    assert reply.token_ids == (1, 2, 3)
    assert reply.behaviour_logprobs == (-0.5, -0.25, -1.0)
    assert reply.prompt_token_ids == (9, 8)
    assert reply.finish_reason == "stop"
    assert reply.policy_version == 7


def test_a_plain_answer_reads_the_same() -> None:
    reply = ReplyBuilder()
    message = {"role": "assistant", "content": "Hello"}
    choice = {"index": 0, "message": message, "finish_reason": "length", "token_ids": [4]}
    reply.feed({"choices": [choice], "policy_version": 0})
    assert (reply.content, reply.finish_reason, reply.policy_version) == ("Hello", "length", 0)


def test_log_probabilities_in_the_standard_place_count_too() -> None:
    reply = ReplyBuilder()
    reply.feed(chunk({"content": "a"}, token_ids=[1], logprobs={"content": [{"logprob": -2.0}]}))
    assert reply.behaviour_logprobs == (-2.0,)


def test_log_probabilities_that_do_not_match_are_left_out() -> None:
    reply = ReplyBuilder()
    reply.feed(chunk({"content": "a"}, token_ids=[1, 2], token_logprobs=[-2.0]))
    assert reply.behaviour_logprobs is None


def test_an_adapter_name_tells_the_version() -> None:
    reply = ReplyBuilder()
    reply.feed(chunk({"content": "a"}))
    assert reply.policy_version == 3


def test_tool_calls_are_put_together() -> None:
    reply = ReplyBuilder()
    start = {"index": 0, "id": "c1", "function": {"name": "add", "arguments": '{"a"'}}
    reply.feed(chunk({"tool_calls": [start]}))
    reply.feed(chunk({"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}))
    assert reply.tool_calls is not None
    assert reply.tool_calls[0].name == "add"
    assert reply.tool_calls[0].arguments == '{"a": 1}'
    assert reply.message.tool_calls == reply.tool_calls


def test_extensions_are_taken_out_for_the_client() -> None:
    body = chunk({"content": "a"}, token_ids=[1], token_logprobs=[-1.0], prompt_token_ids=[2])
    shown = without_extensions(body)
    assert shown == chunk({"content": "a"})


def test_sampling_is_what_the_client_asked_for() -> None:
    request = {"temperature": 1, "top_p": 0.9, "max_tokens": 5, "seed": 3}
    assert sampling_of(request) == Sampling(temperature=1.0, top_p=0.9, max_tokens=5, seed=3)
    assert sampling_of({}) == Sampling()


def test_odd_shapes_count_as_not_sent() -> None:
    reply = ReplyBuilder()
    shapes: list[Any] = [None, 5, [None, 5, []], [{"delta": 5, "message": 5, "logprobs": 5}]]
    for choices in shapes:
        reply.feed({"choices": choices, "model": 5, "policy_version": True})
    odd: dict[str, Any] = {"content": 5, "tool_calls": [5, {"index": "x", "function": 5}]}
    reply.feed(chunk(odd, token_ids=[1, "x"], token_logprobs=["x"], finish_reason=5))
    assert (reply.content, reply.finish_reason, reply.token_ids) == ("", None, None)
    assert (reply.policy_version, reply.behaviour_logprobs) == (3, None)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), None, True, 10**400])
def test_a_log_probability_that_is_no_number_spoils_them_all(bad: Any) -> None:
    reply = ReplyBuilder()
    reply.feed(chunk({"content": "a"}, token_ids=[1, 2], token_logprobs=[-1.0, bad]))
    assert reply.token_ids == (1, 2)
    assert reply.behaviour_logprobs is None


def test_halves_of_a_character_are_joined_and_lone_ones_replaced() -> None:
    reply = ReplyBuilder()
    for part in ("\ud83d", "\ude00", "\ud83d"):
        reply.feed(chunk({"content": part}))
    assert reply.content == "😀\ufffd"


def test_tool_calls_without_an_index_are_whole_or_go_on() -> None:
    reply = ReplyBuilder()
    for call_id, more in (("a", "1"), (None, "2"), ("b", "3")):
        call = {"id": call_id, "function": {"name": "f", "arguments": more}}
        reply.feed(chunk({"tool_calls": [call]}))
    assert [(c.id, c.arguments) for c in reply.tool_calls or ()] == [("a", "12"), ("b", "3")]


@pytest.mark.parametrize("bad", ["x", True, 2**70, float("inf"), []])
def test_odd_sampling_is_unknown(bad: Any) -> None:
    keys = ("temperature", "top_p", "top_k", "max_tokens", "seed")
    sampling = sampling_of(dict.fromkeys(keys, bad))
    assert sampling.top_k is sampling.max_tokens is sampling.seed is None
    assert sampling.temperature in (None, float(2**70))
