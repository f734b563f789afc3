"""The embedded node in a rough life: started twice, killed, frozen, interrupted, damaged."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from streams.errors import BrokerError
from streams.kafka.admin import Admin
from streams.kafka.clients import make_consumer, make_producer, resolve_bootstrap
from streams.kafka.embedded import (
    RunningKafka,
    answers,
    embedded_dir,
    kafka_status,
    start_kafka,
    stop_kafka,
)
from streams.settings import KafkaSettings, Settings
from tests.conftest import create_topics

pytestmark = pytest.mark.broker

DEADLINE_S = 120.0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A node's folder; whatever runs in it is stopped in the end."""
    path = tmp_path / "ünï kafka"
    yield path
    stop_kafka(path)


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.02)


def java_of(folder: Path) -> list[list[str]]:
    """The command lines of all that runs for a folder."""
    properties = str(folder.resolve() / "server.properties")
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if properties in line]


def clawstream(*arguments: str) -> list[str]:
    group, *rest = arguments
    code = f"from streams.cli.{group} import app; app(prog_name='clawstream {group}')"
    return [sys.executable, "-c", code, *rest]


def test_the_suites_broker_answers(kafka_bootstrap: str) -> None:
    assert answers(kafka_bootstrap, timeout_s=DEADLINE_S)


def test_a_node_is_found_again_and_keeps_topics_and_address(folder: Path) -> None:
    steps: list[str] = []
    with ThreadPoolExecutor() as pool:
        running, other = pool.map(lambda _: start_kafka(folder, on_step=steps.append), range(2))
    assert running == other == kafka_status(folder)
    assert len(java_of(folder)) == 1
    assert len([step for step in steps if "starting Kafka at" in step]) == 1
    assert "ünï" in str(running.data_dir)
    assert_listens_on_loopback_only(running)
    create_topics(running.bootstrap_servers, {"kept": (3, {})})

    assert start_kafka(folder) == running
    with pytest.raises(BrokerError, match=f"already runs at {running.bootstrap_servers}"):
        start_kafka(folder, port=1)

    os.kill(running.pid, signal.SIGKILL)
    wait_for(lambda: kafka_status(folder) is None, "the end of the node")
    assert stop_kafka(folder) is False

    restarted = start_kafka(folder)
    assert restarted.bootstrap_servers == running.bootstrap_servers
    assert restarted.pid != running.pid
    described = Admin(KafkaSettings(), restarted.bootstrap_servers).describe(("kept", "other"))
    assert described.keys() == {"kept"}
    assert described["kept"].partitions == 3

    assert stop_kafka(folder) is True
    assert java_of(folder) == []
    assert not answers(running.bootstrap_servers, timeout_s=0.5)
    assert stop_kafka(folder) is False


def assert_listens_on_loopback_only(running: RunningKafka) -> None:
    listening = [
        connection.laddr.ip
        for connection in psutil.Process(running.pid).net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) == 2
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}


def test_a_taken_port_is_named(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BrokerError, match=f"port {port} is taken"):
            start_kafka(folder, port=port)
    assert java_of(folder) == []


def test_a_frozen_node_is_killed_and_a_damaged_folder_shows_the_end_of_the_log(
    folder: Path,
) -> None:
    running = start_kafka(folder)
    os.kill(running.pid, signal.SIGSTOP)
    assert stop_kafka(folder, timeout_s=0.2) is True
    assert java_of(folder) == []

    meta = folder / "data" / "meta.properties"
    meta.write_text(meta.read_text().replace("node.id=1", "node.id=7"))
    with pytest.raises(BrokerError, match=r"ended while it was starting(?s:.*)Stored node id 7"):
        start_kafka(folder)
    assert java_of(folder) == []
    assert kafka_status(folder) is None


def test_a_node_that_is_too_slow_is_ended(folder: Path) -> None:
    with pytest.raises(BrokerError, match=r"did not answer at .* within 0\.1 s"):
        start_kafka(folder, timeout_s=0.1)
    assert java_of(folder) == []


