"""What an update was made of: its replies by source, topic, policy version and reward sign. Pure.

An update that learns from one kind of conversation alone forgets the others, and one that only
hears complaints (or only praise) learns little about what is better. Neither shows in a mean
reward. So each version carries counts of the replies it was trained on, and `imbalances` says
where they lean too far.

* ``source``: the front end, as the segment names it.
* ``topic``: what the conversation is about, as the reply's (else the segment's) attribute
  ``topic`` says; ``none`` where nobody says.
* ``version``: the policy version that wrote the reply; ``unknown`` where nobody says.
* ``sign``: of the reply's reward: ``positive``, ``negative`` or ``zero``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from streams.contracts import ScoredSegment, Step

TOPIC_ATTRIBUTE = "topic"
NO_TOPIC = "none"
UNKNOWN_VERSION = "unknown"
POSITIVE, NEGATIVE, ZERO = "positive", "negative", "zero"

FEW_REPLIES = 16
"""Of fewer replies no imbalance is told: it would be an accident."""

PREFIX = "make_up_"
"""Begins the names of a version's attributes that hold counts."""

IMBALANCE = "imbalance"
"""The version's attribute that says in words what leans too far; absent if nothing does."""

_MOST_KINDS = 20
_OTHERS = "(others)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """From where on an update counts as unbalanced.

    Args:
        max_share: Of one source, topic or version where there are several.
        min_sign_share: Of the rarer sign among the rewards that are not 0; 0 allows one sign
            alone.
    """

    max_share: float
    min_sign_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeUp:
    """Replies of an update, counted.

    Args:
        replies: All of them.
        source: By source.
        topic: By topic.
        version: By the version that wrote them.
        sign: By the sign of their reward.
        largest_session: Of the session with most replies.
    """

    replies: int
    source: Mapping[str, int]
    topic: Mapping[str, int]
    version: Mapping[str, int]
    sign: Mapping[str, int]
    largest_session: int

    @classmethod
    def of(cls, segments: Iterable[ScoredSegment]) -> MakeUp:
        """Count the replies of these segments."""
        counts: dict[str, Counter[str]] = {
            kind: Counter() for kind in ("source", "topic", "version", "sign", "session")
        }
        for segment in segments:
            for of_reply in _kinds(segment):
                for kind, name in of_reply.items():
                    counts[kind][name] += 1
        return cls(
            replies=counts["sign"].total(),
            source=dict(counts["source"]),
            topic=dict(counts["topic"]),
            version=dict(counts["version"]),
            sign=dict(counts["sign"]),
            largest_session=max(counts["session"].values(), default=0),
        )

    def metrics(self, limits: Limits) -> dict[str, float]:
        """Shares, under the names that ``learner.ppo.diagnostics.METRICS`` explains."""
        total = max(self.replies, 1)
        return {
            "makeup/replies": float(self.replies),
            "makeup/sources": float(len(self.source)),
            "makeup/topics": float(len(self.topic)),
            "makeup/versions": float(len(self.version)),
            "makeup/largest_source_share": _largest(self.source) / total,
            "makeup/largest_topic_share": _largest(self.topic) / total,
            "makeup/largest_version_share": _largest(self.version) / total,
            "makeup/largest_session_share": self.largest_session / total,
            "makeup/unknown_version_share": self.version.get(UNKNOWN_VERSION, 0) / total,
            "makeup/positive_share": self.sign.get(POSITIVE, 0) / total,
            "makeup/negative_share": self.sign.get(NEGATIVE, 0) / total,
            "makeup/zero_share": self.sign.get(ZERO, 0) / total,
            "makeup/imbalances": float(len(imbalances(self, limits))),
        }

    def attributes(self, limits: Limits) -> dict[str, str]:
        """The counts as JSON objects, most frequent first, and the imbalances in words.

        Of more than 20 kinds the rarest are one entry.
        """
        counts = {
            "source": self.source, "topic": self.topic, "version": self.version, "sign": self.sign,
        }  # fmt: skip
        found = {
            f"{PREFIX}{kind}": json.dumps(_most_frequent(of), ensure_ascii=False)
            for kind, of in counts.items()
        }
        unbalanced = imbalances(self, limits)
        return found | ({IMBALANCE: "; ".join(unbalanced)} if unbalanced else {})


def imbalances(made_up: MakeUp, limits: Limits) -> tuple[str, ...]:
    """What leans further than the limits allow, in words; nothing of fewer than 16 replies.

    Where there is one source, topic or version alone, there was nothing to balance.
    """
    if made_up.replies < FEW_REPLIES:
        return ()
    counts = {"source": made_up.source, "topic": made_up.topic, "version": made_up.version}
    found = [
        f"{kind} {name}: {of[name]} of {made_up.replies} replies"
        for kind, of in counts.items()
        for name in _too_frequent(of, made_up.replies, limits.max_share)
    ]
    return (*found, *_lopsided(made_up.sign, limits.min_sign_share))


def _too_frequent(of: Mapping[str, int], total: int, max_share: float) -> list[str]:
    if len(of) < 2:
        return []
    return [name for name, count in of.items() if count > max_share * total]


def _lopsided(sign: Mapping[str, int], min_share: float) -> list[str]:
    judged = sign.get(POSITIVE, 0) + sign.get(NEGATIVE, 0)
    return [
        f"sign {name}: {sign.get(name, 0)} of {judged} replies with a reward"
        for name in (POSITIVE, NEGATIVE)
        if sign.get(name, 0) < min_share * judged
    ]


def _kinds(scored: ScoredSegment) -> Iterator[dict[str, str]]:
    segment = scored.segment
    rewards = {reward.turn_id: reward.reward for reward in scored.rewards}
    for step in segment.steps:
        version = step.policy_version
        yield {
            "source": segment.source,
            "topic": _topic(scored, step),
            "version": UNKNOWN_VERSION if version is None else str(version),
            "sign": _sign(rewards.get(step.turn_id, 0.0)),
            "session": segment.session_id,
        }


def _topic(scored: ScoredSegment, step: Step) -> str:
    of_segment = scored.segment.attributes.get(TOPIC_ATTRIBUTE)
    return step.attributes.get(TOPIC_ATTRIBUTE) or of_segment or NO_TOPIC


def _sign(reward: float) -> str:
    if reward > 0:
        return POSITIVE
    return NEGATIVE if reward < 0 else ZERO


def _largest(of: Mapping[str, int]) -> int:
    return max(of.values(), default=0)


def _most_frequent(of: Mapping[str, int]) -> dict[str, int]:
    ordered: Sequence[tuple[str, int]] = sorted(of.items(), key=lambda item: (-item[1], item[0]))
    named, others = ordered[:_MOST_KINDS], ordered[_MOST_KINDS:]
    return dict(named) | ({_OTHERS: sum(count for _, count in others)} if others else {})


__all__ = ["IMBALANCE", "PREFIX", "Limits", "MakeUp", "imbalances"]
