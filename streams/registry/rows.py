"""Rows to records and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from msgspec.structs import asdict as fields_of
from msgspec.structs import replace
from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from streams.contracts import (
    GateDecision,
    ModelVersion,
    OffsetRange,
    SourceRef,
    VersionStatus,
)
from streams.registry.models import (
    AliasMoveRow,
    AliasRow,
    CheckpointRow,
    LineageRow,
    SourceOffsetRow,
    StatusChangeRow,
    VersionRow,
)

LIVE = "live"
"""The alias that names the version a policy answers with."""

RETRAIN = "retrain"
"""The attribute of a version that was trained beside its learner's own line, on a part of the log:
the learner neither goes on from it nor counts what it was trained on. Names the retrain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentUse:
    """A segment that a version was trained on, and the revision that was used."""

    segment_id: str
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What the learner resumes from after ``version``.

    ``state_uri`` is a folder of the artifact store whose files are ``state_files`` (SHA-256 of
    each). ``positions`` name, per partition, the next record to read: everything below was in
    the log when the version's snapshot was sealed, at ``sealed_at`` (ms). ``window`` names the
    records the window held then, oldest first. ``rng`` is the sampler's state, opaque here.
    """

    version: int
    state_uri: str
    state_files: Mapping[str, str]
    positions: tuple[SourceRef, ...]
    window: tuple[SourceRef, ...]
    rng: bytes
    sealed_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusChange:
    """One step in a version's life. ``published_at`` is None while its event must still be sent,
    and for changes that have no event (``event_id`` None)."""

    version: int
    status: VersionStatus
    changed_at: int
    reason: str | None
    event_id: str | None
    published_at: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasMove:
    """An alias went from one version (None: the base model) to another."""

    alias: str
    from_version: int | None
    to_version: int
    moved_at: int
    reason: str | None


def newest_version(session: Session, policy: str) -> int:
    """The newest number of a policy; 0 if it has none."""
    query = select(func.max(VersionRow.version)).where(VersionRow.policy == policy)
    return session.scalar(query) or 0


def alias_target(session: Session, policy: str, alias: str) -> int | None:
    """Where an alias points; None if it was never set."""
    row = session.get(AliasRow, (policy, alias))
    return None if row is None else row.version


def changes_of(policy: str, version: int) -> Select[StatusChangeRow]:
    """Selects the status changes of one version."""
    return select(StatusChangeRow).where(
        StatusChangeRow.policy == policy, StatusChangeRow.version == version
    )


def version_row(version: ModelVersion) -> VersionRow:
    """What is fixed about a version."""
    return VersionRow(
        policy=version.policy,
        version=version.version,
        parent=version.parent,
        created_at=version.event_time,
        base_model_id=version.base_model_id,
        base_model_digest=version.base_model_digest,
        tokenizer_digest=version.tokenizer_digest,
        template_digest=version.template_digest,
        adapter_uri=version.adapter_uri,
        adapter_files=dict(version.adapter_files),
        adapter_rank=version.adapter_rank,
        adapter_alpha=version.adapter_alpha,
        segment_count=version.segment_count,
        segments_digest=version.segments_digest,
        behaviour_versions=dict(version.behaviour_versions),
        optimizer_step=version.optimizer_step,
        config_hash=version.config_hash,
        metrics=dict(version.metrics),
        attributes=dict(version.attributes),
    )


def first_change(version: ModelVersion, live: int | None) -> StatusChangeRow:
    """The status a version is recorded with, and the event that says so."""
    return StatusChangeRow(
        policy=version.policy,
        version=version.version,
        status=version.status.value,
        previous_live=live,
        reason=version.reason,
        gate=[fields_of(decision) for decision in version.gate],
        changed_at=version.event_time,
        event_id=version.event_id,
    )


def offset_rows(version: ModelVersion) -> list[SourceOffsetRow]:
    """The log a version has seen."""
    return [
        SourceOffsetRow(policy=version.policy, version=version.version, **fields_of(offsets))
        for offsets in version.source_offsets
    ]


def lineage_rows(version: ModelVersion, lineage: Sequence[SegmentUse]) -> list[LineageRow]:
    """The segments a version was trained on."""
    return [
        LineageRow(policy=version.policy, version=version.version, **asdict(use)) for use in lineage
    ]


def checkpoint_row(policy: str, checkpoint: Checkpoint) -> CheckpointRow:
    """A checkpoint as a row."""
    return CheckpointRow(
        policy=policy,
        version=checkpoint.version,
        state_uri=checkpoint.state_uri,
        state_files=dict(checkpoint.state_files),
        positions=_pack(checkpoint.positions),
        window=_pack(checkpoint.window),
        rng=checkpoint.rng,
        sealed_at=checkpoint.sealed_at,
    )


def checkpoint_of(row: CheckpointRow) -> Checkpoint:
    """A row as a checkpoint."""
    return Checkpoint(
        version=row.version,
        state_uri=row.state_uri,
        state_files=row.state_files,
        positions=_unpack(row.positions),
        window=_unpack(row.window),
        rng=row.rng,
        sealed_at=row.sealed_at,
    )


def _pack(refs: Iterable[SourceRef]) -> list[Any]:
    return [[ref.topic, ref.partition, ref.offset] for ref in refs]


def _unpack(packed: Iterable[Any]) -> tuple[SourceRef, ...]:
    return tuple(SourceRef(topic=t, partition=p, offset=o) for t, p, o in packed)


def go_live(session: Session, version: ModelVersion, previous: int | None) -> None:
    """Point the ``live`` alias to a version; the one before is retired."""
    if previous is not None:
        session.add(_retirement(version, previous))
    session.merge(
        AliasRow(
            policy=version.policy,
            alias=LIVE,
            version=version.version,
            moved_at=version.event_time,
        )
    )
    session.add(
        AliasMoveRow(
            policy=version.policy,
            alias=LIVE,
            from_version=previous,
            to_version=version.version,
            moved_at=version.event_time,
            reason=version.reason,
        )
    )


def _retirement(successor: ModelVersion, previous: int) -> StatusChangeRow:
    """The version before is retired without an event: the successor's event says so."""
    return StatusChangeRow(
        policy=successor.policy,
        version=previous,
        status=VersionStatus.RETIRED.value,
        previous_live=None,
        reason=f"version {successor.version} went live",
        gate=[],
        changed_at=successor.event_time,
    )


