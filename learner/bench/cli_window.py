"""``clawstream bench window``."""

from __future__ import annotations

from pathlib import Path

import typer

from streams.cli.common import settings_of, terminable

app = typer.Typer(add_completion=False)


@app.command()
def window(
    ctx: typer.Context,
    segments: int = typer.Option(3_000, "--segments", min=1, help="The window's size."),
    turns: int = typer.Option(40, "--turns", min=1, help="Replies in each segment."),
    rate: float = typer.Option(20.0, "--rate", min=0.1, help="Arrivals a second meanwhile."),
    seconds: float = typer.Option(60.0, "--seconds", min=1.0, help="Of updates."),
    json_file: Path | None = typer.Option(None, "--json", help="Also write the report, as JSON."),
) -> None:
    """Measure what the learner's window takes, and whether arrivals wait for an update.

    No broker is needed. The updates are real ones with the model and the batch of the settings.
    """
    from rich.console import Console

    from learner.bench import window as bench
    from streams.bench.screen import require_writable, show, write_json

    require_writable(json_file)
    console = Console()

    def on_step(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    plan = bench.WindowPlan(segments=segments, turns=turns, rate=rate, seconds=seconds)
    with terminable():
        report = bench.run(settings_of(ctx), plan, on_step)
    show(report, console)
    if json_file is not None:
        write_json(report, json_file)
