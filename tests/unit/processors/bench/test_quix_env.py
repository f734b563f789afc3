from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from processors.bench import quix_env
from processors.bench.quix_env import quix_environment
from streams.bench.environment import Environment
from streams.errors import BenchError

ROOT = Path(quix_env.__file__).resolve().parent.parent.parent


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would be run; the environment's folder appears as uv would make it."""
    seen: list[list[str]] = []

    def run(_: Environment, command: list[str]) -> None:
        seen.append(command)
        if command[1] == "venv":
            Path(command[-1]).mkdir()

    monkeypatch.setattr(Environment, "_run", run)
    return seen


def test_the_environment_is_made_once_for_each_lock(
    tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    quix_environment(tmp_path).prepare(lambda _: None)
    assert [command[1] for command in commands] == ["venv", "pip"]
    assert "--require-hashes" in commands[1]
    quix_environment(tmp_path).prepare(lambda _: None)
    assert len(commands) == 2
    other = tmp_path / "other.lock"
    other.write_text("quixstreams==0\n")
    monkeypatch.setattr(quix_env, "LOCK", other)
    quix_environment(tmp_path).prepare(lambda _: None)
    assert len(commands) == 4


def test_our_packages_are_there_and_nothing_else(tmp_path: Path, commands: list[list[str]]) -> None:
    quix_environment(tmp_path).prepare(lambda _: None)
    found = {path.name: path.resolve() for path in quix_environment(tmp_path).source_root.iterdir()}
    assert found == {"processors": ROOT / "processors", "streams": ROOT / "streams"}


def test_without_uv_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BenchError, match="pip install uv"):
        quix_environment(tmp_path).prepare(lambda _: None)


def test_the_lock_holds_what_quix_needs_with_hashes_and_no_address() -> None:
    text = quix_env.LOCK.read_text(encoding="utf-8")
    versions = dict(re.findall(r"^([\w.-]+)==([\d.]+)", text, re.MULTILINE))
    assert versions["quixstreams"].startswith("3.28.")
    assert tuple(map(int, versions["confluent-kafka"].split(".")[:2])) < (2, 13)
    assert {"fastavro", "msgspec", "pydantic-settings", "pyyaml"} <= set(versions)
    assert text.count("--hash=sha256:") > len(versions)
    assert "://" not in text


def test_what_rivals_run_needs_only_what_the_lock_holds() -> None:
    code = (
        "import sys\n"
        "import processors.bench.plain, processors.bench.subjects.aligners\n"
        "from importlib.metadata import packages_distributions\n"
        "known = packages_distributions()\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*{dist for name in names for dist in known.get(name, ())})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    locked = re.findall(r"^([\w.-]+)==", quix_env.LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    needed = {name.lower().replace("_", "-") for name in done.stdout.split()}
    assert "msgspec" in needed
    # How this checkout was installed, and what fastavro takes where it is there.
    assert needed - set(locked) <= {"clawstream", "setuptools", "virtualenv", "cramjam"}
