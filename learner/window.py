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

A segment here is *usable* while it was used in fewer than ``max_uses`` updates, the segments of
its session that are here in fewer than ``max_session_uses``, and none of its
replies is by a version older than ``require_version`` asked for; only usable segments count as
new and are sampled. The others keep their place: a rollback can make them usable again.

What came first leaves first. Uses are counted as long as a segment is here; of one that comes
back (a revision after the caps or a mark removed it) whoever adds it says how often it was used.

A segment is kept as compressed bytes beside the few numbers the rules need (`Packed`), and is
made whole again when it is drawn. As objects, 3,000 long segments take gigabytes: servers name
the whole conversation's tokens as the prompt of every reply. Compressed, each token is there
about once. Packing is the costly part of an arrival and needs nothing of the window: it is done
before, outside of whatever guards it.
"""

from __future__ import annotations

import hashlib
import json
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from streams.contracts import Message, ScoredSegment, SourceRef, Step

_BYTES_PER_TOKEN = 4
"""Of text that came without token ids; rough, and enough for a soft cap."""

_QUICK = 1
"""zlib's level: repeated prompts are found at any, and arrivals should not wait for more."""


class Arrival(StrEnum):
    """What became of a segment that arrived."""

    ADDED = "added"
    REPLACED = "replaced"
    UNTRAINABLE = "untrainable"
    STALE = "stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A segment that was drawn, and where it was read."""

    ref: SourceRef
    scored: ScoredSegment


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """An arrival as the window keeps it.

    Attributes:
        ref: Where it was read.
        segment_id: Of the segment.
        session_id: Of the segment.
        revision: Of the segment.
        teaches: Whether there is anything to learn from it.
        tokens: As `segment_tokens` counts them; 0 if it teaches nothing.
        oldest_version: The oldest version that wrote one of its replies; None if none says.
        earned: Digest of `rewards_of`.
        data: The whole, for `open`; empty if it teaches nothing.
    """

    ref: SourceRef
    segment_id: str
    session_id: str
    revision: int
    teaches: bool
    tokens: int
    oldest_version: int | None
    earned: bytes
    data: bytes

    def open(self) -> Candidate:
        """The segment, whole again; only of one that teaches."""
        scored = msgspec.msgpack.decode(zlib.decompress(self.data), type=ScoredSegment)
        return Candidate(ref=self.ref, scored=scored)


