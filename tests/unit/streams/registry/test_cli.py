from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from streams.cli.versions import app
from streams.contracts import VersionStatus
from streams.errors import RegistryError
from streams.registry import Registry, SegmentUse
from streams.settings import LearnerSettings, Settings
from tests.unit.streams.registry.builders import version

Invoke = Callable[..., str]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, learner=LearnerSettings(policy="npc"))


@pytest.fixture
def registry(settings: Settings) -> Registry:
    return Registry.open(settings.effective_registry_url)


@pytest.fixture
def invoke(settings: Settings) -> Invoke:
    root = typer.Typer()
    root.add_typer(app, name="versions")

    @root.callback()
    def _root(ctx: typer.Context) -> None:
        ctx.obj = settings

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(
            root, ["versions", *arguments], env={"COLUMNS": "200"}, catch_exceptions=False
        )
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


def fill(registry: Registry) -> None:
    registry.record(version(1, policy="npc"))
    registry.record(
        version(2, policy="npc", parent=1, reason="[bold]why[/bold]"),
        lineage=[SegmentUse(segment_id="a", revision=3)],
    )
    registry.record(version(3, policy="npc", parent=2, status=VersionStatus.REJECTED))
    registry.record(version(1))


def test_an_empty_registry_says_so(invoke: Invoke) -> None:
    assert "no versions yet" in invoke("list")
    assert json.loads(invoke("list", "--json")) == []


def test_the_list_marks_what_is_live(invoke: Invoke, registry: Registry) -> None:
    fill(registry)
    rows = [line.split() for line in invoke("list", "--policy", "npc").splitlines()[1:]]
    assert [row[1:4] for row in rows] == [
        ["1", "retired", "base"],
        ["2", "live", "1"],
        ["3", "rejected", "2"],
    ]


def test_the_list_for_machines(invoke: Invoke, registry: Registry) -> None:
    fill(registry)
    listed: list[dict[str, Any]] = json.loads(invoke("list", "--json"))
    found = [(v["policy"], v["version"], v["status"], v["is_live"]) for v in listed]
    assert found == [
        ("default", 1, "live", True),
        ("npc", 1, "retired", False),
        ("npc", 2, "live", True),
        ("npc", 3, "rejected", False),
    ]


def test_a_version_is_shown_whole(invoke: Invoke, registry: Registry) -> None:
    fill(registry)
    registry.mark_published("npc-2", 1_700_000_001_000)
    shown = invoke("show", "2")
    for piece in (
        "npc version 2",
        "live (live now)",
        "[bold]why[/bold]",
        "2023-11-14 22:13:20",
        "2023-11-14 22:13:21",
        "losses/approx_kl",
        "trajectory.scored",
        "1 segments were trained on",
    ):
        assert piece in shown
    assert "waiting" not in shown
    assert "waiting" in invoke("show", "3")


def test_a_version_for_machines(invoke: Invoke, registry: Registry) -> None:
    fill(registry)
    shown = json.loads(invoke("show", "1", "--policy", "npc", "--json"))
    assert (shown["version"], shown["status"], shown["is_live"]) == (1, "retired", False)
    assert [change["status"] for change in shown["history"]] == ["live", "retired"]
    assert shown["source_offsets"][0]["end"] == 9
    assert json.loads(invoke("show", "2", "--json"))["lineage"] == [
        {"segment_id": "a", "revision": 3}
    ]


def test_an_unknown_version_is_an_error_of_ours(invoke: Invoke, registry: Registry) -> None:
    fill(registry)
    with pytest.raises(RegistryError, match="'npc' has no version 9"):
        invoke("show", "9")
