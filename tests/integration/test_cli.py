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
from confluent_kafka import Producer

from streams.contracts import DialogueTurn, Role
from streams.kafka.clients import partition_for
from streams.kafka.embedded import RunningKafka, kafka_status, start_kafka, stop_kafka
from streams.serde import build_codec

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
    process = up()
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert b"`clawstream kafka down` stops it" in said
    assert kafka_status(folder) == before


def test_the_doctor_examines_a_cluster(
    folder: Path, up: Callable[[], subprocess.Popen[bytes]]
) -> None:
    """Fine at first; then a producer with another partitioner, and no worker that reads."""
    up()
    environ = {name: value for name, value in os.environ.items() if "KAFKA" not in name}
    environ["CLAWSTREAM_DATA_DIR"] = str(folder.parent)

    def examine(**more: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
        command = [sys.executable, "-m", "streams.cli", "doctor", "--json"]
        done = subprocess.run(command, env=environ | more, capture_output=True, check=False)
        found: dict[str, list[dict[str, str]]] = {}
        for item in json.loads(done.stdout):
            found.setdefault(item["about"], []).append(item)
        return done.returncode, found

    code, found = examine()
    assert (code, found["broker"][0]["level"], found["topics"][0]["level"]) == (0, "OK", "OK")
    assert {item["level"] for item in found["flow"]} == {"WARN"}
    assert [(item["level"], item["what"]) for item in found["lag"]] == [
        ("WARN", f"nobody runs {stage}; nothing waits for it now") for stage in ("align", "reward")
    ]

    producer = Producer({"bootstrap.servers": node(folder).bootstrap_servers, "log_level": 2})
    turn = DialogueTurn(
        event_id="e", session_id="s", turn_id="t", role=Role.USER, content="hi",
        event_time=time.time_ns() // 1_000_000 + 3_600_000, source="shop",
    )  # fmt: skip
    right = partition_for(b"s", 4)
    producer.produce(
        "dialogue.turns", key="s", value=build_codec().encode(turn), partition=1 - right % 2
    )
    assert producer.flush(DEADLINE_S) == 0
    code, found = examine()
    assert code == 1
    assert "shop" in found["partitioning"][0]["what"]
    assert "shop" in found["clocks"][0]["what"]
    align, reward = found["lag"]
    assert (align["level"], reward["level"]) == ("FAIL", "WARN")
    assert f"align holds back 1 records of dialogue.turns/{1 - right % 2} (STOP)" in align["what"]
    assert "clawstream align" in align["advice"]

    # What is wrong elsewhere is named as such, and hides nothing.
    producer.produce("dialogue.turns", key="s", partition=right, value=b"\0\0\0\0\7body")
    assert producer.flush(DEADLINE_S) == 0
    code, found = examine(
        SCHEMA_REGISTRY_URL="http://127.0.0.1:9",
        REGISTRY_URL="postgresql+psycopg://nobody@127.0.0.1:9/none",
    )
    assert code == 1
    assert "http://127.0.0.1:9 does not answer" in found["schemas"][0]["what"]
    assert "127.0.0.1:9/none" in found["registry"][0]["what"]
    assert {item["level"] for item in found["flow"]} <= {"OK", "WARN"}
    assert "shop" in found["partitioning"][0]["what"]


def test_the_doctor_without_a_cluster_says_how_to_start_one(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if "KAFKA" not in name}
    environ["CLAWSTREAM_DATA_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "streams.cli", "doctor"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "clawstream kafka up" in done.stdout, done.stdout
