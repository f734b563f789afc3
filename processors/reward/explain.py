"""``clawstream reward explain``: where a segment's rewards come from, in words and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer
from pydantic import ValidationError

from processors.reward.formulas import (
    EXPLICIT_KINDS,
    FORMULA_ID,
    PLUGIN_ERRORS_ATTRIBUTE,
    PLUGINS_ATTRIBUTE,
    config_hash,
    score_again,
)
from processors.reward.plugins import load
from streams.cli.common import print_json
from streams.contracts import (
    BranchReply,
    ScoredSegment,
    Step,
    StepReward,
    TrajectorySegment,
)
from streams.errors import RewardError, SettingsError
from streams.settings import RewardSettings, Settings, explain_error, load_settings
from streams.yamlfile import read_yaml

MAX_WORDS = 160
"""How many characters of a prompt or reply are shown."""

MAX_LINE = 400
"""How many characters are shown of what a line of the record says; ``--json`` has all."""

BEYOND_A_SEGMENT = (
    "burst_",
    "cohort_",
    "contradiction_",
    "crowd_",
    "diversity_replies",
    "filter_",
    "flood_",
    "history_",
    "negatives_in_a_row",
    "nonzero_share_alarm",
    "rate_",
    "verified_sources",
)
"""How the names of settings begin that need more than one segment to have an effect."""

MAX_LISTED = 10
"""How many segments are named where several are meant."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def explain(
    segment_id: str = typer.Argument(
        help="The segment, or what its id begins with; or the id of a session or reply in it."
    ),
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
    unseen = () if other is None else not_considered(scored, settings.reward, other)
    elsewhere = other is not None and is_of_other_settings(scored, settings.reward)
    if as_json:
        print_json(as_data(scored, again, unseen, elsewhere=elsewhere))
        return
    for line in as_lines(scored, again, unseen, elsewhere=elsewhere):
        typer.echo(line)


def _scored(settings: Settings) -> Iterator[ScoredSegment]:
    from streams.kafka.reading import read_records
    from streams.serde import build_codec
    from streams.topics import SCORED

    codec = build_codec(settings.schema_registry_url)
    return read_records(settings, SCORED, ScoredSegment, codec)


def newest(scored: Iterable[ScoredSegment], wanted: str) -> ScoredSegment:
    """The highest revision of the segment that is meant.

    Args:
        scored: All there are, in order.
        wanted: What the segment's id begins with; or, if none does, the id of its session or of a
            reply in it.

    Raises:
        RewardError: There is none, or there are several segments; names them.
    """
    if not wanted:
        raise RewardError("name a segment, or the session or reply whose rewards you look for")
    found: dict[str, ScoredSegment] = {}
    around: dict[str, ScoredSegment] = {}
    for item in scored:
        name = item.segment.segment_id
        if name.startswith(wanted):
            _keep(found, item)
        elif wanted in _inside(item.segment):
            _keep(around, item)
    found = {wanted: found[wanted]} if wanted in found else found or around
    if len(found) > 1:
        raise RewardError(f"{wanted} could be {len(found)} segments: {_listed(found)}")
    if not found:
        raise RewardError(
            f"no scored segment {wanted}, nor one with such a session or reply: it may not be "
            "scored yet, or be older than the retention of trajectory.scored"
        )
    return next(iter(found.values()))


def _keep(found: dict[str, ScoredSegment], item: ScoredSegment) -> None:
    known = found.get(item.segment.segment_id)
    if known is None or known.segment.revision <= item.segment.revision:
        found[item.segment.segment_id] = item


def _inside(segment: TrajectorySegment) -> Iterator[str]:
    """Ids that a person may know a segment by: its session, and every reply in it."""
    yield segment.session_id
    for step in segment.steps:
        yield step.turn_id
        yield from (alternative.turn_id for alternative in step.alternatives)
    yield from (reply.turn_id for reply in segment.off_branch)


def _listed(found: Mapping[str, ScoredSegment]) -> str:
    named = sorted(found.values(), key=lambda s: (s.segment.session_id, s.segment.ordinal))
    lines = [f"{s.segment.segment_id} ({s.segment.session_id})" for s in named[:MAX_LISTED]]
    return ", ".join(lines) + (", …" if len(named) > MAX_LISTED else "")


