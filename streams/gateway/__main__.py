"""``clawstream gateway``: the HTTP front door."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Mapping, Sequence

import httpx
import uvicorn
from fastapi import FastAPI

from streams.clock import SystemClock
from streams.contracts import DialogueTurn, FeedbackEvent, FeedbackKind, Role
from streams.errors import BrokerError, ClawstreamError, SettingsError
from streams.gateway.app import Gateway
from streams.gateway.limits import largest_records
from streams.gateway.publisher import KafkaSender, SpoolingPublisher
from streams.gateway.service import GatewayService
from streams.gateway.spool import Spool
from streams.kafka.clients import make_producer, resolve_bootstrap
from streams.process import (
    announce_ready,
    argument_parser,
    command_line,
    configure_logging,
    report,
    stop_at_signals,
)
from streams.serde import Codec, build_codec
from streams.settings import Settings, load_settings
from streams.topics import FEEDBACK, TURNS

logger = logging.getLogger(__name__)

DELIVERY_TIMEOUT_MS = 3_000
"""How long a reply's end may wait for Kafka before its events go to disk instead."""

_OVERRIDES = {
    "message.timeout.ms": DELIVERY_TIMEOUT_MS,
    # Acknowledged one by one while a client waits: no lingering.
    "linger.ms": 0,
}

_SHUTDOWN_S = 10
_SAMPLES: Mapping[str, DialogueTurn | FeedbackEvent] = {
    TURNS: DialogueTurn(
        event_id="e",
        session_id="s",
        turn_id="t",
        role=Role.USER,
        content="",
        event_time=0,
        source="s",
    ),
    FEEDBACK: FeedbackEvent(
        event_id="e", session_id="s", kind=FeedbackKind.COPY, event_time=0, source="s"
    ),
}
"""One record of each kind that the gateway writes; never published."""
_BACKLOG = 2_048


def main(argv: Sequence[str] | None = None) -> int:
    """Run the gateway until SIGTERM or SIGINT.

    Returns:
        The exit status: 0 after a clean stop, 2 for unusable settings, 1 if it could not start.
    """
    parser = argument_parser("gateway", "OpenAI-compatible gateway that records conversations")
    parser.add_argument("--host", default=None)
    parser.add_argument("--port", type=int, default=None, help="0 takes a free one")
    arguments = parser.parse_args(command_line(argv))
    configure_logging()
    try:
        settings = load_settings(arguments.config)
        return _run(settings, arguments.host, arguments.port)
    except ClawstreamError as error:
        return report(error)


def _run(settings: Settings, host: str | None, port: int | None) -> int:
    codec = build_codec(
        settings.schema_registry_url, max_record_bytes=settings.kafka.max_message_bytes
    )
    _ask_registry(codec)
    bootstrap = resolve_bootstrap(settings)
    chosen = settings.gateway.port if port is None else port
    with _listen(host or settings.gateway.host, chosen) as listener:
        spool = Spool((settings.gateway.spool_dir or settings.data_dir / "spool") / "gateway.db")
        try:
            return _serve(settings, listener, bootstrap, spool, codec)
        finally:
            spool.close()


def _ask_registry(codec: Codec) -> None:
    """Let the codec learn its schema ids now: no request may wait for the registry.

    Raises:
        SchemaError: The registry does not answer, or does not have the schemas.
    """
    for topic, record in _SAMPLES.items():
        codec.encode(record, topic)


def _serve(
    settings: Settings, listener: socket.socket, bootstrap: str, spool: Spool, codec: Codec
) -> int:
    sender = KafkaSender(
        lambda: make_producer(settings.kafka, bootstrap, on_error=_log_error, overrides=_OVERRIDES)
    )
    try:
        bound, taken = listener.getsockname()[:2]
        app = _application(settings, SpoolingPublisher(sender, spool), codec)
        server = uvicorn.Server(
            uvicorn.Config(
                app, log_config=None, access_log=False, timeout_graceful_shutdown=_SHUTDOWN_S
            )
        )
        stop_at_signals(server)
        # From here on connections wait for the server instead of being refused.
        listener.listen(_BACKLOG)
        logger.info("gateway on %s:%d for %s", bound, taken, settings.gateway.upstream_url)
        announce_ready(url=f"http://{bound}:{taken}", host=bound, port=taken)
        server.run(sockets=[listener])
    finally:
        sender.close()
    return 0


def _application(settings: Settings, publisher: SpoolingPublisher, codec: Codec) -> FastAPI:
    clock = SystemClock()
    gateway = Gateway(
        GatewayService(codec, publisher, clock, settings.gateway.policy, largest_records(settings)),
        publisher,
        _upstream(settings),
        settings.gateway,
        settings.align,
        clock,
    )
    return gateway.build()


def _upstream(settings: Settings) -> httpx.AsyncClient:
    key = settings.gateway.upstream_api_key
    return httpx.AsyncClient(
        base_url=settings.gateway.upstream_url.rstrip("/") + "/",
        timeout=httpx.Timeout(settings.gateway.request_timeout_ms / 1000, connect=10.0),
        headers={"Authorization": f"Bearer {key.get_secret_value()}"} if key else {},
        limits=httpx.Limits(max_connections=None),
    )


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"cannot listen on {host}:{port}: {error.strerror}; set gateway.port"
        ) from error
    return listener


def _log_error(error: BrokerError) -> None:
    # The gateway goes on while Kafka is away: events wait on disk.
    logger.error("%s", error)


if __name__ == "__main__":
    sys.exit(main())
