"""``clawstream kafka``: the embedded Kafka, one node or several."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from streams.cli.common import print_json, settings_of
from streams.settings import Settings

if TYPE_CHECKING:
    from streams.kafka.cluster import RunningCluster
    from streams.kafka.embedded import RunningKafka

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Start, stop and show the embedded Kafka.",
)

_DATA_DIR = typer.Option(
    None, "--data-dir", help="Its folder; kafka in the data folder if left out."
)
_JSON = typer.Option(False, "--json", help="Print JSON for machines.")


@app.command()
def up(
    ctx: typer.Context,
    port: int | None = typer.Option(
        None, "--port", min=1, max=65_535, help="Where it listens; a free port if left out."
    ),
    brokers: int | None = typer.Option(
        None,
        "--brokers",
        min=1,
        max=9,
        help="How many nodes; what the folder holds, or one, if left out. Several keep three "
        "copies of everything.",
    ),
    data_dir: Path | None = _DATA_DIR,
    timeout_s: float = typer.Option(90.0, "--timeout-s", min=1.0, help="How long it may take."),
    as_json: bool = _JSON,
) -> None:
    """Start Kafka on this machine, or find it running; start nodes again that are down.

    It goes on when this terminal closes, until `clawstream kafka down`.
    """
    from rich.console import Console

    from streams.kafka.cluster import holds_cluster, start_cluster
    from streams.kafka.embedded import start_kafka

    settings = settings_of(ctx)
    folder = _folder(settings, data_dir)
    several = (brokers or 1) > 1 or holds_cluster(folder)
    if several and port is not None:
        raise typer.BadParameter("--port is for a single node")
    most = settings.kafka.max_message_bytes
    console = Console(stderr=True)
    with console.status("starting Kafka") as status, _signals_interrupt():
        if several:
            _show_cluster(
                start_cluster(
                    folder,
                    brokers,
                    timeout_s=timeout_s,
                    max_message_bytes=most,
                    on_step=status.update,
                ),
                as_json,
            )
            return
        running = start_kafka(
            folder, port, timeout_s=timeout_s, max_message_bytes=most, on_step=status.update
        )
    _show(running, as_json)


@app.command()
def down(
    ctx: typer.Context,
    data_dir: Path | None = _DATA_DIR,
    as_json: bool = _JSON,
) -> None:
    """Stop all nodes; the topics stay in the folder."""
    from rich.console import Console

    from streams.kafka.cluster import holds_cluster, stop_cluster
    from streams.kafka.embedded import stop_kafka

    folder = _folder(settings_of(ctx), data_dir)
    with Console(stderr=True).status("stopping Kafka"):
        stopped = stop_cluster(folder) if holds_cluster(folder) else stop_kafka(folder)
    if as_json:
        print_json({"stopped": stopped, "data_dir": str(folder.resolve())})
    else:
        sys.stdout.write("Kafka stopped\n" if stopped else f"no Kafka runs in {folder.resolve()}\n")


@app.command()
def status(
    ctx: typer.Context,
    data_dir: Path | None = _DATA_DIR,
    as_json: bool = _JSON,
) -> None:
    """Show whether Kafka runs, and where. Exits with 3 when it does not."""
    from streams.kafka.cluster import cluster_status
    from streams.kafka.embedded import kafka_status

    folder = _folder(settings_of(ctx), data_dir)
    cluster = cluster_status(folder)
    if cluster is not None:
        _show_cluster(cluster, as_json)
        return
    running = kafka_status(folder)
    if running is not None:
        _show(running, as_json)
        return
    if as_json:
        print_json({"running": False, "data_dir": str(folder.resolve())})
    else:
        option = "" if data_dir is None else f" --data-dir {shlex.quote(str(data_dir))}"
        sys.stdout.write(
            f"no Kafka runs in {folder.resolve()}; start one with: clawstream kafka up{option}\n"
        )
    raise typer.Exit(3)


def _folder(settings: Settings, data_dir: Path | None) -> Path:
    from streams.kafka.embedded import embedded_dir

    return data_dir if data_dir is not None else embedded_dir(settings.data_dir)


def _show(running: RunningKafka, as_json: bool) -> None:
    from streams.kafka.embedded import answers

    facts = _facts(running, answering=answers(running.bootstrap_servers))
    if as_json:
        print_json(facts)
        return
    state = "running" if facts["answering"] else "alive, but does not answer yet"
    sys.stdout.write(
        f"Kafka is {state} at {running.bootstrap_servers}\n"
        f"  pid      {running.pid}\n"
        f"  uptime   {_duration(facts['uptime_s'])}\n"
        f"  data     {running.data_dir}\n"
        f"  log      {running.log_file}\n"
        f"  clients  KAFKA_BOOTSTRAP_SERVERS={running.bootstrap_servers}\n"
    )


def _show_cluster(cluster: RunningCluster, as_json: bool) -> None:
    from streams.kafka.embedded import answers

    nodes = {
        number: _facts(node, answering=answers(node.bootstrap_servers))
        for number, node in cluster.nodes.items()
    }
    if as_json:
        print_json(
            {
                "running": True,
                "bootstrap_servers": cluster.bootstrap_servers,
                "brokers": cluster.size,
                "data_dir": str(cluster.data_dir),
                "nodes": nodes,
            }
        )
        return
    sys.stdout.write(f"{len(nodes)} of {cluster.size} Kafka nodes run\n")
    for number, node in nodes.items():
        state = "" if node["answering"] else "   does not answer yet"
        sys.stdout.write(
            f"  {number}  {node['bootstrap_servers']}  pid {node['pid']}  "
            f"up {_duration(node['uptime_s'])}  {node['log_file']}{state}\n"
        )
    if len(nodes) < cluster.size:
        sys.stdout.write("  start the others with: clawstream kafka up\n")
    sys.stdout.write(f"  clients  KAFKA_BOOTSTRAP_SERVERS={cluster.bootstrap_servers}\n")


def _facts(running: RunningKafka, *, answering: bool) -> dict[str, Any]:
    from streams.clock import SystemClock

    return {
        "running": True,
        "answering": answering,
        "bootstrap_servers": running.bootstrap_servers,
        "pid": running.pid,
        "uptime_s": max(0, SystemClock().now_ms() - running.started_at_ms) // 1000,
        "data_dir": str(running.data_dir),
        "log_file": str(running.log_file),
    }


def _duration(seconds: int) -> str:
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this command as Ctrl-C does, so that it cleans up."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
