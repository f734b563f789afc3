"""Holds what a replay made against what the live stage put out.

Of the outputs of a replay only heads and digests are in memory; the outputs themselves are read
again where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, Protocol

import msgspec

from streams.errors import RecordError

MAX_EXAMPLES = 10
DIGEST_BYTES = 16
Where = Literal["read", "before", "after"]
"""Whether what an output is made of, and its due time, are in what was replayed."""


class Head(msgspec.Struct, frozen=True, gc=False):
    """Which output it is.

    Attributes:
        segment_id: Of the segment.
        revision: Its revision.
        session: Policy and session id.
        ordinal: Of the segment in its session.
        closed_at: Of this revision.
    """

    segment_id: str
    revision: int
    session: str
    ordinal: int
    closed_at: int


class Kept(msgspec.Struct, frozen=True, gc=False):
    """An output of a replay.

    Attributes:
        head: Which.
        digest: Of its bytes (:func:`digest_of`).
        partition: Of the store that has it.
        number: Its number there.
    """

    head: Head
    digest: bytes
    partition: int
    number: int


class Here(Protocol):
    """What a replay made."""

    def __iter__(self) -> Iterator[Kept]:
        """All outputs."""
        ...

    def value(self, kept: Kept) -> bytes:
        """The bytes of one of them."""
        ...


def digest_of(value: bytes) -> bytes:
    """Equal for equal outputs only."""
    return blake2b(value, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Difference:
    """One output that is not the same on both sides.

    Attributes:
        segment_id: Of the segment.
        revision: Its revision.
        session: Policy and session id.
        kind: ``only_here``, ``only_there`` or ``different``.
        fields: Paths of the fields that differ; empty for the other kinds.
    """

    segment_id: str
    revision: int
    session: str
    kind: str
    fields: tuple[str, ...] = ()


@dataclass(slots=True)
class Comparison:
    """How the outputs of a replay compare with the live ones.

    Attributes:
        equal: The same bytes on both sides.
        only_here: Made by the replay, not live.
        only_there: Live, not made by the replay.
        different: On both sides, with other content.
        not_yet_live: Made by the replay, due after the last that the live stage put out.
        began_before: Live, of sessions that began before what was read, so that neither side
            can be held against the other.
        fields: How often each field differs, by path.
        examples: The first differences.
    """

    equal: int = 0
    only_here: int = 0
    only_there: int = 0
    different: int = 0
    not_yet_live: int = 0
    began_before: int = 0
    fields: dict[str, int] = field(default_factory=dict)
    examples: list[Difference] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs of what can be compared."""
        return not (self.only_here or self.only_there or self.different)

    def note(self, item: Head, kind: str, fields: Iterable[str] = ()) -> None:
        """Count a difference."""
        paths = tuple(sorted(set(fields)))
        setattr(self, kind, getattr(self, kind) + 1)
        for path in paths:
            self.fields[path] = self.fields.get(path, 0) + 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(
                Difference(item.segment_id, item.revision, item.session, kind, paths)
            )


def compare(
    here: Here,
    there: Iterable[tuple[Head, bytes]],
    decode: Callable[[bytes], Any],
    *,
    from_ms: int,
    where: Callable[[Head, bytes], Where] = lambda head, value: "read",
) -> Comparison:
    """Compare all that closed from ``from_ms`` on.

    Args:
        here: What the replay made, all of it.
        there: What the live stage put out, from where the replay began to read.
        decode: The record in an output's bytes; raises ``RecordError`` if there is none, and
            such a live output is passed over.
        from_ms: Earlier closings are not compared.
        where: Asked of live outputs that the replay did not make.
    """
    mine = {(kept.head.segment_id, kept.head.revision): kept for kept in here}
    found = Comparison()
    missing: list[Head] = []
    older: set[str] = set()
    last_live_ms = -1
    for head, value in there:
        key = (head.segment_id, head.revision)
        own = mine.get(key)
        counts = head.closed_at >= from_ms
        try:
            place = where(head, value) if own is None else "read"
            paths = _paths(here, own, value, decode) if own is not None and counts else ()
        except RecordError:
            continue  # A stage of ours does not write such; the topic may be shared.
        mine.pop(key, None)
        last_live_ms = max(last_live_ms, head.closed_at)
        if place == "before":
            older.add(head.session)
        if not counts or place == "after":
            continue
        if own is None:
            missing.append(head)
        elif paths:
            found.note(head, "different", paths)
        else:
            found.equal += 1
    older |= _cut(here, missing)
    for head in missing:
        if head.session in older:
            found.began_before += 1
        else:
            found.note(head, "only_there")
    for kept in mine.values():
        head = kept.head
        if head.closed_at < from_ms or head.session in older:
            continue
        if head.closed_at > last_live_ms:
            found.not_yet_live += 1
        else:
            found.note(head, "only_here")
    return found


def _paths(here: Here, own: Kept, value: bytes, decode: Callable[[bytes], Any]) -> tuple[str, ...]:
    """Where two outputs differ. Other bytes of the same content, such as another schema id, are
    no difference.
    """
    if own.digest == digest_of(value):
        return ()
    return tuple(differing(decode(here.value(own)), decode(value)))


def _cut(here: Here, missing: Iterable[Head]) -> set[str]:
    """The sessions of live outputs of which the replay does not know what came before."""
    later = {head.session for head in missing if head.ordinal > 0}
    if not later:
        return later
    known = {(head.session, head.ordinal) for head in missing}
    made = (kept.head for kept in here)
    known |= {(head.session, head.ordinal) for head in made if head.session in later}
    return {
        head.session
        for head in missing
        if head.ordinal > 0 and (head.session, head.ordinal - 1) not in known
    }


def differing(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """The paths of the fields in which two records differ; places in arrays are left out."""
    one, other = msgspec.to_builtins(one), msgspec.to_builtins(other)
    yield from _differing(one, other, path)


def _differing(one: Any, other: Any, path: str) -> Iterator[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in sorted(one.keys() | other.keys()):
            below = f"{path}.{name}" if path else str(name)
            yield from _differing(one.get(name), other.get(name), below)
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            yield f"{path}[] (number of items)"
        for left, right in zip(one, other, strict=False):
            yield from _differing(left, right, f"{path}[]")
    elif one != other and not (one != one and other != other):
        yield path


__all__ = ["Comparison", "Difference", "Head", "Here", "Kept", "compare", "differing", "digest_of"]
