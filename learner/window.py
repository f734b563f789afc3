"""The learner's window: the newest segments, each at its newest revision. Pure.

Theory of operation. A segment that can be trained on enters at the young end. It leaves when
a later revision takes its place (which enters at the young end), when a later revision is no
longer trainable, or at the old end, when there are more segments or tokens than the caps allow.
Of a segment that cannot be trained on, only its revision is kept, as a mark, so that a repeated
delivery of the revision before cannot bring it back. Marks have a cap of their own.

A revision is *news* if the one it replaces still was (nobody has seen that one), or if it
changes what replies earned: then there is something to learn that no update has seen. One that
changes neither, of a segment that updates may have seen, takes its place quietly: schedules do
not hurry for it. A revision inherits the uses of its predecessor, so that late feedback does
not lift the limit of updates on the same replies.

A segment here is *usable* while it was used in fewer than ``max_uses`` updates and none of its
replies is by a version older than ``require_version`` asked for; only usable segments count as
new and are sampled. The others keep their place: a rollback can make them usable again.

What came first leaves first. Uses are counted as long as a segment is here; of one that comes
back (a revision after the caps or a mark removed it) whoever adds it says how often it was used.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from streams.contracts import Message, ScoredSegment, SourceRef, Step

_BYTES_PER_TOKEN = 4
"""Of text that came without token ids; rough, and enough for a soft cap."""


class Arrival(StrEnum):
    """What became of a segment that arrived."""

    ADDED = "added"
    REPLACED = "replaced"
    UNTRAINABLE = "untrainable"
    STALE = "stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A segment that may be sampled, and where it was read."""

    ref: SourceRef
    scored: ScoredSegment


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The window at one moment: usable segments and every record it rests on, oldest first.

    ``stale_share`` is the share of the window's tokens in segments that are too old to be used.
    """

    candidates: tuple[Candidate, ...]
    refs: tuple[SourceRef, ...]
    new_segments: int
    stale_share: float


@dataclass(slots=True)
class _Held:
    ref: SourceRef
    scored: ScoredSegment
    tokens: int
    order: int
    news: bool
    oldest_version: int | None
    uses: int


@dataclass(frozen=True, slots=True)
class _Mark:
    ref: SourceRef
    revision: int
    order: int


class Window:
    """See the module. Not safe for threads; its owner holds a lock.

    Args:
        max_segments: Trainable segments kept, and marks kept beside them.
        max_tokens: Soft cap: the oldest go while there are more, but the newest stays.
        max_uses: A segment used in this many updates is not sampled again.
        teaches: Whether there is anything to learn from a segment; the scorer's ``trainable``
            if None.
    """

    def __init__(
        self,
        *,
        max_segments: int,
        max_tokens: int,
        max_uses: int,
        teaches: Callable[[ScoredSegment], bool] | None = None,
    ) -> None:
        self._max_segments = max_segments
        self._max_tokens = max_tokens
        self._max_uses = max_uses
        self._teaches = teaches or _trainable
        self._held: dict[str, _Held] = {}
        self._marks: dict[str, _Mark] = {}
        self._tokens = 0
        self._order = 0
        self._min_version = 0

    def __len__(self) -> int:
        """Trainable segments in the window."""
        return len(self._held)

    @property
    def tokens(self) -> int:
        """Their tokens together, as ``segment_tokens`` counts them."""
        return self._tokens

    @property
    def new_segments(self) -> int:
        """Usable segments here that came since the last seal, or changed what they teach."""
        return sum(held.news and self._usable(held) for held in self._held.values())

    @property
    def available_segments(self) -> int:
        """Usable segments here."""
        return sum(map(self._usable, self._held.values()))

    def __contains__(self, segment_id: object) -> bool:
        """Whether a segment is in the window."""
        return segment_id in self._held

    def add(self, ref: SourceRef, scored: ScoredSegment, *, past_uses: int = 0) -> Arrival:
        """Take in one arrival; equal and lower revisions than the one known change nothing.

        Args:
            ref: Where it was read.
            scored: The segment.
            past_uses: In how many updates an earlier revision was used, if none is here.
        """
        segment = scored.segment
        if segment.revision <= self._known_revision(segment.segment_id):
            return Arrival.STALE
        self._order += 1
        before = self._remove(segment.segment_id)
        if not self._teaches(scored):
            self._mark(ref, scored)
            return Arrival.UNTRAINABLE
        if before is None:
            self._hold(ref, scored, uses=past_uses, news=True)
            return Arrival.ADDED
        news = before.news or rewards_of(before.scored) != rewards_of(scored)
        self._hold(ref, scored, uses=before.uses, news=news)
        return Arrival.REPLACED

    def require_version(self, min_version: int) -> None:
        """Segments with a reply by an older version are not usable from now on."""
        self._min_version = min_version

    def record_use(self, segment_ids: Iterable[str]) -> None:
        """Count one more use of each segment that is still here."""
        for segment_id in segment_ids:
            if segment_id in self._held:
                self._held[segment_id].uses += 1

    def restore_uses(self, uses: Mapping[str, int]) -> None:
        """Set the uses of segments from an earlier life; the absent were never used."""
        for segment_id, held in self._held.items():
            held.uses = uses.get(segment_id, 0)

    def segment_ids(self) -> tuple[str, ...]:
        """The ids of the segments here, oldest first."""
        return tuple(self._held)

    def seal(self) -> Snapshot:
        """A snapshot that no later arrival changes; what comes after it counts as new."""
        new_segments = self.new_segments
        for held in self._held.values():
            held.news = False
        return Snapshot(
            candidates=tuple(
                Candidate(ref=held.ref, scored=held.scored)
                for held in self._held.values()
                if self._usable(held)
            ),
            refs=self._refs(),
            new_segments=new_segments,
            stale_share=self._stale_share(),
        )

    def _usable(self, held: _Held) -> bool:
        return held.uses < self._max_uses and not self._stale(held)

    def _stale(self, held: _Held) -> bool:
        return held.oldest_version is not None and held.oldest_version < self._min_version

    def _stale_share(self) -> float:
        stale = sum(held.tokens for held in self._held.values() if self._stale(held))
        return stale / max(self._tokens, 1)

    def _refs(self) -> tuple[SourceRef, ...]:
        everything: list[_Held | _Mark] = [*self._held.values(), *self._marks.values()]
        return tuple(entry.ref for entry in sorted(everything, key=lambda entry: entry.order))

    def _known_revision(self, segment_id: str) -> int:
        if segment_id in self._held:
            return self._held[segment_id].scored.segment.revision
        mark = self._marks.get(segment_id)
        return -1 if mark is None else mark.revision

    def _remove(self, segment_id: str) -> _Held | None:
        self._marks.pop(segment_id, None)
        held = self._held.pop(segment_id, None)
        if held is not None:
            self._tokens -= held.tokens
        return held

    def _mark(self, ref: SourceRef, scored: ScoredSegment) -> None:
        segment = scored.segment
        self._marks[segment.segment_id] = _Mark(ref, segment.revision, self._order)
        if len(self._marks) > self._max_segments:
            del self._marks[next(iter(self._marks))]

    def _hold(self, ref: SourceRef, scored: ScoredSegment, *, uses: int, news: bool) -> None:
        held = _Held(
            ref=ref,
            scored=scored,
            tokens=segment_tokens(scored),
            order=self._order,
            news=news,
            oldest_version=_oldest_version(scored),
            uses=uses,
        )
        self._held[scored.segment.segment_id] = held
        self._tokens += held.tokens
        while self._over_caps():
            self._remove(next(iter(self._held)))

    def _over_caps(self) -> bool:
        if len(self._held) > self._max_segments:
            return True
        return self._tokens > self._max_tokens and len(self._held) > 1


def sample(
    candidates: tuple[Candidate, ...], size: int, rng: random.Random
) -> tuple[Candidate, ...]:
    """``size`` candidates drawn uniformly without replacement; all, in random order, if fewer."""
    return tuple(rng.sample(candidates, min(size, len(candidates))))


def rewards_of(scored: ScoredSegment) -> dict[str, tuple[float, tuple[str, ...]]]:
    """What a segment teaches: each reply's reward and the user's directives, by turn id.

    A reply without a reward record earned nothing.
    """
    earned: dict[str, tuple[float, tuple[str, ...]]] = {
        step.turn_id: (0.0, ()) for step in scored.segment.steps
    }
    earned |= {r.turn_id: (r.reward, r.directives) for r in scored.rewards}
    return earned


def _trainable(scored: ScoredSegment) -> bool:
    return scored.trainable


def segment_tokens(scored: ScoredSegment) -> int:
    """Tokens of a segment's contexts and replies: counted where ids came with them, else
    estimated from the text's length."""
    return sum(_step_tokens(step) for step in scored.segment.steps)


def _oldest_version(scored: ScoredSegment) -> int | None:
    """The oldest version that wrote one of the replies; None if none of them says."""
    versions = [step.policy_version for step in scored.segment.steps]
    return min((version for version in versions if version is not None), default=None)


def _step_tokens(step: Step) -> int:
    reply = _text_tokens(step.reply) if step.token_ids is None else len(step.token_ids)
    if step.prompt_token_ids is not None:
        return reply + len(step.prompt_token_ids)
    return reply + sum(_message_tokens(message) for message in step.context)


def _message_tokens(message: Message) -> int:
    return _text_tokens(message.content)


def _text_tokens(content: str) -> int:
    return -(-len(content.encode()) // _BYTES_PER_TOKEN)
