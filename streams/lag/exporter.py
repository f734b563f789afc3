"""Lag for Prometheus, under the names that dashboards for Kafka already use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from streams.errors import BrokerError
from streams.lag.burrow import State
from streams.lag.watch import LagStatus
from streams.metrics import listen

GROUP_LABELS = ("consumergroup", "stage", "topic", "partition")
TOPIC_LABELS = ("topic", "partition")

LAG = "kafka_consumergroup_lag"
CURRENT = "kafka_consumergroup_current_offset"
END = "kafka_topic_partition_current_offset"
LAG_SECONDS = "kafka_consumergroup_lag_seconds"
EVENT_TIME_LAG = "clawstream_consumergroup_event_time_lag_seconds"
STATE = "clawstream_consumergroup_state"
UP = "clawstream_lag_exporter_up"


class LagCollector(Collector):
    """Shows the latest statuses as gauges.

    Lag and offsets have the names of the widely used kafka_exporter; ``…_state`` is 1 for the
    state that a partition is in and 0 for all others.
    """

    def __init__(self) -> None:
        self._statuses: Sequence[LagStatus] = ()
        self._up = False

    def show(self, statuses: Sequence[LagStatus] | None) -> None:
        """Take new statuses; None if Kafka did not answer, which keeps none."""
        self._statuses = statuses or ()
        self._up = statuses is not None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """For prometheus_client."""
        up = GaugeMetricFamily(UP, "Whether Kafka answered the exporter's last look.")
        up.add_metric((), float(self._up))
        yield up
        yield self._of_groups(LAG, "Records not read.", lambda s: s.lag.lag)
        yield self._of_groups(CURRENT, "Next offset to read.", lambda s: s.lag.current)
        yield self._of_groups(
            LAG_SECONDS,
            "How long ago the oldest unread record arrived; 0 without one.",
            lambda s: s.time_lag_s,
        )
        yield self._of_groups(
            EVENT_TIME_LAG,
            "How long ago what the oldest unread record tells of happened; 0 without one.",
            lambda s: s.event_time_lag_s,
        )
        yield self._ends()
        yield self._states()

    def _of_groups(
        self, name: str, text: str, value: Callable[[LagStatus], float | None]
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=GROUP_LABELS)
        for status in self._statuses:
            found = value(status)
            if found is not None:
                family.add_metric(_labels(status), found)
        return family

    def _ends(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily(END, "Offset behind the newest record.", labels=TOPIC_LABELS)
        ends = {(s.lag.topic, str(s.lag.partition)): s.lag.end for s in self._statuses}
        for place, end in ends.items():
            family.add_metric(place, end)
        return family

    def _states(self) -> GaugeMetricFamily:
        text = "1 for the state that the partition is in by Burrow's rules."
        family = GaugeMetricFamily(STATE, text, labels=(*GROUP_LABELS, "state"))
        for status in self._statuses:
            for state in State:
                family.add_metric((*_labels(status), state.value), float(status.state is state))
        return family


def _labels(status: LagStatus) -> tuple[str, ...]:
    lag = status.lag
    return (lag.group, lag.stage, lag.topic, str(lag.partition))


def serve(
    take: Callable[[], list[LagStatus]],
    host: str,
    port: int,
    interval_s: float,
    stop: threading.Event,
    on_error: Callable[[BrokerError], None],
    on_ready: Callable[[int], None],
) -> None:
    """Answer ``/metrics`` until told to stop. Blocks.

    Kafka that does not answer is shown by ``clawstream_lag_exporter_up`` and tried again.

    Args:
        take: Looks once more (``Watch.take``).
        host: Where to listen.
        port: Where to listen; 0 takes a free one.
        interval_s: Between two looks.
        stop: Ends it.
        on_error: Told each time Kafka does not answer.
        on_ready: Told the port once ``/metrics`` can be asked.

    Raises:
        SettingsError: The port is taken.
    """
    collector = LagCollector()
    registry = CollectorRegistry()
    registry.register(collector)
    server = listen(registry, host, port, key="--listen")
    try:
        on_ready(int(server.server_port))
        while not stop.is_set():
            try:
                collector.show(take())
            except BrokerError as error:
                collector.show(None)
                on_error(error)
            stop.wait(interval_s)
    finally:
        server.shutdown()
        server.server_close()


__all__ = ["LagCollector", "serve"]
