"""What the compose file says of our processes, tried without an engine.

Each one is started with its command and environment, beside a real Kafka, schema registry and
PostgreSQL; only addresses are others. Its health check must pass, and SIGTERM end it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from streams.kafka.embedded import start_kafka, stop_kafka
from streams.ports import free_ports
from tests.apicurio import apicurio
from tests.contract.test_docker import JUDGE, OURS, PASSWORD
from tests.postgres import postgres

pytestmark = [pytest.mark.broker, pytest.mark.timeout(900)]

DEADLINE_S = 180.0
TRIED = ("gateway", "align", "reward", "judge", "lag", "archive")
READY = ("gateway", "align", "reward")
PORTS = {"gateway": "8000", "align": "6066", "reward": "6066", "judge": "6066", "lag": "9308"}


@pytest.fixture
def addresses(tmp_path: Path) -> Iterator[Mapping[str, str]]:
    """What stands for the compose file's names of services."""
    (tmp_path / "postgres").mkdir()
    (tmp_path / "registry").mkdir()
    try:
        kafka = start_kafka(tmp_path / "kafka").bootstrap_servers
        with (
            postgres(tmp_path / "postgres") as database,
            apicurio(tmp_path / "registry") as registry,
        ):
            yield {
                "kafka:9092": kafka,
                "http://schema-registry:8080/apis/ccompat/v7": registry,
                f"postgresql+psycopg://clawstream:{PASSWORD}@postgres:5432/clawstream": (
                    f"{database}postgres"
                ),
                "/artifacts": str(tmp_path / "artifacts"),
                JUDGE: "http://127.0.0.1:9/v1",
            }
    finally:
        stop_kafka(tmp_path / "kafka")


def environment(
    service: Mapping[str, Any], addresses: Mapping[str, str], data_dir: Path, port: int
) -> dict[str, str]:
    given: dict[str, str] = {}
    for name, value in service["environment"].items():
        given[name] = str(port) if value == "6066" else addresses.get(value, value)
    outer = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("CLAWSTREAM_") and not name.endswith(("_SERVERS", "_URL"))
    }
    return outer | given | {"CLAWSTREAM_DATA_DIR": str(data_dir)}


def test_every_process_of_the_core_starts_and_is_healthy(
    addresses: Mapping[str, str], tmp_path: Path
) -> None:
    clawstream = [sys.executable, "-m", "streams.cli"]
    setup = environment(OURS["setup"], addresses, tmp_path / "setup", 0)
    for line in OURS["setup"]["command"][0].split(" && "):
        subprocess.run([*clawstream, *line.split()[1:]], env=setup, check=True)
    for name in TRIED:
        (port,) = free_ports(1)
        service, folder = OURS[name], tmp_path / name
        folder.mkdir()
        env = environment(service, addresses, folder, port)
        if name == "gateway":
            env["CLAWSTREAM_GATEWAY__PORT"] = str(port)
        command = [item.replace(":9308", f":{port}") for item in service["command"]]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*clawstream, *command], env=env, cwd=folder, stdout=log, stderr=log
            )
        try:
            wait_for_health(name, service, port, process, folder)
            wait_until_ready(name, folder / "log")
            process.terminate()
            assert process.wait(DEADLINE_S) == 0, (name, (folder / "log").read_text())
        finally:
            process.kill()
            process.wait()


def wait_until_ready(name: str, log: Path) -> None:
    """Until a process that has something to take over says that it has: then it stops at once."""
    deadline_s = time.monotonic() + DEADLINE_S
    while name in READY and b'"event": "ready"' not in log.read_bytes():
        assert time.monotonic() < deadline_s, (name, log.read_text())
        time.sleep(0.2)


def wait_for_health(
    name: str,
    service: Mapping[str, Any],
    port: int,
    process: subprocess.Popen[bytes],
    folder: Path,
) -> None:
    """Until its own check passes; one without a check until it has made its folder."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        assert process.poll() is None, (name, (folder / "log").read_text())
        assert time.monotonic() < deadline_s, (name, (folder / "log").read_text())
        if "healthcheck" in service:
            _, _python, *arguments = service["healthcheck"]["test"]
            check = [item.replace(f":{PORTS[name]}/", f":{port}/") for item in arguments]
            if subprocess.run([sys.executable, *check], capture_output=True).returncode == 0:
                return
        elif (folder / "archive").exists():
            return
        time.sleep(0.5)
