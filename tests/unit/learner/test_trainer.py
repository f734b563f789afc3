from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from learner.adapters import ADAPTER_FILES
from learner.checkpoint import LearnerState
from learner.publish import KL_METRIC, sanity_gate
from learner.trainer import PpoTrainer, make_trainer
from streams.contracts import Message, Role, ScoredSegment
from streams.errors import UpdateStoppedError
from streams.settings import LearnerSettings, ModelSettings, Settings
from tests.unit.learner.fakes import never, no_adapter, scored

SETTINGS = LearnerSettings(epochs=1, learning_rate=1e-3, micro_batch_segments=2)


@pytest.fixture
def trainer(tmp_path: Path) -> PpoTrainer:
    model = ModelSettings(base="tiny-random", device="cpu", lora_rank=2, num_threads=1)
    return make_trainer(Settings(data_dir=tmp_path, learner=SETTINGS, model=model))


def segment(name: str, reward: float = 1.0, *, digest: str | None = None) -> ScoredSegment:
    """One reply of text to one message."""
    made = scored(name, reward=reward)
    (step,) = made.segment.steps
    asked = Message(turn_id="u", role=Role.USER, content="hello", event_time=0)
    step = replace(
        step, context=(asked,), token_ids=None, policy_version=0, tokenizer_digest=digest
    )
    return replace(made, segment=replace(made.segment, steps=(step,)))


def test_an_update_passes_the_gate_with_the_metrics_it_reports(
    trainer: PpoTrainer, tmp_path: Path
) -> None:
    segments = [segment("a"), segment("b", -1.0), segment("c", 0.5)]
    trained = trainer.train(segments, 0, no_adapter, never)
    assert trained is not None
    assert trained.used == {"a", "b", "c"}
    assert trained.optimizer_step == 1
    assert KL_METRIC in trained.metrics
    folder = tmp_path / "adapter"
    folder.mkdir()
    trainer.save_adapter(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(ADAPTER_FILES)
    assert all(d.passed for d in sanity_gate(trained.metrics, folder, max_kl=1.0))
    # The bound is on what the one step did, not on what the loss saw before it.
    too_far = sanity_gate(trained.metrics, folder, max_kl=1e-9)
    assert [d.name for d in too_far if not d.passed] == ["kl"]


def test_a_stop_ends_an_update_before_it_begins(trainer: PpoTrainer) -> None:
    before = LearnerState.capture(trainer.state_dict())
    with pytest.raises(UpdateStoppedError):
        trainer.train([segment("a")], 0, no_adapter, lambda: True)
    assert LearnerState.capture(trainer.state_dict()) == before


def test_no_sequence_is_longer_than_the_model_reads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = ModelSettings(base="tiny-random", device="cpu", lora_rank=2, num_threads=1)
    long = SETTINGS.model_copy(update={"max_sequence_tokens": 5_000})
    trainer = make_trainer(Settings(data_dir=tmp_path, learner=long, model=model))
    assert "tiny-random reads 4096" in caplog.text
    asked = Message(turn_id="u", role=Role.USER, content="x" * 4_200, event_time=0)
    made = segment("long")
    step = replace(made.segment.steps[0], context=(asked,))
    made = replace(made, segment=replace(made.segment, steps=(step,)))
    assert trainer.train([made], 0, no_adapter, never) is None


def test_segments_of_another_model_are_left_out(trainer: PpoTrainer) -> None:
    foreign = segment("foreign", digest="f" * 64)
    trained = trainer.train([segment("a"), foreign, segment("b", -1.0)], 0, no_adapter, never)
    assert trained is not None
    assert trained.used == {"a", "b"}
    assert trainer.train([foreign], 0, no_adapter, never) is None
    assert trainer.train([], 0, no_adapter, never) is None


def test_a_restored_trainer_goes_on_as_the_first_would(trainer: PpoTrainer, tmp_path: Path) -> None:
    segments = [segment("a"), segment("b", -1.0), segment("c", 0.5)]
    trainer.train(segments, 0, no_adapter, never)
    state = LearnerState.capture(trainer.state_dict())
    trainer.train(segments, 1, no_adapter, never)
    expected = trainer.state_dict()["adapter"]
    trainer.load_state_dict(state.restore())
    trainer.train(segments, 1, no_adapter, never)
    again = trainer.state_dict()["adapter"]
    assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())


