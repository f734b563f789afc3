"""Puts a reply together from the chunks of an OpenAI-compatible server. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streams.contracts import Role, Sampling, ToolCall
from streams.foreign import finite_number, writable
from streams.gateway.conversation import ChatMessage

EXTENSION_KEYS = (
    "token_ids",
    "token_logprobs",
    "prompt_token_ids",
    "tokenizer_digest",
    "template_digest",
)
"""What a policy server adds for us; taken out again unless the client asked for it."""

_INT32 = 2**31
_VERSION_SUFFIX = re.compile(r"-v(\d{1,18})$")


@dataclass(slots=True)
class ReplyBuilder:
    """A reply as far as it has come.

    Feed it every chunk of a stream, or the one body of a plain answer; both are
    ``choices[0]`` with a ``delta`` or a ``message``. What a server sends in another shape
    than agreed counts as not sent: nothing a server sends makes a reply unrecordable.
    """

    policy_version: int | None = None
    model: str | None = None
    tokenizer_digest: str | None = None
    template_digest: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    _said: list[str] = field(default_factory=list)
    _finish_reason: str = ""
    _token_ids: list[Any] = field(default_factory=list)
    _logprobs: list[Any] = field(default_factory=list)
    _calls: dict[int, dict[str, str]] = field(default_factory=dict)

    def feed(self, body: dict[str, Any]) -> None:
        """Take in one chunk or one whole answer."""
        self.model = _clean(body.get("model")) or self.model
        self.tokenizer_digest = _clean(body.get("tokenizer_digest")) or self.tokenizer_digest
        self.template_digest = _clean(body.get("template_digest")) or self.template_digest
        self._version(body)
        choices = [choice for choice in _list(body.get("choices")) if isinstance(choice, dict)]
        self._prompt(body, choices)
        for choice in choices:
            if choice.get("index", 0) == 0:
                self._choice(choice)

    @property
    def content(self) -> str:
        """What was said, as valid Unicode."""
        return _joined(self._said)

    @property
    def finish_reason(self) -> str | None:
        """Why the reply ended; None while it has not."""
        return self._finish_reason or None

    @property
    def has_begun(self) -> bool:
        """Whether anything of a reply came at all."""
        return bool(any(self._said) or self._calls or self._token_ids or self._finish_reason)

    @property
    def message(self) -> ChatMessage:
        """The reply as the client will send it back in its next request."""
        return ChatMessage(Role.ASSISTANT, self.content, self.tool_calls)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...] | None:
        """Tools the reply asks for, in order."""
        calls = (self._calls[index] for index in sorted(self._calls))
        return tuple(ToolCall(**{k: _joined([v]) for k, v in c.items()}) for c in calls) or None

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        """The sampled tokens; None if the server did not give them."""
        return _ids(self._token_ids)

    @property
    def behaviour_logprobs(self) -> tuple[float, ...] | None:
        """One per token id, or None if the server did not give a finite one for each."""
        ids, given = self.token_ids, [finite_number(value) for value in self._logprobs]
        if ids is None or len(given) != len(ids):
            return None
        found = tuple(value for value in given if value is not None)
        return found if len(found) == len(ids) else None

    def _version(self, body: dict[str, Any]) -> None:
        given = _integer(body.get("policy_version"))
        if given is not None:
            self.policy_version = given
        elif self.policy_version is None and (match := _VERSION_SUFFIX.search(self.model or "")):
            self.policy_version = _integer(int(match.group(1)))

    def _prompt(self, body: dict[str, Any], choices: list[dict[str, Any]]) -> None:
        given = body.get("prompt_token_ids") or (choices or [{}])[0].get("prompt_token_ids")
        self.prompt_token_ids = _ids(_list(given)) or self.prompt_token_ids

    def _choice(self, choice: dict[str, Any]) -> None:
        said = _dict(choice.get("delta")) or _dict(choice.get("message"))
        self._said.append(_text(said.get("content")))
        self._finish_reason = _clean(choice.get("finish_reason")) or self._finish_reason
        for call in _list(said.get("tool_calls")):
            self._tool_call(_dict(call))
        self._token_ids.extend(_list(choice.get("token_ids")))
        self._logprobs.extend(_given_logprobs(choice))

    def _tool_call(self, call: dict[str, Any]) -> None:
        function = _dict(call.get("function"))
        index = _integer(call.get("index"))
        if index is None:
            # Servers that leave it out send whole calls, or go on with the last one.
            goes_on = self._calls and not call.get("id")
            index = max(self._calls) if goes_on else len(self._calls)
        known = self._calls.setdefault(index, {"id": "", "name": "", "arguments": ""})
        known["id"] = _text(call.get("id")) or known["id"]
        known["name"] = _text(function.get("name")) or known["name"]
        known["arguments"] += _text(function.get("arguments"))


def sampling_of(request: Mapping[str, Any]) -> Sampling:
    """How the client asked for tokens to be drawn; what it left out stays null."""
    most = _integer(request.get("max_completion_tokens"))
    return Sampling(
        temperature=finite_number(request.get("temperature")),
        top_p=finite_number(request.get("top_p")),
        top_k=_integer(request.get("top_k"), _INT32),
        max_tokens=_integer(request.get("max_tokens") if most is None else most, _INT32),
        seed=_integer(request.get("seed")),
    )


def without_extensions(body: dict[str, Any]) -> dict[str, Any]:
    """``body`` as the client expects it, without what only we asked for."""
    kept = {key: value for key, value in body.items() if key not in EXTENSION_KEYS}
    if isinstance(kept.get("choices"), list):
        kept["choices"] = [
            {key: value for key, value in choice.items() if key not in EXTENSION_KEYS}
            if isinstance(choice, dict)
            else choice
            for choice in kept["choices"]
        ]
    return kept


def _given_logprobs(choice: dict[str, Any]) -> list[Any]:
    given = choice.get("token_logprobs")
    if given is not None:
        return _list(given)
    tokens = _list(_dict(choice.get("logprobs")).get("content"))
    return [_dict(token).get("logprob") for token in tokens]


def _joined(parts: list[str]) -> str:
    # A character outside the basic plane may come in two halves, one a chunk; half a one
    # that stays alone cannot be written.
    return writable("".join(parts))


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _clean(value: Any) -> str:
    return _joined([_text(value)])


def _ids(values: list[Any]) -> tuple[int, ...] | None:
    found = tuple(value for value in values if _integer(value, _INT32) is not None)
    return found if found and len(found) == len(values) else None


def _integer(value: Any, bound: int = 2**63) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if -bound <= value < bound else None
