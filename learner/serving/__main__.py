"""``python -m learner.serving``: load the base, follow the versions, answer requests.

The first line on standard output is JSON, printed when requests are taken::

    {"event": "ready", "url": "http://127.0.0.1:8001", "host": ..., "port": ..., "model": ...,
     "policy": ..., "live_version": ..., "watching": ...}
"""

from __future__ import annotations

import logging
import math
import secrets
import socket
from collections.abc import Sequence
from contextlib import closing

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from learner.model import BaseModel, load_base
from learner.serving.adapters import AdapterTable
from learner.serving.api import Server, build_app
from learner.serving.engine import Engine
from learner.serving.metrics import ServeMetrics
from learner.serving.watcher import VersionWatcher, watching_consumer
from streams import topics
from streams.clock import SystemClock
from streams.errors import BrokerError, ClawstreamError, ServingError
from streams.kafka.clients import resolve_bootstrap
from streams.process import (
    argument_parser,
    command_line,
    configure_logging,
    ready_line,
    report,
    stop_at_signals,
)
from streams.serde import build_codec
from streams.settings import ServeSettings, Settings, load_settings

log = logging.getLogger("learner.serving")

_LAST_GRACE_MS = 1_000


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit status."""
    parser = argument_parser("serve", "Serve the policy over an OpenAI-compatible API.")
    parser.add_argument("--host", default=None, help="address to listen on")
    parser.add_argument("--port", type=int, default=None, help="port; 0 takes a free one")
    arguments = parser.parse_args(command_line(argv))
    configure_logging()
    try:
        settings = load_settings(arguments.config)
        return _serve(settings, _address(settings.serve, arguments.host, arguments.port))
    except ClawstreamError as error:
        return report(error)


def _address(serve: ServeSettings, host: str | None, port: int | None) -> tuple[str, int]:
    return host or serve.host, serve.port if port is None else port


def _serve(settings: Settings, address: tuple[str, int]) -> int:
    # The port first: a model takes long to load, and then the port turns out to be taken.
    with closing(_listen(*address)) as listener:
        base = load_base(settings.model, settings.data_dir)
        metrics = ServeMetrics(CollectorRegistry())
        table = AdapterTable(
            base,
            policy=settings.serve.policy,
            keep_versions=settings.serve.keep_versions,
            metrics=metrics,
            clock=SystemClock(),
        )
        watcher = _watch(settings, base, table, metrics)
        engine = _engine(settings.serve, base, table, metrics)
        engine.start()
        try:
            app = build_app(_server(settings.serve, base, table, engine, metrics, watcher))
            _run(app, listener, settings.serve, _ready(listener, base, table, watcher))
        finally:
            engine.stop(_LAST_GRACE_MS)
            if watcher is not None:
                watcher.stop()
    return 0


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ServingError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another serve.port, or 0 "
            "for a free one"
        ) from error


def _watch(
    settings: Settings, base: BaseModel, table: AdapterTable, metrics: ServeMetrics
) -> VersionWatcher | None:
    """The watcher, once it has read what there is; None where there is no Kafka to read."""
    try:
        bootstrap = resolve_bootstrap(settings)
    except BrokerError as error:
        log.warning("serving the base model and no trained version: %s", error)
        return None
    watcher = VersionWatcher(
        make_consumer=lambda: watching_consumer(settings.kafka, bootstrap),
        topic=topics.VERSIONS,
        codec=build_codec(settings.schema_registry_url),
        base=base,
        table=table,
        metrics=metrics,
        retry_ms=settings.serve.adapter_retry_ms,
    )
    watcher.start()
    if not watcher.wait_caught_up(settings.serve.startup_wait_ms / 1000):
        log.warning(
            "%s at %s was not read within serve.startup_wait_ms; serving version %d until it is",
            topics.VERSIONS,
            bootstrap,
            table.live.version,
        )
    return watcher


def _engine(
    serve: ServeSettings, base: BaseModel, table: AdapterTable, metrics: ServeMetrics
) -> Engine:
    return Engine(
        table,
        decode=base.chat.decode,
        end_token_ids=frozenset({base.chat.eos_token_id}),
        metrics=metrics,
        max_batch=serve.max_batch,
        batch_wait_ms=serve.batch_wait_ms,
        max_prefill_tokens=serve.max_prefill_tokens,
    )


def _server(
    serve: ServeSettings,
    base: BaseModel,
    table: AdapterTable,
    engine: Engine,
    metrics: ServeMetrics,
    watcher: VersionWatcher | None,
) -> Server:
    return Server(
        base=base,
        table=table,
        engine=engine,
        metrics=metrics,
        clock=SystemClock(),
        new_seed=lambda: secrets.randbits(63),
        max_new_tokens=serve.max_new_tokens,
        watching=None if watcher is None else lambda: watcher.connected,
    )


def _ready(
    listener: socket.socket, base: BaseModel, table: AdapterTable, watcher: VersionWatcher | None
) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return ready_line(
        url=f"http://{shown}:{port}",
        host=host,
        port=port,
        model=base.model_id,
        policy=table.policy,
        live_version=table.live.version,
        watching=watcher is not None,
    )


def _run(app: FastAPI, listener: socket.socket, serve: ServeSettings, ready: str) -> None:
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=math.ceil(serve.shutdown_grace_ms / 1000),
    )
    server = uvicorn.Server(config)
    stop_at_signals(server)
    print(ready, flush=True)
    server.run(sockets=[listener])


if __name__ == "__main__":
    raise SystemExit(main())
