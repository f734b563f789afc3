from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from learner.bench.child import Children, Starter
from learner.bench.chosen import chosen
from streams.errors import BenchError, SettingsError

MODULE = """
import json, os, sys, time
job = json.load(open(sys.argv[1]))
print("not a result")
print(json.dumps({"got": job["what"], "threads": os.environ["OMP_NUM_THREADS"],
                  "extra": os.environ.get("EXTRA")}), flush=True)
if job["what"] == "fail":
    sys.exit("it went wrong")
if job["what"] == "wait":
    time.sleep(600)
"""


@dataclass(frozen=True)
class Job:
    what: str


@pytest.fixture
def starter(tmp_path: Path) -> Starter:
    (tmp_path / "subject_of_test.py").write_text(MODULE)
    return Starter(sys.executable, {"PYTHONPATH": str(tmp_path), "EXTRA": "yes"})


def test_results_are_handed_out_and_the_environment_is_set(
    tmp_path: Path, starter: Starter
) -> None:
    found: list[dict[str, object]] = []
    children = Children(tmp_path, threads=3)
    children.run(starter, "subject_of_test", "one", Job("well"), found.append)
    assert found == [{"got": "well", "threads": "3", "extra": "yes"}]


def test_a_failure_shows_the_log(tmp_path: Path, starter: Starter) -> None:
    children = Children(tmp_path, threads=1)
    with pytest.raises(BenchError, match=r"(?s)one ended with status 1.*it went wrong"):
        children.run(starter, "subject_of_test", "one", Job("fail"), lambda _: None)


def test_what_runs_can_be_ended_and_nothing_new_starts(tmp_path: Path, starter: Starter) -> None:
    children = Children(tmp_path, threads=1)
    running = threading.Event()
    errors: list[Exception] = []

    def run() -> None:
        try:
            children.run(starter, "subject_of_test", "a", Job("wait"), lambda _: running.set())
        except BenchError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert running.wait(60)
    children.end()
    thread.join(60)
    assert not thread.is_alive()
    assert "status -15" in str(errors[0])
    with pytest.raises(BenchError, match="ended"):
        children.run(starter, "subject_of_test", "b", Job("well"), lambda _: None)


def test_subjects_are_chosen_in_their_own_order() -> None:
    assert chosen("c, a", ("a", "b", "c"), ("a",)) == ("a", "c")
    assert chosen("all", ("a", "b", "c"), ("a", "b")) == ("a", "b")


@pytest.mark.parametrize("text", ["a,d", "", ","])
def test_unknown_subjects_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="known are a, b"):
        chosen(text, ("a", "b"), ("a",))
