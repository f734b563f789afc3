from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from learner import __main__ as entry
from learner import loop, processes, trainer
from learner.__main__ import main
from streams.settings import Settings


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


@pytest.mark.parametrize(
    ("environment", "launched", "sharded"),
    [
        ({}, False, False),
        ({"WORLD_SIZE": "1", "ACCELERATE_USE_FSDP": "false"}, False, False),
        ({"WORLD_SIZE": "2"}, True, False),
        ({"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true"}, True, True),
    ],
)
def test_what_the_launcher_says_decides_how_many_train(
    environment: dict[str, str],
    launched: bool,
    sharded: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("WORLD_SIZE", "ACCELERATE_USE_FSDP"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stopping, seen = threading.Event(), dict[str, Any]()

    def run_together(
        settings: Settings, make: Callable[..., Any], run: Callable[..., Any], *, launched: bool
    ) -> None:
        seen["launched"] = launched
        run(lambda given: make(given, "team"))

    def run(settings: Settings, make: Callable[..., Any], **others: Any) -> None:
        seen.update(others, made=make(settings))

    monkeypatch.setattr(entry, "stop_on_signals", lambda: stopping)
    monkeypatch.setattr(processes, "run_together", run_together)
    monkeypatch.setattr(loop, "run", run)
    monkeypatch.setattr(trainer, "make_trainer", lambda settings, team, *, sharded: (team, sharded))
    config = tmp_path / "settings.yaml"
    config.write_text("{}", encoding="utf-8")
    assert main(["--config", str(config)]) == 0
    assert seen == {
        "launched": launched,
        "made": ("team", sharded),
        "stopping": stopping,
        "warm_start": None,
        "warm_start_only": False,
    }
