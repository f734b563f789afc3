"""Every metric of the stream processors: its name, labels and meaning, in one place.

A process builds its metrics over a registry it is given, so that tests and several workers
in one process do not meet. Counters end in ``_total`` where they are exposed. The table in
``docs/metrics.md`` is made of the definitions here.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Literal
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from streams.errors import SettingsError

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name, kind, labels and what it says."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


_SIZES = (1.0, 10.0, 50.0, 100.0, 250.0, 500.0, 1_000.0, 2_000.0, 5_000.0, 10_000.0)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

RECORDS_IN = Metric(
    "clawstream_records_in", "counter", ("processor", "topic"),
    "Records consumed, ticks included.",
)  # fmt: skip
RECORDS_OUT = Metric(
    "clawstream_records_out", "counter", ("processor", "topic"),
    "Records produced and committed.",
)  # fmt: skip
TICKS = Metric(
    "clawstream_ticks", "counter", ("processor",),
    "Clock ticks this worker produced, counted once for all input topics.",
)  # fmt: skip
DEAD_LETTERS = Metric(
    "clawstream_dead_letters", "counter", ("processor", "reason"),
    "Records that went to pipeline.dead_letters.",
)  # fmt: skip
MISPLACED = Metric(
    "clawstream_misplaced", "counter", ("processor", "topic"),
    "Records found on another partition than their key's and published again.",
)  # fmt: skip
DUPLICATES = Metric(
    "clawstream_duplicates", "counter", ("processor",),
    "Events dropped because an equal event is held.",
)  # fmt: skip
LATE = Metric(
    "clawstream_late", "counter", ("processor", "topic"),
    "Events that arrived for a segment already closed; a revision takes them in.",
)  # fmt: skip
HELD_BACK = Metric(
    "clawstream_held_back", "counter", ("processor",),
    "Events too young for a segment or revision when it closed; they enter a later one.",
)  # fmt: skip
SEGMENTS = Metric(
    "clawstream_segments", "counter", ("processor", "closed_by"),
    "Segments closed (revision 0).",
)  # fmt: skip
REVISIONS = Metric(
    "clawstream_revisions", "counter", ("processor",),
    "Segments emitted again because of what came late.",
)  # fmt: skip
SCORED = Metric(
    "clawstream_scored", "counter", ("processor", "trainable"),
    "Segments scored, by whether they can be trained on.",
)  # fmt: skip
NONZERO = Metric(
    "clawstream_nonzero_rewards", "counter", ("processor",),
    "Segments with at least one reward that is not 0.",
)  # fmt: skip
NONZERO_ALARMS = Metric(
    "clawstream_nonzero_alarms", "counter", ("processor",),
    "Times the share of segments with a reward that is not 0 fell below "
    "`reward.nonzero_share_alarm` (5%), in the last 1,000 of a partition.",
)  # fmt: skip
REVIEWS = Metric(
    "clawstream_reviews", "counter", ("processor",),
    "Feedback sent to people for review.",
)  # fmt: skip
RATINGS = Metric(
    "clawstream_ratings", "counter", ("processor", "policy", "sign", "verified"),
    "New thumbs and ratings as they were given, before any filter; verified: from one of "
    "`reward.verified_sources`, where any are named.",
)  # fmt: skip
HELD_RATINGS = Metric(
    "clawstream_held_ratings", "counter", ("processor", "filter"),
    "New ratings that a filter made count less, or nothing.",
)  # fmt: skip
HELD_CLAIMS = Metric(
    "clawstream_held_claims", "counter", ("processor", "filter", "kind"),
    "New events, signals that a front end sent and outcomes that a filter holds.",
)  # fmt: skip
COHORT_ALARMS = Metric(
    "clawstream_cohort_alarms", "counter", ("processor", "policy"),
    "Times many raters of a policy turned negative together: look at the policy, not at them.",
)  # fmt: skip
PLUGIN_ERRORS = Metric(
    "clawstream_plugin_errors", "counter", ("processor", "plugin"),
    "Segments at which a plugin failed; they were scored without its part.",
)  # fmt: skip
JUDGEMENTS = Metric(
    "clawstream_judgements", "counter", ("processor", "outcome"),
    "Replies judged: good, bad, tie, failed (no verdict) or cached (judged before).",
)  # fmt: skip
JUDGE_LATE = Metric(
    "clawstream_judge_late_segments", "counter", ("processor",),
    "Segments that were not judged: they closed more than `align.horizon_ms` ago.",
)  # fmt: skip
JUDGE_BREAKER = Metric(
    "clawstream_judge_breaker_open", "gauge", ("processor",),
    "1 while the judge is left alone after failures in a row.",
)  # fmt: skip
JUDGE_AGREEMENT = Metric(
    "clawstream_judge_agreement", "counter", ("processor", "explicit", "judged"),
    "Steps scored that have both a rating and a verdict, by the sign of each; a revision counts "
    "again. `clawstream calibration` counts each once.",
)  # fmt: skip
BATCH_RECORDS = Metric(
    "clawstream_batch_records", "histogram", ("processor",),
    "Records applied by one transaction.", _SIZES,
)  # fmt: skip
TRANSACTION_SECONDS = Metric(
    "clawstream_transaction_seconds", "histogram", ("processor",),
    "From the first record of a transaction sent to its commit confirmed.", _SECONDS,
)  # fmt: skip
LAST_TRANSACTION_SECONDS = Metric(
    "clawstream_last_transaction_seconds", "gauge", ("processor", "partition"),
    "The same of the latest transaction of a partition.",
)  # fmt: skip
CLOSING_DELAY = Metric(
    "clawstream_closing_delay_seconds", "histogram", ("processor",),
    "From a segment or revision due (its closed_at) to its transaction confirmed.", _SECONDS,
)  # fmt: skip
RESTORE_SECONDS = Metric(
    "clawstream_restore_seconds", "histogram", ("processor",),
    "From a partition assigned to its state restored.", _SECONDS,
)  # fmt: skip
STATE_ENTRIES = Metric(
    "clawstream_state_entries", "gauge", ("processor", "partition"),
    "Entries in a partition's state.",
)  # fmt: skip
STATE_BYTES = Metric(
    "clawstream_state_bytes", "gauge", ("processor", "partition"),
    "Bytes of a partition's state in its changelog: values, and of the reward its keys too.",
)  # fmt: skip
SESSIONS = Metric(
    "clawstream_sessions", "gauge", ("processor", "partition"),
    "Sessions (reward: users) in a partition's state, closed ones within their horizon too.",
)  # fmt: skip
OPEN_SESSIONS = Metric(
    "clawstream_open_sessions", "gauge", ("processor", "partition"),
    "Sessions in which something is open or waits for a revision.",
)  # fmt: skip
OLDEST_OPEN_SECONDS = Metric(
    "clawstream_oldest_open_session_seconds", "gauge", ("processor", "partition"),
    "How long ago the first of what is open in any session arrived; 0 if nothing is open.",
)  # fmt: skip
PARTITION_CLOCK = Metric(
    "clawstream_partition_clock_seconds", "gauge", ("processor", "partition"),
    "The partition's clock: the arrival up to which its log was applied (reward: the latest "
    "closing seen), Unix seconds.",
)  # fmt: skip
EVENT_TIME_LAG = Metric(
    "clawstream_event_time_lag_seconds", "gauge", ("processor", "partition"),
    "Now minus the partition's clock. Where nothing arrives and nothing is due the clock "
    "stands, and this grows without harm.",
)  # fmt: skip
OVERDUE = Metric(
    "clawstream_overdue_seconds", "gauge", ("processor", "partition"),
    "Now minus the time at which the next action (a closing, a revision) is due, 0 if that is "
    "yet to come: how late segments are.",
)  # fmt: skip
PARTITION_LAG = Metric(
    "clawstream_partition_lag_records", "gauge", ("processor", "topic", "partition"),
    "Records of an input partition not applied yet.",
)  # fmt: skip
BUFFERED_RECORDS = Metric(
    "clawstream_buffered_records", "gauge", ("processor", "topic", "partition"),
    "Records read that wait for the other input topic.",
)  # fmt: skip

ALL: tuple[Metric, ...] = (
    RECORDS_IN,
    RECORDS_OUT,
    TICKS,
    DEAD_LETTERS,
    MISPLACED,
    DUPLICATES,
    LATE,
    HELD_BACK,
    SEGMENTS,
    REVISIONS,
    SCORED,
    NONZERO,
    NONZERO_ALARMS,
    REVIEWS,
    RATINGS,
    HELD_RATINGS,
    HELD_CLAIMS,
    COHORT_ALARMS,
    PLUGIN_ERRORS,
    JUDGEMENTS,
    JUDGE_LATE,
    JUDGE_BREAKER,
    JUDGE_AGREEMENT,
    BATCH_RECORDS,
    TRANSACTION_SECONDS,
    LAST_TRANSACTION_SECONDS,
    CLOSING_DELAY,
    RESTORE_SECONDS,
    STATE_ENTRIES,
    STATE_BYTES,
    SESSIONS,
    OPEN_SESSIONS,
    OLDEST_OPEN_SECONDS,
    PARTITION_CLOCK,
    EVENT_TIME_LAG,
    OVERDUE,
    PARTITION_LAG,
    BUFFERED_RECORDS,
)


def render_table() -> str:
    """All metrics as a Markdown table, under the names that ``/metrics`` shows."""
    rows = [f"| {_exposed(m)} | {m.kind} | {_labels(m)} | {m.help} |" for m in ALL]
    return "\n".join(["| name | kind | labels | what it says |", "|---|---|---|---|", *rows]) + "\n"


def _exposed(metric: Metric) -> str:
    return f"`{metric.name}_total`" if metric.kind == "counter" else f"`{metric.name}`"


def _labels(metric: Metric) -> str:
    return ", ".join(label for label in metric.labels if label != "processor")


def listen(registry: CollectorRegistry, host: str, port: int, *, key: str) -> WSGIServer:
    """Answer at ``/metrics`` in a thread that ends with the process.

    Args:
        registry: What is shown.
        host: Where.
        port: Where.
        key: The setting that the port is from.

    Raises:
        SettingsError: The port cannot be had.
    """
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise SettingsError(
            f"{key}: cannot listen on {host}:{port}: {error.strerror}; name another port"
        ) from error
    return server


class ProcessorMetrics:
    """The metrics of one processor over one registry.

    Args:
        processor: The value of the ``processor`` label, for example ``feedback_align``.
        registry: Where they are registered; a new one if None.
    """

    def __init__(self, processor: str, registry: CollectorRegistry | None = None) -> None:
        self.processor = processor
        self.registry = CollectorRegistry() if registry is None else registry
        self._counters = {m.name: self._counter(m) for m in ALL if m.kind == "counter"}
        self._gauges = {m.name: self._gauge(m) for m in ALL if m.kind == "gauge"}
        self._histograms = {m.name: self._histogram(m) for m in ALL if m.kind == "histogram"}
        # Counters are never taken back, and finding one by its labels costs more than counting.
        self._counted: dict[tuple[object, ...], Counter] = {}

    def add(self, metric: Metric, amount: float = 1, **labels: str) -> None:
        """Count ``amount`` more."""
        place = (metric.name, *labels.items())
        try:
            counter = self._counted[place]
        except KeyError:
            counter = self._counters[metric.name].labels(processor=self.processor, **labels)
            self._counted[place] = counter
        counter.inc(amount)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Show ``value`` now."""
        self._gauges[metric.name].labels(processor=self.processor, **labels).set(value)

    def observe(self, metric: Metric, value: float) -> None:
        """Enter ``value`` into a distribution."""
        self._histograms[metric.name].labels(processor=self.processor).observe(value)

    def forget_partition(self, partition: int, topics: tuple[str, ...]) -> None:
        """Show nothing more of a partition that another worker owns now."""
        for metric in ALL:
            if metric.kind == "gauge":
                by_topic = "topic" in metric.labels
                for topic in topics if by_topic else ("",):
                    self._forget(metric, topic, str(partition))

    def _forget(self, metric: Metric, topic: str, partition: str) -> None:
        values = {"processor": self.processor, "topic": topic, "partition": partition}
        # It may never have been shown.
        with suppress(KeyError):
            self._gauges[metric.name].remove(*(values[label] for label in metric.labels))

    def value(self, metric: Metric, **labels: str) -> float:
        """What a counter or gauge shows; 0 if it was never touched."""
        return self.shown(metric, **labels) or 0.0

    def shown(self, metric: Metric, **labels: str) -> float | None:
        """What a counter or gauge shows; None if it was never touched."""
        suffix = "_total" if metric.kind == "counter" else ""
        return self.registry.get_sample_value(
            metric.name + suffix, {"processor": self.processor, **labels}
        )

    def _counter(self, metric: Metric) -> Counter:
        return Counter(metric.name, metric.help, metric.labels, registry=self.registry)

    def _gauge(self, metric: Metric) -> Gauge:
        return Gauge(metric.name, metric.help, metric.labels, registry=self.registry)

    def _histogram(self, metric: Metric) -> Histogram:
        return Histogram(
            metric.name,
            metric.help,
            metric.labels,
            registry=self.registry,
            buckets=metric.buckets,
        )
