"""``clawstream lag``: how far each stage is behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from streams.cli.common import print_json, settings_of
from streams.settings import Settings

if TYPE_CHECKING:
    from streams.lag.groups import PartitionLag, Stage

app = typer.Typer(add_completion=False)


@app.command()
def lag(
    ctx: typer.Context,
    as_json: bool = typer.Option(False, "--json", help="Print JSON for machines."),
) -> None:
    """Show, for each stage and partition, how many records it has not read yet.

    For the learner: records that came after the newest version's training data.
    """
    from streams.kafka.clients import make_admin, make_consumer, resolve_bootstrap
    from streams.lag.groups import measure

    settings = settings_of(ctx)
    bootstrap = resolve_bootstrap(settings)
    positions = _learner_positions(settings)
    overrides = {"enable.partition.eof": True}
    consumer = make_consumer(settings.kafka, bootstrap, group="clawstream-lag", overrides=overrides)
    try:
        admin = make_admin(settings.kafka, bootstrap)
        found = measure(
            admin,
            consumer,
            positions,
            open_group=lambda group: make_consumer(settings.kafka, bootstrap, group=group),
            address=bootstrap,
        )
    finally:
        consumer.close()
    if as_json:
        print_json([asdict(item) for item in found])
    else:
        _print(found)


def _learner_positions(settings: Settings) -> Mapping[Stage, Mapping[tuple[str, int], int]]:
    """The learner's offsets live with its versions, in the registry."""
    from streams.lag.groups import Stage
    from streams.registry import Registry
    from streams.topics import SCORED

    with Registry.open(settings.effective_registry_url) as registry:
        versions = registry.versions(settings.learner.policy)
    newest = max(versions, key=lambda version: version.version, default=None)
    offsets = () if newest is None else newest.source_offsets
    stage = Stage("learn", f"registry:{settings.learner.policy}", (SCORED,))
    return {stage: {(place.topic, place.partition): place.end for place in offsets}}


def _print(found: list[PartitionLag]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("stage", "topic", "partition", "read up to", "end", "lag")
    for item in found:
        current = "nothing yet" if item.current is None else str(item.current)
        table.add_row(
            item.stage, item.topic, str(item.partition), current, str(item.end), str(item.lag)
        )
    Console().print(table)
