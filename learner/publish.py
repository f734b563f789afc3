"""Publishing a version so that a crash anywhere leaves exactly one and loses no segment.

The order is fixed (DESIGN §6):

1. the adapter's files and the learner's state, each folder fsynced and renamed into place;
2. one registry transaction: version, status, offsets, lineage, checkpoint, alias;
3. the ``model.versions`` event, acknowledged by Kafka;
4. the event marked as published.

A crash before 2 leaves folders of the next version that nobody refers to: ``recover`` removes
them, and the segments are still ahead of the newest checkpoint. Other folders that the registry
does not know are no leftovers of a crash; with them ``recover`` refuses to go on. A crash after
2 leaves an event that is not marked: ``recover`` sends it, for the second time at worst, under
the same ``event_id``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from learner.checkpoint import LearnerState
from learner.feed import Writer
from learner.kafka import Outgoing
from learner.window import Candidate
from streams.clock import Clock
from streams.contracts import GateDecision, ModelVersion, OffsetRange, SourceRef, VersionStatus
from streams.errors import ArtifactError, BrokerError, RegistryError
from streams.registry import (
    ArtifactStore,
    Checkpoint,
    Registry,
    SegmentUse,
    StoredFolder,
    verify,
)
from streams.serde import Codec
from streams.settings import Section

log = logging.getLogger(__name__)

KL_METRIC = "kl/update_k3"
"""What the gate bounds: KL of the policy before the update to the one that would be served,
estimator k3, nats per token of the update's samples, measured after its last step."""

_ADAPTER = "policy-v"
_STATE = "learner-v"

