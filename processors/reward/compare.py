"""``clawstream reward compare``: how a shadow's rewards differ from the real ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from processors.reward.calibration import newest
from streams.cli.common import print_json
from streams.contracts import ScoredSegment
from streams.errors import RewardError, TopicError
from streams.settings import load_settings

MOST_SHOWN = 10

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One step that was rewarded in two ways."""

    segment_id: str
    turn_id: str
    real: float
    shadow: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two formulas on the same segments, each in its newest common revision.

    Args:
        real: Formula ids and config hashes of the real rewards.
        shadow: Of the shadow's.
        segments: Segments scored by both.
        only_real: Segments that the shadow has not scored, or not in that revision.
        only_shadow: The other way round.
        steps: Steps compared.
        mean_difference: Mean of shadow minus real.
        mean_distance: Mean of its amount.
        turned: Steps whose reward has the opposite sign.
        newly_trained: Segments trained on by the shadow's word alone.
        no_longer_trained: By the real one's alone.
        largest: The steps that differ most.
    """

    real: tuple[str, ...]
    shadow: tuple[str, ...]
    segments: int
    only_real: int
    only_shadow: int
    steps: int
    mean_difference: float
    mean_distance: float
    turned: int
    newly_trained: int
    no_longer_trained: int
    largest: tuple[Difference, ...]


def compare(real: Iterable[ScoredSegment], shadow: Iterable[ScoredSegment]) -> Comparison:
    """How the rewards of both differ, on the segments that both scored in the same revision."""
    ours, theirs = newest(real), newest(shadow)
    both = [
        (ours[name], theirs[name])
        for name in ours
        if name in theirs and ours[name].segment.revision == theirs[name].segment.revision
    ]
    found = [difference for pair in both for difference in _differences(*pair)]
    amounts = [item.shadow - item.real for item in found]
    total = max(1, len(found))
    return Comparison(
        real=_formulas(ours),
        shadow=_formulas(theirs),
        segments=len(both),
        only_real=len(ours) - len(both),
        only_shadow=len(theirs) - len(both),
        steps=len(found),
        mean_difference=math.fsum(amounts) / total,
        mean_distance=math.fsum(map(abs, amounts)) / total,
        turned=sum(item.real * item.shadow < 0 for item in found),
        newly_trained=sum(b.trainable and not a.trainable for a, b in both),
        no_longer_trained=sum(a.trainable and not b.trainable for a, b in both),
        largest=_largest(found),
    )


def _differences(real: ScoredSegment, shadow: ScoredSegment) -> list[Difference]:
    return [
        Difference(
            segment_id=real.segment.segment_id,
            turn_id=one.turn_id,
            real=one.reward,
            shadow=other.reward,
        )
        for one, other in zip(real.rewards, shadow.rewards, strict=True)
    ]


def _formulas(found: Mapping[str, ScoredSegment]) -> tuple[str, ...]:
    return tuple(sorted({f"{s.formula_id} {s.config_hash[:12]}" for s in found.values()}))


def _largest(found: Sequence[Difference]) -> tuple[Difference, ...]:
    changed = [item for item in found if item.real != item.shadow]
    ordered = sorted(changed, key=lambda d: (-abs(d.shadow - d.real), d.segment_id, d.turn_id))
    return tuple(ordered[:MOST_SHOWN])


@app.command()
def command(
    name: str = typer.Argument(help="The shadow's name."),
    config: Path | None = typer.Option(None, "--config", "-c", help="Settings file (YAML)."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON for machines."),
) -> None:
    """Compare a shadow's rewards with the real ones."""
    from processors.reward.shadow import Shadow
    from streams.kafka.reading import read_records
    from streams.serde import build_codec
    from streams.topics import SCORED

    settings = load_settings(config)
    codec = build_codec(settings.schema_registry_url)
    topic = Shadow(name).topics.scored
    try:
        shadow = newest(read_records(settings, topic, ScoredSegment, codec)).values()
    except TopicError as error:
        raise RewardError(
            f"there is no shadow {name} ({topic} is missing): start it with "
            f"`clawstream reward shadow {name} --weights FILE`"
        ) from error
    result = compare(read_records(settings, SCORED, ScoredSegment, codec), shadow)
    if as_json:
        print_json(as_data(result))
    else:
        typer.echo("\n".join(as_lines(result)))


def as_data(result: Comparison) -> dict[str, Any]:
    """It for machines."""
    from dataclasses import asdict

    return asdict(result)


def as_lines(result: Comparison) -> list[str]:
    """It for people."""
    lines = [
        f"real: {', '.join(result.real) or 'nothing'}",
        f"shadow: {', '.join(result.shadow) or 'nothing'}",
        f"{result.segments} segments scored by both, {result.only_real} by the real one alone, "
        f"{result.only_shadow} by the shadow alone",
    ]
    lines += _mixed("real", result.real, "part of the difference is among themselves")
    lines += _mixed(
        "shadow",
        result.shadow,
        "give other settings a shadow of another name, or remove this one first",
    )
    if not result.steps:
        return lines
    lines += [
        f"{result.steps} steps: shadow minus real {result.mean_difference:+.3f} on average, "
        f"{result.mean_distance:.3f} apart, {result.turned} with the opposite sign",
        f"trained on by the shadow alone {result.newly_trained}, by the real one alone "
        f"{result.no_longer_trained}",
    ]
    lines += [
        f"  {d.segment_id} {d.turn_id}: {d.real:+.3f} -> {d.shadow:+.3f}" for d in result.largest
    ]
    return lines


def _mixed(which: str, formulas: Sequence[str], so: str) -> list[str]:
    """That a side was scored in several ways, as after a start with other settings."""
    if len(formulas) < 2:
        return []
    many = len(formulas)
    return [f"caution: the {which} rewards are of {many} formulas or settings, mixed below; {so}"]


__all__ = ["Comparison", "Difference", "app", "as_data", "as_lines", "compare"]
