"""The presets hold together, keep to the ranges they state, and make an update."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import streams
from learner.model import load_base
from learner.update import PpoUpdater
from streams.settings import PRESETS, LearnerSettings, load_settings
from tests.unit.learner.test_update import TINY, samples

FOLDER = Path(streams.__file__).parent / "presets"
RATE = r"(\d\.\de-\d+)"
RANGES = {
    # batch, window, rate of all weights, latest update in minutes
    "customer-service": ((128, 256), (1_500, 3_000), (5e-6, 1e-5), 10),
    "personal-assistant": ((512, 1_024), (3_000, 5_000), (3e-6, 5e-6), None),
    "game-npc": ((1_024, 5_000), (5_000, 5_000), (1e-6, 3e-6), None),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def learner_of(name: str, monkeypatch: pytest.MonkeyPatch) -> LearnerSettings:
    monkeypatch.setenv("CLAWSTREAM_PRESET", name)
    return load_settings().learner


def test_the_presets_are_the_files_but_for_the_demo() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {*PRESETS, "demo"} == {*RANGES, "demo"}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_keeps_to_its_ranges(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, window, _, latest_min = RANGES[name]
    learner = learner_of(name, monkeypatch)
    assert batch[0] <= learner.batch_segments <= batch[1]
    assert window[0] <= learner.window_segments <= window[1]
    assert learner.min_sample_size <= learner.batch_segments <= learner.window_segments
    assert learner.update_segments <= learner.window_segments
    assert learner.update_interval_ms < learner.update_max_interval_ms
    if latest_min is not None:
        assert learner.update_max_interval_ms <= latest_min * 60_000


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_states_both_rates_and_takes_that_of_a_lora(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    stated = re.search(rf"Of all weights: {RATE} to {RATE}\.", text)
    assert stated is not None
    low, high = RANGES[name][2]
    assert (float(stated[1]), float(stated[2])) == (low, high)
    learner = learner_of(name, monkeypatch)
    assert low * 10 <= learner.learning_rate <= high * 100
    assert 0 < learner.learning_rate_floor < learner.learning_rate


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_makes_an_update(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = learner_of(name, monkeypatch)
    result = PpoUpdater(load_base(TINY, Path("unused")), learner, TINY).update(samples())
    assert result.metrics["charts/learning_rate"] == learner.learning_rate
    assert 0 < result.metrics["kl/update_k3"] < learner.gate_max_kl
