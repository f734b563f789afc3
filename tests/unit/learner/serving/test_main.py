from __future__ import annotations

import json
import socket
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from learner.model import BaseModel
from learner.serving.__main__ import _listen, _ready, _watch
from learner.serving.metrics import ServeMetrics
from streams.errors import ServingError
from streams.settings import KafkaSettings, ServeSettings, Settings
from tests.unit.learner.serving.harness import make_table


def test_port_0_is_a_free_one_and_the_first_line_names_it(base: BaseModel) -> None:
    with closing(_listen("127.0.0.1", 0)) as listener:
        line = json.loads(_ready(listener, base, make_table(base), None))
        with closing(socket.create_connection((line["host"], line["port"]))):
            pass
    assert line == {
        "event": "ready",
        "url": f"http://127.0.0.1:{line['port']}",
        "host": "127.0.0.1",
        "port": line["port"],
        "model": "tiny-random",
        "policy": "default",
        "live_version": 0,
        "watching": False,
    }


def test_a_port_that_is_taken_is_reported() -> None:
    with closing(_listen("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ServingError, match=f"cannot listen on 127.0.0.1:{port}"):
            _listen("127.0.0.1", port)


def test_without_kafka_the_base_is_served_and_it_is_said(
    base: BaseModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table, metrics = make_table(base), ServeMetrics(CollectorRegistry())
    assert _watch(Settings(data_dir=tmp_path), base, table, metrics) is None
    assert "serving the base model" in caplog.text


def test_a_broker_that_does_not_answer_delays_the_start_for_a_while_only(
    base: BaseModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(
        data_dir=tmp_path,
        kafka=KafkaSettings(bootstrap_servers="127.0.0.1:1"),
        serve=ServeSettings(startup_wait_ms=100),
    )
    watcher = _watch(settings, base, make_table(base), ServeMetrics(CollectorRegistry()))
    assert watcher is not None
    try:
        assert not watcher.connected
        assert "serving version 0" in caplog.text
    finally:
        watcher.stop()
