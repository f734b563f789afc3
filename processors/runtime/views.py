"""What a worker shows of itself over HTTP: a page for people, JSON for machines, one path.

Pure: the worker collects a ``WorkerView``, here it becomes bytes. The page needs nothing from
elsewhere, runs no script, and shows ids from outside escaped, without control characters, and
cut to a length; the JSON has them whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from itertools import pairwise

import msgspec

from processors.runtime.status import OpenSession, ProcessorStatus

REFRESH_S = 5
MAX_ID_CHARACTERS = 80
LATE_MS = 5_000
"""From here on an overdue partition is marked; ticks and a transaction take their time."""

NOTHING = "–"

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Vary": "Accept",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicView:
    """One input topic's side of a partition.

    Attributes:
        topic: Its name.
        applied_offset: The last offset whose effects are committed; None before the first.
        end_offset: The offset that the next record will get; None before the first fetch.
        lag_records: Records not applied yet; None where it is not known.
        buffered_records: Those read that wait for the other topic.
    """

    topic: str
    applied_offset: int | None
    end_offset: int | None
    lag_records: int | None
    buffered_records: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionView:
    """One partition of the worker.

    Attributes:
        partition: Its number.
        status: What its processor says.
        event_time_lag_ms: Now minus its clock; None before the first record.
        overdue_ms: How long its next action has been due; 0 if that is yet to come.
        topics: Its input topics.
        last_transaction_s: What its latest transaction took; None before the first.
    """

    partition: int
    status: ProcessorStatus
    event_time_lag_ms: int | None
    overdue_ms: int
    topics: tuple[TopicView, ...]
    last_transaction_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A worker.

    Attributes:
        processor: What it runs.
        application: Its consumer group.
        version: Of clawstream.
        now_ms: When this was collected, by the worker's clock.
        restoring: Partitions whose state is being read.
        partitions: Those it works on, by number.
    """

    processor: str
    application: str
    version: str
    now_ms: int
    restoring: tuple[int, ...]
    partitions: tuple[PartitionView, ...]


def partition_view(
    partition: int,
    status: ProcessorStatus,
    topics: Iterable[TopicView],
    now_ms: int,
    last_transaction_s: float | None,
) -> PartitionView:
    """A partition as it stands at ``now_ms``."""
    return PartitionView(
        partition=partition,
        status=status,
        event_time_lag_ms=event_time_lag_ms(status, now_ms),
        overdue_ms=overdue_ms(status, now_ms),
        topics=tuple(topics),
        last_transaction_s=last_transaction_s,
    )


def event_time_lag_ms(status: ProcessorStatus, now_ms: int) -> int | None:
    """Now minus the partition's clock."""
    return None if status.clock_ms is None else max(0, now_ms - status.clock_ms)


def overdue_ms(status: ProcessorStatus, now_ms: int) -> int:
    """How long the next action has been due."""
    return 0 if status.next_due_ms is None else max(0, now_ms - status.next_due_ms)


def oldest_open_ms(status: ProcessorStatus, now_ms: int) -> int:
    """How long ago the first of what is open arrived; 0 if nothing is open."""
    return 0 if status.oldest_open is None else max(0, now_ms - status.oldest_open.since_ms)


def wants_html(accept: str, query: Mapping[str, str]) -> bool:
    """Whether a request is a browser's. ``?format=html`` and ``?format=json`` decide first."""
    asked = query.get("format")
    return "text/html" in accept.lower() if asked is None else asked == "html"


def as_json(view: WorkerView) -> bytes:
    """The view for machines: the fields as they are named here, times in milliseconds."""
    return msgspec.json.encode(view)


def as_html(view: WorkerView) -> str:
    """The view for people."""
    title = escape(f"{view.processor} worker")
    cards = "".join(_card(one, view.now_ms) for one in view.partitions)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="{REFRESH_S}">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p>{_summary(view)}</p>
