from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from learner.retrain import command
from learner.retrain.cli import INTERRUPTED_EXIT, REJECTED_EXIT
from learner.retrain.command import Done, Outlook, Wanted
from learner.retrain.run import BATCHES, Batches, Counted
from learner.retrain.store import Made
from streams.cli import main
from streams.contracts import VersionStatus
from streams.kafka.places import Range
from streams.settings import Settings
from tests.unit.streams.registry.builders import version

COUNTED = Counted(records=9, undecodable=1, segments={"default": (6, 5), "npc": (2, 0)})
MADE = (
    Made(number=0, digest="d", used=("a",), metrics={}, optimizer_step=1),
    Made(number=1, digest="e", used=(), metrics={}, optimizer_step=1, undone="too far"),
)


@pytest.fixture(autouse=True)
def _settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "clawstream.yaml"
    config.write_text(f"data_dir: {tmp_path}\n", encoding="utf-8")
    monkeypatch.setenv("CLAWSTREAM_CONFIG", str(config))


def run(*arguments: str) -> int:
    try:
        return main(["replay", "--into", "retrain", *arguments])
    except SystemExit as end:
        return int(end.code or 0)


def test_a_dry_run_says_what_would_be_trained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Wanted] = []

    def look(_settings: Settings, wanted: Wanted, _names: Any, shown: Any) -> Outlook:
        asked.append(wanted)
        shown(4, 9)
        batches = Batches(seed=5, usable=5, updates=(("a", "b"), ("c", "d", "e")))
        return Outlook(ranges=(Range("t", 0, 1, 10),), counted=COUNTED, batches=batches)

    monkeypatch.setattr(command, "look", look)
    assert run("--from", "30d", "--to", "1d", "--base-version", "2", "--updates", "2") == 0
    text = capsys.readouterr().out
    assert "2 updates of policy default from version 2" in text
    assert "Nothing was done: add --execute." in text
    assert asked == [Wanted(begin="30d", end="1d", base_version=2, updates=2)]
    assert run("--from", "30d", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["segments"]["default"] == {"segments": 6, "trainable": 5}
    assert (found["dry_run"], found["updates"], found["records"]) == (True, 2, 9)
    assert found["ranges"] == [{"topic": "t", "partition": 0, "start": 1, "end": 10}]


@pytest.mark.parametrize(
    ("status", "expected"), [(VersionStatus.CANDIDATE, 0), (VersionStatus.REJECTED, REJECTED_EXIT)]
)
def test_what_was_trained_is_shown(
    status: VersionStatus,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    begun: list[str] = []
    folders: list[Path] = []

    def go_on(_settings: Settings, folder: Path, *_: Any, read: Any, updated: Any) -> Done:
        folders.append(folder)
        read(9, 9)
        updated(1, 2)
        made = version(7, status=status, attributes={BATCHES: "f" * 64})
        return Done(version=made, counted=COUNTED, made=MADE)

    monkeypatch.setattr(command, "begin", lambda *arguments: begun.append(arguments[-1]))
    monkeypatch.setattr(command, "go_on", go_on)
    assert run("--from", "30d", "--execute", "--name", "november", "--json") == expected
    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["status"]) == (7, status.value)
    assert (found["updates"], found["updates_undone"]) == (2, 1)
    assert found["batches_sha256"] == "f" * 64
    assert run("--resume", "november") == expected
    assert "version 7 of policy default" in capsys.readouterr().out
    assert begun == ["november"]
    assert folders == [tmp_path / "retrains" / "november"] * 2


def test_an_interrupted_one_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def go_on(*_: Any, **__: Any) -> Done:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "go_on", go_on)
    assert run("--resume", "november") == INTERRUPTED_EXIT
    assert "--resume november" in capsys.readouterr().err