def _trainer(folder: Path, **changes: object) -> PpoTrainer:
    model = ModelSettings(base="tiny-random", device="cpu", lora_rank=2, num_threads=1)
    settings = SETTINGS.model_copy(update=changes)
    return make_trainer(Settings(data_dir=folder, learner=settings, model=model))


def _directed(made: ScoredSegment, text: str) -> ScoredSegment:
    """The same, with a directive that followed the reply."""
    (reward,) = made.rewards
    return replace(made, rewards=(replace(reward, directives=(text,)),))


def test_opd_trains_on_what_holds_a_hint(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, mode="opd")
    plain, worded = segment("a"), _directed(segment("b", 0.0), "shorter, please")
    assert trainer.train([plain], 0, no_adapter, never) is None
    unrated = replace(worded, trainable=False, untrainable_reason="all rewards are zero")
    trained = trainer.train([plain, unrated], 0, no_adapter, never)
    assert trained is not None
    assert trained.used == {"b"}
    assert trained.metrics["opd/taught_share"] == 1.0
    assert _trainer(tmp_path).train([unrated], 0, no_adapter, never) is None
    blend = _trainer(tmp_path, mode="hybrid", hybrid_grpo_weight=0.0)
    same = blend.train([plain, unrated], 0, no_adapter, never)
    assert same is not None
    assert (same.used, same.metrics) == (trained.used, trained.metrics)
    # A blend learns from both.
    both = _trainer(tmp_path, mode="hybrid").train([plain, unrated], 0, no_adapter, never)
    assert both is not None
    assert both.used == {"a", "b"}


def test_what_is_left_out_of_segments_is_counted_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    trainer = _trainer(tmp_path, max_sequence_tokens=60)
    made = segment("a")
    (step,) = made.segment.steps
    asked = replace(step.context[0], turn_id="u2")
    giant = replace(step, turn_id="giant", reply="x" * 99, context=(asked,))
    broken = replace(step, turn_id="broken", finish_reason="broken_off", context=(asked,))
    made = replace(made, segment=replace(made.segment, steps=(step, giant, broken)))
    trained = trainer.train([made, segment("b")], 0, no_adapter, never)
    assert trained is not None
    assert trained.metrics["batch/turns_too_long"] == 1.0
    assert trained.metrics["batch/turns_interrupted"] == 1.0
    assert trained.metrics["batch/turns"] == 2.0
    assert trained.metrics["batch/truncated_share"] == 0.0
    assert "too_long=1: they do not fit into 60 tokens; raise learner.max_seq" in caplog.text
    assert "segment_id=a too_long=1" in caplog.text
    kept = _trainer(tmp_path, max_sequence_tokens=60, interrupted_replies="train")
    hung_up = replace(step, finish_reason="client_disconnected")
    made = replace(made, segment=replace(made.segment, steps=(hung_up,)))
    assert trainer.train([made], 0, no_adapter, never) is None
    assert kept.train([made], 0, no_adapter, never) is not None


def test_log_probabilities_that_are_not_the_servers_own_are_said(
    trainer: PpoTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    def recorded(logprobs: tuple[float, ...] | None) -> ScoredSegment:
        made = segment("a")
        (step,) = made.segment.steps
        step = replace(step, token_ids=(40, 41), behaviour_logprobs=logprobs)
        return replace(made, segment=replace(made.segment, steps=(step,)))

    network = trainer._updater.network
    (sample,) = trainer._built(recorded(None)).samples
    with torch.no_grad():
        own = tuple(network.score([network.row(sample)]).logprobs.tolist())
    right = trainer.train([recorded(own)], 0, no_adapter, never)
    assert right is not None
    assert right.metrics["stale/recorded_gap"] == 0.0
    assert "processed_logprobs" not in caplog.text
    trainer.train([recorded(tuple(logprob / 2 for logprob in own))], 1, no_adapter, never)
    assert "processed_logprobs" not in caplog.text
    trainer.train([recorded(tuple(logprob / 2 for logprob in own))], 0, no_adapter, never)
    assert "have the server report them at the turn's temperature" in caplog.text


def test_the_base_is_identified(trainer: PpoTrainer) -> None:
    base = trainer.base
    assert (base.model_id, base.adapter_rank, base.adapter_alpha) == ("tiny-random", 2, 16.0)
    assert len({base.model_digest, base.tokenizer_digest, base.template_digest}) == 3