def read_weights(path: Path, current: RewardSettings) -> RewardSettings:
    """``current`` with what a file says instead.

    Args:
        path: YAML with keys of ``reward:``, at the top or under ``reward:``.
        current: Where all others come from.

    Raises:
        SettingsError: The file cannot be read, a key is unknown or a value cannot be used; names
            the key's path.
    """
    loaded = read_yaml(path)
    values = loaded
    if isinstance(loaded, dict) and "reward" in loaded:
        values = loaded["reward"]
        # Beside it there may be the rest of a settings file, but no weight that would not be read.
        beside = sorted(map(str, loaded.keys() - Settings.model_fields.keys()))
        if beside:
            raise SettingsError(
                f"{path}: {', '.join(beside)}: unknown beside reward; keys of reward go under it"
            )
    if not isinstance(values, dict):
        raise SettingsError(f"{path} must hold a mapping of keys of reward")
    try:
        return RewardSettings(**(current.model_dump() | {str(k): v for k, v in values.items()}))
    except ValidationError as error:
        raise SettingsError(explain_error(error, path, within="reward")) from None


def not_considered(
    scored: ScoredSegment, current: RewardSettings, other: RewardSettings
) -> tuple[str, ...]:
    """The keys that differ and change nothing here: they are about more than one segment.

    Args:
        scored: The record. Where it was scored without diversity, nobody looked for templates.
        current: The settings here.
        other: Those to score it with.
    """
    beyond = [
        name
        for name in RewardSettings.model_fields
        if name.startswith(BEYOND_A_SEGMENT) and getattr(current, name) != getattr(other, name)
    ]
    looked = any(part.name == "diversity" for r in scored.rewards for part in r.components)
    if other.weight_diversity > 0 and scored.rewards and not looked:
        beyond.append("weight_diversity")
    return tuple(beyond)


def is_of_other_settings(scored: ScoredSegment, current: RewardSettings) -> bool:
    """Whether ``scored`` was made with other settings than those here, or by other formulas."""
    return (scored.formula_id, scored.config_hash) != (FORMULA_ID, config_hash(current))


def as_data(
    scored: ScoredSegment,
    again: ScoredSegment | None,
    unseen: Sequence[str] = (),
    *,
    elsewhere: bool = False,
) -> dict[str, Any]:
    """All of it for machines; the arguments are those of ``as_lines``."""
    data: dict[str, Any] = {"scored": _plain(scored)}
    if again is not None:
        data["what_if"] = {
            "formula_id": again.formula_id,
            "config_hash": again.config_hash,
            "attributes": again.attributes,
            "not_considered": list(unseen),
            "scored_with_other_settings": elsewhere,
            "trainable": again.trainable,
            "untrainable_reason": again.untrainable_reason,
            "rewards": _plain(again.rewards),
        }
    return data


def _plain(record: object) -> Any:
    """As JSON has it: feedback may hold what is no number, which JSON cannot say (null)."""
    return msgspec.json.decode(msgspec.json.encode(record))


def as_lines(
    scored: ScoredSegment,
    again: ScoredSegment | None,
    unseen: Sequence[str] = (),
    *,
    elsewhere: bool = False,
) -> Iterator[str]:
    """All of it for people.

    Args:
        scored: The record.
        again: The same scored with other settings.
        unseen: Keys of those settings that change nothing here (``not_considered``).
        elsewhere: Whether the record was made with other settings than ``again`` began with
            (``is_of_other_settings``).
    """
    segment = scored.segment
    yield f"segment {segment.segment_id}, revision {segment.revision}"
    yield f"  policy {segment.policy}, user {segment.user_id or '-'}, session {segment.session_id}"
    yield f"  formula {scored.formula_id}, config {scored.config_hash[:12]}"
    yield from _plugins(scored)
    yield f"  {_verdict(scored)}"
    if again is not None:
        yield f"  what if: formula {again.formula_id}, config {again.config_hash[:12]}"
        yield from (f"  what if:{line.removeprefix(' ')}" for line in _plugins(again))
        yield f"  what if: {_verdict(again)}"
    if unseen:
        yield (
            f"  what if: not considered: {', '.join(unseen)} (how far feedback is believed and how "
            "often words were used is taken from the record; try them in a shadow)"
        )
    if elsewhere:
        yield (
            "  what if: the record was scored with other settings, or by another version, than "
            "those here: not all of the difference is the file's (name the worker's settings with "
            "--config)"
        )
    others: Sequence[StepReward | None] = [None] * len(scored.rewards)
    if again is not None:
        others = again.rewards
    for number, (step, reward, other) in enumerate(
        zip(segment.steps, scored.rewards, others, strict=True), start=1
    ):
        yield ""
        yield from _step(number, step, reward, other)
    if segment.off_branch:
        yield ""
        for left in segment.off_branch:
            yield from _unrewarded(left, "nobody continued this reply")


