"""The learner: wait for enough news, sample, update, publish, and again.

``Learner.run`` reads as the numbered steps of DESIGN §6. What an update does is behind the
``Trainer`` protocol; what is learned from labelled examples first is in ``learner.warming``; where
segments come from is behind ``Feed``; what happens to the result is behind ``Publisher``. This
module decides only the order, and what a stop may interrupt: a wait at any moment, an update
between two micro-batches, never its publication.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from learner.checkpoint import LearnerState, pack_rng, unpack_rng
from learner.examples import ExampleFile
from learner.feed import Feed, FeedStatus, Sealed
from learner.hints import teaches
from learner.kafka import KafkaWriter, connect_consumer, connect_writer
from learner.makeup import IMBALANCE, Limits, MakeUp
from learner.page import MetricsPage
from learner.ppo.staleness import oldest_fresh
from learner.publish import (
    BaseIdentity,
    FinishedUpdate,
    Publisher,
    adapter_folder,
    settings_hash,
)
from learner.schedule import Rules, Schedule, Trigger
from learner.trackers import AccelerateTrackers, Several, Trackers
from learner.warming import Warming, WarmStarted, WarmStartHooks
from learner.window import Candidate, Uses, Window, sample
from streams import topics
from streams.clock import Clock, SystemClock
from streams.contracts import ModelVersion, ScoredSegment, SourceRef, VersionStatus
from streams.errors import BrokerError, LearnerError, UpdateStoppedError
from streams.kafka.clients import resolve_bootstrap
from streams.registry import ArtifactStore, Checkpoint, Registry
from streams.serde import Codec, build_codec
from streams.settings import LearnerSettings, Settings

log = logging.getLogger(__name__)

STALE_METRIC = "stale/dropped_share"
"""Explained with the trainer's metrics in ``learner.ppo.diagnostics``, as are all."""
TOKENS_METRIC = "batch/tokens"
EPOCHS_METRIC = "batch/epochs"

_POLL_S = 0.2
_PROGRESS_MS = 10_000
_OUTBOX_MS = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What an update did.

    Attributes:
        metrics: Diagnostics by their usual names.
        optimizer_step: Optimizer steps taken since the policy began.
        used: Ids of the segments that were trained on.
    """

    metrics: Mapping[str, float]
    optimizer_step: int
    used: frozenset[str]


class Trainer(Protocol):
    """What turns segments into a better adapter."""

    @property
    def base(self) -> BaseIdentity:
        """What the adapter belongs to."""
        ...

    def train(
        self,
        segments: Sequence[ScoredSegment],
        current_version: int,
        adapter_of: Callable[[int], Path],
        should_stop: Callable[[], bool],
    ) -> Trained | None:
        """One update on these segments; None if none of them can be used.

        If it raises, everything is as it was before.

        Args:
            segments: What was sampled.
            current_version: The version whose weights are trained; 0 is the base model.
            adapter_of: The folder with another version's adapter; raises ArtifactError or
                RegistryError if there is none any more.
            should_stop: Asked again and again on the way; once it says True the update ends.

        Raises:
            LearnerError: These segments make no update.
            UpdateStoppedError: ``should_stop`` said so.
        """
        ...

    def warm_start(self, file: ExampleFile, hooks: WarmStartHooks) -> WarmStarted:
        """Learn from labelled examples. If it raises, everything is as it was before.

        Raises:
            LearnerError: These examples cannot be learned from.
            UpdateStoppedError: ``hooks.should_stop`` said so; ``hooks.save`` has its state.
        """
        ...

    @property
    def optimizer_step(self) -> int:
        """Optimizer steps of all updates so far."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Everything an update depends on, the adapter included: tensors, numbers and text."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to what ``state_dict`` returned."""
        ...

    def save_adapter(self, folder: Path) -> object:
        """Write the adapter's files into an empty folder."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Topics:
    """The topics the learner reads and writes."""

    scored: str = topics.SCORED
    versions: str = topics.VERSIONS
    dead_letters: str = topics.DEAD_LETTERS


