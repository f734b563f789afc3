from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from processors.bench.subjects import aligners
from processors.bench.subjects.job import (
    FIRST,
    FirstRecord,
    Job,
    job_of_command_line,
    read_marks,
    write_job,
)
from processors.runtime import apart


def test_a_job_is_what_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(
        name="name",
        config="config.yaml",
        bootstrap_servers="host:1",
        turns="t",
        feedback="f",
        segments="s",
        dead_letters="d",
        changelog="c",
        partitions=4,
        records=10,
        folder=str(tmp_path),
    )
    write_job(job, tmp_path / "job.json")
    monkeypatch.setattr(sys, "argv", ["subject", str(tmp_path / "job.json")])
    assert job_of_command_line() == job


def test_the_first_record_is_marked_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = FirstRecord()
    first()
    first()
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == 1
    (tmp_path / "marks").write_text("a warning\n" + json.dumps({"event": "x"}) + "\n" + printed)
    marks = read_marks(tmp_path / "marks")
    assert list(marks) == [FIRST]
    assert marks[FIRST].at_ns > 0
    assert marks[FIRST].cpu_s > 0


def test_rivals_collect_garbage_as_our_worker_does() -> None:
    assert aligners.GC_THRESHOLDS == apart.GC_THRESHOLDS
