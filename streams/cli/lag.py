"""``clawstream lag``: how far each stage is behind, whether it gets on, and what is wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from streams.cli.common import print_json, settings_of
from streams.errors import SettingsError
from streams.settings import Settings

if TYPE_CHECKING:
    from rich.table import Table

    from streams.errors import BrokerError
    from streams.lag.groups import EventTime, Stage
    from streams.lag.watch import LagStatus, Watch

app = typer.Typer(add_completion=False)

_BAD_EXIT = 3


@app.command()
def lag(
    ctx: typer.Context,
    as_json: bool = typer.Option(False, "--json", help="Print JSON for machines."),
    watch: bool = typer.Option(False, "--watch", help="Look again and again, until Ctrl-C."),
    interval_s: float = typer.Option(1.0, "--interval", min=0.1, help="Seconds between looks."),
    looks: int = typer.Option(
        5, "--looks", min=1, help="Looks that a state is judged by; 1 judges nothing."
    ),
    fail: bool = typer.Option(
        False, "--fail", help=f"Exit with {_BAD_EXIT} unless every stage that is judged is OK."
    ),
    listen: str | None = typer.Option(
        None, "--listen", metavar="HOST:PORT", help="Answer Prometheus under /metrics instead."
    ),
) -> None:
    """Show, for each stage and partition, what it has not read yet, and whether it gets on.

    A state (OK, WARN, REWIND, STALL, STOP) is judged by Burrow's rules, from how offsets move
    while it looks; where nothing lags one look is enough. For the learner: records that no
    version has used.
    """
    from streams.lag.watch import watching

    settings = settings_of(ctx)
    place = None if listen is None else _host_and_port(listen)
    with watching(
        settings,
        lambda: _learner_positions(settings),
        window=looks,
        event_time=_event_time(settings),
    ) as view:
        if place is not None:
            _serve(view, place, interval_s)
        elif watch:
            _follow(view, interval_s, as_json)
        else:
            statuses = view.settle(looks, interval_s)
            if as_json:
                print_json([_as_dict(status) for status in statuses])
            else:
                _print(_table(statuses))
            if fail and _is_bad(statuses):
                raise typer.Exit(_BAD_EXIT)


def _learner_positions(settings: Settings) -> Mapping[Stage, Mapping[tuple[str, int], int]]:
    """The learner's offsets live with its versions, in the registry."""
    from streams.lag.groups import Stage
    from streams.registry import RETRAIN, Registry
    from streams.topics import SCORED

    with Registry.open(settings.effective_registry_url) as registry:
        versions = registry.versions(settings.learner.policy)
    # A retrained version saw another part of the log.
    own = [version for version in versions if RETRAIN not in version.attributes]
    newest = max(own, key=lambda version: version.version, default=None)
    offsets = () if newest is None else newest.source_offsets
    stage = Stage("learn", f"registry:{settings.learner.policy}", (SCORED,))
    return {stage: {(place.topic, place.partition): place.end for place in offsets}}


def _event_time(settings: Settings) -> EventTime:
    from streams.contracts import DialogueTurn, FeedbackEvent, ScoredSegment, TrajectorySegment
    from streams.errors import ClawstreamError
    from streams.serde import build_codec
    from streams.topics import FEEDBACK, SCORED, SEGMENTS, TURNS

    codec = build_codec(settings.schema_registry_url)
    read: dict[str, Callable[[bytes | None], int]] = {
        TURNS: lambda data: codec.decode(data, DialogueTurn).event_time,
        FEEDBACK: lambda data: codec.decode(data, FeedbackEvent).event_time,
        SEGMENTS: lambda data: codec.decode(data, TrajectorySegment).last_event_time,
        SCORED: lambda data: codec.decode(data, ScoredSegment).segment.last_event_time,
    }

    def event_time(topic: str, value: bytes | None) -> int | None:
        try:
            return read[topic](value)
        except (KeyError, ClawstreamError):
            return None  # A tick, or what the stage will send to the dead letters.

    return event_time


def _host_and_port(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise SettingsError(f"--listen {listen!r}: give it as HOST:PORT, such as 127.0.0.1:9308")
    return host.strip("[]"), int(port)


def _serve(view: Watch, place: tuple[str, int], interval_s: float) -> None:
    from rich.console import Console

    from streams.lag.exporter import serve

    host, port = place
    console = Console(stderr=True)

    def tell(error: BrokerError) -> None:
        console.print(f"Kafka does not answer: {error}", highlight=False)

    def ready(port: int) -> None:
        console.print(f"lag under http://{host}:{port}/metrics, until Ctrl-C", highlight=False)

    try:
        serve(view.take, host, port, interval_s, threading.Event(), tell, ready)
    except KeyboardInterrupt:
        console.print("ended")
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def _follow(view: Watch, interval_s: float, as_json: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    try:
        if as_json:
            while True:
                print_json([_as_dict(status) for status in view.take()])
                time.sleep(interval_s)
        with Live(console=Console(), auto_refresh=False) as live:
            while True:
                live.update(_table(view.take()), refresh=True)
                time.sleep(interval_s)
    except KeyboardInterrupt:
        return


def _is_bad(statuses: list[LagStatus]) -> bool:
    from streams.lag.burrow import State

    return any(status.state not in (State.OK, State.UNKNOWN) for status in statuses)


def _as_dict(status: LagStatus) -> dict[str, Any]:
    fields = asdict(status)
    place: dict[str, Any] = fields.pop("lag")
    return place | fields


def _table(statuses: list[LagStatus]) -> Table:
    from rich.table import Table

    table = Table(
        "stage", "topic", "part.", "read up to", "end", "lag", "read/s", "arrived", "state", "why"
    )
    for status in statuses:
        lag = status.lag
        table.add_row(
            lag.stage,
            lag.topic,
            str(lag.partition),
            "nothing yet" if lag.current is None else str(lag.current),
            str(lag.end),
            str(lag.lag),
            "" if status.read_per_s is None else f"{status.read_per_s:,.0f}",
            _ago(status),
            status.state.value,
            status.reason,
        )
    return table


def _ago(status: LagStatus) -> str:
    if not status.time_lag_s:
        return ""
    seconds = status.time_lag_s
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.1f} s ago"


def _print(table: Table) -> None:
    from rich.console import Console

    Console().print(table)