def pack(ref: SourceRef, scored: ScoredSegment, teaches: Callable[[ScoredSegment], bool]) -> Packed:
    """An arrival as the window keeps it; takes a millisecond or so and touches nothing else."""
    segment, useful = scored.segment, teaches(scored)
    return Packed(
        ref=ref,
        segment_id=segment.segment_id,
        session_id=segment.session_id,
        revision=segment.revision,
        teaches=useful,
        tokens=segment_tokens(scored) if useful else 0,
        oldest_version=_oldest_version(scored),
        earned=_digest(rewards_of(scored)) if useful else b"",
        data=zlib.compress(msgspec.msgpack.encode(scored), _QUICK) if useful else b"",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The window at one moment: usable segments and every record it rests on, oldest first.

    ``stale_share`` is the share of the window's tokens in segments that are too old to be used.
    """

    candidates: tuple[Packed, ...]
    refs: tuple[SourceRef, ...]
    new_segments: int
    stale_share: float


Uses = frozenset[int]
"""The updates that used a segment, by the number of the version that came of each."""

NEVER: Uses = frozenset()


@dataclass(slots=True)
class _Held:
    packed: Packed
    order: int
    news: bool
    uses: Uses

    @property
    def ref(self) -> SourceRef:
        return self.packed.ref


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
        max_session_uses: Nor is any segment of a session whose segments here were used in this
            many different updates; no such limit if None.
        teaches: Whether there is anything to learn from a segment; the scorer's ``trainable``
            if None.
    """

    def __init__(
        self,
        *,
        max_segments: int,
        max_tokens: int,
        max_uses: int,
        max_session_uses: int | None = None,
        teaches: Callable[[ScoredSegment], bool] | None = None,
    ) -> None:
        self._max_segments = max_segments
        self._max_tokens = max_tokens
        self._max_uses = max_uses
        self._max_session_uses = max_session_uses
        # For each session, how many of its segments here each update used.
        self._sessions: dict[str, Counter[int]] = {}
        self._teaches = teaches or _trainable
        self._held: dict[str, _Held] = {}
        self._marks: dict[str, _Mark] = {}
        self._tokens = 0
        self._bytes = 0
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
    def held_bytes(self) -> int:
        """What their compressed records take together."""
        return self._bytes

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

    def pack(self, ref: SourceRef, scored: ScoredSegment) -> Packed:
        """An arrival, ready to be added. Changes nothing here; any thread may call it."""
        return pack(ref, scored, self._teaches)

    def add(self, packed: Packed, *, past_uses: Uses = NEVER) -> Arrival:
        """Take in one arrival; equal and lower revisions than the one known change nothing.

        Args:
            packed: The arrival.
            past_uses: Which updates used an earlier revision, if none is here.
        """
        if packed.revision <= self._known_revision(packed.segment_id):
            return Arrival.STALE
        self._order += 1
        before = self._remove(packed.segment_id)
        if not packed.teaches:
            self._mark(packed)
            return Arrival.UNTRAINABLE
        if before is None:
            self._hold(packed, uses=past_uses, news=True)
            return Arrival.ADDED
        news = before.news or before.packed.earned != packed.earned
        self._hold(packed, uses=before.uses, news=news)
        return Arrival.REPLACED

    def require_version(self, min_version: int) -> None:
        """Segments with a reply by an older version are not usable from now on."""
        self._min_version = min_version

    def record_use(self, segment_ids: Iterable[str], update: int) -> None:
        """An update used these segments; of those that are still here it counts.

        Args:
            segment_ids: Which.
            update: The number of the version that came of it.
        """
        for segment_id in segment_ids:
            if segment_id in self._held:
                self._set_uses(self._held[segment_id], self._held[segment_id].uses | {update})

    def uses(self, segment_id: str) -> Uses:
        """The updates that used a segment, as far as they are known here."""
        held = self._held.get(segment_id)
        return NEVER if held is None else held.uses

    def restore_uses(self, uses: Mapping[str, Uses]) -> None:
        """Set the uses of segments from an earlier life; the absent were never used."""
        for segment_id, held in self._held.items():
            self._set_uses(held, uses.get(segment_id, NEVER))

    def segment_ids(self) -> tuple[str, ...]:
        """The ids of the segments here, oldest first."""
        return tuple(self._held)

    def seal(self) -> Snapshot:
        """A snapshot that no later arrival changes; what comes after it counts as new."""
        new_segments = self.new_segments
        for held in self._held.values():
            held.news = False
        return Snapshot(
            candidates=tuple(held.packed for held in self._held.values() if self._usable(held)),
            refs=self._refs(),
            new_segments=new_segments,
            stale_share=self._stale_share(),
        )

    def _usable(self, held: _Held) -> bool:
        return (
            len(held.uses) < self._max_uses
            and not self._stale(held)
            and not self._is_spent(held.packed.session_id)
        )

    def _is_spent(self, session_id: str) -> bool:
        limit = self._max_session_uses
        return limit is not None and len(self._sessions.get(session_id, ())) >= limit

    def _set_uses(self, held: _Held, uses: Uses) -> None:
        """Keep the session's count in step with what its segments here were used in."""
        of_session = self._sessions.setdefault(held.packed.session_id, Counter())
        of_session.subtract(held.uses)
        of_session.update(uses)
        held.uses = uses
        for update in [update for update, count in of_session.items() if not count]:
            del of_session[update]
        if not of_session:
            del self._sessions[held.packed.session_id]

    def _stale(self, held: _Held) -> bool:
        oldest = held.packed.oldest_version
        return oldest is not None and oldest < self._min_version

    def _stale_share(self) -> float:
        stale = sum(held.packed.tokens for held in self._held.values() if self._stale(held))
        return stale / max(self._tokens, 1)

    def _refs(self) -> tuple[SourceRef, ...]:
        everything: list[_Held | _Mark] = [*self._held.values(), *self._marks.values()]
        return tuple(entry.ref for entry in sorted(everything, key=lambda entry: entry.order))

    def _known_revision(self, segment_id: str) -> int:
        if segment_id in self._held:
            return self._held[segment_id].packed.revision
        mark = self._marks.get(segment_id)
        return -1 if mark is None else mark.revision

    def _remove(self, segment_id: str) -> _Held | None:
        self._marks.pop(segment_id, None)
        held = self._held.pop(segment_id, None)
        if held is not None:
            self._count(held.packed, -1)
            uses = held.uses
            self._set_uses(held, NEVER)
            held.uses = uses
        return held

    def _mark(self, packed: Packed) -> None:
        self._marks[packed.segment_id] = _Mark(packed.ref, packed.revision, self._order)
        if len(self._marks) > self._max_segments:
            del self._marks[next(iter(self._marks))]

    def _hold(self, packed: Packed, *, uses: Uses, news: bool) -> None:
        held = self._held[packed.segment_id] = _Held(packed, self._order, news, NEVER)
        self._set_uses(held, uses)
        self._count(packed, 1)
        while self._over_caps():
            self._remove(next(iter(self._held)))

    def _count(self, packed: Packed, sign: int) -> None:
        self._tokens += sign * packed.tokens
        self._bytes += sign * len(packed.data)

    def _over_caps(self) -> bool:
        if len(self._held) > self._max_segments:
            return True
        return self._tokens > self._max_tokens and len(self._held) > 1


def sample(candidates: Sequence[Packed], size: int, rng: random.Random) -> tuple[Candidate, ...]:
    """``size`` candidates drawn uniformly without replacement, opened; all, in random order, if
    there are fewer."""
    return tuple(packed.open() for packed in rng.sample(candidates, min(size, len(candidates))))


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
    """Tokens of a segment's conversation: counted where ids came with it, else estimated from
    the text's length.

    A server names the whole conversation as the prompt of each reply. Where a prompt begins with
    all tokens so far only what follows them counts, as an update reads it too; where it does
    not, the update starts anew, and all of it counts.
    """
    total = 0
    so_far: tuple[int, ...] = ()
    for step in scored.segment.steps:
        prompt = step.prompt_token_ids
        if prompt is None:
            total += sum(_message_tokens(message) for message in step.context)
        elif so_far and prompt[: len(so_far)] == so_far:
            total += len(prompt) - len(so_far)
        else:
            total += len(prompt)
        total += _reply_tokens(step)
        so_far = () if prompt is None else (*prompt, *(step.token_ids or ()))
    return total


def _oldest_version(scored: ScoredSegment) -> int | None:
    versions = [step.policy_version for step in scored.segment.steps]
    return min((version for version in versions if version is not None), default=None)


def _digest(earned: Mapping[str, tuple[float, tuple[str, ...]]]) -> bytes:
    # JSON tells 0.1 from every other number; equal text is an equal lesson.
    packed = json.dumps(earned, sort_keys=True).encode()
    return hashlib.blake2b(packed, digest_size=16).digest()


def _reply_tokens(step: Step) -> int:
    return _text_tokens(step.reply) if step.token_ids is None else len(step.token_ids)


def _message_tokens(message: Message) -> int:
    return _text_tokens(message.content)


def _text_tokens(content: str) -> int:
    return -(-len(content.encode()) // _BYTES_PER_TOKEN)
