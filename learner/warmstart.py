"""Learning from labelled examples, before or between updates from feedback.

Each example has one loss, and counts alike however long it is::

    preference      -log sigmoid(beta * margin) + chosen_weight * nll(chosen)
    demonstration   nll(reply)

The margin is to the reference (the bare base model), as everywhere here; see
`learner.ppo.preference`. The second term of a preference is there because the first alone is
content with making both replies less likely, the rejected one more so (Pang et al. 2024, arXiv
2404.19733). Log-probabilities are those of temperature 1.

The optimizer is one of its own: the moments of a warm start say nothing about feedback. Which
examples a step takes depends on the seed, the epoch and the step's number alone, so that a warm
start which was interrupted goes on as if it had not been.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from learner.adapters import fill_adapter
from learner.batch import TrainingSample, reply_sample
from learner.examples import Example, ExampleFile
from learner.model import BaseModel
from learner.policy import PolicyNetwork, TokenRow
from learner.ppo.preference import preference_loss, reply_nll
from learner.rollout import spread
from learner.warming import WarmStarted, WarmStartHooks
from streams.contracts import GateDecision
from streams.errors import LearnerError, ModelError, TrainingFileError, UpdateStoppedError
from streams.settings import LearnerSettings

log = logging.getLogger(__name__)

_MEASURED = 256
"""On how many examples the losses before and after are measured."""

_NAMED = 5
"""How many lines a message names."""


@dataclass(frozen=True, slots=True)
class _Labelled:
    """An example as samples, and its number among them."""

    number: int
    chosen: TrainingSample
    rejected: TrainingSample | None

    @property
    def samples(self) -> tuple[TrainingSample, ...]:
        return (self.chosen,) if self.rejected is None else (self.chosen, self.rejected)

    @property
    def length(self) -> int:
        return max(len(sample.token_ids) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class _Scored:
    """What the network thinks of an example.

    Args:
        loss: ``[]``, with its gradient.
        nll: ``[]``, of the better reply, per token.
        margin: ``[]``, of a pair.
    """

    loss: Tensor
    nll: Tensor
    margin: Tensor | None


class WarmStart:
    """One warm start of a network; the network is trained in place.

    Args:
        network: What is trained; its adapter alone.
        base: Renders and tokenizes.
        settings: ``warm_start_*``, ``seed``, ``max_grad_norm``, ``micro_batch_segments``.
        max_sequence_tokens: Longer examples are left out.
    """

    def __init__(
        self,
        network: PolicyNetwork,
        base: BaseModel,
        settings: LearnerSettings,
        max_sequence_tokens: int,
    ) -> None:
        self._network = network
        self._base = base
        self._settings = settings
        self._max_sequence_tokens = max_sequence_tokens
        self._optimizer = torch.optim.Adam(
            network.adapter_parameters(), lr=settings.warm_start_learning_rate
        )
        self._should_stop: Callable[[], bool] = lambda: False

    def run(self, file: ExampleFile, hooks: WarmStartHooks) -> WarmStarted:
        """Train on all examples of a file.

        Raises:
            TrainingFileError: None of its examples can be used.
            LearnerError: The gradient stopped being finite.
            UpdateStoppedError: ``hooks.should_stop`` said so; the state was saved.
        """
        self._should_stop = hooks.should_stop
        examples = self._labelled(file)
        steps = list(self._steps(len(examples)))
        # 1. What the reference thinks, once; and how good the policy is now.
        reference = self._reference(examples)
        before = self._measure(examples, reference)
        # 2. Go on where an earlier run was interrupted.
        done = 0
        if hooks.resume is not None:
            done, before = self._load(hooks.resume)
            log.info("warm start goes on step=%d/%d", done, len(steps))
        # 3. Train.
        for number in range(done, len(steps)):
            try:
                loss = self._step([examples[i] for i in steps[number]], reference)
            except UpdateStoppedError:
                hooks.save(self._state(number, before))
                raise
            hooks.shown(number + 1, len(steps), loss)
            if (number + 1) % self._settings.warm_start_save_steps == 0:
                hooks.save(self._state(number + 1, before))
        # 4. How good it is now.
        after = self._measure(examples, reference)
        metrics = {
            **_changes(before, after),
            "warm_start/steps": float(len(steps)),
            "warm_start/examples": float(len(examples)),
            "warm_start/left_out": float(len(file.examples) - len(examples)),
        }
        return WarmStarted(metrics=metrics, gate=(_improved(before["loss"], after["loss"]),))

    def _labelled(self, file: ExampleFile) -> list[_Labelled]:
        labelled: list[_Labelled] = []
        left_out: list[str] = []
        for example in file.examples:
            try:
                made = self._label(len(labelled), example)
            except ModelError as error:
                raise TrainingFileError(f"{file.name} line {example.line}: {error}") from error
            if made.length > self._max_sequence_tokens:
                left_out.append(str(example.line))
            else:
                labelled.append(made)
        if left_out:
            log.warning(
                "examples left out of %s: %d are longer than %d tokens, the first in line %s",
                file.name, len(left_out), self._max_sequence_tokens, ", ".join(left_out[:_NAMED]),
            )  # fmt: skip
        if not labelled:
            raise TrainingFileError(
                f"every example of {file.name} is longer than {self._max_sequence_tokens} tokens: "
                "raise learner.max_sequence_tokens"
            )
        return labelled

    def _label(self, number: int, example: Example) -> _Labelled:
        messages = [{"role": role, "content": content} for role, content in example.messages]
        name = f"line {example.line}"
        chosen = reply_sample(self._base.chat, messages, example.chosen, name)
        if example.rejected is None:
            return _Labelled(number, chosen, None)
        rejected = reply_sample(self._base.chat, messages, example.rejected, name)
        if chosen.token_ids == rejected.token_ids:
            raise ModelError(
                "the chat template shows 'chosen' and 'rejected' alike: neither is preferred"
            )
        return _Labelled(number, chosen, rejected)

    def _steps(self, count: int) -> Iterator[list[int]]:
        """The examples of each step, in the order of the steps."""
        size = self._settings.warm_start_batch
        for epoch in range(self._settings.warm_start_epochs):
            generator = torch.Generator().manual_seed(self._settings.seed + epoch)
            order = torch.randperm(count, generator=generator).tolist()
            yield from (order[start : start + size] for start in range(0, count, size))

    # --- one step -------------------------------------------------------------------------

    def _step(self, examples: Sequence[_Labelled], reference: Mapping[int, Tensor]) -> float:
        total = 0.0
        try:
            for micro in self._micro_batches(examples):
                self._go_on_or_stop()
                scored = self._score(micro, reference)
                loss = torch.stack([one.loss for one in scored]).sum() / len(examples)
                loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
            parameters = self._network.adapter_parameters()
            norm = float(nn.utils.clip_grad_norm_(parameters, self._settings.max_grad_norm))
            if not torch.isfinite(torch.tensor(norm)):
                raise LearnerError(
                    f"the gradient of the warm start is not finite (norm {norm}); lower "
                    "learner.warm_start_learning_rate"
                )
            self._optimizer.step()
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        return total

    def _micro_batches(self, examples: Sequence[_Labelled]) -> Iterator[list[_Labelled]]:
        """Examples of like lengths together; both replies of a pair stay in one."""
        by_length = sorted(examples, key=lambda example: example.length)
        size = max(self._settings.micro_batch_segments // 2, 1)
        for start in range(0, len(by_length), size):
            yield by_length[start : start + size]

    def _score(
        self, examples: Sequence[_Labelled], reference: Mapping[int, Tensor]
    ) -> list[_Scored]:
        logprobs, mask = self._logprobs(examples)
        sums, nll = logprobs.sum(dim=1), reply_nll(logprobs, mask)
        scored: list[_Scored] = []
        row = 0
        for example in examples:
            if example.rejected is None:
                scored.append(_Scored(nll[row], nll[row].detach(), None))
            else:
                ours, theirs = sums[row : row + 2], reference[example.number]
                scored.append(self._score_pair(ours, theirs, nll[row]))
            row += len(example.samples)
        return scored

    def _score_pair(self, ours: Tensor, theirs: Tensor, nll: Tensor) -> _Scored:
        """A pair's loss from log-probabilities ``[chosen, rejected]`` of policy and reference."""
        settings = self._settings
        loss = preference_loss(
            ours[0], ours[1], theirs[0], theirs[1], beta=settings.warm_start_beta
        )
        margin = (ours[0] - ours[1] - theirs[0] + theirs[1]).detach()
        return _Scored(loss + settings.warm_start_chosen_weight * nll, nll.detach(), margin)

    def _logprobs(
        self, examples: Sequence[_Labelled], *, reference: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities ``[replies, tokens]`` of all replies, and which of them count."""
        samples = [sample for example in examples for sample in example.samples]
        scores = self._network.score(self._rows(samples), reference=reference)
        counts = torch.tensor([len(sample.positions) for sample in samples])
        mask = torch.arange(int(counts.max()))[None] < counts[:, None]
        mask = mask.to(scores.logprobs.device)
        return spread(scores.logprobs, mask), mask

    def _rows(self, samples: Sequence[TrainingSample]) -> list[TokenRow]:
        return self._network.with_states([self._network.row(sample) for sample in samples])

    # --- without gradients ----------------------------------------------------------------

    @torch.no_grad()
    def _reference(self, examples: Sequence[_Labelled]) -> dict[int, Tensor]:
        """Log-probabilities ``[chosen, rejected]`` of each pair under the reference."""
        pairs = [example for example in examples if example.rejected is not None]
        found: dict[int, Tensor] = {}
        for micro in self._micro_batches(pairs):
            self._go_on_or_stop()
            logprobs, _ = self._logprobs(micro, reference=True)
            sums = logprobs.sum(dim=1)
            for row, example in enumerate(micro):
                found[example.number] = sums[2 * row : 2 * row + 2].clone()
        return found

    @torch.no_grad()
    def _measure(
        self, examples: Sequence[_Labelled], reference: Mapping[int, Tensor]
    ) -> dict[str, float]:
        """Mean loss, log-probability per token of the better replies, and share of pairs with a
        margin above 0, over an even choice of the examples."""
        some = examples[:: -(-len(examples) // _MEASURED)]
        scored: list[_Scored] = []
        for micro in self._micro_batches(some):
            self._go_on_or_stop()
            scored.extend(self._score(micro, reference))
        measured = {
            "loss": _mean([one.loss for one in scored]),
            "chosen_logprob": -_mean([one.nll for one in scored]),
        }
        margins = [one.margin for one in scored if one.margin is not None]
        if margins:
            measured["margin"] = _mean(margins)
            measured["accuracy"] = _mean([(margin > 0).float() for margin in margins])
        return measured

    # --- going on -------------------------------------------------------------------------

    def _go_on_or_stop(self) -> None:
        if self._should_stop():
            raise UpdateStoppedError(
                "the warm start was interrupted by a stop; the next start goes on with it"
            )

    def _state(self, step: int, before: Mapping[str, float]) -> dict[str, Any]:
        return {
            "step": step,
            "before": dict(before),
            "adapter": self._network.adapter_tensors(),
            "optimizer": copy.deepcopy(self._optimizer.state_dict()),
        }

    def _load(self, state: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
        fill_adapter(self._network.model, state["adapter"])
        self._optimizer.load_state_dict(copy.deepcopy(dict(state["optimizer"])))
        return int(state["step"]), dict(state["before"])


def _mean(values: Sequence[Tensor]) -> float:
    return float(torch.stack(list(values)).mean())


def _changes(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {
        f"warm_start/{name}_{when}": value
        for when, measured in (("before", before), ("after", after))
        for name, value in measured.items()
    }


def _improved(before: float, after: float) -> GateDecision:
    return GateDecision(
        name="warm_start_loss",
        passed=after < before,
        value=after,
        threshold=before,
        detail=f"mean loss {before:.4g} before, {after:.4g} after",
    )


__all__ = ["WarmStart"]
