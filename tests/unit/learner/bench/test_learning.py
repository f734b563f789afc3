from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from learner.bench.figures import metrics_of
from learner.bench.learning import LearningPlan, run
from learner.bench.plot import draw
from learner.model import TINY
from streams.cli import main
from streams.errors import SettingsError
from streams.settings import Settings
from tests.unit.learner.bench.test_figures import rounds

PLAN = LearningPlan(
    subjects=("clean", "frozen"), seeds=1, updates=2, replies=4, base=TINY, first_layer=2
)


def test_every_subject_is_played_in_a_process_of_its_own(tmp_path: Path) -> None:
    told: list[str] = []
    report = run(Settings(data_dir=tmp_path), PLAN, told.append)
    assert list(report.subjects) == ["clean", "frozen"]
    for metrics in report.subjects.values():
        assert len(metrics["reward"]) == 2
        assert metrics["reward_seed_1"] == metrics["reward"]
    # Before the first update all subjects are the same policy, asked the same.
    assert report.subjects["clean"]["reward"][0] == report.subjects["frozen"]["reward"][0]
    assert [goal.name for goal in report.goals] == ["rise of clean", "rise of frozen"]
    assert sum("clean seed 1 update" in line for line in told) == 2


def test_sparse_feedback_gets_more_updates(tmp_path: Path) -> None:
    plan = replace(PLAN, subjects=("sparse",))
    report = run(Settings(data_dir=tmp_path), plan, lambda _: None)
    assert len(report.subjects["sparse"]["reward"]) == 3 * PLAN.updates


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    two = metrics_of({1: rounds(-0.5, 0.1), 2: rounds(-0.3, 0.4)})
    draw({"clean": two, "frozen": two, "trl_ppo": two}, "title", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SettingsError, match="another --plot"):
        draw({"clean": two}, "title", tmp_path / "absent" / "plot.png")


def test_wrong_arguments_are_found_out_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "learning", "--subjects", "clean,dirty"]) == 2
    assert "unknown dirty; known are clean, flipped20" in capsys.readouterr().err
    assert main(["bench", "learning", "--plot", str(tmp_path / "absent" / "p.png")]) == 2
    assert "another --plot" in capsys.readouterr().err
    assert main(["bench", "learning", "--mode", "opd", "--subjects", "clean,shuffled"]) == 2
    assert "shuffled is no control in mode opd" in capsys.readouterr().err
