"""The version registry: what was trained from what, which version is live, what to resume from.

A version is recorded in one transaction together with its status, its sources, its lineage,
the move of the ``live`` alias and the learner's checkpoint; there is no moment at which one of
them exists without the others. Its event waits in the same database until ``mark_published``
(an outbox), so that a crash between the transaction and Kafka's acknowledgement loses nothing.

Whether a version goes live is the caller's decision, expressed by the status it records.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

from sqlalchemy import Engine, Select, func, select, update
from sqlalchemy.orm import Session

from streams.contracts import ModelVersion, VersionStatus
from streams.errors import RegistryError
from streams.registry.database import for_writing, mapped_errors, open_engine
from streams.registry.models import (
    AliasMoveRow,
    CheckpointRow,
    LineageRow,
    StatusChangeRow,
    VersionRow,
)
from streams.registry.rows import (
    LIVE,
    RETRAIN,
    AliasMove,
    Checkpoint,
    SegmentUse,
    StatusChange,
    alias_move_of,
    alias_target,
    changes_of,
    checkpoint_of,
    checkpoint_row,
    event_of,
    first_change,
    go_live,
    lineage_rows,
    newest_version,
    offset_rows,
    present_of,
    status_change_of,
    version_row,
)

_CHUNK = 500
"""Values in one ``IN (...)``, below every database's limit."""


class Registry:
    """The version registry of all policies.

    Safe to use from several threads and processes; each call is one transaction. Every method
    raises ``RegistryError`` if the database cannot be used.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._writing = for_writing(engine)

    @classmethod
    def open(cls, url: str) -> Registry:
        """Open the registry at a SQLAlchemy URL and bring its tables up to date.

        Idempotent, and safe when several processes open a new registry at once. A SQLite file
        and its folder are created if missing.

        Raises:
            RegistryError: The URL cannot be used, the database cannot be reached, or it was
                written by a newer clawstream.
        """
        return cls(open_engine(url))

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
            session.add(version_row(version))
            session.flush()
            live = alias_target(session, version.policy, LIVE)
            session.add(first_change(version, live))
            session.add_all(offset_rows(version))
            session.add_all(lineage_rows(version, lineage))
            if checkpoint is not None:
                session.add(checkpoint_row(version.policy, checkpoint))
            if version.status is VersionStatus.LIVE:
                go_live(session, version, live)
            session.flush()
            return event_of(
                session, session.scalars(changes_of(version.policy, version.version)).one()
            )

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
            return tuple(present_of(session, change) for change in session.scalars(query))

    def get(self, policy: str, version: int) -> ModelVersion | None:
        """One version with its present status, or None."""
        with self._read(f"read version {version} of policy {policy!r}") as session:
            query = changes_of(policy, version).order_by(StatusChangeRow.id.desc()).limit(1)
            change = session.scalars(query).first()
            return None if change is None else present_of(session, change)

    def live(self, policy: str) -> int | None:
        """The version a policy answers with; None is the base model."""
        with self._read(f"read the live version of policy {policy!r}") as session:
            return alias_target(session, policy, LIVE)

    def next_version(self, policy: str) -> int:
        """The number the next version of a policy will have; the first is 1."""
        with self._read(f"read the newest version of policy {policy!r}") as session:
            return newest_version(session, policy) + 1

    def history(self, policy: str, version: int) -> tuple[StatusChange, ...]:
        """What happened to a version, oldest first."""
        with self._read(f"read the history of version {version}") as session:
            rows = session.scalars(changes_of(policy, version).order_by(StatusChangeRow.id))
            return tuple(status_change_of(row) for row in rows)

    def alias_moves(self, policy: str, alias: str = LIVE) -> tuple[AliasMove, ...]:
        """Every move of an alias, oldest first."""
        query = (
            select(AliasMoveRow)
            .where(AliasMoveRow.policy == policy, AliasMoveRow.alias == alias)
            .order_by(AliasMoveRow.id)
        )
        with self._read(f"read the moves of alias {alias!r}") as session:
            return tuple(alias_move_of(row) for row in session.scalars(query))

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

    def versions_using(self, policy: str, segment_ids: Iterable[str]) -> dict[str, frozenset[int]]:
        """Which versions of a policy used each of the segments; absent if none did.

        Retrained versions do not count: they are not of the learner's own line.
        """
        found: dict[str, set[int]] = {}
        with self._read("look up who used segments") as session:
            for chunk in _chunks(segment_ids):
                query = select(LineageRow.segment_id, LineageRow.version).where(
                    LineageRow.policy == policy,
                    LineageRow.segment_id.in_(chunk),
                    LineageRow.version.not_in(_retrained(policy)),
                )
                for row in session.execute(query):
                    found.setdefault(row.segment_id, set()).add(row.version)
        return {segment_id: frozenset(versions) for segment_id, versions in found.items()}

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
            return None if row is None else checkpoint_of(row)

    def newest_good(self, policy: str) -> int | None:
        """The newest version of the learner's own line that was not rejected, the parent of the
        next; None is the base. Retrained versions are not of that line.
        """
        rejected = select(StatusChangeRow.version).where(
            StatusChangeRow.policy == policy,
            StatusChangeRow.status == VersionStatus.REJECTED.value,
        )
        query = select(func.max(VersionRow.version)).where(
            VersionRow.policy == policy,
            VersionRow.version.not_in(rejected),
            VersionRow.version.not_in(_retrained(policy)),
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
            return tuple(event_of(session, row) for row in rows)

    # Inside

    @contextlib.contextmanager
    def _write(self, what: str) -> Iterator[Session]:
        with self._errors(what), Session(self._writing) as session, session.begin():
            yield session

    @contextlib.contextmanager
    def _read(self, what: str) -> Iterator[Session]:
        with self._errors(what), Session(self._engine) as session, session.begin():
            yield session

    def _errors(self, what: str) -> AbstractContextManager[None]:
        return mapped_errors(what, self._engine.url)

    def _require_next(self, session: Session, version: ModelVersion) -> None:
        expected = newest_version(session, version.policy) + 1
        if version.version != expected:
            raise RegistryError(
                f"version {version.version} of policy {version.policy!r} cannot be recorded: the "
                f"next number is {expected}. Another learner of this policy is at work; stop one"
            )


def _retrained(policy: str) -> Select[int]:
    """The versions of a policy that were trained beside its learner's own line."""
    return select(VersionRow.version).where(
        VersionRow.policy == policy, VersionRow.attributes[RETRAIN].as_string().is_not(None)
    )


def _chunks(values: Iterable[str]) -> Iterator[list[str]]:
    unique = sorted(set(values))
    for start in range(0, len(unique), _CHUNK):
        yield unique[start : start + _CHUNK]
