"""``clawstream up`` and its embedded Kafka; its other processes are stood in for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streams.kafka.embedded import RunningKafka, kafka_status, start_kafka, stop_kafka

pytestmark = pytest.mark.broker

DEADLINE_S = 120.0
_UP = """
import sys
import streams.supervisor
from streams.cli import main

class Nothing:
    def __init__(self, run_dir, config, environ): pass
    def start(self, name): pass
    def wait_ready(self, name, timeout_s): return {"url": name}
    def restart_stopped(self, limit): return []
    def stop(self): pass

streams.supervisor.Supervisor = Nothing
sys.exit(main(["up"]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A node's folder, with a space in its path."""
    node = tmp_path / "data dir" / "kafka"
    yield node
    stop_kafka(node)


@pytest.fixture
def up(folder: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts ``clawstream up`` and waits until it is ready."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        environ = {name: value for name, value in os.environ.items() if "KAFKA" not in name}
        environ["CLAWSTREAM_DATA_DIR"] = str(folder.parent)
        process = subprocess.Popen([sys.executable, "-c", _UP], env=environ, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert any(line.startswith(b"ready") for line in process.stdout)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_S)
    return process.returncode


def node(folder: Path) -> RunningKafka:
    """The node that answers in ``folder``."""
    return start_kafka(folder)


def test_lag_of_a_cluster_that_has_had_no_group_yet(folder: Path) -> None:
    bootstrap = start_kafka(folder).bootstrap_servers
    environ = os.environ | {
        "KAFKA_BOOTSTRAP_SERVERS": bootstrap,
        "CLAWSTREAM_DATA_DIR": str(folder.parent),
    }

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "streams.cli", *arguments]
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )

    missing = run("lag")
    assert missing.returncode == 1
    assert (
        missing.stderr == "error: topic dialogue.turns is missing: run `clawstream topics apply`\n"
    )
    applied = run("topics", "apply")
    assert applied.returncode == 0, applied.stderr
    shown = run("lag", "--json")
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert {(item["current"], item["end"], item["lag"]) for item in found} == {(None, 0, 0)}


def test_a_killed_broker_comes_back_where_it_was(
    folder: Path, up: Callable[[], subprocess.Popen[bytes]]
) -> None:
    process = up()
    before = node(folder)
    os.kill(before.pid, signal.SIGKILL)
    deadline = time.monotonic() + DEADLINE_S
    while (now := kafka_status(folder)) is None or now.pid == before.pid:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert node(folder).bootstrap_servers == before.bootstrap_servers
    assert end(process) == 0
    assert kafka_status(folder) is None


def test_a_broker_that_ran_before_goes_on_afterwards(
    folder: Path, up: Callable[[], subprocess.Popen[bytes]]
) -> None:
    before = start_kafka(folder)
    assert end(up()) == 0
    assert kafka_status(folder) == before
