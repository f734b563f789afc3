"""``clawstream replay``: a part of the log once more, beside live traffic."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from streams.cli.common import print_json, settings_of
from streams.errors import ReplayError
from streams.settings import Settings

if TYPE_CHECKING:
    from processors.replay.compare import Comparison
    from processors.replay.report import Outcomes
    from processors.replay.shadow import Against, Job
    from processors.replay.shadow import Progress as Reached
    from processors.replay.stages import Stage
    from streams.archive.reading import Archive
    from streams.kafka.places import Place, Range

app = typer.Typer(add_completion=False)

DIFFERENT_EXIT = 3
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_FIELDS_SHOWN = 10
_ASSUMED_PER_S = 10_000.0
"""Records a second and process, before a replay has been measured here."""


@app.command()
def replay(
    ctx: typer.Context,
    begin: str | None = typer.Option(
        None, "--from", help="Where to begin: earliest, a time, a duration ago (24h, PT24H), a CSV."
    ),
    end: str = typer.Option("latest", "--to", help="Where to end, in the same words."),
    stage: str = typer.Option("align", "--stage", help="align or reward."),
    warm_up: str | None = typer.Option(
        None,
        "--warm-up",
        help="How much earlier to begin reading, so that sessions that were open are complete: a "
        "duration, or earliest. As much as the rules can look back, if left out.",
    ),
    archive: str | None = typer.Option(
        None,
        "--archive",
        help="Read this archive, not Kafka: a folder, or a URL such as s3://bucket/path.",
    ),
    against: str | None = typer.Option(
        None,
        "--against",
        help="What outputs are compared with: live, the topic in Kafka, or archive, the one that "
        "is archived. The latter with --archive, if left out.",
    ),
    sessions: str = typer.Option("", "--sessions", help="Only these, with commas between."),
    rate: float | None = typer.Option(
        None, "--rate", min=1.0, help="At most so many records a second, to spare live traffic."
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
    """Put a part of the log through a stage again, and compare with what it put out live.

    A shadow: nothing is produced to Kafka. It runs this version of the code with these settings;
    the same on the same log differs in nothing. Exits with 3 if anything differs.
    """
    from processors.replay.shadow import load_job, prepare

    settings = settings_of(ctx)
    if resume is not None:
        folder = _folder(settings, resume)
        job = load_job(folder)
        settings = _at_kafka(settings) if job.needs_kafka else settings
        prepare(folder, job, settings)
        _run(folder, settings, rate, as_json)
        return
    if begin is None:
        raise ReplayError("say where to begin: --from earliest, --from 24h, --from 2026-11-01")
    wanted = [item.strip() for item in sessions.split(",") if item.strip()]
    if wanted and stage != "align":
        raise ReplayError("--sessions works with --stage align: a user's reward needs all sessions")
    compared = _against(against, archive)
    if archive is None or compared == "live":
        settings = _at_kafka(settings)
    job = _plan(settings, stage, (begin, end), warm_up, wanted, archive, compared)
    if not execute:
        _show_plan(job, rate, as_json)
        return
    folder = _folder(settings, name or time.strftime("%Y%m%d-%H%M%S", time.gmtime()))
    prepare(folder, job, settings)
    _run(folder, settings, rate, as_json)


def _at_kafka(settings: Settings) -> Settings:
    """With Kafka's address written down: the processes of a replay do not look for it."""
    from streams.kafka.clients import resolve_bootstrap

    kafka = settings.kafka.model_copy(update={"bootstrap_servers": resolve_bootstrap(settings)})
    return settings.model_copy(update={"kafka": kafka})


