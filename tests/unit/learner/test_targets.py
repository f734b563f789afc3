from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from learner.batch import TrainingSample
from learner.rollout import Rollout
from learner.targets import RECORDED_GAP, make_targets, recorded_gap, rollout_metrics
from streams.settings import LearnerSettings
from tests.unit.learner.builders import conversation, sample

PLAIN = LearnerSettings(whiten_advantages=False, kl_coef=0.0, gamma=0.9)
TURNS = [([10, 11], [30, 31], 0.5), ([12], [32], -1.0), ([13, 14], [33, 34, 35], 1.0)]
VALUES = [0.1, -0.2, 0.3, 0.4, -0.5, 0.6]
"""Of the states in which the six tokens were chosen."""
AFTER = 7.0
"""Of the state after the last one."""


def parts(*, terminal: bool, revision: int = 0) -> list[TrainingSample]:
    """The conversation cut after its first turn; `revision` is the second part's."""
    first = conversation("s#1", TURNS[:1], terminal=False)
    rest = conversation("s#2", TURNS[1:], terminal=terminal)
    return [
        dataclasses.replace(first, segment_id="s"),
        dataclasses.replace(rest, segment_id="s", revision=revision),
    ]


def advantages(some: list[TrainingSample], gae_lambda: float) -> list[float]:
    rollout = Rollout.of(some, torch.device("cpu"))
    rollout.old_values.masked_scatter_(rollout.loss_mask, torch.tensor(VALUES))
    # Of the first of two parts this is another state than the one its next token was chosen in.
    rollout.final_values.fill_(AFTER)
    targets = make_targets(rollout, PLAIN.model_copy(update={"gae_lambda": gae_lambda}))
    found: list[float] = targets.advantages[rollout.loss_mask].tolist()
    return found


@pytest.mark.parametrize("terminal", [True, False])
def test_a_part_bootstraps_from_the_state_the_next_part_begins_in(terminal: bool) -> None:
    whole = advantages([conversation("s", TURNS, terminal=terminal)], 0.0)
    # delta = r + gamma V' - V, by hand.
    last = 1.0 + (0.0 if terminal else 0.9 * AFTER) - 0.6
    expected = [-0.18 - 0.1, 0.5 + 0.27 + 0.2, -1.0 + 0.36 - 0.3, -0.45 - 0.4, 0.54 + 0.5, last]
    assert whole == pytest.approx(expected, abs=1e-6)
    assert advantages(parts(terminal=terminal), 0.0) == pytest.approx(expected, abs=1e-6)


def test_what_does_not_follow_lends_no_value() -> None:
    first, second = parts(terminal=True)
    cut = 0.5 + 0.9 * AFTER + 0.2
    # Another revision, another segment, another order.
    for some in (
        parts(terminal=True, revision=1),
        [first, dataclasses.replace(second, segment_id="other")],
    ):
        assert advantages(some, 0.0)[1] == pytest.approx(cut, abs=1e-6)
    ended = dataclasses.replace(first, terminal=True)
    assert advantages([ended, second], 0.0)[1] == pytest.approx(0.5 + 0.2, abs=1e-6)


def _rollout(versions: tuple[int | None, ...], gaps: tuple[float, ...]) -> Rollout:
    some = [
        sample(
            str(number), [10], [30, 31], 1.0, policy_version=version,
            behaviour_logprobs=(-1.0 - gap, -1.0 + 3 * gap),
        )
        for number, (version, gap) in enumerate(zip(versions, gaps, strict=True))
    ]  # fmt: skip
    rollout = Rollout.of([*some, sample("none", [10], [30], 1.0, policy_version=3)], _cpu())
    rollout.old_logprobs.copy_(torch.where(rollout.loss_mask, torch.tensor(-1.0), 0.0))
    return rollout


def _cpu() -> torch.device:
    return torch.device("cpu")


def test_the_recorded_gap_is_of_the_version_in_training_alone() -> None:
    rollout = _rollout((3, 2, None, 3), (0.1, 9.0, 9.0, 0.3))
    # Means of .1, .3 and of .3, .9.
    assert recorded_gap(rollout, 3) == {RECORDED_GAP: pytest.approx(0.4, abs=1e-6)}
    assert recorded_gap(rollout, 5) == {}
    assert recorded_gap(rollout, None) == {}


def test_log_probabilities_of_another_temperature_show() -> None:
    draw = torch.Generator().manual_seed(0)
    logits: Tensor = 3 * torch.randn(64, 50, generator=draw)
    at_one, at_some = (torch.log_softmax(logits / t, dim=1)[:, 0] for t in (1.0, 0.7))
    ours = sample(
        "raw", [10], range(64), 1.0, temperature=0.7, policy_version=0,
        behaviour_logprobs=tuple(at_one.tolist()),
    )  # fmt: skip
    rollout = Rollout.of([ours], _cpu())
    rollout.old_logprobs.copy_(at_some[None])
    expected = float((at_some - at_one).abs().mean())
    assert recorded_gap(rollout, 0)[RECORDED_GAP] == pytest.approx(expected, abs=1e-5)
    assert expected > 0.1


@pytest.mark.parametrize(("cap", "share"), [(1.0, 2 / 9), (1.5, 1 / 9), (0.5, 8 / 9)])
def test_weights_at_the_cap_that_were_not_cut_do_not_count_as_capped(
    cap: float, share: float
) -> None:
    # Fresh tokens weigh exactly 1, and so does the one of which nothing is known.
    rollout = _rollout((3, 3, 3, 3), (0.0, 0.0, 0.0, 0.0))
    rollout.behaviour_logprobs[0, 0] = -1.3
    rollout.behaviour_logprobs[1, 0] = -1.7
    settings = PLAIN.model_copy(update={"importance_weight_cap": cap})
    metrics = rollout_metrics(rollout, make_targets(rollout, settings), settings)
    assert metrics["stale/capped_share"] == pytest.approx(share, abs=1e-6)
