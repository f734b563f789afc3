"""``clawstream schemas``: the record schemas, their history, and a schema registry."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from streams.cli.common import print_json, settings_of
from streams.errors import SchemaError

if TYPE_CHECKING:
    from streams.serde import SchemaStore, SchemaVersion
    from streams.serde.compatibility import Change

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Check, compare and register the record schemas.",
)

JSON = typer.Option(False, "--json", help="Print JSON for machines.")
FOLDER = typer.Option(None, "--folder", help="Other schema files than those installed.")
RECORD = typer.Argument(help="A record, such as DialogueTurn or dialogue_turn.")


@app.callback()
def _group() -> None:
    """Check, compare and register the record schemas."""


@app.command()
def check(folder: Path | None = FOLDER, as_json: bool = JSON) -> None:
    """Check that every version of each schema reads what every other version wrote.

    FULL_TRANSITIVE, and every enum with the default "unknown". Exits with 1 if not.
    """
    from streams.serde.compatibility import check_versions

    store = _store(folder)
    found = check_versions(store)
    if as_json:
        print_json([asdict(problem) for problem in found])
    else:
        for problem in found:
            typer.echo(str(problem), err=True)
        if not found:
            typer.echo(f"{len(store.versions)} versions read each other")
    if found:
        raise typer.Exit(1)


@app.command()
def diff(
    record: str = RECORD,
    before: int = typer.Argument(help="A version number."),
    after: int = typer.Argument(help="Another one."),
    folder: Path | None = FOLDER,
    as_json: bool = JSON,
) -> None:
    """Show in what two versions of a schema differ."""
    from streams.serde.compatibility import changes

    versions = _versions(_store(folder), record)
    found = changes(_version(versions, before), _version(versions, after))
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
    record: str | None = typer.Argument(None, help="A record; all if left out."),
    folder: Path | None = FOLDER,
    as_json: bool = JSON,
) -> None:
    """Show the versions of the schemas: fingerprints, and what each one brought."""
    from streams.serde.compatibility import changes

    store = _store(folder)
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


@app.command()
def register(ctx: typer.Context, as_json: bool = JSON) -> None:
    """Register each topic's current schema under <topic>-value, FULL_TRANSITIVE."""
    from streams.serde import load_schemas
    from streams.serde.confluent import ConfluentRegistry
    from streams.topics import load_inventory

    url = settings_of(ctx).schema_registry_url
    if url is None:
        raise SchemaError("no schema registry is set; set SCHEMA_REGISTRY_URL")
    registry, store = ConfluentRegistry(url), load_schemas()
    ids = {
        f"{topic.name}-value": registry.register(f"{topic.name}-value", store.current(topic.schema))
        for topic in load_inventory().topics
        if topic.schema is not None
    }
    if as_json:
        print_json(ids)
        return
    for subject, schema_id in ids.items():
        typer.echo(f"{subject}: id {schema_id}")


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
