"""What an examination finds. Pure: what was seen goes in, findings come out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from streams.contracts import ScoredSegment
from streams.lag.burrow import State
from streams.lag.watch import LagStatus
from streams.topics import ChangeKind, TopicPlan


class Level(StrEnum):
    """How bad it is; the later, the worse."""

    OK = "OK"
    NOTE = "NOTE"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        about: What: ``broker``, ``topics``, ``flow`` and so on.
        level: How bad it is.
        what: What was seen.
        advice: What to do; empty if nothing.
    """

    about: str
    level: Level
    what: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of one record of the log.

    Attributes:
        topic: Its topic.
        partition: Where it is.
        right_partition: Where Java's partitioner puts its key; None without a key.
        arrival_ms: Its Kafka timestamp.
        event_ms: When what it tells of happened; None where that cannot be told.
        source: Who sent it; None where that cannot be told.
    """

    topic: str
    partition: int
    right_partition: int | None
    arrival_ms: int
    event_ms: int | None = None
    source: str | None = None


GIB = 1024**3
SLOW_BROKER_S = 1.0
CLOCK_MS = 2_000
QUIET_MS = 3_600_000


def of_topics(plan: TopicPlan) -> list[Finding]:
    """The cluster's topics against the inventory."""
    if not plan.changes:
        return [Finding("topics", Level.OK, "all topics are as topics.yaml has them")]
    found = []
    for change in plan.changes:
        what = f"{change.topic}: {change.setting or 'missing'}"
        if change.kind is not ChangeKind.CREATE:
            what += f" is {change.before}, should be {change.after}"
        if change.kind is ChangeKind.NOTICE:
            found.append(Finding("topics", Level.NOTE, f"{what}: {change.reason}"))
        elif change.kind is ChangeKind.REFUSE:
            advice = f"it cannot be changed in place ({change.reason}): see docs/operations.md"
            found.append(Finding("topics", Level.FAIL, what, advice))
        else:
            level = Level.FAIL if change.kind is ChangeKind.CREATE else Level.WARN
            found.append(Finding("topics", level, what, "run `clawstream topics apply`"))
    return found


def of_partitioning(seen: Sequence[Seen]) -> list[Finding]:
    """Whether records are where their keys belong."""
    found: list[Finding] = []
    for topic in sorted({item.topic for item in seen}):
        records = [item for item in seen if item.topic == topic]
        keyless = [item for item in records if item.right_partition is None]
        wrong = [item for item in records if item.right_partition not in (None, item.partition)]
        if keyless or wrong:
            who = _sources([*keyless, *wrong])
            found.append(
                Finding(
                    "partitioning",
                    Level.WARN,
                    f"{topic}: of the last {len(records)} records {len(wrong)} are on another "
                    f"partition than their key's, {len(keyless)} have no key ({who})",
                    "set partitioner=murmur2_random and the session id as key in that producer",
                )
            )
        else:
            what = f"{topic}: the last {len(records)} records are where their keys belong"
            found.append(Finding("partitioning", Level.OK, what))
    return found


def of_clocks(seen: Sequence[Seen], now_ms: int) -> list[Finding]:
    """Whether the clocks of this machine, the brokers and the sources agree."""
    newest = max((item.arrival_ms for item in seen), default=None)
    found: list[Finding] = []
    if newest is not None and newest > now_ms + CLOCK_MS:
        found.append(
            Finding(
                "clocks",
                Level.FAIL,
                f"the newest record arrived {(newest - now_ms) / 1000:.1f} s after this "
                "machine's clock",
                "set the clocks of this machine and of the brokers by NTP",
            )
        )
    ahead: Counter[str] = Counter()
    for item in seen:
        if item.event_ms is not None and item.event_ms > item.arrival_ms + CLOCK_MS:
            ahead[item.source or "unknown"] += 1
    for source, count in ahead.most_common():
        found.append(
            Finding(
                "clocks",
                Level.WARN,
                f"{count} records of source {source} tell of what happens only after they arrive",
                "set that source's clock; events too far ahead become dead letters "
                "(align.max_skew_ms)",
            )
        )
    if seen and not found:
        found.append(Finding("clocks", Level.OK, "no record is ahead of its arrival, or of us"))
    return found


