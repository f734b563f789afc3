from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from learner.model import BaseModel
from learner.serving.adapters import AdapterTable
from learner.serving.batch import CachedRows
from learner.serving.engine import Engine, GenerationRequest, Progress
from learner.serving.sampling import SamplingParameters
from streams.errors import ServingError
from tests.unit.learner.serving.harness import (
    DEADLINE_S,
    GREEDY,
    Adapter,
    Oracle,
    Reply,
    ask,
    make_table,
    running_engine,
)

PROMPT = (10, 20, 30, 40)


class Gate:
    """A model whose decoding steps wait for permission, and can be made to fail."""

    def __init__(self, table: AdapterTable) -> None:
        self._table = table
        self.open = threading.Event()
        self.open.set()
        self.fail: Callable[[torch.Tensor], bool] = lambda _input_ids: False
        self.rows: list[int] = []

    @property
    def device(self) -> torch.device:
        return self._table.device

    def forward(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        assert self.open.wait(DEADLINE_S)
        self.rows.append(len(input_ids))
        if self.fail(input_ids):
            raise RuntimeError("out of memory")
        return self._table.forward(input_ids, **options)


@pytest.fixture
def table(base: BaseModel, adapters: list[Adapter]) -> AdapterTable:
    table = make_table(base, keep_versions=4)
    for adapter in adapters:
        table.load(adapter.version, adapter.folder)
    return table


@pytest.fixture
def gate(table: AdapterTable) -> Gate:
    return Gate(table)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, without a signal of its own, up to the deadline."""
    waiting = threading.Condition()
    with waiting:
        for _ in range(int(DEADLINE_S / 0.01)):
            if condition():
                return
            waiting.wait(0.01)
    raise AssertionError("the condition did not come true")


def held(engine: Engine, gate: Gate, table: AdapterTable, count: int) -> list[Reply]:
    """``count`` long replies that have begun and are stopped at the gate."""
    replies = [ask(engine, table, PROMPT, model="tiny-random", tokens=2_000) for _ in range(count)]
    for reply in replies:
        assert reply.begun.wait(DEADLINE_S)
    gate.open.clear()
    return replies


def test_rows_of_a_batch_equal_their_own_single_runs(
    base: BaseModel, table: AdapterTable, oracle: Oracle
) -> None:
    source = random.Random(5)
    with running_engine(base, table, max_batch=4, batch_wait_ms=20) as engine:
        cases = []
        for _ in range(24):
            version = source.randrange(5)
            prompt = [source.randrange(3, 259) for _ in range(source.randrange(1, 40))]
            tokens = source.randrange(1, 20)
            name = f"default-v{version}"
            cases.append(
                (version, prompt, tokens, ask(engine, table, prompt, model=name, tokens=tokens))
            )
        for version, prompt, tokens, reply in cases:
            assert reply.wait().token_ids == oracle.greedy(version, prompt, tokens)


def test_logprobs_are_those_of_an_independent_forward(
    base: BaseModel, table: AdapterTable, oracle: Oracle
) -> None:
    with running_engine(base, table) as engine:
        cases = []
        for index, temperature in enumerate((0.5, 0.7, 1.0, 1.3)):
            sampling = SamplingParameters(temperature=temperature, top_p=0.9, seed=index)
            prompt = list(range(3, 9 + index))
            reply = ask(
                engine, table, prompt, model=f"default-v{index}", tokens=30, sampling=sampling
            )
            cases.append((index, prompt, temperature, reply))
        for version, prompt, temperature, reply in cases:
            expected = oracle.logprobs(version, prompt, reply.wait().token_ids, temperature)
            assert [token.logprob for token in reply.tokens] == pytest.approx(expected, abs=1e-4)


def test_a_request_joins_a_running_batch_between_two_steps(
    base: BaseModel, table: AdapterTable, gate: Gate, oracle: Oracle
) -> None:
    with running_engine(base, gate, max_batch=4) as engine:
        (first,) = held(engine, gate, table, 1)
        late = ask(engine, table, (7, 8, 9), model="default-v1", tokens=9)
        gate.open.set()
        assert late.wait().token_ids == oracle.greedy(1, (7, 8, 9), 9)
        assert not first.done.is_set()
        assert 2 in gate.rows
        assert first.ticket is not None
        first.ticket.cancel()
        so_far = first.wait().token_ids
        assert so_far == oracle.greedy(0, PROMPT, len(so_far))


def test_a_reply_does_not_depend_on_its_company(base: BaseModel, table: AdapterTable) -> None:
    sampling = SamplingParameters(temperature=1.0, seed=42)
    with running_engine(base, table, batch_wait_ms=20) as engine:
        alone = ask(engine, table, PROMPT, tokens=20, sampling=sampling).wait().token_ids
        others = [
            ask(engine, table, PROMPT, tokens=20, sampling=SamplingParameters(seed=seed))
            for seed in range(6)
        ]
        again = ask(engine, table, PROMPT, tokens=20, sampling=sampling).wait().token_ids
        drawn = {tuple(reply.wait().token_ids) for reply in others}
    assert again == alone
    assert len(drawn) == 6


def test_no_more_rows_run_than_the_batch_holds_and_the_rest_waits_in_order(
    base: BaseModel, table: AdapterTable, gate: Gate
) -> None:
    order: list[int] = []
    with running_engine(base, gate, max_batch=2) as engine:
        held_back = held(engine, gate, table, 2)
        waiting = [
            ask(engine, table, PROMPT, tokens=1, then=partial(order.append, index))
            for index in range(5)
        ]
        wait_until(lambda: engine.waiting == 5)
        assert engine.running == 2
        gate.open.set()
        for reply in held_back:
            assert reply.ticket is not None
            reply.ticket.cancel()
        for reply in waiting:
            assert reply.wait().finish_reason in ("length", "stop")
    assert max(gate.rows) <= 2
    assert order == [0, 1, 2, 3, 4]


def test_the_end_token_is_reported_but_has_no_text(base: BaseModel, table: AdapterTable) -> None:
    with running_engine(base, table, max_batch=8) as engine:
        replies = [
            ask(engine, table, PROMPT, tokens=300, sampling=SamplingParameters(seed=seed))
            for seed in range(12)
        ]
        ended = [reply for reply in replies if reply.wait().finish_reason == "stop"]
    assert ended, "no reply of the tiny model ended by itself"
    for reply in ended:
        assert reply.tokens[-1].token_id == base.chat.eos_token_id
        assert [token.is_end for token in reply.tokens].index(True) == len(reply.tokens) - 1
        assert reply.text == base.chat.decode(reply.token_ids[:-1])


def test_a_stop_string_ends_the_reply_and_is_cut_off(base: BaseModel, table: AdapterTable) -> None:
    with running_engine(base, table) as engine:
        whole = ask(engine, table, PROMPT, tokens=40).wait()
        stop = next(step.text for step in whole.steps[3:] if step.text.isascii() and step.text)
        cut = ask(engine, table, PROMPT, tokens=40, stop=(stop,)).wait()
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


def test_a_cancelled_request_frees_its_row(
    base: BaseModel, table: AdapterTable, gate: Gate
) -> None:
    with running_engine(base, gate, max_batch=1) as engine:
        (running,) = held(engine, gate, table, 1)
        queued, last = ask(engine, table, PROMPT, tokens=1), ask(engine, table, PROMPT, tokens=1)
        assert queued.ticket is not None
        assert running.ticket is not None
        queued.ticket.cancel()
        running.ticket.cancel()
        gate.open.set()
        assert queued.wait().finish_reason == "cancelled"
        assert queued.tokens == []
        assert running.wait().finish_reason == "cancelled"
        assert last.wait().finish_reason == "length"
        wait_until(lambda: engine.running == 0)


def test_a_cancelled_request_lets_go_of_its_version(
    base: BaseModel, adapters: list[Adapter]
) -> None:
    table = make_table(base, keep_versions=1)
    gate = Gate(table)
    table.load(1, adapters[0].folder)
    with running_engine(base, gate) as engine:
        reply = ask(engine, table, PROMPT, model="default-v1", tokens=2_000)
        assert reply.begun.wait(DEADLINE_S)
        table.load(2, adapters[1].folder)
        table.go_live(2)
        assert 1 in [version.version for version in table.versions()]
        assert reply.ticket is not None
        reply.ticket.cancel()
        reply.wait()
        wait_until(lambda: [version.version for version in table.versions()] == [0, 2])


def test_a_failing_forward_fails_its_requests_and_no_others(
    base: BaseModel, table: AdapterTable, gate: Gate
) -> None:
    with running_engine(base, gate) as engine:
        gate.fail = lambda _input_ids: True
        failed = ask(engine, table, PROMPT).wait()
        assert failed.finish_reason == "error"
        assert failed.steps[-1].error is not None
        assert "out of memory" in failed.steps[-1].error
        gate.fail = lambda _input_ids: False
        assert ask(engine, table, PROMPT, tokens=3).wait().finish_reason in ("length", "stop")
        assert engine.alive


def test_a_failing_prefill_leaves_the_running_rows_alone(
    base: BaseModel, table: AdapterTable, gate: Gate, oracle: Oracle
) -> None:
    with running_engine(base, gate) as engine:
        running = held(engine, gate, table, 1)[0]
        gate.fail = lambda input_ids: input_ids.shape[1] > 1
        joining = ask(engine, table, (5, 6), tokens=2)
        gate.open.set()
        assert joining.wait().finish_reason == "error"
        assert not running.done.is_set()
        assert running.ticket is not None
        running.ticket.cancel()
        so_far = running.wait().token_ids
        assert so_far == oracle.greedy(0, PROMPT, len(so_far))


@pytest.mark.parametrize("method", ["joined", "kept"])
def test_running_out_of_memory_between_steps_ends_no_more_than_the_batch(
    base: BaseModel, table: AdapterTable, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*_: object) -> CachedRows:
        raise RuntimeError("out of memory")

    with running_engine(base, table, batch_wait_ms=20) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(CachedRows, method, fail)
            long = ask(engine, table, PROMPT, model="tiny-random", tokens=300)
            assert long.begun.wait(DEADLINE_S)
            short = ask(engine, table, PROMPT, model="tiny-random", tokens=3)
            # Joining fails the one that joins; leaving fails those who stay.
            failed = short if method == "joined" else long
            assert failed.wait().finish_reason == "error"
        assert long.wait().done.is_set()
        assert ask(engine, table, PROMPT, tokens=3).wait().finish_reason in ("length", "stop")


def test_a_failing_listener_only_costs_its_own_reply(base: BaseModel, table: AdapterTable) -> None:
    def explode(step: Progress) -> None:
        raise ValueError(step)

    with running_engine(base, table) as engine:
        engine.submit(
            GenerationRequest(
                prompt_token_ids=PROMPT,
                max_new_tokens=2_000,
                binding=table.bind("live"),
                sampling=GREEDY,
            ),
            explode,
        )
        assert ask(engine, table, PROMPT, tokens=2).wait().finish_reason in ("length", "stop")
        wait_until(lambda: engine.running == 0)


def test_long_prompts_are_not_prefilled_together(
    base: BaseModel, table: AdapterTable, gate: Gate, oracle: Oracle
) -> None:
    gate.open.clear()
    with running_engine(base, gate, batch_wait_ms=50, max_prefill_tokens=20) as engine:
        prompts = [[5] * 30, [6] * 8, [7] * 8, [8] * 8]
        replies = [ask(engine, table, prompt, tokens=6) for prompt in prompts]
        gate.open.set()
        for prompt, reply in zip(prompts, replies, strict=True):
            assert reply.wait().token_ids == oracle.greedy(0, prompt, 6)
    assert gate.rows[0] == 1


def test_stopping_lets_running_replies_finish(base: BaseModel, table: AdapterTable) -> None:
    with running_engine(base, table) as engine:
        replies = [ask(engine, table, PROMPT, tokens=8) for _ in range(10)]
        assert engine.stop(60_000)
        assert all(reply.wait().finish_reason in ("length", "stop") for reply in replies)
        with pytest.raises(ServingError, match="shutting down"):
            ask(engine, table, PROMPT)
        assert not engine.alive


def test_stopping_cancels_what_does_not_finish_in_time(
    base: BaseModel, table: AdapterTable, gate: Gate
) -> None:
    with running_engine(base, gate, max_batch=1) as engine:
        running = held(engine, gate, table, 1)[0]
        queued = ask(engine, table, PROMPT)
        gate.open.set()
        assert not engine.stop(0)
        assert running.wait().finish_reason == "cancelled"
        assert queued.wait().finish_reason == "cancelled"
