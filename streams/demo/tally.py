"""Counts what is in the topics: the demo's progress and its summary rest on nothing else."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from streams.contracts import (
    DeadLetter,
    DialogueTurn,
    FeedbackEvent,
    ModelVersion,
    Record,
    Role,
    ScoredSegment,
    SourceRef,
    TrajectorySegment,
    TurnType,
    VersionStatus,
)
from streams.topics import DEAD_LETTERS, FEEDBACK, SCORED, SEGMENTS, TURNS, VERSIONS

TALLIED: Mapping[str, type[Record]] = {
    TURNS: DialogueTurn,
    FEEDBACK: FeedbackEvent,
    SEGMENTS: TrajectorySegment,
    SCORED: ScoredSegment,
    VERSIONS: ModelVersion,
    DEAD_LETTERS: DeadLetter,
}
"""The topics that are counted and what they hold."""

BASE_VERSION = 0


@dataclass(slots=True)
class Tally:
    """Everything read so far; feed it each record once, in the order of its topic partition."""

    turns: int = 0
    feedback: int = 0
    unreadable: int = 0
    revisions: int = 0
    replies_by_version: Counter[int] = field(default_factory=Counter)
    dead_letters: Counter[str] = field(default_factory=Counter)
    versions: dict[int, ModelVersion] = field(default_factory=dict)
    _segments: dict[str, TrajectorySegment] = field(default_factory=dict)
    _scored: dict[str, ScoredSegment] = field(default_factory=dict)
    _events: dict[tuple[str, str, str], list[SourceRef]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _given_up: set[SourceRef] = field(default_factory=set)
    _emitted: set[tuple[str, int]] = field(default_factory=set)

    def add(self, ref: SourceRef, record: Record) -> None:
        """Count one record."""
        match record:
            case DialogueTurn():
                self._turn(ref, record)
            case FeedbackEvent():
                self.feedback += 1
                self._event(ref, record)
            case TrajectorySegment():
                self._segment(record)
            case ScoredSegment():
                _keep_newest(self._scored, record.segment.segment_id, record)
            case ModelVersion():
                self.versions[record.version] = record
            case DeadLetter():
                self.dead_letters[str(record.reason)] += 1
                self._given_up.add(
                    SourceRef(topic=record.topic, partition=record.partition, offset=record.offset)
                )
            case _:
                pass

    def add_unreadable(self) -> None:
        """Count an input record that cannot be decoded."""
        self.unreadable += 1

    @property
    def live_versions(self) -> list[int]:
        """Versions that went live, in order."""
        live = (v.version for v in self.versions.values() if v.status is VersionStatus.LIVE)
        return sorted(live)

    @property
    def segments(self) -> int:
        """Segments closed, each counted once."""
        return len(self._segments)

    @property
    def scored(self) -> int:
        """Segments scored, each counted once."""
        return len(self._scored)

    def segments_by_closing(self) -> dict[str, int]:
        """Segments by what closed them."""
        return dict(sorted(Counter(str(s.closed_by) for s in self._segments.values()).items()))

    def unaccounted(self) -> list[SourceRef]:
        """Accepted events that are in no segment and no dead letter, neither in another copy.

        These are open in the aligner, or lost.
        """
        accounted = self._given_up.union(*(s.lineage for s in self._segments.values()))
        return [
            refs[0] for refs in self._events.values() if not any(ref in accounted for ref in refs)
        ]

    def lacks(self, event_ids: Iterable[str]) -> bool:
        """Whether one of these events was not read from its topic yet."""
        read = {event_id for _, _, event_id in self._events}
        return not read.issuperset(event_ids)

    def unscored(self) -> list[str]:
        """Segments whose newest revision has no reward yet."""
        return [
            id_
            for id_, segment in self._segments.items()
            if (found := self._scored.get(id_)) is None or found.segment.revision < segment.revision
        ]

    def nonzero_share(self) -> float:
        """Share of scored segments with at least one reward that is not zero."""
        if not self._scored:
            return 0.0
        return fmean(any(r.reward for r in s.rewards) for s in self._scored.values())

    def rewards_by_version(self) -> dict[int, list[float]]:
        """The reward of each scored step, by the version that wrote it."""
        rewards: dict[int, list[float]] = defaultdict(list)
        for scored in self._scored.values():
            for step, reward in zip(scored.segment.steps, scored.rewards, strict=True):
                rewards[step.policy_version or BASE_VERSION].append(reward.reward)
        return dict(sorted(rewards.items()))

    def liked_by_version(self) -> dict[int, list[bool]]:
        """For each step with a thumb or rating: whether it was positive, by version."""
        liked: dict[int, list[bool]] = defaultdict(list)
        for scored in self._scored.values():
            for step in scored.segment.steps:
                values = [f.value for f in step.feedback if f.value is not None]
                if values:
                    liked[step.policy_version or BASE_VERSION].append(values[-1] > 0)
        return dict(sorted(liked.items()))

    def _turn(self, ref: SourceRef, turn: DialogueTurn) -> None:
        self.turns += 1
        self._event(ref, turn)
        if turn.role is Role.ASSISTANT and turn.turn_type is TurnType.MAIN:
            self.replies_by_version[turn.policy_version or BASE_VERSION] += 1

    def _event(self, ref: SourceRef, event: DialogueTurn | FeedbackEvent) -> None:
        self._events[event.policy, event.session_id, event.event_id].append(ref)

    def _segment(self, segment: TrajectorySegment) -> None:
        # A worker that was killed may write a segment again; it is the same one.
        if (segment.segment_id, segment.revision) in self._emitted:
            return
        self._emitted.add((segment.segment_id, segment.revision))
        self.revisions += segment.revision > 0
        held = self._segments.get(segment.segment_id)
        if held is None or held.revision < segment.revision:
            self._segments[segment.segment_id] = segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The demo's figures (DESIGN §8, with a few more).

    ``held_back`` comes from the aligner's own counter, all else from the topics.
    """

    turns: int
    feedback: int
    segments: dict[str, int]
    held_back: int
    revisions: int
    dead_letters: dict[str, int]
    scored: int
    nonzero_share: float
    versions: list[dict[str, Any]]
    replies_by_version: dict[str, int]
    mean_reward_by_version: dict[str, float]
    liked_share_by_version: dict[str, float]
    open_events: int
    refused: int
    seconds: float