def of_disk(free_bytes: int, total_bytes: int, where: str) -> Finding:
    """The room for the gateway's spool, the embedded Kafka, checkpoints and adapters."""
    what = f"{free_bytes / GIB:.1f} of {total_bytes / GIB:.0f} GiB are free in {where}"
    if free_bytes < GIB:
        return Finding(
            "disk", Level.FAIL, what, "make room: events could be lost while Kafka is away"
        )
    if free_bytes < 5 * GIB:
        return Finding("disk", Level.WARN, what, "make room soon")
    return Finding("disk", Level.OK, what)


def of_flow(newest_ms: Mapping[str, int | None], now_ms: int) -> list[Finding]:
    """Where the flow ends: the first topic into which nothing came lately.

    Args:
        newest_ms: The latest arrival in each topic, in the order in which stages fill them.
        now_ms: Unix milliseconds.
    """
    found: list[Finding] = []
    for topic, arrival_ms in newest_ms.items():
        if arrival_ms is None:
            found.append(Finding("flow", Level.WARN, f"{topic} is empty", EMPTY.get(topic, "")))
            continue
        age_ms = now_ms - arrival_ms
        level = Level.OK if age_ms < QUIET_MS else Level.NOTE
        what = f"the newest record of {topic} came {_span(age_ms)} ago"
        found.append(Finding("flow", level, what))
    return found


def of_lag(statuses: Sequence[LagStatus]) -> list[Finding]:
    """Which stages hold records back, one finding for each thing that is wrong with one.

    Args:
        statuses: Of every partition of every stage.
    """
    found: list[Finding] = []
    judged = [item for item in statuses if item.members is not None]
    for stage in dict.fromkeys(item.lag.stage for item in judged):
        own = [item for item in judged if item.lag.stage == stage]
        bad = [item for item in own if item.state in STATE_ADVICE]
        states = dict.fromkeys(item.state for item in bad)
        found += [_held_back(stage, [i for i in bad if i.state is state]) for state in states]
        if not bad and all(item.members == 0 for item in own):
            what = f"nobody runs {stage}; nothing waits for it now"
            found.append(Finding("lag", Level.WARN, what, _start(stage)))
    if found:
        return found
    lag = sum(item.lag.lag for item in judged)
    return [Finding("lag", Level.OK, f"the workers get on; {lag} records are not read yet")]


def _held_back(stage: str, items: Sequence[LagStatus]) -> Finding:
    state = items[0].state
    places: dict[str, list[str]] = {}
    for item in items:
        places.setdefault(item.lag.topic, []).append(str(item.lag.partition))
    where = ", ".join(f"{topic}/{','.join(parts)}" for topic, parts in places.items())
    records = sum(item.lag.lag for item in items)
    what = f"{stage} holds back {records} records of {where} ({state}): {items[0].reason}"
    level = Level.FAIL if state in (State.STOP, State.STALL) else Level.WARN
    return Finding("lag", level, what, STATE_ADVICE[state].format(start=_start(stage)))


def _start(stage: str) -> str:
    return f"start it with `clawstream {stage}`; if it ran, its last log lines say why it ended"


STATE_ADVICE: dict[State, str] = {
    State.STOP: "{start}",
    State.STALL: (
        "see its page (worker.align_web_port, worker.reward_web_port): whether it restores, or one "
        "topic waits for the other; else its log"
    ),
    State.WARN: "start more workers, up to one for each partition",
    State.REWIND: "find out who reset the group's offsets; what was applied is not applied twice",
}
"""What to do about a stage in each state that is not well."""

EMPTY: dict[str, str] = {
    "dialogue.turns": "no conversation was sent yet: point clients at the gateway, or import some",
    "dialogue.feedback": (
        "without feedback every reward is zero and nothing trains: send thumbs, dwell times, "
        "outcomes to POST /v1/feedback"
    ),
    "trajectory.segments": (
        "no segment closed: is the aligner running? A segment needs align.gap_ms without a turn, "
        "or an end"
    ),
    "trajectory.scored": "no segment was scored: is the reward worker running?",
    "model.versions": "no version was published yet: see what the learner waits for, below",
}