def _folder(settings: Settings, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ReplayError(f"--name {name!r}: letters, digits, dots, dashes and underscores only")
    return (settings.data_dir / "replays" / name).absolute()


def _plan(
    settings: Settings,
    stage_name: str,
    places: tuple[str, str],
    warm_up: str | None,
    sessions: Sequence[str],
    archive_at: str | None,
    against: Against,
) -> Job:
    from processors.replay.shadow import Job
    from processors.replay.stages import build_stage
    from streams.archive.reading import open_archive
    from streams.kafka.places import parse_place
    from streams.serde import build_codec

    begin, end = places
    now_ms = time.time_ns() // 1_000_000
    first, last = parse_place(begin, now_ms), parse_place(end, now_ms)
    stage = build_stage(stage_name, settings, build_codec(settings.schema_registry_url))
    before = _before(first, warm_up, stage.needs_before_ms)
    if first.time_ms is not None and last.time_ms is not None and first.time_ms >= last.time_ms:
        raise ReplayError(f"--from {begin} does not lie before --to {end}")
    archive = None if archive_at is None else open_archive(archive_at, settings)
    if archive is None:
        ranges = _live_ranges(settings, stage.inputs, before, last)
    else:
        ranges = _archived_ranges(archive, stage, before, last, against)
    return Job(
        stage=stage_name,
        ranges=tuple(ranges),
        read_from_ms=before.time_ms or 0,
        compare_from_ms=first.time_ms or 0,
        sessions=tuple(sessions),
        archive="" if archive is None else archive.address,
        against=against,
    )


def _against(text: str | None, archive: str | None) -> Against:
    if text == "live" or (text is None and archive is None):
        return "live"
    if text not in (None, "archive"):
        raise ReplayError(f"--against {text!r}: choose live or archive")
    if archive is None:
        raise ReplayError("--against archive: say which one with --archive")
    return "archive"


def _live_ranges(
    settings: Settings, topics: Sequence[str], first: Place, last: Place
) -> Sequence[Range]:
    from streams.kafka.places import KafkaLog, ranges_between, resolve
    from streams.kafka.reading import connect

    with connect(settings, "clawstream-replay") as consumer:
        partitions, log = _partitions(settings, topics), KafkaLog(consumer)
        starts = resolve(log, partitions, first, is_end=False)
        ends = resolve(log, partitions, last, is_end=True)
    return ranges_between(starts, ends)


def _archived_ranges(
    archive: Archive, stage: Stage, first: Place, last: Place, against: Against
) -> Sequence[Range]:
    """What lies between two places, of which nothing must be missing; nor of the outputs."""
    from streams.kafka.places import ranges_between, resolve

    partitions = {topic: archive.partitions(topic) for topic in stage.inputs}
    starts = resolve(archive, partitions, first, is_end=False)
    ends = resolve(archive, partitions, last, is_end=True)
    ranges = ranges_between(starts, ends)
    for item in ranges:
        archive.require(item.topic, item.partition, item.start, item.end)
    if against == "archive":
        if stage.output not in archive.topics():
            raise ReplayError(
                f"{stage.output} is not in the archive {archive.address}: add --against live to "
                "compare with the topic in Kafka"
            )
        for partition in archive.footers(stage.output):
            start = archive.offset_at(stage.output, partition, first.time_ms or 0)
            archive.require(
                stage.output, partition, start, archive.range(stage.output, partition)[1]
            )
    return ranges


def _before(first: Place, warm_up: str | None, needed_ms: int) -> Place:
    """Where reading begins."""
    from streams.kafka.places import EARLIEST, Place, duration_ms

    if warm_up == EARLIEST:
        return Place(EARLIEST)
    ms = needed_ms if warm_up is None else duration_ms(warm_up)
    if ms is None:
        raise ReplayError(f"--warm-up {warm_up!r}: give a duration (24h, PT24H) or earliest")
    if first.time_ms is None:
        return first
    return Place(first.text, time_ms=max(0, first.time_ms - ms))


def _partitions(settings: Settings, topics: Sequence[str]) -> dict[str, int]:
    from streams.kafka.admin import Admin

    found = Admin(settings.kafka, settings.kafka.bootstrap_servers or "").describe(tuple(topics))
    for topic in topics:
        if topic not in found:
            raise ReplayError(f"there is no topic {topic}: run `clawstream topics apply`")
    return {topic: found[topic].partitions for topic in topics}


def _show_plan(job: Job, rate: float | None, as_json: bool) -> None:
    import os

    records = sum(item.records for item in job.ranges)
    most = min(len({item.partition for item in job.ranges}), os.cpu_count() or 1)
    per_s = min(rate or float("inf"), _ASSUMED_PER_S * most)
    if as_json:
        ranges = [asdict(item) for item in job.ranges]
        print_json(
            {"dry_run": True, "records": records, "seconds": records / per_s, "ranges": ranges}
        )
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("topic", "partition", "from", "to", "records")
    for item in job.ranges:
        table.add_row(
            item.topic, str(item.partition), str(item.start), str(item.end), f"{item.records:,}"
        )
    console = Console()
    console.print(table)
    console.print(
        f"{records:,} records, warm-up included: about {records / per_s:,.0f} s at "
        f"{per_s:,.0f} a second. Nothing was done: add --execute.",
        highlight=False,
    )


def _run(folder: Path, settings: Settings, rate: float | None, as_json: bool) -> None:
    from processors.replay.report import compare_with_live, outcomes
    from processors.replay.shadow import load_job, run

    job = load_job(folder)
    total = sum(item.records for item in job.ranges)
    began_s = time.monotonic()
    with _progress(total, quiet=as_json) as show:
        run(folder, show, rate_per_s=rate)
    seconds = time.monotonic() - began_s
    came = outcomes(folder)
    found = compare_with_live(folder, settings)
    if as_json:
        print_json(_as_dict(folder, came, found, seconds))
    else:
        _print(folder, came, found, seconds)
    if not found.is_equal:
        raise typer.Exit(DIFFERENT_EXIT)


@contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Callable[[Reached], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    done: dict[int, int] = {}
    columns = (
        TextColumn("{task.completed:,} of {task.total:,} records"),
        BarColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("replay", total=total)

        def show(reached: Reached) -> None:
            done[reached.partition] = reached.records
            bar.update(task, completed=sum(done.values()))

        yield show


def _as_dict(folder: Path, came: Outcomes, found: Comparison, seconds: float) -> dict[str, Any]:
    return {
        "name": folder.name,
        "records": came.records,
        "outputs": came.outputs,
        "seconds": seconds,
        "other_outputs": came.others,
        "is_equal": found.is_equal,
        "comparison": asdict(found),
    }


def _print(folder: Path, came: Outcomes, found: Comparison, seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("outputs", "number", "are")
    rows: Mapping[str, tuple[int, str]] = {
        "equal": (found.equal, "the same bytes, or the same content"),
        "different": (found.different, "on both sides, with other content"),
        "only here": (found.only_here, "made by the replay, not live"),
        "only there": (found.only_there, "live, not made by the replay"),
        "not yet live": (found.not_yet_live, "due after the last that the live stage put out"),
        "began before": (found.began_before, "of sessions older than what was read: not compared"),
    }
    for kind, (count, text) in rows.items():
        table.add_row(kind, f"{count:,}", text)
    console.print(table)
    often = sorted(found.fields.items(), key=lambda item: -item[1])
    for path, count in often[:_FIELDS_SHOWN]:
        console.print(f"  {count:,} differ in {path}", highlight=False)
    for item in found.examples:
        console.print(
            f"  {item.kind}: segment {item.segment_id} revision {item.revision} of "
            f"{item.session} {', '.join(item.fields)}",
            highlight=False,
        )
    for topic, count in came.others.items():
        console.print(f"  {count:,} records for {topic} were not produced", highlight=False)
    console.print(
        f"{came.records:,} records in {seconds:,.1f} s ({folder.name}). "
        + ("No difference." if found.is_equal else "There are differences."),
        highlight=False,
    )
