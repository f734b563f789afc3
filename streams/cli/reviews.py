"""``clawstream reviews``: feedback that counts nothing until a person decides."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer

from streams.cli.common import print_json, print_lines, settings_of
from streams.errors import RewardError
from streams.reviews import RATER_ATTRIBUTE, UNTIL_DECIDED, Case
from streams.settings import Settings
from streams.times import show_time

SHOWN_ID = 12
"""How much of a request's id is shown; it is enough to name it."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which requests are meant: those to which all that is not None applies."""

    policy: str | None = None
    filter_name: str | None = None
    rater: str | None = None

    @property
    def says_something(self) -> bool:
        """Whether it leaves anything out."""
        return (self.policy, self.filter_name, self.rater) != (None, None, None)

    def of(self, known: Sequence[Case], *, every: bool = False) -> list[Case]:
        """Those of ``known`` that are meant; open ones only, unless ``every``."""
        return [
            case
            for case in known
            if (every or case.state == "open")
            and self.policy in (None, case.request.policy)
            and self.filter_name in (None, case.filter)
            and self.rater in (None, case.request.attributes.get(RATER_ATTRIBUTE))
        ]


app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Decide about feedback that was held back."
)


@app.callback()
def _group() -> None:
    """Decide about feedback that was held back."""


@app.command("list")
def list_cases(
    ctx: typer.Context,
    every: bool = typer.Option(False, "--all", help="Decided ones too."),
    policy: str | None = typer.Option(None, help="Of this policy only."),
    filter_name: str | None = typer.Option(None, "--filter", help="Held by this filter only."),
    rater: str | None = typer.Option(None, help='By this rater only, for example "user u17".'),
    as_json: bool = typer.Option(False, "--json", help="Print JSON for machines."),
) -> None:
    """List what waits for a decision, oldest first.

    `clawstream reward explain REPLY` shows what was said there.
    """
    wanted = Selection(policy, filter_name, rater)
    found = wanted.of(_cases(settings_of(ctx)), every=every)
    if as_json:
        print_json([_plain(case) for case in found])
    else:
        _print(found)


@app.command()
def decide(
    ctx: typer.Context,
    requests: list[str] | None = typer.Argument(
        None,
        help="Ids of requests, or what they begin with; none: all that --filter and so on say.",
    ),
    uphold: bool = typer.Option(
        ..., "--uphold/--reject", help="Whether the feedback counts in full, or nothing."
    ),
    policy: str | None = typer.Option(None, help="All that wait, of this policy."),
    filter_name: str | None = typer.Option(None, "--filter", help="All that this filter held."),
    rater: str | None = typer.Option(None, help='All by this rater, for example "user u17".'),
    actor: str | None = typer.Option(None, help="Who decides; kept with the decision."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON for machines."),
) -> None:
    """Decide about held feedback; each segment concerned is scored anew.

    The decision is feedback on the replies concerned, so it must come while their segments
    can still be revised (align.horizon_ms after they closed).
    """
    from streams.cli.publishing import encode, publish
    from streams.reviews import decide as events_of

    settings = settings_of(ctx)
    wanted = Selection(policy, filter_name, rater)
    if bool(requests) == wanted.says_something:
        raise RewardError(
            "name the requests, or say which with --filter, --rater and --policy, and not both; "
            "`clawstream reviews list` shows them"
        )
    known = _cases(settings)
    chosen = _chosen(known, requests) if requests else wanted.of(known)
    now_ms = time.time_ns() // 1_000_000
    events = [
        event
        for case in chosen
        for event in events_of(case.request, uphold=uphold, now_ms=now_ms, actor=actor)
    ]
    envelopes, too_large = encode(settings, events, dry_run=False)
    publish(settings, envelopes)
    late = [c for c in chosen if now_ms - c.request.event_time > settings.align.horizon_ms]
    if as_json:
        print_json(
            {
                "decided": [case.request.event_id for case in chosen],
                "upheld": uphold,
                "events": len(envelopes),
                "skipped": too_large,
                "late": [case.request.event_id for case in late],
            }
        )
        return
    word = "upheld" if uphold else "rejected"
    typer.echo(f"{word} {len(chosen)} requests with {len(envelopes)} feedback events")
    for case in late:
        typer.echo(
            f"{case.request.event_id} is older than align.horizon_ms "
            f"({settings.align.horizon_ms} ms): its segments may not be revised any more",
            err=True,
        )


def _cases(settings: Settings) -> list[Case]:
    from streams.contracts import FeedbackEvent, ReviewRequest
    from streams.kafka.reading import read_records
    from streams.reviews import cases
    from streams.serde import build_codec
    from streams.topics import FEEDBACK, REVIEWS

    codec = build_codec(settings.schema_registry_url)
    requests = list(read_records(settings, REVIEWS, ReviewRequest, codec))
    if not requests:
        return []
    # No decision is older than the first request; its time is that of a segment's closing.
    since_ms = min(request.event_time for request in requests)
    return cases(
        requests, read_records(settings, FEEDBACK, FeedbackEvent, codec, since_ms=since_ms)
    )


def _chosen(known: Sequence[Case], prefixes: Sequence[str]) -> list[Case]:
    """The requests named, each once, however often and by however much of its id it is named."""
    named = [_only(known, prefix) for prefix in prefixes]
    return list({case.request.event_id: case for case in named}.values())


def _only(known: Sequence[Case], prefix: str) -> Case:
    from streams.reviews import find

    found = find(known, prefix) if prefix else []
    if len(found) == 1:
        return found[0]
    if not found:
        raise RewardError(
            f"there is no review request {prefix!r}; see `clawstream reviews list --all`"
        )
    raise RewardError(f"{prefix} could be {len(found)} review requests; give more of the id")


def _plain(case: Case) -> dict[str, Any]:
    request = case.request
    return {
        "request": request.event_id,
        "state": case.state,
        "filter": case.filter,
        "policy": request.policy,
        "rater": request.attributes.get(RATER_ATTRIBUTE),
        "feedback": list(request.feedback_event_ids),
        "session": request.session_id,
        "segment": request.segment_id,
        "turn": request.turn_id,
        "reason": request.reason,
        "asked_at": request.event_time,
        "decided_at": case.decided_at,
        "actor": case.actor,
    }


def _print(found: Sequence[Case]) -> None:
    head = ("request", "asked (UTC)", "policy", "filter", "feedback", "reply", "state")
    rows = [
        (
            case.request.event_id[:SHOWN_ID],
            show_time(case.request.event_time),
            case.request.policy,
            case.filter,
            len(case.request.feedback_event_ids),
            case.request.turn_id,
            case.state,
        )
        for case in found
    ]
    print_lines(head, rows, [case.request.reason.partition(UNTIL_DECIDED)[0] for case in found])
