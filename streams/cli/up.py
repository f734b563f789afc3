"""``clawstream up``: the whole pipeline on this machine."""

from __future__ import annotations

import time

import typer

from streams.cli.common import settings_of, terminable

app = typer.Typer(add_completion=False)

_READY_S = 300.0
_RESTARTS = 5
_POLL_S = 1.0


@app.command()
def up(ctx: typer.Context) -> None:
    """Run the whole pipeline on this machine until Ctrl-C.

    Starts the embedded Kafka (unless one is configured), creates the topics, and runs policy
    server, learner, aligner, reward worker and gateway; one that stops by itself is started again.
    """
    from streams.kafka.admin import apply_inventory
    from streams.kafka.clients import resolve_bootstrap
    from streams.kafka.embedded import embedded_dir, start_kafka, stop_kafka
    from streams.supervisor import PROCESSES, Supervisor, uninterrupted
    from streams.topics import load_inventory

    settings = settings_of(ctx)
    run_dir = settings.data_dir / "run"
    kafka_dir = embedded_dir(settings.data_dir)
    embedded = settings.kafka.bootstrap_servers is None
    supervisor: Supervisor | None = None
    with terminable():
        try:
            if embedded:
                start_kafka(kafka_dir, max_message_bytes=settings.kafka.max_message_bytes)
            bootstrap = resolve_bootstrap(settings)
            apply_inventory(settings.kafka, bootstrap, load_inventory())
            environ = {"KAFKA_BOOTSTRAP_SERVERS": bootstrap}
            supervisor = Supervisor(run_dir, ctx.find_root().params.get("config"), environ)
            for name in PROCESSES:
                supervisor.start(name)
            for name in ("serve", "gateway"):
                facts = supervisor.wait_ready(name, _READY_S)
                typer.echo(f"{name}: {facts['url']}")
            typer.echo(f"logs: {run_dir / 'logs'}; stop with Ctrl-C")
            while True:
                for name in supervisor.restart_stopped(_RESTARTS):
                    typer.echo(f"{name} had stopped and was started again", err=True)
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            typer.echo("stopping")
        finally:
            with uninterrupted():
                if supervisor is not None:
                    supervisor.stop()
                if embedded:
                    stop_kafka(kafka_dir)
