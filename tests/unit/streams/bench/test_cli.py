from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from streams.cli import main
from streams.cli.bench import BENCHES

HEAVY = ("torch", "faust", "confluent_kafka", "aiokafka", "fastavro")


def test_the_list_of_benches_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from streams.cli import main\n"
        "try:\n    main(['bench', '--help'])\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        f"assert not set({HEAVY!r}) & set(sys.modules), sorted(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in BENCHES:
        assert name in done.stdout


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", name, "--help"])
    assert end.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_an_unknown_subject_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "align", "--subjects", "ours,theirs"]) == 2
    assert "unknown theirs; known are ours, faust_stock" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_found_out_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "absent" / "report.json"
    assert main(["bench", "align", "--json", str(path)]) == 2
    assert "name another --json" in capsys.readouterr().err


def test_an_odd_number_of_turns_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "align-state", "--turns", "3"]) == 2
    assert "--turns must be even" in capsys.readouterr().err


def test_rivals_know_plain_connections_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLAWSTREAM_KAFKA__SECURITY_PROTOCOL", "SSL")
    assert main(["bench", "align"]) == 2
    assert "plain connection" in capsys.readouterr().err
