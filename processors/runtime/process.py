"""The life of a worker process: settings, checks, running, a bounded end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import faust

from processors.runtime.apart import GC_THRESHOLDS, apart
from processors.runtime.spec import WorkerSpec
from processors.runtime.topics import Cluster, check_cluster
from processors.runtime.worker import BatchApp, BatchWorker
from streams.errors import ClawstreamError
from streams.kafka.clients import resolve_bootstrap
from streams.metrics import ProcessorMetrics
from streams.process import argument_parser, command_line, configure_logging, report
from streams.settings import Settings, load_settings

logger = logging.getLogger(__name__)

STOP_LIMIT_S = 15.0
SWITCH_INTERVAL_S = 0.001
"""How long a processors' thread may keep the interpreter from the event loop's."""

CHATTY_LOGGERS = ("aiokafka", "faust", "mode")


class BoundedWorker(faust.Worker):
    """Ends within ``STOP_LIMIT_S``, whatever Kafka does not answer.

    Everything that counts is in committed transactions; an end that is cut short is as safe
    as a kill. Where nothing had been begun it is no failure either: the client ends a join only
    when Kafka answers it, which takes as long as other members need.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limit = threading.Timer(STOP_LIMIT_S, self._end_at_once)
        self._limit.daemon = True

    async def stop(self) -> None:
        if not self._limit.is_alive() and not self._limit.finished.is_set():
            self._limit.start()
        await super().stop()

    def ended(self) -> None:
        """It ended in time."""
        self._limit.cancel()

    def _end_at_once(self) -> None:
        logger.error("stopping took more than %.0f s: is Kafka down? Ended now", STOP_LIMIT_S)
        logging.shutdown()
        os._exit(1 if cast(BatchApp, self.app).worker.had_partitions else 0)


def run_worker(
    spec: WorkerSpec, settings: Settings, metrics: ProcessorMetrics | None = None
) -> int:
    """Run a worker until it is told to stop or fails. Blocks.

    Returns:
        0 after a clean stop (SIGTERM, SIGINT), 1 after a failure, whose reason was logged, 2
        for settings that cannot be used.
    """
    try:
        settings = _with_address(settings)
        cluster = check_cluster(spec, settings.kafka)
        worker = _new_worker(spec, settings, cluster, metrics)
    except ClawstreamError as error:
        return report(error)
    logger.info(
        "%s consumes %s (%d partitions) as group %s at %s, state in %s",
        spec.processor,
        ", ".join(spec.inputs),
        cluster.partitions,
        spec.app_id,
        settings.kafka.bootstrap_servers,
        spec.changelog,
    )
    return _execute(worker)


def main_of(
    command: str,
    processor: str,
    build_spec: Callable[[Settings, ProcessorMetrics], WorkerSpec],
    argv: Sequence[str] | None,
    *,
    more: str | None = None,
) -> int:
    """The command line of a processor: read settings, run its worker.

    Args:
        command: Its subcommand of ``clawstream``.
        processor: Its name in metrics.
        build_spec: Builds what the runtime runs.
        argv: The arguments; the process's own if None.
        more: What its help says at the end.

    Returns:
        The exit code: 0 after a clean stop, 1 after a failure, 2 for wrong settings.
    """
    what = f"Run a {processor} worker until SIGTERM or SIGINT."
    parser = argument_parser(command, what, more)
    arguments = parser.parse_args(command_line(argv))
    configure_logging()
    for chatty in CHATTY_LOGGERS:
        logging.getLogger(chatty).setLevel(logging.WARNING)
    metrics = ProcessorMetrics(processor)
    try:
        settings = load_settings(arguments.config)
        with apart(build_spec, settings, metrics) as spec:
            return run_worker(spec, settings, metrics)
    except ClawstreamError as error:
        return report(error)


def _with_address(settings: Settings) -> Settings:
    address = {"bootstrap_servers": resolve_bootstrap(settings)}
    return settings.model_copy(update={"kafka": settings.kafka.model_copy(update=address)})


def _new_worker(
    spec: WorkerSpec, settings: Settings, cluster: Cluster, metrics: ProcessorMetrics | None
) -> BatchWorker:
    asyncio.set_event_loop(asyncio.new_event_loop())
    return BatchWorker(spec, settings, cluster, metrics or ProcessorMetrics(spec.processor))


def _execute(worker: BatchWorker) -> int:
    process = BoundedWorker(
        worker.app,
        override_logging=False,
        redirect_stdouts=False,
        quiet=True,
        workdir=Path.cwd(),
        loop=asyncio.get_event_loop(),
    )
    process.spinner = None
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        process.execute_from_commandline()
    except SystemExit as stop:
        # Everything is closed; searching a large state for cycles would only delay the exit.
        gc.freeze()
        # The interpreter waits for threads, too: while one is left the limit counts.
        worker.end()
        process.ended()
        return stop.code if isinstance(stop.code, int) else 1
    return 0


__all__ = ["main_of", "run_worker"]
