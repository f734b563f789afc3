"""``clawstream replay --into retrain``: train on a part of the log once more."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from streams.cli.common import print_json, settings_of, terminable
from streams.contracts import VersionStatus
from streams.errors import ReplayError

if TYPE_CHECKING:
    from learner.retrain.command import Done, Outlook
    from streams.settings import Settings

app = typer.Typer(add_completion=False)

INTERRUPTED_EXIT = 130
REJECTED_EXIT = 3
_NAME = re.compile(r"[A-Za-z0-9._-]+")


@app.command()
def retrain(
    ctx: typer.Context,
    begin: str | None = typer.Option(
        None, "--from", help="Where to begin: earliest, a time, a duration ago (24h, PT24H), a CSV."
    ),
    end: str = typer.Option("latest", "--to", help="Where to end, in the same words."),
    archive: str = typer.Option(
        "",
        "--archive",
        help="Read this archive, not Kafka: a folder, or a URL such as s3://bucket/path.",
    ),
    base_version: int = typer.Option(
        0, "--base-version", min=0, help="The version to begin from; 0 is the base model."
    ),
    updates: int | None = typer.Option(
        None, "--updates", min=1, help="How many; if left out, each segment is used once."
    ),
    execute: bool = typer.Option(
        False, "--execute", help="Do it. Without this, only say what would be read."
    ),
    name: str | None = typer.Option(None, "--name", help="What to call it; the time if left out."),
    resume: str | None = typer.Option(
        None, "--resume", metavar="NAME", help="Go on with one that was interrupted."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON for machines."),
) -> None:
    """Train on the scored segments of a part of the log, into a new candidate version.

    The live learner is not disturbed, and nothing serves the version by itself. The same
    segments, settings and base version give the same batches, byte for byte. Exits with 3 if
    the version was rejected.
    """
    from learner.loop import Topics
    from learner.retrain import command

    settings = settings_of(ctx)
    if resume is None and begin is None:
        raise ReplayError("say where to begin: --from earliest, --from 24h, --from 2026-11-01")
    called = _checked(resume or name or time.strftime("%Y%m%d-%H%M%S", time.gmtime()))
    wanted = command.Wanted(
        begin=begin or "", end=end, base_version=base_version, updates=updates, archive=archive
    )
    if resume is None and not execute:
        with _progress("records", quiet=as_json) as shown:
            outlook = command.look(settings, wanted, Topics(), shown)
        _show_outlook(settings, wanted.base_version, outlook, as_json)
        return
    if resume is None:
        command.begin(settings, wanted, Topics(), called)
    done = _run(settings, called, as_json)
    _show(called, done, as_json)
    if done.version.status is VersionStatus.REJECTED:
        raise typer.Exit(REJECTED_EXIT)


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name) or name.startswith("."):
        raise ReplayError(f"--name {name!r}: letters, digits, dots, dashes and underscores only")
    return name


def _run(settings: Settings, name: str, as_json: bool) -> Done:
    from learner.loop import Topics
    from learner.retrain import command
    from learner.trainer import make_trainer

    folder = command.folder_of(settings, name)
    try:
        with (
            terminable(),
            _progress("records", quiet=as_json) as read,
            _progress("updates", quiet=as_json) as updated,
        ):
            return command.go_on(
                settings, folder, Topics(), make_trainer, read=read, updated=updated
            )
    except KeyboardInterrupt:
        typer.echo(f"interrupted; go on with --resume {name}", err=True)
        raise typer.Exit(INTERRUPTED_EXIT) from None


@contextmanager
def _progress(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.completed:,} of {task.total:,} {task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True, quiet=quiet), transient=True)
    begun = False

    def show(done: int, total: int) -> None:
        nonlocal begun
        if not begun:
            begun = True
            bar.start()
            bar.add_task(what, total=total)
        bar.update(bar.task_ids[0], completed=done, refresh=True)
        if done >= total:
            bar.stop()

    try:
        yield show
    finally:
        # Stopping one that was never shown would leave an empty line.
        if begun:
            bar.stop()


def _show_outlook(settings: Settings, base_version: int, found: Outlook, as_json: bool) -> None:
    policy, counted = settings.learner.policy, found.counted
    if as_json:
        print_json(
            {
                "dry_run": True,
                "records": counted.records,
                "undecodable": counted.undecodable,
                "segments": _segments(counted.segments),
                "policy": policy,
                "usable": found.batches.usable,
                "base_version": base_version,
                "updates": len(found.batches.updates),
                "seed": found.batches.seed,
                "ranges": [asdict(one) for one in found.ranges],
            }
        )
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("policy", "segments", "that teach")
    for name, (segments, teaching) in counted.segments.items():
        table.add_row(name, f"{segments:,}", f"{teaching:,}")
    console = Console()
    console.print(table)
    console.print(
        f"{counted.records:,} records, {counted.undecodable:,} of them unreadable. "
        f"{len(found.batches.updates):,} updates of policy {policy} from version {base_version}, "
        f"of at most {settings.learner.batch_segments} segments each. "
        "Nothing was done: add --execute.",
        highlight=False,
    )


def _segments(counts: dict[str, tuple[int, int]]) -> dict[str, dict[str, int]]:
    return {
        policy: {"segments": segments, "trainable": teaching}
        for policy, (segments, teaching) in counts.items()
    }


def _show(name: str, done: Done, as_json: bool) -> None:
    from learner.retrain.run import BATCHES

    version = done.version
    undone = sum(one.undone is not None for one in done.made)
    facts: dict[str, Any] = {
        "name": name,
        "policy": version.policy,
        "version": version.version,
        "status": version.status.value,
        "parent": version.parent,
        "segments": version.segment_count,
        "updates": len(done.made),
        "updates_undone": undone,
        "batches_sha256": version.attributes[BATCHES],
        "adapter_files": dict(version.adapter_files),
        "adapter_uri": version.adapter_uri,
        "reason": version.reason,
    }
    if as_json:
        print_json(facts)
        return
    from rich.console import Console

    Console().print(
        f"version {version.version} of policy {version.policy}, {version.status.value}, from "
        f"{'the base model' if version.parent is None else f'version {version.parent}'}: "
        f"{version.segment_count:,} segments in {len(done.made):,} updates, {undone:,} of them "
        f"undone. Batches: sha256 {version.attributes[BATCHES]} ({version.reason})",
        highlight=False,
        soft_wrap=True,
    )
