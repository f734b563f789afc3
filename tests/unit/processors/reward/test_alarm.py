"""The alarm about segments without any reward, and the one about a cohort."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from processors.reward.agent import NONZERO_WINDOW, RewardProcessor, RewardTopics
from processors.runtime.records import Record
from streams import metrics as names
from streams.contracts import TrajectorySegment
from streams.metrics import ProcessorMetrics
from streams.serde import build_codec
from streams.settings import RewardSettings
from streams.topics import SEGMENTS
from tests.unit.processors.reward.builders import reply, segment, thumb

CODEC = build_codec()


class Worker:
    """A reward processor with its counters."""

    def __init__(self, settings: RewardSettings | None = None) -> None:
        self.metrics = ProcessorMetrics("reward")
        self.processor = RewardProcessor(
            settings or RewardSettings(), CODEC, self.metrics, 1_000_000, RewardTopics()
        )
        self.processor.restore((), None)
        self._offset = 0

    def score(self, segments: Sequence[TrajectorySegment]) -> None:
        for item in segments:
            record = Record(
                topic=SEGMENTS,
                partition=0,
                offset=self._offset,
                timestamp=1,
                key=b"u",
                value=CODEC.encode(item),
            )
            self._offset += 1
            self.processor.feed(SEGMENTS, [record])
        self.processor.drain(len(segments))


def segments(rewarded: int, silent: int, name: str) -> list[TrajectorySegment]:
    return [
        segment(
            [reply("a", *([thumb(f"f{name}{n}", 1)] if n < rewarded else []))],
            segment_id=f"{name}{n}",
            user_id=f"{name}{n}",
        )
        for n in range(rewarded + silent)
    ]


def test_too_few_rewards_raise_one_alarm_until_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker()
    with caplog.at_level(logging.WARNING):
        worker.score(segments(49, NONZERO_WINDOW - 50, "a"))
        assert worker.metrics.value(names.NONZERO_ALARMS) == 0
        worker.score(segments(0, 2, "b"))
        assert worker.metrics.value(names.NONZERO_ALARMS) == 1
        worker.score(segments(200, 0, "c"))
        worker.score(segments(0, NONZERO_WINDOW, "d"))
    assert worker.metrics.value(names.NONZERO_ALARMS) == 2
    assert "only 4.9% of the last 1000 segments" in caplog.text


def test_enough_rewards_raise_none() -> None:
    worker = Worker(RewardSettings(nonzero_share_alarm=0.0))
    worker.score(segments(0, NONZERO_WINDOW, "a"))
    assert worker.metrics.value(names.NONZERO_ALARMS) == 0


def test_monitoring_counts_ratings_before_filters_and_the_cohort_raises_an_alarm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker(RewardSettings(verified_sources=("web",)))
    angry = [
        segment(
            [reply(f"a{n}", thumb(f"f{user}-{n}", -1, event_time=n, source=source))],
            segment_id=f"{user}-{n}",
            user_id=f"user-{user}",
        )
        for user in range(6)
        for n, source in enumerate(("web", "web", "import"))
    ]
    with caplog.at_level(logging.WARNING):
        worker.score(angry)
    shown = {
        verified: worker.metrics.value(
            names.RATINGS, policy="default", sign="negative", verified=verified
        )
        for verified in ("true", "false")
    }
    assert shown == {"true": 12, "false": 6}
    assert worker.metrics.value(names.HELD_RATINGS, filter="row") == 4
    assert worker.metrics.value(names.COHORT_ALARMS, policy="default") == 1
    assert "5 of 5 raters turned negative together" in caplog.text
