"""The version registry: what was trained from what, which version is live, what to resume from.

A version is recorded in one transaction together with its status, its sources, its lineage,
the move of the ``live`` alias and the learner's checkpoint; there is no moment at which one of
them exists without the others. Its event waits in the same database until ``mark_published``
(an outbox), so that a crash between the transaction and Kafka's acknowledgement loses nothing.

Whether a version goes live is the caller's decision, expressed by the status it records.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy import Connection, Engine, create_engine, event, func, select, text, update
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session

from streams.contracts import (
    GateDecision,
    ModelVersion,
    OffsetRange,
    SourceRef,
    VersionStatus,
)
from streams.errors import RegistryError
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

_BUSY_TIMEOUT_MS = 30_000
_CHUNK = 500
"""Values in one ``IN (...)``, below every database's limit."""
_MIGRATION_LOCK = 0x636C6177
"""PostgreSQL's advisory lock for migrations: "claw" in ASCII."""


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


class Registry:
    """The version registry of all policies.

    Safe to use from several threads and processes; each call is one transaction. Every method
    raises ``RegistryError`` if the database cannot be used.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # SQLite: a transaction that will write takes the write lock at its start, where the
        # busy timeout applies, and not half way, where it does not.
        self._writing = engine.execution_options(clawstream_write=True)

    @classmethod
    def open(cls, url: str) -> Registry:
        """Open the registry at a SQLAlchemy URL and bring its tables up to date.

        Idempotent, and safe when several processes open a new registry at once. A SQLite file
        and its folder are created if missing.

        Raises:
            RegistryError: The URL cannot be used, the database cannot be reached, or it was
                written by a newer clawstream.
        """
        parsed = _parse_url(url)
        engine = _build_engine(parsed)
        registry = cls(engine)
        try:
            with registry._errors("open it"), _migration_lock(parsed):
                if parsed.get_backend_name() == "sqlite":
                    _enable_wal(engine)
                registry._migrate()
        except RegistryError:
            engine.dispose()
            raise
        return registry

    def close(self) -> None:
        """Give the connections back. Idempotent."""
        self._engine.dispose()

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Writing

    def record(
        self,
        version: ModelVersion,
        *,
        lineage: Sequence[SegmentUse] = (),
        checkpoint: Checkpoint | None = None,
    ) -> ModelVersion:
        """Record a new version with everything that belongs to it, in one transaction.

        A version whose status is ``live`` takes the ``live`` alias; the version that had it is
        retired. Any other status leaves the alias where it is.

        Returns:
            The version as its event will say, with ``previous_live`` as found here.

        Raises:
            RegistryError: The number is not the next of its policy (another learner is at
                work), or the database cannot be used; nothing is recorded then.
        """
        what = f"record version {version.version} of policy {version.policy!r}"
        with self._write(what) as session:
            self._require_next(session, version)
            session.add(_version_row(version))
            session.flush()
            live = _alias_target(session, version.policy, LIVE)
            session.add(_first_change(version, live))
            session.add_all(_offset_rows(version))
            session.add_all(_lineage_rows(version, lineage))
            if checkpoint is not None:
                session.add(_checkpoint_row(version.policy, checkpoint))
            if version.status is VersionStatus.LIVE:
                _go_live(session, version, live)
            session.flush()
            return _event(session, session.scalars(_changes(version.policy, version.version)).one())

    def mark_published(self, event_id: str, at_ms: int) -> None:
        """Note that an event was acknowledged by Kafka at ``at_ms``. Idempotent.

        Raises:
            RegistryError: No such event.
        """
        with self._write(f"mark event {event_id} as published") as session:
            found = session.execute(
                select(StatusChangeRow.id).where(StatusChangeRow.event_id == event_id)
            ).first()
            if found is None:
                raise RegistryError(f"the registry has no event {event_id}: nothing to mark")
            session.execute(
                update(StatusChangeRow)
                .where(StatusChangeRow.id == found.id, StatusChangeRow.published_at.is_(None))
                .values(published_at=at_ms)
            )

    def prune_checkpoints(self, policy: str, keep: int) -> tuple[str, ...]:
        """Forget all but the newest ``keep`` checkpoints of a policy.

        Returns:
            The ``state_uri`` of each forgotten one that no kept one uses: its files can go.
        """
        with self._write(f"prune checkpoints of policy {policy!r}") as session:
            rows = session.scalars(
                select(CheckpointRow)
                .where(CheckpointRow.policy == policy)
                .order_by(CheckpointRow.version.desc())
            ).all()
            kept = {row.state_uri for row in rows[:keep]}
            for row in rows[keep:]:
                session.delete(row)
            return tuple(row.state_uri for row in rows[keep:] if row.state_uri not in kept)

    # Reading

    def versions(self, policy: str | None = None) -> tuple[ModelVersion, ...]:
        """Every version with its present status, by policy and number."""
        latest = select(func.max(StatusChangeRow.id)).group_by(
            StatusChangeRow.policy, StatusChangeRow.version
        )
        query = select(StatusChangeRow).where(StatusChangeRow.id.in_(latest))
        if policy is not None:
            query = query.where(StatusChangeRow.policy == policy)
        query = query.order_by(StatusChangeRow.policy, StatusChangeRow.version)
        with self._read("list versions") as session:
            return tuple(_present(session, change) for change in session.scalars(query))

    def get(self, policy: str, version: int) -> ModelVersion | None:
        """One version with its present status, or None."""
        with self._read(f"read version {version} of policy {policy!r}") as session:
            query = _changes(policy, version).order_by(StatusChangeRow.id.desc()).limit(1)
            change = session.scalars(query).first()
            return None if change is None else _present(session, change)

    def live(self, policy: str) -> int | None:
        """The version a policy answers with; None is the base model."""
        with self._read(f"read the live version of policy {policy!r}") as session:
            return _alias_target(session, policy, LIVE)

    def next_version(self, policy: str) -> int:
        """The number the next version of a policy will have; the first is 1."""
        with self._read(f"read the newest version of policy {policy!r}") as session:
            return _newest(session, policy) + 1

    def history(self, policy: str, version: int) -> tuple[StatusChange, ...]:
        """What happened to a version, oldest first."""
        with self._read(f"read the history of version {version}") as session:
            rows = session.scalars(_changes(policy, version).order_by(StatusChangeRow.id))
            return tuple(_status_change(row) for row in rows)

    def alias_moves(self, policy: str, alias: str = LIVE) -> tuple[AliasMove, ...]:
        """Every move of an alias, oldest first."""
        query = (
            select(AliasMoveRow)
            .where(AliasMoveRow.policy == policy, AliasMoveRow.alias == alias)
            .order_by(AliasMoveRow.id)
        )
        with self._read(f"read the moves of alias {alias!r}") as session:
            return tuple(_alias_move(row) for row in session.scalars(query))

    def lineage(self, policy: str, version: int) -> tuple[SegmentUse, ...]:
        """The segments a version was trained on, sorted by id."""
        query = (
            select(LineageRow.segment_id, LineageRow.revision)
            .where(LineageRow.policy == policy, LineageRow.version == version)
            .order_by(LineageRow.segment_id)
        )
        with self._read(f"read the lineage of version {version}") as session:
            rows = session.execute(query)
            return tuple(SegmentUse(segment_id=i, revision=revision) for i, revision in rows)

    def segment_uses(self, policy: str, segment_ids: Iterable[str]) -> dict[str, int]:
        """In how many versions of a policy each of the segments was used; absent if in none."""
        uses: dict[str, int] = {}
        with self._read("count the uses of segments") as session:
            for chunk in _chunks(segment_ids):
                query = (
                    select(LineageRow.segment_id, func.count().label("uses"))
                    .where(LineageRow.policy == policy, LineageRow.segment_id.in_(chunk))
                    .group_by(LineageRow.segment_id)
                )
                uses |= {row.segment_id: row.uses for row in session.execute(query)}
        return uses

    def latest_checkpoint(self, policy: str) -> Checkpoint | None:
        """What the learner of a policy resumes from; None if it starts anew."""
        query = (
            select(CheckpointRow)
            .where(CheckpointRow.policy == policy)
            .order_by(CheckpointRow.version.desc())
            .limit(1)
        )
        with self._read(f"read the checkpoint of policy {policy!r}") as session:
            row = session.scalars(query).first()
            return None if row is None else _checkpoint(row)

    def newest_good(self, policy: str) -> int | None:
        """The newest version that was not rejected, the parent of the next; None is the base."""
        rejected = select(StatusChangeRow.version).where(
            StatusChangeRow.policy == policy,
            StatusChangeRow.status == VersionStatus.REJECTED.value,
        )
        query = select(func.max(VersionRow.version)).where(
            VersionRow.policy == policy, VersionRow.version.not_in(rejected)
        )
        with self._read(f"read the newest good version of policy {policy!r}") as session:
            return session.scalar(query)

    def artifact_uris(self, policy: str) -> frozenset[str]:
        """Every folder of the artifact store that the registry refers to for a policy."""
        adapters = select(VersionRow.adapter_uri).where(VersionRow.policy == policy)
        states = select(CheckpointRow.state_uri).where(CheckpointRow.policy == policy)
        with self._read(f"list the artifacts of policy {policy!r}") as session:
            found = (*session.scalars(adapters), *session.scalars(states))
            return frozenset(uri for uri in found if uri is not None)

    def unpublished(self, policy: str | None = None) -> tuple[ModelVersion, ...]:
        """Events that Kafka has not acknowledged, in the order they must be sent."""
        query = select(StatusChangeRow).where(
            StatusChangeRow.event_id.is_not(None), StatusChangeRow.published_at.is_(None)
        )
        if policy is not None:
            query = query.where(StatusChangeRow.policy == policy)
        with self._read("list unpublished events") as session:
            rows = session.scalars(query.order_by(StatusChangeRow.id))
            return tuple(_event(session, row) for row in rows)

    # Inside

    @contextlib.contextmanager
    def _write(self, what: str) -> Iterator[Session]:
        with self._errors(what), Session(self._writing) as session, session.begin():
            yield session

    @contextlib.contextmanager
    def _read(self, what: str) -> Iterator[Session]:
        with self._errors(what), Session(self._engine) as session, session.begin():
            yield session

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except (SQLAlchemyError, sqlite3.Error, CommandError, OSError) as error:
            _raise_mapped(error, what, self._engine.url)

    def _migrate(self) -> None:
        with self._writing.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})"))
            command.upgrade(_alembic_config(connection), "head")

    def _require_next(self, session: Session, version: ModelVersion) -> None:
        expected = _newest(session, version.policy) + 1
        if version.version != expected:
            raise RegistryError(
                f"version {version.version} of policy {version.policy!r} cannot be recorded: the "
                f"next number is {expected}. Another learner of this policy is at work; stop one"
            )


# Opening


def _parse_url(url: str) -> URL:
    try:
        return make_url(url)
    except ArgumentError:
        # From None: the library's message repeats the URL, and with it its password.
        raise RegistryError(
            "the registry's URL cannot be read: REGISTRY_URL must look like "
            "sqlite:////path/to/registry.db or postgresql+psycopg://user:password@host/database"
        ) from None


def _build_engine(url: URL) -> Engine:
    arguments: dict[str, Any] = {"json_serializer": partial(json.dumps, allow_nan=False)}
    try:
        if url.get_backend_name() != "sqlite":
            return create_engine(url, pool_pre_ping=True, **arguments)
        _create_parent(url)
        engine = create_engine(url, connect_args={"timeout": _BUSY_TIMEOUT_MS / 1000}, **arguments)
    except (SQLAlchemyError, ImportError, OSError) as error:
        _raise_mapped(error, "open it", url)
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _sqlite_file(url: URL) -> Path | None:
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        return None
    return Path(str(url.database))


def _create_parent(url: URL) -> None:
    path = _sqlite_file(url)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _migration_lock(url: URL) -> Iterator[None]:
    """One process at a time for a SQLite file: switching to WAL knows no busy timeout."""
    path = _sqlite_file(url)
    if path is None:
        yield
        return
    with path.with_name(path.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _enable_wal(engine: Engine) -> None:
    raw = engine.raw_connection()
    try:
        raw.cursor().execute("PRAGMA journal_mode=WAL")
    finally:
        raw.close()


def _configure_sqlite(connection: Any, _record: object) -> None:
    # The driver's own transaction handling would end a transaction at the first DDL statement.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("clawstream_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _alembic_config(connection: Connection) -> Config:
    config = _base_config()
    config.attributes["connection"] = connection
    return config


def offline_config(dialect: str) -> Config:
    """For ``alembic.command.upgrade(…, sql=True)``: prints the tables' SQL for a database that
    only its administrator may change."""
    config = _base_config()
    config.attributes["dialect"] = dialect
    return config


def _base_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
    config.set_main_option("path_separator", "os")
    return config


# Errors


def _raise_mapped(error: Exception, what: str, url: URL) -> NoReturn:
    """Raise our error for one of the libraries', with what to do about it."""
    where = url.set(query={}).render_as_string(hide_password=True)
    raise RegistryError(
        f"cannot {what} (registry {where}): {_cause(error, url)}. {_advice(error)}"
    ) from None


