"""The updates behind the loop's ``Trainer`` protocol: segments to samples, samples to an update."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from learner.adapters import read_weights
from learner.batch import BuildRules, BuiltSamples, TrainingSample, build_samples
from learner.examples import ExampleFile
from learner.loop import Trained
from learner.model import BaseModel, load_base
from learner.publish import BaseIdentity
from learner.targets import RECORDED_GAP
from learner.team import Team
from learner.update import PpoUpdater
from learner.warming import WarmStarted, WarmStartHooks
from learner.warmstart import WarmStart
from streams.contracts import ScoredSegment
from streams.errors import LearnerError
from streams.settings import LearnerSettings, ModelSettings, Settings

log = logging.getLogger(__name__)

_TOLERATED_GAP = 0.1
"""Nats per token: more than another precision explains."""


class PpoTrainer:
    """Trains a LoRA adapter on a base model.

    Args:
        base: The base model; it belongs to this trainer from now on.
        settings: Of the update.
        model_settings: Shape of the adapter.
        team: The processes that make updates together; this one alone if None.
        sharded: Whether they share the base model's weights out among them.

    Raises:
        ModelError: The base model cannot be trained this way.
    """

    def __init__(
        self,
        base: BaseModel,
        settings: LearnerSettings,
        model_settings: ModelSettings,
        team: Team | None = None,
        *,
        sharded: bool = False,
    ) -> None:
        self._base = base
        self._settings = settings
        self._model_settings = model_settings
        self._updater = PpoUpdater(base, settings, model_settings, team)
        if sharded:
            self._updater.network.spread_frozen_weights()
        self._rules = BuildRules(
            max_sequence_tokens=_sequence_limit(base, settings),
            on_mismatch=settings.digest_mismatch,
            interrupted=settings.interrupted_replies,
            hint=settings.hint,
            max_hint_tokens=settings.opd_max_hint_tokens,
        )

    @property
    def base(self) -> BaseIdentity:
        """What the adapter belongs to."""
        return BaseIdentity(
            model_id=self._base.model_id,
            model_digest=self._base.base_digest,
            tokenizer_digest=self._base.tokenizer_digest,
            template_digest=self._base.template_digest,
            adapter_rank=self._model_settings.lora_rank,
            adapter_alpha=self._model_settings.lora_alpha,
        )

    def train(
        self,
        segments: Sequence[ScoredSegment],
        current_version: int,
        adapter_of: Callable[[int], Path],
        should_stop: Callable[[], bool],
    ) -> Trained | None:
        """See ``learner.loop.Trainer``. Segments that cannot be used are left out and logged.

        Raises:
            LearnerError: As ``PpoUpdater.update``; nothing has changed.
            UpdateStoppedError: ``should_stop`` said so; nothing has changed.
        """
        built, samples = self._samples(segments)
        if not samples:
            return None
        result = self._updater.update(
            samples,
            current_version=current_version,
            load_version=adapter_of,
            should_stop=should_stop,
        )
        if result.metrics.get(RECORDED_GAP, 0.0) > _TOLERATED_GAP:
            log.warning(
                "recorded log-probabilities are not those of the version that wrote the turns "
                "gap=%.3g nats a token: have the server report them at the turn's temperature "
                "(vLLM: --logprobs-mode processed_logprobs)",
                result.metrics[RECORDED_GAP],
            )
        left_out = {
            "batch/turns_too_long": float(sum(one.too_long for one in built)),
            "batch/turns_interrupted": float(sum(one.interrupted for one in built)),
        }
        if left_out["batch/turns_too_long"]:
            log.warning(
                "replies left out of an update too_long=%d: they do not fit into %d tokens; raise "
                "learner.max_sequence_tokens to learn from them",
                left_out["batch/turns_too_long"], self._rules.max_sequence_tokens,
            )  # fmt: skip
        return Trained(
            metrics={**result.metrics, **left_out},
            optimizer_step=result.optimizer_step,
            used=frozenset(sample.segment_id for sample in samples),
        )

    def begin(self, adapter: Path | None, *, seed: int, optimizer_step: int) -> None:
        """Begin a training of its own, from a version's weights or from the base model.

        The value head, the optimizer and the learning rate's schedule are those of a new
        trainer, which this must be.

        Args:
            adapter: The folder with the version's adapter, verified; None is the base model.
            seed: Of the order of samples.
            optimizer_step: Steps taken up to that version.

        Raises:
            ArtifactError: The adapter cannot be read.
            LearnerError: It has another shape than this trainer's.
        """
        state = dict(self._updater.state_dict())
        if adapter is not None:
            state["adapter"] = read_weights(adapter)
        state["generator"] = torch.Generator().manual_seed(seed).get_state()
        state["optimizer_step"] = optimizer_step
        self._updater.load_state_dict(state)

    def digest(self, segments: Sequence[ScoredSegment]) -> str:
        """SHA-256 (hex) over what `train` makes of these segments.

        That is, of the MessagePack of its samples in order: token ids, where the replies stand
        in them, rewards, temperatures, recorded log-probabilities and hints.
        """
        _, samples = self._samples(segments)
        return hashlib.sha256(msgspec.msgpack.encode(samples)).hexdigest()

    def warm_start(self, file: ExampleFile, hooks: WarmStartHooks) -> WarmStarted:
        """See ``learner.loop.Trainer`` and ``WarmStart.run``."""
        before = self._updater.state_dict()
        network, limit = self._updater.network, self._rules.max_sequence_tokens
        try:
            return WarmStart(network, self._base, self._settings, limit).run(file, hooks)
        except BaseException as error:
            self._updater.load_state_dict(before)
            if isinstance(error, torch.OutOfMemoryError | MemoryError):
                raise LearnerError(
                    f"not enough memory for the warm start: {error}; lower "
                    "learner.micro_batch_segments or learner.max_sequence_tokens"
                ) from error
            raise

    @property
    def optimizer_step(self) -> int:
        """See ``PpoUpdater.optimizer_step``."""
        return self._updater.optimizer_step

    def state_dict(self) -> Mapping[str, Any]:
        """See ``PpoUpdater.state_dict``."""
        return self._updater.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``PpoUpdater.load_state_dict``."""
        self._updater.load_state_dict(state)

    def save_adapter(self, folder: Path) -> None:
        """See ``PpoUpdater.save_adapter``."""
        self._updater.save_adapter(folder)

    def _samples(
        self, segments: Sequence[ScoredSegment]
    ) -> tuple[list[BuiltSamples], list[TrainingSample]]:
        built = [self._built(scored) for scored in segments]
        samples = [sample for one in built for sample in one.samples]
        if self._settings.mode_weights[:2] == (0.0, 0.0):
            # Without a hint there is nothing to learn from them.
            samples = [sample for sample in samples if any(t.teacher_prompt for t in sample.turns)]
        return built, samples

    def _built(self, scored: ScoredSegment) -> BuiltSamples:
        segment = scored.segment
        try:
            built = build_samples(
                scored,
                self._base.chat,
                tokenizer_digest=self._base.tokenizer_digest,
                template_digest=self._base.template_digest,
                rules=self._rules,
            )
        except LearnerError as error:
            # One segment of another model must not keep the others from being learned from.
            log.warning("segment left out segment_id=%s reason=%s", segment.segment_id, error)
            return BuiltSamples(skipped=str(error))
        if built.skipped is not None:
            log.info("segment left out segment_id=%s reason=%s", segment.segment_id, built.skipped)
        elif built.too_long:
            log.info(
                "replies left out segment_id=%s too_long=%d", segment.segment_id, built.too_long
            )
        return built


def _sequence_limit(base: BaseModel, settings: LearnerSettings) -> int:
    """The settings' limit, or what the model can read if that is less."""
    readable = getattr(base.model.config.get_text_config(), "max_position_embeddings", None)
    if readable is None or readable >= settings.max_sequence_tokens:
        return settings.max_sequence_tokens
    log.warning(
        "learner.max_sequence_tokens is %d, but %s reads %d: that is the limit",
        settings.max_sequence_tokens, base.model_id, readable,
    )  # fmt: skip
    return int(readable)


def make_trainer(
    settings: Settings, team: Team | None = None, *, sharded: bool = False
) -> PpoTrainer:
    """Load the base model that the settings name and put a fresh adapter on it.

    Args:
        settings: All settings.
        team: See ``PpoTrainer``.
        sharded: See ``PpoTrainer``.

    Raises:
        ModelError: It cannot be loaded or trained.
    """
    base = load_base(settings.model, settings.data_dir)
    return PpoTrainer(base, settings.learner, settings.model, team, sharded=sharded)
