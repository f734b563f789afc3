"""Labelled examples for a warm start: one JSON object a line, read whole or not at all.

A line is a preference or a demonstration::

    {"messages": [{"role": "user", "content": "Hi"}], "chosen": "Hello!", "rejected": "What?"}
    {"messages": [{"role": "user", "content": "Hi"}], "reply": "Hello!"}

``messages`` is the conversation so far, from its beginning; the last one is of a user or a tool.
``id`` may name an example. Lines of white space are passed over; other keys are refused, so that
a misspelt one never passes for an example of the other kind.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streams.contracts import Role
from streams.errors import TrainingFileError
from streams.foreign import lone_half

_KEYS = frozenset({"id", "messages", "chosen", "rejected", "reply"})
_MESSAGE_KEYS = frozenset({"role", "content"})
_ROLES = tuple(role.value for role in (Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL))
_ANSWERED = (Role.USER.value, Role.TOOL.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One labelled reply, or a pair of them.

    Args:
        line: In the file, from 1.
        messages: What is answered: role and content of each message.
        chosen: The better reply, or the demonstrated one.
        rejected: The worse reply; None for a demonstration.
    """

    line: int
    messages: tuple[tuple[str, str], ...]
    chosen: str
    rejected: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleFile:
    """All examples of a file, in its order.

    Args:
        name: The file's name, without its folder.
        sha256: Of its bytes (hex): what decides whether it was learned from already.
        examples: At least one.
    """

    name: str
    sha256: str
    examples: tuple[Example, ...]

    @property
    def preferences(self) -> int:
        """How many examples are pairs."""
        return sum(example.rejected is not None for example in self.examples)

    @property
    def demonstrations(self) -> int:
        """How many examples are single replies."""
        return len(self.examples) - self.preferences


def read_examples(path: Path) -> ExampleFile:
    """Read a file of examples.

    Raises:
        TrainingFileError: It cannot be read, has no example, or a line is none; the message
            names file and line.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TrainingFileError(f"cannot read {path}: {error.strerror}") from error
    # JSON may hold other line separators within its strings: only line feeds part lines.
    lines = data.split(b"\n")
    examples = tuple(
        _example(path, number, line) for number, line in enumerate(lines, 1) if line.strip()
    )
    if not examples:
        raise TrainingFileError(f"{path} holds no examples")
    return ExampleFile(name=path.name, sha256=hashlib.sha256(data).hexdigest(), examples=examples)


def _example(path: Path, number: int, line: bytes) -> Example:
    try:
        return _parse(number, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")))
    except _WrongError as error:
        raise TrainingFileError(f"{path} line {number}: {error}") from None
    except UnicodeDecodeError:
        raise TrainingFileError(f"{path} line {number} is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise TrainingFileError(f"{path} line {number} is no JSON object: {error}") from None


class _WrongError(Exception):
    """What is wrong with a line."""


def _parse(number: int, value: Any) -> Example:
    if not isinstance(value, dict):
        raise _WrongError("it is no JSON object")
    unknown = sorted(value.keys() - _KEYS)
    if unknown:
        known = ", ".join(sorted(_KEYS))
        raise _WrongError(f"the key {unknown[0]!r} is not known; known are {known}")
    pair = {"chosen", "rejected"} & value.keys()
    if ("reply" in value) == bool(pair) or len(pair) == 1:
        raise _WrongError(
            "an example has either 'chosen' and 'rejected' (a preference) or 'reply' (a "
            "demonstration)"
        )
    messages = _messages(value.get("messages"))
    if not pair:
        return Example(line=number, messages=messages, chosen=_text(value, "reply"))
    chosen, rejected = _text(value, "chosen"), _text(value, "rejected")
    if chosen == rejected:
        raise _WrongError("'chosen' and 'rejected' are the same text: neither is preferred")
    return Example(line=number, messages=messages, chosen=chosen, rejected=rejected)


def _messages(value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise _WrongError("'messages' must be a list of at least one message")
    messages = tuple(_message(index, message) for index, message in enumerate(value))
    if messages[-1][0] not in _ANSWERED:
        raise _WrongError(
            f"the last message is of {messages[-1][0]!r}: a reply answers a user or a tool"
        )
    return messages


def _message(index: int, value: Any) -> tuple[str, str]:
    if not isinstance(value, dict) or value.keys() != _MESSAGE_KEYS:
        raise _WrongError(f"message {index} must have 'role' and 'content', and nothing else")
    if value["role"] not in _ROLES:
        raise _WrongError(f"message {index} has a role that is none of {', '.join(_ROLES)}")
    if not isinstance(value["content"], str):
        raise _WrongError(f"the content of message {index} must be a text")
    _require_utf8(f"the content of message {index}", value["content"])
    return str(value["role"]), value["content"]


def _text(value: dict[str, Any], key: str) -> str:
    text = value[key]
    if not isinstance(text, str) or not text.strip():
        raise _WrongError(f"{key!r} must be a text that is not empty")
    _require_utf8(repr(key), text)
    return text


def _require_utf8(what: str, text: str) -> None:
    """Half of a surrogate pair is no character and has no tokens."""
    half = lone_half(text)
    if half is not None:
        raise _WrongError(f"{what} has {half!r}, half of a surrogate pair")


__all__ = ["Example", "ExampleFile", "read_examples"]