UNKNOWN_BEHAVIOUR = "unknown"
"""Counts the steps whose turns did not say which version wrote them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseIdentity:
    """Which base model, tokenizer and chat template an adapter belongs to."""

    model_id: str
    model_digest: str
    tokenizer_digest: str
    template_digest: str
    adapter_rank: int
    adapter_alpha: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedUpdate:
    """An update that is ready to be published.

    Attributes:
        metrics: Diagnostics of the update.
        optimizer_step: Optimizer steps taken since the policy began.
        used: The segments it was trained on.
        since: Per partition, the first record not in the version before.
        positions: Per partition, the first record not in this version's snapshot.
        window: The records the window held, oldest first.
        rng: The sampler's state after this update's draw.
        sealed_at: When the snapshot was sealed, ms.
        reason: Why the update was made.
        config_hash: Of the settings it was made with.
        save_adapter: Writes the adapter's files into a folder.
        before: The learner's state before the update, to go back to if it is rejected.
        after: The learner's state after it.
        gate: What decides instead of the bound on the KL, if anything does.
        attributes: More about where it came from.
    """

    metrics: Mapping[str, float]
    optimizer_step: int
    used: Sequence[Candidate]
    since: tuple[SourceRef, ...]
    positions: tuple[SourceRef, ...]
    window: tuple[SourceRef, ...]
    rng: bytes
    sealed_at: int
    reason: str
    config_hash: str
    save_adapter: Callable[[Path], object]
    before: LearnerState
    after: LearnerState
    gate: tuple[GateDecision, ...] | None = None
    attributes: Mapping[str, str] = field(default_factory=dict)


class Publisher:
    """Publishes the versions of one policy; the only one that does.

    Args:
        registry: Where versions are recorded.
        artifacts: Where files go.
        writer: Writes events to Kafka.
        codec: Encodes them.
        topic: Of the events.
        policy: Whose versions.
        base: What the adapters belong to.
        max_kl: Bound of the gate on ``metrics[KL_METRIC]``.
        keep_checkpoints: How many checkpoints stay.
        clock: Tells when things were decided.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        artifacts: ArtifactStore,
        writer: Writer,
        codec: Codec,
        topic: str,
        policy: str,
        base: BaseIdentity,
        max_kl: float,
        keep_checkpoints: int,
        clock: Clock,
    ) -> None:
        self._registry = registry
        self._artifacts = artifacts
        self._writer = writer
        self._codec = codec
        self._topic = topic
        self._policy = policy
        self._base = base
        self._max_kl = max_kl
        self._keep_checkpoints = keep_checkpoints
        self._clock = clock

    def recover(self) -> None:
        """Finish what a crash interrupted: remove orphan files, send unsent events.

        Raises:
            BrokerError: An event could not be sent; it stays in the outbox.
            RegistryError: The artifacts are not this registry's; nothing was removed.
        """
        with self._artifacts.numbering(self._policy):
            self._clear_up()
        self.send_unpublished()

    def _clear_up(self) -> None:
        known = self._registry.artifact_uris(self._policy)
        number = self._registry.next_version(self._policy)
        orphans = self._artifacts.orphans(self._policy, known)
        foreign = sorted(name for name in orphans if _is_foreign(name, number))
        if foreign:
            raise RegistryError(
                f"the artifact folder holds {', '.join(foreign[:3])} of policy "
                f"{self._policy!r}, which the registry does not know (its next version is "
                f"{number}): REGISTRY_URL and ARTIFACTS_URL do not belong together, or the folder "
                "was moved. Nothing was removed; set both as they were, or choose an empty "
                "artifact folder or another learner.policy"
            )
        self._prune()
        self._artifacts.remove_unfinished(self._policy)
        for name, uri in orphans.items():
            if _version_of(name) is not None:
                log.info("removed what an unfinished update left uri=%s", uri)
                self._artifacts.remove(uri)

    def send_unpublished(self) -> int:
        """Send every event that Kafka has not acknowledged, in order; how many there were.

        Raises:
            BrokerError: One could not be sent; it and those after it stay in the outbox.
        """
        events = self._registry.unpublished(self._policy)
        for event in events:
            self._writer.write([self._outgoing(event)])
            self._registry.mark_published(event.event_id, self._clock.now_ms())
        return len(events)

    def publish(self, finished: FinishedUpdate) -> ModelVersion:
        """Publish an update as the policy's next version, live if it passes the gate.

        If Kafka cannot be reached the version is recorded all the same and its event stays in
        the outbox, for ``send_unpublished``.

        Raises:
            ArtifactError: The files cannot be written; nothing is recorded.
            RegistryError: The version cannot be recorded; its files are orphans.
        """
        # A retrain may want a number at the same time.
        with self._artifacts.numbering(self._policy):
            version = self._record(finished)
        try:
            self.send_unpublished()
        except BrokerError as error:
            log.warning("version %d is recorded, its event waits: %s", version.version, error)
        try:
            self._prune()
        except ArtifactError as error:
            log.warning("an old state stays until the next start: %s", error)
        return version

    def _record(self, finished: FinishedUpdate) -> ModelVersion:
        number = self._registry.next_version(self._policy)
        adapter = self._artifacts.write(self._policy, f"{_ADAPTER}{number}", finished.save_adapter)
        gate = sanity_gate(
            finished.metrics,
            verify(adapter.uri, adapter.files),
            max_kl=self._max_kl,
            instead=finished.gate,
        )
        passed = all(decision.passed for decision in gate)
        resume_from = finished.after if passed else finished.before
        state = self._artifacts.write(self._policy, f"{_STATE}{number}", resume_from.write)
        return self._registry.record(
            self._version(number, finished, adapter, gate),
            lineage=segment_uses(finished.used),
            checkpoint=_checkpoint(number, finished, state),
        )

    def _prune(self) -> None:
        for uri in self._registry.prune_checkpoints(self._policy, self._keep_checkpoints):
            self._artifacts.remove(uri)

    def _version(
        self,
        number: int,
        finished: FinishedUpdate,
        adapter: StoredFolder,
        gate: tuple[GateDecision, ...],
    ) -> ModelVersion:
        passed = all(decision.passed for decision in gate)
        return ModelVersion(
            event_id=event_id(self._policy, number, 0),
            version=number,
            status=VersionStatus.LIVE if passed else VersionStatus.REJECTED,
            base_model_id=self._base.model_id,
            base_model_digest=self._base.model_digest,
            tokenizer_digest=self._base.tokenizer_digest,
            template_digest=self._base.template_digest,
            event_time=self._clock.now_ms(),
            policy=self._policy,
            parent=self._registry.newest_good(self._policy),
            adapter_uri=adapter.uri,
            adapter_files=dict(adapter.files),
            adapter_rank=self._base.adapter_rank,
            adapter_alpha=self._base.adapter_alpha,
            source_offsets=offset_ranges(finished.since, finished.positions),
            segment_count=len(finished.used),
            segments_digest=segments_digest(finished.used),
            behaviour_versions=behaviour_versions(finished.used),
            optimizer_step=finished.optimizer_step,
            config_hash=finished.config_hash,
            metrics={k: float(v) for k, v in finished.metrics.items() if math.isfinite(v)},
            gate=gate,
            reason=_reason(finished.reason, gate),
            attributes=dict(finished.attributes),
        )

    def _outgoing(self, event: ModelVersion) -> Outgoing:
        value = self._codec.encode(event, self._topic)
        return Outgoing(topic=self._topic, key=self._policy.encode(), value=value)


