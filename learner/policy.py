"""The network that is trained: one backbone, a LoRA adapter, a value head.

With the adapter it is the policy in training, without (adapter off) the reference. What the
policy was before an update is kept as numbers, not as a copy.

If the first adapted layer is k > 0, the layers below k never change: their output is
computed once per sample (`PolicyNetwork.frozen_states`) and every later pass begins there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from peft import get_peft_model_state_dict
from torch import Tensor, nn

from learner.adapters import attach_lora
from learner.batch import TrainingSample
from learner.model import BaseModel
from learner.ppo.logprobs import linear_logprobs
from streams.errors import ModelError
from streams.settings import LearnerSettings, ModelSettings

log = logging.getLogger(__name__)

PaddingSide = Literal["left", "right"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRow:
    """A sample as tensors.

    Args:
        token_ids: ``[time]``.
        positions: ``[chosen]``, where the policy's tokens stand, ascending, none at 0.
        temperatures: ``[chosen]``, at which they were drawn.
        states: ``[time, width]``, what enters the first adapted layer; None if passes start
            from the token ids.
    """

    token_ids: Tensor
    positions: Tensor
    temperatures: Tensor
    states: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """What the network says about the chosen tokens of some rows, one row after the other.

    Args:
        logprobs: ``[chosen of all rows]``, float32, at each token's temperature.
        entropies: ``[chosen of all rows]``, float32, nats, of the same distributions.
        values: ``[chosen of all rows]``, float32, V of the state in which each was chosen.
        final_values: ``[rows]``, float32, V after each row's last token.
    """

    logprobs: Tensor
    entropies: Tensor
    values: Tensor
    final_values: Tensor


class PolicyNetwork:
    """Adapter and value head on a base model, which is changed in place.

    Passes always run in eval mode and without dropout: the same weights give the same
    numbers. Not for use by several threads.

    Args:
        base: The base model, without adapters; it belongs to this network from now on.
        model_settings: Shape of the adapter.
        settings: ``seed`` draws the adapter's first weights; ``detach_value``,
            ``gradient_checkpointing``, ``compile_layers`` and ``logprob_chunk_tokens`` as the
            settings say.

    Raises:
        ModelError: The base model's log-probabilities are not those of its last hidden state
            times its output layer, so that they could not be computed in chunks.
    """

    def __init__(
        self, base: BaseModel, model_settings: ModelSettings, settings: LearnerSettings
    ) -> None:
        self._base = base
        self._chunk_tokens = settings.logprob_chunk_tokens
        self._entropy_gradient = settings.ent_coef > 0.0
        self._detach_value = settings.detach_value
        causal = base.model
        self._backbone = getattr(causal, causal.base_model_prefix)
        self._head = causal.get_output_embeddings()
        self._blocks = _decoder_blocks(causal)
        self.model = attach_lora(causal, model_settings, seed=settings.seed)
        if settings.gradient_checkpointing:
            _enable_checkpointing(causal)
        if settings.compile_layers:
            for block in self._blocks:
                block.compile(dynamic=True)  # rows differ in number and length
        self.value_head = nn.Linear(self._head.weight.shape[1], 1, device=base.device)
        # Zero values at first: an update begins with what it sees, not with noise.
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self._first = 0
        self._first = self._verified_start(model_settings.lora_first_layer)

    @property
    def device(self) -> torch.device:
        """Where the network computes."""
        return self._base.device

    @property
    def shares_frozen_layers(self) -> bool:
        """Whether `frozen_states` saves the layers below the adapter."""
        return self._first > 0

    def spread_frozen_weights(self) -> None:
        """Keep a part of each decoder block's frozen weights only, as every other process of
        ``torch.distributed``'s default group does; a block's are gathered while it runs.

        From now on all processes must make the same passes at the same time. The adapter and
        the value head stay whole in each.
        """
        from torch.distributed.fsdp import fully_shard  # takes a second that few need

        for block in self._blocks:
            trained = {weight for weight in block.parameters() if weight.requires_grad}
            fully_shard(block, ignored_params=trained)

    def adapter_parameters(self) -> list[nn.Parameter]:
        """The adapter's weights, in a fixed order."""
        return [p for name, p in self.model.named_parameters() if "lora_" in name]

    def row(self, sample: TrainingSample) -> TokenRow:
        """A sample's tensors on the network's device, without `states`."""
        return TokenRow(
            token_ids=torch.tensor(sample.token_ids, device=self.device),
            positions=torch.tensor(sample.positions, device=self.device),
            temperatures=torch.tensor(sample.temperatures, dtype=torch.float32, device=self.device),
        )

    @torch.no_grad()
    def frozen_states(self, rows: Sequence[TokenRow]) -> list[Tensor]:
        """What enters the first adapted layer, ``[time, width]`` for each of `rows`.

        Only to be called if `shares_frozen_layers`.
        """
        padded = _pad(rows, self._base.chat.pad_token_id, "right")
        with self._only_blocks(range(self._first)) as tap:
            self._run(padded)
        return [tap.seen[index, : len(row.token_ids)].clone() for index, row in enumerate(rows)]

    def with_states(self, rows: Sequence[TokenRow]) -> list[TokenRow]:
        """The rows with `frozen_states`, where passes can begin there."""
        if not self.shares_frozen_layers:
            return list(rows)
        states = self.frozen_states(rows)
        return [replace(row, states=state) for row, state in zip(rows, states, strict=True)]

    def adapter_tensors(self) -> dict[str, Tensor]:
        """The adapter's weights by name, copied."""
        tensors = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def score(
        self,
        rows: Sequence[TokenRow],
        *,
        reference: bool = False,
        padding_side: PaddingSide = "right",
    ) -> Scores:
        """Score the chosen tokens of `rows`, with gradients unless they are switched off.

        Args:
            rows: All with `states`, or all without.
            reference: Score with the adapter off. Values mean nothing then.
            padding_side: Where shorter rows are filled up; results do not depend on it.
        """
        off = self.model.disable_adapter() if reference else contextlib.nullcontext()
        with off:
            padded = _pad(rows, self._base.chat.pad_token_id, padding_side)
            hidden = self._last_hidden(padded)
        # The state in which a token was chosen is that of the token before it.
        chosen = torch.cat(
            [hidden[i, padded.starts[i] + row.positions - 1] for i, row in enumerate(rows)]
        )
        final = torch.stack(
            [hidden[i, padded.starts[i] + len(row.token_ids) - 1] for i, row in enumerate(rows)]
        )
        scores = linear_logprobs(
            chosen,
            self._head.weight,
            torch.cat([row.token_ids[row.positions] for row in rows]),
            torch.cat([row.temperatures for row in rows]),
            bias=self._head.bias,
            chunk_tokens=self._chunk_tokens,
            entropy_gradient=self._entropy_gradient,
        )
        return Scores(
            logprobs=scores.logprobs,
            entropies=scores.entropies,
            values=self._values(chosen),
            final_values=self._values(final),
        )

    def _values(self, hidden: Tensor) -> Tensor:
        states = hidden.detach() if self._detach_value else hidden
        values: Tensor = self.value_head(states.float())
        return values[:, 0]

    def _last_hidden(self, padded: _Padded) -> Tensor:
        """``[rows, time, width]``, of the last layer and normalised."""
        if padded.states is None:
            return self._run(padded)
        with self._only_blocks(range(self._first, len(self._blocks))):
            return self._run(padded)

    def _run(self, padded: _Padded) -> Tensor:
        inputs = (
            {"input_ids": padded.token_ids}
            if padded.states is None
            else {"inputs_embeds": padded.states}
        )
        with self._base.autocast():
            output = self._backbone(
                **inputs,
                attention_mask=padded.attention_mask,
                position_ids=padded.position_ids,
                use_cache=False,
            )
        hidden: Tensor = output.last_hidden_state
        return hidden

    @contextlib.contextmanager
    def _only_blocks(self, wanted: range) -> Iterator[_Tap]:
        """Let the other decoder blocks pass on what they get; the tap after the last wanted
        one remembers it."""
        blocks = list(self._blocks)
        tap = _Tap()
        try:
            for index in range(len(blocks)):
                if index not in wanted:
                    self._blocks[index] = tap if index == wanted.stop else _Passing()
            yield tap
        finally:
            for index, block in enumerate(blocks):
                self._blocks[index] = block

    @torch.no_grad()
    def _verified_start(self, first: int) -> int:
        """The first block that passes need to run; 0 if the backbone cannot be divided."""
        token_ids = torch.arange(min(8, self._head.weight.shape[0]), device=self.device)
        row = TokenRow(
            token_ids=token_ids,
            positions=token_ids[1:],
            temperatures=torch.ones(len(token_ids) - 1, device=self.device),
        )
        hidden = self._last_hidden(_pad([row], 0, "right"))
        with self._base.autocast():
            expected = self._base.model(input_ids=token_ids[None], use_cache=False).logits
            logits = nn.functional.linear(hidden, self._head.weight, self._head.bias)
        if not _alike(logits, expected):
            raise ModelError(
                f"the base model {self._base.model_id} does more after its last layer than "
                "apply its output layer; the learner cannot train it"
            )
        if first == 0:
            return 0
        self._first = first
        # Architectures differ in what they do with states handed in, and may raise anything.
        with contextlib.suppress(Exception):
            divided = replace(row, states=self.frozen_states([row])[0])
            if _alike(self._last_hidden(_pad([divided], 0, "right")), hidden):
                return first
        log.warning("the layers below the adapter cannot be shared first_layer=%d", first)
        return 0


