"""The embedded cluster of several nodes: started, killed in part, found again, stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from streams.errors import BrokerError
from streams.kafka.clients import resolve_bootstrap
from streams.kafka.cluster import cluster_status, start_cluster, stop_cluster
from streams.kafka.embedded import embedded_dir, start_kafka
from streams.settings import Settings

pytestmark = [pytest.mark.broker, pytest.mark.timeout(400)]
START_S = 180.0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The embedded folder of a data folder; whatever runs in it is stopped in the end."""
    path = embedded_dir(tmp_path)
    yield path
    stop_cluster(path)


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.05)


def java_of(folder: Path) -> list[str]:
    """The folders that JVMs run for, within a folder."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [word for line in lines for word in line if word.startswith(str(folder.resolve()))]


def command(tmp_path: Path, *arguments: str) -> Any:
    code = "from streams.cli.kafka import app; app(prog_name='clawstream kafka')"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, "--json"],
        env=os.environ | {"CLAWSTREAM_DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def copies_in_sync(bootstrap: str, topic: str) -> int:
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    return len(admin.list_topics(topic, timeout=20).topics[topic].partitions[0].isrs)


def produce(bootstrap: str, topic: str, count: int) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "log_level": 0})
    failures: list[object] = []
    for _ in range(count):
        producer.produce(
            topic, b"value", on_delivery=lambda error, _: failures.append(error) if error else None
        )
    assert producer.flush(60) == 0
    assert failures == []


def test_a_cluster_lives_on_without_one_node_and_takes_it_back(
    tmp_path: Path, folder: Path
) -> None:
    shown = command(tmp_path, "up", "--brokers", "3", "--timeout-s", str(START_S))
    bootstrap = shown["bootstrap_servers"]
    assert resolve_bootstrap(Settings(data_dir=tmp_path)) == bootstrap
    assert len(bootstrap.split(",")) == 3
    assert {number: Path(node["log_file"]).exists() for number, node in shown["nodes"].items()} == {
        "1": True,
        "2": True,
        "3": True,
    }
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic("kept", num_partitions=1)])["kept"].result(30)
    wait_for(lambda: copies_in_sync(bootstrap, "kept") == 3, "three copies")

    os.kill(shown["nodes"]["2"]["pid"], signal.SIGKILL)
    wait_for(lambda: "2" not in command(tmp_path, "status")["nodes"], "the end of node 2")
    assert command(tmp_path, "status")["brokers"] == 3
    produce(bootstrap, "kept", 10)

    again = command(tmp_path, "up", "--timeout-s", str(START_S))
    assert again["bootstrap_servers"] == bootstrap
    assert again["nodes"]["1"]["pid"] == shown["nodes"]["1"]["pid"]
    assert again["nodes"]["2"]["pid"] != shown["nodes"]["2"]["pid"]
    wait_for(lambda: copies_in_sync(bootstrap, "kept") == 3, "three copies again")

    with pytest.raises(BrokerError, match="holds a cluster of 3 nodes, not 5"):
        start_cluster(folder, 5)
    with pytest.raises(BrokerError, match="holds a cluster of several nodes"):
        start_kafka(folder)
    assert command(tmp_path, "down")["stopped"] is True
    assert java_of(folder) == []
    assert cluster_status(folder) is None
    assert stop_cluster(folder) is False


def test_nodes_that_are_too_slow_are_ended(folder: Path) -> None:
    with pytest.raises(BrokerError, match=r"did not answer at .* within"):
        start_cluster(folder, 2, timeout_s=0.1)
    assert java_of(folder) == []


def test_a_folder_of_a_single_node_is_left_alone(folder: Path) -> None:
    (folder / "data").mkdir(parents=True)
    with pytest.raises(BrokerError, match="holds a single node"):
        start_cluster(folder, 3)


def test_a_damaged_cluster_file_is_named(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "cluster.json").write_text("{")
    with pytest.raises(BrokerError, match=r"cannot read .*cluster\.json"):
        start_cluster(folder)
    (folder / "cluster.json").unlink()