def _version_of(name: str) -> int | None:
    """The version whose adapter or state a folder of this name holds; None if it is not ours."""
    found = re.fullmatch(rf"(?:{_ADAPTER}|{_STATE})([1-9]\d*)", name)
    return None if found is None else int(found[1])


def _is_foreign(name: str, next_version: int) -> bool:
    """Whether no crash of a learner with this registry can have left an unknown folder.

    It may have died while it published the next version, or while it pruned an old state; an
    adapter that was recorded is never removed.
    """
    version = _version_of(name)
    if version is None or version == next_version:
        return False
    return version > next_version or name.startswith(_ADAPTER)


def adapter_folder(registry: Registry, policy: str, version: int, *, base: BaseIdentity) -> Path:
    """The folder with a version's adapter, verified, for the base model in training.

    Raises:
        RegistryError: There is no such version, or it belongs to another base model.
        ArtifactError: Its files are missing or damaged.
    """
    found = registry.get(policy, version)
    if found is None or found.adapter_uri is None:
        raise RegistryError(
            f"policy {policy!r} has no version {version}: its adapter cannot be loaded"
        )
    if found.base_model_digest != base.model_digest:
        raise RegistryError(
            f"version {version} of policy {policy!r} is an adapter for {found.base_model_id}, "
            "not for the base model in training"
        )
    return verify(found.adapter_uri, found.adapter_files)


# The gate


def sanity_gate(
    metrics: Mapping[str, float],
    adapter: Path,
    *,
    max_kl: float,
    instead: tuple[GateDecision, ...] | None = None,
) -> tuple[GateDecision, ...]:
    """Whether an update is sane enough to be served: finite, and not far from where it began.

    Args:
        metrics: Of the update.
        adapter: Folder with the weights as they would be served.
        max_kl: Bound of ``KL_METRIC``, inclusive; an update must report it.
        instead: Decisions in place of that bound, for what is meant to go far.

    Raises:
        ArtifactError: The weights cannot be read back.
    """
    return (
        _finite_metrics(metrics),
        _finite_weights(adapter),
        *((_bounded_kl(metrics.get(KL_METRIC), max_kl),) if instead is None else instead),
    )


def _finite_metrics(metrics: Mapping[str, float]) -> GateDecision:
    odd = sorted(name for name, value in metrics.items() if not math.isfinite(value))
    detail = f"not finite: {', '.join(f'{n}={metrics[n]}' for n in odd)}" if odd else None
    return GateDecision(
        name="finite_metrics", passed=not odd, value=float(len(odd)), threshold=0.0, detail=detail
    )


