"""``clawstream versions``: what was learned, from what, and what became of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from streams.cli.common import print_json, print_table, settings_of

if TYPE_CHECKING:
    from rich.table import Table

    from streams.contracts import ModelVersion
    from streams.registry import Registry, SegmentUse, StatusChange

app = typer.Typer(no_args_is_help=True, add_completion=False, help="List and show policy versions.")

_JSON = typer.Option(False, "--json", help="Print JSON for machines.")
_KEY_METRICS = {"reward": "rewards/mean", "KL": "losses/approx_kl"}
"""The metrics that have a column of their own in the list, by its heading."""
MAKE_UP = "make_up_"
"""Begins the names of attributes that count what a version was trained on, as JSON."""


@app.command("list")
def list_versions(
    ctx: typer.Context,
    policy: str | None = typer.Option(None, "--policy", help="One policy; all without it."),
    as_json: bool = _JSON,
) -> None:
    """List all versions; the one each policy answers with is marked."""
    with _open_registry(ctx) as registry:
        versions = registry.versions(policy)
        live = {name: registry.live(name) for name in {v.policy for v in versions}}
    if as_json:
        print_json([_as_dict(v) | {"is_live": live[v.policy] == v.version} for v in versions])
    elif versions:
        print_table(_list_table(versions, live))
    else:
        whose = "every policy" if policy is None else f"policy {policy!r}"
        typer.echo(f"no versions yet: {whose} answers with its base model")


@app.command("show")
def show_version(
    ctx: typer.Context,
    version: int = typer.Argument(help="The version's number.", min=1),
    policy: str | None = typer.Option(
        None, "--policy", help="Its policy; learner.policy of the settings without it."
    ),
    as_json: bool = _JSON,
) -> None:
    """Show one version: its history, metrics, gate, sources and lineage."""
    from streams.errors import RegistryError

    name = policy or settings_of(ctx).learner.policy
    with _open_registry(ctx) as registry:
        found = registry.get(name, version)
        if found is None:
            raise RegistryError(
                f"policy {name!r} has no version {version}: `clawstream versions list` shows "
                "which there are"
            )
        is_live = registry.live(name) == version
        history = registry.history(name, version)
        lineage = registry.lineage(name, version)
    if as_json:
        print_json(
            _as_dict(found)
            | {
                "is_live": is_live,
                "history": [asdict(change) for change in history],
                "lineage": [asdict(use) for use in lineage],
            }
        )
    else:
        # Its paths are there to be copied.
        print_table(_facts_table(found, is_live))
        _print(*_show_tables(found, history, lineage))


def _open_registry(ctx: typer.Context) -> AbstractContextManager[Registry]:
    from streams.registry import Registry

    return Registry.open(settings_of(ctx).effective_registry_url)


def _as_dict(version: ModelVersion) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(version)
    return fields


def _print(*tables: Table) -> None:
    from rich.console import Console

    console = Console()
    for table in tables:
        console.print(table)


def _list_table(versions: tuple[ModelVersion, ...], live: dict[str, int | None]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("policy", "version", "status", "parent", "segments", *_KEY_METRICS, "made"):
        table.add_column(heading, no_wrap=True)
    for version in versions:
        is_live = live[version.policy] == version.version
        _add_row(
            table,
            version.policy,
            version.version,
            "live" if is_live else version.status.value,
            _parent(version),
            version.segment_count,
            *(_number(version.metrics.get(name)) for name in _KEY_METRICS.values()),
            _time(version.event_time)[:-3],
        )
    return table


def _show_tables(
    version: ModelVersion,
    history: tuple[StatusChange, ...],
    lineage: tuple[SegmentUse, ...],
) -> list[Table]:
    tables = [
        _history_table(history),
        _gate_table(version),
        _metrics_table(version),
        _sources_table(version, lineage),
    ]
    made_of = _made_of(version.attributes)
    if made_of:
        tables.insert(2, _make_up_table(made_of))
    return tables


def _facts_table(version: ModelVersion, is_live: bool) -> Table:
    from rich.table import Table

    title = f"{version.policy} version {version.version}"
    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    facts = {
        "status": version.status.value + (" (live now)" if is_live else ""),
        "reason": version.reason,
        "parent": _parent(version),
        "made": _time(version.event_time),
        "base model": f"{version.base_model_id} {version.base_model_digest[:12]}",
        "adapter": version.adapter_uri,
        "rank, alpha": f"{version.adapter_rank}, {version.adapter_alpha}",
        "optimizer steps": version.optimizer_step,
        "segments": version.segment_count,
        "steps by version": ", ".join(f"{k}: {n}" for k, n in version.behaviour_versions.items()),
        "settings": version.config_hash,
    }
    counted = _made_of(version.attributes)
    attributes = {
        name: value
        for name, value in sorted(version.attributes.items())
        if name.removeprefix(MAKE_UP) not in counted
    }
    for name, value in (facts | attributes).items():
        _add_row(table, name, value)
    return table


def _made_of(attributes: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Counts of what a version was trained on, by what is counted; an attribute that is no such
    JSON object is not among them."""
    found = {}
    for name, text in sorted(attributes.items()):
        if name.startswith(MAKE_UP):
            with suppress(ValueError):
                counts = json.loads(text)
                if isinstance(counts, dict):
                    found[name.removeprefix(MAKE_UP)] = counts
    return found


def _make_up_table(made_of: Mapping[str, Mapping[str, int]]) -> Table:
    from rich.table import Table

    table = Table("replies by", "", "count", title="made of")
    for kind, counts in made_of.items():
        for name, count in counts.items():
            _add_row(table, kind, name, count)
    return table


def _history_table(history: tuple[StatusChange, ...]) -> Table:
    from rich.table import Table

    table = Table("when", "status", "why", "announced", title="history")
    for change in history:
        waiting = "waiting" if change.event_id is not None else ""
        announced = waiting if change.published_at is None else _time(change.published_at)
        _add_row(table, _time(change.changed_at), change.status.value, change.reason, announced)
    return table


def _gate_table(version: ModelVersion) -> Table:
    from rich.table import Table

    table = Table("check", "passed", "value", "allowed", "", title="gate")
    for decision in version.gate:
        _add_row(
            table,
            decision.name,
            "yes" if decision.passed else "no",
            _number(decision.value),
            _number(decision.threshold),
            decision.detail,
        )
    return table


def _metrics_table(version: ModelVersion) -> Table:
    from rich.table import Table

    table = Table("metric", "value", title="metrics")
    for name, value in sorted(version.metrics.items()):
        _add_row(table, name, _number(value))
    return table


def _sources_table(version: ModelVersion, lineage: tuple[SegmentUse, ...]) -> Table:
    from rich.table import Table

    table = Table("topic", "partition", "from", "to", title="log it has seen")
    for offsets in version.source_offsets:
        _add_row(table, offsets.topic, offsets.partition, offsets.start, offsets.end)
    table.caption = f"{len(lineage)} segments were trained on; --json lists them"
    return table


def _add_row(table: Table, *values: object) -> None:
    """Add a row of plain text: what a record says is never markup."""
    from rich.text import Text

    table.add_row(*(Text("" if value is None else str(value)) for value in values))


def _parent(version: ModelVersion) -> str:
    return "base" if version.parent is None else str(version.parent)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _time(at_ms: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(at_ms / 1000, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")
