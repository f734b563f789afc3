"""``clawstream schemas``: the record schemas and a schema registry."""

from __future__ import annotations

import typer

from streams.cli.common import print_json, settings_of
from streams.errors import SchemaError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Register the record schemas with a registry.",
)


@app.callback()
def _group() -> None:
    """Register the record schemas with a registry."""


@app.command()
def register(
    ctx: typer.Context,
    as_json: bool = typer.Option(False, "--json", help="Print JSON for machines."),
) -> None:
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
