"""Reward settings that cannot work are refused at start, with the key's path."""

from __future__ import annotations

from pathlib import Path

import pytest

from streams.errors import SettingsError
from streams.settings import load_settings


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("weight_explicit: 0.5", "weight_business must be 1, not 0.5 + 0.3 + 0.3 = 1.1"),
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
        ("crowd_window_ms: 0", "reward.crowd_window_ms:"),
        ("burst_window_ms: 0", "reward.burst_window_ms:"),
        ("burst_ratings: 1", "reward.burst_ratings:"),
        ("burst_texts: 1", "reward.burst_texts:"),
        ("flood_factor: 1", "reward.flood_factor:"),
        ("contradiction_share: 0.5", "reward.contradiction_share:"),
        ("cohort_share: 0", "reward.cohort_share:"),
        ("cohort_raters_min: 1", "reward.cohort_raters_min:"),
        ("diversity_replies: 0", "reward.diversity_replies:"),
        ("{diversity_free: 5, diversity_full: 5}", "reward: diversity_full must be above"),
        ("weight_judge: 2", "reward.weight_judge:"),
        ("follow_up_saturation: 0", "reward.follow_up_saturation:"),
        ("plugin_components: {brevity: 2}", "reward.plugin_components.brevity:"),
        ("plugin_signals: {escalation: a}", "reward.plugin_signals.escalation:"),
        ("repetition: 0.8", "reward.repetition:"),
        ("correction: 1.2", "reward.correction:"),
        ("tool_error: 0.5", "reward.tool_error:"),
        ("confirmation: -0.5", "reward.confirmation:"),
        ("repetition_similarity: 0", "reward.repetition_similarity:"),
        ("decay: true", "reward.decay: must not be true"),
        ("decay: yes", "reward.decay:"),
        ("negatives_in_a_row: true", "reward.negatives_in_a_row: must not be true"),
        ("plugin_signals: {escalation: false}", "reward.plugin_signals: escalation must not be"),
        ("flood_factor: .inf", "reward.flood_factor:"),
        ("crowd_window_ms: 1:00:00", "reward.crowd_window_ms:"),
        ("crowd_window_ms: 9007199254740993", "reward.crowd_window_ms:"),
        ("{decay: 0.9, decay: 0.5}", "reward.decay: stands twice, in lines 1 and 1"),
        ("filter_rows: false", "reward.filter_rows: unknown key (did you mean filter_row?)"),
    ],
)
def test_bad_values_name_their_key(tmp_path: Path, yaml: str, message: str) -> None:
    file = tmp_path / "clawstream.yaml"
    text = f"reward: {yaml}" if yaml.startswith("{") else f"reward:\n  {yaml}"
    file.write_text(f"{text}\n", encoding="utf-8")
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


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("judge: {votes: 0}", "judge.votes:"),
        ("judge: {timeout_ms: 0}", "judge.timeout_ms:"),
        ("judge: {url: 'judge:8000'}", "judge.url: must look like http://host:port"),
        ("judge: {modell: m}", "judge.modell: unknown key (did you mean model?)"),
        ("judge: {url: 'http://j/v1', plugin: p}", "judge: url and plugin are two judges"),
        ("judge: {temperature: .inf}", "judge.temperature:"),
        ("judge: {votes: true}", "judge.votes: must not be true"),
        ("gateway: {outcomes: {bought: 2}}", "gateway.outcomes.bought:"),
        ("gateway: {outcomes: {bought: true}}", "gateway.outcomes: bought must not be true"),
        ("gateway: {outcomes: {' ': 1}}", "gateway.outcomes: ' ' cannot be an outcome's name"),
    ],
)
def test_bad_values_beside_the_reward_name_their_key_too(
    tmp_path: Path, yaml: str, message: str
) -> None:
    file = tmp_path / "clawstream.yaml"
    file.write_text(f"{yaml}\n", encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        load_settings(file, environ={})
    assert message in str(caught.value)