def event_of(session: Session, change: StatusChangeRow) -> ModelVersion:
    """The version as it was after a status change. Equal each time it is built."""
    row = session.get_one(VersionRow, (change.policy, change.version))
    return ModelVersion(
        event_id=str(change.event_id),
        policy=row.policy,
        version=row.version,
        status=VersionStatus(change.status),
        base_model_id=row.base_model_id,
        base_model_digest=row.base_model_digest,
        tokenizer_digest=row.tokenizer_digest,
        template_digest=row.template_digest,
        event_time=change.changed_at,
        parent=row.parent,
        previous_live=change.previous_live,
        adapter_uri=row.adapter_uri,
        adapter_files=row.adapter_files,
        adapter_rank=row.adapter_rank,
        adapter_alpha=row.adapter_alpha,
        source_offsets=_source_offsets(session, row),
        segment_count=row.segment_count,
        segments_digest=row.segments_digest,
        behaviour_versions=row.behaviour_versions,
        optimizer_step=row.optimizer_step,
        config_hash=row.config_hash,
        metrics=row.metrics,
        gate=tuple(GateDecision(**decision) for decision in change.gate),
        reason=change.reason,
        attributes=row.attributes,
    )


def present_of(session: Session, latest: StatusChangeRow) -> ModelVersion:
    """The last event of a version, with the status it has by now."""
    query = (
        changes_of(latest.policy, latest.version)
        .where(StatusChangeRow.event_id.is_not(None))
        .order_by(StatusChangeRow.id.desc())
        .limit(1)
    )
    announced = event_of(session, session.scalars(query).one())
    return replace(announced, status=VersionStatus(latest.status), reason=latest.reason)


def _source_offsets(session: Session, version: VersionRow) -> tuple[OffsetRange, ...]:
    query = (
        select(SourceOffsetRow)
        .where(SourceOffsetRow.policy == version.policy, SourceOffsetRow.version == version.version)
        .order_by(SourceOffsetRow.topic, SourceOffsetRow.partition)
    )
    return tuple(
        OffsetRange(topic=row.topic, partition=row.partition, start=row.start, end=row.end)
        for row in session.scalars(query)
    )


def status_change_of(row: StatusChangeRow) -> StatusChange:
    """A row as a status change."""
    return StatusChange(
        version=row.version,
        status=VersionStatus(row.status),
        changed_at=row.changed_at,
        reason=row.reason,
        event_id=row.event_id,
        published_at=row.published_at,
    )


def alias_move_of(row: AliasMoveRow) -> AliasMove:
    """A row as a move."""
    return AliasMove(
        alias=row.alias,
        from_version=row.from_version,
        to_version=row.to_version,
        moved_at=row.moved_at,
        reason=row.reason,
    )
