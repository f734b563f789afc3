"""Runs a judge: ``python -m processors.reward.judge --config FILE``."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from wsgiref.simple_server import WSGIServer

from processors.reward.judge.cache import VerdictCache
from processors.reward.judge.client import make_ask
from processors.reward.judge.service import JudgeService
from processors.reward.judge.verdicts import judge_name, read_rubric
from processors.reward.judge.worker import JudgeWorker
from streams.errors import ClawstreamError
from streams.metrics import ProcessorMetrics, listen
from streams.process import argument_parser, command_line, configure_logging, report
from streams.serde import build_codec
from streams.settings import Settings, load_settings

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Judge until SIGTERM or SIGINT.

    Returns:
        The exit code: 0 after a clean stop, 1 after a failure, 2 for wrong settings.
    """
    parser = argument_parser("judge", "Judge replies until SIGTERM or SIGINT.")
    arguments = parser.parse_args(command_line(argv))
    configure_logging()
    try:
        asyncio.run(_run(load_settings(arguments.config)))
    except ClawstreamError as error:
        return report(error)
    return 0


async def _run(settings: Settings) -> None:
    # Before anything of it shows: whoever sees its page may stop it.
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    rubric = read_rubric(settings.judge.rubric)
    ask = make_ask(settings.judge)
    metrics = ProcessorMetrics("judge")
    show_metrics(settings, metrics)
    codec = build_codec(settings.schema_registry_url)
    with VerdictCache(settings.data_dir / "judge.db") as cache:
        service = JudgeService(settings.judge, rubric, ask, cache, metrics)
        worker = JudgeWorker(settings, service, codec, metrics)
        logger.info(
            "judging with %s, rubric %s, %d votes",
            judge_name(settings.judge),
            rubric.digest[:12],
            settings.judge.votes,
        )
        await worker.run(stop)


def show_metrics(settings: Settings, metrics: ProcessorMetrics) -> WSGIServer | None:
    """Answer at ``/metrics``, where the workers' pages are, if there is a port for it.

    Returns:
        What answers, in a thread of its own that ends with the process.

    Raises:
        SettingsError: The port cannot be had.
    """
    port = settings.judge.web_port
    if not port:
        return None
    return listen(metrics.registry, settings.worker.web_host, port, key="judge.web_port")


if __name__ == "__main__":
    raise SystemExit(main())
