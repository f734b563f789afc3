from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from streams import metrics as names
from streams.metrics import ALL, Metric, ProcessorMetrics


def test_every_metric_of_the_module_is_listed_once_and_explained() -> None:
    defined = [value for value in vars(names).values() if isinstance(value, Metric)]
    assert sorted(m.name for m in ALL) == sorted({m.name for m in defined})
    for metric in ALL:
        assert metric.name.startswith("clawstream_")
        assert metric.help.endswith(".")
        assert metric.labels[0] == "processor"
        assert bool(metric.buckets) == (metric.kind == "histogram")


def test_two_processors_in_one_process_do_not_meet() -> None:
    first, second = ProcessorMetrics("one"), ProcessorMetrics("two")
    first.add(names.DUPLICATES, 3)
    assert first.value(names.DUPLICATES) == 3
    assert second.value(names.DUPLICATES) == 0


def test_what_is_exposed_reads_as_documented() -> None:
    metrics = ProcessorMetrics("p")
    metrics.add(names.RECORDS_IN, 5, topic="t")
    metrics.observe(names.BATCH_RECORDS, 7)
    metrics.set(names.PARTITION_LAG, 2, topic="t", partition="0")
    text = generate_latest(metrics.registry).decode()
    assert 'clawstream_records_in_total{processor="p",topic="t"} 5.0' in text
    assert 'clawstream_batch_records_bucket{le="10.0",processor="p"} 1.0' in text
    assert 'clawstream_partition_lag_records{partition="0",processor="p",topic="t"} 2.0' in text


def test_a_label_too_few_is_an_error() -> None:
    with pytest.raises(ValueError, match="Incorrect label names"):
        ProcessorMetrics("p").add(names.RECORDS_IN)


def test_a_partition_that_left_shows_nothing() -> None:
    metrics = ProcessorMetrics("p")
    for partition in ("0", "1"):
        metrics.set(names.PARTITION_LAG, 2, topic="t", partition=partition)
        metrics.set(names.STATE_ENTRIES, 2, partition=partition)
    metrics.forget_partition(0, ("t",))
    text = generate_latest(metrics.registry).decode()
    assert 'partition="0"' not in text
    assert 'clawstream_state_entries{partition="1",processor="p"} 2.0' in text
