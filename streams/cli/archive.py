"""``clawstream archive``: topics as Parquet files, and topics made of them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from streams.cli.common import print_json, print_table, settings_of
from streams.errors import ArchiveError

if TYPE_CHECKING:
    from streams.archive.checking import TopicReport
    from streams.archive.files import Footer
    from streams.archive.store import Store
    from streams.settings import Settings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Write topics to Parquet files; check, list and restore them.",
)

_AT = typer.Option(None, "--at", help="The archive: a folder, or a URL such as s3://bucket/path.")
_TOPICS = typer.Option(None, "--topic", help="This topic; may be given more than once.")
_JSON = typer.Option(False, "--json", help="Print JSON for machines.")


@app.callback()
def _group() -> None:
    """Write topics to Parquet files; check, list and restore them."""


@app.command()
def run(
    ctx: typer.Context,
    at: str | None = _AT,
    topics: list[str] | None = _TOPICS,
    once: bool = typer.Option(False, "--once", help="Stop at the topics' present ends."),
    skip_aged_out: bool = typer.Option(
        False, "--skip-aged-out", help="Go on behind records that Kafka has deleted, and note it."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON object for each file."),
) -> None:
    """Archive topics as they grow, until SIGTERM or Ctrl-C; all with records of ours by default.

    It goes on where the files that are there end, also after it was killed.
    """
    from streams.archive.writing import Archiver, Rolling
    from streams.serde import Codec, build_codec, load_schemas

    with _stopping() as is_stopping:
        settings = settings_of(ctx)
        codec: Codec = build_codec(settings.schema_registry_url)
        archiver = Archiver(
            settings,
            _store(settings, at),
            codec,
            load_schemas(),
            Rolling(size_bytes=settings.archive.roll_bytes, age_s=settings.archive.roll_ms / 1_000),
            types=_types(topics),
            on_file=_tell_json if as_json else _tell,
            skip_aged_out=skip_aged_out,
        )
        archiver.run(once=once, is_stopping=is_stopping)


@app.command()
def verify(
    ctx: typer.Context,
    at: str | None = _AT,
    topics: list[str] | None = _TOPICS,
    footers_only: bool = typer.Option(
        False, "--footers-only", help="Find gaps and overlaps, but do not read the records."
    ),
    as_json: bool = _JSON,
) -> None:
    """Check that files are whole and meet end to end; exit 1 if not."""
    from streams.archive.checking import verify as check

    reports = check(_store(settings_of(ctx), at), tuple(topics or ()), footers_only=footers_only)
    if as_json:
        print_json([asdict(report) for report in reports])
    else:
        for report in reports:
            _print_report(report)
    problems = sum(len(report.problems) for report in reports)
    if problems:
        raise ArchiveError(f"{problems} problems found in the archive")


@app.command()
def restore(
    ctx: typer.Context,
    topic: str = typer.Argument(help="The archived topic."),
    at: str | None = _AT,
    into: str | None = typer.Option(
        None, "--into", help="The topic to fill, new or empty; of the same name by default."
    ),
    replication: int = typer.Option(1, "--replication", min=1, help="Copies, if it is created."),
    allow_gaps: bool = typer.Option(
        False, "--allow-gaps", help="Restore what there is although files are missing."
    ),
    as_json: bool = _JSON,
) -> None:
    """Make a topic of an archived one: keys, values, headers and timestamps as they were.

    A restore that was ended goes on where it was when it is run again.
    """
    from rich.console import Console
    from rich.progress import Progress

    from streams.archive.reading import Archive
    from streams.archive.restoring import Restorer

    settings = settings_of(ctx)
    archive = Archive(_store(settings, at))
    footers = archive.footers(topic)
    rows = sum(footer.rows for files in footers.values() for footer in files)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"restoring {topic}", total=rows)
        done = Restorer(settings, archive, on_progress=lambda n: progress.advance(task, n)).restore(
            topic, into or topic, replication=replication, allow_gaps=allow_gaps
        )
    written = sum(part.written for part in done)
    found = sum(part.found for part in done)
    if as_json:
        print_json(
            {
                "topic": topic,
                "into": into or topic,
                "written": written,
                "found": found,
                "partitions": [asdict(part) for part in done],
            }
        )
    else:
        before = f", {found} were there from an earlier run" if found else ""
        typer.echo(f"restored {written} records of {topic} into {into or topic}{before}")


@app.command("ls")
def list_files(
    ctx: typer.Context,
    at: str | None = _AT,
    topics: list[str] | None = _TOPICS,
    as_json: bool = _JSON,
) -> None:
    """List what is archived, by topic and partition."""
    from streams.archive.reading import Archive

    store = _store(settings_of(ctx), at)
    archive = Archive(store)
    sizes: dict[tuple[str, int], int] = {}
    for file in store.files():
        place = (file.name.topic, file.name.partition)
        sizes[place] = sizes.get(place, 0) + file.size_bytes
    listed = [
        _partition_json(topic, partition, footers, sizes[topic, partition])
        for topic in topics or archive.topics()
        for partition, footers in sorted(archive.footers(topic).items())
    ]
    if as_json:
        print_json(listed)
    else:
        _print_partitions(listed)


def _store(settings: Settings, at: str | None) -> Store:
    from streams.archive.store import open_store

    return open_store(at or settings.effective_archive_url, settings.archive.options)


def _types(topics: Sequence[str] | None) -> dict[str, Any]:
    from streams.topics import load_inventory

    known = {topic.name: topic.record_type for topic in load_inventory()}
    if not topics:
        return {name: kind for name, kind in known.items() if kind is not None}
    return {name: known.get(name) for name in topics}


def _tell(footer: Footer) -> None:
    typer.echo(f"{footer.name}: {footer.rows} records, up to offset {footer.end}", err=True)


def _tell_json(footer: Footer) -> None:
    print_json(
        {
            "file": str(footer.name),
            "topic": footer.name.topic,
            "partition": footer.name.partition,
            "start": footer.name.start,
            "end": footer.end,
            "records": footer.rows,
        }
    )
    sys.stdout.flush()


@contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM or Ctrl-C came; a second one ends the process at once."""
    heard: list[int] = []

    def hear(number: int, _frame: object) -> None:
        if heard:
            raise KeyboardInterrupt
        heard.append(number)

    before = {n: signal.signal(n, hear) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(heard)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _partition_json(
    topic: str, partition: int, footers: Sequence[Footer], size_bytes: int
) -> dict[str, Any]:
    return {
        "topic": topic,
        "partition": partition,
        "files": len(footers),
        "records": sum(footer.rows for footer in footers),
        "bytes": size_bytes,
        "start": footers[0].name.start,
        "end": footers[-1].end,
        "first": min(footer.min_timestamp for footer in footers),
        "last": max(footer.max_timestamp for footer in footers),
    }


def _print_partitions(listed: Sequence[dict[str, Any]]) -> None:
    from rich.table import Table

    from streams.times import show_time

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    names = ("topic", "partition", "files", "records", "MB", "offsets", "from (UTC)", "to (UTC)")
    for name in names:
        table.add_column(name, justify="left" if name == "topic" else "right", no_wrap=True)
    for item in listed:
        table.add_row(
            item["topic"],
            str(item["partition"]),
            str(item["files"]),
            str(item["records"]),
            f"{item['bytes'] / 1e6:.1f}",
            f"{item['start']}-{item['end']}",
            show_time(item["first"]),
            show_time(item["last"]),
        )
    print_table(table)


def _print_report(report: TopicReport) -> None:
    verdict = "sound" if not report.problems else f"{len(report.problems)} problems"
    holes = f", {report.holes} offsets without a record" if report.holes else ""
    typer.echo(f"{report.topic}: {report.files} files, {report.rows} records{holes}: {verdict}")
    for line in (*report.problems, *report.aged_out):
        typer.echo(f"  {line}")
