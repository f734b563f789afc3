"""``clawstream import``: exports of other chat products, into the input topics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from streams.cli.common import print_json, settings_of
from streams.cli.publishing import encode, publish
from streams.contracts import DialogueTurn, FeedbackEvent
from streams.errors import ImportFormatError
from streams.settings import Settings
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
    records: list[DialogueTurn | FeedbackEvent] = [*imported.turns, *imported.feedback]
    _import(settings_of(ctx), records, imported.skipped, dry_run=dry_run, as_json=as_json)


@app.command()
def outcomes(
    ctx: typer.Context,
    file: Path = typer.Argument(help="A CSV file; its first line names the columns."),
    policy: str = typer.Option("default", help="The policy whose replies these are about."),
    source: str = typer.Option("outcomes-csv", help="The source, where a line names none."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Read and count, publish nothing."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON for machines."),
) -> None:
    """Import what came of replies: bought, solved, returned."""
    from streams.clock import SystemClock
    from streams.outcomes import Defaults, read_outcomes_csv

    settings = settings_of(ctx)
    now_ms = SystemClock().now_ms()
    defaults = Defaults(
        source=source,
        policy=policy,
        now_ms=now_ms,
        latest_ms=now_ms + settings.align.max_skew_ms,
        values=settings.gateway.outcomes,
    )
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            imported = read_outcomes_csv(lines, defaults)
    except OSError as error:
        raise ImportFormatError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ImportFormatError(f"{file} is not UTF-8: {error}; save it as UTF-8") from error
    except ImportFormatError as error:
        raise ImportFormatError(f"{file}: {error}") from error
    _import(settings, imported.events, imported.skipped, dry_run=dry_run, as_json=as_json)


def _import(
    settings: Settings,
    records: Sequence[DialogueTurn | FeedbackEvent],
    unusable: Sequence[str],
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    envelopes, too_large = encode(settings, records, dry_run=dry_run)
    if not dry_run:
        publish(settings, envelopes)
    skipped = [*unusable, *too_large]
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