</header>
<main>{cards or "<p>No partitions are assigned to this worker.</p>"}</main>
<footer><p>Again every {REFRESH_S} seconds. The same as <a href="?format=json">JSON</a>;
gauges and counters under <a href="metrics">metrics</a>. Times are UTC.</p></footer>
</body>
</html>
"""


def _summary(view: WorkerView) -> str:
    parts = [
        f"clawstream {view.version}",
        f"group {view.application}",
        _counted(len(view.partitions), "partition"),
        f"as of {_time(view.now_ms)}",
    ]
    if view.restoring:
        parts.append(f"restoring {', '.join(map(str, view.restoring))}")
    return escape(" · ".join(parts))


def _card(one: PartitionView, now_ms: int) -> str:
    rows = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in _facts(one, now_ms)
    )
    late = ' class="late"' if one.overdue_ms > LATE_MS else ""
    return (
        f"<section{late}><h2>Partition {one.partition}</h2><dl>{rows}</dl>"
        f"{_oldest(one.status.oldest_open, now_ms)}{_topics(one.topics)}</section>"
    )


def _facts(one: PartitionView, now_ms: int) -> Iterable[tuple[str, str]]:
    status = one.status
    yield "clock", NOTHING if status.clock_ms is None else _time(status.clock_ms)
    yield "event-time lag", _duration(one.event_time_lag_ms)
    yield "next due", _due(status.next_due_ms, now_ms)
    yield "sessions", f"{status.open_sessions:,} open of {status.sessions:,}"
    entries = _counted(status.state_entries, "entry", "entries")
    yield "state", f"{entries}, {_size(status.state_bytes)}"
    took = one.last_transaction_s
    yield "last transaction", NOTHING if took is None else f"{took * 1000:,.0f} ms"


def _oldest(session: OpenSession | None, now_ms: int) -> str:
    if session is None:
        return '<p class="oldest">No session is open.</p>'
    return (
        f'<p class="oldest">Oldest open session: <b>{_name(session.policy)} / '
        f"{_name(session.session_id)}</b>, since {_time(session.since_ms)} "
        f"({_duration(max(0, now_ms - session.since_ms))}), due "
        f"{_due(session.due_ms, now_ms)}.</p>"
    )


def _topics(topics: Iterable[TopicView]) -> str:
    rows = "".join(
        f'<tr><th scope="row" colspan="{len(_TOPIC_HEADS)}">{escape(one.topic)}</th></tr>'
        f"<tr><td>{_count(one.applied_offset)}</td><td>{_count(one.end_offset)}</td>"
        f"<td>{_count(one.lag_records)}</td><td>{_count(one.buffered_records)}</td></tr>"
        for one in topics
    )
    heads = "".join(f'<th scope="col">{name}</th>' for name in _TOPIC_HEADS)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


_TOPIC_HEADS = ("applied", "end", "lag", "waiting")


def _name(text: str) -> str:
    """An id from outside, harmless and of bounded length."""
    plain = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text[:MAX_ID_CHARACTERS])
    return f"<bdi>{escape(plain)}{'…' if len(text) > MAX_ID_CHARACTERS else ''}</bdi>"


def _time(at_ms: int) -> str:
    """A time in UTC; as a number where no calendar has it."""
    try:
        at = datetime.fromtimestamp(at_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{at_ms:,} ms"
    return at.strftime("%Y-%m-%d %H:%M:%S")


def _due(due_ms: int | None, now_ms: int) -> str:
    if due_ms is None:
        return NOTHING
    if due_ms > now_ms:
        return f"in {_duration(due_ms - now_ms)}"
    return f"{_duration(now_ms - due_ms)} ago"


def _duration(span_ms: int | None) -> str:
    """A span in its two largest units."""
    if span_ms is None:
        return NOTHING
    if span_ms < 10_000:
        return f"{span_ms / 1000:.1f} s"
    for (large, large_ms), (small, small_ms) in pairwise(_UNITS):
        if span_ms >= large_ms:
            return f"{span_ms // large_ms:,} {large} {span_ms % large_ms // small_ms} {small}"
    return f"{span_ms // 1000} s"


_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000))


def _size(size: int) -> str:
    amount = float(size)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:,.0f}&nbsp;{unit}" if unit == "B" else f"{amount:,.1f}&nbsp;{unit}"
        amount /= 1024
    return f"{amount:,.1f}&nbsp;GiB"


def _count(number: int | None) -> str:
    return NOTHING if number is None else f"{number:,}"


def _counted(number: int, one: str, more: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else more or one + 's'}"


_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --warn: #d9822b; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; font: 16px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0; }
h2 { font-size: 1.1rem; margin: 0 0 .5rem; }
header p, footer p { margin: .25rem 0 1rem; opacity: .75; font-size: .9rem; }
main { display: grid; gap: 1rem; }
main { grid-template-columns: repeat(auto-fill, minmax(min(100%, 25rem), 1fr)); }
section { border: 1px solid var(--line); border-radius: .5rem; padding: 1rem; min-width: 0; }
section.late { border-color: var(--warn); }
dl { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: .5rem 1rem; margin: 0; }
dt { font-size: .8rem; opacity: .7; }
dd, td { margin: 0; font-variant-numeric: tabular-nums; }
.oldest { background: var(--soft); padding: .5rem; border-radius: .25rem; }
.oldest, th { overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
tbody th { text-align: left; font-weight: 500; border-top: 1px solid var(--line); }
thead th { text-align: right; font-weight: 400; font-size: .8rem; opacity: .7; }
td { text-align: right; white-space: nowrap; }
th + th, td + td { padding-left: .6rem; }
"""


__all__ = [
    "HEADERS",
    "PartitionView",
    "TopicView",
    "WorkerView",
    "as_html",
    "as_json",
    "event_time_lag_ms",
    "oldest_open_ms",
    "overdue_ms",
    "partition_view",
    "wants_html",
]
