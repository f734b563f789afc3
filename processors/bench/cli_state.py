"""``clawstream bench align-state``."""

from __future__ import annotations

from pathlib import Path

import typer

from streams.cli.common import settings_of, terminable

app = typer.Typer(add_completion=False)


@app.command()
def align_state(
    ctx: typer.Context,
    sessions: int = typer.Option(100_000, "--sessions", min=1, help="Open sessions."),
    closed: int = typer.Option(
        100_000, "--closed", min=0, help="Closed sessions within their horizon, beside them."
    ),
    turns: int = typer.Option(4, "--turns", min=2, help="Turns of each session; even."),
    content_bytes: int = typer.Option(300, "--content-bytes", min=1, help="Of each turn."),
    horizon_ms: int | None = typer.Option(None, "--horizon-ms", help="The aligner's."),
    repetitions: int = typer.Option(1, "--repetitions", min=1, help="How often."),
    partitions: int = typer.Option(4, "--partitions", min=1, help="Of each topic."),
    compact: bool = typer.Option(
        True, "--compact/--no-compact", help="Wait for the changelog to be compacted."
    ),
    soak: int | None = typer.Option(
        None, "--soak", min=1_000, metavar="EVENTS",
        help="Instead, run so many events of rolling sessions (10000000 take long) and see "
        "whether memory and disk stay flat.",
    ),
    json_file: Path | None = typer.Option(None, "--json", help="Also write the report, as JSON."),
) -> None:  # fmt: skip
    """Measure what the aligner's state takes, and how long a restart with it lasts.

    Memory, changelog and traffic with closed and open sessions; then the worker is killed and
    started again. Needs an otherwise idle machine, and some gigabytes of disk.
    """
    from rich.console import Console

    from processors.bench import align_state as state
    from processors.bench import soak as long_run
    from streams.bench.report import Report
    from streams.bench.screen import require_writable, show, write_json
    from streams.errors import SettingsError

    settings = settings_of(ctx)
    if turns % 2:
        raise SettingsError("--turns must be even: sessions end with a reply")
    require_writable(json_file)
    console = Console()

    def on_step(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    report: Report
    with terminable():
        if soak is not None:
            report = long_run.run(
                settings,
                long_run.SoakPlan(events=soak, turns=turns, partitions=partitions),
                on_step,
            )
        else:
            plan = state.StatePlan(
                sessions=sessions,
                closed=closed,
                turns=turns,
                content_bytes=content_bytes,
                horizon_ms=horizon_ms,
                partitions=partitions,
                repetitions=repetitions,
                compact=compact,
            )
            report = state.run(settings, plan, on_step)
    show(report, console)
    if json_file is not None:
        write_json(report, json_file)
