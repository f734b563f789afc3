"""What a worker counts and warns of: no rewards, a cohort; and windows of another length."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import pytest

from processors.reward.agent import NONZERO_WINDOW, RewardProcessor, RewardTopics
from processors.runtime.records import Record
from streams import metrics as names
from streams.contracts import FeedbackKind, TrajectorySegment
from streams.metrics import ProcessorMetrics
from streams.serde import build_codec
from streams.settings import RewardSettings
from streams.topics import SEGMENTS
from tests.unit.processors.reward.builders import HOUR_MS, feedback, reply, segment, thumb

CODEC = build_codec()
NOTHING: Mapping[bytes, bytes] = {}
START_MS = 1_767_225_600_000


class Worker:
    """A reward processor with its counters."""

    def __init__(
        self,
        settings: RewardSettings | None = None,
        written: Mapping[bytes, bytes] = NOTHING,
        meta: bytes | None = None,
    ) -> None:
        self.metrics = ProcessorMetrics("reward")
        self.processor = RewardProcessor(
            settings or RewardSettings(), CODEC, self.metrics, 1_000_000, RewardTopics()
        )
        self.processor.restore(written.items(), meta)
        self._offset = 0

    def score(self, segments: Sequence[TrajectorySegment]) -> tuple[dict[bytes, bytes], bytes]:
        """Score them; returns what a successor restores."""
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
        outcome = self.processor.drain(len(segments))
        return {k: v for k, v in outcome.changes.items() if v is not None}, outcome.meta


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


def test_monitoring_counts_what_else_is_held_by_kind() -> None:
    worker = Worker()
    worker.score(
        [
            segment([reply(f"a{n}", feedback(f"f{n}", FeedbackKind.COPY))], segment_id=f"s{n}")
            for n in range(12)
        ]
    )
    assert worker.metrics.value(names.HELD_CLAIMS, filter="burst", kind="copy") == 3
    assert worker.metrics.registry.get_sample_value("clawstream_ratings_total") is None


@pytest.mark.parametrize("hours", [1, 2, 24])
def test_windows_may_become_longer_on_a_running_system(hours: int) -> None:
    def days(first: int, count: int) -> list[TrajectorySegment]:
        """Ten ratings an hour by ten users."""
        return [
            segment(
                [reply("a", thumb(f"f{hour}-{user}", 1), reply=f"An answer of hour {hour}.")],
                segment_id=f"{hour}-{user}",
                user_id=f"u{user}",
                closed_at=START_MS + hour * HOUR_MS,
            )
            for hour in range(24 * first, 24 * (first + count))
            for user in range(10)
        ]

    before = Worker(RewardSettings(crowd_window_ms=HOUR_MS // 2))
    written, meta = before.score(days(0, 1))
    settings = RewardSettings(crowd_window_ms=hours * HOUR_MS, burst_window_ms=1)
    after = Worker(settings, written, meta)
    after.score(days(1, 2))
    held = after.metrics.registry.get_sample_value(
        "clawstream_held_ratings_total", {"processor": "reward", "filter": "flood"}
    )
    assert held is None
