"""``clawstream export``: scored segments as files for other trainers."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from streams.cli.common import print_json, settings_of
from streams.errors import ExportError
from streams.files import STANDARD_OUTPUT

if TYPE_CHECKING:
    from streams.contracts import ScoredSegment
    from streams.export.examples import Example, Found
    from streams.export.sources import Read, Wanted
    from streams.settings import Settings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Write preferences or demonstrations for TRL, as JSON lines.",
)

_OUT = typer.Option(..., "--out", help="The JSON-lines file; - for standard output.")
_POLICY = typer.Option(None, "--policy", help="Of this policy; learner.policy by default.")
_SINCE = typer.Option(None, "--since", help="Segments closed from this time on: 30d, 2026-11-01.")
_UNTIL = typer.Option(None, "--until", help="Segments closed before this time.")
_ARCHIVE = typer.Option(
    None, "--archive", help="Read this archive (folder or URL) in place of Kafka."
)
_CREDIBILITY = typer.Option(
    0.5, "--min-credibility", min=0.0, max=1.0, help="How far a rating must have been believed."
)
_JSON = typer.Option(False, "--json", help="Print JSON for machines.")


@app.callback()
def _group() -> None:
    """Write preferences or demonstrations for TRL, as JSON lines."""


@app.command()
def preferences(
    ctx: typer.Context,
    out: Path = _OUT,
    min_credibility: float = _CREDIBILITY,
    min_margin: float = typer.Option(
        0.0, "--min-margin", min=0.0, max=2.0, help="How much better the chosen reply was rated."
    ),
    policy: str | None = _POLICY,
    since: str | None = _SINCE,
    until: str | None = _UNTIL,
    archive: str | None = _ARCHIVE,
    as_json: bool = _JSON,
) -> None:
    """Replies and those the user had regenerated, in the shape of TRL's DPO."""
    from streams.export import examples

    rules = examples.Rules(min_credibility=min_credibility, min_margin=min_margin)
    settings = settings_of(ctx)
    wanted = _wanted(settings, policy, since, until)
    make = examples.preferences
    _export(_read(settings, archive), wanted, lambda s: make(s, rules), out, as_json)


@app.command()
def sft(
    ctx: typer.Context,
    out: Path = _OUT,
    min_reward: float = typer.Option(
        0.3, "--min-reward", min=-1.0, max=1.0, help="The least reward of a reply."
    ),
    min_credibility: float = _CREDIBILITY,
    policy: str | None = _POLICY,
    since: str | None = _SINCE,
    until: str | None = _UNTIL,
    archive: str | None = _ARCHIVE,
    as_json: bool = _JSON,
) -> None:
    """Replies that were well received, in the shape of TRL's SFT."""
    from streams.export import examples

    rules = examples.Rules(min_credibility=min_credibility, min_reward=min_reward)
    settings = settings_of(ctx)
    wanted = _wanted(settings, policy, since, until)
    make = examples.demonstrations
    _export(_read(settings, archive), wanted, lambda s: make(s, rules), out, as_json)


def _wanted(settings: Settings, policy: str | None, since: str | None, until: str | None) -> Wanted:
    from streams.export.sources import Wanted
    from streams.times import parse_time

    now_ms = time.time_ns() // 1_000_000
    return Wanted(
        policy=policy or settings.learner.policy,
        since_ms=None if since is None else parse_time(since, now_ms),
        until_ms=None if until is None else parse_time(until, now_ms),
    )


def _read(settings: Settings, archive: str | None) -> Read:
    from streams.export.sources import from_archive, from_kafka
    from streams.serde import build_codec

    codec = build_codec(settings.schema_registry_url)
    if archive is None:
        return from_kafka(settings, codec)
    from streams.archive.reading import open_archive

    return from_archive(open_archive(archive, settings), codec)


Make = Callable[["ScoredSegment"], Iterator["Found"]]


def _export(read: Read, wanted: Wanted, make: Make, out: Path, as_json: bool) -> None:
    from streams.export.sources import Latest
    from streams.files import whole_file

    latest = Latest.of(read, wanted)
    skipped: Counter[str] = Counter()
    written = 0
    with whole_file(out) as file:
        for example in _unique(latest.segments(read), make, skipped):
            file.write(json.dumps(example.content, ensure_ascii=False) + "\n")
            written += 1
        if not written:
            raise ExportError(_nothing(wanted, len(latest), skipped))
    counts = {
        "written": written,
        "segments": len(latest),
        "skipped": dict(sorted(skipped.items())),
        "out": str(out),
    }
    if as_json and out != STANDARD_OUTPUT:
        print_json(counts)
        return
    left = "".join(f", {count} {why}" for why, count in sorted(skipped.items()))
    typer.echo(
        f"{written} examples of {len(latest)} segments (left out{left or ': none'})", err=True
    )


def _unique(
    segments: Iterator[ScoredSegment], make: Make, skipped: Counter[str]
) -> Iterator[Example]:
    from streams.export.examples import Skipped

    seen: set[str] = set()
    for scored in segments:
        for found in make(scored):
            if isinstance(found, Skipped):
                skipped[found.why] += 1
            elif found.digest in seen:
                skipped["same example"] += 1
            else:
                seen.add(found.digest)
                yield found


def _nothing(wanted: Wanted, segments: int, skipped: Counter[str]) -> str:
    if not segments:
        return (
            f"there is no scored segment of policy {wanted.policy} in that time; see `clawstream "
            "lag`, or name another --policy, --since or --until"
        )
    left = ", ".join(f"{count} for {why}" for why, count in skipped.most_common())
    return (
        f"nothing to export: of {segments} segments of policy {wanted.policy}, "
        f"{'no reply has an alternative' if not skipped else 'left out were ' + left}; nothing "
        "was written"
    )
