"""``clawstream doctor``: what is wrong, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict

import typer

from streams.cli.common import print_json, settings_of

app = typer.Typer(add_completion=False)

_STYLES = {"OK": "green", "NOTE": "cyan", "WARN": "yellow", "FAIL": "bold red"}


@app.command()
def doctor(
    ctx: typer.Context,
    as_json: bool = typer.Option(False, "--json", help="Print JSON for machines."),
) -> None:
    """Examine broker, topics, clocks, registries, disk, GPU, and the flow itself.

    Says which stage holds records back, and why nothing trains. Changes nothing. Exits with 1 if
    anything fails.
    """
    from rich.console import Console
    from rich.text import Text

    from streams.doctor.examine import examine
    from streams.doctor.findings import Level

    console = Console()
    found = []
    for finding in examine(settings_of(ctx)):
        found.append(finding)
        if as_json:
            continue
        line = Text(f"{finding.level:<5}", style=_STYLES[finding.level])
        console.print(
            line + Text(f"{finding.about}: {finding.what}", style="default"), soft_wrap=True
        )
        if finding.advice:
            console.print(Text(f"      {finding.advice}"), soft_wrap=True)
    if as_json:
        print_json([asdict(finding) for finding in found])
    if any(finding.level is Level.FAIL for finding in found):
        raise typer.Exit(1)
