"""The stages that can be replayed: their processor, their topics, what their outputs are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from processors.feedback_align import app as align
from processors.feedback_align.agent import AlignTopics
from processors.replay.compare import Head
from processors.reward import app as reward
from processors.reward.agent import RewardTopics
from processors.runtime.records import LogReader, PartitionProcessor
from processors.runtime.spec import WorkerSpec
from processors.runtime.topics import Cluster
from streams.contracts import Record, ScoredSegment, TrajectorySegment
from streams.errors import ReplayError
from streams.metrics import ProcessorMetrics
from streams.serde import Codec
from streams.settings import Settings

StageName = Literal["align", "reward"]
STAGES: tuple[StageName, ...] = ("align", "reward")


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage, as a replay needs it.

    Attributes:
        name: The stage.
        inputs: The topics that it reads.
        output: The topic whose records are compared.
        others: The other topics it puts records out to, none of which is compared.
        needs_before_ms: So much of the log before a time must be read for its outputs from
            that time on to be those of a worker that has always run.
        make: Makes the processor of a partition.
        describe: Which output it is; raises ``RecordError`` if it is none.
    """

    name: StageName
    inputs: tuple[str, ...]
    output: str
    others: tuple[str, ...]
    needs_before_ms: int
    make: Callable[[int, Cluster], PartitionProcessor]
    describe: Callable[[bytes], Head]


def build_stage(
    name: str,
    settings: Settings,
    codec: Codec,
    *,
    align_topics: AlignTopics | None = None,
    reward_topics: RewardTopics | None = None,
    log: LogReader | None = None,
) -> Stage:
    """A stage over the settings' rules.

    Args:
        name: Which.
        settings: All settings.
        codec: Reads its outputs.
        align_topics: The aligner's, if others than the inventory's.
        reward_topics: The reward stage's, likewise.
        log: Where content is read back from; Kafka if None.

    Raises:
        ReplayError: There is none of this name that can be replayed.
        SettingsError: A plugin that the settings name is not installed.
    """
    if name == "align":
        names = align_topics or AlignTopics()
        spec = align.build_spec(settings, ProcessorMetrics("replay"), topics=names, log=log)
        rules = settings.align
        before_ms = spec.read_back_ms + rules.max_open_ms
        return _stage("align", spec, names.segments, before_ms, segment_reader(codec))
    if name == "reward":
        own = reward_topics or RewardTopics()
        spec = reward.build_spec(settings, ProcessorMetrics("replay"), topics=own)
        return _stage("reward", spec, own.scored, settings.reward.history_ms, scored_reader(codec))
    raise ReplayError(f"{name!r} cannot be replayed: choose {' or '.join(STAGES)}")


def _stage(
    name: StageName,
    spec: WorkerSpec,
    output: str,
    before_ms: int,
    describe: Callable[[bytes], Head],
) -> Stage:
    others = tuple(topic for topic in spec.outputs if topic != output)
    return Stage(name, spec.inputs, output, others, before_ms, spec.make_processor, describe)


def segment_reader(codec: Codec) -> Callable[[bytes], Head]:
    """Describes a record of ``trajectory.segments``. Only its beginning is read."""
    return partial(_head, codec, TrajectorySegment, _HEAD)


def scored_reader(codec: Codec) -> Callable[[bytes], Head]:
    """Describes a record of ``trajectory.scored``. Only its beginning is read."""
    return partial(_head, codec, ScoredSegment, tuple(f"segment.{name}" for name in _HEAD))


_HEAD = ("segment_id", "revision", "policy", "session_id", "ordinal", "closed_at")


def _head(codec: Codec, kind: type[Record], paths: tuple[str, ...], value: bytes) -> Head:
    picked = codec.pick(value, kind, paths)
    segment_id, revision, policy, session_id, ordinal, closed_at = picked
    return Head(segment_id, revision, f"{policy}/{session_id}", ordinal, closed_at)


RECORD_TYPES: Mapping[StageName, type[TrajectorySegment] | type[ScoredSegment]] = {
    "align": TrajectorySegment,
    "reward": ScoredSegment,
}

__all__ = ["RECORD_TYPES", "STAGES", "Stage", "StageName", "build_stage"]
