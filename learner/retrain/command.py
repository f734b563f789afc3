"""Connects a retrain to Kafka, registry and model, and runs it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from learner.hints import teaches
from learner.kafka import connect_writer
from learner.loop import Topics, hash_of
from learner.publish import Publisher
from learner.retrain.reading import (
    ReadRange,
    connect,
    find_archived,
    find_ranges,
    from_archive,
    from_topic,
    read_into,
)
from learner.retrain.run import (
    Batches,
    Counted,
    Job,
    Retrain,
    RetrainTrainer,
    base_of,
    plan,
)
from learner.retrain.store import Made, Store
from streams.archive.reading import open_archive
from streams.clock import SystemClock
from streams.contracts import ModelVersion
from streams.errors import ReplayError
from streams.kafka.clients import resolve_bootstrap
from streams.kafka.places import Range, parse_place
from streams.registry import ArtifactStore, Registry
from streams.serde import build_codec
from streams.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What was asked for; the places in ``streams.kafka.places.FORMS``.

    ``archive`` is the address of the archive that is read; Kafka is if there is none.
    """

    begin: str
    end: str
    base_version: int
    updates: int | None
    archive: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a retrain would be."""

    ranges: tuple[Range, ...]
    counted: Counted
    batches: Batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a retrain came to."""

    version: ModelVersion
    counted: Counted
    made: tuple[Made, ...]


def look(
    settings: Settings, wanted: Wanted, names: Topics, shown: Callable[[int, int], None]
) -> Outlook:
    """Read the range and say what would be trained; nothing is kept.

    Args:
        settings: All settings.
        wanted: What was asked for.
        names: The topics.
        shown: Told how many of how many offsets are read.

    Raises:
        ClawstreamError: It could not be done; says why.
    """
    with Registry.open(settings.effective_registry_url) as registry:
        base_of(registry, settings.learner.policy, wanted.base_version)
    with Store(None) as store:
        ranges = _ranges(settings, wanted, names.scored)
        counted = _read(settings, store, ranges, wanted.archive, shown, keep=False)
        batches = plan(store, settings.learner, wanted.base_version, wanted.updates)
    return Outlook(ranges=ranges, counted=counted, batches=batches)


def begin(settings: Settings, wanted: Wanted, names: Topics, name: str) -> Path:
    """Write down what is to be done; its folder.

    Raises:
        ReplayError: There is a retrain of this name already, or nothing lies in the range.
        RegistryError: There is no such base version.
        BrokerError: Kafka cannot be reached.
    """
    folder = folder_of(settings, name)
    if Store.exists(folder):
        raise ReplayError(f"there is a retrain {name} already: go on with --resume {name}")
    with Registry.open(settings.effective_registry_url) as registry:
        base_of(registry, settings.learner.policy, wanted.base_version)
    job = Job(
        name=name,
        id=secrets.token_hex(8),
        policy=settings.learner.policy,
        base_version=wanted.base_version,
        updates=wanted.updates,
        begin=wanted.begin,
        end=wanted.end,
        ranges=_ranges(settings, wanted, names.scored),
        config_hash=hash_of(settings),
        archive=open_archive(wanted.archive, settings).address if wanted.archive else "",
    )
    with Store(folder) as store:
        job.keep(store)
    return folder


