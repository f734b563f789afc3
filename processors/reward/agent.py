"""The reward processor's shell over its pure machine: decode, step, hand over."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from processors.reward import calibration, crowd, machine
from processors.reward import codec as state_codec
from processors.reward.formulas import PLUGIN_ERRORS_ATTRIBUTE
from processors.reward.plugins import NO_PLUGINS, Plugins
from processors.runtime import deadletters
from processors.runtime.decoding import decode
from processors.runtime.records import Outcome, Output, RawRecord, is_tick
from processors.runtime.status import ProcessorStatus
from streams import metrics as names
from streams.contracts import DeadLetter, ScoredSegment, TrajectorySegment
from streams.errors import OversizedError, RecordError
from streams.metrics import ProcessorMetrics
from streams.serde import Codec
from streams.settings import RewardSettings
from streams.topics import DEAD_LETTERS, REVIEWS, SCORED, SEGMENTS

STAGE = "reward"
SIGNS = {-1: "negative", 0: "neutral", 1: "positive"}

NONZERO_WINDOW = 1_000
"""Of so many segments scored last in a partition the share with a reward is watched."""

FAILURES_TOLD_EVERY = 1_000
"""Of a plugin that fails the first segment is named in the log, and then one in so many."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RewardTopics:
    """The topics the reward processor works on."""

    segments: str = SEGMENTS
    scored: str = SCORED
    reviews: str = REVIEWS
    dead_letters: str = DEAD_LETTERS


