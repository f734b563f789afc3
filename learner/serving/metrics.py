"""What the policy server counts; every name, with its meaning."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64)


class ServeMetrics:
    """The policy server's metrics, in a registry of the caller's.

    Args:
        registry: Where they are registered; one registry holds one server's metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "clawstream_serve_requests",
            "Requests that ended, by finish reason (stop, length, cancelled, error, refused)",
            ["outcome"],
            registry=registry,
        )
        self.tokens = Counter(
            "clawstream_serve_tokens",
            "Tokens, by kind (prompt, completion)",
            ["kind"],
            registry=registry,
        )
        self.waiting = Gauge(
            "clawstream_serve_waiting_requests",
            "Requests that wait for a row of the batch",
            registry=registry,
        )
        self.running = Gauge(
            "clawstream_serve_running_requests",
            "Requests that hold a row of the batch",
            registry=registry,
        )
        self.batch_rows = Histogram(
            "clawstream_serve_batch_rows",
            "Rows of one decoding step",
            buckets=_ROWS,
            registry=registry,
        )
        self.first_token_seconds = Histogram(
            "clawstream_serve_first_token_seconds",
            "From a request's admission to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.live_version = Gauge(
            "clawstream_serve_live_version",
            "The version that the alias 'live' names; 0 is the base",
            registry=registry,
        )
        self.loaded_versions = Gauge(
            "clawstream_serve_loaded_versions",
            "Adapters in memory, the base not counted",
            registry=registry,
        )
        self.load_seconds = Histogram(
            "clawstream_serve_adapter_load_seconds",
            "Time to verify and load an adapter, beside running requests",
            buckets=_SECONDS,
            registry=registry,
        )
        self.swaps = Counter(
            "clawstream_serve_swaps",
            "Moves of the alias 'live', by outcome (moved, failed)",
            ["outcome"],
            registry=registry,
        )
        self.watch_errors = Counter(
            "clawstream_serve_watch_errors",
            "Errors while reading model.versions, by kind (record, broker)",
            ["kind"],
            registry=registry,
        )