def go_on(
    settings: Settings,
    folder: Path,
    names: Topics,
    make_trainer: Callable[[Settings], RetrainTrainer],
    *,
    read: Callable[[int, int], None],
    updated: Callable[[int, int], None],
) -> Done:
    """Do what is written down in a folder, from where it stood.

    Args:
        settings: All settings, with which it was begun.
        folder: Of `begin`.
        names: The topics.
        make_trainer: Loads the model.
        read: Told how many of how many offsets are read.
        updated: Told how many of how many updates are made.

    Raises:
        ClawstreamError: It could not be done; says why. Nothing is published then.
    """
    if not Store.exists(folder):
        raise ReplayError(f"there is no retrain {folder.name} in {folder.parent}")
    with Store(folder) as store, store.claim():
        job = _job(settings, store, folder)
        counted = Counted.of(store)
        if counted is None:
            store.forget_segments()
            counted = _read(settings, store, job.ranges, job.archive, read, keep=True)
            counted.keep(store)
        # What cannot be trained on shows before the model is loaded.
        plan(store, settings.learner, job.base_version, job.updates)
        artifacts = ArtifactStore.open(settings.effective_artifacts_url)
        with Registry.open(settings.effective_registry_url) as registry:
            trainer = make_trainer(settings)
            publisher = _publisher(settings, registry, artifacts, trainer, names)
            version = Retrain(
                job=job,
                store=store,
                settings=settings.learner,
                trainer=trainer,
                registry=registry,
                artifacts=artifacts,
                send=publisher.send_unpublished,
                clock=SystemClock(),
                shown=updated,
            ).run()
        return Done(version=version, counted=counted, made=store.made())


def folder_of(settings: Settings, name: str) -> Path:
    """Where a retrain keeps what it has read and done."""
    return (settings.data_dir / "retrains" / name).absolute()


def _job(settings: Settings, store: Store, folder: Path) -> Job:
    job = Job.of(store)
    if job is None:
        raise ReplayError(f"nothing was written down in {folder}: remove it, and begin again")
    if job.policy != settings.learner.policy:
        raise ReplayError(
            f"retrain {job.name} is of policy {job.policy!r}, learner.policy is "
            f"{settings.learner.policy!r}"
        )
    if job.config_hash != hash_of(settings):
        raise ReplayError(
            f"retrain {job.name} was begun with other learner or model settings: set them as they "
            "were, or begin another under a new name"
        )
    return job


def _ranges(settings: Settings, wanted: Wanted, topic: str) -> tuple[Range, ...]:
    now_ms = time.time_ns() // 1_000_000
    first, last = parse_place(wanted.begin, now_ms), parse_place(wanted.end, now_ms)
    if wanted.archive:
        return find_archived(open_archive(wanted.archive, settings), topic, first, last)
    with connect(settings) as consumer:
        return find_ranges(consumer, topic, first, last)


@contextmanager
def _reader(settings: Settings, archive: str) -> Iterator[ReadRange]:
    if archive:
        yield from_archive(open_archive(archive, settings))
        return
    with connect(settings) as consumer:
        yield from_topic(consumer)


def _read(
    settings: Settings,
    store: Store,
    ranges: tuple[Range, ...],
    archive: str,
    shown: Callable[[int, int], None],
    *,
    keep: bool,
) -> Counted:
    total, seen = sum(one.records for one in ranges), 0

    def more(records: int) -> None:
        nonlocal seen
        seen += records
        shown(min(seen, total), total)

    with _reader(settings, archive) as read:
        records, undecodable = read_into(
            store,
            read,
            ranges,
            codec=build_codec(settings.schema_registry_url),
            teaches=partial(teaches, source=settings.learner.hint),
            policy=settings.learner.policy if keep else None,
            shown=more,
        )
    return Counted(records=records, undecodable=undecodable, segments=store.counts())


def _publisher(
    settings: Settings,
    registry: Registry,
    artifacts: ArtifactStore,
    trainer: RetrainTrainer,
    names: Topics,
) -> Publisher:
    """Only to send what waits: a retrain records its version itself."""
    return Publisher(
        registry=registry,
        artifacts=artifacts,
        writer=connect_writer(settings.kafka, resolve_bootstrap(settings)),
        codec=build_codec(settings.schema_registry_url),
        topic=names.versions,
        policy=settings.learner.policy,
        base=trainer.base,
        max_kl=settings.learner.gate_max_kl,
        keep_checkpoints=settings.learner.keep_checkpoints,
        clock=SystemClock(),
    )


__all__ = ["Done", "Outlook", "Wanted", "begin", "folder_of", "go_on", "look"]
