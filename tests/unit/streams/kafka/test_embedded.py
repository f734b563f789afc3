"""What the embedded node's folder says, and when it must not be believed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from streams.errors import BrokerError
from streams.kafka.embedded import (
    answers,
    kafka_status,
    server_properties,
    start_kafka,
    stop_kafka,
)
from streams.kafka.jars import KAFKA_VERSION, LOG4J_VERSION, kafka_jars


def write_state(folder: Path, pid: int, started_at_ms: int) -> None:
    state = {"pid": pid, "started_at_ms": started_at_ms, "port": 1}
    (folder / "state.json").write_text(json.dumps(state))


def wait_until_named(pid: int) -> None:
    """A process that was just started has no command line for a moment."""
    deadline = time.monotonic() + 30
    while not psutil.Process(pid).cmdline():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nothing_runs_in_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    assert kafka_status(tmp_path / "none") is None
    assert stop_kafka(tmp_path / "none") is False
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"pid": 1}',
        "null",
        '{"pid": "1", "started_at_ms": 1, "port": 1}',
        '{"pid": -1, "started_at_ms": 1, "port": 1}',
    ],
)
def test_a_damaged_state_file_is_no_node(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    assert kafka_status(tmp_path) is None


def test_a_recycled_pid_is_no_node_and_is_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        started_at_ms = int(psutil.Process(other.pid).create_time() * 1000)
        write_state(tmp_path, other.pid, started_at_ms)
        assert kafka_status(tmp_path) is None
        assert stop_kafka(tmp_path) is False
        assert other.poll() is None
    finally:
        other.communicate(b"\n", timeout=120)


def test_a_jvm_that_was_started_for_the_folder_is_the_node(tmp_path: Path) -> None:
    java = tmp_path / "java"
    java.symlink_to(sys.executable)
    properties = str(tmp_path.resolve() / "server.properties")
    command = [str(java), "-c", "input()", properties]
    jvm = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        wait_until_named(jvm.pid)
        write_state(tmp_path, jvm.pid, 7)
        running = kafka_status(tmp_path)
        assert running is not None
        assert running.pid == jvm.pid
        assert running.bootstrap_servers == "127.0.0.1:1"
        assert running.started_at_ms == 7
        assert kafka_status(tmp_path / "elsewhere") is None
    finally:
        jvm.communicate(b"\n", timeout=120)
    assert kafka_status(tmp_path) is None


def test_a_node_whose_parent_lives_on_is_stopped_all_the_same(tmp_path: Path) -> None:
    java = tmp_path / "java"
    java.symlink_to(sys.executable)
    command = [
        str(java),
        "-c",
        "import time; time.sleep(600)",
        f"{tmp_path.resolve()}/server.properties",
    ]
    code = (
        "import os, sys\n"
        f"print(os.posix_spawn({str(java)!r}, {command!r}, os.environ), flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        wait_until_named(pid)
        write_state(tmp_path, pid, 7)
        assert stop_kafka(tmp_path, timeout_s=30) is True
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        assert kafka_status(tmp_path) is None
    finally:
        parent.communicate("", timeout=120)


def test_a_dead_process_is_no_node(tmp_path: Path) -> None:
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], os.environ)
    deadline = time.monotonic() + 30
    while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.01)
    write_state(tmp_path, pid, 0)
    assert kafka_status(tmp_path) is None
    os.waitpid(pid, 0)
    assert kafka_status(tmp_path) is None


def test_it_listens_on_this_machine_only_and_creates_nothing_by_accident() -> None:
    config = server_properties(Path("data"), (1001, 1002), 42)
    assert config["listeners"] == "PLAINTEXT://127.0.0.1:1001,CONTROLLER://127.0.0.1:1002"
    assert config["advertised.listeners"] == "PLAINTEXT://127.0.0.1:1001"
    assert config["auto.create.topics.enable"] == "false"
    assert config["message.max.bytes"] == "42"


def test_a_folder_that_kafka_would_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match="comma"):
        start_kafka(tmp_path / "a,b")


def test_a_folder_that_cannot_be_made_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BrokerError, match="cannot make the data folder"):
        start_kafka(tmp_path / "file" / "kafka")


def test_nobody_answers_at_a_closed_port() -> None:
    assert answers("127.0.0.1:1", timeout_s=0.2) is False


def test_without_a_repository_the_error_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("M2_REPO", str(tmp_path / "m2"))
    with pytest.raises(BrokerError, match="KAFKA_BOOTSTRAP_SERVERS"):
        kafka_jars(tmp_path / "cache", on_step=lambda _: None)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


def test_jars_that_are_here_are_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    folder = tmp_path / f"kafka_2.13-{KAFKA_VERSION}-log4j-{LOG4J_VERSION}"
    folder.mkdir()
    assert kafka_jars(tmp_path, on_step=pytest.fail) == folder
