"""``clawstream reward explain``: where a segment's rewards come from, in words and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer
import yaml
from pydantic import ValidationError

from processors.reward.formulas import config_hash, score_again
from processors.reward.plugins import load
from streams.cli.common import print_json
from streams.contracts import ScoredSegment, Step, StepReward
from streams.errors import RewardError, SettingsError
from streams.settings import RewardSettings, Settings, explain_error, load_settings

MAX_WORDS = 160
"""How many characters of a prompt or reply are shown."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def explain(
    segment_id: str = typer.Argument(help="The segment, or what its id begins with."),
    config: Path | None = typer.Option(None, "--config", "-c", help="Settings file (YAML)."),
    what_if: Path | None = typer.Option(
        None, "--what-if", help="YAML with keys of `reward:`; scored with them, not published."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON for machines."),
) -> None:
    """Print a scored segment: each step's components, weights and evidence, what was ignored."""
    settings = load_settings(config)
    other = None if what_if is None else read_weights(what_if, settings.reward)
    scored = newest(_scored(settings), segment_id)
    again = None if other is None else score_again(scored, other, load(other))
    if as_json:
        print_json(as_data(scored, again))
        return
    for line in as_lines(scored, again):
        typer.echo(line)


def _scored(settings: Settings) -> Iterator[ScoredSegment]:
    from streams.kafka.reading import read_records
    from streams.serde import build_codec
    from streams.topics import SCORED

    codec = build_codec(settings.schema_registry_url)
    return read_records(settings, SCORED, ScoredSegment, codec)


def newest(scored: Iterable[ScoredSegment], segment_id: str) -> ScoredSegment:
    """The highest revision of the segment whose id begins with ``segment_id``.

    Raises:
        RewardError: There is none, or there are several segments.
    """
    found: dict[str, ScoredSegment] = {}
    for item in scored:
        name = item.segment.segment_id
        if name.startswith(segment_id) and (
            name not in found or found[name].segment.revision <= item.segment.revision
        ):
            found[name] = item
    if len(found) > 1:
        raise RewardError(f"{segment_id} could be {len(found)} segments; give more of the id")
    if not found:
        raise RewardError(
            f"no scored segment {segment_id}: it may not be scored yet, or be older than the "
            "retention of trajectory.scored"
        )
    return next(iter(found.values()))


def read_weights(path: Path, current: RewardSettings) -> RewardSettings:
    """``current`` with what a file says instead.

    Args:
        path: YAML with keys of ``reward:``, at the top or under ``reward:``.
        current: Where all others come from.

    Raises:
        SettingsError: The file cannot be read, a key is unknown or a value cannot be used; names
            the key's path.
    """
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid YAML: {error}") from error
    values = loaded.get("reward", loaded) if isinstance(loaded, dict) else loaded
    if not isinstance(values, dict):
        raise SettingsError(f"{path} must hold a mapping of keys of reward")
    try:
        return RewardSettings(**(current.model_dump() | {str(k): v for k, v in values.items()}))
    except ValidationError as error:
        raise SettingsError(explain_error(error, path, within="reward")) from None


def as_data(scored: ScoredSegment, again: ScoredSegment | None) -> dict[str, Any]:
    """All of it for machines."""
    data: dict[str, Any] = {"scored": msgspec.to_builtins(scored)}
    if again is not None:
        data["what_if"] = {
            "config_hash": again.config_hash,
            "trainable": again.trainable,
            "untrainable_reason": again.untrainable_reason,
            "rewards": msgspec.to_builtins(again.rewards),
        }
    return data


def as_lines(scored: ScoredSegment, again: ScoredSegment | None) -> Iterator[str]:
    """All of it for people."""
    segment = scored.segment
    yield f"segment {segment.segment_id}, revision {segment.revision}"
    yield f"  policy {segment.policy}, user {segment.user_id or '-'}, session {segment.session_id}"
    yield f"  formula {scored.formula_id}, config {scored.config_hash[:12]}"
    yield f"  {_verdict(scored)}"
    if again is not None:
        yield f"  what if: formula {again.formula_id}, config {again.config_hash[:12]}"
        yield f"  what if: {_verdict(again)}"
    others: Sequence[StepReward | None] = [None] * len(scored.rewards)
    if again is not None:
        others = again.rewards
    for number, (step, reward, other) in enumerate(
        zip(segment.steps, scored.rewards, others, strict=True), start=1
    ):
        yield ""
        yield from _step(number, step, reward, other)


def _verdict(scored: ScoredSegment) -> str:
    return "trained on" if scored.trainable else f"not trained on: {scored.untrainable_reason}"


def _step(number: int, step: Step, reward: StepReward, other: StepReward | None) -> Iterator[str]:
    if step.context:
        yield f"  {step.context[-1].role.value}: {_short(step.context[-1].content)}"
    yield f"step {number}, reply {step.turn_id}: {_short(step.reply) or '(no text)'}"
    if step.next_user_turn is not None:
        yield f"  then the user: {_short(step.next_user_turn.content)}"
    yield f"  reward {reward.reward:+.3f}, credibility of its ratings {reward.credibility:.2f}"
    yield from _components(reward)
    if other is not None:
        yield f"  what if: {other.reward:+.3f} ({other.reward - reward.reward:+.3f})"
        yield from (f"  what if:{line.removeprefix('  ')}" for line in _components(other))
    for item in reward.weighed:
        yield f"  weighed {item.event_id} x {item.weight:g} ({item.filter}): {item.reason}"
    for line in reward.reasons:
        if line.startswith(("ignored ", "review ", "plugin ")):
            yield f"  {line}"
    for text in reward.directives:
        yield f"  directive: {_short(text)}"


def _components(reward: StepReward) -> Iterator[str]:
    for part in reward.components:
        value = "nothing" if part.value is None else f"{part.value:+.3f}"
        share = 0.0 if part.value is None else part.weight * part.value
        yield f"    {part.name:<10} {part.weight:>5.2f} x {value:>8} = {share:+.3f}"
        yield from (f"      {line}" for line in part.evidence)


def _short(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= MAX_WORDS else plain[: MAX_WORDS - 1] + "…"


__all__ = ["app", "as_data", "as_lines", "config_hash", "newest", "read_weights"]