def _cause(error: Exception, url: URL) -> str:
    origin = getattr(error, "orig", None) or error
    lines = str(origin).strip().splitlines() or [type(origin).__name__]
    secrets = [url.password, *url.normalized_query.get("password", ())]
    message = lines[0]
    for secret in secrets:
        message = message.replace(str(secret), "***") if secret else message
    return message.rstrip(".")


def _advice(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "Install the database's Python driver, for PostgreSQL: pip install psycopg[binary]"
    if isinstance(error, CommandError):
        return "The registry was written by a newer clawstream: upgrade this one"
    if isinstance(error, IntegrityError):
        return "Another process recorded the same: make sure that one learner runs per policy"
    if isinstance(error, OperationalError | OSError):
        return "Check that the database is reachable and writable, and REGISTRY_URL is right"
    return "Check REGISTRY_URL and the database's own log"


# Rows to records and back


def _newest(session: Session, policy: str) -> int:
    query = select(func.max(VersionRow.version)).where(VersionRow.policy == policy)
    return session.scalar(query) or 0


def _alias_target(session: Session, policy: str, alias: str) -> int | None:
    row = session.get(AliasRow, (policy, alias))
    return None if row is None else row.version


def _changes(policy: str, version: int) -> Any:
    return select(StatusChangeRow).where(
        StatusChangeRow.policy == policy, StatusChangeRow.version == version
    )


def _version_row(version: ModelVersion) -> VersionRow:
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


def _first_change(version: ModelVersion, live: int | None) -> StatusChangeRow:
    return StatusChangeRow(
        policy=version.policy,
        version=version.version,
        status=version.status.value,
        previous_live=live,
        reason=version.reason,
        gate=[asdict(decision) for decision in version.gate],
        changed_at=version.event_time,
        event_id=version.event_id,
    )


def _offset_rows(version: ModelVersion) -> list[SourceOffsetRow]:
    return [
        SourceOffsetRow(policy=version.policy, version=version.version, **asdict(offsets))
        for offsets in version.source_offsets
    ]


def _lineage_rows(version: ModelVersion, lineage: Sequence[SegmentUse]) -> list[LineageRow]:
    return [
        LineageRow(policy=version.policy, version=version.version, **asdict(use)) for use in lineage
    ]


def _checkpoint_row(policy: str, checkpoint: Checkpoint) -> CheckpointRow:
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


def _checkpoint(row: CheckpointRow) -> Checkpoint:
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


def _go_live(session: Session, version: ModelVersion, previous: int | None) -> None:
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


def _event(session: Session, change: StatusChangeRow) -> ModelVersion:
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


def _present(session: Session, latest: StatusChangeRow) -> ModelVersion:
    """The last event of a version, with the status it has by now."""
    query = (
        _changes(latest.policy, latest.version)
        .where(StatusChangeRow.event_id.is_not(None))
        .order_by(StatusChangeRow.id.desc())
        .limit(1)
    )
    announced = _event(session, session.scalars(query).one())
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


def _status_change(row: StatusChangeRow) -> StatusChange:
    return StatusChange(
        version=row.version,
        status=VersionStatus(row.status),
        changed_at=row.changed_at,
        reason=row.reason,
        event_id=row.event_id,
        published_at=row.published_at,
    )


def _alias_move(row: AliasMoveRow) -> AliasMove:
    return AliasMove(
        alias=row.alias,
        from_version=row.from_version,
        to_version=row.to_version,
        moved_at=row.moved_at,
        reason=row.reason,
    )


def _chunks(values: Iterable[str]) -> Iterator[list[str]]:
    unique = sorted(set(values))
    for start in range(0, len(unique), _CHUNK):
        yield unique[start : start + _CHUNK]
