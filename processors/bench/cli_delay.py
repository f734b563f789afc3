"""``clawstream bench closing-delay``."""

from __future__ import annotations

from pathlib import Path

import typer

from streams.cli.common import settings_of, terminable

app = typer.Typer(add_completion=False)


@app.command()
def closing_delay(
    ctx: typer.Context,
    rate: float = typer.Option(1_000.0, "--rate", min=1.0, help="Turns a second."),
    seconds: float = typer.Option(60.0, "--seconds", min=1.0, help="How long it is measured."),
    warm_up_s: float = typer.Option(40.0, "--warm-up-s", min=1.0, help="Time before that."),
    settle_ms: int = typer.Option(5_000, "--settle-ms", min=0, help="The aligner's settle time."),
    gap_ms: int = typer.Option(20_000, "--gap-ms", min=1, help="The aligner's gap."),
    repetitions: int = typer.Option(1, "--repetitions", min=1, help="How often."),
    partitions: int = typer.Option(4, "--partitions", min=1, help="Of each topic."),
    beside_replay: float | None = typer.Option(
        None,
        "--beside-replay",
        min=1.0,
        metavar="RATE",
        help="Also measure it beside a shadow replay of so many records a second.",
    ),
    replayed_records: int = typer.Option(
        200_000, "--replayed-records", min=1, help="In the log of that replay."
    ),
    json_file: Path | None = typer.Option(None, "--json", help="Also write the report, as JSON."),
) -> None:
    """Measure how long a segment that is due takes to reach its readers.

    Simulated users converse at a steady rate while the aligner's worker runs. Settle time and
    gap are short, so that many segments close within the time. Needs an otherwise idle machine.
    """
    from rich.console import Console

    from processors.bench.closing_delay import DelayPlan, run
    from streams.bench.screen import require_writable, show, write_json

    settings = settings_of(ctx)
    require_writable(json_file)
    plan = DelayPlan(
        turns_per_s=rate,
        seconds=seconds,
        warm_up_s=warm_up_s,
        settle_ms=settle_ms,
        gap_ms=gap_ms,
        repetitions=repetitions,
        partitions=partitions,
        beside_replay_per_s=beside_replay,
        replayed_records=replayed_records,
    )
    console = Console()
    with terminable():
        report = run(settings, plan, lambda text: console.print(text, highlight=False))
    show(report, console)
    if json_file is not None:
        write_json(report, json_file)
