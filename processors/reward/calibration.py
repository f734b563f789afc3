"""``clawstream calibration``: does the judge say what people say?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import typer

from processors.reward.formulas import of_kinds, readable
from processors.reward.judge.verdicts import MODEL_ATTRIBUTE
from streams.cli.common import print_json, settings_of
from streams.contracts import FeedbackKind, ScoredSegment, Step, StepReward

SIGNS = (-1, 0, 1)
WORDS = {-1: "negative", 0: "neutral", 1: "positive"}
UNNAMED = "unnamed"
"""A judge whose judgements do not say which it is."""

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Pair:
    """The signs of what people and a judge said about one reply.

    Args:
        explicit: People.
        judged: The judge.
        judge: Which: its model, as the judgement names it.
    """

    explicit: int
    judged: int
    judge: str = UNNAMED


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far the judge says what people say.

    Args:
        steps: Replies that both spoke about.
        same: Share of them with the same sign.
        opposite: Share of them with opposite signs.
        kappa: Cohen's kappa of the signs: 1 always the same, 0 as often as by chance; None where
            chance alone would always agree.
        confusion: Replies by (explicit, judged) sign.
    """

    steps: int
    same: float
    opposite: float
    kappa: float | None
    confusion: dict[tuple[int, int], int]


def pairs(scored: ScoredSegment) -> list[Pair]:
    """One for each step with a verdict and a rating, where all feedback is believed in full."""
    found: list[Pair] = []
    for step, reward in zip(scored.segment.steps, scored.rewards, strict=True):
        explicit, judged = _value(reward, "explicit"), _value(reward, "judge")
        if explicit is not None and judged is not None and reward.credibility == 1.0:
            found.append(Pair(_sign(explicit), _sign(judged), _judge_of(step)))
    return found


def _judge_of(step: Step) -> str:
    """Who gave the verdict that counts: the latest."""
    given = of_kinds(readable(step.feedback), (FeedbackKind.JUDGEMENT,))
    return given[-1][0].attributes.get(MODEL_ATTRIBUTE, UNNAMED) if given else UNNAMED


def by_judge(found: Iterable[Pair]) -> dict[str, list[Pair]]:
    """The pairs of each judge, by name."""
    judges: dict[str, list[Pair]] = {}
    for pair in sorted(found, key=lambda pair: pair.judge):
        judges.setdefault(pair.judge, []).append(pair)
    return judges


def agreement(found: Sequence[Pair]) -> Agreement:
    """What the pairs come to."""
    counts = Counter((pair.explicit, pair.judged) for pair in found)
    total = max(1, len(found))
    same = sum(counts[sign, sign] for sign in SIGNS) / total
    opposite = (counts[1, -1] + counts[-1, 1]) / total
    chance = math.fsum(
        sum(counts[sign, other] for other in SIGNS)
        * sum(counts[other, sign] for other in SIGNS)
        / total**2
        for sign in SIGNS
    )
    return Agreement(
        steps=len(found),
        same=same,
        opposite=opposite,
        kappa=None if chance >= 1.0 or not found else (same - chance) / (1.0 - chance),
        confusion={(a, b): counts[a, b] for a in SIGNS for b in SIGNS},
    )


def newest(scored: Iterable[ScoredSegment]) -> dict[str, ScoredSegment]:
    """The highest revision of each segment."""
    found: dict[str, ScoredSegment] = {}
    for item in scored:
        name = item.segment.segment_id
        if name not in found or found[name].segment.revision <= item.segment.revision:
            found[name] = item
    return found


@app.command()
def calibration(
    ctx: typer.Context,
    policy: str | None = typer.Option(None, help="Of this policy only."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON for machines."),
) -> None:
    """Compare each judge's verdicts with people's ratings of the same replies."""
    from streams.kafka.reading import read_records
    from streams.serde import build_codec
    from streams.topics import SCORED

    settings = settings_of(ctx)
    codec = build_codec(settings.schema_registry_url)
    found = newest(read_records(settings, SCORED, ScoredSegment, codec)).values()
    both = [pair for item in found if policy in (None, item.segment.policy) for pair in pairs(item)]
    results = {judge: agreement(of_judge) for judge, of_judge in by_judge(both).items()}
    if as_json:
        print_json([as_data(judge, result) for judge, result in results.items()])
    elif not results:
        typer.echo("no reply has both a rating and a verdict of a judge")
    else:
        shown = ["\n".join(as_lines(judge, result)) for judge, result in results.items()]
        typer.echo("\n\n".join(shown))


def as_data(judge: str, result: Agreement) -> dict[str, Any]:
    """It for machines."""
    return {
        "judge": judge,
        "steps": result.steps,
        "same": result.same,
        "opposite": result.opposite,
        "kappa": result.kappa,
        "confusion": [
            {"explicit": WORDS[a], "judged": WORDS[b], "steps": count}
            for (a, b), count in result.confusion.items()
        ],
    }


def as_lines(judge: str, result: Agreement) -> list[str]:
    """It for people."""
    kappa = "-" if result.kappa is None else f"{result.kappa:.2f}"
    head = "people say / judge says".ljust(24) + "".join(WORDS[s].rjust(10) for s in SIGNS)
    rows = [
        WORDS[a].ljust(24) + "".join(str(result.confusion[a, b]).rjust(10) for b in SIGNS)
        for a in SIGNS
    ]
    return [
        f"{judge}: {result.steps} replies with both a rating and a verdict",
        f"the same: {result.same:.0%}, opposite: {result.opposite:.0%}, kappa {kappa}",
        "",
        head,
        *rows,
    ]


def _value(reward: StepReward, name: str) -> float | None:
    return next((part.value for part in reward.components if part.name == name), None)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


__all__ = [
    "UNNAMED",
    "Agreement",
    "Pair",
    "agreement",
    "app",
    "as_data",
    "as_lines",
    "by_judge",
    "newest",
    "pairs",
]
