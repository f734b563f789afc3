"""``clawstream bench reward``."""

from __future__ import annotations

from pathlib import Path

import typer

from streams.cli.common import settings_of, terminable

app = typer.Typer(add_completion=False)


@app.command()
def reward(
    ctx: typer.Context,
    sessions: int = typer.Option(20_000, "--sessions", min=10, help="Conversations in the log."),
    rate: float = typer.Option(1_000.0, "--rate", min=1.0, help="Live: turns a second."),
    seconds: float = typer.Option(30.0, "--seconds", min=1.0, help="Live: for how long."),
    repetitions: int = typer.Option(3, "--repetitions", min=1, help="How often."),
    partitions: int = typer.Option(4, "--partitions", min=1, help="Of each topic."),
    content_bytes: int = typer.Option(
        300,
        "--content-bytes",
        min=1,
        max=10_000,
        help="Of each turn; those of up to 200 are read by the learned model too.",
    ),
    json_file: Path | None = typer.Option(None, "--json", help="Also write the report, as JSON."),
) -> None:
    """Measure whether the reward keeps up with the aligner, and how long a segment waits for it.

    Needs an otherwise idle machine.
    """
    from rich.console import Console

    from processors.bench.reward import RewardPlan, run
    from streams.bench.screen import require_writable, show, write_json

    settings = settings_of(ctx)
    require_writable(json_file)
    plan = RewardPlan(
        sessions=sessions,
        turns_per_s=rate,
        seconds=seconds,
        repetitions=repetitions,
        partitions=partitions,
        content_bytes=content_bytes,
    )
    console = Console()
    with terminable():
        report = run(settings, plan, lambda text: console.print(text, highlight=False))
    show(report, console)
    if json_file is not None:
        write_json(report, json_file)
