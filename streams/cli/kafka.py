"""``clawstream kafka``: the embedded Kafka node."""

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
    from streams.kafka.embedded import RunningKafka

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Start, stop and show the embedded Kafka node.",
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
    data_dir: Path | None = _DATA_DIR,
    timeout_s: float = typer.Option(90.0, "--timeout-s", min=1.0, help="How long it may take."),
    as_json: bool = _JSON,
) -> None:
    """Start a Kafka node on this machine, or find it running.

    It goes on when this terminal closes, until `clawstream kafka down`.
    """
    from rich.console import Console

    from streams.kafka.embedded import start_kafka

    settings = settings_of(ctx)
    console = Console(stderr=True)
    with console.status("starting Kafka") as status, _signals_interrupt():
        running = start_kafka(
            _folder(settings, data_dir),
            port,
            timeout_s=timeout_s,
            max_message_bytes=settings.kafka.max_message_bytes,
            on_step=status.update,
        )
    _show(running, as_json)


@app.command()
def down(
    ctx: typer.Context,
    data_dir: Path | None = _DATA_DIR,
    as_json: bool = _JSON,
) -> None:
    """Stop the node; its topics stay in its folder."""
    from rich.console import Console

    from streams.kafka.embedded import stop_kafka

    folder = _folder(settings_of(ctx), data_dir)
    with Console(stderr=True).status("stopping Kafka"):
        stopped = stop_kafka(folder)
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
    """Show whether the node runs, and where. Exits with 3 when it does not."""
    from streams.kafka.embedded import kafka_status

    folder = _folder(settings_of(ctx), data_dir)
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
