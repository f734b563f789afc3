"""What commands say, and that it fits a narrow terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from rich.console import Console

from streams.cli import main
from streams.cli.common import print_table
from streams.cli.demo import _command
from streams.cli.dlq import _print_whole
from streams.cli.topics import _line
from streams.cli.up import _start
from streams.cli.versions import _facts_table, _list_table, _show_tables
from streams.contracts import VersionStatus
from streams.demo.run import Demo
from streams.lag import groups
from streams.settings import Settings
from streams.supervisor import ProcessError, Supervisor, sole_user
from streams.topics import Change, ChangeKind
from tests.unit.streams.registry.builders import version


def config(tmp_path: Path, text: str = "") -> str:
    path = tmp_path / "clawstream.yaml"
    path.write_text(f"data_dir: {tmp_path}\n{text}", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("change", "applied", "line"),
    [
        (Change(topic="t", kind=ChangeKind.CREATE, after="4 x 1"), False, "create  t: 4 x 1\n"),
        (Change(topic="t", kind=ChangeKind.CREATE, after="4 x 1"), True, "created t: 4 x 1\n"),
        (
            Change(topic="t", kind=ChangeKind.ALTER, setting="s", before=None, after="2"),
            True,
            "altered t: s unset -> 2\n",
        ),
        (
            Change(
                topic="t", kind=ChangeKind.REFUSE, setting="s", before="1", after="2", reason="no"
            ),
            False,
            "refuse  t: s 1 -> 2 (no)\n",
        ),
    ],
)
def test_a_topic_change_is_one_line(change: Change, applied: bool, line: str) -> None:
    assert _line(change, applied=applied) == line


def test_the_list_of_versions_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    metrics = {"rewards/mean": -0.23456, "losses/approx_kl": 0.0159444}
    old = version(1, metrics=metrics, status=VersionStatus.RETIRED)
    print_table(_list_table((old, version(12)), {"default": 12}))
    lines = capsys.readouterr().out.splitlines()
    heading, first, second = lines
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert "retired" in first
    assert "0.01594  2023-11-14 22:13" in first
    assert heading.split() == [
        "policy", "version", "status", "parent", "segments", "reward", "KL", "made",
    ]  # fmt: skip
    assert second.split() == [
        "default", "12", "live", "base", "2", "-0.25", "0.01", "2023-11-14", "22:13",
    ]  # fmt: skip


def test_a_long_policy_name_is_not_cut_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    name = "customer-service-in-german-and-english"
    print_table(_list_table((version(1, policy=name),), {name: None}))
    _, line = capsys.readouterr().out.splitlines()
    assert line.startswith(name)
    assert line.rstrip().endswith("22:13")


def test_a_path_of_a_version_is_in_one_piece(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    uri = "file:///" + "a" * 100
    print_table(_facts_table(version(1, adapter_uri=uri), True))
    assert ["adapter", uri] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_a_version_shows_what_it_was_made_of_and_its_other_attributes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    attributes = {
        "make_up_source": '{"web": 31, "app": 2}',
        "make_up_sign": '{"positive": 33}',
        "make_up_odd": "not JSON",
        "imbalance": "source web: 31 of 33 replies",
        "warm_start_file": "labels.jsonl",
    }
    made = version(1, attributes=attributes)
    print_table(_facts_table(made, True))
    facts = {tuple(line.split(maxsplit=1)) for line in capsys.readouterr().out.splitlines()}
    for table in _show_tables(made, (), ()):
        Console(width=80).print(table)
    rows = [line.strip("│┃ ").split("│") for line in capsys.readouterr().out.splitlines()]
    shown = {tuple(cell.strip() for cell in row) for row in rows}
    assert {("source", "web", "31"), ("source", "app", "2"), ("sign", "positive", "33")} <= shown
    told = {tuple(cell.strip() for cell in fact) for fact in facts}
    assert ("imbalance", "source web: 31 of 33 replies") in told
    assert ("warm_start_file", "labels.jsonl") in told
    assert ("make_up_odd", "not JSON") in told
    assert not any(fact[0] == "make_up_source" for fact in told)


@pytest.mark.parametrize(("command", "folder"), [("up", "run"), ("demo", "demo")])
def test_a_second_pipeline_in_one_folder_is_refused(
    command: str, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "kept").write_text("x", encoding="utf-8")
    with sole_user(tmp_path / folder):
        assert main(["-c", config(tmp_path), command]) == 1
    assert f"another clawstream runs in {tmp_path / folder}" in capsys.readouterr().err
    assert (tmp_path / folder / "kept").exists()


def test_a_summary_that_cannot_be_written_stops_the_demo_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "none" / "summary.json"
    assert main(["-c", config(tmp_path), "demo", "--json", str(file)]) == 2
    assert f"cannot write {file}" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


def test_an_interrupted_demo_says_that_everything_is_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_demo: Demo) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Demo, "run", interrupted)
    with pytest.raises(SystemExit) as end:
        main(["-c", config(tmp_path), "demo"])
    assert end.value.code == 130
    assert f"everything is stopped. Data and logs: {tmp_path / 'demo'}" in capsys.readouterr().out


def test_lag_without_a_broker_says_where_and_what_to_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_TIMEOUT_S", 0.5)
    assert main(["-c", config(tmp_path, "kafka: {bootstrap_servers: '127.0.0.1:1'}\n"), "lag"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: Kafka at 127.0.0.1:1: ")
    assert "check the address" in said
    assert "KafkaError" not in said


def test_where_no_node_runs_the_same_folder_is_proposed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a b"
    with pytest.raises(SystemExit):
        main(["-c", config(tmp_path), "kafka", "status", "--data-dir", str(folder)])
    assert f"clawstream kafka up --data-dir '{folder}'" in capsys.readouterr().out


@pytest.mark.parametrize(("on_path", "named"), [(True, "clawstream"), (False, "run/clawstream")])
def test_the_demo_names_itself_as_a_shell_finds_it(
    on_path: bool, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "run" / "clawstream"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["run/clawstream", "demo"])
    monkeypatch.setenv("PATH", str(program.parent if on_path else tmp_path))
    assert _command() == named


class Away:
    """A consumer whose broker does not answer."""

    def __getattr__(self, name: str) -> Any:
        raise KafkaException(KafkaError(KafkaError._TRANSPORT))

    def close(self) -> None:
        pass


@pytest.mark.parametrize("command", ["dlq list", "reviews list", "export sft --out -"])
def test_a_kafka_that_is_away_is_said_in_words(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streams.kafka.clients.make_consumer", lambda *_, **__: Away())
    kafka = "kafka: {bootstrap_servers: 'nowhere:9092'}"
    assert main(["-c", config(tmp_path, kafka), *command.split()]) == 1
    said = capsys.readouterr().err
    assert "Kafka at nowhere:9092" in said
    assert "check the address and that Kafka runs" in said
    assert "KafkaError{" not in said


def test_a_letters_times_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    _print_whole({"time": 1_700_000_000_000, "timestamp": None, "bytes": 5, "attributes": {"a": 1}})
    assert capsys.readouterr().out.splitlines()[:3] == [
        "time:           2023-11-14 22:13:20 UTC",
        "timestamp:      -",
        "bytes:          5",
    ]


class WithoutPort(Supervisor):
    """A gateway that cannot listen, beside a model that takes long to load."""

    def start(self, name: str, *arguments: str) -> Any:
        return None

    def wait_ready(self, name: str, timeout_s: float) -> dict[str, Any]:
        assert name == "gateway"
        raise ProcessError("gateway stopped with status 2")


class WithoutPlugin(Supervisor):
    """A reward worker that cannot use its settings, beside others that can."""

    def start(self, name: str, *arguments: str) -> Any:
        return None

    def wait_ready(self, name: str, timeout_s: float) -> dict[str, Any]:
        return {"url": "http://127.0.0.1:1"}

    def restart_stopped(self, limit: int) -> list[str]:
        raise ProcessError("reward cannot start")


def test_it_is_not_called_ready_without_a_process_that_refuses_its_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ProcessError, match="cannot start"):
        _start(WithoutPlugin(tmp_path, None), Settings(), tmp_path)
    assert "stop with Ctrl-C" not in capsys.readouterr().out


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="status 2"):
        _start(WithoutPort(tmp_path, None), Settings(), tmp_path)
