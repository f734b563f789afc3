"""``clawstream demo``: the whole loop, watched."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from streams.cli.common import settings_of, terminable
from streams.errors import SettingsError
from streams.settings import CONFIG_ENV, Settings, load_settings

if TYPE_CHECKING:
    from rich.console import Console

    from streams.demo.run import Display

app = typer.Typer(add_completion=False)

_INTERRUPTED = 130
"""The exit status that shells give a command ended by Ctrl-C."""


@app.command()
def demo(
    ctx: typer.Context,
    json_file: Path | None = typer.Option(
        None, "--json", help="Also write the summary to this file, as JSON."
    ),
) -> None:
    """Watch conversations become two new policy versions.

    Starts an embedded Kafka (unless one is configured), gateway, aligner, reward worker,
    learner and policy server, lets simulated users converse, and stops everything again.
    Without --config it runs on the demo preset.
    """
    import json

    from rich.console import Console

    from streams.demo.run import Demo, demo_config, demo_folder, taste_of
    from streams.demo.screen import conclusion, introduction

    settings = _settings(ctx)
    if json_file is not None:
        _write(json_file, "")
    console = Console()
    console.print(introduction(settings, taste_of(settings)))
    try:
        with terminable(), _display(console, settings) as display:
            summary = Demo(settings, display).run()
    except KeyboardInterrupt:
        console.print(
            f"Interrupted; everything is stopped. Data and logs: {demo_folder(settings)}",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )
        raise typer.Exit(_INTERRUPTED) from None
    console.print(conclusion(summary, taste_of(settings)))
    console.print(
        f"Data and logs: {demo_folder(settings)} (make clean removes them)\n"
        f"What a version learned from: {_command()} -c {demo_config(settings)} versions show 1",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    if json_file is not None:
        _write(json_file, json.dumps(asdict(summary), indent=2) + "\n")


def _command() -> str:
    """What to type for this program: `make demo` runs it from where no shell finds its name."""
    found = shutil.which("clawstream")
    here = found is not None and Path(found).resolve() == Path(sys.argv[0]).resolve()
    return "clawstream" if here else sys.argv[0]


def _write(path: Path, text: str) -> None:
    """Write the summary; tried with nothing first, for minutes go by until there is one."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(
            f"cannot write {path}: {error.strerror}; name another --json"
        ) from error


def _settings(ctx: typer.Context) -> Settings:
    """The file the user named, else the demo preset; the environment stands above both."""
    named = ctx.find_root().params.get("config") or os.environ.get(CONFIG_ENV)
    if named:
        return settings_of(ctx)
    return load_settings(Path(__file__).parent.parent / "presets" / "demo.yaml")


@contextlib.contextmanager
def _display(console: Console, settings: Settings) -> Iterator[Display]:
    from rich.live import Live

    from streams.demo.screen import LiveDisplay, LogDisplay

    if not console.is_terminal:
        yield LogDisplay(console)
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        yield LiveDisplay(live, settings.demo.target_versions)