class Learner:
    """See the module.

    Args:
        settings: What and when to learn.
        trainer: Makes the updates.
        registry: What was recorded before.
        feed: Where segments come from; not started yet.
        publisher: Where versions go.
        config_hash: Of the settings, for the versions' records.
        clock: Tells the time.
        stopping: Set from outside to stop; the feed watches it too.
        warming: Learns from labelled examples first; None if there are none.
        trackers: Where metrics go beside registry and log; nowhere if None.
    """

    def __init__(
        self,
        *,
        settings: LearnerSettings,
        trainer: Trainer,
        registry: Registry,
        feed: Feed,
        publisher: Publisher,
        config_hash: str,
        clock: Clock,
        stopping: threading.Event,
        warming: Warming | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        self._settings = settings
        self._trainer = trainer
        self._warming = warming
        self._registry = registry
        self._feed = feed
        self._publisher = publisher
        self._config_hash = config_hash
        self._clock = clock
        self._stopping = stopping
        self._trackers = trackers or Several()
        self._outbox_at_ms = 0
        self._progress = _Progress(clock, settings)

    def run(self) -> int:
        """Learn until stopped, or until ``max_updates`` updates were published.

        Returns:
            How many were published.

        Raises:
            ClawstreamError: Something it needs cannot be used; what was recorded stays, and
                the next run goes on from there.
        """
        # 1. Clear up what a crash left behind.
        self._publisher.recover()
        # 2. Go back to where the newest version left off, learn from labelled examples if there
        # are any, and read on, window included.
        course = self._begin()
        while not self._finished(course):
            # 3. Wait until enough is new.
            trigger = self._wait(course.schedule)
            if trigger is None:
                break
            # 4. Take a snapshot; what arrives from here on belongs to the next.
            sealed, sealed_at = self._feed.seal(), course.schedule.restart()
            # 5. Sample from it.
            drawn = sample(sealed.snapshot.candidates, self._settings.batch_segments, course.rng)
            # 6. Update.
            trained = self._train(drawn)
            if self._stopping.is_set() and trained is None:
                break
            if trained is None:
                log.warning("no version from %d sampled segments: waiting for news", len(drawn))
                continue
            # 7. Publish, live or rejected.
            finished = self._describe(course, trigger, sealed, sealed_at, drawn, trained)
            version = self._publisher.publish(finished)
            _log_update(version, trained, len(drawn), self._clock.now_ms() - sealed_at)
            self._trackers.log(version)
            # 8. Go on from the new version, or from the one before if it was rejected.
            self._go_on(course, version, finished)
        # 9. Leave nothing unsent, unless stopped: the next start sends it.
        if not self._stopping.is_set():
            self._publisher.send_unpublished()
        return course.published

    def warm(self) -> int:
        """Learn from the labelled examples alone; no record is read.

        Returns:
            0: no updates were published.

        Raises:
            ClawstreamError: As ``run``.
        """
        self._publisher.recover()
        self._restore_and_warm()
        return 0

    def _finished(self, course: _Course) -> bool:
        limit = self._settings.max_updates
        return self._stopping.is_set() or (limit > 0 and course.published >= limit)

    # Starting

    def _restore_and_warm(self) -> tuple[Checkpoint | None, random.Random]:
        """Bring the trainer to where learning goes on; the newest checkpoint."""
        checkpoint = self._registry.latest_checkpoint(self._settings.policy)
        rng = self._restore(checkpoint)
        if self._warming is not None:
            known = self._registry.next_version(self._settings.policy)
            self._warming.run(self._trainer, checkpoint, rng)
            checkpoint = self._registry.latest_checkpoint(self._settings.policy)
            warmed = self._registry.get(self._settings.policy, known)
            if warmed is not None:
                self._trackers.log(warmed)
        return checkpoint, rng

    def _begin(self) -> _Course:
        checkpoint, rng = self._restore_and_warm()
        since = self._feed.start(checkpoint, self._uses_of)
        self._drop_stale()
        sealed_at = None if checkpoint is None else checkpoint.sealed_at
        return _Course(
            rng=rng,
            schedule=Schedule(Rules.of(self._settings), self._clock, sealed_at),
            since=since,
            good=LearnerState.capture(self._trainer.state_dict()),
        )

    def _restore(self, checkpoint: Checkpoint | None) -> random.Random:
        """Bring trainer and generators back; the sampler's generator."""
        if checkpoint is None:
            torch.manual_seed(self._settings.seed)
            log.info("nothing learned yet policy=%s: starting anew", self._settings.policy)
            return random.Random(self._settings.seed)
        self._trainer.load_state_dict(LearnerState.read(checkpoint).restore())
        log.info("resumed policy=%s version=%d", self._settings.policy, checkpoint.version)
        return unpack_rng(checkpoint.rng)

    def _uses_of(self, segment_ids: Any) -> Mapping[str, Uses]:
        return self._registry.versions_using(self._settings.policy, segment_ids)

    # One round

    def _wait(self, schedule: Schedule) -> Trigger | None:
        """Block until an update is due; None if stopped first."""
        while not self._stopping.is_set():
            status = self._feed.status()
            trigger = schedule.due(
                new_segments=status.new_segments, available_segments=status.available_segments
            )
            if trigger is not None:
                return trigger
            self._progress.show(status)
            self._retry_outbox()
            self._stopping.wait(_POLL_S)
        return None

    def _train(self, drawn: Sequence[Candidate]) -> Trained | None:
        segments = [candidate.scored for candidate in drawn]
        try:
            return self._trainer.train(
                segments, self._current_version(), self._adapter_of, self._stopping.is_set
            )
        except UpdateStoppedError as stopped:
            log.info("%s", stopped)
            return None
        except LearnerError as error:
            # Leaving would not help: the next start would draw the same sample again.
            log.error("update failed, the next draws another sample: %s", error)
            return None

    def _current_version(self) -> int:
        """The version whose weights the trainer has now; 0 is the base model."""
        return self._registry.newest_good(self._settings.policy) or 0

    def _adapter_of(self, version: int) -> Path:
        """The folder with a version's adapter, verified.

        Raises:
            RegistryError: There is no such version, or it belongs to another base model.
            ArtifactError: Its files are missing or damaged.
        """
        return adapter_folder(
            self._registry, self._settings.policy, version, base=self._trainer.base
        )

    def _drop_stale(self) -> None:
        """Leave out segments by versions more than ``max_version_gap`` behind the current."""
        gap = self._settings.max_version_gap
        self._feed.require_version(oldest_fresh(self._current_version(), max_version_gap=gap))

    def _describe(
        self,
        course: _Course,
        trigger: Trigger,
        sealed: Sealed,
        sealed_at: int,
        drawn: Sequence[Candidate],
        trained: Trained,
    ) -> FinishedUpdate:
        used = tuple(c for c in drawn if c.scored.segment.segment_id in trained.used)
        made_up = MakeUp.of(candidate.scored for candidate in used)
        limits = Limits(
            max_share=self._settings.imbalance_max_share,
            min_sign_share=self._settings.imbalance_min_sign_share,
        )
        return FinishedUpdate(
            metrics={
                **trained.metrics,
                **_speed(trained, self._clock.now_ms() - sealed_at),
                STALE_METRIC: sealed.snapshot.stale_share,
                **made_up.metrics(limits),
            },
            optimizer_step=trained.optimizer_step,
            used=used,
            attributes=made_up.attributes(limits),
            since=course.since,
            positions=sealed.positions,
            window=sealed.snapshot.refs,
            rng=pack_rng(course.rng),
            sealed_at=sealed_at,
            reason=f"{trigger.value}: {sealed.snapshot.new_segments} new segments",
            config_hash=self._config_hash,
            save_adapter=self._trainer.save_adapter,
            before=course.good,
            after=LearnerState.capture(self._trainer.state_dict()),
        )

    def _go_on(self, course: _Course, version: ModelVersion, finished: FinishedUpdate) -> None:
        if version.status is VersionStatus.REJECTED:
            log.warning("version %d %s", version.version, version.reason)
            self._trainer.load_state_dict(finished.before.restore())
        else:
            course.good = finished.after
        course.since = finished.positions
        course.published += 1
        used = [c.scored.segment.segment_id for c in finished.used]
        self._feed.record_use(used, version.version)
        self._drop_stale()

    # The outbox

    def _retry_outbox(self) -> None:
        now_ms = self._clock.now_ms()
        if 0 <= now_ms - self._outbox_at_ms < _OUTBOX_MS:
            return
        self._outbox_at_ms = now_ms
        try:
            self._publisher.send_unpublished()
        except BrokerError as error:
            log.warning("events of versions still wait: %s", error)


def run(
    settings: Settings,
    make_trainer: Callable[[Settings], Trainer],
    *,
    stopping: threading.Event,
    names: Topics | None = None,
    clock: Clock | None = None,
    warm_start: ExampleFile | None = None,
    warm_start_only: bool = False,
) -> int:
    """Connect everything that the settings name, learn until stopped, and close it again.

    Args:
        settings: All settings.
        make_trainer: Loads the model; called once everything else can be reached.
        stopping: Set to stop.
        names: The topics, if not the usual ones.
        clock: The machine's clock if None.
        warm_start: Labelled examples to learn from first.
        warm_start_only: End after that.

    Returns:
        How many updates were published.

    Raises:
        ClawstreamError: Something it needs cannot be used.
    """
    links = _connect(settings, stopping, names or Topics(), clock or SystemClock())
    artifacts = ArtifactStore.open(settings.effective_artifacts_url)
    with (
        artifacts.claim(settings.learner.policy),
        Registry.open(settings.effective_registry_url) as registry,
    ):
        trackers = make_trackers(settings, _newest(registry, settings.learner.policy))
        trainer = make_trainer(settings)
        feed = _make_feed(settings, links)
        config_hash = hash_of(settings)
        publisher = _make_publisher(settings, links, registry, artifacts, trainer.base)
        warming = None
        if warm_start is not None:
            warming = Warming(
                file=warm_start,
                policy=settings.learner.policy,
                registry=registry,
                artifacts=artifacts,
                publisher=publisher,
                config_hash=config_hash,
                clock=links.clock,
                stopping=stopping,
            )
        learner = Learner(
            settings=settings.learner,
            trainer=trainer,
            registry=registry,
            feed=feed,
            publisher=publisher,
            config_hash=config_hash,
            clock=links.clock,
            stopping=stopping,
            warming=warming,
            trackers=trackers,
        )
        try:
            return learner.warm() if warm_start_only else learner.run()
        finally:
            feed.stop()
            trackers.close()


def hash_of(settings: Settings) -> str:
    """What of the settings makes a version what it is, hashed: not where its curves go."""
    elsewhere = {"trackers": (), "tracker_dir": None, "web_port": 0}
    learned = settings.learner.model_copy(update=elsewhere)
    return settings_hash(learned, settings.model)


def make_trackers(settings: Settings, newest: ModelVersion | None = None) -> Several:
    """The trackers that the settings name, and the page for Prometheus.

    Args:
        settings: Of the learner.
        newest: The policy's newest version, shown on the page until there is a newer one.

    Raises:
        SettingsError: One of them cannot be used.
    """
    learner = settings.learner
    made: list[Trackers] = []
    if learner.trackers:
        tools = AccelerateTrackers(
            learner.trackers,
            run=learner.policy,
            folder=learner.tracker_dir or settings.data_dir / "trackers",
            settings=learner.model_dump(mode="json"),
        )
        made.append(tools)
    if learner.web_port:
        made.append(MetricsPage(settings.worker.web_host, learner.web_port, newest))
    return Several(*made)


def _newest(registry: Registry, policy: str) -> ModelVersion | None:
    checkpoint = registry.latest_checkpoint(policy)
    return None if checkpoint is None else registry.get(policy, checkpoint.version)


@dataclass(frozen=True, slots=True)
class _Links:
    """What feed and publisher share."""

    bootstrap: str
    codec: Codec
    writer: KafkaWriter
    names: Topics
    clock: Clock
    stopping: threading.Event


def _connect(settings: Settings, stopping: threading.Event, names: Topics, clock: Clock) -> _Links:
    bootstrap = resolve_bootstrap(settings)
    codec = build_codec(settings.schema_registry_url)
    writer = connect_writer(settings.kafka, bootstrap)
    return _Links(bootstrap, codec, writer, names, clock, stopping)


def _make_feed(settings: Settings, links: _Links) -> Feed:
    learner = settings.learner
    window = Window(
        max_segments=learner.window_segments,
        max_tokens=learner.window_tokens,
        max_uses=learner.max_updates_per_segment,
        max_session_uses=learner.max_updates_per_session,
        teaches=partial(teaches, source=learner.hint),
    )
    return Feed(
        consumer=connect_consumer(settings.kafka, links.bootstrap),
        topic=links.names.scored,
        policy=learner.policy,
        window=window,
        codec=links.codec,
        writer=links.writer,
        dead_letters=links.names.dead_letters,
        clock=links.clock,
        stopping=links.stopping,
    )


def _make_publisher(
    settings: Settings,
    links: _Links,
    registry: Registry,
    artifacts: ArtifactStore,
    base: BaseIdentity,
) -> Publisher:
    learner = settings.learner
    return Publisher(
        registry=registry,
        artifacts=artifacts,
        writer=links.writer,
        codec=links.codec,
        topic=links.names.versions,
        policy=learner.policy,
        base=base,
        max_kl=learner.gate_max_kl,
        keep_checkpoints=learner.keep_checkpoints,
        clock=links.clock,
    )


@dataclass(slots=True)
class _Course:
    """Where a learner stands between two updates.

    ``since`` is, per partition, the first record not in the newest version; ``good`` the state
    to go back to if the next update is rejected.
    """

    rng: random.Random
    schedule: Schedule
    since: tuple[SourceRef, ...]
    good: LearnerState
    published: int = 0


class _Progress:
    """Says in the log what is waited for, when it changed and not too often."""

    def __init__(self, clock: Clock, settings: LearnerSettings) -> None:
        self._clock = clock
        self._settings = settings
        self._shown: FeedStatus | None = None
        self._shown_at_ms = 0

    def show(self, status: FeedStatus) -> None:
        now_ms = self._clock.now_ms()
        if status == self._shown or 0 <= now_ms - self._shown_at_ms < _PROGRESS_MS:
            return
        self._shown, self._shown_at_ms = status, now_ms
        log.info(
            "waiting new=%d/%d available=%d/%d window=%d tokens=%d kb=%d arrived=%s",
            status.new_segments, self._settings.update_segments,
            status.available_segments, self._settings.min_sample_size,
            status.segments, status.tokens, math.ceil(status.held_bytes / 1_000),
            dict(sorted(status.arrivals.items())),
        )  # fmt: skip


def _speed(trained: Trained, took_ms: int) -> dict[str, float]:
    tokens, seconds = trained.metrics.get(TOKENS_METRIC, 0.0), max(took_ms, 0) / 1e3
    epochs = trained.metrics.get(EPOCHS_METRIC, 1.0)
    per_second = epochs * tokens / seconds if seconds else 0.0
    return {"charts/update_s": seconds, "charts/SPS": per_second}


def _log_update(version: ModelVersion, trained: Trained, sampled: int, took_ms: int) -> None:
    numbers = " ".join(f"{name}={value:.6g}" for name, value in sorted(version.metrics.items()))
    log.info(
        "update version=%d status=%s parent=%s sampled=%d used=%d took_ms=%d %s",
        version.version, version.status.value, version.parent,
        sampled, len(trained.used), took_ms, numbers,
    )  # fmt: skip
    if IMBALANCE in version.attributes:
        log.warning(
            "update unbalanced version=%d: %s", version.version, version.attributes[IMBALANCE]
        )


__all__ = ["Learner", "Topics", "Trained", "Trainer", "run"]
