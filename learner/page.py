"""The newest version's metrics as a page for Prometheus.

One gauge for each metric of ``learner.ppo.diagnostics``, named ``clawstream_learner_`` and the
metric's name, and ``clawstream_learner_version``. They stand still between two versions, and after
a restart show the newest version that there was.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from learner.ppo.diagnostics import METRICS
from streams.contracts import ModelVersion
from streams.metrics import listen

PREFIX = "clawstream_learner_"
VERSION = PREFIX + "version"
LABELS = ("policy",)


def gauge_name(metric: str) -> str:
    """What a metric is called on the page."""
    return PREFIX + re.sub(r"[^a-z0-9]+", "_", metric.lower())


class MetricsPage(Collector):
    """A tracker (``learner.trackers.Trackers``) that Prometheus reads.

    Args:
        host: Where it listens.
        port: Where it listens.
        newest: The version that is shown at first; None if there is none.

    Raises:
        SettingsError: The port cannot be had.
    """

    def __init__(self, host: str, port: int, newest: ModelVersion | None) -> None:
        self._version = newest
        registry = CollectorRegistry()
        registry.register(self)
        self._server = listen(registry, host, port, key="learner.web_port")

    def log(self, version: ModelVersion) -> None:
        """Show this version from now on."""
        self._version = version

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The gauges."""
        version = self._version
        if version is None:
            return
        where = (version.policy,)
        shown = GaugeMetricFamily(VERSION, "The newest version.", labels=LABELS)
        shown.add_metric(where, version.version)
        yield shown
        for name, value in sorted(version.metrics.items()):
            gauge = GaugeMetricFamily(gauge_name(name), METRICS.get(name, name), labels=LABELS)
            gauge.add_metric(where, value)
            yield gauge


__all__ = ["LABELS", "PREFIX", "VERSION", "MetricsPage", "gauge_name"]