def _finite_weights(adapter: Path) -> GateDecision:
    odd = [name for name, tensor in _tensors(adapter) if not bool(torch.isfinite(tensor).all())]
    detail = f"not finite: {', '.join(odd[:3])}" if odd else None
    return GateDecision(
        name="finite_weights", passed=not odd, value=float(len(odd)), threshold=0.0, detail=detail
    )


def _tensors(adapter: Path) -> list[tuple[str, Any]]:
    paths = sorted(adapter.rglob("*.safetensors"))
    if not paths:
        raise ArtifactError(f"{adapter} holds no weights (*.safetensors)")
    try:
        return [item for path in paths for item in sorted(load_file(path).items())]
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"cannot read the weights in {adapter} back: {error}") from error


def _bounded_kl(value: float | None, bound: float) -> GateDecision:
    if value is None:
        return GateDecision(
            name="kl", passed=False, threshold=bound, detail=f"the update reported no {KL_METRIC}"
        )
    return GateDecision(
        name="kl",
        passed=math.isfinite(value) and value <= bound,
        value=value if math.isfinite(value) else None,
        threshold=bound,
        detail=f"{KL_METRIC}={value:g}",
    )


def _reason(why: str, gate: Sequence[GateDecision]) -> str:
    failed = [f"{d.name} ({d.detail})" for d in gate if not d.passed]
    return f"rejected by {', '.join(failed)}" if failed else why


# What a version came from


def event_id(policy: str, version: int, ordinal: int) -> str:
    """The id of a version's event number ``ordinal``: equal whenever it is made again."""
    name = json.dumps([policy, version, ordinal], separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def segment_uses(used: Sequence[Candidate]) -> tuple[SegmentUse, ...]:
    """The lineage: id and revision of each segment, sorted by id."""
    pairs = sorted((c.scored.segment.segment_id, c.scored.segment.revision) for c in used)
    return tuple(SegmentUse(segment_id=i, revision=revision) for i, revision in pairs)


def segments_digest(used: Sequence[Candidate]) -> str:
    """The `uses_digest` of the segments."""
    return uses_digest(segment_uses(used))


def uses_digest(uses: Sequence[SegmentUse]) -> str:
    """SHA-256 (hex) over the compact JSON of the sorted ``[segment_id, revision]`` pairs."""
    pairs = sorted([use.segment_id, use.revision] for use in uses)
    packed = json.dumps(pairs, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(packed.encode()).hexdigest()


def behaviour_versions(used: Sequence[Candidate]) -> dict[str, int]:
    """Steps by the policy version that wrote them."""
    steps = (step for candidate in used for step in candidate.scored.segment.steps)
    counts = Counter(
        UNKNOWN_BEHAVIOUR if step.policy_version is None else str(step.policy_version)
        for step in steps
    )
    return dict(sorted(counts.items()))


def offset_ranges(
    since: Sequence[SourceRef], positions: Sequence[SourceRef]
) -> tuple[OffsetRange, ...]:
    """What a version has seen that the one before had not, per partition.

    A partition that appeared in between starts at 0.
    """
    starts = {(ref.topic, ref.partition): ref.offset for ref in since}
    return tuple(
        OffsetRange(
            topic=ref.topic,
            partition=ref.partition,
            start=starts.get((ref.topic, ref.partition), 0),
            end=ref.offset,
        )
        for ref in sorted(positions)
    )


def settings_hash(*sections: Section) -> str:
    """SHA-256 (hex) over the values of some settings, whatever their order in the file."""
    values = [section.model_dump(mode="json") for section in sections]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _checkpoint(number: int, finished: FinishedUpdate, state: StoredFolder) -> Checkpoint:
    return Checkpoint(
        version=number,
        state_uri=state.uri,
        state_files=dict(state.files),
        positions=finished.positions,
        window=finished.window,
        rng=finished.rng,
        sealed_at=finished.sealed_at,
    )
