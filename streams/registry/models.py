"""The registry's tables.

A version is written once and never changed; what happens to it afterwards is added beside it,
as status changes and alias moves. A status change that the world must hear of carries an
``event_id``; as long as its ``published_at`` is empty, the event still has to be sent.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Double,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    UniqueConstraint,
    event,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from streams.errors import RegistryError

_NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}

_BigInt = BigInteger().with_variant(Integer(), "sqlite")
"""SQLite counts up only a column that is an INTEGER; its integers have 64 bits anyway."""


class Base(DeclarativeBase):
    """Base of all tables, with constraint names that a migration can refer to."""

    metadata = MetaData(naming_convention=_NAMES)
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        int: _BigInt,
        bytes: LargeBinary,
        dict[str, str]: JSON,
        dict[str, int]: JSON,
        dict[str, float]: JSON,
        list[Any]: JSON,
    }


def _of_version() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(
        ["policy", "version"], ["versions.policy", "versions.version"], ondelete="RESTRICT"
    )


class VersionRow(Base):
    """What a version is: fixed when it is recorded."""

    __tablename__ = "versions"
    __table_args__ = (
        ForeignKeyConstraint(
            ["policy", "parent"], ["versions.policy", "versions.version"], ondelete="RESTRICT"
        ),
    )

    policy: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    parent: Mapped[int | None]
    created_at: Mapped[int]
    base_model_id: Mapped[str]
    base_model_digest: Mapped[str]
    tokenizer_digest: Mapped[str]
    template_digest: Mapped[str]
    adapter_uri: Mapped[str | None]
    adapter_files: Mapped[dict[str, str]]
    adapter_rank: Mapped[int | None]
    adapter_alpha: Mapped[float | None] = mapped_column(Double)
    segment_count: Mapped[int]
    segments_digest: Mapped[str | None]
    behaviour_versions: Mapped[dict[str, int]]
    optimizer_step: Mapped[int]
    config_hash: Mapped[str | None]
    metrics: Mapped[dict[str, float]]
    attributes: Mapped[dict[str, str]]


class SourceOffsetRow(Base):
    """The log a version has seen, per partition: ``start`` inclusive, ``end`` exclusive."""

    __tablename__ = "source_offsets"
    __table_args__ = (_of_version(),)

    policy: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    topic: Mapped[str] = mapped_column(primary_key=True)
    partition: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    start: Mapped[int]
    end: Mapped[int]


class LineageRow(Base):
    """One segment that a version was trained on, at the revision that was used."""

    __tablename__ = "lineage"
    __table_args__ = (_of_version(), Index(None, "policy", "segment_id"))

    policy: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    segment_id: Mapped[str] = mapped_column(primary_key=True)
    revision: Mapped[int]


class StatusChangeRow(Base):
    """One step in a version's life, in the order of ``id``; also the outbox of its events."""

    __tablename__ = "status_changes"
    __table_args__ = (
        _of_version(),
        UniqueConstraint("event_id"),
        Index(None, "policy", "version"),
        Index(None, "published_at"),
    )

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    policy: Mapped[str]
    version: Mapped[int]
    status: Mapped[str]
    previous_live: Mapped[int | None]
    reason: Mapped[str | None]
    gate: Mapped[list[Any]]
    changed_at: Mapped[int]
    event_id: Mapped[str | None]
    published_at: Mapped[int | None]


class AliasRow(Base):
    """Where an alias of a policy points now."""

    __tablename__ = "aliases"
    __table_args__ = (_of_version(),)

    policy: Mapped[str] = mapped_column(primary_key=True)
    alias: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int]
    moved_at: Mapped[int]


class AliasMoveRow(Base):
    """One move of an alias, in the order of ``id``; ``from_version`` is empty for the first."""

    __tablename__ = "alias_moves"
    __table_args__ = (Index(None, "policy", "alias"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    policy: Mapped[str]
    alias: Mapped[str]
    from_version: Mapped[int | None]
    to_version: Mapped[int]
    moved_at: Mapped[int]
    reason: Mapped[str | None]


class CheckpointRow(Base):
    """What the learner resumes from after a version: see ``streams.registry.rows.Checkpoint``."""

    __tablename__ = "checkpoints"
    __table_args__ = (_of_version(),)

    policy: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    state_uri: Mapped[str]
    state_files: Mapped[dict[str, str]]
    positions: Mapped[list[Any]]
    window: Mapped[list[Any]]
    rng: Mapped[bytes]
    sealed_at: Mapped[int]


def _refuse_change(_mapper: object, _connection: object, row: Base) -> None:
    raise RegistryError(f"a row of {row.__tablename__} is fixed once written: record a new version")


for _fixed in (VersionRow, SourceOffsetRow, LineageRow):
    event.listen(_fixed, "before_update", _refuse_change)
