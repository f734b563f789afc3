"""Reward settings that cannot work are refused at start, with the key's path."""

from __future__ import annotations

from pathlib import Path

import pytest

from streams.errors import SettingsError
from streams.settings import load_settings


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("weight_explicit: 0.5", "reward: weight_explicit + weight_implicit"),
        ("weight_explicit: -0.1", "reward.weight_explicit:"),
        ("weigth_explicit: 0.4", "reward.weigth_explicit: unknown key"),
        ("dwell_saturation_ms: 0", "reward.dwell_saturation_ms:"),
        ("rate_window: 0", "reward.rate_window:"),
        ("negatives_in_a_row: 0", "reward.negatives_in_a_row:"),
        ("history_ms: 0", "reward.history_ms:"),
        ("decay: 1.1", "reward.decay:"),
        ("correction: .nan", "reward.correction:"),
        ("confirmation: .inf", "reward.confirmation:"),
        ("history_ratings: 14", "history_ratings must be at least 15"),
        ("repetition_similarity: high", "reward.repetition_similarity:"),
    ],
)
def test_bad_values_name_their_key(tmp_path: Path, yaml: str, message: str) -> None:
    file = tmp_path / "clawstream.yaml"
    file.write_text(f"reward:\n  {yaml}\n", encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        load_settings(file, environ={})
    assert message in str(caught.value)
    assert str(file) in str(caught.value)


def test_other_weights_that_add_up_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "clawstream.yaml"
    file.write_text(
        "reward: {weight_explicit: 0.1, weight_implicit: 0.2, weight_business: 0.7}\n",
        encoding="utf-8",
    )
    assert load_settings(file, environ={}).reward.weight_business == 0.7
