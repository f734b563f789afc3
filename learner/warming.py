"""A warm start as a step of the learner: once for each file, published as a version.

Whether a file was learned from is decided by the SHA-256 of its bytes, which a version keeps in
its attributes: if a version of the policy that the gate let pass names it, nothing is done. One
that was rejected does not count, nor does a change of the file's name; a change of one byte makes
it another file.

Progress is kept beside the adapters, in a folder named after the file, and removed once a version
is there. A crash before the version is recorded leaves it, and the next start goes on with it;
if settings or parent changed meanwhile it is of no use and removed.

No record of a topic is consumed: the version's checkpoint names the positions and the window of
the one before it.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from learner.checkpoint import LearnerState, pack_rng
from learner.examples import ExampleFile
from learner.publish import FinishedUpdate, Publisher
from streams.clock import Clock
from streams.contracts import GateDecision, ModelVersion, VersionStatus
from streams.errors import UpdateStoppedError
from streams.registry import ArtifactStore, Checkpoint, Registry, verify

if TYPE_CHECKING:
    from learner.loop import Trainer

log = logging.getLogger(__name__)

SHA256 = "warm_start_sha256"
"""The attribute of a version that names the file it was warm-started from."""

_PROGRESS = "warm-start-"
_STATE = "progress.pt"
_SHOWN_MS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStarted:
    """What a warm start did.

    Attributes:
        metrics: See `learner.ppo.diagnostics.METRICS`.
        gate: Whether it did any good.
    """

    metrics: Mapping[str, float]
    gate: tuple[GateDecision, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartHooks:
    """What a warm start needs from whoever runs it.

    Args:
        resume: What `save` was last given; None begins.
        save: Keeps the state of an unfinished warm start.
        shown: Told how many of how many steps are done, and the last one's loss.
        should_stop: Asked before every micro-batch.
    """

    resume: Mapping[str, Any] | None
    save: Callable[[Mapping[str, Any]], None]
    shown: Callable[[int, int, float], None]
    should_stop: Callable[[], bool]


class Warming:
    """See the module.

    Args:
        file: What to learn from.
        policy: Whose version it becomes.
        registry: What was learned before.
        artifacts: Where progress is kept.
        publisher: Publishes the version.
        config_hash: Of the settings.
        clock: Tells the time.
        stopping: Set to interrupt it.
    """

    def __init__(
        self,
        *,
        file: ExampleFile,
        policy: str,
        registry: Registry,
        artifacts: ArtifactStore,
        publisher: Publisher,
        config_hash: str,
        clock: Clock,
        stopping: threading.Event,
    ) -> None:
        self._file = file
        self._policy = policy
        self._registry = registry
        self._artifacts = artifacts
        self._publisher = publisher
        self._config_hash = config_hash
        self._clock = clock
        self._stopping = stopping
        self._shown_at_ms = 0

    def run(self, trainer: Trainer, checkpoint: Checkpoint | None, rng: random.Random) -> None:
        """Learn from the file and publish the version, unless that was done before.

        A stop leaves the trainer as it was; the next start goes on.

        Args:
            trainer: As the checkpoint left it.
            checkpoint: Where the newest version left off.
            rng: The sampler's generator, which is not used.

        Raises:
            LearnerError: The file cannot be learned from.
            RegistryError, ArtifactError: As ``Publisher.publish``.
        """
        known = self._version()
        if known is not None:
            log.info(
                "warm start: version %d has learned from %s already (sha256=%s)",
                known.version, self._file.name, self._file.sha256,
            )  # fmt: skip
            self._forget(keep=None)
            return
        log.info(
            "warm start: file=%s preferences=%d demonstrations=%d",
            self._file.name, self._file.preferences, self._file.demonstrations,
        )  # fmt: skip
        before = LearnerState.capture(trainer.state_dict())
        try:
            warmed = trainer.warm_start(self._file, self._hooks())
        except UpdateStoppedError as stopped:
            log.info("%s", stopped)
            return
        version = self._publisher.publish(self._finished(trainer, warmed, before, checkpoint, rng))
        if version.status is VersionStatus.REJECTED:
            log.warning("warm start: version %d %s", version.version, version.reason)
            trainer.load_state_dict(before.restore())
        else:
            numbers = " ".join(f"{name}={n:.6g}" for name, n in sorted(warmed.metrics.items()))
            log.info(
                "warm start: version=%d status=%s %s",
                version.version,
                version.status.value,
                numbers,
            )
        self._forget(keep=None)

    def _version(self) -> ModelVersion | None:
        """The version that has learned from this file."""
        for version in self._registry.versions(self._policy):
            same = version.attributes.get(SHA256) == self._file.sha256
            if same and version.status is not VersionStatus.REJECTED:
                return version
        return None

    def _finished(
        self,
        trainer: Trainer,
        warmed: WarmStarted,
        before: LearnerState,
        checkpoint: Checkpoint | None,
        rng: random.Random,
    ) -> FinishedUpdate:
        file = self._file
        return FinishedUpdate(
            metrics=warmed.metrics,
            optimizer_step=trainer.optimizer_step,
            used=(),
            since=() if checkpoint is None else checkpoint.positions,
            positions=() if checkpoint is None else checkpoint.positions,
            window=() if checkpoint is None else checkpoint.window,
            rng=pack_rng(rng),
            sealed_at=self._clock.now_ms() if checkpoint is None else checkpoint.sealed_at,
            reason=(
                f"warm start: {file.preferences} preferences and {file.demonstrations} "
                f"demonstrations of {file.name}"
            ),
            config_hash=self._config_hash,
            save_adapter=trainer.save_adapter,
            before=before,
            after=LearnerState.capture(trainer.state_dict()),
            gate=warmed.gate,
            attributes={
                SHA256: file.sha256,
                "warm_start_file": file.name,
                "warm_start_preferences": str(file.preferences),
                "warm_start_demonstrations": str(file.demonstrations),
            },
        )

    def _hooks(self) -> WarmStartHooks:
        return WarmStartHooks(
            resume=self._kept(),
            save=self._keep,
            shown=self._show,
            should_stop=self._stopping.is_set,
        )

    # Progress

    def _show(self, done: int, steps: int, loss: float) -> None:
        now_ms = self._clock.now_ms()
        if done < steps and 0 <= now_ms - self._shown_at_ms < _SHOWN_MS:
            return
        self._shown_at_ms = now_ms
        log.info("warm start: %d%% step=%d/%d loss=%.4g", 100 * done // steps, done, steps, loss)

    def _keep(self, state: Mapping[str, Any]) -> None:
        """Write an unfinished warm start; the one written before goes."""
        name = f"{_PROGRESS}{self._file.sha256[:16]}-{state['step']}"
        kept = {"for": self._identity(), "state": dict(state)}
        if name not in self._folders():
            self._artifacts.write(
                self._policy, name, lambda folder: torch.save(kept, folder / _STATE)
            )
        self._forget(keep=name)

    def _kept(self) -> Mapping[str, Any] | None:
        """The newest unfinished warm start of this file, with these settings and this parent."""
        newest: tuple[int, Mapping[str, Any]] | None = None
        for name, folder in self._folders().items():
            found = self._read(folder)
            if found is None or found["for"] != self._identity():
                log.info("warm start: what %s holds is of no use any more", name)
                continue
            step = int(found["state"]["step"])
            if newest is None or step > newest[0]:
                newest = step, found["state"]
        return None if newest is None else newest[1]

    def _read(self, folder: Path) -> Mapping[str, Any] | None:
        try:
            # Only tensors and plain values are loaded: a state file runs no code.
            found: Mapping[str, Any] = torch.load(
                folder / _STATE, map_location="cpu", weights_only=True
            )
        except Exception as error:  # torch raises whatever the damaged bytes lead to
            log.warning("warm start: %s cannot be read: %s", folder, error)
            return None
        return found

    def _identity(self) -> dict[str, Any]:
        return {
            "sha256": self._file.sha256,
            "config_hash": self._config_hash,
            "parent": self._registry.newest_good(self._policy) or 0,
        }

    def _forget(self, *, keep: str | None) -> None:
        for name, folder in self._folders().items():
            if name != keep:
                self._artifacts.remove(folder.as_uri())

    def _folders(self) -> dict[str, Path]:
        """The folders that hold unfinished warm starts of the policy, of any file."""
        return {
            name: verify(uri, {})
            for name, uri in self._artifacts.orphans(self._policy, ()).items()
            if name.startswith(_PROGRESS)
        }


__all__ = ["SHA256", "WarmStartHooks", "WarmStarted", "Warming"]
