"""A retrain: batches from what was read, updates one after the other, one candidate version.

The live learner may be at work meanwhile and notices nothing: no consumer group, no checkpoint,
no alias, and no number of its own line is touched. The version is a candidate that was trained
beside that line (``streams.registry.RETRAIN``); nothing serves it until somebody decides so.

What makes two retrains of the same segments equal is in ``learner.retrain.batches``, what makes
one that was killed go on in ``learner.retrain.store``.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch

from learner.checkpoint import LearnerState
from learner.loop import Trainer
from learner.makeup import Limits as Balance
from learner.makeup import MakeUp
from learner.publish import (
    KL_METRIC,
    UNKNOWN_BEHAVIOUR,
    adapter_folder,
    event_id,
    sanity_gate,
    uses_digest,
)
from learner.retrain.batches import Limits, Usable, cut, seed_of
from learner.retrain.store import Made, Store
from streams.clock import Clock
from streams.contracts import (
    GateDecision,
    ModelVersion,
    OffsetRange,
    ScoredSegment,
    VersionStatus,
)
from streams.errors import BrokerError, LearnerError, RegistryError
from streams.kafka.places import Range
from streams.registry import RETRAIN, ArtifactStore, Registry, SegmentUse, StoredFolder, verify
from streams.settings import LearnerSettings

log = logging.getLogger(__name__)

ID = "retrain_id"
BATCHES = "retrain_batches_sha256"
"""The attribute that is equal if two retrains had the same input."""

_JOB = "job"
_DONE = "read"
_NOT_A_VERSION = -1
"""What the policy is between the base version and the new one."""


class RetrainTrainer(Trainer, Protocol):
    """A trainer that can begin at a version, and say what it makes of segments."""

    def begin(self, adapter: Path | None, *, seed: int, optimizer_step: int) -> None:
        """See ``PpoTrainer.begin``."""
        ...

    def digest(self, segments: Sequence[ScoredSegment]) -> str:
        """See ``PpoTrainer.digest``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be done, fixed when a retrain begins.

    Attributes:
        name: What it is called, and its folder.
        id: No other retrain's, anywhere.
        policy: Whose version it becomes.
        base_version: What training begins from; 0 is the base model.
        updates: How many; one pass over the segments if None.
        begin: Where the range begins, as it was asked for.
        end: Where it ends, likewise.
        ranges: What that is, per partition.
        config_hash: Of the settings.
        archive: The address of the archive that is read; Kafka is if there is none.
    """

    name: str
    id: str
    policy: str
    base_version: int
    updates: int | None
    begin: str
    end: str
    ranges: tuple[Range, ...]
    config_hash: str
    archive: str = ""

    def keep(self, store: Store) -> None:
        """Write it down."""
        store.keep_fact(_JOB, asdict(self))

    @classmethod
    def of(cls, store: Store) -> Job | None:
        """What was written down; None if nothing was."""
        kept = store.fact(_JOB)
        if kept is None:
            return None
        return cls(**{**kept, "ranges": tuple(Range(**one) for one in kept["ranges"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What the range holds.

    Attributes:
        records: That were read.
        undecodable: Of these.
        segments: By policy: how many, and how many of them teach anything.
    """

    records: int
    undecodable: int
    segments: dict[str, tuple[int, int]]

    def keep(self, store: Store) -> None:
        """The range was read whole."""
        store.keep_fact(_DONE, [self.records, self.undecodable])

    @classmethod
    def of(cls, store: Store) -> Counted | None:
        """What was read; None if it was not read whole."""
        kept = store.fact(_DONE)
        if kept is None:
            return None
        return cls(records=kept[0], undecodable=kept[1], segments=store.counts())


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The updates of a retrain before they are made."""

    seed: int
    usable: int
    updates: tuple[tuple[str, ...], ...]


def plan(
    store: Store, settings: LearnerSettings, base_version: int, updates: int | None
) -> Batches:
    """Which segments make which update.

    Raises:
        LearnerError: The range holds none of the policy, none that teaches anything, fewer than
            an update needs, or too few for so many updates.
    """
    usable = store.usable(settings.policy)
    _require_enough(store, settings, usable)
    seed = seed_of(usable, policy=settings.policy, base_version=base_version, seed=settings.seed)
    limits = Limits(
        batch_segments=settings.batch_segments,
        max_updates_per_segment=settings.max_updates_per_segment,
        max_updates_per_session=settings.max_updates_per_session,
    )
    return Batches(
        seed=seed, usable=len(usable), updates=cut(usable, limits, updates=updates, seed=seed)
    )


def _require_enough(store: Store, settings: LearnerSettings, usable: Sequence[Usable]) -> None:
    counts = store.counts()
    if settings.policy not in counts:
        others = ", ".join(f"{name} ({count})" for name, (count, _) in counts.items())
        raise LearnerError(
            f"no segment of policy {settings.policy!r} lies between these places; "
            + (f"there are some of {others}: set learner.policy" if others else "none of any")
        )
    if not usable:
        raise LearnerError(
            f"none of the {counts[settings.policy][0]} segments of policy {settings.policy!r} "
            "can be learned from: `clawstream doctor` says why segments are not trainable"
        )
    if len(usable) < settings.min_sample_size:
        raise LearnerError(
            f"only {len(usable)} segments of policy {settings.policy!r} can be learned from, "
            f"learner.min_sample_size asks for {settings.min_sample_size}: begin earlier"
        )


def base_of(registry: Registry, policy: str, base_version: int) -> ModelVersion | None:
    """The version to begin from; None is the base model.

    Raises:
        RegistryError: There is no such version, or it was rejected.
    """
    if base_version == 0:
        return None
    found = registry.get(policy, base_version)
    if found is None or found.adapter_uri is None:
        newest = registry.next_version(policy) - 1
        raise RegistryError(
            f"policy {policy!r} has no version {base_version} to begin from: "
            + (f"its newest is {newest}, and 0 is the base model" if newest else "it has none yet")
        )
    if found.status is VersionStatus.REJECTED:
        raise RegistryError(f"version {base_version} of policy {policy!r} was {found.reason}")
    return found


class Retrain:
    """See the module.

    Args:
        job: What is to be done.
        store: What was read, and the progress; read whole.
        settings: Of the learner; those of the job.
        trainer: New; makes the updates.
        registry: Where versions are recorded.
        artifacts: Where their files go.
        send: Sends the events that Kafka has not acknowledged yet.
        clock: Tells when it was decided.
        shown: Told how many updates of how many are made.
    """

    def __init__(
        self,
        *,
        job: Job,
        store: Store,
        settings: LearnerSettings,
        trainer: RetrainTrainer,
        registry: Registry,
        artifacts: ArtifactStore,
        send: Callable[[], object],
        clock: Clock,
        shown: Callable[[int, int], None],
    ) -> None:
        self._job = job
        self._store = store
        self._settings = settings
        self._trainer = trainer
        self._registry = registry
        self._artifacts = artifacts
        self._send = send
        self._clock = clock
        self._shown = shown

    def run(self) -> ModelVersion:
        """Make the updates that are not made yet, and publish the version once.

        Raises:
            RegistryError: There is no such base version, or the version cannot be recorded.
            LearnerError: Nothing can be learned, or the base version is another model's.
            ArtifactError: Files cannot be read or written.
        """
        known = published(self._registry, self._job)
        if known is None:
            base = base_of(self._registry, self._job.policy, self._job.base_version)
            self._require_same_model(base)
            batches = plan(self._store, self._settings, self._job.base_version, self._job.updates)
            self._train(base, batches)
            known = self._publish(base, batches)
        try:
            self._send()
        except BrokerError as error:
            log.warning("version %d is recorded, its event waits: %s", known.version, error)
        return known

    def _require_same_model(self, base: ModelVersion | None) -> None:
        if base is None:
            return
        ours = self._trainer.base
        pairs = {
            "base model": (base.base_model_digest, ours.model_digest),
            "tokenizer": (base.tokenizer_digest, ours.tokenizer_digest),
            "model.lora_rank": (base.adapter_rank, ours.adapter_rank),
            "model.lora_alpha": (base.adapter_alpha, ours.adapter_alpha),
        }
        for what, (theirs, mine) in pairs.items():
            if theirs != mine:
                raise LearnerError(
                    f"version {base.version} of policy {base.policy!r} has another {what} "
                    f"({theirs}) than the settings ({mine}): set model as it was then"
                )

    # Training

    def _train(self, base: ModelVersion | None, batches: Batches) -> None:
        done = self._store.made()
        torch.manual_seed(batches.seed)
        folder = None if base is None else verify(base.adapter_uri or "", base.adapter_files)
        steps = 0 if base is None else base.optimizer_step
        self._trainer.begin(folder, seed=batches.seed, optimizer_step=steps)
        if done:
            state = self._store.state(done[-1].number)
            self._trainer.load_state_dict(state.restore())
        for number in range(len(done), len(batches.updates)):
            made = self._update(number, batches.updates[number])
            self._store.keep(made, LearnerState.capture(self._trainer.state_dict()))
            self._shown(number + 1, len(batches.updates))

    def _update(self, number: int, ids: Sequence[str]) -> Made:
        """One update; one that fails or goes too far is undone, as by the live learner."""
        segments = [self._store.open_segment(self._job.policy, one).scored for one in ids]
        digest = self._trainer.digest(segments)
        before = LearnerState.capture(self._trainer.state_dict())
        current = self._job.base_version if number == 0 else _NOT_A_VERSION
        try:
            trained = self._trainer.train(segments, current, self._adapter_of, lambda: False)
        except LearnerError as error:
            return self._undone(number, digest, str(error))
        if trained is None:
            return self._undone(number, digest, "none of its segments can be trained on")
        moved = trained.metrics.get(KL_METRIC, math.nan)
        if not moved <= self._settings.gate_max_kl:
            self._trainer.load_state_dict(before.restore())
            why = f"{KL_METRIC} is {moved:g}, at most {self._settings.gate_max_kl:g} is allowed"
            return self._undone(number, digest, why)
        return Made(
            number=number,
            digest=digest,
            used=tuple(sorted(trained.used)),
            metrics={k: float(v) for k, v in trained.metrics.items() if math.isfinite(v)},
            optimizer_step=trained.optimizer_step,
        )

    def _undone(self, number: int, digest: str, why: str) -> Made:
        log.warning("update %d of retrain %s does not count: %s", number, self._job.name, why)
        return Made(
            number=number, digest=digest, used=(), metrics={}, undone=why,
            optimizer_step=self._trainer.optimizer_step,
        )  # fmt: skip

    def _adapter_of(self, version: int) -> Path:
        """See ``Learner``: of versions that wrote replies without their log-probabilities."""
        return adapter_folder(self._registry, self._job.policy, version, base=self._trainer.base)

    # Publishing

    def _publish(self, base: ModelVersion | None, batches: Batches) -> ModelVersion:
        made = self._store.made()
        if all(one.undone is not None for one in made):
            raise LearnerError(
                f"none of the {len(made)} updates could be made, the last one because: "
                f"{made[-1].undone}"
            )
        with self._artifacts.numbering(self._job.policy):
            adapter = self._write_adapter()
            number = self._registry.next_version(self._job.policy)
            version = self._version(number, base, batches, made, adapter)
            recorded = self._registry.record(version, lineage=self._uses(made))
        self._store.drop_state(made[-1].number)
        return recorded

    def _write_adapter(self) -> StoredFolder:
        """Under a name that no learner gives, so that it takes nobody's for a leftover."""
        name = f"retrain-{self._job.id}"
        left = self._artifacts.orphans(self._job.policy, ()).get(name)
        if left is not None:
            self._artifacts.remove(left)
        return self._artifacts.write(self._job.policy, name, self._trainer.save_adapter)

    def _version(
        self,
        number: int,
        base: ModelVersion | None,
        batches: Batches,
        made: Sequence[Made],
        adapter: StoredFolder,
    ) -> ModelVersion:
        identity, counted = self._trainer.base, [one for one in made if one.undone is None]
        made_up = MakeUp.of(self._segments(made))
        balance = Balance(
            max_share=self._settings.imbalance_max_share,
            min_sign_share=self._settings.imbalance_min_sign_share,
        )
        metrics = {**_means(counted), **made_up.metrics(balance)}
        gate = sanity_gate(
            metrics,
            verify(adapter.uri, adapter.files),
            max_kl=self._settings.gate_max_kl,
            instead=(_updates_counted(made),),
        )
        failed = [decision.name for decision in gate if not decision.passed]
        why = f"retrain {self._job.name}: {self._job.begin} to {self._job.end}"
        uses = self._uses(made)
        return ModelVersion(
            event_id=event_id(self._job.policy, number, 0),
            version=number,
            status=VersionStatus.REJECTED if failed else VersionStatus.CANDIDATE,
            base_model_id=identity.model_id,
            base_model_digest=identity.model_digest,
            tokenizer_digest=identity.tokenizer_digest,
            template_digest=identity.template_digest,
            event_time=self._clock.now_ms(),
            policy=self._job.policy,
            parent=None if base is None else base.version,
            adapter_uri=adapter.uri,
            adapter_files=dict(adapter.files),
            adapter_rank=identity.adapter_rank,
            adapter_alpha=identity.adapter_alpha,
            source_offsets=tuple(
                OffsetRange(topic=one.topic, partition=one.partition, start=one.start, end=one.end)
                for one in self._job.ranges
            ),
            segment_count=len(uses),
            segments_digest=uses_digest(uses),
            behaviour_versions=self._behaviour(made),
            optimizer_step=made[-1].optimizer_step,
            config_hash=self._job.config_hash,
            metrics=metrics,
            gate=gate,
            reason=f"rejected by {', '.join(failed)}; {why}" if failed else why,
            attributes={**made_up.attributes(balance), **self._attributes(batches, made)},
        )

    def _attributes(self, batches: Batches, made: Sequence[Made]) -> dict[str, str]:
        return {
            RETRAIN: self._job.name,
            ID: self._job.id,
            BATCHES: batches_digest(made),
            "retrain_from": self._job.begin,
            "retrain_to": self._job.end,
            "retrain_base_version": str(self._job.base_version),
            "retrain_seed": str(batches.seed),
            "retrain_updates": str(len(made)),
            "retrain_updates_undone": str(sum(one.undone is not None for one in made)),
        }

    def _used(self, made: Sequence[Made]) -> set[str]:
        return {segment_id for one in made for segment_id in one.used}

    def _uses(self, made: Sequence[Made]) -> tuple[SegmentUse, ...]:
        used = self._used(made)
        return tuple(
            SegmentUse(segment_id=one.segment_id, revision=one.revision)
            for one in self._store.usable(self._job.policy)
            if one.segment_id in used
        )

    def _segments(self, made: Sequence[Made]) -> Iterator[ScoredSegment]:
        for segment_id in sorted(self._used(made)):
            yield self._store.open_segment(self._job.policy, segment_id).scored

    def _behaviour(self, made: Sequence[Made]) -> dict[str, int]:
        counts = Counter(
            UNKNOWN_BEHAVIOUR if step.policy_version is None else str(step.policy_version)
            for scored in self._segments(made)
            for step in scored.segment.steps
        )
        return dict(sorted(counts.items()))


