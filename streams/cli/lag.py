"""``clawstream lag``: how far each stage is behind, whether it gets on, and what is wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from streams.cli.common import print_json, print_table, settings_of, terminable
from streams.errors import SettingsError
from streams.settings import Settings

if TYPE_CHECKING:
    from rich.console import Group
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
                _print(statuses)
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
        with terminable():
            serve(view.take, host, port, interval_s, threading.Event(), tell, ready)
    except KeyboardInterrupt:
        console.print("ended")


def _follow(view: Watch, interval_s: float, as_json: bool) -> None:
    """Look until Ctrl-C; Kafka may come and go once it has answered."""
    from rich.console import Console
    from rich.live import Live

    try:
        statuses = view.take()
        if as_json:
            while True:
                if statuses:
                    print_json([_as_dict(status) for status in statuses])
                time.sleep(interval_s)
                statuses = _again(view, lambda why: typer.echo(why, err=True))
        with Live(console=Console(), auto_refresh=False) as live:
            while True:
                if statuses:
                    live.update(_report(statuses), refresh=True)
                time.sleep(interval_s)
                statuses = _again(view, live.console.print)
    except KeyboardInterrupt:
        return


def _again(view: Watch, tell: Callable[[str], None]) -> list[LagStatus]:
    """One more look; nothing if Kafka does not answer, and why is told."""
    from streams.errors import BrokerError

    try:
        return view.take()
    except BrokerError as error:
        tell(f"Kafka does not answer: {error}")
        return []


def _is_bad(statuses: list[LagStatus]) -> bool:
    from streams.lag.burrow import State

    return any(status.state not in (State.OK, State.UNKNOWN) for status in statuses)


def _as_dict(status: LagStatus) -> dict[str, Any]:
    fields = asdict(status)
    place: dict[str, Any] = fields.pop("lag")
    return place | fields


def _report(statuses: list[LagStatus]) -> Group:
    """A row a partition, and below what is said of them, the worst first."""
    from rich.console import Group
    from rich.text import Text

    return Group(_table(statuses), Text(), *map(Text, _reasons(statuses)))


def _table(statuses: list[LagStatus]) -> Table:
    from rich.table import Table

    from streams.lag.burrow import State

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("stage", "partition"):
        table.add_column(name, no_wrap=True)
    for name in ("read", "end", "lag", "read/s", "arrived", "happened"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for status in statuses:
        lag = status.lag
        table.add_row(
            lag.stage,
            f"{lag.topic}/{lag.partition}",
            "-" if lag.current is None else str(lag.current),
            str(lag.end),
            str(lag.lag),
            "" if status.read_per_s is None else f"{status.read_per_s:.0f}",
            _ago(status.time_lag_s),
            _ago(status.event_time_lag_s),
            "-" if status.state is State.UNKNOWN else status.state.value,
        )
    return table


def _reasons(statuses: list[LagStatus]) -> list[str]:
    """A line for each different thing that is said, with the partitions it is said of."""
    from streams.lag.burrow import State

    said: dict[tuple[State, str, str], dict[str, list[str]]] = {}
    for status in statuses:
        topics = said.setdefault((status.state, status.lag.stage, status.reason), {})
        topics.setdefault(status.lag.topic, []).append(str(status.lag.partition))
    worst_first = sorted(said, key=lambda key: -list(State).index(key[0]))
    lines = []
    for key in worst_first:
        state, stage, reason = key
        places = " ".join(f"{topic}/{','.join(parts)}" for topic, parts in said[key].items())
        name = "-" if state is State.UNKNOWN else state.value
        lines.append(f"{name:<6} {stage} {places}: {reason}")
    return lines


def _ago(seconds: float | None) -> str:
    if not seconds:
        return ""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"


def _print(statuses: list[LagStatus]) -> None:
    from rich.console import Console

    print_table(_table(statuses))
    console = Console()
    console.print()
    for line in _reasons(statuses):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
