"""``clawstream import``: exports of other chat products, into the input topics."""

from __future__ import annotations

from pathlib import Path

import typer

from streams.cli.common import print_json, settings_of
from streams.cli.publishing import encode, publish
from streams.errors import ImportFormatError
from streams.topics import FEEDBACK, TURNS

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Import exports of other chat products."
)


@app.callback()
def _group() -> None:
    """Import exports of other chat products."""


@app.command("open-webui")
def open_webui(
    ctx: typer.Context,
    file: Path = typer.Argument(help="The JSON file of Open WebUI's feedback export."),
    policy: str = typer.Option("default", help="The policy these conversations belong to."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Read and count, publish nothing."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON for machines."),
) -> None:
    """Import Open WebUI's ratings with the chats they belong to."""
    from streams.importers.open_webui import read_open_webui

    try:
        data = file.read_bytes()
    except OSError as error:
        raise ImportFormatError(f"cannot read {file}: {error.strerror}") from error
    try:
        imported = read_open_webui(data, policy=policy)
    except ImportFormatError as error:
        raise ImportFormatError(f"{file}: {error}") from error
    settings = settings_of(ctx)
    envelopes, too_large = encode(settings, [*imported.turns, *imported.feedback], dry_run=dry_run)
    if not dry_run:
        publish(settings, envelopes)
    skipped = [*imported.skipped, *too_large]
    counts = {
        "turns": sum(envelope.topic == TURNS for envelope in envelopes),
        "feedback": sum(envelope.topic == FEEDBACK for envelope in envelopes),
        "skipped": skipped,
        "published": not dry_run,
    }
    if as_json:
        print_json(counts)
        return
    verb = "found" if dry_run else "imported"
    typer.echo(f"{verb} {counts['turns']} turns and {counts['feedback']} feedback events")
    for reason in skipped:
        typer.echo(f"skipped {reason}", err=True)
