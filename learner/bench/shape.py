"""A model of SmolLM2-135M's shape with random weights: for speed, weights need no sense."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from learner import tiny
from learner.chat import Chat, template_digest, tokenizer_digest
from learner.model import BaseModel, resolve_device, resolve_dtype, take_share
from streams.settings import ModelSettings

_SEED = 0


def load_shape(settings: ModelSettings) -> BaseModel:
    """The model on the device and in the precision of the settings.

    Its weights are the same on every device; its tokenizer is the tiny one.

    Raises:
        ModelError: The device or the precision is not there.
    """
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype, device)
    take_share(settings, device)
    model: Any = _build()
    if device.type == "cuda":
        model.to(dtype)
    model.requires_grad_(False)
    model.to(device)
    model.eval()
    tokenizer = tiny.build_tokenizer()
    return BaseModel(
        model=model,
        tokenizer=tokenizer,
        chat=Chat(tokenizer),
        model_id="smollm2-shape",
        base_digest="random",
        tokenizer_digest=tokenizer_digest(tokenizer),
        template_digest=template_digest(tokenizer),
        device=device,
        dtype=dtype,
    )


def _build() -> Any:
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1_536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8_192,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


__all__ = ["load_shape"]
