from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import streams
from streams.bench.environment import Environment
from streams.errors import BenchError


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """What would be run; the environment's folder appears as uv would make it."""
    seen: list[Sequence[str]] = []

    def run(_environment: Environment, command: Sequence[str]) -> None:
        seen.append(command)
        if command[1] == "venv":
            Path(command[-1]).mkdir(parents=True)

    monkeypatch.setattr(Environment, "_run", run)
    return seen


def environment(folder: Path, lock: str = "rival==1\n") -> Environment:
    file = folder / "rival.lock"
    file.write_text(lock)
    return Environment(
        what="the rival",
        folder=folder / "made" / "rival",
        lock=file,
        packages=(streams,),
        without="leave it out",
    )


def test_it_is_made_once_for_each_lock(tmp_path: Path, commands: list[Sequence[str]]) -> None:
    told: list[str] = []
    for lock, runs in (("rival==1\n", 2), ("rival==1\n", 2), ("rival==2\n", 4)):
        environment(tmp_path, lock).prepare(told.append)
        assert len(commands) == runs
    assert "--require-hashes" in commands[1]
    assert told == ["making an environment with the rival"] * 2


def test_our_packages_are_linked_beside_it(tmp_path: Path, commands: list[Sequence[str]]) -> None:
    made = environment(tmp_path)
    made.prepare(lambda _: None)
    made.prepare(lambda _: None)
    root = Path(made.environ["PYTHONPATH"])
    (link,) = root.iterdir()
    assert link.resolve() == Path(streams.__path__[0]).resolve()
    assert made.python.parent.parent == made.folder
    assert not root.is_relative_to(made.folder)


def test_without_uv_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BenchError, match=r"pip install uv.*leave it out"):
        environment(tmp_path).prepare(lambda _: None)


def test_a_failed_installation_is_shown(tmp_path: Path) -> None:
    broken = environment(tmp_path, "no-hash==1\n")
    with pytest.raises(BenchError, match=r"(?s)the rival cannot be made: .*leave it out"):
        broken.prepare(lambda _: None)
