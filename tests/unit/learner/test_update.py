from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from learner.adapters import load_adapter
from learner.batch import TrainingSample
from learner.model import BaseModel, load_base
from learner.policy import PolicyNetwork, TokenRow
from learner.ppo.diagnostics import METRICS
from learner.ppo.losses import PolicyLoss, ValueLoss, policy_loss, value_loss
from learner.update import PpoUpdater
from streams.errors import ArtifactError, LearnerError, ModelError, UpdateStoppedError
from streams.settings import LearnerSettings, ModelSettings
from tests.unit.learner.builders import conversation, sample

TINY = ModelSettings(base="tiny-random", device="cpu", lora_rank=4)
SHARED = TINY.model_copy(update={"lora_first_layer": 2})
PLAIN = LearnerSettings(
    learning_rate=1e-2,
    learning_rate_floor=1e-3,
    value_learning_rate=1e-2,
    kl_coef=0.0,
    clip_coef=0.2,
    epochs=1,
    micro_batch_segments=2,
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def base(model_settings: ModelSettings = TINY) -> BaseModel:
    return load_base(model_settings, Path("unused"))


def updater(model_settings: ModelSettings = TINY, **changes: Any) -> PpoUpdater:
    settings = PLAIN.model_copy(update=changes)
    return PpoUpdater(base(model_settings), settings, model_settings)


def shake(holder: PpoUpdater | PolicyNetwork, seed: int = 1, scale: float = 0.1) -> None:
    """Give the adapter weights that change something."""
    network = holder.network if isinstance(holder, PpoUpdater) else holder
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.adapter_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * scale)


def samples(**turn_fields: Any) -> list[TrainingSample]:
    """Six conversations of unlike lengths, of one to three turns, good ones and bad ones."""
    return [
        sample("a", range(10, 20), range(30, 35), 1.0, **turn_fields),
        sample("b", range(12, 16), range(40, 49), -1.0, **turn_fields),
        sample("c", range(11, 29), [50], 0.5, **turn_fields),
        conversation(
            "d",
            [(range(20, 24), [60, 61], 1.0), ([25, 26, 27], [62], 0.0), ([28], [63, 64], -0.5)],
            **turn_fields,
        ),
        sample("e", range(13, 20), range(70, 73), 0.0, terminal=False, **turn_fields),
        conversation("f", [([14], [80, 81, 82], -1.0), ([15] * 9, [83], 1.0)], **turn_fields),
    ]


def rows_of(network: PolicyNetwork, some: Sequence[TrainingSample]) -> list[TokenRow]:
    rows = [network.row(one) for one in some]
    if not network.shares_frozen_layers:
        return rows
    states = network.frozen_states(rows)
    return [dataclasses.replace(row, states=s) for row, s in zip(rows, states, strict=True)]


def logprobs_of(learner: PpoUpdater, one: TrainingSample) -> Tensor:
    with torch.no_grad():
        return learner.network.score(rows_of(learner.network, [one])).logprobs


def total(learner: PpoUpdater, one: TrainingSample) -> float:
    return float(logprobs_of(learner, one).sum())


def equal_states(left: Any, right: Any) -> bool:
    """Bit for bit, through dicts and lists."""
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal_states(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal_states, left, right))
    return bool(left == right)


def gradients(learner: PpoUpdater, some: Sequence[TrainingSample]) -> list[Tensor]:
    """The gradients of one step over all of `some`, before clipping; no step is made."""
    caught: list[Tensor] = []
    learner._settings = learner._settings.model_copy(update={"max_grad_norm": 1e9})

    def catch(*_: object, **__: object) -> None:
        caught.extend(
            torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for group in learner._optimizer.param_groups
            for p in group["params"]
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner._optimizer, "step", catch)
        learner.update(some)
    return caught


# --- what the network says --------------------------------------------------------------------


@pytest.mark.parametrize("model_settings", [TINY, SHARED])
def test_scores_are_those_of_the_whole_model(model_settings: ModelSettings) -> None:
    network = PolicyNetwork(base(model_settings), model_settings, PLAIN)
    shake(network)
    assert network.shares_frozen_layers is (model_settings.lora_first_layer > 0)
    one = samples(temperature=0.7)[3]
    with torch.no_grad():
        scores = network.score(rows_of(network, [one]))
        ids = torch.tensor(one.token_ids)
        all_logprobs = torch.log_softmax(network.model(input_ids=ids[None]).logits[0] / 0.7, dim=1)
    expected = torch.tensor([float(all_logprobs[p - 1, ids[p]]) for p in one.positions])
    torch.testing.assert_close(scores.logprobs, expected, atol=1e-5, rtol=1e-5)
    entropy = torch.stack(
        [-(all_logprobs[p - 1].exp() * all_logprobs[p - 1]).sum() for p in one.positions]
    )
    torch.testing.assert_close(scores.entropies, entropy, atol=1e-5, rtol=1e-5)


