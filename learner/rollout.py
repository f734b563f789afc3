"""What is known about an update's samples before it trains: numbers, one per sampled token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from learner.batch import TrainingSample

UNKNOWN_VERSION = -1
"""Stands for the version of turns that do not say who wrote them."""

NO_PART = -1
"""Stands for the next part of a conversation that is not among the samples."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """Samples and what policies think of them; ``[samples, tokens]`` of sampled tokens alone.

    `of` fills in what the samples say; the rest begins as 0 and is filled in place.

    Args:
        loss_mask: Bool; False fills up the shorter samples.
        rewards: Each turn's reward on its last token.
        turn_index: Long, which turn a token belongs to, counted through all samples.
        turn_rewards: ``[turns]``.
        turn_versions: Long ``[turns]``, who wrote it; `UNKNOWN_VERSION` if nobody says.
        behaviour_logprobs: Of the policy that chose the token.
        given: Bool, `behaviour_logprobs` came with the turn.
        recomputed: Bool, it was computed here.
        old_logprobs: Of the policy before the update.
        reference_logprobs: Of the base model without adapter.
        teacher_logprobs: Of the teacher that has read the user's hint.
        taught: Bool, `teacher_logprobs` means something.
        old_values: Of the value head before the update.
        entropies: Of the policy before the update.
        final_values: ``[samples]``, the value after each sample's last token.
        terminal: Bool ``[samples]``, the conversation ended there.
        next_part: Long ``[samples]``, which sample the conversation goes on in; `NO_PART` if
            that is not among them.
    """

    loss_mask: Tensor
    rewards: Tensor
    turn_index: Tensor
    turn_rewards: Tensor
    turn_versions: Tensor
    behaviour_logprobs: Tensor
    given: Tensor
    recomputed: Tensor
    old_logprobs: Tensor
    reference_logprobs: Tensor
    teacher_logprobs: Tensor
    taught: Tensor
    old_values: Tensor
    entropies: Tensor
    final_values: Tensor
    terminal: Tensor
    next_part: Tensor

    @property
    def known(self) -> Tensor:
        """Bool: the behaviour policy's log-probability is known."""
        return self.given | self.recomputed

    @classmethod
    def of(cls, samples: Sequence[TrainingSample], device: torch.device) -> Rollout:
        """A rollout of these samples, not scored yet."""
        shape = (len(samples), max(len(sample.positions) for sample in samples))

        def matrix(rows: Sequence[Sequence[float]]) -> Tensor:
            out = torch.zeros(shape, dtype=torch.float32)
            for index, row in enumerate(rows):
                out[index, : len(row)] = torch.tensor(row, dtype=torch.float32)
            return out.to(device)

        def empty() -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        turns = [turn for sample in samples for turn in sample.turns]
        versions = [
            UNKNOWN_VERSION if turn.policy_version is None else turn.policy_version
            for turn in turns
        ]
        return cls(
            loss_mask=matrix([[1.0] * len(s.positions) for s in samples]).bool(),
            rewards=matrix([s.rewards for s in samples]),
            turn_index=_turn_index(samples, shape).to(device),
            turn_rewards=torch.tensor([turn.reward for turn in turns], device=device),
            turn_versions=torch.tensor(versions, device=device),
            behaviour_logprobs=matrix([s.behaviour_logprobs for s in samples]),
            given=matrix([s.behaviour_mask for s in samples]).bool(),
            recomputed=empty().bool(),
            old_logprobs=empty(),
            reference_logprobs=empty(),
            teacher_logprobs=empty(),
            taught=empty().bool(),
            old_values=empty(),
            entropies=empty(),
            final_values=torch.zeros(len(samples), device=device),
            terminal=torch.tensor([s.terminal for s in samples], device=device),
            next_part=torch.tensor(_next_parts(samples), device=device),
        )


def spread(flat: Tensor, mask: Tensor) -> Tensor:
    """``[chosen of all rows]`` laid out as ``[rows, tokens]``, 0 where the mask is False."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)


@dataclass(frozen=True, slots=True)
class TeacherRow:
    """One reply behind its teacher's prompt, and where it stands in the rollout.

    Args:
        sample: Row in the rollout.
        columns: Its tokens in that row.
        token_ids: Teacher's prompt and reply.
        start: Position of the reply's first token in `token_ids`.
        temperature: Of the reply.
    """

    sample: int
    columns: slice
    token_ids: tuple[int, ...]
    start: int
    temperature: float


def teacher_rows(samples: Sequence[TrainingSample]) -> list[TeacherRow]:
    """A row for each turn that has a teacher's prompt, shortest first."""
    rows: list[TeacherRow] = []
    for index, sample in enumerate(samples):
        column = 0
        for turn in sample.turns:
            length = turn.end - turn.start
            if turn.teacher_prompt is not None:
                ids = (*turn.teacher_prompt, *sample.token_ids[turn.start : turn.end])
                columns = slice(column, column + length)
                start = len(turn.teacher_prompt)
                rows.append(TeacherRow(index, columns, ids, start, turn.temperature))
            column += length
    return sorted(rows, key=lambda row: (len(row.token_ids), row.sample, row.columns.start))


def missing_by_version(samples: Sequence[TrainingSample], rollout: Rollout) -> dict[int, Tensor]:
    """For each version, which tokens it chose whose log-probability did not come along."""
    missing: dict[int, Tensor] = {}
    for index, column, version in _missing_turns(samples):
        if version not in missing:
            missing[version] = torch.zeros_like(rollout.loss_mask)
        missing[version][index, column] = True
    return missing


def _missing_turns(samples: Sequence[TrainingSample]) -> Iterator[tuple[int, slice, int]]:
    for index, sample in enumerate(samples):
        column = 0
        for turn in sample.turns:
            length = turn.end - turn.start
            if turn.behaviour_logprobs is None and turn.policy_version is not None:
                yield index, slice(column, column + length), turn.policy_version
            column += length


def _next_parts(samples: Sequence[TrainingSample]) -> list[int]:
    """Parts of one segment follow one another."""
    pairs = enumerate(pairwise(samples))
    found = [index + 1 if _goes_on(one, other) else NO_PART for index, (one, other) in pairs]
    return [*found, NO_PART]


def _goes_on(one: TrainingSample, other: TrainingSample) -> bool:
    same = (one.segment_id, one.revision) == (other.segment_id, other.revision)
    return same and not one.terminal and one.sample_id != other.sample_id


def _turn_index(samples: Sequence[TrainingSample], shape: tuple[int, int]) -> Tensor:
    index = torch.zeros(shape, dtype=torch.long)
    number = 0
    for row, sample in enumerate(samples):
        column = 0
        for turn in sample.turns:
            length = turn.end - turn.start
            index[row, column : column + length] = number
            column, number = column + length, number + 1
    return index


__all__ = [
    "NO_PART",
    "Rollout",
    "TeacherRow",
    "UNKNOWN_VERSION",
    "missing_by_version",
    "spread",
    "teacher_rows",
]