def of_training(
    scored: Sequence[ScoredSegment],
    *,
    policy: str,
    newest_version: int | None,
    max_version_gap: int,
    min_segments: int,
) -> list[Finding]:
    """Why nothing trains, from the segments scored last.

    Args:
        scored: The last ones of all policies.
        policy: The learner's.
        newest_version: Of the policy; None if there is none.
        max_version_gap: How many versions old a reply may be.
        min_segments: As many trainable segments an update needs at least.
    """
    own = [item for item in scored if item.segment.policy == policy]
    if not own:
        others = ", ".join(sorted({item.segment.policy for item in scored})) or "none"
        what = f"no segment of policy {policy} among the last {len(scored)} (there are: {others})"
        return [
            Finding("training", Level.WARN, what, "set learner.policy to the one that is served")
        ]
    trainable = [item for item in own if item.trainable]
    reasons = Counter(item.untrainable_reason or "unknown" for item in own if not item.trainable)
    found = [_share(own, trainable, reasons)]
    nothing = [item for item in own if not any(step.feedback for step in item.segment.steps)]
    if len(nothing) > len(own) / 2:
        what = f"{len(nothing)} of {len(own)} segments have no feedback at all"
        found.append(
            Finding("training", Level.NOTE, what, "dwell times and follow-ups say something, too")
        )
    guessed = [
        feedback.attributed_by
        for item in own
        for step in item.segment.steps
        for feedback in step.feedback
    ]
    by_time = sum(1 for kind in guessed if kind == "time")
    if guessed and by_time > len(guessed) / 2:
        what = f"{by_time} of {len(guessed)} feedback events name no turn: attributed by time"
        advice = "send the turn id that the gateway returns with each reply"
        found.append(Finding("training", Level.NOTE, what, advice))
    found.extend(_stale(trainable, newest_version, max_version_gap))
    if 0 < len(trainable) < min_segments:
        found.append(
            Finding(
                "training",
                Level.NOTE,
                f"{len(trainable)} trainable segments were looked at; an update needs "
                f"{min_segments} (learner.min_sample_size)",
            )
        )
    return found


def _share(
    own: Sequence[ScoredSegment], trainable: Sequence[ScoredSegment], reasons: Counter[str]
) -> Finding:
    why = "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common(3))
    what = f"{len(trainable)} of the last {len(own)} segments can be trained on"
    if why:
        what += f" ({why})"
    if not trainable:
        return Finding("training", Level.FAIL, what, _advice(reasons))
    level = Level.OK if len(trainable) >= len(own) / 10 else Level.WARN
    return Finding("training", level, what, "" if level is Level.OK else _advice(reasons))


def _advice(reasons: Counter[str]) -> str:
    (reason, _), *_ = reasons.most_common(1)
    for word, advice in REASON_ADVICE.items():
        if word in reason:
            return advice
    return "`clawstream reward explain SEGMENT_ID` shows a segment's rewards and what was ignored"


REASON_ADVICE: dict[str, str] = {
    "held back": "people must decide: `clawstream reviews list`",
    "no feedback": (
        "send feedback (POST /v1/feedback): thumbs, dwell times, outcomes; if it comes late, see "
        "`clawstream_late_total` and align.gap_ms"
    ),
    "no reply": "conversations end before a reply: see what the gateway logs",
}


def _stale(
    trainable: Sequence[ScoredSegment], newest: int | None, max_gap: int
) -> Iterable[Finding]:
    if newest is None:
        return
    versions = [
        step.policy_version
        for item in trainable
        for step in item.segment.steps
        if step.policy_version is not None
    ]
    old = [version for version in versions if newest - version > max_gap]
    if versions and len(old) > len(versions) / 2:
        yield Finding(
            "training",
            Level.WARN,
            f"{len(old)} of {len(versions)} replies come from versions more than {max_gap} older "
            f"than version {newest}: they are not trained on",
            "see that the policy server takes new versions (`clawstream_serve_live_version`), or "
            "raise learner.max_version_gap",
        )


def _sources(items: Iterable[Seen]) -> str:
    names = sorted({item.source for item in items if item.source is not None})
    return f"sources: {', '.join(names[:5])}" if names else "source unknown"


def _span(ms: int) -> str:
    seconds = max(0, ms) / 1000
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


__all__ = [
    "Finding",
    "Level",
    "Seen",
    "of_clocks",
    "of_disk",
    "of_flow",
    "of_lag",
    "of_partitioning",
    "of_topics",
    "of_training",
]