def _plugins(scored: ScoredSegment) -> Iterator[str]:
    used = scored.attributes.get(PLUGINS_ATTRIBUTE)
    if used:
        yield f"  plugins: {_cut(used)}"
    failed = scored.attributes.get(PLUGIN_ERRORS_ATTRIBUTE)
    if failed:
        yield f"  plugins that failed: {_cut(failed)}"


def _verdict(scored: ScoredSegment) -> str:
    return (
        "can be trained on" if scored.trainable else f"not trained on: {scored.untrainable_reason}"
    )


def _step(number: int, step: Step, reward: StepReward, other: StepReward | None) -> Iterator[str]:
    if step.context:
        yield f"  {step.context[-1].role.value}: {_short(step.context[-1].content)}"
    yield f"step {number}, reply {step.turn_id}: {_short(step.reply) or '(no text)'}"
    if step.next_user_turn is not None:
        yield f"  then the user: {_short(step.next_user_turn.content)}"
    yield f"  reward {reward.reward:+.3f}, credibility of its feedback {reward.credibility:.2f}"
    yield from _components(reward)
    if other is not None:
        yield f"  what if: {other.reward:+.3f} ({other.reward - reward.reward:+.3f})"
        yield from (f"  what if:{line.removeprefix('  ')}" for line in _components(other))
    for item in reward.weighed:
        yield f"  weighed {item.event_id} x {item.weight:g} ({item.filter}): {item.reason}"
    yield from (f"  {line}" for line in _remarks(reward))
    if other is not None:
        known = set(_remarks(reward))
        yield from (f"  what if: {line}" for line in _remarks(other) if line not in known)
    for alternative in step.alternatives:
        yield from _unrewarded(alternative, "the user had this reply regenerated")
    for text in reward.directives:
        yield f"  directive: {_short(text)}"


def _remarks(reward: StepReward) -> Iterator[str]:
    for line in reward.reasons:
        if line.startswith(("ignored ", "review ", "plugin ")):
            yield _cut(line)


def _unrewarded(reply: BranchReply, why: str) -> Iterator[str]:
    """A reply that earns nothing, and the feedback on it that therefore counts nothing."""
    yield f"  no reward for reply {reply.turn_id}: {why}: {_short(reply.reply) or '(no text)'}"
    for item in reply.feedback:
        value = "" if item.value is None else f" {item.value:g}"
        kept = "; it is in its rater's history" if item.kind in EXPLICIT_KINDS else ""
        yield f"    ignored {item.kind.value} {item.event_id}{value}: {why}{kept}"


def _components(reward: StepReward) -> Iterator[str]:
    for part in reward.components:
        value = "nothing" if part.value is None else f"{part.value:+.3f}"
        # Never a negative zero.
        share = 0.0 if part.value is None else part.weight * part.value + 0.0
        yield f"    {part.name:<10} {part.weight:>5.2f} x {value:>8} = {share:+.3f}"
        yield from (f"      {_cut(line)}" for line in part.evidence)


def _short(text: str) -> str:
    return _cut(text, MAX_WORDS)


def _cut(text: str, most: int = MAX_LINE) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= most else plain[: most - 1] + "…"


__all__ = ["app", "as_data", "as_lines", "config_hash", "newest", "read_weights"]
