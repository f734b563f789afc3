"""``clawstream bench`` against a broker: small runs, for what they do and not for their figures."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from processors.bench import align, align_state, closing_delay, replay
from processors.bench.align import AlignPlan
from processors.bench.align_state import StatePlan
from processors.bench.closing_delay import DelayPlan
from processors.bench.plain import expected_outputs
from processors.bench.process import BenchError
from processors.bench.profile import by_stage, read_stacks
from processors.bench.replay import ReplayPlan
from streams.settings import KafkaSettings, Settings

pytestmark = pytest.mark.broker


def settings(bootstrap: str, folder: Path) -> Settings:
    kafka = KafkaSettings(bootstrap_servers=bootstrap, session_timeout_ms=6_000)
    return Settings(data_dir=folder, kafka=kafka)


def test_ours_and_a_rival_write_the_same_segments(kafka_bootstrap: str, tmp_path: Path) -> None:
    steps: list[str] = []
    plan = AlignPlan(subjects=("ours", "faust_take"), records=400, repetitions=1, partitions=2)
    # Segments are compared with the expected ones, so an end without an error says they are equal.
    report, profiles = align.run(settings(kafka_bootstrap, tmp_path), plan, steps.append)
    assert profiles is None
    assert {name: sorted(of) for name, of in report.subjects.items()} == {
        "ours": ["cpu_s", "records_per_s"],
        "faust_take": ["cpu_s", "records_per_s"],
    }
    assert all(value > 0 for of in report.subjects.values() for value in of["records_per_s"])
    assert list(report.ratios) == ["ours/faust_take"]
    assert any("404 records" in step for step in steps)
    assert not list((tmp_path / "bench").iterdir())


def test_a_segment_that_differs_is_an_error(
    kafka_bootstrap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(*arguments: Any) -> Counter[bytes]:
        found = expected_outputs(*arguments)
        found.subtract([next(iter(found))])
        found[b"another"] = 1
        return +found

    monkeypatch.setattr(align, "expected_outputs", other)
    plan = AlignPlan(subjects=("faust_take",), records=200, repetitions=1, partitions=1)
    with pytest.raises(BenchError, match="1 are missing, 1 are not expected"):
        align.run(settings(kafka_bootstrap, tmp_path), plan, lambda _: None)


def test_delays_are_those_of_the_segments_due_in_time(kafka_bootstrap: str, tmp_path: Path) -> None:
    # A busy machine sends late; here that is no matter.
    plan = DelayPlan(
        turns_per_s=40,
        seconds=4,
        warm_up_s=6,
        settle_ms=1_000,
        gap_ms=2_000,
        partitions=1,
        tail_s=2,
        latest_ms=120_000,
    )
    report = closing_delay.run(settings(kafka_bootstrap, tmp_path), plan, lambda _: None)
    found = report.subjects["ours"]
    assert found["segments"][0] > 5
    assert (
        0 < found["visible_ms_p50"][0] <= found["visible_ms_p99"][0] <= found["visible_ms_max"][0]
    )
    # The clocks of broker and reader are one.
    assert found["appended_ms_p50"][0] <= found["visible_ms_p50"][0]
    assert found["state_bytes_per_input_byte"][0] > 0
    assert [goal.name for goal in report.goals] == ["ours visible_ms_p99"]


def test_delays_beside_a_replay_at_a_rate(kafka_bootstrap: str, tmp_path: Path) -> None:
    plan = DelayPlan(
        turns_per_s=40,
        seconds=4,
        warm_up_s=6,
        settle_ms=1_000,
        gap_ms=2_000,
        partitions=1,
        tail_s=2,
        latest_ms=120_000,
        beside_replay_per_s=100,
        replayed_records=500,
    )
    report = closing_delay.run(settings(kafka_bootstrap, tmp_path), plan, lambda _: None)
    assert list(report.subjects) == ["alone", "beside_replay"]
    beside = report.subjects["beside_replay"]
    # Reading is held to the rate; what waited for the other topic is applied beside it.
    assert 10 < beside["replay_records_per_s"][0] <= 150
    assert "replay_records_per_s" not in report.subjects["alone"]
    assert all(found["segments"][0] > 5 for found in report.subjects.values())
    assert report.ratios["beside_replay/alone"].median > 0
    assert len(report.goals) == 2


def test_a_replay_of_topics_archive_and_rewards_is_measured(
    kafka_bootstrap: str, tmp_path: Path
) -> None:
    plan = ReplayPlan(turns=500, repetitions=1, partitions=2, profile=True)
    report, profiles = replay.run(settings(kafka_bootstrap, tmp_path), plan, lambda _: None)
    assert tuple(report.subjects) == replay.SUBJECTS
    topics, archive = report.subjects["topics"], report.subjects["archive"]
    assert topics["outputs"] == archive["outputs"]
    # Each segment and each revision is scored once.
    assert report.subjects["reward"]["outputs"] == topics["outputs"]
    for found in report.subjects.values():
        assert found["cpu_s"][0] > 0
        minutes = 10_000_000 / found["turns_per_s"][0] / 60
        assert found["minutes_for_10m_turns"][0] == pytest.approx(minutes)
    assert [goal.at_most for goal in report.goals] == [True, True]
    assert tuple(profiles) == replay.SUBJECTS
    shares = {name: by_stage(read_stacks(path)) for name, path in profiles.items()}
    aligner = {"machine", "decode", "build segments", "encode segments", "merge", "encode state"}
    assert aligner & {share.stage for share in shares["topics"]}
    assert "score" in {share.stage for share in shares["reward"]}


def test_the_state_is_measured_and_a_killed_worker_goes_on(
    kafka_bootstrap: str, tmp_path: Path
) -> None:
    plan = StatePlan(sessions=20, closed=20, partitions=1, compact=False, quiet_s=0.1)
    report = align_state.run(settings(kafka_bootstrap, tmp_path), plan, lambda _: None)
    found = report.subjects["ours"]
    assert found["rss_empty_bytes"][0] > 0
    # A head and a segment for each closed session, a head for each open one.
    assert found["changelog_entries"][0] >= 40
    assert found["state_bytes_per_input_byte"][0] > 0
    assert found["segment_bytes_per_input_byte"][0] > 0
    assert found["restart_s"][0] > 0
    assert found["restart_named_s"][0] > 0
