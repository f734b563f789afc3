"""``clawstream schemas``: the record schemas, their history, and a schema registry."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from streams.cli.common import print_json, settings_of
from streams.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from streams.serde import SchemaStore, SchemaVersion
    from streams.serde.compatibility import Change, Problem
    from streams.serde.confluent import ConfluentRegistry, Registered
    from streams.topics import Topic

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Check, compare and register the record schemas.",
)

JSON = typer.Option(False, "--json", help="Print JSON for machines.")
FOLDER = typer.Option(None, "--folder", help="Other schema files than those installed.")
REGISTRY = typer.Option(False, "--registry", help="Look at what the schema registry holds, too.")
RECORD = typer.Argument(help="A record, such as DialogueTurn or dialogue_turn.")


@app.callback()
def _group() -> None:
    """Check, compare and register the record schemas."""


@app.command()
def check(
    ctx: typer.Context,
    folder: Path | None = FOLDER,
    registry: bool = REGISTRY,
    as_json: bool = JSON,
) -> None:
    """Check that every version of each schema reads what every other version wrote.

    FULL_TRANSITIVE, and every enum with the default "unknown". With --registry also the current
    schemas against all versions that the registry's subjects hold. Exits with 1 if not.
    """
    from streams.serde.compatibility import check_versions

    store = _store(folder)
    found = check_versions(store)
    held: list[Registered] = []
    if registry:
        held, more = _check_registry(_registry(ctx), store)
        found += more
    if as_json:
        print_json([asdict(problem) for problem in found])
    else:
        for problem in found:
            typer.echo(str(problem), err=True)
        if not found:
            typer.echo(f"{len(store.versions)} versions read each other")
            if registry:
                typer.echo(f"and the current ones {len(held)} in the registry, both ways")
    if found:
        raise typer.Exit(1)


@app.command()
def diff(
    ctx: typer.Context,
    record: str = RECORD,
    before: int = typer.Argument(help="A version number."),
    after: int = typer.Argument(help="Another one; with --registry, of the registry's subject."),
    folder: Path | None = FOLDER,
    registry: bool = REGISTRY,
    as_json: bool = JSON,
) -> None:
    """Show in what two versions of a schema differ."""
    from streams.serde.compatibility import changes

    versions = _versions(_store(folder), record)
    others = versions
    if registry:
        (topic,) = _topics(versions[0].record)
        others = [item.schema for item in _held(_registry(ctx), topic)]
        if not others:
            raise SchemaError(f"the registry holds nothing under {_subject(topic)}")
    found = changes(_version(versions, before), _version(others, after))
    if as_json:
        print_json([asdict(change) for change in found])
        return
    for change in found:
        what = {"added": change.after, "removed": change.before}.get(
            change.kind, f"{change.before} -> {change.after}"
        )
        typer.echo(f"{change.kind} {change.field}: {what}")
    if not found:
        typer.echo("no difference but in docs")


@app.command()
def history(
    ctx: typer.Context,
    record: str | None = typer.Argument(None, help="A record; all if left out."),
    folder: Path | None = FOLDER,
    registry: bool = REGISTRY,
    as_json: bool = JSON,
) -> None:
    """Show the versions of the schemas: fingerprints, and what each one brought.

    With --registry those that the registry's subjects hold, and which of ours they are.
    """
    from streams.serde.compatibility import changes

    store = _store(folder)
    if registry:
        _show_held(ctx, store, record, as_json)
        return
    names = [record] if record is not None else sorted({v.record for v in store.versions})
    shown: list[dict[str, Any]] = []
    for name in names:
        before: SchemaVersion | None = None
        for version in _versions(store, name):
            new: list[Change] = [] if before is None else changes(before, version)
            shown.append(
                {
                    "record": version.record,
                    "version": version.version,
                    "fingerprint": version.fingerprint.hex(),
                    "changes": [f"{change.kind} {change.field}" for change in new],
                }
            )
            before = version
    if as_json:
        print_json(shown)
        return
    for item in shown:
        typer.echo(f"{item['record']} v{item['version']} {item['fingerprint']}")
        for change in item["changes"]:
            typer.echo(f"  {change}")


def _show_held(ctx: typer.Context, store: SchemaStore, record: str | None, as_json: bool) -> None:
    from streams.serde.compatibility import changes

    client = _registry(ctx)
    wanted = None if record is None else _versions(store, record)[0].record
    shown: list[dict[str, Any]] = []
    for topic in _topics(wanted):
        before: SchemaVersion | None = None
        for item in _held(client, topic):
            ours = store.by_fingerprint.get(item.schema.fingerprint)
            new: list[Change] = [] if before is None else changes(before, item.schema)
            shown.append(
                {
                    "subject": item.subject,
                    "version": item.schema.version,
                    "id": item.schema_id,
                    "fingerprint": item.schema.fingerprint.hex(),
                    "ours": None if ours is None else f"{ours.record} v{ours.version}",
                    "changes": [f"{change.kind} {change.field}" for change in new],
                }
            )
            before = item.schema
    if as_json:
        print_json(shown)
        return
    for line in shown:
        whose = line["ours"] or "not one of ours"
        typer.echo(
            f"{line['subject']} v{line['version']} id {line['id']} {line['fingerprint']} ({whose})"
        )
        for change in line["changes"]:
            typer.echo(f"  {change}")
    if not shown:
        typer.echo("the registry holds none: run `clawstream schemas register`")


@app.command()
def register(ctx: typer.Context, as_json: bool = JSON) -> None:
    """Register each topic's current schema under <topic>-value, FULL_TRANSITIVE.

    If one of them does not fit what its subject holds, nothing is registered.
    """
    from streams.serde import load_schemas

    registry, store = _registry(ctx), load_schemas()
    _, found = _check_registry(registry, store)
    if found:
        lines = "".join(f"\n  {problem}" for problem in found)
        raise SchemaError(f"nothing was registered:{lines}")
    ids = {
        _subject(topic): registry.register(_subject(topic), store.current(topic.schema or ""))
        for topic in _topics()
    }
    if as_json:
        print_json(ids)
        return
    for subject, schema_id in ids.items():
        typer.echo(f"{subject}: id {schema_id}")


def _registry(ctx: typer.Context) -> ConfluentRegistry:
    from streams.serde.confluent import ConfluentRegistry

    url = settings_of(ctx).schema_registry_url
    if url is None:
        raise SchemaError("no schema registry is set; set SCHEMA_REGISTRY_URL")
    return ConfluentRegistry(url)


def _topics(record: str | None = None) -> list[Topic]:
    """Those whose values have a schema; of one record alone if it is given."""
    from streams.topics import load_inventory

    found = [topic for topic in load_inventory().topics if topic.schema is not None]
    return [topic for topic in found if record in (None, topic.schema)]


def _subject(topic: Topic) -> str:
    return f"{topic.name}-value"


def _held(registry: ConfluentRegistry, topic: Topic) -> list[Registered]:
    return registry.versions(_subject(topic), topic.schema or "")


def _check_registry(
    registry: ConfluentRegistry, store: SchemaStore
) -> tuple[list[Registered], list[Problem]]:
    """What the subjects of all topics hold, and what of it does not fit the current schemas."""
    from streams.serde.compatibility import check_registered

    held: list[Registered] = []
    found: list[Problem] = []
    for topic in _topics():
        own = _held(registry, topic)
        schemas: Iterable[SchemaVersion] = (item.schema for item in own)
        found += check_registered(store.current(topic.schema or ""), _subject(topic), schemas)
        held += own
    return held, found


def _store(folder: Path | None) -> SchemaStore:
    from streams.serde import load_schemas

    if folder is not None and not folder.is_dir():
        raise SchemaError(f"{folder} is no folder of schema files")
    return load_schemas(folder)


def _versions(store: SchemaStore, record: str) -> list[SchemaVersion]:
    from streams.serde.schemas import snake_case

    found = [v for v in store.versions if record in (v.record, snake_case(v.record))]
    if not found:
        known = ", ".join(sorted({v.record for v in store.versions}))
        raise SchemaError(f"there is no record {record}: choose one of {known}")
    return found


def _version(versions: list[SchemaVersion], number: int) -> SchemaVersion:
    for version in versions:
        if version.version == number:
            return version
    known = ", ".join(str(version.version) for version in versions)
    raise SchemaError(f"{versions[0].record} has no version {number}: there are {known}")
