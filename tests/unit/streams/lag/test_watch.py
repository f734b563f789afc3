"""What a watch keeps between looks, and what the exporter shows of it."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from streams.errors import BrokerError
from streams.lag.burrow import State
from streams.lag.exporter import LagCollector, serve
from streams.lag.groups import PartitionLag
from streams.lag.watch import LagStatus, Watch


def lag(current: int, end: int, partition: int = 0, stage: str = "align") -> PartitionLag:
    waits = end > current
    return PartitionLag(
        stage, "t", partition, current, end, end - current, f"group-{stage}",
        98_000 if waits else None, 90_000 if waits else None,
    )  # fmt: skip


def watch_of(*takes: list[PartitionLag], window: int = 10) -> Watch:
    left, seconds = iter(takes), iter(range(100))
    return Watch(
        lambda: next(left),
        lambda: {"align": 1},
        window=window,
        monotonic_s=lambda: float(next(seconds)),
        now_s=lambda: 100.0,
    )


def test_rates_and_ages_are_those_of_the_window() -> None:
    watch = watch_of([lag(0, 10)], [lag(10, 40)], [lag(40, 50)])
    (first,) = watch.take()
    assert (first.read_per_s, first.written_per_s, first.state) == (None, None, State.UNKNOWN)
    watch.take()
    (third,) = watch.take()
    assert (third.read_per_s, third.written_per_s) == (20.0, 20.0)
    assert (third.time_lag_s, third.event_time_lag_s) == (2.0, 10.0)


def test_old_looks_are_forgotten() -> None:
    watch = watch_of([lag(0, 10)], [lag(90, 100)], [lag(91, 102)], window=2)
    for _ in range(2):
        watch.take()
    (third,) = watch.take()
    assert (third.read_per_s, third.state) == (1.0, State.WARN)


def test_nothing_unread_is_no_age() -> None:
    (status,) = watch_of([lag(10, 10)]).take()
    assert (status.time_lag_s, status.event_time_lag_s, status.state) == (0.0, 0.0, State.OK)


def test_partitions_do_not_mix_and_one_that_is_gone_is_forgotten() -> None:
    watch = watch_of([lag(0, 9), lag(5, 9, 1)], [lag(5, 9, 1)], [lag(0, 9), lag(9, 9, 1)])
    watch.take()
    (one,) = watch.take()
    assert one.state is State.STALL
    zero, one = watch.take()
    assert (zero.state, one.state) == (State.UNKNOWN, State.OK)


def test_a_stage_that_commits_nothing_is_not_judged() -> None:
    (status,) = watch_of([lag(0, 9, stage="learn")]).take()
    assert (status.state, "not committed" in status.reason) == (State.UNKNOWN, True)


@pytest.fixture
def exported() -> Iterator[tuple[LagCollector, CollectorRegistry]]:
    collector, registry = LagCollector(), CollectorRegistry()
    registry.register(collector)
    yield collector, registry
    registry.unregister(collector)


LABELS = {"consumergroup": "group-align", "stage": "align", "topic": "t", "partition": "0"}


def test_the_exporter_shows_the_latest_look(
    exported: tuple[LagCollector, CollectorRegistry],
) -> None:
    collector, registry = exported
    watch = watch_of([lag(4, 9)], [lag(4, 9)])
    watch.take()
    collector.show(watch.take())
    value = registry.get_sample_value
    assert value("kafka_consumergroup_lag", LABELS) == 5
    assert value("kafka_consumergroup_current_offset", LABELS) == 4
    assert value("kafka_consumergroup_lag_seconds", LABELS) == 2.0
    assert value("clawstream_consumergroup_event_time_lag_seconds", LABELS) == 10.0
    topic = {"topic": "t", "partition": "0"}
    assert value("kafka_topic_partition_current_offset", topic) == 9
    states = {
        state: value("clawstream_consumergroup_state", LABELS | {"state": state.value})
        for state in State
    }
    assert states == {state: float(state is State.STALL) for state in State}
    assert value("clawstream_lag_exporter_up") == 1.0


def test_what_was_seen_before_kafka_went_away_is_not_shown_as_if_it_were_now(
    exported: tuple[LagCollector, CollectorRegistry],
) -> None:
    collector, registry = exported
    collector.show(watch_of([lag(4, 9)]).take())
    collector.show(None)
    assert registry.get_sample_value("clawstream_lag_exporter_up") == 0.0
    assert b"kafka_consumergroup_lag{" not in generate_latest(registry)


def test_it_is_served_and_outlives_a_broker_that_does_not_answer() -> None:
    stop = threading.Event()
    pages: list[str] = []
    errors: list[BrokerError] = []
    at: list[int] = []

    def take() -> list[LagStatus]:
        pages.append(urllib.request.urlopen(f"http://127.0.0.1:{at[0]}/metrics").read().decode())
        if len(pages) == 1:
            raise BrokerError("no Kafka")
        if len(pages) == 3:
            stop.set()
        return watch_of([lag(4, 9)]).take()

    serve(take, "127.0.0.1", 0, 0.0, stop, errors.append, at.append)
    assert [str(error) for error in errors] == ["no Kafka"]
    assert ["kafka_consumergroup_lag{" in page for page in pages] == [False, False, True]
