"""Where the judge shows its metrics."""

from __future__ import annotations

import socket
import urllib.request

import pytest

from processors.reward.judge.__main__ import show_metrics
from streams import metrics as names
from streams.errors import SettingsError
from streams.metrics import ProcessorMetrics
from streams.ports import free_ports
from streams.settings import JudgeSettings, Settings


def settings_with(port: int) -> Settings:
    return Settings(judge=JudgeSettings(url="http://judge/v1", web_port=port))


def test_metrics_are_where_the_workers_pages_are() -> None:
    metrics, (port,) = ProcessorMetrics("judge"), free_ports(1)
    metrics.add(names.JUDGEMENTS, outcome="good")
    server = show_metrics(settings_with(port), metrics)
    assert server is not None
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            assert b"clawstream_judgements_total" in page.read()
        # On that address alone: another one of this machine is free.
        with socket.socket() as other:
            other.bind(("127.0.0.2", port))
    finally:
        server.shutdown()
        server.server_close()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"judge\.web_port: .*127\.0\.0\.1:{port}"):
            show_metrics(settings_with(port), ProcessorMetrics("judge"))


def test_there_need_be_none() -> None:
    assert show_metrics(settings_with(0), ProcessorMetrics("judge")) is None
