"""Puts a reply together from the chunks of an OpenAI-compatible server. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from streams.contracts import Role, Sampling, ToolCall
from streams.gateway.conversation import ChatMessage

EXTENSION_KEYS = (
    "token_ids",
    "token_logprobs",
    "prompt_token_ids",
    "tokenizer_digest",
    "template_digest",
)
"""What a policy server adds for us; taken out again unless the client asked for it."""

_VERSION_SUFFIX = re.compile(r"-v(\d+)$")


@dataclass(slots=True)
class ReplyBuilder:
    """A reply as far as it has come.

    Feed it every chunk of a stream, or the one body of a plain answer; both are
    ``choices[0]`` with a ``delta`` or a ``message``.
    """

    content: str = ""
    finish_reason: str | None = None
    policy_version: int | None = None
    model: str | None = None
    tokenizer_digest: str | None = None
    template_digest: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    _calls: dict[int, dict[str, str]] = field(default_factory=dict)

    def feed(self, body: dict[str, Any]) -> None:
        """Take in one chunk or one whole answer."""
        self.model = body.get("model") or self.model
        self.tokenizer_digest = body.get("tokenizer_digest") or self.tokenizer_digest
        self.template_digest = body.get("template_digest") or self.template_digest
        self._version(body)
        self._prompt(body)
        for choice in body.get("choices") or ():
            if choice.get("index", 0) == 0:
                self._choice(choice)

    @property
    def message(self) -> ChatMessage:
        """The reply as the client will send it back in its next request."""
        return ChatMessage(Role.ASSISTANT, self.content, self.tool_calls)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...] | None:
        """Tools the reply asks for, in order."""
        calls = (self._calls[index] for index in sorted(self._calls))
        return tuple(ToolCall(**call) for call in calls) or None

    @property
    def behaviour_logprobs(self) -> tuple[float, ...] | None:
        """One per token id, or None if the server did not give one for each."""
        if not self.token_ids or len(self.logprobs) != len(self.token_ids):
            return None
        return tuple(self.logprobs)

    def _version(self, body: dict[str, Any]) -> None:
        if isinstance(body.get("policy_version"), int):
            self.policy_version = body["policy_version"]
        elif self.policy_version is None and (match := _VERSION_SUFFIX.search(self.model or "")):
            self.policy_version = int(match.group(1))

    def _prompt(self, body: dict[str, Any]) -> None:
        choices = body.get("choices") or [{}]
        ids = body.get("prompt_token_ids") or choices[0].get("prompt_token_ids")
        if ids:
            self.prompt_token_ids = tuple(ids)

    def _choice(self, choice: dict[str, Any]) -> None:
        said = choice.get("delta") or choice.get("message") or {}
        self.content += said.get("content") or ""
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        for call in said.get("tool_calls") or ():
            self._tool_call(call)
        self.token_ids.extend(choice.get("token_ids") or ())
        given = choice.get("token_logprobs")
        if given is None:
            given = [t["logprob"] for t in (choice.get("logprobs") or {}).get("content") or ()]
        self.logprobs.extend(given)

    def _tool_call(self, call: dict[str, Any]) -> None:
        index = call.get("index", len(self._calls))
        known = self._calls.setdefault(index, {"id": "", "name": "", "arguments": ""})
        function = call.get("function") or {}
        known["id"] = call.get("id") or known["id"]
        known["name"] = function.get("name") or known["name"]
        known["arguments"] += function.get("arguments") or ""


def sampling_of(request: dict[str, Any]) -> Sampling:
    """How the client asked for tokens to be drawn; what it left out stays null."""
    return Sampling(
        temperature=_number(request.get("temperature")),
        top_p=_number(request.get("top_p")),
        top_k=request.get("top_k"),
        max_tokens=request.get("max_completion_tokens") or request.get("max_tokens"),
        seed=request.get("seed"),
    )


def without_extensions(body: dict[str, Any]) -> dict[str, Any]:
    """``body`` as the client expects it, without what only we asked for."""
    kept = {key: value for key, value in body.items() if key not in EXTENSION_KEYS}
    if "choices" in kept:
        kept["choices"] = [
            {key: value for key, value in choice.items() if key not in EXTENSION_KEYS}
            for choice in kept["choices"] or ()
        ]
    return kept


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
