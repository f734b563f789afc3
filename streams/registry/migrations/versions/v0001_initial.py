"""Versions, their sources, their history, aliases and the learner's checkpoints."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _of_version(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["policy", "version"],
        ["versions.policy", "versions.version"],
        name=f"fk_{table}_policy_version",
        ondelete="RESTRICT",
    )


def upgrade() -> None:
    """Create all tables."""
    _create_versions()
    _create_sources()
    _create_history()
    _create_aliases()
    _create_checkpoints()


def _create_versions() -> None:
    op.create_table(
        "versions",
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("version", _BIG, nullable=False, autoincrement=False),
        sa.Column("parent", _BIG),
        sa.Column("created_at", _BIG, nullable=False),
        sa.Column("base_model_id", sa.String(), nullable=False),
        sa.Column("base_model_digest", sa.String(), nullable=False),
        sa.Column("tokenizer_digest", sa.String(), nullable=False),
        sa.Column("template_digest", sa.String(), nullable=False),
        sa.Column("adapter_uri", sa.String()),
        sa.Column("adapter_files", sa.JSON(), nullable=False),
        sa.Column("adapter_rank", _BIG),
        sa.Column("adapter_alpha", sa.Double()),
        sa.Column("segment_count", _BIG, nullable=False),
        sa.Column("segments_digest", sa.String()),
        sa.Column("behaviour_versions", sa.JSON(), nullable=False),
        sa.Column("optimizer_step", _BIG, nullable=False),
        sa.Column("config_hash", sa.String()),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("attributes", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("policy", "version", name="pk_versions"),
        sa.ForeignKeyConstraint(
            ["policy", "parent"],
            ["versions.policy", "versions.version"],
            name="fk_versions_policy_parent",
            ondelete="RESTRICT",
        ),
    )


def _create_sources() -> None:
    op.create_table(
        "source_offsets",
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("version", _BIG, nullable=False, autoincrement=False),
        sa.Column("topic", sa.String(), nullable=False),
        sa.Column("partition", _BIG, nullable=False, autoincrement=False),
        sa.Column("start", _BIG, nullable=False),
        sa.Column("end", _BIG, nullable=False),
        sa.PrimaryKeyConstraint(
            "policy", "version", "topic", "partition", name="pk_source_offsets"
        ),
        _of_version("source_offsets"),
    )
    op.create_table(
        "lineage",
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("version", _BIG, nullable=False, autoincrement=False),
        sa.Column("segment_id", sa.String(), nullable=False),
        sa.Column("revision", _BIG, nullable=False),
        sa.PrimaryKeyConstraint("policy", "version", "segment_id", name="pk_lineage"),
        _of_version("lineage"),
    )
    op.create_index("ix_lineage_policy_segment_id", "lineage", ["policy", "segment_id"])


def _create_history() -> None:
    op.create_table(
        "status_changes",
        sa.Column("id", _BIG, nullable=False, autoincrement=True),
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("version", _BIG, nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("previous_live", _BIG),
        sa.Column("reason", sa.String()),
        sa.Column("gate", sa.JSON(), nullable=False),
        sa.Column("changed_at", _BIG, nullable=False),
        sa.Column("event_id", sa.String()),
        sa.Column("published_at", _BIG),
        sa.PrimaryKeyConstraint("id", name="pk_status_changes"),
        sa.UniqueConstraint("event_id", name="uq_status_changes_event_id"),
        _of_version("status_changes"),
    )
    op.create_index("ix_status_changes_policy_version", "status_changes", ["policy", "version"])
    op.create_index("ix_status_changes_published_at", "status_changes", ["published_at"])


def _create_aliases() -> None:
    op.create_table(
        "aliases",
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("alias", sa.String(), nullable=False),
        sa.Column("version", _BIG, nullable=False),
        sa.Column("moved_at", _BIG, nullable=False),
        sa.PrimaryKeyConstraint("policy", "alias", name="pk_aliases"),
        _of_version("aliases"),
    )
    op.create_table(
        "alias_moves",
        sa.Column("id", _BIG, nullable=False, autoincrement=True),
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("alias", sa.String(), nullable=False),
        sa.Column("from_version", _BIG),
        sa.Column("to_version", _BIG, nullable=False),
        sa.Column("moved_at", _BIG, nullable=False),
        sa.Column("reason", sa.String()),
        sa.PrimaryKeyConstraint("id", name="pk_alias_moves"),
    )
    op.create_index("ix_alias_moves_policy_alias", "alias_moves", ["policy", "alias"])


def _create_checkpoints() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("version", _BIG, nullable=False, autoincrement=False),
        sa.Column("state_uri", sa.String(), nullable=False),
        sa.Column("state_files", sa.JSON(), nullable=False),
        sa.Column("positions", sa.JSON(), nullable=False),
        sa.Column("window", sa.JSON(), nullable=False),
        sa.Column("rng", sa.LargeBinary(), nullable=False),
        sa.Column("sealed_at", _BIG, nullable=False),
        sa.PrimaryKeyConstraint("policy", "version", name="pk_checkpoints"),
        _of_version("checkpoints"),
    )


def downgrade() -> None:
    """Drop all tables, in the order of their references."""
    for table in ("checkpoints", "alias_moves", "aliases", "status_changes", "lineage"):
        op.drop_table(table)
    op.drop_table("source_offsets")
    op.drop_table("versions")
