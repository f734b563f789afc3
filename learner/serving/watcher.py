"""Follows ``model.versions`` and keeps the live alias where the log says it is.

The topic is read from its beginning at each start, by nobody's group: what is live is what
the whole log says. An adapter that cannot be loaded changes nothing: the newest version of
the log that *can* be loaded is served, and the others are tried again from time to time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from learner.adapters import ADAPTER_FILES
from learner.model import BaseModel
from learner.serving.adapters import AdapterTable
from learner.serving.metrics import ServeMetrics
from streams.contracts import ModelVersion, VersionStatus
from streams.errors import (
    ArtifactError,
    ClawstreamError,
    ModelError,
    RecordError,
    SchemaError,
    UnknownModelError,
)
from streams.kafka.clients import make_consumer
from streams.registry.artifacts import verify
from streams.serde import Codec
from streams.settings import KafkaSettings

log = logging.getLogger(__name__)

_POLL_S = 0.2
_METADATA_TIMEOUT_S = 2.0
_DISCOVER_EVERY_S = 30.0
_SCHEMA_RETRY_S = 1.0


class VersionLog:
    """What the events read so far say about one policy. No I/O.

    Events come at least once, in order; an event that was seen already changes nothing.

    Args:
        policy: Events of other policies are left alone.
    """

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._known: dict[int, ModelVersion] = {}
        self._promoted: list[int] = []
        self._candidate: int | None = None
        self._seen: set[str] = set()

    def apply(self, event: ModelVersion) -> bool:
        """Take in an event; False if it says nothing new about this policy."""
        if event.policy != self._policy or event.event_id in self._seen:
            return False
        self._seen.add(event.event_id)
        if event.status is VersionStatus.LIVE:
            self._promote(event.version)
        elif event.status is VersionStatus.ROLLED_BACK:
            self._roll_back(event)
        elif event.status is VersionStatus.RETIRED:
            self._retire(event.version)
        self._remember(event)
        return True

    @property
    def live(self) -> int:
        """The version the log says is live; 0 is the base."""
        return self._promoted[-1] if self._promoted else 0

    @property
    def candidate(self) -> int | None:
        """The newest version that waits to go live, for requests that name it."""
        return self._candidate

    def preference(self) -> Iterator[int]:
        """Versions to serve, best first: the live one, those before it, the base."""
        yield from reversed(self._promoted)
        yield 0

    def event(self, version: int) -> ModelVersion | None:
        """The latest event about a version."""
        return self._known.get(version)

    def _promote(self, version: int) -> None:
        self._drop(version)
        # Going back to the base forgets what came after it.
        self._promoted = [*self._promoted, version] if version > 0 else []

    def _roll_back(self, event: ModelVersion) -> None:
        was_live = self.live == event.version
        self._drop(event.version)
        if was_live and event.previous_live not in (None, event.version):
            assert event.previous_live is not None
            self._promote(event.previous_live)

    def _retire(self, version: int) -> None:
        if version != self.live:
            self._drop(version)

    def _drop(self, version: int) -> None:
        self._promoted = [other for other in self._promoted if other != version]

    def _remember(self, event: ModelVersion) -> None:
        if event.status is VersionStatus.CANDIDATE:
            self._candidate = event.version
        elif self._candidate == event.version:
            self._candidate = None
        self._known[event.version] = event


class VersionWatcher:
    """A thread that applies ``model.versions`` to the adapter table.

    Args:
        make_consumer: Makes the consumer to assign partitions to; it must report ends of
            partitions (``watching_consumer`` does).
        topic: The topic of model versions.
        codec: Decodes its records.
        base: What this server runs on; versions made for another base are refused.
        table: Where adapters are loaded and the alias is moved.
        metrics: Where it counts.
        retry_ms: After how long an adapter that could not be loaded is tried again.
    """

    def __init__(
        self,
        *,
        make_consumer: Callable[[], Any],
        topic: str,
        codec: Codec,
        base: BaseModel,
        table: AdapterTable,
        metrics: ServeMetrics,
        retry_ms: int,
    ) -> None:
        self._make_consumer = make_consumer
        self._topic = topic
        self._codec = codec
        self._base = base
        self._table = table
        self._metrics = metrics
        self._retry_s = retry_ms / 1000
        self._log = VersionLog(table.policy)
        self._failed: dict[int, float] = {}
        self._unread: set[int] = set()
        self._assigned: set[int] = set()
        self._discover_at = 0.0
        self._dirty = True
        self._connected = False
        self._caught_up = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="version-watcher", daemon=True)

    def start(self) -> None:
        """Start following the topic."""
        self._thread.start()

    def stop(self) -> None:
        """Stop following it; blocks until the thread has ended."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def wait_caught_up(self, timeout_s: float) -> bool:
        """Block until the log as it was at the start is applied; False if that took too long."""
        return self._caught_up.wait(timeout_s)

    @property
    def connected(self) -> bool:
        """Whether the broker answered last time."""
        return self._connected and self._thread.is_alive()

    def _run(self) -> None:
        consumer = self._make_consumer()
        try:
            while not self._stop.is_set():
                try:
                    self._follow(consumer)
                except Exception:
                    # Whatever happens here, replies go on with what is loaded.
                    log.exception("following %s failed; trying again", self._topic)
                    self._metrics.watch_errors.labels("broker").inc()
                    self._stop.wait(_SCHEMA_RETRY_S)
        finally:
            consumer.close()

    def _follow(self, consumer: Consumer) -> None:
        """One round: find partitions, read what is there, serve what the log says."""
        if time.monotonic() >= self._discover_at:
            self._discover(consumer)
        for message in consumer.consume(num_messages=100, timeout=_POLL_S):
            self._take(message)
        if self._assigned and not self._unread:
            if self._dirty or self._retry_due():
                self._dirty = False
                self._settle()
            self._caught_up.set()

    def _discover(self, consumer: Consumer) -> None:
        """Read partitions that were not there before, from their beginning."""
        self._discover_at = time.monotonic() + (_DISCOVER_EVERY_S if self._assigned else _POLL_S)
        try:
            found = consumer.list_topics(self._topic, timeout=_METADATA_TIMEOUT_S)
        except KafkaException as error:
            self._connected = False
            log.debug("no metadata of %s: %s", self._topic, error)
            return
        self._connected = True
        partitions = set(found.topics[self._topic].partitions) - self._assigned
        if partitions:
            self._discover_at = time.monotonic() + _DISCOVER_EVERY_S
            self._assigned |= partitions
            self._unread |= partitions
            consumer.incremental_assign(
                [TopicPartition(self._topic, number, OFFSET_BEGINNING) for number in partitions]
            )

    def _take(self, message: Any) -> None:
        error = message.error()
        if error is None:
            self._connected = True
            self._apply(message)
        elif error.code() == KafkaError._PARTITION_EOF:
            self._unread.discard(message.partition())
        else:
            self._metrics.watch_errors.labels("broker").inc()
            log.warning("reading %s: %s", self._topic, error.str())

    def _apply(self, message: Any) -> None:
        if message.value() is None:
            return
        try:
            event = self._decode(message)
        except RecordError as error:
            self._metrics.watch_errors.labels("record").inc()
            located = error.at(message.topic(), message.partition(), message.offset())
            log.error("a record of %s is skipped: %s", self._topic, located)
            return
        if event is not None and self._log.apply(event):
            self._failed.pop(event.version, None)
            self._dirty = True

    def _decode(self, message: Any) -> ModelVersion | None:
        """The event; waits while the schema registry is away. None when stopped."""
        while not self._stop.is_set():
            try:
                return self._codec.decode(message.value(), ModelVersion)
            except SchemaError as error:
                self._metrics.watch_errors.labels("broker").inc()
                log.warning("cannot decode yet: %s", error)
                self._stop.wait(_SCHEMA_RETRY_S)
        return None

    def _retry_due(self) -> bool:
        return any(time.monotonic() - at >= self._retry_s for at in self._failed.values())

    def _settle(self) -> None:
        """Serve the best version that can be loaded, and have the candidate ready."""
        for version in self._log.preference():
            if version == self._table.live.version or self._try(version, go_live=True):
                break
        candidate = self._log.candidate
        if candidate is not None:
            self._try(candidate, go_live=False)

    def _try(self, version: int, *, go_live: bool) -> bool:
        failed_at = self._failed.get(version)
        if failed_at is not None and time.monotonic() - failed_at < self._retry_s:
            return False
        try:
            self._make_loaded(version)
            if go_live:
                self._table.go_live(version)
        except Exception as error:
            self._note_failure(version, error)
            return False
        self._failed.pop(version, None)
        return True

    def _note_failure(self, version: int, error: Exception) -> None:
        self._failed[version] = time.monotonic()
        self._metrics.swaps.labels("failed").inc()
        log.error(
            "version=%d is not served, version=%d stays live: %s: %s",
            version,
            self._table.live.version,
            type(error).__name__,
            error,
            exc_info=None if isinstance(error, ClawstreamError) else error,
        )

    def _make_loaded(self, version: int) -> None:
        if any(loaded.version == version for loaded in self._table.versions()):
            return
        event = self._log.event(version)
        if event is None:
            raise UnknownModelError(
                f"version {version} is to be served, but {self._topic} holds no event about it"
            )
        self._check_origin(event)
        missing = [name for name in ADAPTER_FILES if name not in event.adapter_files]
        if event.adapter_uri is None or missing:
            raise ArtifactError(f"the event of version {version} names no adapter files to load")
        folder = verify(event.adapter_uri, event.adapter_files)
        self._table.load(version, folder, sha256=event.adapter_files)

    def _check_origin(self, event: ModelVersion) -> None:
        digests = (
            ("base model", event.base_model_digest, self._base.base_digest),
            ("tokenizer", event.tokenizer_digest, self._base.tokenizer_digest),
            ("chat template", event.template_digest, self._base.template_digest),
        )
        for what, theirs, ours in digests:
            if theirs != ours:
                raise ModelError(
                    f"version {event.version} was trained with another {what} ({theirs}) than "
                    f"this server runs ({ours}); give both the same model.base"
                )


def watching_consumer(settings: KafkaSettings, bootstrap_servers: str) -> Consumer:
    """A consumer for the watcher: of no group that anybody could see, and told of each end.

    Raises:
        BrokerError: The settings make no client.
    """
    return make_consumer(
        settings,
        bootstrap_servers,
        group="clawstream-serving",
        overrides={"enable.partition.eof": True, "allow.auto.create.topics": False},
    )


__all__ = ["VersionLog", "VersionWatcher", "watching_consumer"]