@pytest.mark.parametrize(
    ("number", "phase"),
    [
        (signal.SIGINT, "kafka.tools.StorageTool"),
        (signal.SIGINT, "kafka.Kafka"),
        (signal.SIGTERM, "kafka.tools.StorageTool"),
        (signal.SIGTERM, "kafka.Kafka"),
        (signal.SIGHUP, "kafka.Kafka"),
    ],
)
def test_an_interrupted_up_leaves_nothing_running(
    folder: Path, number: signal.Signals, phase: str
) -> None:
    command = clawstream("kafka", "up", "--data-dir", str(folder))
    # As a terminal starts it: a suite that runs in the background hands an ignored SIGINT down.
    up = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_for(lambda: phase in {word for words in java_of(folder) for word in words}, phase)
    up.send_signal(number)
    up.communicate(timeout=DEADLINE_S)
    assert up.returncode > 0
    assert java_of(folder) == []


def test_the_commands_start_show_fill_and_stop_a_node(tmp_path: Path) -> None:
    environ = os.environ | {"CLAWSTREAM_DATA_DIR": str(tmp_path)}

    def run(*arguments: str, expect: int = 0) -> Any:
        command = [*clawstream(*arguments), "--json"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == expect, done.stderr
        return json.loads(done.stdout)

    folder = embedded_dir(tmp_path)
    settings = Settings(data_dir=tmp_path)
    try:
        assert run("kafka", "status", expect=3)["running"] is False
        shown = run("kafka", "up")
        assert shown["answering"] is True
        # Its own session: no terminal that closes takes it along.
        assert os.getsid(shown["pid"]) == shown["pid"]
        assert resolve_bootstrap(settings) == shown["bootstrap_servers"]
        assert Path(shown["log_file"]).stat().st_size > 0
        assert run("kafka", "status")["pid"] == shown["pid"]

        planned = run("topics", "plan")
        assert planned["applied"] is False
        assert {change["kind"] for change in planned["changes"]} == {"create"}
        assert run("topics", "apply")["changes"] == planned["changes"]
        assert run("topics", "plan")["changes"] == []

        assert run("kafka", "down")["stopped"] is True
        assert run("kafka", "down")["stopped"] is False
    finally:
        stop_kafka(folder)


def test_a_record_of_the_largest_size_goes_through(
    kafka_bootstrap: str, unique_name: Callable[[str], str]
) -> None:
    settings = KafkaSettings()
    name = unique_name("large")
    create_topics(
        kafka_bootstrap, {name: (1, {"max.message.bytes": str(settings.max_message_bytes)})}
    )
    value = os.urandom(settings.max_message_bytes - 1024)
    producer = make_producer(settings, kafka_bootstrap)
    producer.produce(name, value)
    assert producer.flush(DEADLINE_S) == 0
    consumer = make_consumer(settings, kafka_bootstrap, group=unique_name("group"))
    try:
        consumer.subscribe([name])
        message = consumer.poll(DEADLINE_S)
        assert message is not None
        assert message.error() is None
        assert message.value() == value
    finally:
        consumer.close()


SASL = KafkaSettings(
    security_protocol="SASL_PLAINTEXT",
    sasl_mechanism="PLAIN",
    sasl_username="nobody",
    sasl_password="wrong",  # type: ignore[arg-type]
)


def _produce(address: str) -> None:
    producer = make_producer(SASL, address)
    producer.produce("any", b"value")
    producer.flush(DEADLINE_S)


def _consume(address: str) -> None:
    consumer = make_consumer(SASL, address, group="any")
    try:
        consumer.subscribe(["any"])
        consumer.poll(DEADLINE_S)
    finally:
        consumer.close()


def _describe(address: str) -> None:
    Admin(SASL, address).describe(("any",))


@pytest.mark.parametrize("use", [_produce, _consume, _describe])
def test_refused_credentials_are_named_by_every_client(
    kafka_bootstrap: str, use: Callable[[str], None]
) -> None:
    with pytest.raises(BrokerError, match=r"check kafka\.sasl_mechanism"):
        use(kafka_bootstrap)


def test_nobody_home_is_an_error_of_ours() -> None:
    with pytest.raises(BrokerError, match="check the address and that Kafka runs"):
        Admin(KafkaSettings(), "127.0.0.1:1", timeout_s=1.0).describe(("any",))
