"""``clawstream dlq``: records that could not be used, and what to do about them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from streams.cli.common import print_json, print_lines, settings_of
from streams.errors import DeadLetterError

if TYPE_CHECKING:
    from streams.dlq.acting import Desk
    from streams.dlq.model import Case, Group, Mark, Plan, Selector
    from streams.serde import Codec
    from streams.settings import Settings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Look at records that could not be used; retry, drop or export them.",
)

_IDS = typer.Argument(None, help="Letters by the place of their record: topic/partition/offset.")
_STAGE = typer.Option(None, "--stage", help="Of this stage only: feedback_align, reward, learn.")
_REASON = typer.Option(None, "--reason", help="For this reason only, for example unknown_schema.")
_TOPIC = typer.Option(None, "--topic", help="About records of this topic only.")
_SINCE = typer.Option(None, "--since", help="From this time on: 2026-11-30T06:15 (UTC), 6h, 30d.")
_UNTIL = typer.Option(None, "--until", help="Before this time.")
_JSON = typer.Option(False, "--json", help="Print JSON for machines.")
_ALL = typer.Option(False, "--all", help="Every letter that is open.")
_ACTOR = typer.Option(None, "--actor", help="Who does it; kept with the mark.")
_NOTE = typer.Option(None, "--note", help="Why; kept with the mark.")
_DRY_RUN = typer.Option(False, "--dry-run", help="Say what would be done, do nothing.")
_STATE = typer.Option("open", "--state", help="open, retried, dropped or all.")

_STATES = ("open", "retried", "dropped", "all")


@app.callback()
def _group() -> None:
    """Look at records that could not be used; retry, drop or export them."""


@app.command("list")
def list_letters(
    ctx: typer.Context,
    letters: bool = typer.Option(False, "--letters", help="Each letter in place of groups."),
    state: str = _STATE,
    stage: str | None = _STAGE,
    reason: str | None = _REASON,
    topic: str | None = _TOPIC,
    since: str | None = _SINCE,
    until: str | None = _UNTIL,
    as_json: bool = _JSON,
) -> None:
    """List letters by stage and reason, or each."""
    from streams.dlq.model import grouped
    from streams.dlq.rendering import case_json, group_json

    desk, _ = _desk(settings_of(ctx))
    selector = _selector(None, stage, reason, topic, since, until)
    ledger = desk.ledger()
    cases = _in_state(selector.chosen(ledger.cases()), state)
    if ledger.unreadable:
        typer.echo(f"{ledger.unreadable} records of the topic are no dead letters", err=True)
    if as_json:
        print_json([case_json(c) for c in cases] if letters else _map(group_json, grouped(cases)))
    elif letters:
        _print_cases(cases)
    else:
        _print_groups(grouped(cases))


@app.command()
def show(
    ctx: typer.Context,
    letter: str = typer.Argument(help="The place of its record: topic/partition/offset."),
    as_json: bool = _JSON,
) -> None:
    """Show everything about the letters of one record, its content too if it can be read."""
    desk, codec = _desk(settings_of(ctx))
    selector = _selector([letter], None, None, None, None, None)
    everything = desk.ledger().cases()
    cases = selector.chosen(everything)
    shown = list(_whole(settings_of(ctx), codec, cases))
    later = [case for case in everything if case.attempt and case.root in {c.root for c in cases}]
    for entry in shown:
        entry["died_again"] = [str(c.letter.origin) for c in later if c not in cases]
    if as_json:
        print_json(shown)
    else:
        for entry in shown:
            _print_whole(entry)


@app.command()
def retry(
    ctx: typer.Context,
    letters: list[str] | None = _IDS,
    every: bool = _ALL,
    stage: str | None = _STAGE,
    reason: str | None = _REASON,
    topic: str | None = _TOPIC,
    since: str | None = _SINCE,
    until: str | None = _UNTIL,
    max_attempts: int = typer.Option(
        3, "--max-attempts", min=1, help="Refuse a record that was retried so often."
    ),
    force: bool = typer.Option(
        False, "--force", help="Beyond --max-attempts, and what was dropped."
    ),
    actor: str | None = _ACTOR,
    note: str | None = _NOTE,
    dry_run: bool = _DRY_RUN,
    as_json: bool = _JSON,
) -> None:
    """Publish records again, as they were, to the partitions where they stood.

    Letters that were retried before are left alone, so it may be repeated, also after it was
    killed. Ids, keys and the order within a partition stay.
    """
    from streams.dlq.rendering import plan_json

    selector = _chosen(letters, every, stage, reason, topic, since, until)
    desk, _ = _desk(settings_of(ctx))
    if dry_run:
        plan = desk.plan(selector, max_attempts=max_attempts, force=force)
    else:
        plan = desk.retry(
            selector,
            _author(actor, note),
            max_attempts=max_attempts,
            force=force,
            on_commit=lambda marks: typer.echo(f"retried {len(marks)}", err=True),
        )
    if as_json:
        print_json(plan_json(plan, dry_run=dry_run))
    else:
        _print_plan(plan, dry_run)


@app.command()
def drop(
    ctx: typer.Context,
    letters: list[str] | None = _IDS,
    every: bool = _ALL,
    stage: str | None = _STAGE,
    reason: str | None = _REASON,
    topic: str | None = _TOPIC,
    since: str | None = _SINCE,
    until: str | None = _UNTIL,
    actor: str | None = _ACTOR,
    note: str | None = _NOTE,
    as_json: bool = _JSON,
) -> None:
    """Mark open letters as done with. Nothing is deleted; `retry --force` still finds them."""
    from streams.dlq.rendering import mark_json

    selector = _chosen(letters, every, stage, reason, topic, since, until)
    desk, _ = _desk(settings_of(ctx))
    marks: list[Mark] = desk.drop(selector, _author(actor, note))
    if as_json:
        print_json({"dropped": [mark_json(mark) for mark in marks]})
    else:
        typer.echo(f"dropped {len(marks)} letters; nothing was deleted")


@app.command()
def export(
    ctx: typer.Context,
    out: Path = typer.Option(..., "--out", help="The JSON-lines file; - for standard output."),
    state: str = _STATE,
    stage: str | None = _STAGE,
    reason: str | None = _REASON,
    topic: str | None = _TOPIC,
    since: str | None = _SINCE,
    until: str | None = _UNTIL,
) -> None:
    """Write letters with their bytes (base64), a JSON object a line. The file is whole or not
    there."""
    from streams.files import whole_file

    settings = settings_of(ctx)
    desk, codec = _desk(settings)
    selector = _selector(None, stage, reason, topic, since, until)
    cases = _in_state(selector.chosen(desk.ledger().cases()), state)
    with whole_file(out) as file:
        for entry in _whole(settings, codec, cases):
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
    typer.echo(f"exported {len(cases)} letters", err=True)


def _desk(settings: Settings) -> tuple[Desk, Codec]:
    from streams.dlq.acting import Desk
    from streams.serde import build_codec

    codec = build_codec(settings.schema_registry_url)
    return Desk(settings, codec), codec


def _author(actor: str | None, note: str | None) -> Any:
    from streams.dlq.acting import Author

    return Author(at_ms=time.time_ns() // 1_000_000, actor=actor, note=note)


def _selector(
    letters: Sequence[str] | None,
    stage: str | None,
    reason: str | None,
    topic: str | None,
    since: str | None,
    until: str | None,
) -> Selector:
    from streams.contracts import DeadLetterReason
    from streams.dlq.model import Place, Selector
    from streams.times import parse_time

    known = [str(item) for item in DeadLetterReason]
    if reason is not None and reason not in known:
        raise typer.BadParameter(f"{reason!r} is no reason; they are {', '.join(known)}")
    now_ms = time.time_ns() // 1_000_000
    return Selector(
        places=frozenset(Place.parse(text) for text in letters or ()),
        stage=stage,
        reason=reason,
        topic=topic,
        since_ms=None if since is None else parse_time(since, now_ms),
        until_ms=None if until is None else parse_time(until, now_ms),
    )


def _chosen(letters: Sequence[str] | None, every: bool, *conditions: str | None) -> Selector:
    """A selector that was meant: nothing said is not everything."""
    selector = _selector(letters, *conditions)
    if selector.is_empty and not every:
        raise DeadLetterError(
            "say which letters: their ids, --stage, --reason, --topic, --since, --until or --all"
        )
    return selector


def _in_state(cases: Sequence[Case], state: str) -> list[Case]:
    if state not in _STATES:
        raise typer.BadParameter(f"{state!r} is no state; they are {', '.join(_STATES)}")
    return [case for case in cases if state in ("all", case.state)]


def _whole(settings: Settings, codec: Codec, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    from streams.dlq.log import read_letters
    from streams.dlq.rendering import whole_json
    from streams.topics import load_inventory

    types = {t.name: t.record_type for t in load_inventory() if t.record_type is not None}
    by_place = {case.letter.at: case for case in cases}
    for place, dead in read_letters(settings, codec, by_place.keys()):
        yield whole_json(by_place[place], dead, codec, types)


def _map(render: Any, items: Sequence[Any]) -> list[Any]:
    return [render(item) for item in items]


def _print_groups(groups: Sequence[Group]) -> None:
    from streams.times import show_time

    head = ("stage", "reason", "letters", "open", "retried", "dropped", "last (UTC)")
    rows = [
        (g.stage, g.reason, g.letters, g.open, g.retried, g.dropped, show_time(g.last_ms))
        for g in groups
    ]
    print_lines(head, rows, [group.example for group in groups])


def _print_cases(cases: Sequence[Case]) -> None:
    from streams.times import show_time

    head = ("id", "time (UTC)", "stage", "reason", "state", "attempts")
    rows = [
        (
            c.letter.origin,
            show_time(c.letter.time_ms),
            c.letter.stage,
            c.letter.reason,
            c.state,
            c.attempt,
        )
        for c in cases
    ]
    print_lines(head, rows, [case.letter.message for case in cases])


def _print_whole(entry: dict[str, Any]) -> None:
    from streams.times import show_time

    for name, value in entry.items():
        shown = value
        if isinstance(value, dict):
            shown = json.dumps(value, ensure_ascii=False, indent=2)
        elif name in ("time", "timestamp") and value is not None:
            shown = f"{show_time(value)} UTC"
        typer.echo(f"{name + ':':16}{'-' if value in (None, [], {}) else shown}")


def _print_plan(plan: Plan, dry_run: bool) -> None:
    verb = "would retry" if dry_run else "retried"
    typer.echo(f"{verb} {len(plan.retry)} letters")
    if plan.done:
        typer.echo(f"{len(plan.done)} were retried before, nothing was done about them")
    for item in plan.refused:
        typer.echo(f"not retried {item.case.letter.origin}: {item.why}", err=True)
