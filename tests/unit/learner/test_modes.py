"""The modes in one loop: what each teaches, and that a blend of one is that one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from learner.batch import TrainingSample
from learner.model import load_base
from learner.rollout import Rollout, teacher_rows
from learner.targets import make_targets
from learner.update import PpoUpdater
from streams.errors import SettingsError, UpdateStoppedError
from streams.settings import LearnerSettings, ModelSettings, load_settings
from tests.unit.learner.builders import conversation, sample
from tests.unit.learner.test_update import (
    PLAIN,
    SHARED,
    TINY,
    equal_states,
    gradients,
    shake,
    total,
)

MODES = ("ppo", "grpo", "opd", "hybrid")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def updater(mode: str, model_settings: ModelSettings = TINY, **changes: Any) -> PpoUpdater:
    settings = PLAIN.model_copy(update={"mode": mode, **changes})
    return PpoUpdater(load_base(model_settings, Path("unused")), settings, model_settings)


def taught(one: TrainingSample, hint: Sequence[int]) -> TrainingSample:
    """The sample with a teacher that has read `hint` before each prompt."""
    turns = tuple(
        replace(turn, teacher_prompt=(*hint, *one.token_ids[: turn.start])) for turn in one.turns
    )
    return replace(one, turns=turns)


def samples() -> list[TrainingSample]:
    """Five conversations; three of them hold a hint, one has no verdict."""
    return [
        taught(sample("a", range(10, 20), range(30, 35), 1.0), [90, 91]),
        sample("b", range(12, 16), range(40, 49), -1.0),
        taught(
            conversation(
                "d",
                [(range(20, 24), [60, 61], 1.0), ([25, 26, 27], [62], 0.0), ([28], [63], -0.5)],
            ),
            [92],
        ),
        sample("e", range(13, 20), range(70, 73), 0.0, terminal=False),
        taught(sample("f", [14], [80, 81, 82], -1.0, temperature=0.5), [93] * 5),
    ]


def full_logprobs(learner: PpoUpdater, ids: Sequence[int], temperature: float = 1.0) -> Tensor:
    """Log-probabilities of every next token, by the whole model."""
    row = torch.tensor([list(ids)])
    return torch.log_softmax(learner.network.model(input_ids=row).logits[0] / temperature, dim=1)


# --- what a mode aims at ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "weights", "same"),
    [
        ("hybrid", (1.0, 0.0, 0.0), "ppo"),
        ("hybrid", (0.0, 1.0, 0.0), "grpo"),
        ("hybrid", (0.0, 0.0, 1.0), "opd"),
    ],
)
def test_a_hybrid_of_one_is_that_mode_bit_for_bit(
    mode: str, weights: tuple[float, float, float], same: str
) -> None:
    names = ("hybrid_ppo_weight", "hybrid_grpo_weight", "hybrid_opd_weight")
    common: dict[str, Any] = {"epochs": 2, "minibatches": 2, "kl_coef": 0.1}
    named: dict[str, Any] = dict(zip(names, weights, strict=True))
    blended = updater(mode, **named, **common)
    pure = updater(same, **common)
    shake(blended)
    shake(pure)
    for _ in range(2):
        ours, theirs = blended.update(samples()), pure.update(samples())
        assert ours.metrics == theirs.metrics
    assert equal_states(blended.state_dict(), pure.state_dict())


def test_a_hybrid_adds_what_its_parts_say() -> None:
    def advantages(mode: str, **changes: Any) -> Tensor:
        learner = updater(mode, kl_coef=0.1, **changes)
        shake(learner)
        some = samples()
        rows = learner._rows(some, [[0, 1], [2, 3], [4]])
        rollout = learner._score_all(some, rows, [[0, 1], [2, 3], [4]], None, None)
        return make_targets(rollout, learner._settings).advantages

    weights: dict[str, Any] = {
        "hybrid_ppo_weight": 0.5,
        "hybrid_grpo_weight": 2.0,
        "hybrid_opd_weight": 0.25,
    }
    got = advantages("hybrid", **weights)
    expected = 0.5 * advantages("ppo") + 2 * advantages("grpo") + 0.25 * advantages("opd")
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    assert float(got.abs().max()) > 0.1


@pytest.mark.parametrize("mode", ["grpo", "opd"])
def test_modes_without_a_critic_leave_the_value_head_alone(mode: str) -> None:
    learner = updater(mode, epochs=2)
    metrics = learner.update(samples()).metrics
    assert not any(p.any() for p in learner.network.value_head.parameters())
    assert not {name for name in metrics if "value_loss" in name or "explained" in name}


# --- grpo -------------------------------------------------------------------------------------


def test_the_grpo_gradient_is_that_of_the_textbook_loss() -> None:
    learner = updater("grpo", vf_coef=0.0)
    shake(learner)
    some = [
        sample("x", [10, 11], [30, 31], 0.3, temperature=0.5),
        sample("y", [12], [40], -2.0),
        sample("z", [13], [50, 51, 52], 0.0),
    ]
    got = gradients(learner, some)[: len(learner.network.adapter_parameters())]
    # Verdicts 1 and -1: mean 0, variance 2. The third has none, but its tokens count.
    loss = torch.zeros(())
    for one, temperature, advantage in ((some[0], 0.5, 2**-0.5), (some[1], 1.0, -(2**-0.5))):
        logprobs = full_logprobs(learner, one.token_ids, temperature)
        for position in one.positions:
            loss = loss - advantage * logprobs[position - 1, one.token_ids[position]] / 6
    expected = torch.autograd.grad(loss, learner.network.adapter_parameters())
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-3)


def test_grpo_makes_good_replies_likelier_than_bad_ones() -> None:
    learner = updater("grpo", epochs=3)
    good = sample("good", range(10, 20), range(30, 35), 0.1)
    bad = sample("bad", range(10, 20), range(60, 65), -1.0)
    before = total(learner, good), total(learner, bad)
    metrics = learner.update([good, bad]).metrics
    assert total(learner, good) > before[0] + 0.1
    assert total(learner, bad) < before[1] - 0.1
    assert (metrics["grpo/judged_share"], metrics["grpo/good_share"]) == (1.0, 0.5)


def test_replies_judged_alike_teach_nothing() -> None:
    learner = updater("grpo", epochs=2)
    before = learner.state_dict()["adapter"]
    metrics = learner.update([sample(n, [10], [30], 1.0) for n in "abc"]).metrics
    assert metrics["advantages/std"] == 0.0
    assert equal_states(learner.state_dict()["adapter"], before)


def test_groups_are_updates_or_versions() -> None:
    some = [
        sample("a", [10], [30], 1.0, policy_version=1),
        sample("b", [10], [31], -1.0, policy_version=1),
        sample("c", [10], [32], 1.0, policy_version=2),
        sample("d", [10], [33], 1.0),
    ]

    def advantages(group: str) -> list[float]:
        settings = PLAIN.model_copy(
            update={"mode": "grpo", "grpo_group": group, "whiten_advantages": False}
        )
        rollout = Rollout.of(some, torch.device("cpu"))
        column: list[float] = make_targets(rollout, settings).advantages[:, 0].tolist()
        return column

    assert advantages("update") == pytest.approx([0.5, -1.5, 0.5, 0.5], abs=1e-6)
    assert advantages("version") == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-6)


# --- opd --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_settings", [TINY, SHARED])
def test_a_teacher_without_a_hint_is_the_policy_and_teaches_nothing(
    model_settings: ModelSettings,
) -> None:
    learner = updater("opd", model_settings)
    shake(learner)
    some = [taught(one, []) for one in samples()]
    rows = learner._rows(some, [[0, 1], [2, 3], [4]])
    rollout = learner._score_all(some, rows, [[0, 1], [2, 3], [4]], None, None)
    assert torch.equal(rollout.taught, rollout.loss_mask)
    targets = make_targets(rollout, learner._settings)
    assert float(targets.advantages.abs().max()) < 1e-5


def test_the_teacher_reads_hint_and_reply_at_the_replys_temperature() -> None:
    learner = updater("opd")
    shake(learner)
    some = samples()
    rows = learner._rows(some, [[0, 1, 2, 3, 4]])
    rollout = learner._score_all(some, rows, [[0, 1, 2, 3, 4]], None, None)
    assert rollout.taught.sum(dim=1).tolist() == [5, 0, 4, 0, 3]
    for row in teacher_rows(some):
        logprobs = full_logprobs(learner, row.token_ids, row.temperature).detach()
        expected = [
            float(logprobs[position - 1, row.token_ids[position]])
            for position in range(row.start, len(row.token_ids))
        ]
        got = rollout.teacher_logprobs[row.sample, row.columns]
        assert got.tolist() == pytest.approx(expected, abs=1e-5)
    # The three turns of the third sample have their own prompts, hence their own teachers.
    assert len(teacher_rows(some)) == 5


def test_the_opd_gradient_is_that_of_the_textbook_loss() -> None:
    learner = updater("opd", opd_advantage_bound=0.5)
    shake(learner, scale=0.3)
    hint = [90, 91, 92]
    some = [taught(sample("x", [10, 11], [30, 31], 1.0), hint), sample("y", [12], [40], -1.0)]
    got = gradients(learner, some)[: len(learner.network.adapter_parameters())]
    one = some[0]
    student = full_logprobs(learner, one.token_ids)
    with torch.no_grad():
        teacher = full_logprobs(learner, [*hint, *one.token_ids])
    loss = torch.zeros(())
    for position in one.positions:
        token = one.token_ids[position]
        gap = float(teacher[position + 2, token] - student[position - 1, token].detach())
        loss = loss - max(-0.5, min(gap, 0.5)) * student[position - 1, token] / 3
    expected = torch.autograd.grad(loss, learner.network.adapter_parameters())
    assert max(float(tensor.abs().max()) for tensor in expected) > 1e-3
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)


def test_opd_moves_each_token_the_way_its_teacher_points() -> None:
    learner = updater("opd", learning_rate=1e-3, learning_rate_floor=1e-4)
    shake(learner, scale=0.3)
    one = taught(sample("x", range(10, 20), [30], 0.0), [90, 91, 92])
    teacher = float(full_logprobs(learner, [90, 91, 92, *one.token_ids])[-2, 30].detach())
    before = total(learner, one)
    metrics = learner.update([one]).metrics
    assert metrics["opd/teacher_gap"] == pytest.approx(teacher - before, abs=1e-4)
    assert abs(teacher - before) > 0.01
    assert (total(learner, one) - before) * (teacher - before) > 0
    assert (metrics["opd/taught_share"], metrics["opd/bounded_share"]) == (1.0, 0.0)


def test_the_teacher_may_be_the_bare_base_model() -> None:
    one = taught(sample("x", range(10, 20), [30, 31], 0.0), [90])
    untrained = updater("opd")
    shaken = updater("opd", opd_teacher="reference", opd_advantage_bound=100.0)
    shake(shaken, scale=0.3)
    gap = shaken.update([one]).metrics["opd/teacher_gap"]
    with torch.no_grad():
        teacher = full_logprobs(untrained, [90, *one.token_ids])
    shaken = updater("opd")
    shake(shaken, scale=0.3)
    expected = (float(teacher[10, 30] + teacher[11, 31]) - total(shaken, one)) / 2
    assert gap == pytest.approx(expected, abs=1e-4)


def test_a_stop_is_heard_before_every_batch_of_the_teacher() -> None:
    asked = 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        return False

    updater("ppo", micro_batch_segments=2).update(samples(), should_stop=should_stop)
    plain, asked = asked, 0
    learner = updater("opd", micro_batch_segments=2)
    learner.update(samples(), should_stop=should_stop)
    assert asked == plain + 3
    before = learner.state_dict()
    with pytest.raises(UpdateStoppedError):
        learner.update(samples(), should_stop=lambda: True)
    assert equal_states(learner.state_dict(), before)


# --- all modes --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model_settings", [TINY, SHARED])
def test_every_mode_starts_at_ratio_one_and_resumes_bit_for_bit(
    mode: str, model_settings: ModelSettings
) -> None:
    changes: dict[str, Any] = {"minibatches": 2, "epochs": 2, "kl_coef": 0.1}
    straight = updater(mode, model_settings, **changes)
    first = straight.update(samples()).metrics
    assert first["losses/initial_ratio_error"] == 0.0
    saved = straight.state_dict()
    expected = straight.update(samples()).metrics
    resumed = updater(mode, model_settings, **changes)
    resumed.load_state_dict(saved)
    assert resumed.update(samples()).metrics == expected
    assert equal_states(resumed.state_dict(), straight.state_dict())


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_does_not_depend_on_the_micro_batch_size(mode: str) -> None:
    def at(size: int) -> list[Tensor]:
        learner = updater(mode, micro_batch_segments=size, kl_coef=0.1)
        shake(learner)
        return gradients(learner, samples())

    expected = at(5)
    assert max(float(tensor.abs().max()) for tensor in expected) > 1e-3
    for got, wanted in zip(at(1), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=5e-6, rtol=2e-3)


@pytest.mark.parametrize("mode", ["grpo", "opd"])
def test_without_a_critic_the_penalty_still_pulls_back_to_the_reference(mode: str) -> None:
    learner = updater(mode, kl_coef=1.0)
    shake(learner)
    prompt = list(range(10, 20))
    with torch.no_grad():
        policy = full_logprobs(learner, prompt)[-1]
        with learner.network.model.disable_adapter():
            difference = policy - full_logprobs(learner, prompt)[-1]
    likelier = sample("up", prompt, [int(difference.argmax())], 0.0)
    before = total(learner, likelier)
    learner.update([likelier])
    assert total(learner, likelier) < before


# --- stale data -------------------------------------------------------------------------------


def _gradient(shift: float, **changes: Any) -> Tensor:
    learner = updater("ppo", whiten_advantages=False, vf_coef=0.0, **changes)
    shake(learner)
    one = sample("a", range(10, 20), range(30, 33), 1.0)
    with torch.no_grad():
        old = learner.network.score([learner.network.row(one)]).logprobs
    given = tuple((old + shift).tolist())
    one = sample("a", range(10, 20), range(30, 33), 1.0, behaviour_logprobs=given)
    count = len(learner.network.adapter_parameters())
    return torch.cat([g.flatten() for g in gradients(learner, [one])[:count]])


def test_the_ratio_may_be_to_the_behaviour_policy_itself() -> None:
    fresh = _gradient(0.0)
    direct: dict[str, Any] = {"stale_objective": "behaviour", "clip_coef": 0.2}
    torch.testing.assert_close(_gradient(0.0, **direct), fresh, rtol=1e-3, atol=1e-7)
    # Within the range the ratio scales the pull; a good token that became likelier since it was
    # chosen has left the range and pulls no more; one that became less likely still does.
    within = _gradient(-math.log(1.1), **direct)
    torch.testing.assert_close(within, 1.1 * fresh, rtol=1e-3, atol=1e-7)
    assert not _gradient(-math.log(1.3), **direct).any()
    below = _gradient(math.log(2.0), **direct)
    torch.testing.assert_close(below, 0.5 * fresh, rtol=1e-3, atol=1e-7)


def test_the_ratio_to_the_behaviour_policy_is_truncated_for_bad_tokens_too() -> None:
    def bad(shift: float) -> Tensor:
        learner = updater(
            "ppo", stale_objective="behaviour", whiten_advantages=False, vf_coef=0.0,
            importance_weight_cap=2.0, dual_clip=3.0,
        )  # fmt: skip
        shake(learner)
        one = sample("a", range(10, 20), range(30, 33), -1.0)
        with torch.no_grad():
            old = learner.network.score([learner.network.row(one)]).logprobs
        one = sample(
            "a",
            range(10, 20),
            range(30, 33),
            -1.0,
            behaviour_logprobs=tuple((old - shift).tolist()),
        )
        count = len(learner.network.adapter_parameters())
        return torch.cat([g.flatten() for g in gradients(learner, [one])[:count]])

    assert bad(math.log(1.9)).any()
    assert not bad(math.log(2.1)).any()


@pytest.mark.parametrize("objective", ["decoupled", "behaviour"])
def test_staleness_alone_is_counted_where_it_would_clip(objective: str) -> None:
    learner = updater("ppo", stale_objective=objective, clip_coef=0.2, clip_coef_high=0.3)
    one = sample("a", range(10, 20), range(30, 34), 1.0)
    with torch.no_grad():
        old = learner.network.score([learner.network.row(one)]).logprobs
    shifts = torch.tensor([0.0, -math.log(1.25), -math.log(1.35), math.log(1.3)])
    given = tuple((old + shifts).tolist())
    metrics = learner.update(
        [sample("a", range(10, 20), range(30, 34), 1.0, behaviour_logprobs=given)]
    ).metrics
    # Ratios 1, 1.25, 1.35 and 0.77 in a range from 0.8 to 1.3.
    assert metrics["stale/clipped_share"] == pytest.approx(0.5)
    assert metrics["losses/clipfrac"] == pytest.approx(0.5 if objective == "behaviour" else 0.0)
    assert metrics["losses/initial_ratio_error"] == 0.0
    assert metrics["losses/approx_kl"] == 0.0


# --- settings ---------------------------------------------------------------------------------


def test_a_hybrid_of_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HYBRID_GRPO_WEIGHT", "HYBRID_OPD_WEIGHT"):
        monkeypatch.setenv(f"CLAWSTREAM_LEARNER__{name}", "0")
    assert load_settings().learner.mode_weights == (1.0, 0.0, 0.0)
    monkeypatch.setenv("CLAWSTREAM_LEARNER__MODE", "hybrid")
    with pytest.raises(SettingsError, match="mode hybrid needs one of hybrid_ppo_weight"):
        load_settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MODE", "dpo"),
        ("HYBRID_PPO_WEIGHT", "-1"),
        ("OPD_ADVANTAGE_BOUND", "0"),
        ("GRPO_GROUP", "topic"),
        ("STALE_OBJECTIVE", "none"),
        ("KL_COEF", "-0.1"),
        ("DUAL_CLIP", "1"),
        ("TARGET_KL", "0"),
        ("LEARNING_RATE_SCHEDULE", "cosine"),
        ("WARM_START_BETA", "0"),
        ("WARM_START_CHOSEN_WEIGHT", "-1"),
    ],
)
def test_settings_of_modes_have_bounds(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"CLAWSTREAM_LEARNER__{name}", value)
    with pytest.raises(SettingsError, match=name.lower()):
        load_settings()


def test_each_mode_has_one_weight_and_hints_where_it_needs_them() -> None:
    found = {mode: LearnerSettings(mode=mode) for mode in MODES}  # type: ignore[arg-type]
    assert {mode: s.mode_weights for mode, s in found.items()} == {
        "ppo": (1.0, 0.0, 0.0),
        "grpo": (0.0, 1.0, 0.0),
        "opd": (0.0, 0.0, 1.0),
        "hybrid": (0.0, 1.0, 1.0),
    }
    assert [found[mode].hint for mode in MODES] == [None, None, "directive", "directive"]
    said = LearnerSettings(mode="opd", opd_hint="next_user_turn")
    assert said.hint == "next_user_turn"
