from __future__ import annotations

import stat
from pathlib import Path

import pytest
import yaml
from pydantic import SecretStr

from processors.bench.cluster import Names, run_folder, settings_over, write_config
from streams.errors import SettingsError
from streams.settings import KafkaSettings, Settings, load_settings


def test_settings_are_the_users_but_for_what_the_bench_needs(tmp_path: Path) -> None:
    kafka = KafkaSettings(session_timeout_ms=7_000, sasl_password=SecretStr("secret"))
    users = Settings(kafka=kafka, schema_registry_url="http://registry:1")
    own = settings_over(users, "host:1", tmp_path, align={"settle_ms": 5})
    write_config(own, tmp_path / "config.yaml")
    loaded = load_settings(tmp_path / "config.yaml", environ={})
    assert loaded.kafka.bootstrap_servers == "host:1"
    assert loaded.kafka.session_timeout_ms == 7_000
    assert loaded.kafka.sasl_password == SecretStr("secret")
    assert loaded.align.settle_ms == 5
    assert loaded.align.gap_ms == users.align.gap_ms
    assert loaded.schema_registry_url is None
    assert loaded.data_dir == tmp_path / "data"
    assert stat.S_IMODE((tmp_path / "config.yaml").stat().st_mode) == 0o600
    assert set(yaml.safe_load((tmp_path / "config.yaml").read_text())) == {
        "data_dir",
        "kafka",
        "align",
        "worker",
    }


def test_settings_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="settle_ms <= gap_ms"):
        settings_over(Settings(), "host:1", tmp_path, align={"settle_ms": 10**9})


def test_names_are_unlike_any_others() -> None:
    names = {Names.fresh("align").of("turns") for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith("bench-align-") for name in names)


def test_a_run_leaves_nothing_but_after_an_error(tmp_path: Path) -> None:
    users = Settings(data_dir=tmp_path)
    with run_folder(users, "done") as folder:
        (folder / "log").write_text("all is well")
    assert not folder.exists()
    with pytest.raises(KeyboardInterrupt), run_folder(users, "interrupted") as folder:
        raise KeyboardInterrupt
    assert not folder.exists()
    with pytest.raises(SettingsError), run_folder(users, "failed") as folder:
        raise SettingsError("wrong")
    assert folder.exists()
