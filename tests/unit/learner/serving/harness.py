"""What the tests of the policy server share: tiny models, adapters and an independent oracle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from learner.adapters import attach_lora, load_adapter, save_adapter
from learner.model import BaseModel, load_base
from learner.serving.adapters import AdapterTable
from learner.serving.engine import Engine, GenerationRequest, Progress, SampledToken, Ticket
from learner.serving.metrics import ServeMetrics
from learner.serving.sampling import SamplingParameters
from streams.clock import ManualClock
from streams.settings import ModelSettings

TINY = ModelSettings(base="tiny-random", device="cpu", dtype="float32", lora_rank=4)
DEADLINE_S = 60.0
GREEDY = SamplingParameters(temperature=0.0)


def tiny_base(folder: Path) -> BaseModel:
    """The tiny model; the same weights each time."""
    return load_base(TINY, folder)


def write_adapter(folder: Path, seed: int, scale: float = 0.5) -> dict[str, str]:
    """Save an adapter of the tiny model that changes what it says; SHA-256 by file."""
    base = tiny_base(folder.parent)
    adapted = attach_lora(base.model, TINY, seed=seed)
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=source) * scale)
    return save_adapter(adapted, folder, base_model_id=base.model_id)


@dataclass(frozen=True)
class Adapter:
    """A saved adapter."""

    version: int
    folder: Path
    files: Mapping[str, str]


class Oracle:
    """Greedy replies and log-probabilities by one model a version, one prompt at a time.

    It shares nothing with the server but the library: no batch, no cache, no padding, and
    the adapter is the active one of a model of its own.
    """

    def __init__(self, folder: Path, adapters: Sequence[Adapter]) -> None:
        self._models: dict[int, Any] = {0: tiny_base(folder).model}
        for adapter in adapters:
            self._models[adapter.version] = load_adapter(
                tiny_base(folder).model,
                adapter.folder,
                adapter_name="oracle",
                files=adapter.files,
            )
        self._known: dict[tuple[int, tuple[int, ...], int], list[int]] = {}

    def greedy(self, version: int, prompt: Sequence[int], tokens: int, end: int = 2) -> list[int]:
        """The greedy reply of at most ``tokens`` tokens, end token included."""
        key = (version, tuple(prompt), tokens)
        if key not in self._known:
            self._known[key] = self._greedy(version, prompt, tokens, end)
        return self._known[key]

    def _greedy(self, version: int, prompt: Sequence[int], tokens: int, end: int) -> list[int]:
        ids = list(prompt)
        with torch.inference_mode():
            while len(ids) < len(prompt) + tokens:
                logits = self._models[version](input_ids=torch.tensor([ids])).logits[0, -1]
                ids.append(int(logits.argmax()))
                if ids[-1] == end:
                    break
        return ids[len(prompt) :]

    def logprobs(
        self, version: int, prompt: Sequence[int], reply: Sequence[int], temperature: float
    ) -> list[float]:
        """Log-probabilities of a reply's tokens, by one forward over prompt and reply."""
        ids = torch.tensor([[*prompt, *reply]])
        with torch.inference_mode():
            logits = self._models[version](input_ids=ids).logits[0, len(prompt) - 1 : -1]
        table = torch.log_softmax(logits.float() / temperature, dim=-1)
        return [float(table[index, token]) for index, token in enumerate(reply)]


def make_table(base: BaseModel, *, policy: str = "default", keep_versions: int = 3) -> AdapterTable:
    """A table over ``base`` with metrics of its own."""
    return AdapterTable(
        base,
        policy=policy,
        keep_versions=keep_versions,
        metrics=ServeMetrics(CollectorRegistry()),
        clock=ManualClock(1_000),
    )


@contextmanager
def running_engine(
    base: BaseModel, table: Any, *, max_batch: int = 4, batch_wait_ms: int = 0, **options: Any
) -> Iterator[Engine]:
    """An engine with its thread, stopped at the end."""
    values: dict[str, Any] = {
        "decode": base.chat.decode,
        "end_token_ids": frozenset({base.chat.eos_token_id}),
        "metrics": ServeMetrics(CollectorRegistry()),
        "max_batch": max_batch,
        "batch_wait_ms": batch_wait_ms,
    }
    engine = Engine(table, **(values | options))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop(0)


@dataclass
class Reply:
    """Collects one reply."""

    steps: list[Progress] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    ticket: Ticket | None = None
    then: Callable[[], None] | None = None

    def listen(self, step: Progress) -> None:
        self.steps.append(step)
        self.begun.set()
        if step.finish_reason is not None:
            if self.then is not None:
                self.then()
            self.done.set()

    def wait(self) -> Reply:
        assert self.done.wait(DEADLINE_S), "the reply did not end"
        return self

    @property
    def tokens(self) -> list[SampledToken]:
        return [token for step in self.steps for token in step.tokens]

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def text(self) -> str:
        return "".join(step.text for step in self.steps)

    @property
    def finish_reason(self) -> str | None:
        return self.steps[-1].finish_reason


def ask(
    engine: Engine,
    table: AdapterTable,
    prompt: Sequence[int],
    *,
    model: str = "live",
    tokens: int = 12,
    sampling: SamplingParameters = GREEDY,
    stop: tuple[str, ...] = (),
    then: Callable[[], None] | None = None,
) -> Reply:
    """Submit a request; wait for the reply with ``wait``. ``then`` is called when it ends."""
    reply = Reply(then=then)
    request = GenerationRequest(
        prompt_token_ids=tuple(prompt),
        max_new_tokens=tokens,
        binding=table.bind(model),
        sampling=sampling,
        stop=stop,
    )
    reply.ticket = engine.submit(request, reply.listen)
    return reply