class RewardProcessor:
    """One partition of the reward processor (``runtime.records.PartitionProcessor``).

    Args:
        settings: Weights and filters.
        codec: Reads and writes records.
        metrics: Counters.
        max_bytes: The largest record that outputs may be.
        topics: Where records come from and go to.
        plugins: Signals and components of other packages.
    """

    def __init__(
        self,
        settings: RewardSettings,
        codec: Codec,
        metrics: ProcessorMetrics,
        max_bytes: int,
        topics: RewardTopics | None = None,
        plugins: Plugins = NO_PLUGINS,
    ) -> None:
        self._settings = settings
        self._plugins = plugins
        self._codec = codec
        self._metrics = metrics
        self._max_bytes = max_bytes
        self._topics = topics or RewardTopics()
        self._state = machine.RewardState()
        self._waiting: deque[RawRecord] = deque()
        self._applied: dict[str, int] = {}
        self._sizes: dict[bytes, int] = {}
        self._nonzero: deque[bool] = deque(maxlen=NONZERO_WINDOW)
        self._nonzero_count = 0
        self._scarce = False
        self._failed: dict[str, int] = {}
        self._state_bytes = 0

    def restore(self, entries: Iterable[tuple[bytes, bytes]], meta: bytes | None) -> None:
        """See ``PartitionProcessor``."""
        known = dict(entries)
        self._sizes = {key: len(key) + len(value) for key, value in known.items()}
        self._state_bytes = sum(self._sizes.values())
        self._state = machine.restore(
            (state_codec.decode_key(key), state_codec.decode_entry(value))
            for key, value in known.items()
        )
        if meta:
            self._state.clock_ms = int.from_bytes(meta, "big")
        crowd.restart(self._state.crowd, self._state.clock_ms, self._settings)

    def feed(self, topic: str, records: Sequence[RawRecord]) -> None:
        """See ``PartitionProcessor``."""
        self._waiting.extend(records)

    def drain(self, limit: int) -> Outcome:
        """See ``PartitionProcessor``.

        Raises:
            SchemaError: The schema registry cannot be reached.
        """
        outputs: list[Output] = []
        count = min(limit, len(self._waiting))
        for _ in range(count):
            record = self._waiting.popleft()
            outputs.extend(self._apply(record))
            self._applied[record.topic] = record.offset
        return Outcome(
            applied=dict(self._applied),
            outputs=outputs,
            changes=self._changes(),
            meta=self._state.clock_ms.to_bytes(8, "big"),
            records=count,
            more=bool(self._waiting),
        )

    def buffered(self, topic: str) -> int:
        """See ``PartitionProcessor``."""
        return len(self._waiting)

    def status(self) -> ProcessorStatus:
        """See ``PartitionProcessor``. Users stand for sessions; nothing is ever open, and what
        arrives is applied at once, without ticks.
        """
        return ProcessorStatus(
            clock_ms=self._state.clock_ms or None,
            sessions=len(self._state.users),
            open_sessions=0,
            oldest_open=None,
            next_due_ms=None,
            state_entries=len(self._sizes),
            state_bytes=self._state_bytes,
        )

    def _apply(self, record: RawRecord) -> list[Output]:
        if is_tick(record):
            return []
        try:
            segment = decode(self._codec, record, TrajectorySegment, self._max_bytes)
        except RecordError as error:
            return [self._dead(deadletters.of_record(record, error, STAGE))]
        self._state, effects = machine.step(self._state, segment, self._settings, self._plugins)
        if not effects:
            self._metrics.add(names.DUPLICATES)
        for effect in effects:
            if isinstance(effect, machine.Observed):
                self._observe(effect)
        return [
            self._perform(effect, record)
            for effect in effects
            if not isinstance(effect, machine.Observed)
        ]

    def _observe(self, seen: machine.Observed) -> None:
        """Count ratings as they were given: no filter stands before monitoring."""
        trusted = self._settings.verified_sources
        for sign, source in seen.ratings:
            verified = not trusted or source in trusted
            self._metrics.add(
                names.RATINGS, policy=seen.policy, sign=SIGNS[sign], verified=str(verified).lower()
            )
        for name in seen.held:
            self._metrics.add(names.HELD_RATINGS, filter=name)
        for name, kind in seen.held_claims:
            self._metrics.add(names.HELD_CLAIMS, filter=name, kind=kind)
        if seen.alarm is not None:
            self._metrics.add(names.COHORT_ALARMS, policy=seen.policy)
            logger.warning(
                "policy %s: %s; the filters of single users are suspended for them",
                seen.policy,
                seen.alarm,
            )

    def _perform(
        self, effect: machine.EmitScored | machine.EmitReview, record: RawRecord
    ) -> Output:
        key = effect.key.encode()
        if isinstance(effect, machine.EmitReview):
            self._metrics.add(names.REVIEWS)
            topic = self._topics.reviews
            return Output(topic=topic, key=key, value=self._codec.encode(effect.review, topic))
        return self._scored(effect.scored, key, record)

    def _scored(self, scored: ScoredSegment, key: bytes, record: RawRecord) -> Output:
        topic = self._topics.scored
        try:
            value = self._codec.encode_around(scored, "segment", record.value or b"", topic)
            if len(key) + len(value) > self._max_bytes - deadletters.OVERHEAD_BYTES:
                raise OversizedError(
                    f"segment {scored.segment.segment_id} with its rewards has {len(value)} "
                    "bytes, more than fit a record; raise kafka.max_message_bytes and the "
                    "topic's max.message.bytes"
                )
        except RecordError as error:
            return self._dead(deadletters.of_record(record, error, STAGE))
        for name in filter(None, scored.attributes.get(PLUGIN_ERRORS_ATTRIBUTE, "").split(",")):
            self._count_failed(name, scored.segment.segment_id)
        for pair in calibration.pairs(scored):
            self._metrics.add(
                names.JUDGE_AGREEMENT, explicit=SIGNS[pair.explicit], judged=SIGNS[pair.judged]
            )
        self._metrics.add(names.SCORED, trainable=str(scored.trainable).lower())
        nonzero = any(reward.reward != 0 for reward in scored.rewards)
        if nonzero:
            self._metrics.add(names.NONZERO)
        self._watch(nonzero)
        return Output(topic=topic, key=key, value=value)

    def _count_failed(self, plugin: str, segment_id: str) -> None:
        self._metrics.add(names.PLUGIN_ERRORS, plugin=plugin)
        self._failed[plugin] = self._failed.get(plugin, 0) + 1
        if self._failed[plugin] % FAILURES_TOLD_EVERY == 1:
            logger.warning(
                "plugin %s failed at segment %s and counts nothing there, the %d. time since the "
                "start: `clawstream reward explain %s` says how",
                plugin,
                segment_id,
                self._failed[plugin],
                segment_id,
            )

    def _watch(self, nonzero: bool) -> None:
        """Raise an alarm when too few of the last segments have any reward, once each time."""
        if len(self._nonzero) == NONZERO_WINDOW:
            self._nonzero_count -= self._nonzero[0]
        self._nonzero.append(nonzero)
        self._nonzero_count += nonzero
        if len(self._nonzero) < NONZERO_WINDOW:
            return
        share = self._nonzero_count / NONZERO_WINDOW
        scarce = share < self._settings.nonzero_share_alarm
        if scarce and not self._scarce:
            self._metrics.add(names.NONZERO_ALARMS)
            logger.warning(
                "only %.1f%% of the last %d segments have a reward that is not 0 (alarm below "
                "%.1f%%): is feedback arriving? see untrainable_reason on trajectory.scored",
                100 * share,
                NONZERO_WINDOW,
                100 * self._settings.nonzero_share_alarm,
            )
        self._scarce = scarce

    def _dead(self, dead: DeadLetter) -> Output:
        self._metrics.add(names.DEAD_LETTERS, reason=dead.reason)
        return deadletters.to_output(dead, self._codec, self._max_bytes, self._topics.dead_letters)

    def _changes(self) -> dict[bytes, bytes | None]:
        changed, forgotten = machine.take_changes(self._state)
        changes: dict[bytes, bytes | None] = {
            state_codec.encode_key(who): state_codec.encode_entry(entry)
            for who, entry in changed.items()
        }
        changes.update((state_codec.encode_key(who), None) for who in forgotten)
        for key, value in changes.items():
            self._state_bytes -= self._sizes.pop(key, 0)
            if value is not None:
                self._sizes[key] = len(key) + len(value)
                self._state_bytes += self._sizes[key]
        return changes


__all__ = ["RewardProcessor", "RewardTopics"]
