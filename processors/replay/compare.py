"""Holds what a replay made against what the live stage put out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from processors.replay.store import Made

MAX_EXAMPLES = 10
Where = Literal["read", "before", "after"]
"""Whether what an output is made of, and its due time, are in what was replayed."""


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

    def note(self, item: Made, kind: str, fields: Iterable[str] = ()) -> None:
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
    here: Iterable[Made],
    there: Iterable[Made],
    decode: Callable[[bytes], Any],
    *,
    from_ms: int,
    where: Callable[[Made], Where] = lambda made: "read",
) -> Comparison:
    """Compare all that closed from ``from_ms`` on.

    Args:
        here: What the replay made, all of it.
        there: What the live stage put out, from where the replay began to read.
        decode: The record in an output's bytes.
        from_ms: Earlier closings are not compared.
        where: Asked of live outputs that the replay did not make.
    """
    mine = {(item.segment_id, item.revision): item for item in here}
    made_ordinals = {(item.session, item.ordinal) for item in mine.values()}
    found = Comparison()
    missing: list[Made] = []
    older: set[str] = set()
    last_live_ms = -1
    for item in there:
        last_live_ms = max(last_live_ms, item.closed_at)
        own = mine.pop((item.segment_id, item.revision), None)
        place = where(item) if own is None else "read"
        if place == "before":
            older.add(item.session)
        if item.closed_at < from_ms or place == "after":
            continue
        if own is None:
            missing.append(item)
        elif own.value == item.value:
            found.equal += 1
        else:
            paths = list(differing(decode(own.value), decode(item.value)))
            # Other bytes of the same content, such as another schema id, are no difference.
            if paths:
                found.note(item, "different", paths)
            else:
                found.equal += 1
    known = made_ordinals | {(item.session, item.ordinal) for item in missing}
    older.update(
        item.session
        for item in missing
        if item.ordinal > 0 and (item.session, item.ordinal - 1) not in known
    )
    for item in missing:
        if item.session in older:
            found.began_before += 1
        else:
            found.note(item, "only_there")
    for item in mine.values():
        if item.closed_at < from_ms or item.session in older:
            continue
        if item.closed_at > last_live_ms:
            found.not_yet_live += 1
        else:
            found.note(item, "only_here")
    return found


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


__all__ = ["Comparison", "Difference", "compare", "differing"]
