from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from streams.cli import main
from streams.cli.root import COMMANDS

HEAVY = ("torch", "transformers", "faust", "confluent_kafka", "sqlalchemy", "fastapi")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "streams.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from streams.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        f"assert not set({HEAVY!r}) & set(sys.modules), sorted(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert name in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert "sage:" in capsys.readouterr().out


def test_an_unknown_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["nope"])
    assert end.value.code == 2
    assert "nope" in capsys.readouterr().err


def test_our_errors_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "clawstream.yaml"
    config.write_text(f"data_dir: {tmp_path}\n", encoding="utf-8")
    assert main(["-c", str(config), "topics", "plan"]) == 1
    assert capsys.readouterr().err.startswith("error: no Kafka to talk to")


@pytest.mark.parametrize("name", [name for name, entry in COMMANDS.items() if entry.process])
def test_a_process_refuses_an_unknown_key(name: str, tmp_path: Path) -> None:
    config = tmp_path / "clawstream.yaml"
    config.write_text("align: {settel_ms: 5}\n", encoding="utf-8")
    done = run("-c", str(config), name)
    assert done.returncode == 2
    assert "align.settel_ms" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_rewards_help_names_its_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["reward", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("explain SEGMENT_ID", "shadow NAME", "compare NAME"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "1000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, None),
    ],
)
def test_threads_do_not_wait_long_for_each_other_unless_told(
    given: dict[str, str], expected: str | None, tmp_path: Path
) -> None:
    code = (
        "import os, sys\n"
        "from streams.cli import main\n"
        "try:\n    main(['kafka', 'status'])\nexcept SystemExit as end:\n    assert end.code == 3\n"
        "print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))\n"
    )
    own = {"CLAWSTREAM_DATA_DIR": str(tmp_path), **given}
    unset = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True,
        env=environ | own,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == f"False {expected}"
