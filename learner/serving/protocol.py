"""The wire form: what a chat completion request may hold, and what answers look like.

Fields follow OpenAI's chat completions. A field that would change the answer and is not
implemented is refused by name; a field that only describes the request is ignored.

Extensions, for clients that train on what they get:

- request ``return_token_ids: true``: each choice or chunk carries ``token_ids`` and
  ``token_logprobs`` (one a token; the end token counts, though its text does not show), and
  ``prompt_token_ids`` comes once.
- always: ``policy_version``, ``tokenizer_digest`` and ``template_digest`` beside ``choices``.

The log-probabilities are those of ``sampling.py``: at the request's temperature, before
``top_p``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from learner.serving.engine import FinishReason, SampledToken
from streams.errors import RequestRefusedError

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16


class _Loose(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class TextPart(_Loose):
    """A part of a message's content; text is the only kind that is understood."""

    type: Literal["text"]
    text: str


class ToolFunction(_Loose):
    """What a tool call calls."""

    name: str
    arguments: str = ""


class ToolCallEntry(_Loose):
    """A tool call of an earlier assistant message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: ToolFunction


class RequestMessage(_Loose):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCallEntry] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self._text(),
        }
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    def _text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class StreamOptions(_Loose):
    """What a stream carries beside the reply."""

    include_usage: bool = False


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class ChatRequest(_Loose):
    """The body of ``POST /v1/chat/completions``."""

    model: str
    messages: Annotated[list[RequestMessage], Field(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)] | None,
        BeforeValidator(_as_list),
    ] = None
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    return_token_ids: bool | None = None

    @property
    def token_limit(self) -> int | None:
        """The longest reply the client wants, if it says so."""
        return self.max_completion_tokens or self.max_tokens


_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}
"""What is not done here, with the values that ask for nothing; null always asks for nothing."""


def parse_request(body: bytes) -> ChatRequest:
    """Read a request.

    Raises:
        RequestRefusedError: It is no JSON object, a field has a wrong value, or it asks for
            something that is not done here.
    """
    fields = parse_object(body)
    for name, neutral in _NEUTRAL.items():
        if fields.get(name) is not None and fields[name] not in neutral:
            raise RequestRefusedError(
                f"{name} is not supported by this server; leave it out",
                param=name,
                code="unsupported_parameter",
            )
    try:
        request = ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error) from None
    if request.top_logprobs and not request.logprobs:
        raise RequestRefusedError(
            "top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value"
        )
    return request


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        RequestRefusedError: It is none.
    """
    try:
        # Stricter than the standard library: no NaN, and no half of a surrogate pair, which
        # no tokenizer takes.
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RequestRefusedError(
            f"the body is no JSON: {error}", param=None, code="invalid_json"
        ) from None
    if not isinstance(fields, dict):
        raise RequestRefusedError("the body must be a JSON object", param=None, code="invalid_json")
    return fields


def _refusal(error: ValidationError) -> RequestRefusedError:
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    # Branches of a union and wrapped validators show up in the path; the client knows names
    # and indices only.
    path = [str(part) for part in first["loc"] if isinstance(part, int) or part.isidentifier()]
    param = ".".join(part for part in path if part not in ("str", "TextPart")) or None
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return RequestRefusedError(f"{param}: {first['msg']}", param=param, code=code)


def error_body(message: str, *, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFrame:
    """What every chunk or body of one reply has in common, and how tokens are shown."""

    reply_id: str
    created: int
    model: str
    policy_version: int
    tokenizer_digest: str
    template_digest: str
    prompt_token_ids: tuple[int, ...]
    token_text: Callable[[int], str]
    logprobs: bool = False
    return_token_ids: bool = False

    def opening_chunk(self) -> dict[str, Any]:
        """The first chunk: the role, and the prompt's ids if they were asked for."""
        chunk = self._chunk({"role": "assistant", "content": ""}, (), None)
        return chunk | self._prompt_ids()

    def chunk(
        self, text: str, tokens: Sequence[SampledToken], finish_reason: FinishReason | None
    ) -> dict[str, Any]:
        """A piece of the reply."""
        return self._chunk({"content": text} if text else {}, tokens, finish_reason)

    def usage_chunk(self, completion_tokens: int) -> dict[str, Any]:
        """The chunk after the last, when the client asked for usage."""
        return self._envelope("chat.completion.chunk", []) | {
            "usage": self.usage(completion_tokens)
        }

    def body(
        self, text: str, tokens: Sequence[SampledToken], finish_reason: FinishReason
    ) -> dict[str, Any]:
        """The whole reply."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(tokens),
            "finish_reason": finish_reason,
        } | self._token_ids(tokens)
        envelope = self._envelope("chat.completion", [choice])
        return envelope | {"usage": self.usage(len(tokens))} | self._prompt_ids()

    def usage(self, completion_tokens: int) -> dict[str, int]:
        """Tokens in and out; the end token counts."""
        prompt_tokens = len(self.prompt_token_ids)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    def _chunk(
        self,
        delta: dict[str, Any],
        tokens: Sequence[SampledToken],
        finish_reason: FinishReason | None,
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": self._logprobs(tokens) if tokens else None,
            "finish_reason": finish_reason,
        } | self._token_ids(tokens)
        return self._envelope("chat.completion.chunk", [choice])

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.reply_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
            "policy_version": self.policy_version,
            "tokenizer_digest": self.tokenizer_digest,
            "template_digest": self.template_digest,
        }

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.prompt_token_ids)} if self.return_token_ids else {}

    def _token_ids(self, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        if not self.return_token_ids:
            return {}
        return {
            "token_ids": [token.token_id for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
        }

    def _logprobs(self, tokens: Sequence[SampledToken]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        shown = [token for token in tokens if not token.is_end]
        return {"content": [self._logprob_entry(token) for token in shown], "refusal": None}

    def _logprob_entry(self, token: SampledToken) -> dict[str, Any]:
        return self._candidate(token.token_id, token.logprob) | {
            "top_logprobs": [self._candidate(*candidate) for candidate in token.top]
        }

    def _candidate(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.token_text(token_id)
        # Half a character has no text of its own, and its bytes are not known here.
        whole = "\N{REPLACEMENT CHARACTER}" not in text
        return {
            "token": text,
            "logprob": logprob,
            "bytes": list(text.encode()) if whole else None,
        }


__all__ = [
    "ChatRequest",
    "ReplyFrame",
    "RequestMessage",
    "error_body",
    "parse_object",
    "parse_request",
]
