from __future__ import annotations

from pathlib import Path

import pytest

from streams.errors import SettingsError
from streams.settings import Settings, load_settings, write_settings


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "clawstream.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path) -> str:
    """Why a file is not taken."""
    with pytest.raises(SettingsError) as refused:
        load_settings(path)
    return str(refused.value)


def test_the_environment_stands_above_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "align: {settle_ms: 5000, gap_ms: 6000}\n")
    monkeypatch.setenv("CLAWSTREAM_ALIGN__SETTLE_MS", "4000")
    settings = load_settings(path)
    assert (settings.align.settle_ms, settings.align.gap_ms) == (4000, 6000)


def test_the_file_can_be_named_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAWSTREAM_CONFIG", str(write(tmp_path, "serve: {port: 9}\n")))
    assert load_settings().serve.port == 9


def test_the_four_addresses_answer_to_their_short_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "k:1")
    monkeypatch.setenv("SCHEMA_REGISTRY_URL", "http://s")
    monkeypatch.setenv("REGISTRY_URL", "postgresql+psycopg://u:secret@h/d")
    monkeypatch.setenv("ARTIFACTS_URL", "file:///a")
    settings = load_settings()
    assert settings.kafka.bootstrap_servers == "k:1"
    assert settings.schema_registry_url == "http://s"
    assert settings.effective_registry_url.endswith("@h/d")
    assert settings.effective_artifacts_url == "file:///a"
    assert "secret" not in repr(settings)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("algin: {}\n", r"algin: unknown key \(did you mean align\?\)"),
        ("align: {settel_ms: 5}\n", r"align.settel_ms: unknown key \(did you mean settle_ms\?\)"),
        ("align: {xyzzy: 5}\n", "align.xyzzy: unknown key$"),
        ("align:\n", "align: must be a mapping of its keys"),
        ("serve: {port: 70000}\n", "serve.port"),
        ("gateway: {deciding_sources: [desk]}\n", "deciding_sources: desk has no key in api_keys"),
        ("gateway: {upstream_url: localhost}\n", "gateway.upstream_url.*http://host:port"),
        ("align: {settle_ms: soon}\n", "align.settle_ms"),
        ("align: {settle_ms: 400000}\n", "settle_ms <= gap_ms <= max_open_ms"),
        ("align: {max_open_ms: 300000, max_skew_ms: 290000}\n", "max_skew_ms"),
        ("align: {horizon_ms: 3600000}\n", "horizon_ms"),
        ("reward: {weight_explicit: 0.9}\n", "must be 1"),
        ("reward: {history_ms: 86400000}\n", "reward: history_ms must be at least 86430000"),
        ("align: {horizon_ms: 2592000000}\n", "reward: history_ms must be at least 2592030000"),
        ("learner: {window_segments: 0}\n", "learner.window_segments"),
        ("- a list\n", "mapping"),
        ("a: [\n", "not valid YAML"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        load_settings(write(tmp_path, text))


def test_a_value_of_the_environment_is_not_blamed_on_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAWSTREAM_REWARD__DECAY", "2")
    path = write(tmp_path, "judge: {votes: 0}\n")
    lines = refusal(path).splitlines()
    assert len(lines) == 2
    assert any(
        line.startswith("environment: CLAWSTREAM_REWARD__DECAY: reward.decay:") for line in lines
    )
    assert any(line.startswith(f"{path}: judge.votes:") for line in lines)


def test_keys_that_do_not_go_together_are_traced_to_file_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAWSTREAM_REWARD__WEIGHT_EXPLICIT", "0.5")
    path = write(tmp_path, "reward: {weight_business: 0.3}\n")
    assert refusal(path).startswith(
        f"{path} and the environment (CLAWSTREAM_REWARD__WEIGHT_EXPLICIT): reward: weight_explicit"
    )


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.yaml"):
        load_settings(tmp_path / "nowhere.yaml")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "clawstream.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match=r"clawstream\.yaml is not valid YAML"):
        load_settings(tmp_path / "clawstream.yaml")


def test_an_unknown_environment_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAWSTREAM_ALIGN__SETTEL_MS", "5")
    says = r"CLAWSTREAM_ALIGN__SETTEL_MS \(did you mean CLAWSTREAM_ALIGN__SETTLE_MS\?\)"
    with pytest.raises(SettingsError, match=says):
        load_settings()


@pytest.mark.parametrize("name", ["CLAWSTREAM_GATEWAY__API_KEYS", "CLAWSTREAM_GATEWAY"])
def test_a_mapping_in_the_environment_that_is_no_json_is_refused_unseen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, '{"web": "hunter2"')
    with pytest.raises(SettingsError, match=r"gateway.*must be JSON") as refused:
        load_settings()
    assert "hunter2" not in str(refused.value)


def test_an_address_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEMA_REGISTRY_URL", "registry:8081")
    with pytest.raises(SettingsError, match=r"SCHEMA_REGISTRY_URL.*http://host:port"):
        load_settings()
    monkeypatch.setenv("SCHEMA_REGISTRY_URL", "http://a:1,https://b")
    assert load_settings().schema_registry_url == "http://a:1,https://b"


def test_the_demo_preset_is_valid() -> None:
    import streams

    preset = Path(streams.__file__).parent / "presets" / "demo.yaml"
    assert load_settings(preset).align.settle_ms < load_settings().align.settle_ms


def test_what_is_written_for_another_process_is_read_the_same_secrets_included(
    tmp_path: Path,
) -> None:
    text = """
kafka: {bootstrap_servers: "k:1", sasl_password: "p: #w", ssl_ca_location: /ca.pem}
judge: {url: "http://judge/v1", api_key: key}
align: {settle_ms: 5000}
"""
    settings = load_settings(write(tmp_path, text))
    path = tmp_path / "again.yaml"
    write_settings(settings.model_dump(exclude_defaults=True), path)
    assert path.stat().st_mode & 0o077 == 0
    again = load_settings(path)
    assert again == settings
    assert isinstance(again, Settings)
    assert again.kafka.sasl_password is not None
    assert again.kafka.sasl_password.get_secret_value() == "p: #w"


def test_a_preset_stands_below_the_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "preset: game-npc\nlearner: {epochs: 3}\nalign: {settle_ms: 5}\n")
    monkeypatch.setenv("CLAWSTREAM_LEARNER__KL_COEF", "0.7")
    settings = load_settings(path)
    assert settings.preset == "game-npc"
    assert (settings.learner.epochs, settings.learner.kl_coef) == (3, 0.7)
    assert settings.learner.batch_segments == 1_024
    assert (settings.align.settle_ms, settings.align.gap_ms) == (5, 300_000)
    monkeypatch.setenv("CLAWSTREAM_PRESET", "customer-service")
    assert load_settings(path).learner.batch_segments == 128
    assert load_settings().learner.window_segments == 1_500


def test_an_unknown_preset_and_a_wrong_section_under_a_preset_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"preset: .*'customer-service'.*'game-npc'"):
        load_settings(write(tmp_path, "preset: chess\n"))
    with pytest.raises(SettingsError, match="learner: must be a mapping"):
        load_settings(write(tmp_path, "preset: game-npc\nlearner: 3\n"))