def published(registry: Registry, job: Job) -> ModelVersion | None:
    """The version that this retrain was published as, if it was."""
    for version in registry.versions(job.policy):
        if version.attributes.get(ID) == job.id:
            return version
    return None


def batches_digest(made: Sequence[Made]) -> str:
    """SHA-256 (hex) over the digests of the batches, one a line, in order."""
    return hashlib.sha256("\n".join(one.digest for one in made).encode()).hexdigest()


def _means(made: Sequence[Made]) -> dict[str, float]:
    """Each metric's mean over the updates that count and report it."""
    found: dict[str, list[float]] = {}
    for one in made:
        for name, value in one.metrics.items():
            found.setdefault(name, []).append(value)
    return {name: math.fsum(values) / len(values) for name, values in sorted(found.items())}


def _updates_counted(made: Sequence[Made]) -> GateDecision:
    counted = sum(one.undone is None for one in made)
    undone = [one for one in made if one.undone is not None]
    return GateDecision(
        name="updates",
        passed=counted > 0,
        value=float(counted),
        threshold=1.0,
        detail=f"{len(undone)} undone: {undone[-1].undone}" if undone else None,
    )


__all__ = [
    "BATCHES",
    "Batches",
    "Counted",
    "Job",
    "Retrain",
    "RetrainTrainer",
    "base_of",
    "batches_digest",
    "plan",
    "published",
]