class _Passing(nn.Module):
    """Stands in for a decoder block and does nothing."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


class _Tap(_Passing):
    """The same, but remembers what went through."""

    seen: Tensor

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        self.seen = hidden_states
        return hidden_states


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Padded:
    token_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    starts: list[int]
    states: Tensor | None


def _pad(rows: Sequence[TokenRow], pad_token_id: int, side: PaddingSide) -> _Padded:
    """Rows in one rectangle; a token's position counts from its own row's beginning."""
    longest = max(len(row.token_ids) for row in rows)
    starts = [longest - len(row.token_ids) if side == "left" else 0 for row in rows]
    token_ids = rows[0].token_ids.new_full((len(rows), longest), pad_token_id)
    mask = torch.zeros_like(token_ids)
    first_states = rows[0].states
    states = (
        None
        if first_states is None
        else first_states.new_zeros(len(rows), longest, first_states.shape[1])
    )
    for index, row in enumerate(rows):
        part = slice(starts[index], starts[index] + len(row.token_ids))
        token_ids[index, part] = row.token_ids
        mask[index, part] = 1
        if states is not None and row.states is not None:
            states[index, part] = row.states
    return _Padded(
        token_ids=token_ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0),
        starts=starts,
        states=states,
    )


def _decoder_blocks(causal: Any) -> nn.ModuleList:
    count = int(causal.config.get_text_config().num_hidden_layers)
    for module in causal.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ModelError("the base model has no list of decoder layers; the learner cannot train it")


def _enable_checkpointing(causal: Any) -> None:
    """Keep the input of each block and compute the rest again in the backward pass."""
    causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Blocks checkpoint in training mode only; dropout is 0 in the whole model, so that mode
    # changes nothing else.
    causal.train()


def _alike(tensor: Tensor, expected: Tensor) -> bool:
    """Equal but for rounding, at either precision."""
    scale = float(expected.abs().max())
    return torch.allclose(tensor.float(), expected.float(), rtol=0.02, atol=0.005 * scale)


__all__ = ["PaddingSide", "PolicyNetwork", "Scores", "TokenRow"]