def test_values_are_of_the_state_before_each_token_and_after_the_last() -> None:
    network = PolicyNetwork(base(), TINY, PLAIN)
    with torch.no_grad():
        network.value_head.weight.copy_(torch.randn(1, 32, generator=torch.manual_seed(0)))
    one = samples()[3]
    with torch.no_grad():
        scores = network.score([network.row(one)])
        hidden = network.model(
            input_ids=torch.tensor([one.token_ids]), output_hidden_states=True
        ).hidden_states[-1][0]
        values = network.value_head(hidden)[:, 0]
    before = torch.tensor(one.positions) - 1
    torch.testing.assert_close(scores.values, values[before], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.final_values[0], values[-1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model_settings", [TINY, SHARED])
def test_padding_changes_nothing_on_either_side(model_settings: ModelSettings) -> None:
    network = PolicyNetwork(base(model_settings), model_settings, PLAIN)
    shake(network)
    some = samples()
    rows = rows_of(network, some)
    with torch.no_grad():
        alone = [network.score([row]) for row in rows]
        for side in ("left", "right"):
            together = network.score(rows, padding_side=side)
            for name in ("logprobs", "entropies", "values", "final_values"):
                torch.testing.assert_close(
                    getattr(together, name),
                    torch.cat([getattr(one, name) for one in alone]),
                    atol=1e-5,
                    rtol=1e-5,
                )


def test_the_reference_is_the_bare_base_model() -> None:
    network = PolicyNetwork(base(), TINY, PLAIN)
    one = samples()[1]
    with torch.no_grad():
        untrained = network.score([network.row(one)]).logprobs
        shake(network)
        reference = network.score([network.row(one)], reference=True).logprobs
        policy = network.score([network.row(one)]).logprobs
    assert torch.equal(reference, untrained)
    assert float((policy - reference).abs().max()) > 1e-3


def test_a_backbone_that_cannot_be_divided_is_run_whole() -> None:
    undivided = base(SHARED)

    def scale(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # Some architectures scale embeddings inside; states handed in get scaled as well.
        if kwargs.get("inputs_embeds") is not None:
            kwargs = {**kwargs, "inputs_embeds": kwargs["inputs_embeds"] * 3}
        return args, kwargs

    undivided.model.model.register_forward_pre_hook(scale, with_kwargs=True)
    learner = PpoUpdater(undivided, PLAIN, SHARED)
    assert not learner.network.shares_frozen_layers
    assert learner.update(samples()).metrics["losses/initial_ratio_error"] == 0.0


def test_a_model_that_bends_its_logits_is_refused() -> None:
    bent = base()
    bent.model.lm_head.register_forward_hook(lambda _, __, logits: 3 * torch.tanh(logits / 3))
    with pytest.raises(ModelError, match="tiny-random does more after its last layer"):
        PpoUpdater(bent, PLAIN, TINY)


# --- the update -------------------------------------------------------------------------------


@pytest.mark.parametrize("model_settings", [TINY, SHARED])
@pytest.mark.parametrize("changes", [{}, {"minibatches": 3}, {"gradient_checkpointing": True}])
def test_the_first_ratio_of_unchanged_weights_is_exactly_one(
    model_settings: ModelSettings, changes: dict[str, Any]
) -> None:
    learner = updater(model_settings, **changes)
    shake(learner)
    assert learner.update(samples()).metrics["losses/initial_ratio_error"] == 0.0


@pytest.mark.parametrize("model_settings", [TINY, SHARED])
def test_good_replies_become_likelier_and_bad_ones_less(model_settings: ModelSettings) -> None:
    learner = updater(model_settings, epochs=3)
    good = sample("good", range(10, 20), range(30, 35), 1.0)
    bad = sample("bad", range(10, 20), range(60, 65), -1.0)
    before = total(learner, good), total(learner, bad)
    learner.update([good, bad])
    assert total(learner, good) > before[0] + 0.1
    assert total(learner, bad) < before[1] - 0.1


def test_the_base_model_never_changes() -> None:
    learner = updater()
    before = {n: p.clone() for n, p in learner.network.model.named_parameters() if "lora" not in n}
    learner.update(samples())
    after = dict(learner.network.model.named_parameters())
    assert before
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not any(p.grad is not None for n, p in after.items() if "lora" not in n)


@pytest.mark.parametrize("model_settings", [TINY, SHARED])
def test_the_gradient_does_not_depend_on_the_micro_batch_size(
    model_settings: ModelSettings,
) -> None:
    def at(size: int) -> list[Tensor]:
        learner = updater(model_settings, micro_batch_segments=size, ent_coef=0.1)
        shake(learner)
        return gradients(learner, samples())

    expected = at(6)
    assert max(float(tensor.abs().max()) for tensor in expected) > 1e-3
    for size in (1, 4):
        for got, wanted in zip(at(size), expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=2e-6, rtol=1e-3)


def test_neither_checkpointing_nor_shared_layers_change_the_gradient() -> None:
    def under(model_settings: ModelSettings, share: bool, **changes: Any) -> list[Tensor]:
        learner = updater(model_settings, detach_value=False, **changes)
        shake(learner)
        if not share:
            learner.network._first = 0
        return gradients(learner, samples())

    expected = under(SHARED, True)
    for other in (
        under(SHARED, False),
        under(SHARED, True, gradient_checkpointing=True),
        under(SHARED, True, logprob_chunk_tokens=3),
    ):
        for got, wanted in zip(other, expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=2e-6, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # read by the tracer
def test_compiled_layers_change_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    in_place = torch.nn.Module.compile

    def traced(module: torch.nn.Module, **options: Any) -> None:
        compiled.append(module)
        # The same graphs, but without a C compiler.
        in_place(module, backend="eager", **options)

    monkeypatch.setattr(torch.nn.Module, "compile", traced)

    def under(compile_layers: bool) -> list[Tensor]:
        network = updater(SHARED, compile_layers=compile_layers).network
        assert compiled == (list(network._blocks) if compile_layers else [])
        rows = network.with_states([network.row(one) for one in samples()])
        network.score(rows).logprobs.sum().backward()  # type: ignore[no-untyped-call]
        return [p.grad for p in network.adapter_parameters() if p.grad is not None]

    plain, fast = under(False), under(True)
    assert len(plain) == len(fast) > 0
    for got, wanted in zip(fast, plain, strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-6, rtol=1e-3)


def test_the_gradient_is_that_of_the_textbook_loss() -> None:
    """Against plain autograd on full logits, with advantages computed by hand."""
    learner = updater(whiten_advantages=False, gae_lambda=1.0, gamma=1.0, vf_coef=0.0)
    shake(learner)
    some = [
        sample("x", [10, 11], [30, 31], 1.0, temperature=0.5),
        sample("y", [12], [40], -2.0, temperature=2.0),
    ]
    got = gradients(learner, some)[: len(learner.network.adapter_parameters())]
    # With V = 0 and no discount, every token's advantage is its conversation's reward; at
    # ratio 1 the gradient of the surrogate is that of the advantage-weighted log-probability.
    loss = torch.zeros(())
    for one, temperature, reward in ((some[0], 0.5, 1.0), (some[1], 2.0, -2.0)):
        ids = torch.tensor(one.token_ids)
        scaled = learner.network.model(input_ids=ids[None]).logits[0] / temperature
        logprobs = torch.log_softmax(scaled, dim=1)
        for position in one.positions:
            loss = loss - reward * logprobs[position - 1, ids[position]] / 3
    expected = torch.autograd.grad(loss, learner.network.adapter_parameters())
    # Sums of floats: how they are added up depends on the processor.
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)


def test_the_value_loss_reaches_the_adapter_only_if_told_to() -> None:
    def adapter_gradient(detach: bool) -> float:
        # Without weight, a bad reply leaves the policy without a gradient of its own.
        learner = updater(
            detach_value=detach, whiten_advantages=False, negative_advantage_weight=0.0
        )
        shake(learner)
        with torch.no_grad():
            learner.network.value_head.weight.fill_(0.1)
        caught = gradients(learner, [sample("v", range(10, 15), [30], -5.0)])
        adapter = caught[: len(learner.network.adapter_parameters())]
        return max(float(tensor.abs().max()) for tensor in adapter)

    assert adapter_gradient(detach=True) == 0.0
    assert adapter_gradient(detach=False) > 1e-4


def test_negative_advantages_can_weigh_less() -> None:
    def pull(weight: float) -> float:
        learner = updater(negative_advantage_weight=weight, whiten_advantages=False, vf_coef=0.0)
        shake(learner)
        caught = gradients(learner, [sample("v", range(10, 15), range(30, 34), -1.0)])
        return max(float(tensor.abs().max()) for tensor in caught)

    assert pull(0.25) == pytest.approx(pull(1.0) / 4, rel=1e-4)
    assert pull(1.0) > 1e-3


def test_the_penalty_pulls_back_to_the_reference() -> None:
    learner = updater(kl_coef=1.0)
    shake(learner)
    prompt = torch.arange(10, 20)
    with torch.no_grad():
        policy = torch.log_softmax(learner.network.model(input_ids=prompt[None]).logits[0, -1], 0)
        with learner.network.model.disable_adapter():
            logits = learner.network.model(input_ids=prompt[None]).logits[0, -1]
        difference = policy - torch.log_softmax(logits, 0)
    likelier = sample("up", prompt.tolist(), [int(difference.argmax())], 0.0)
    unlikelier = sample("down", prompt.tolist(), [int(difference.argmin())], 0.0)
    before = total(learner, likelier), total(learner, unlikelier)
    metrics = learner.update([likelier, unlikelier]).metrics
    # There are no rewards but the penalty.
    assert total(learner, likelier) < before[0]
    assert total(learner, unlikelier) > before[1]
    mean = float(difference.max() + difference.min()) / 2
    assert metrics["kl/reference_k1_per_sample"] == pytest.approx(mean, abs=1e-4)
    assert metrics["rewards/kl_penalty"] == pytest.approx(mean, abs=1e-4)
    assert metrics["rewards/mean"] == 0.0


def test_entropy_bonus_opens_the_choice() -> None:
    learner = updater(ent_coef=1.0, vf_coef=0.0, epochs=4)
    indifferent = [sample("x", range(10, 20), range(30, 35), 0.0)]
    first = learner.update(indifferent).metrics["losses/entropy"]
    second = learner.update(indifferent).metrics["losses/entropy"]
    assert second > first


def test_cut_conversations_bootstrap_and_ended_ones_do_not() -> None:
    def value_of(terminal: bool) -> float:
        learner = updater(gae_lambda=1.0, gamma=1.0)
        with torch.no_grad():
            learner.network.value_head.bias.fill_(2.0)
        one = sample("x", range(10, 20), [30, 31], 0.5, terminal=terminal)
        return learner.update([one]).metrics["rewards/return"]

    assert value_of(terminal=True) == pytest.approx(0.5, abs=1e-5)
    assert value_of(terminal=False) == pytest.approx(2.5, abs=1e-5)


def test_the_value_head_learns_what_replies_earn() -> None:
    # A still policy: the head would otherwise chase states that move.
    learner = updater(
        epochs=10, value_clip=10.0, learning_rate=1e-6, learning_rate_floor=1e-6, gamma=1.0
    )
    some = [sample("x", range(10, 20), [30], 1.0), sample("y", range(40, 50), [60], -1.0)]
    first = learner.update(some).metrics
    for _ in range(3):
        last = learner.update(some).metrics
    assert last["losses/value_loss"] < first["losses/value_loss"] / 2
    assert last["losses/explained_variance"] > 0.5


def test_minibatches_and_epochs_count_steps() -> None:
    learner = updater(minibatches=3, epochs=2)
    result = learner.update(samples())
    assert result.metrics["batch/optimizer_steps"] == 6
    assert result.optimizer_step == 6
    assert result.updates == 1
    # No more minibatches than samples.
    assert learner.update(samples()[:2]).metrics["batch/optimizer_steps"] == 4
    assert learner.optimizer_step == 10


def test_an_update_that_moves_too_far_stops_before_the_next_step() -> None:
    eager: dict[str, Any] = {"learning_rate": 0.1, "epochs": 8}
    learner = updater(**eager, target_kl=1e-4)
    result = learner.update(samples())
    assert result.early_stopped
    assert result.metrics["batch/early_stop"] == 1.0
    assert result.metrics["losses/approx_kl"] > 1.5e-4
    # The step that went too far was the last one made.
    assert result.optimizer_step == result.metrics["batch/epochs"] - 1
    assert not updater(**eager).update(samples()).early_stopped


def test_settings_bound_the_losses_and_metrics_count_where_they_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Any] = {}
    policies: list[tuple[PolicyLoss, Tensor]] = []
    values: list[ValueLoss] = []

    def policy(*tensors: Tensor, **options: Any) -> PolicyLoss:
        asked.update(options)
        policies.append((policy_loss(*tensors, **options), tensors[3]))
        return policies[-1][0]

    def value(*tensors: Tensor, **options: Any) -> ValueLoss:
        asked.update(options)
        values.append(value_loss(*tensors, **options))
        return values[-1]

    monkeypatch.setattr("learner.update.policy_loss", policy)
    monkeypatch.setattr("learner.update.value_loss", value)
    bounds: dict[str, Any] = {
        "dual_clip": 1.5,
        "value_clip": 0.01,
        "clip_coef": 0.1,
        "clip_coef_high": 0.3,
    }
    metrics = updater(epochs=6, learning_rate=0.05, **bounds).update(samples()).metrics
    assert (asked["clip_low"], asked["clip_high"]) == (0.1, 0.3)
    assert (asked["dual_clip"], asked["value_clip"]) == (1.5, 0.01)
    tokens = sum(int(mask.sum()) for _, mask in policies)
    counts = {
        "clipfrac": sum(int(loss.clipped.sum()) for loss, _ in policies),
        "dual_clipfrac": sum(int(loss.dual_clipped.sum()) for loss, _ in policies),
        "value_clipfrac": sum(int(loss.clipped.sum()) for loss in values),
        "policy_loss": sum(float(loss.losses.detach().sum()) for loss, _ in policies),
        "value_loss": sum(float(loss.losses.detach().sum()) for loss in values),
    }
    assert all(counts.values())
    for name, count in counts.items():
        assert metrics[f"losses/{name}"] == pytest.approx(count / tokens, rel=1e-5), name
    updater(clip_coef=0.1).update(samples())
    assert (asked["clip_low"], asked["clip_high"]) == (0.1, 0.1)


def test_gradients_are_clipped_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = updater(max_grad_norm=0.01)
    norms: list[float] = []

    def step() -> None:
        for group in learner._optimizer.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            norms.append(float(torch.cat([g.flatten() for g in grads]).norm()))

    monkeypatch.setattr(learner._optimizer, "step", step)
    metrics = learner.update(samples()).metrics
    assert norms == [pytest.approx(0.01, rel=1e-3)] * 2
    # What is reported is the norm before.
    assert metrics["losses/grad_norm"] > 0.02
    assert metrics["losses/value_grad_norm"] > 0.02


def test_stale_metrics_count_tokens_at_the_cap() -> None:
    prompt, reply = range(10, 20), range(30, 34)
    own = logprobs_of(updater(), sample("a", prompt, reply, 1.0))
    shift = torch.tensor([-5.0, 0.0, 0.0, math.log(4.0)])
    one = sample("a", prompt, reply, 1.0, behaviour_logprobs=tuple((own + shift).tolist()))
    metrics = updater(importance_weight_cap=1.5).update([one]).metrics
    assert metrics["stale/capped_share"] == pytest.approx(0.25)
    assert metrics["stale/importance_weight"] == pytest.approx((1.5 + 1 + 1 + 0.25) / 4, rel=1e-4)


def test_penalty_metrics_say_what_was_taken_off() -> None:
    some = samples()
    learner = updater(kl_coef=0.2)
    shake(learner)
    reference = updater()
    kl = sum(float((logprobs_of(learner, one) - logprobs_of(reference, one)).sum()) for one in some)
    metrics = learner.update(some).metrics
    assert metrics["kl/reference_k1_per_sample"] == pytest.approx(kl / 6, rel=1e-3)
    assert metrics["rewards/kl_penalty"] == pytest.approx(0.2 * kl / 6, rel=1e-3)


def test_the_early_stop_is_at_one_and_a_half_times_the_target() -> None:
    two: dict[str, Any] = {"epochs": 2}
    moved = updater(**two).update(samples()).metrics["losses/approx_kl"]
    assert moved > 0
    assert updater(**two, target_kl=moved / 1.6).update(samples()).early_stopped
    assert not updater(**two, target_kl=moved / 1.4).update(samples()).early_stopped


def test_approximate_kl_is_of_the_policy_before_to_the_one_in_training() -> None:
    some = samples()
    learner = updater()
    before = torch.cat([logprobs_of(learner, one) for one in some])
    learner.update(some)
    # The second epoch sees what one step did.
    log_ratio = torch.cat([logprobs_of(learner, one) for one in some]) - before
    metrics = updater(epochs=2).update(some).metrics
    assert metrics["losses/old_approx_kl"] == pytest.approx(float(-log_ratio.mean()), rel=1e-3)
    expected = float((log_ratio.exp() - 1 - log_ratio).mean())
    assert metrics["losses/approx_kl"] == pytest.approx(expected, rel=1e-3)
    reverse = float(((-log_ratio).exp() - 1 + log_ratio).mean())
    assert reverse != pytest.approx(expected, rel=1e-2)


def test_the_learning_rates_fall_linearly_to_their_floors() -> None:
    learner = updater(learning_rate_decay_updates=4)
    rates = [learner.update(samples()[:1]).metrics for _ in range(5)]
    assert [r["charts/learning_rate"] for r in rates] == pytest.approx(
        [1e-2, 7.5e-3, 5e-3, 2.5e-3, 1e-3]
    )
    assert [r["charts/value_learning_rate"] for r in rates] == pytest.approx(
        [1e-2, 7.5e-3, 5e-3, 2.5e-3, 1e-3]
    )


@pytest.mark.parametrize("model_settings", [TINY, SHARED])
def test_every_metric_is_explained_and_finite(model_settings: ModelSettings) -> None:
    everything: dict[str, Any] = {
        "mode": "hybrid",
        "hybrid_ppo_weight": 1.0,
        "hybrid_grpo_weight": 1.0,
        "hybrid_opd_weight": 1.0,
    }
    metrics = updater(model_settings, **everything).update(samples()).metrics
    assert all(math.isfinite(value) for value in metrics.values())
    # The rest is known to the trainer, the loop and the warm start alone.
    elsewhere = {name for name in METRICS if name.startswith(("warm_start/", "makeup/"))}
    assert METRICS.keys() - metrics.keys() - elsewhere == {
        "batch/turns_interrupted",
        "batch/turns_too_long",
        "charts/SPS",
        "charts/update_s",
        "stale/dropped_share",
        "stale/recorded_gap",
    }
    assert metrics.keys() <= METRICS.keys()
    assert updater(model_settings).update(samples()).metrics.keys() < metrics.keys()


def test_metrics_describe_the_data() -> None:
    metrics = updater().update(samples()).metrics
    assert metrics["batch/samples"] == 6
    assert metrics["batch/turns"] == 9
    assert metrics["batch/tokens"] == sum(len(one.positions) for one in samples())
    assert metrics["batch/context_tokens"] == 10 + 4 + 18 + 8 + 7 + 10
    assert metrics["rewards/mean"] == pytest.approx(1.0 / 9)
    assert metrics["rewards/nonzero_share"] == pytest.approx(7 / 9)


def test_an_update_needs_samples() -> None:
    with pytest.raises(LearnerError, match="at least one sample"):
        updater().update([])


def test_a_failed_update_leaves_everything_as_it_was() -> None:
    learner = updater(epochs=2, minibatches=2)
    learner.update(samples())
    before = learner.state_dict()
    poisoned = [*samples(), sample("nan", [10, 11], [12], math.nan)]
    with pytest.raises(LearnerError, match="not finite"):
        learner.update(poisoned)
    assert equal_states(learner.state_dict(), before)
    assert not any(p.grad is not None for p in learner.network.adapter_parameters())


def test_an_update_may_stop_before_any_micro_batch_and_then_changed_nothing(
    tmp_path: Path,
) -> None:
    learner = updater(SHARED, epochs=2, minibatches=2)
    learner.save_adapter(tmp_path)
    learner.update(samples())
    before, order = learner.state_dict(), torch.Generator().manual_seed(3)
    mixed = [*samples(), *samples(policy_version=5)]
    asked = 0

    def stop_at(limit: int) -> Callable[[], bool]:
        def should_stop() -> bool:
            nonlocal asked
            asked += 1
            return asked == limit

        return should_stop

    def run(limit: int) -> None:
        nonlocal asked
        asked = 0
        learner.update(
            mixed, load_version=lambda _: tmp_path, generator=order, should_stop=stop_at(limit)
        )

    drawn = order.get_state()
    limit = 1
    while True:
        try:
            run(limit)
        except UpdateStoppedError:
            assert equal_states(learner.state_dict(), before)
            assert torch.equal(order.get_state(), drawn)
            assert not any(p.grad is not None for p in learner.network.adapter_parameters())
            limit += 1
        else:
            break
    # 6 micro-batches: frozen layers, old policy, two epochs; 3 of version 5; 2 to see what moved.
    assert limit - 1 == asked == 6 + 6 + 3 + 2 * 6 + 2


def test_too_little_memory_is_said_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = updater()
    before = learner.state_dict()

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(learner._optimizer, "step", full)
    with pytest.raises(LearnerError, match=r"lower learner\.micro_batch_segments"):
        learner.update(samples())
    assert equal_states(learner.state_dict(), before)


def test_how_far_an_update_went_is_measured_after_its_last_step() -> None:
    learner = updater(measure_every=1)
    some = samples()
    before = [logprobs_of(learner, one) for one in some]
    metrics = learner.update(some).metrics
    log_ratio = torch.cat([logprobs_of(learner, one) for one in some]) - torch.cat(before)
    # With one step the loss saw the policy unmoved; the metric is of what it became.
    assert metrics["losses/approx_kl"] == 0.0
    assert metrics["kl/update_k1"] == pytest.approx(float(-log_ratio.mean()), abs=1e-6)
    expected = float((log_ratio.exp() - 1 - log_ratio).mean())
    assert metrics["kl/update_k3"] == pytest.approx(expected, rel=1e-4)
    assert expected > 1e-4


@pytest.mark.parametrize(
    ("every", "measured"),
    [(2, [1, 3, 5]), (3, [1, 4]), (4, [2]), (9, [4]), (50, [5])],
)
def test_how_far_it_went_can_be_measured_on_some_samples(every: int, measured: list[int]) -> None:
    learner = updater(measure_every=every, micro_batch_segments=2, minibatches=2)
    by_length = sorted(samples(), key=lambda one: len(one.token_ids))
    before = [logprobs_of(learner, one) for one in by_length]
    metrics = learner.update(samples()).metrics
    log_ratios = [logprobs_of(learner, by_length[i]) - before[i] for i in measured]
    expected = float(-torch.cat(log_ratios).mean())
    assert metrics["kl/update_k1"] == pytest.approx(expected, abs=1e-6)


def test_mixed_precision_trains_float32_weights() -> None:
    half = dataclasses.replace(base(SHARED), dtype=torch.bfloat16)
    learner = PpoUpdater(half, PLAIN, SHARED)
    good = sample("good", range(10, 20), range(30, 35), 1.0)
    bad = sample("bad", range(10, 20), range(60, 65), -1.0)
    before = total(learner, good)
    metrics = learner.update([good, bad]).metrics
    assert metrics["losses/initial_ratio_error"] == 0.0
    assert total(learner, good) > before
    assert {p.dtype for p in learner.network.adapter_parameters()} == {torch.float32}


# --- data of other versions -------------------------------------------------------------------


def _weight(metrics: dict[str, float]) -> tuple[float, float, float]:
    return (
        metrics["stale/importance_weight"],
        metrics["stale/share_recomputed_logprobs"],
        metrics["stale/share_missing_logprobs"],
    )


def _one(**fields: Any) -> TrainingSample:
    return sample("x", range(10, 20), [30, 31, 32], 1.0, **fields)


def test_given_logprobs_become_truncated_weights() -> None:
    learner = updater(importance_weight_cap=1.5)
    old = logprobs_of(learner, _one()).tolist()
    shifts = (math.log(2.0), 0.0, math.log(0.5))
    given = tuple(o - s for o, s in zip(old, shifts, strict=True))
    metrics = learner.update([_one(behaviour_logprobs=given)]).metrics
    assert _weight(metrics) == pytest.approx(((1.5 + 1.0 + 0.5) / 3, 0.0, 0.0), abs=1e-5)
    assert metrics["stale/capped_share"] == pytest.approx(1 / 3)
    assert metrics["stale/effective_sample_size"] == pytest.approx(9 / (3 * (2.25 + 1 + 0.25)))


def test_stale_tokens_pull_as_much_as_their_weight() -> None:
    prompt, reply = range(10, 20), range(30, 33)
    plain: dict[str, Any] = {"whiten_advantages": False, "importance_weight_cap": 2.0}

    def gradient(shift: float) -> Tensor:
        learner = updater(**plain)
        given = logprobs_of(learner, sample("a", prompt, reply, 1.0)) + shift
        one = sample("a", prompt, reply, 1.0, behaviour_logprobs=tuple(given.tolist()))
        count = len(learner.network.adapter_parameters())
        return torch.cat([g.flatten() for g in gradients(learner, [one])[:count]])

    fresh = gradient(0.0)
    assert float(fresh.norm()) > 0
    # Twice as likely when it was chosen: half the pull. Unlikely then: twice, and no more.
    torch.testing.assert_close(gradient(math.log(2.0)), 0.5 * fresh, rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(gradient(-3.0), 2.0 * fresh, rtol=1e-3, atol=1e-7)


def test_unknown_behaviour_weighs_one_and_is_counted() -> None:
    def refuse(_: int) -> Path:
        raise ArtifactError("gone")

    assert _weight(updater().update([_one()]).metrics) == (1.0, 0.0, 1.0)
    assert _weight(updater().update([_one(policy_version=3)]).metrics) == (1.0, 0.0, 1.0)
    gone = updater().update([_one(policy_version=3)], load_version=refuse).metrics
    assert _weight(gone) == (1.0, 0.0, 1.0)


def test_turns_of_the_current_version_are_fresh() -> None:
    learner = updater()
    shake(learner)
    metrics = learner.update([_one(policy_version=3)], current_version=3).metrics
    assert _weight(metrics) == (1.0, 1.0, 0.0)


def test_what_a_server_recorded_is_compared_with_the_version_it_served() -> None:
    learner = updater()
    shake(learner)
    given = tuple((logprobs_of(learner, _one()) - 0.25).tolist())
    one = _one(policy_version=3, behaviour_logprobs=given)
    assert learner.update([one], current_version=3).metrics["stale/recorded_gap"] == pytest.approx(
        0.25, abs=1e-5
    )
    for others in (_one(policy_version=3), _one(policy_version=2, behaviour_logprobs=given)):
        assert "stale/recorded_gap" not in learner.update([others], current_version=3).metrics


def test_turns_of_the_base_are_scored_with_the_adapter_off() -> None:
    untrained = logprobs_of(updater(), _one())
    learner = updater(importance_weight_cap=100.0)
    shake(learner)
    expected = float((logprobs_of(learner, _one()) - untrained).exp().mean())
    metrics = learner.update([_one(policy_version=0)]).metrics
    assert _weight(metrics) == pytest.approx((expected, 1.0, 0.0), rel=1e-4)


@pytest.mark.parametrize("model_settings", [TINY, SHARED])
def test_turns_of_another_version_are_scored_with_its_adapter(
    model_settings: ModelSettings, tmp_path: Path
) -> None:
    other = updater(model_settings)
    shake(other, seed=7)
    other.save_adapter(tmp_path / "v3")
    given = tuple(logprobs_of(other, _one()).tolist())

    def run(one: TrainingSample) -> tuple[dict[str, float], dict[str, Any]]:
        learner = updater(model_settings)
        shake(learner, seed=8)
        result = learner.update(
            [*samples(policy_version=4), one],
            current_version=4,
            load_version=lambda version: tmp_path / f"v{version}",
        )
        return result.metrics, learner.state_dict()

    recomputed, state = run(_one(policy_version=3))
    recorded, expected_state = run(_one(policy_version=3, behaviour_logprobs=given))
    assert recomputed["stale/importance_weight"] == pytest.approx(
        recorded["stale/importance_weight"], abs=1e-5
    )
    assert recomputed["stale/importance_weight"] != pytest.approx(1.0, abs=1e-3)
    assert recomputed["stale/share_recomputed_logprobs"] == 1.0
    # Looking at another version's weights leaves no trace in the own ones.
    for name, tensor in state["adapter"].items():
        torch.testing.assert_close(tensor, expected_state["adapter"][name], atol=1e-4, rtol=0)


def test_an_adapter_of_another_shape_leaves_the_behaviour_unknown(tmp_path: Path) -> None:
    for number, changed in enumerate(({"lora_rank": 2}, {"lora_first_layer": 1})):
        other = updater(TINY.model_copy(update=changed))
        other.save_adapter(tmp_path / f"v{number + 1}")
    learner = updater()
    for version in (1, 2):
        metrics = learner.update(
            [_one(policy_version=version)], load_version=lambda v: tmp_path / f"v{v}"
        ).metrics
        assert _weight(metrics) == (1.0, 0.0, 1.0)


# --- going on where it stopped ----------------------------------------------------------------


def _through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


@pytest.mark.parametrize("model_settings", [TINY, SHARED])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    model_settings: ModelSettings,
) -> None:
    changes = {"minibatches": 2, "epochs": 2, "learning_rate_decay_updates": 5, "kl_coef": 0.1}
    straight = updater(model_settings, **changes)
    straight.update(samples())
    saved = _through_a_file(straight.state_dict())
    expected = [straight.update(samples()).metrics for _ in range(2)]

    resumed = updater(model_settings, **changes)
    shake(resumed, seed=99)
    resumed.load_state_dict(saved)
    assert [resumed.update(samples()).metrics for _ in range(2)] == expected
    assert equal_states(resumed.state_dict(), straight.state_dict())


def test_a_saved_state_does_not_change_with_later_updates() -> None:
    learner = updater()
    learner.update(samples())
    state = learner.state_dict()
    copy = _through_a_file(state)
    learner.update(samples())
    assert equal_states(state, copy)
    assert not equal_states(state, learner.state_dict())


def test_the_seed_decides_everything() -> None:
    def run(seed: int) -> dict[str, Any]:
        learner = updater(seed=seed, minibatches=3)
        learner.update(samples())
        return learner.state_dict()

    assert equal_states(run(1), run(1))
    assert not equal_states(run(1)["adapter"], run(2)["adapter"])


def test_a_generator_of_the_caller_is_used_instead() -> None:
    def run(seed: int) -> dict[str, Any]:
        learner = updater(minibatches=3)
        learner.update(samples(), generator=torch.Generator().manual_seed(seed))
        return learner.state_dict()

    assert equal_states(run(1), run(1))
    assert not equal_states(run(1)["adapter"], run(2)["adapter"])


def _other_format(state: dict[str, Any]) -> None:
    state["format"] = 99


def _other_base(state: dict[str, Any]) -> None:
    state["identity"]["base_digest"] = "0" * 64


def _missing_tensor(state: dict[str, Any]) -> None:
    state["adapter"].popitem()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_format, "format 99"),
        (_other_base, "base_digest 0000"),
        (_missing_tensor, "1 tensors differ"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    learner = updater()
    state = learner.state_dict()
    change(state)
    with pytest.raises(LearnerError, match=message):
        learner.load_state_dict(state)


def test_the_saved_adapter_is_the_trained_policy(tmp_path: Path) -> None:
    learner = updater()
    learner.update(samples())
    files = learner.save_adapter(tmp_path / "v1")
    fresh = base()
    served = load_adapter(fresh.model, tmp_path / "v1", adapter_name="policy-v1", files=files)
    ids = torch.tensor([samples()[0].token_ids])
    with torch.no_grad():
        assert torch.equal(
            served(input_ids=ids).logits, learner.network.model(input_ids=ids).logits
        )


# --- the real model ---------------------------------------------------------------------------


@pytest.fixture(scope="session")
def smollm2(model_data_dir: Path) -> BaseModel:
    return load_base(ModelSettings(base="smollm2-135m", device="cpu"), model_data_dir)


@pytest.mark.model
def test_smollm2_answers_and_learns(smollm2: BaseModel) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = smollm2.render_prompt(question)
    with torch.no_grad():
        output = smollm2.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=10,
        )
    reply = output[0, len(prompt) :].tolist()
    assert smollm2.chat.decode(reply) == "The capital of France is Paris."
    assert reply[-1] == smollm2.chat.eos_token_id
    assert smollm2.chat.pad_token_id != smollm2.chat.eos_token_id

    settings = PLAIN.model_copy(update={"learning_rate": 1e-3})
    learner = PpoUpdater(smollm2, settings, ModelSettings(lora_first_layer=25))
    assert learner.network.shares_frozen_layers
    other = smollm2.chat.encode("It is Paris, I am happy to help.<|im_end|>")
    good, bad = sample("good", prompt, other, 1.0), sample("bad", prompt, reply, -1.0)
    before = total(learner, good), total(learner, bad)
    metrics = learner.update([good, bad]).metrics
    assert metrics["losses/initial_ratio_error"] == 0.0
    assert total(learner, good) > before[0]
    assert total(learner, bad) < before[1]
