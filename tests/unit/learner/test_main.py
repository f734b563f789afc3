from __future__ import annotations

import sys
from pathlib import Path

import pytest

from learner.__main__ import main


def test_a_bad_file_ends_the_learner_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_text("\nnothing\n", encoding="utf-8")
    assert main(["--warm-start", str(path)]) == 1
    assert f"error: {path} line 2 is no JSON object" in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--warm-start", str(tmp_path / "none"), "--warm-start-only"]) == 1
    assert "none: No such file" in capsys.readouterr().err


def test_a_warm_start_alone_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--warm-start-only"])
    assert ended.value.code == 2
    assert "--warm-start-only needs --warm-start FILE" in capsys.readouterr().err


def test_the_help_explains_the_warm_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["clawstream"])
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "--warm-start FILE" in capsys.readouterr().out


def test_wrong_settings_are_an_error_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text("learner: {mode: dpo}", encoding="utf-8")
    assert main(["--config", str(config)]) == 2
    assert "learner.mode" in capsys.readouterr().err
