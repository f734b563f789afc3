"""The learner's page for Prometheus."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from learner.loop import make_trackers
from learner.page import MetricsPage, gauge_name
from learner.ppo.diagnostics import METRICS
from learner.trackers import Several
from streams.contracts import ModelVersion
from streams.errors import SettingsError
from streams.ports import free_ports
from streams.settings import LearnerSettings, Settings
from tests.unit.streams.registry.builders import version


@contextmanager
def page(tmp_path: Path, newest: ModelVersion | None = None) -> Iterator[tuple[Several, int]]:
    (port,) = free_ports(1)
    learner = LearnerSettings(web_port=port, policy="npc")
    trackers = make_trackers(Settings(data_dir=tmp_path, learner=learner), newest)
    try:
        yield trackers, port
    finally:
        trackers.close()


def read(port: int) -> dict[str, tuple[dict[str, str], float]]:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    return {
        sample.name: (sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_page_shows_the_newest_version(tmp_path: Path) -> None:
    with page(tmp_path) as (trackers, port):
        assert read(port) == {}
        for number in (1, 2):
            metrics = {"rewards/mean": 0.25 * number, "charts/SPS": 7.0}
            trackers.log(version(number, metrics=metrics, policy="npc"))
        labels = {"policy": "npc"}
        assert read(port) == {
            "clawstream_learner_version": (labels, 2.0),
            "clawstream_learner_rewards_mean": (labels, 0.5),
            "clawstream_learner_charts_sps": (labels, 7.0),
        }
    with pytest.raises(httpx.ConnectError):
        read(port)


def test_after_a_restart_it_shows_what_there_was(tmp_path: Path) -> None:
    before = version(4, metrics={"kl/update_k3": 0.125}, policy="npc")
    with page(tmp_path, before) as (_, port):
        assert read(port)["clawstream_learner_kl_update_k3"][1] == 0.125


def test_a_port_that_is_taken_is_a_setting_that_cannot_be_used() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(SettingsError, match=r"learner\.web_port: .*127\.0\.0\.1:\d+: "):
            MetricsPage("127.0.0.1", other.getsockname()[1], None)


def test_no_two_metrics_have_one_name() -> None:
    assert len({gauge_name(name) for name in METRICS}) == len(METRICS)
