"""``clawstream topics``: the inventory against a cluster."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from streams.cli.common import print_json, settings_of

if TYPE_CHECKING:
    from streams.kafka.admin import Admin
    from streams.topics import Change, TopicPlan

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Compare the cluster's topics with topics.yaml.",
)

_FILE = typer.Option(None, "--file", help="An inventory of your own, in the form of topics.yaml.")
_REPLICATION = typer.Option(
    None, "--replication", min=1, help="Copies of each partition, for all topics."
)
_JSON = typer.Option(False, "--json", help="Print JSON for machines.")


@app.command("plan")
def show_plan(
    ctx: typer.Context,
    file: Path | None = _FILE,
    replication: int | None = _REPLICATION,
    as_json: bool = _JSON,
) -> None:
    """Show how the cluster differs; changes nothing. Fails if something would be refused."""
    _, topic_plan = _make(ctx, file, replication)
    _show(topic_plan, as_json, applied=False)
    topic_plan.raise_if_refused()


@app.command("apply")
def apply_plan(
    ctx: typer.Context,
    file: Path | None = _FILE,
    replication: int | None = _REPLICATION,
    as_json: bool = _JSON,
) -> None:
    """Create and change topics where nothing is lost by it, all or nothing."""
    admin, topic_plan = _make(ctx, file, replication)
    topic_plan.raise_if_refused()
    with _busy("changing topics"):
        admin.apply(topic_plan)
    _show(topic_plan, as_json, applied=True)


def _make(
    ctx: typer.Context, file: Path | None, replication: int | None
) -> tuple[Admin, TopicPlan]:
    from streams.kafka.admin import Admin
    from streams.kafka.clients import resolve_bootstrap
    from streams.topics import load_inventory, with_replication

    settings = settings_of(ctx)
    inventory = with_replication(load_inventory(file), replication)
    admin = Admin(settings.kafka, resolve_bootstrap(settings))
    with _busy("comparing topics"):
        return admin, admin.plan(inventory)


def _busy(doing: str) -> AbstractContextManager[object]:
    from rich.console import Console

    return Console(stderr=True).status(doing)


def _show(topic_plan: TopicPlan, as_json: bool, *, applied: bool) -> None:
    if as_json:
        changes = [_as_dict(change) for change in topic_plan.changes]
        print_json({"applied": applied, "changes": changes})
    elif not topic_plan.changes:
        sys.stdout.write("the cluster's topics are as the inventory has them\n")
    else:
        sys.stdout.writelines(_line(change, applied=applied) for change in topic_plan.changes)


def _as_dict(change: Change) -> dict[str, Any]:
    return {
        "topic": change.topic,
        "kind": change.kind.value,
        "setting": change.setting,
        "before": change.before,
        "after": change.after,
        "reason": change.reason,
    }


def _line(change: Change, *, applied: bool) -> str:
    """One change as a line: what becomes of it, the topic, the values, the reason."""
    done = {"create": "created", "alter": "altered"}
    kind = done.get(change.kind.value, change.kind.value) if applied else change.kind.value
    values = f"{change.before or 'unset'} -> {change.after}" if change.setting else change.after
    what = " ".join(part for part in (change.setting, values) if part)
    reason = f" ({change.reason})" if change.reason else ""
    return f"{kind:8}{change.topic}: {what}{reason}\n"
