"""``clawstream bench replay``."""

from __future__ import annotations

from pathlib import Path

import typer

from streams.cli.common import settings_of, terminable

app = typer.Typer(add_completion=False)


@app.command()
def replay(
    ctx: typer.Context,
    turns: int = typer.Option(200_000, "--turns", min=100, help="In the log, about."),
    repetitions: int = typer.Option(3, "--repetitions", min=1, help="How often each is measured."),
    partitions: int = typer.Option(2, "--partitions", min=1, help="Of each topic."),
    profile: bool = typer.Option(
        False, "--profile", help="Also show where the time of one partition goes."
    ),
    json_file: Path | None = typer.Option(None, "--json", help="Also write the report, as JSON."),
) -> None:
    """Measure how long a shadow replay takes, from topics and from an archive, and of rewards.

    What 10 million turns would take is extrapolated. Needs an otherwise idle machine.
    """
    from rich.console import Console

    from processors.bench.cli_align import print_shares
    from processors.bench.profile import by_stage, read_stacks
    from processors.bench.replay import ReplayPlan, run
    from streams.bench.screen import require_writable, show, write_json

    settings = settings_of(ctx)
    require_writable(json_file)
    plan = ReplayPlan(turns=turns, repetitions=repetitions, partitions=partitions, profile=profile)
    console = Console()
    with terminable():
        report, profiles = run(settings, plan, lambda text: console.print(text, highlight=False))
    show(report, console)
    for name, path in profiles.items():
        print_shares(f"a replay of one partition: {name}", by_stage(read_stacks(path)), console)
        console.print(f"stacks, for flame graph tools: {path}", soft_wrap=True, highlight=False)
    if json_file is not None:
        write_json(report, json_file)
