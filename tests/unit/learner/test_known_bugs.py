"""Bugs that other trainers had, each as a test that ours does not."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from learner import tiny
from learner.batch import BuildRules, build_samples
from learner.chat import Chat
from learner.model import load_base
from learner.ppo.kl import estimate_kl
from learner.ppo.losses import importance_weights, policy_loss, value_loss
from learner.ppo.masks import aggregate
from learner.update import PpoUpdater
from tests.unit.learner.builders import message, sample, scored, step
from tests.unit.learner.test_update import (
    PLAIN,
    TINY,
    gradients,
    logprobs_of,
    samples,
    shake,
    updater,
)

END = 2


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_token_mean_does_not_grow_with_the_number_of_samples() -> None:
    """verl 5625: the mean over tokens was scaled by how many samples there were."""
    changes: dict[str, Any] = {"whiten_advantages": False, "micro_batch_segments": 12}

    def of(copies: int) -> list[Tensor]:
        learner = updater(**changes)
        shake(learner)
        return gradients(learner, samples() * copies)

    for once, thrice in zip(of(1), of(3), strict=True):
        torch.testing.assert_close(once, thrice, atol=1e-6, rtol=1e-4)


def test_a_padding_token_that_is_the_end_of_turn_hides_no_end() -> None:
    """TRL 5303: with pad = eos, masks made of ``ids != pad`` lost every real end."""
    tokenizer = tiny.build_tokenizer()
    tokenizer.pad_token = "<|im_end|>"
    chat = Chat(tokenizer)
    rules = BuildRules(max_sequence_tokens=99)
    segment = scored(step("ab", message("Hi"), token_ids=(40, 41, END)), step("c", message("Go")))
    (first, second) = build_samples(
        segment, chat, tokenizer_digest="", template_digest="", rules=rules
    ).samples
    assert first.token_ids[-1] == second.token_ids[-1] == END
    assert first.loss_mask[-1]
    assert second.loss_mask[-1]

    def at(pad: str) -> list[Tensor]:
        base = load_base(TINY, Path("unused"))
        base.chat.tokenizer.pad_token = pad
        learner = PpoUpdater(base, PLAIN, TINY)
        shake(learner)
        some = [first, sample("short", [10], [30, END], -1.0)]
        return gradients(learner, some)

    pads = [at(pad) for pad in ("<|endoftext|>", "<|im_end|>")]
    assert all(torch.equal(left, right) for left, right in zip(*pads, strict=True))
    assert any(tensor.any() for tensor in pads[0])


def test_padding_is_not_counted() -> None:
    """verl 3805: padded positions counted in denominators."""
    draw = torch.Generator().manual_seed(0)
    new, old, gain = (torch.randn(2, 4, generator=draw, dtype=torch.float64) for _ in range(3))
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])

    def mean(extra: int) -> tuple[float, float]:
        def wide(tensor: Tensor) -> Tensor:
            fill = torch.full((2, extra), 7.0, dtype=tensor.dtype)
            return torch.cat([tensor, fill.to(tensor.dtype)], dim=1)

        wider = torch.cat([mask, torch.zeros(2, extra, dtype=torch.bool)], dim=1)
        policy = policy_loss(wide(new), wide(old), wide(gain), wider, clip_low=0.2, clip_high=0.2)
        value = value_loss(wide(new), wide(old), wide(gain), wider, value_clip=0.2)
        return float(aggregate(policy.losses, wider)), float(aggregate(value.losses, wider))

    assert mean(0) == pytest.approx(mean(9), abs=1e-12)
    by_hand = sum(
        float(-gain[row, column] * (new - old)[row, column].exp().clamp(0.8, 1.2))
        if float(gain[row, column]) * (float((new - old)[row, column].exp()) - 1) > 0
        and not 0.8 <= float((new - old)[row, column].exp()) <= 1.2
        else float(-gain[row, column] * (new - old)[row, column].exp())
        for row, column in ((0, 0), (0, 1), (0, 2), (1, 0))
    )
    assert mean(5)[0] == pytest.approx(by_hand / 4, abs=1e-12)


def test_the_first_ratio_is_one_whatever_the_lengths_and_temperatures() -> None:
    """TRL 454: dropout and padding made the first ratio differ from 1."""
    learner = updater(micro_batch_segments=4, minibatches=2)
    shake(learner)
    mixed = [*samples(temperature=0.4), *samples(temperature=1.7)]
    assert learner.update(mixed).metrics["losses/initial_ratio_error"] == 0.0


def test_every_log_probability_is_at_the_temperature_of_its_turn(tmp_path: Path) -> None:
    """OpenRLHF 853: the temperature was missing in some log-probabilities."""
    one = sample("x", range(10, 20), range(30, 35), 1.0, temperature=0.3, policy_version=3)
    untrained = updater().update([one]).metrics
    # Untrained, policy and reference are the same network: any other temperature would show.
    assert untrained["kl/reference_k1"] == 0.0
    assert untrained["kl/reference_k3"] == 0.0
    behaviour = updater()
    shake(behaviour, seed=7)
    behaviour.save_adapter(tmp_path)
    given = tuple(logprobs_of(behaviour, one).tolist())
    learner = updater(importance_weight_cap=1e6)
    shake(learner, seed=7)
    recomputed = learner.update([one], load_version=lambda _: tmp_path).metrics
    assert recomputed["stale/share_recomputed_logprobs"] == 1.0
    assert recomputed["stale/importance_weight"] == pytest.approx(1.0, abs=1e-6)
    learner = updater(importance_weight_cap=1e6)
    shake(learner, seed=7)
    recorded = sample(
        "x", range(10, 20), range(30, 35), 1.0, temperature=0.3, behaviour_logprobs=given
    )
    metrics = learner.update([recorded]).metrics
    assert metrics["stale/importance_weight"] == pytest.approx(1.0, abs=1e-6)


def test_the_reference_of_a_resumed_run_is_that_of_the_first() -> None:
    """TRL 1340: after resuming from an adapter the reference was another one.

    Ours is the bare base model always: the penalty goes on from where it was.
    """
    straight = updater(kl_coef=0.1)
    straight.update(samples())
    resumed = updater(kl_coef=0.1)
    resumed.load_state_dict(straight.state_dict())
    expected = straight.update(samples()).metrics
    found = resumed.update(samples()).metrics
    assert found["kl/reference_k3"] == expected["kl/reference_k3"] > 1e-6


def test_sampled_ids_that_are_no_text_survive() -> None:
    """TRL 5224: decoding and encoding again changed ids.

    Single bytes of a character decode to a replacement character and never come back.
    """
    chat = Chat(tiny.build_tokenizer())
    halves = chat.encode("é")
    assert len(halves) == 2
    ids = (halves[1], halves[0], halves[0], END)
    assert chat.encode(chat.decode(ids)) != ids[:-1]
    segment = scored(step(chat.decode(ids), message("Hi"), token_ids=ids))
    (one,) = build_samples(
        segment,
        chat,
        tokenizer_digest="",
        template_digest="",
        rules=BuildRules(max_sequence_tokens=99),
    ).samples
    assert one.token_ids[-4:] == ids


def test_resuming_fills_the_adapter_and_wraps_nothing() -> None:
    """LeRobot 3459: a resumed model was wrapped once more, its weights thrown away."""
    straight = updater()
    straight.update(samples())
    buffer = io.BytesIO()
    torch.save(straight.state_dict(), buffer)
    buffer.seek(0)
    resumed = updater()
    names = [name for name, _ in resumed.network.model.named_parameters()]
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    assert [name for name, _ in resumed.network.model.named_parameters()] == names
    assert list(resumed.network.model.peft_config) == ["default"]
    assert not any(name.count("base_model.model.base_model") for name in names)
    for one in samples():
        assert torch.equal(logprobs_of(resumed, one), logprobs_of(straight, one))
    assert not torch.equal(logprobs_of(resumed, samples()[0]), logprobs_of(updater(), samples()[0]))


@pytest.mark.parametrize("fills", [(1.0, 0.0), (0.0, -100.0), (math.nan, 1.0), (1e9, -math.inf)])
def test_what_stands_on_masked_tokens_matters_nowhere(fills: tuple[float, float]) -> None:
    """Flash-RL 19: masked log-probabilities were 1 in one tensor and 0 in another."""
    mask = torch.tensor([[True, False, True]])
    new, old = torch.tensor([[-1.0, 0.0, -2.0]]), torch.tensor([[-1.5, 0.0, -1.8]])
    gain = torch.tensor([[1.0, 1.0, -1.0]])
    other_new, other_old = new.clone(), old.clone()
    other_new[0, 1], other_old[0, 1] = fills

    def everything(left: Tensor, right: Tensor) -> list[Tensor]:
        policy = policy_loss(left, right, gain, mask, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
        return [
            policy.losses,
            policy.ratio,
            aggregate(policy.losses, mask),
            importance_weights(left, right, mask, cap=2.0),
            estimate_kl(left, right, mask, "k1"),
            estimate_kl(left, right, mask, "k3"),
        ]

    for ours, theirs in zip(everything(new, old), everything(other_new, other_old), strict=True):
        assert torch.equal(ours, theirs)
