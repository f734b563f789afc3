"""``clawstream up``: the whole pipeline on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from streams.cli.common import settings_of, terminable

if TYPE_CHECKING:
    from streams.settings import Settings
    from streams.supervisor import Supervisor

app = typer.Typer(add_completion=False)

_READY_S = 300.0
_RESTARTS = 5
_POLL_S = 1.0


@app.command()
def up(ctx: typer.Context) -> None:
    """Run the whole pipeline on this machine until Ctrl-C.

    Starts the embedded Kafka (unless one is configured), creates the topics, and runs policy
    server, learner, aligner, reward worker and gateway, and the judge if one is named
    (judge.url, judge.plugin); what stops by itself is started again.
    """
    from streams.supervisor import sole_user

    settings = settings_of(ctx)
    run_dir = (settings.data_dir / "run").absolute()
    with terminable(), sole_user(run_dir):
        _run(settings, run_dir, ctx.find_root().params.get("config"))


def _run(settings: Settings, run_dir: Path, config: Path | None) -> None:
    from streams.kafka.admin import apply_inventory
    from streams.kafka.clients import resolve_bootstrap
    from streams.kafka.embedded import embedded_dir, kafka_status, stop_kafka
    from streams.supervisor import Supervisor, uninterrupted
    from streams.topics import load_inventory

    kafka_dir = embedded_dir(settings.data_dir)
    embedded = settings.kafka.bootstrap_servers is None
    # One that ran before (`clawstream kafka up`) goes on afterwards.
    ours = embedded and kafka_status(kafka_dir) is None
    supervisor: Supervisor | None = None
    try:
        if embedded:
            _start_kafka(settings)
        bootstrap = resolve_bootstrap(settings)
        apply_inventory(settings.kafka, bootstrap, load_inventory())
        supervisor = Supervisor(run_dir, config, {"KAFKA_BOOTSTRAP_SERVERS": bootstrap})
        _start(supervisor, settings, run_dir)
        while True:
            if embedded and kafka_status(kafka_dir) is None:
                typer.echo("Kafka had stopped and is started again", err=True)
                _start_kafka(settings)
            _restart(supervisor)
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        typer.echo("stopping")
    finally:
        with uninterrupted():
            if supervisor is not None:
                supervisor.stop()
            if ours:
                stop_kafka(kafka_dir)
            elif embedded:
                typer.echo("Kafka ran before and goes on; `clawstream kafka down` stops it")


def _start_kafka(settings: Settings) -> None:
    """Start the embedded node, at its former address if it had one."""
    from streams.kafka.embedded import embedded_dir, start_kafka

    running = start_kafka(
        embedded_dir(settings.data_dir),
        max_message_bytes=settings.kafka.max_message_bytes,
        on_step=typer.echo,
    )
    typer.echo(f"kafka: {running.bootstrap_servers}")


def _start(supervisor: Supervisor, settings: Settings, run_dir: Path) -> None:
    from streams.supervisor import processes_of

    processes = processes_of(settings)
    typer.echo(f"starting {', '.join(processes)}; logs: {run_dir / 'logs'}")
    for name in processes:
        supervisor.start(name)
    typer.echo("loading the base model (the first time it is converted, half a minute)")
    # The gateway first: whether its port is free is known long before the model is loaded.
    for name in ("gateway", "serve"):
        facts = supervisor.wait_ready(name, _READY_S)
        typer.echo(f"{name}: {facts['url']}")
    # What cannot use its settings has long stopped: without it this is not ready.
    _restart(supervisor)
    typer.echo("ready; stop with Ctrl-C")


def _restart(supervisor: Supervisor) -> None:
    for name in supervisor.restart_stopped(_RESTARTS):
        typer.echo(f"{name} had stopped and was started again", err=True)
