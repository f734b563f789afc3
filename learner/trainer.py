"""PPO behind the loop's ``Trainer`` protocol: segments to samples, samples to an update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from learner.batch import TrainingSample, build_samples
from learner.loop import Trained
from learner.model import BaseModel, load_base
from learner.publish import BaseIdentity
from learner.update import PpoUpdater
from streams.contracts import ScoredSegment
from streams.errors import LearnerError
from streams.settings import LearnerSettings, ModelSettings, Settings

log = logging.getLogger(__name__)


class PpoTrainer:
    """Trains a LoRA adapter on a base model.

    Args:
        base: The base model; it belongs to this trainer from now on.
        settings: Of the update.
        model_settings: Shape of the adapter.

    Raises:
        ModelError: The base model cannot be trained this way.
    """

    def __init__(
        self, base: BaseModel, settings: LearnerSettings, model_settings: ModelSettings
    ) -> None:
        self._base = base
        self._settings = settings
        self._model_settings = model_settings
        self._updater = PpoUpdater(base, settings, model_settings)
        self._max_sequence_tokens = _sequence_limit(base, settings)

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
        samples = [sample for scored in segments for sample in self._samples(scored)]
        if not samples:
            return None
        result = self._updater.update(
            samples,
            current_version=current_version,
            load_version=adapter_of,
            should_stop=should_stop,
        )
        return Trained(
            metrics=result.metrics,
            optimizer_step=result.optimizer_step,
            used=frozenset(sample.segment_id for sample in samples),
        )

    def state_dict(self) -> Mapping[str, Any]:
        """See ``PpoUpdater.state_dict``."""
        return self._updater.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``PpoUpdater.load_state_dict``."""
        self._updater.load_state_dict(state)

    def save_adapter(self, folder: Path) -> None:
        """See ``PpoUpdater.save_adapter``."""
        self._updater.save_adapter(folder)

    def _samples(self, scored: ScoredSegment) -> Sequence[TrainingSample]:
        segment = scored.segment
        try:
            built = build_samples(
                scored,
                self._base.chat,
                tokenizer_digest=self._base.tokenizer_digest,
                template_digest=self._base.template_digest,
                max_sequence_tokens=self._max_sequence_tokens,
                on_mismatch=self._settings.digest_mismatch,
            )
        except LearnerError as error:
            # One segment of another model must not keep the others from being learned from.
            log.warning("segment left out segment_id=%s reason=%s", segment.segment_id, error)
            return ()
        if built.skipped is not None:
            log.info("segment left out segment_id=%s reason=%s", segment.segment_id, built.skipped)
        return built.samples


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


def make_trainer(settings: Settings) -> PpoTrainer:
    """Load the base model that the settings name and put a fresh adapter on it.

    Raises:
        ModelError: It cannot be loaded or trained.
    """
    base = load_base(settings.model, settings.data_dir)
    return PpoTrainer(base, settings.learner, settings.model)
