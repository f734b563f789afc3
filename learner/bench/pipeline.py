"""The pipeline between a conversation and the learner, without a broker.

What would travel through Kafka is encoded, merged in the log's order, aligned, scored and
decoded by the very code that the workers run; time is the log's own. The bench stands on both
sides of the topics, which is why this module alone in ``learner`` imports processors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from processors.bench.plain import PlainAligner
from processors.reward import machine as reward
from streams.contracts import DialogueTurn, FeedbackEvent, ScoredSegment, TrajectorySegment
from streams.serde import Codec
from streams.settings import AlignSettings, RewardSettings
from streams.topics import FEEDBACK, TURNS

_PARTITION = 0


class DryPipeline:
    """One partition of aligner and reward processor, with their state.

    Args:
        codec: Reads and writes records.
        align: The aligner's rules.
        rewards: The weights of the reward.
    """

    def __init__(self, codec: Codec, align: AlignSettings, rewards: RewardSettings) -> None:
        self._codec = codec
        self._rewards = rewards
        self._aligner = PlainAligner(_PARTITION, TURNS, FEEDBACK, codec, align)
        self._scorer = reward.RewardState()
        self._offsets: Counter[str] = Counter()

    def take(
        self, records: Sequence[DialogueTurn | FeedbackEvent], until_ms: int
    ) -> list[ScoredSegment]:
        """Let records arrive when they happened, and the clock go on.

        Args:
            records: None earlier than the ``until_ms`` of the call before, in any order.
            until_ms: What is due by then is done.

        Returns:
            The segments that closed and the revisions that came of it, scored, in order.

        Raises:
            StateError: The aligner rejects a record.
        """
        for record in sorted(records, key=lambda record: record.event_time):
            topic = TURNS if isinstance(record, DialogueTurn) else FEEDBACK
            self._offer(topic, record.event_time, self._codec.encode(record))
        for topic in (TURNS, FEEDBACK):
            self._offer(topic, until_ms, None)
        closed = self._aligner.drain(advance=True)
        self._aligner.forget_changes()
        return [scored for _, value in closed for scored in self._score(value)]

    def _offer(self, topic: str, at_ms: int, value: bytes | None) -> None:
        self._aligner.offer(topic, self._offsets[topic], at_ms, value)
        self._offsets[topic] += 1

    def _score(self, value: bytes) -> list[ScoredSegment]:
        segment = self._codec.decode(value, TrajectorySegment)
        self._scorer, effects = reward.step(self._scorer, segment, self._rewards)
        return [
            self._codec.decode(self._codec.encode(effect.scored), ScoredSegment)
            for effect in effects
            if isinstance(effect, reward.EmitScored)
        ]


__all__ = ["DryPipeline"]
