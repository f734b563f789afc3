from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from learner.batch import reply_sample
from learner.examples import Example, ExampleFile, read_examples
from learner.ppo.diagnostics import METRICS
from learner.trainer import PpoTrainer, make_trainer
from learner.warming import WarmStarted, WarmStartHooks
from learner.warmstart import WarmStart
from streams.errors import LearnerError, TrainingFileError, UpdateStoppedError
from streams.settings import LearnerSettings, ModelSettings, Settings
from tests.unit.learner.test_update import equal_states, shake

QUESTIONS = ("Hi", "How are you?", "What now", "é", "Go on then", "2+2")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trainer(folder: Path, **changes: Any) -> PpoTrainer:
    settings = LearnerSettings(
        warm_start_learning_rate=3e-3, warm_start_batch=2, warm_start_epochs=3
    ).model_copy(update=changes)
    model = ModelSettings(base="tiny-random", device="cpu", lora_rank=2, num_threads=1)
    return make_trainer(Settings(data_dir=folder, learner=settings, model=model))


def pairs() -> list[Example]:
    return [
        Example(line=n, messages=(("user", q),), chosen="yes, of course", rejected="no" * (n + 1))
        for n, q in enumerate(QUESTIONS)
    ]


def shown() -> list[Example]:
    return [
        Example(line=n, messages=(("system", "s"), ("user", q)), chosen="sure thing")
        for n, q in enumerate(QUESTIONS, 10)
    ]


def file_of(examples: list[Example]) -> ExampleFile:
    return ExampleFile(name="f.jsonl", sha256="0" * 64, examples=tuple(examples))


