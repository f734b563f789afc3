from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate import tracking
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from learner.loop import hash_of, make_trackers
from learner.ppo.diagnostics import METRICS, TRL, trl_metrics
from learner.trackers import AccelerateTrackers, Several
from streams.contracts import ModelVersion
from streams.errors import SettingsError
from streams.settings import LearnerSettings, Settings, load_settings
from tests.unit.learner.fakes import FakeTrainer, scored
from tests.unit.learner.test_loop import Bench
from tests.unit.learner.test_warming import examples
from tests.unit.streams.registry.builders import version


def settings(tmp_path: Path, **learner: Any) -> Settings:
    return Settings(
        data_dir=tmp_path, learner=LearnerSettings(trackers=("tensorboard",), **learner)
    )


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The points of each curve that TensorBoard shows."""
    shown = EventAccumulator(str(folder))
    shown.Reload()
    return {
        name: [(point.step, round(point.value, 6)) for point in shown.Scalars(name)]
        for name in shown.Tags()["scalars"]
    }


def test_versions_are_points_of_curves_that_go_on_after_a_restart(tmp_path: Path) -> None:
    for number in (1, 2):
        trackers = make_trackers(settings(tmp_path, policy="npc"))
        metrics = {"rewards/mean": 0.25 * number, "rewards/kl_penalty": 0.5}
        trackers.log(version(number, metrics=metrics))
        trackers.close()
    assert curves(tmp_path / "trackers" / "npc") == {
        "rewards/mean": [(1, 0.25), (2, 0.5)],
        "reward": [(1, 0.25), (2, 0.5)],
        "objective/scores": [(1, 0.25), (2, 0.5)],
        "rewards/kl_penalty": [(1, 0.5), (2, 0.5)],
        "objective/non_score_reward": [(1, -0.5), (2, -0.5)],
    }


def test_the_settings_are_shown_beside_the_curves(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    make_trackers(settings(tmp_path, tracker_dir=elsewhere, kl_coef=0.125)).close()
    shown = EventAccumulator(str(elsewhere / "default"))
    shown.Reload()
    (text,) = shown.Tensors("settings/text_summary")
    assert b"kl_coef: 0.125" in text.tensor_proto.string_val[0]


class Seen(Several):
    """Remembers what was logged."""

    def __init__(self) -> None:
        self.versions: list[tuple[int, str]] = []

    def log(self, version: ModelVersion) -> None:
        self.versions.append((version.version, version.status.value))


def test_a_warm_start_is_a_point_once(tmp_path: Path) -> None:
    bench, seen = Bench(tmp_path), Seen()
    bench.trackers = seen
    file = examples(tmp_path / "labels.jsonl")
    for _ in range(2):
        bench.learner(FakeTrainer(), file, only=True)()
    bench.registry.close()
    assert seen.versions == [(1, "live")]


def test_the_learner_logs_each_version_live_or_not(tmp_path: Path) -> None:
    bench, seen = Bench(tmp_path), Seen()
    bench.trackers = seen
    bench.arrive(*(scored(f"s{n}") for n in range(4)))
    trainer = FakeTrainer()
    bench.run(trainer)
    bench.arrive(*(scored(f"t{n}") for n in range(4)))
    trainer.kl = 9.0
    bench.run(trainer)
    bench.registry.close()
    assert seen.versions == [(1, "live"), (2, "rejected")]


def test_a_tool_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "_available_trackers", [])
    with pytest.raises(SettingsError, match=r"names tensorboard, which is not installed.*none"):
        make_trackers(settings(tmp_path))


def test_a_tool_that_cannot_begin_is_named(tmp_path: Path) -> None:
    (tmp_path / "trackers").write_text("a file", encoding="utf-8")
    with pytest.raises(SettingsError, match="tensorboard cannot be used"):
        make_trackers(settings(tmp_path))


def test_a_tool_that_fails_costs_its_curves_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = make_trackers(settings(tmp_path))
    (curves,) = trackers.trackers
    assert isinstance(curves, AccelerateTrackers)
    curves._tools["tensorboard"].writer = None
    trackers.log(version(1))
    trackers.close()
    assert caplog.text.count("tracker failed name=tensorboard") == 2


def test_without_any_nothing_is_written(tmp_path: Path) -> None:
    trackers = make_trackers(Settings(data_dir=tmp_path))
    trackers.log(version(1))
    trackers.close()
    assert list(tmp_path.iterdir()) == []


def test_where_curves_go_is_no_part_of_what_a_version_is(tmp_path: Path) -> None:
    plain = Settings(data_dir=tmp_path)
    assert hash_of(settings(tmp_path, tracker_dir=tmp_path, web_port=9)) == hash_of(plain)
    assert hash_of(settings(tmp_path, kl_coef=0.125)) != hash_of(plain)


def test_trackers_can_be_named_in_a_file_and_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "clawstream.yaml"
    path.write_text("learner: {trackers: [tensorboard, wandb]}", encoding="utf-8")
    assert load_settings(path).learner.trackers == ("tensorboard", "wandb")
    monkeypatch.setenv("CLAWSTREAM_LEARNER__TRACKERS", '["mlflow"]')
    assert load_settings(path).learner.trackers == ("mlflow",)


def test_trl_s_names_stand_for_metrics_of_ours() -> None:
    assert {ours for ours, _ in TRL.values()} <= METRICS.keys()
    assert not TRL.keys() & METRICS.keys()
    assert trl_metrics({"charts/learning_rate": 0.5, "rewards/kl_penalty": 2.0, "x": 1.0}) == {
        "lr": 0.5,
        "objective/non_score_reward": -2.0,
    }
