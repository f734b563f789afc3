"""From messages to token ids: one place for everybody who renders a conversation.

The policy server renders the prompts it answers, the learner renders the turns that came
without token ids; both must get the same tokens for the same messages, so both use this.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streams.contracts import Message, Role, ToolCall
from streams.errors import ModelError

ChatMessage = Mapping[str, Any]
"""A message as OpenAI-compatible clients write it: role, content, tool_calls, tool_call_id."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A tokenizer together with its chat template.

    Args:
        tokenizer: A Hugging Face tokenizer that has a chat template.
        system_prompt: Put first in conversations that do not bring a system message of their
            own; None leaves that to the template.
    """

    tokenizer: Any
    system_prompt: str | None = None

    @property
    def eos_token_id(self) -> int:
        """The token with which a reply ends itself."""
        return int(self.tokenizer.eos_token_id)

    @property
    def pad_token_id(self) -> int:
        """Fills rows of a batch; never the same as `eos_token_id` where we choose."""
        return int(self.tokenizer.pad_token_id)

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        return len(self.tokenizer)

    def render_text(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True
    ) -> str:
        """The conversation as the text that the model was taught to read.

        Raises:
            ModelError: There is no chat template, or it refuses these messages (some insist
                that user and assistant alternate).
        """
        if not self.tokenizer.chat_template:
            raise ModelError(
                "the tokenizer has no chat template; choose an instruction-tuned base model "
                "or put a chat_template.jinja into its folder"
            )
        if self.system_prompt is not None and not (
            messages and messages[0].get("role") == Role.SYSTEM
        ):
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        try:
            text = self.tokenizer.apply_chat_template(
                [_for_template(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        # A template is a program that came with the model: it may raise anything.
        except Exception as error:
            raise ModelError(f"the chat template refuses the conversation: {error}") from error
        return str(text)

    def render_prompt(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """The token ids a reply to `messages` is sampled from, generation prompt included.

        Raises:
            ModelError: As `render_text`.
        """
        return self.encode(self.render_text(messages))

    def encode(self, text: str) -> tuple[int, ...]:
        """The token ids of rendered text; special tokens are read, none are added."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tuple(int(token) for token in ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, spaces as they are."""
        return str(
            self.tokenizer.decode(
                list(token_ids),
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )


def chat_message(message: Message) -> dict[str, Any]:
    """A recorded message in the form that chat templates and OpenAI clients use."""
    rendered: dict[str, Any] = {"role": str(message.role), "content": message.content}
    if message.tool_calls:
        rendered["tool_calls"] = [tool_call_entry(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    return rendered


def tool_call_entry(call: ToolCall) -> dict[str, Any]:
    """A recorded tool call in the form that chat templates and OpenAI clients use."""
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 over what decides which ids a text gets, and which ids are special.

    Padding and truncation are left out: they change with use, the ids of a text do not.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        state.pop("padding", None)
        state.pop("truncation", None)
    else:
        state = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    state["special_ids"] = [
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
    ]
    return _sha256(json.dumps(state, sort_keys=True, ensure_ascii=False))


def template_digest(tokenizer: Any) -> str:
    """SHA-256 over the chat template's source (of the empty string if there is none)."""
    template = tokenizer.chat_template or ""
    if not isinstance(template, str):
        template = json.dumps(template, sort_keys=True, ensure_ascii=False)
    return _sha256(template)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _for_template(message: ChatMessage) -> dict[str, Any]:
    return {**message, "role": str(message["role"]), "content": _flatten(message.get("content"))}


def _flatten(content: object) -> str:
    """Text of a content field: absent beside tool calls, or a list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content)


__all__ = [
    "Chat",
    "ChatMessage",
    "chat_message",
    "template_digest",
    "tokenizer_digest",
    "tool_call_entry",
]