def summarise(tally: Tally, *, held_back: int, refused: int, seconds: float) -> Summary:
    """Draw the line under ``tally``."""
    return Summary(
        turns=tally.turns,
        feedback=tally.feedback,
        segments=tally.segments_by_closing(),
        held_back=held_back,
        revisions=tally.revisions,
        dead_letters=dict(sorted(tally.dead_letters.items())),
        scored=tally.scored,
        nonzero_share=round(tally.nonzero_share(), 4),
        versions=[_version(v) for v in sorted(tally.versions.values(), key=lambda v: v.version)],
        replies_by_version={str(v): n for v, n in sorted(tally.replies_by_version.items())},
        mean_reward_by_version=_means(tally.rewards_by_version()),
        liked_share_by_version=_means(tally.liked_by_version()),
        open_events=len(tally.unaccounted()),
        refused=refused,
        seconds=round(seconds, 1),
    )


def _version(version: ModelVersion) -> dict[str, Any]:
    return {
        "version": version.version,
        "status": str(version.status),
        "parent": version.parent,
        "segments": version.segment_count,
        "metrics": version.metrics,
    }


def _means(values: Mapping[int, Iterable[float]]) -> dict[str, float]:
    return {str(version): round(fmean(given), 4) for version, given in values.items()}


def _keep_newest(scored: dict[str, ScoredSegment], segment_id: str, record: ScoredSegment) -> None:
    held = scored.get(segment_id)
    if held is None or held.segment.revision < record.segment.revision:
        scored[segment_id] = record
