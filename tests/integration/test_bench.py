"""``clawstream bench`` against a broker: small runs, for what they do and not for their figures."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from processors.bench import align
from processors.bench.align import AlignPlan
from processors.bench.plain import expected_outputs
from processors.bench.process import BenchError
from streams.settings import KafkaSettings, Settings

pytestmark = pytest.mark.broker


def settings(bootstrap: str, folder: Path) -> Settings:
    return Settings(data_dir=folder, kafka=KafkaSettings(bootstrap_servers=bootstrap))


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
