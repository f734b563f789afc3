"""One generation thread with continuous batching.

Requests wait in a queue without bound: load makes them slower, never refused. Between any
two decoding steps finished and cancelled rows leave the batch and waiting requests join it:
their prompts are run in a forward of their own and their keys and values are laid beside
those of the running rows (``batch.py``). Each row is bound to a policy version and draws
from its own random source, so neither depends on who shares the batch.

Only this thread runs forwards. Listeners are called from it and must return at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from learner.serving.adapters import Binding, PolicyVersion
from learner.serving.batch import CachedRows, pad_prompts
from learner.serving.metrics import ServeMetrics
from learner.serving.sampling import Draw, SamplingParameters, draw
from learner.serving.text import Decode, ReplyText
from streams.errors import ServingError

log = logging.getLogger(__name__)

FinishReason = Literal["stop", "length", "cancelled", "error"]


class RowModel(Protocol):
    """A model whose rows may each belong to another policy version."""

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        ...

    def forward(
        self,
        input_ids: Tensor,
        *,
        mask: Tensor,
        position_ids: Tensor,
        cache: Any,
        versions: Sequence[PolicyVersion],
    ) -> Tensor:
        """Logits after each row's last column, ``[rows, vocabulary]``; extends ``cache``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What is to be generated, and by which version."""

    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int
    binding: Binding
    sampling: SamplingParameters
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token of a reply with its log-probability under the sampling distribution."""

    token_id: int
    logprob: float
    is_end: bool = False
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step brought. ``finish_reason`` is set in a request's last one only."""

    tokens: tuple[SampledToken, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None


Listener = Callable[[Progress], None]


class Ticket:
    """A submitted request's place in the queue or the batch."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the reply any more."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Give the row back at the next step; does nothing once the reply has ended."""
        self._cancelled.set()
        self._engine._wake()


@dataclass(slots=True)
class _Row:
    request: GenerationRequest
    listener: Listener
    ticket: Ticket
    text: ReplyText
    generator: torch.Generator
    admitted_at: float
    last_token: int = 0
    drawn: int = 0
    ended: bool = False

    @property
    def version(self) -> PolicyVersion:
        return self.request.binding.version


@dataclass(slots=True)
class _Running:
    """The batch: ``rows[i]`` owns row ``i`` of ``cached``."""

    rows: list[_Row] = field(default_factory=list)
    cached: CachedRows | None = None


class Engine:
    """Generates replies for many requests at a time.

    Args:
        model: Runs the forwards.
        decode: Token ids to text, special tokens left out.
        end_token_ids: Tokens that end a reply.
        metrics: Where it counts.
        max_batch: Rows that run at a time.
        batch_wait_ms: How long an idle engine waits for company before it starts.
        max_prefill_tokens: Prompt tokens, padding included, of one forward; a longer single
            prompt runs alone.
    """

    def __init__(
        self,
        model: RowModel,
        *,
        decode: Decode,
        end_token_ids: frozenset[int],
        metrics: ServeMetrics,
        max_batch: int = 8,
        batch_wait_ms: int = 10,
        max_prefill_tokens: int = 4096,
    ) -> None:
        self._model = model
        self._decode = decode
        self._end_token_ids = end_token_ids
        self._metrics = metrics
        self._max_batch = max_batch
        self._batch_wait_s = batch_wait_ms / 1000
        self._max_prefill_tokens = max_prefill_tokens
        self._changed = threading.Condition()
        self._waiting: deque[_Row] = deque()
        self._running = _Running()
        self._open = 0
        self._closing = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)

    def start(self) -> None:
        """Start the generation thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests are being worked on."""
        return self._thread.is_alive() and not self._stopping

    @property
    def waiting(self) -> int:
        """Requests that wait for a row."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that hold a row."""
        return len(self._running.rows)

    def submit(self, request: GenerationRequest, listener: Listener) -> Ticket:
        """Queue a request; returns at once. The engine releases the request's binding.

        The listener gets every ``Progress`` in order, from the generation thread; the last
        one has a finish reason, whatever happens.

        Raises:
            ServingError: The server is shutting down. The binding is released.
        """
        ticket = Ticket(self)
        generator = torch.Generator(device=self._model.device)
        generator.manual_seed(request.sampling.seed)
        text = ReplyText(self._decode, request.stop)
        row = _Row(request, listener, ticket, text, generator, time.monotonic())
        with self._changed:
            if self._closing:
                request.binding.release()
                raise ServingError("the policy server is shutting down; send it to another one")
            self._open += 1
            self._waiting.append(row)
            self._metrics.waiting.set(len(self._waiting))
            self._changed.notify_all()
        self._metrics.tokens.labels("prompt").inc(len(request.prompt_token_ids))
        return ticket

    def stop(self, grace_ms: int) -> bool:
        """Take no more requests, finish those that are here, then end the thread.

        Blocks for up to ``grace_ms``; what has not ended by then is cancelled.

        Returns:
            Whether every request came to its own end.
        """
        with self._changed:
            self._closing = True
            finished = self._changed.wait_for(lambda: self._open == 0, timeout=grace_ms / 1000)
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        return finished

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # The generation thread

    @torch.inference_mode()
    def _run(self) -> None:
        while not self._await_work():
            try:
                self._round()
            except Exception as error:
                # A server without its generation thread would let every client wait for ever.
                self._fail(self._running.rows, error)
                self._running = _Running()
        self._drop_everything()

    def _round(self) -> None:
        self._drop_cancelled()
        joining = self._take()
        if joining:
            self._join(joining)
        if self._running.rows:
            self._decode_step()

    def _await_work(self) -> bool:
        """Block until there is something to do; True when the thread should end."""
        with self._changed:
            if not self._running.rows:
                was_idle = not self._waiting
                self._changed.wait_for(lambda: bool(self._waiting) or self._stopping)
                if was_idle:
                    self._changed.wait_for(
                        lambda: len(self._waiting) >= self._max_batch or self._stopping,
                        timeout=self._batch_wait_s,
                    )
            return self._stopping

    def _take(self) -> list[_Row]:
        """Waiting requests, oldest first, that have room in the batch and in one prefill."""
        taken: list[_Row] = []
        longest = 0
        with self._changed:
            while self._waiting and len(self._running.rows) + len(taken) < self._max_batch:
                longest = max(longest, len(self._waiting[0].request.prompt_token_ids))
                if taken and longest * (len(taken) + 1) > self._max_prefill_tokens:
                    break
                taken.append(self._waiting.popleft())
            self._metrics.waiting.set(len(self._waiting))
        return taken

    def _join(self, joining: list[_Row]) -> None:
        current = self._running.cached
        try:
            cached, logits = self._prefill(joining)
            merged = cached if current is None else current.joined(cached)
        except Exception as error:
            self._fail(joining, error)
            return
        self._running = _Running(self._running.rows + joining, merged)
        self._advance(joining, logits)
        self._drop_ended()

    def _prefill(self, rows: list[_Row]) -> tuple[CachedRows, Tensor]:
        prompts = pad_prompts([row.request.prompt_token_ids for row in rows], self._model.device)
        cache = DynamicCache()
        logits = self._model.forward(
            prompts.input_ids,
            mask=prompts.mask,
            position_ids=prompts.position_ids,
            cache=cache,
            versions=[row.version for row in rows],
        )
        return CachedRows(cache, prompts.mask), logits

    def _decode_step(self) -> None:
        rows, cached = self._running.rows, self._running.cached
        assert cached is not None
        self._metrics.batch_rows.observe(len(rows))
        mask = cached.extended_mask()
        try:
            logits = self._model.forward(
                torch.tensor([[row.last_token] for row in rows], device=self._model.device),
                mask=mask,
                position_ids=cached.next_positions(),
                cache=cached.cache,
                versions=[row.version for row in rows],
            )
        except Exception as error:
            self._fail(rows, error)
            self._drop_ended()
            return
        self._running.cached = CachedRows(cached.cache, mask)
        self._advance(rows, logits)
        self._drop_ended()

    def _advance(self, rows: Sequence[_Row], logits: Tensor) -> None:
        for row, row_logits in zip(rows, logits, strict=True):
            try:
                self._append(row, draw(row_logits, row.request.sampling, row.generator))
            except Exception as error:
                self._fail([row], error)

    def _append(self, row: _Row, drawn: Draw) -> None:
        if row.drawn == 0:
            self._metrics.first_token_seconds.observe(time.monotonic() - row.admitted_at)
        row.last_token = drawn.token_id
        row.drawn += 1
        is_end = drawn.token_id in self._end_token_ids
        text = row.text.finish() if is_end else row.text.push(drawn.token_id)
        reason: FinishReason | None = None
        if is_end or row.text.stopped:
            reason = "stop"
        elif row.drawn >= row.request.max_new_tokens:
            reason = "length"
            text += row.text.finish()
            if row.text.stopped:
                reason = "stop"
        token = SampledToken(drawn.token_id, drawn.logprob, is_end, drawn.top)
        self._tell(row, Progress((token,), text, reason))

    def _tell(self, row: _Row, progress: Progress) -> None:
        try:
            row.listener(progress)
        except Exception:
            log.exception("a listener failed; its request is cancelled")
            row.ticket.cancel()
        if progress.finish_reason is not None:
            self._end(row, progress.finish_reason)

    def _end(self, row: _Row, reason: FinishReason) -> None:
        row.ended = True
        row.request.binding.release()
        with self._changed:
            self._open -= 1
            self._changed.notify_all()
        self._metrics.requests.labels(reason).inc()
        self._metrics.tokens.labels("completion").inc(row.drawn)

    def _fail(self, rows: Sequence[_Row], error: Exception) -> None:
        log.error("generation failed for %d request(s)", len(rows), exc_info=error)
        message = f"generation failed: {type(error).__name__}: {error}"
        for row in rows:
            if not row.ended:
                self._tell(row, Progress(finish_reason="error", error=message))

    def _drop_cancelled(self) -> None:
        with self._changed:
            gone = [row for row in self._waiting if row.ticket.cancelled]
            self._waiting = deque(row for row in self._waiting if not row.ticket.cancelled)
        gone += [row for row in self._running.rows if row.ticket.cancelled]
        for row in gone:
            self._tell(row, Progress(finish_reason="cancelled"))
        self._drop_ended()

    def _drop_ended(self) -> None:
        staying = [index for index, row in enumerate(self._running.rows) if not row.ended]
        if len(staying) < len(self._running.rows):
            cached = self._running.cached
            self._running = _Running(
                [self._running.rows[index] for index in staying],
                cached.kept(staying) if cached is not None and staying else None,
            )
        self._metrics.running.set(len(self._running.rows))

    def _drop_everything(self) -> None:
        for row in [*self._waiting, *self._running.rows]:
            row.ticket.cancel()
        self._drop_cancelled()


__all__ = [
    "Engine",
    "FinishReason",
    "GenerationRequest",
    "Listener",
    "Progress",
    "RowModel",
    "SampledToken",
    "Ticket",
]
