"""Which segments make which update of a retrain. Pure.

The same segments under the same base version and settings give the same batches in the same
order, wherever and in whatever order they lie in the log: what is drawn depends on the digest of
their ids and revisions alone.

1. Segments are ordered by the time they were first closed, then by id.
2. A pass draws all of them without replacement, in an order of its own, into as few updates as
   ``batch_segments`` allows, of sizes that differ by one at most.
3. A segment is used in at most ``max_updates_per_segment`` updates, a session in at most
   ``max_updates_per_session``, as by the live learner; what would be more is left out.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from streams.errors import LearnerError

_SEED_BITS = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Usable:
    """A segment that can be trained on, without its content."""

    segment_id: str
    revision: int
    session_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The learner's settings of the same names."""

    batch_segments: int
    max_updates_per_segment: int
    max_updates_per_session: int


def updates_of_a_pass(segments: int, batch_segments: int) -> int:
    """How many updates use each of so many segments once."""
    return math.ceil(segments / batch_segments)


def seed_of(usable: Sequence[Usable], *, policy: str, base_version: int, seed: int) -> int:
    """What every random choice of a retrain depends on, in [0, 2^63).

    The first bits of the SHA-256 over the compact JSON of policy, base version,
    ``learner.seed`` and the sorted ``[segment_id, revision]`` pairs.
    """
    pairs = sorted([one.segment_id, one.revision] for one in usable)
    plan = json.dumps([policy, base_version, seed, pairs], separators=(",", ":"))
    return int(hashlib.sha256(plan.encode()).hexdigest(), 16) >> (256 - _SEED_BITS)


def cut(
    usable: Sequence[Usable], limits: Limits, *, updates: int | None, seed: int
) -> tuple[tuple[str, ...], ...]:
    """The segment ids of each update, in the order in which they are trained on.

    Args:
        usable: In the order of the module.
        limits: Of the learner.
        updates: How many updates; those of one pass if None. Fewer see a random part.
        seed: As `seed_of` says.

    Raises:
        LearnerError: So many updates need more passes than a segment may be used in.
    """
    per_pass = updates_of_a_pass(len(usable), limits.batch_segments)
    wanted = per_pass if updates is None else updates
    if wanted > per_pass * limits.max_updates_per_segment:
        raise LearnerError(
            f"{wanted} updates of {len(usable)} segments would use each more than "
            f"{limits.max_updates_per_segment} times: ask for at most "
            f"{per_pass * limits.max_updates_per_segment}, or raise "
            "learner.max_updates_per_segment"
        )
    rng = random.Random(seed)
    sessions: defaultdict[str, set[int]] = defaultdict(set)
    found: list[tuple[str, ...]] = []
    drawn: list[Usable] = []
    for number in range(wanted):
        part = number % per_pass
        if part == 0:
            drawn = rng.sample(usable, len(usable))
        batch = drawn[len(drawn) * part // per_pass : len(drawn) * (part + 1) // per_pass]
        kept = [one for one in batch if _admit(sessions[one.session_id], number, limits)]
        if kept:
            found.append(tuple(one.segment_id for one in kept))
    return tuple(found)


def _admit(used_in: set[int], number: int, limits: Limits) -> bool:
    if number not in used_in and len(used_in) >= limits.max_updates_per_session:
        return False
    used_in.add(number)
    return True


__all__ = ["Limits", "Usable", "cut", "seed_of", "updates_of_a_pass"]