class Kept:
    """Keeps what a warm start saves, through bytes, as a disk would."""

    def __init__(self) -> None:
        self.states: list[bytes] = []
        self.shown: list[tuple[int, int]] = []
        self.losses: list[float] = []

    def hooks(
        self,
        resume: Mapping[str, Any] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> WarmStartHooks:
        return WarmStartHooks(
            resume=resume, save=self._save, shown=self._show, should_stop=should_stop
        )

    def _save(self, state: Mapping[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        self.states.append(buffer.getvalue())

    def _show(self, done: int, steps: int, loss: float) -> None:
        self.shown.append((done, steps))
        self.losses.append(loss)

    def newest(self) -> dict[str, Any]:
        state: dict[str, Any] = torch.load(io.BytesIO(self.states[-1]), weights_only=True)
        return state


def logprob(held: PpoTrainer, example: Example, reply: str) -> float:
    """Of a whole reply, by the whole model."""
    chat = held._base.chat
    messages = [{"role": role, "content": content} for role, content in example.messages]
    one = reply_sample(chat, messages, reply, "x")
    with torch.no_grad():
        logits = held._updater.network.model(input_ids=torch.tensor([one.token_ids])).logits[0]
    logprobs = torch.log_softmax(logits, dim=1)
    return float(sum(logprobs[p - 1, one.token_ids[p]] for p in one.positions))


@pytest.mark.parametrize("examples", [pairs(), shown(), [*pairs(), *shown()]])
def test_the_loss_falls_and_chosen_replies_gain(examples: list[Example], tmp_path: Path) -> None:
    held = trainer(tmp_path)
    before = [logprob(held, one, one.chosen) for one in examples]
    margins = [
        logprob(held, one, one.chosen) - logprob(held, one, one.rejected)
        for one in examples
        if one.rejected is not None
    ]
    kept = Kept()
    warmed = held.warm_start(file_of(examples), kept.hooks())
    after = [logprob(held, one, one.chosen) for one in examples]
    assert all(new > old + 0.1 for old, new in zip(before, after, strict=True))
    for one, old in zip([one for one in examples if one.rejected], margins, strict=True):
        assert one.rejected is not None
        assert logprob(held, one, one.chosen) - logprob(held, one, one.rejected) > old
    metrics = warmed.metrics
    assert metrics["warm_start/loss_after"] < metrics["warm_start/loss_before"] - 0.1
    assert warmed.gate[0].passed
    assert metrics["warm_start/steps"] == 3 * -(-len(examples) // 2)
    assert kept.shown[-1] == (int(metrics["warm_start/steps"]),) * 2
    assert metrics["warm_start/examples"] == len(examples)
    assert all(math.isfinite(loss) for loss in kept.losses)
    assert metrics.keys() <= METRICS.keys()
    if {one.rejected is None for one in examples} == {True, False}:
        assert metrics.keys() == {name for name in METRICS if name.startswith("warm_start/")}
    assert ("warm_start/accuracy_after" in metrics) is any(one.rejected for one in examples)


def test_metrics_are_what_they_say(tmp_path: Path) -> None:
    held = trainer(tmp_path)
    examples = pairs()
    measured = held.warm_start(file_of(examples), Kept().hooks()).metrics
    count = [len(one.chosen) + 1 for one in examples]
    chosen = [logprob(held, one, one.chosen) for one in examples]
    rejected = [logprob(held, one, str(one.rejected)) for one in examples]
    fresh = trainer(tmp_path)
    reference = [
        logprob(fresh, one, one.chosen) - logprob(fresh, one, str(one.rejected)) for one in examples
    ]
    margins = [c - r - q for c, r, q in zip(chosen, rejected, reference, strict=True)]
    nll = [-c / n for c, n in zip(chosen, count, strict=True)]
    losses = [math.log1p(math.exp(-0.1 * m)) + n for m, n in zip(margins, nll, strict=True)]
    assert measured["warm_start/margin_before"] == pytest.approx(0.0, abs=1e-4)
    assert measured["warm_start/margin_after"] == pytest.approx(sum(margins) / 6, abs=1e-3)
    assert measured["warm_start/chosen_logprob_after"] == pytest.approx(-sum(nll) / 6, abs=1e-4)
    assert measured["warm_start/loss_after"] == pytest.approx(sum(losses) / 6, abs=1e-4)
    assert measured["warm_start/accuracy_after"] == sum(m > 0 for m in margins) / 6


def _gradient(held: PpoTrainer, examples: list[Example]) -> list[Tensor]:
    """The gradient of one step on all examples, unclipped; no step is made."""
    caught: list[Tensor] = []
    network = held._updater.network
    settings = held._settings.model_copy(
        update={"max_grad_norm": 1e9, "warm_start_batch": 99, "warm_start_epochs": 1}
    )
    start = WarmStart(network, held._base, settings, 4_096)

    def catch(*_: object, **__: object) -> None:
        caught.extend(
            torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for p in network.adapter_parameters()
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start._optimizer, "step", catch)
        start.run(file_of(examples), Kept().hooks())
    return caught


def test_the_gradient_is_that_of_the_textbook_losses(tmp_path: Path) -> None:
    held = trainer(tmp_path, warm_start_beta=0.3, warm_start_chosen_weight=0.5)
    shake(held._updater)
    network = held._updater.network
    examples = [pairs()[1], shown()[0]]
    got = _gradient(held, examples)

    def total(example: Example, reply: str) -> tuple[Tensor, int]:
        messages = [{"role": role, "content": content} for role, content in example.messages]
        one = reply_sample(held._base.chat, messages, reply, "x")
        logits = network.model(input_ids=torch.tensor([one.token_ids])).logits[0]
        logprobs = torch.log_softmax(logits, dim=1)
        chosen = [logprobs[p - 1, one.token_ids[p]] for p in one.positions]
        return torch.stack(chosen).sum(), len(chosen)

    pair, demonstration = examples
    (c, n), (r, _) = total(pair, pair.chosen), total(pair, str(pair.rejected))
    with torch.no_grad(), network.model.disable_adapter():
        (qc, _), (qr, _) = total(pair, pair.chosen), total(pair, str(pair.rejected))
    d, m = total(demonstration, demonstration.chosen)
    loss = -torch.nn.functional.logsigmoid(0.3 * (c - r - qc + qr)) - 0.5 * c / n
    loss = (loss - d / m) / 2
    expected = torch.autograd.grad(loss, network.adapter_parameters())
    assert max(float(tensor.abs().max()) for tensor in expected) > 1e-3
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)


def test_the_gradient_does_not_depend_on_the_micro_batch_size(tmp_path: Path) -> None:
    def at(size: int) -> list[Tensor]:
        held = trainer(tmp_path, micro_batch_segments=size)
        shake(held._updater)
        return _gradient(held, [*pairs(), *shown()])

    expected = at(24)
    for size in (1, 4):
        for got, wanted in zip(at(size), expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-3)


def test_only_the_reply_is_trained_on_with_its_end(tmp_path: Path) -> None:
    chat = trainer(tmp_path)._base.chat
    messages = [{"role": "user", "content": "Hi"}]
    one = reply_sample(chat, messages, "Yes.", "x")
    assert one.token_ids == (*chat.render_prompt(messages), *chat.encode("Yes.<|im_end|>"))
    trained = [one.token_ids[p] for p in one.positions]
    assert chat.decode(trained, skip_special_tokens=False) == "Yes.<|im_end|>"


@pytest.mark.parametrize("first_layer", [0, 2])
def test_an_interrupted_warm_start_goes_on_as_if_it_had_not_been(
    first_layer: int, tmp_path: Path
) -> None:
    model = ModelSettings(
        base="tiny-random", device="cpu", lora_rank=2, num_threads=1, lora_first_layer=first_layer
    )
    learner = LearnerSettings(
        warm_start_learning_rate=3e-3, warm_start_batch=2, warm_start_epochs=2,
        warm_start_save_steps=4,
    )  # fmt: skip
    settings = Settings(data_dir=tmp_path, learner=learner, model=model)
    file = file_of([*pairs(), *shown()])
    straight, kept = make_trainer(settings), Kept()
    expected = straight.warm_start(file, kept.hooks())
    assert [torch.load(io.BytesIO(s), weights_only=True)["step"] for s in kept.states] == [4, 8, 12]

    # Stopped in the middle, in another process that has nothing but the file.
    stopped, kept = make_trainer(settings), Kept()
    before = stopped.state_dict()
    with pytest.raises(UpdateStoppedError, match="the next start goes on with it"):
        stopped.warm_start(file, kept.hooks(should_stop=lambda: len(kept.shown) >= 5))
    assert equal_states(stopped.state_dict(), before)
    assert kept.newest()["step"] == 5
    resumed, again = make_trainer(settings), Kept()
    assert resumed.warm_start(file, again.hooks(resume=kept.newest())) == expected
    assert again.shown[0] == (6, 12)
    assert equal_states(resumed.state_dict(), straight.state_dict())


def test_the_updates_after_it_start_from_it(tmp_path: Path) -> None:
    held = trainer(tmp_path)
    before = held.state_dict()
    held.warm_start(file_of(shown()), Kept().hooks())
    after = held.state_dict()
    assert not equal_states(after["adapter"], before["adapter"])
    # Its own optimizer, counters and order are those of updates alone.
    for name in ("optimizer", "generator", "updates", "optimizer_step", "value_head"):
        assert equal_states(after[name], before[name]), name
    assert held.optimizer_step == 0


def test_examples_that_are_too_long_are_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = replace(shown()[0], line=7, chosen="x" * 300)
    held = trainer(tmp_path, max_sequence_tokens=200)
    metrics = held.warm_start(file_of([*shown(), long]), Kept().hooks()).metrics
    assert (metrics["warm_start/examples"], metrics["warm_start/left_out"]) == (6.0, 1.0)
    assert "1 are longer than 200 tokens, the first in line 7" in caplog.text
    with pytest.raises(TrainingFileError, match=r"every example of f\.jsonl is longer than 200"):
        held.warm_start(file_of([long]), Kept().hooks())


def test_messages_that_the_template_refuses_are_named(tmp_path: Path) -> None:
    held = trainer(tmp_path)
    held._base.chat.tokenizer.chat_template = "{{ raise_exception('alternate!') }}"
    with pytest.raises(TrainingFileError, match=r"f\.jsonl line 0: .*alternate!"):
        held.warm_start(file_of(pairs()), Kept().hooks())


def test_a_pair_that_the_template_shows_alike_is_named(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    template = made._base.tokenizer.chat_template
    trimming = template.replace("message['content']", "message['content'] | trim")
    assert trimming != template
    made._base.tokenizer.chat_template = trimming
    alike = Example(line=7, messages=(("user", "Hi"),), chosen="yes", rejected="yes ")
    with pytest.raises(TrainingFileError, match=r"f\.jsonl line 7: the chat template shows"):
        made.warm_start(file_of([*pairs(), alike]), Kept().hooks())


def test_a_failure_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = trainer(tmp_path)
    before = held.state_dict()
    monkeypatch.setattr(
        "learner.warmstart.reply_nll", lambda logprobs, _: logprobs.sum(dim=1) * math.nan
    )
    with pytest.raises(LearnerError, match="not finite"):
        held.warm_start(file_of(shown()), Kept().hooks())
    assert equal_states(held.state_dict(), before)
    monkeypatch.undo()

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.optim.Adam, "step", full)
    with pytest.raises(LearnerError, match=r"not enough memory for the warm start"):
        held.warm_start(file_of(shown()), Kept().hooks())
    assert equal_states(held.state_dict(), before)
    assert not any(p.grad is not None for p in held._updater.network.adapter_parameters())


def test_a_warm_start_that_does_no_good_fails_its_gate(tmp_path: Path) -> None:
    # Both ways at once: neither can be learned.
    one = pairs()[0]
    assert one.rejected is not None
    other = replace(one, chosen=one.rejected, rejected=one.chosen)
    held = trainer(
        tmp_path,
        warm_start_chosen_weight=0.0,
        warm_start_batch=1,
        warm_start_learning_rate=0.3,
        warm_start_epochs=1,
    )
    warmed: WarmStarted = held.warm_start(file_of([one, other]), Kept().hooks())
    (decision,) = warmed.gate
    assert not decision.passed
    assert decision.value is not None
    assert decision.threshold is not None
    assert decision.value >= decision.threshold


def test_a_file_is_learned_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    line = {"messages": [{"role": "user", "content": "Hi"}], "reply": "Hello!"}
    path.write_text(json.dumps(line), encoding="utf-8")
    held = trainer(tmp_path)
    file = read_examples(path)
    before = logprob(held, file.examples[0], "Hello!")
    held.warm_start(file, Kept().hooks())
    assert logprob(held, file.examples[0], "Hello!") > before
