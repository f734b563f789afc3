"""State that an earlier version of the reward wrote is read, and goes on as it would have.

``golden/reward_state.msgpack`` was written by the version with formula ``composite-3`` and never
changes: a partition's entries of every kind that there was, and what that version made of the next
segments. Since then a user's history is written as notes (format 8), no longer as one entry
(format 1).
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from processors.reward.codec import FORMATS, decode_entry, decode_key, encode_entry, encode_key
from processors.reward.formulas import REPEATED_ATTRIBUTE
from processors.reward.machine import EmitReview, EmitScored, restore, step, take_changes
from streams.contracts import TrajectorySegment
from streams.errors import StateError
from streams.serde import build_codec
from streams.settings import RewardSettings


class _Next(msgspec.Struct):
    """A segment, and what the earlier version made of it.

    Args:
        segment: As Avro.
        weights: Of each rating not believed in full, by event id: its weight and the filter.
        reviews: Event ids of the review requests.
        repeated: The attribute of this name.
    """

    segment: bytes
    weights: dict[str, tuple[float, str]]
    reviews: list[str]
    repeated: str


class _Golden(msgspec.Struct):
    settings: dict[str, float]
    clock_ms: int
    entries: list[tuple[bytes, bytes]]
    after: list[_Next]


GOLDEN = msgspec.msgpack.decode(
    (Path(__file__).parent / "golden" / "reward_state.msgpack").read_bytes(), type=_Golden
)


def test_every_kind_of_entry_is_read_and_written_as_before() -> None:
    assert {value[0] for _, value in GOLDEN.entries} == set(FORMATS) - {8}
    for key, value in GOLDEN.entries:
        assert encode_key(decode_key(key)) == key
        entry = decode_entry(value)
        assert decode_entry(encode_entry(entry)) == entry
        if value[0] != 1:
            assert encode_entry(entry) == value


def test_what_is_restored_from_it_goes_on_as_the_earlier_version_did() -> None:
    settings = RewardSettings(**GOLDEN.settings)  # type: ignore[arg-type]
    codec = build_codec()
    state = restore((decode_key(key), decode_entry(value)) for key, value in GOLDEN.entries)
    state.clock_ms = GOLDEN.clock_ms
    written = dict(GOLDEN.entries)
    for expected in GOLDEN.after:
        segment = codec.decode(expected.segment, TrajectorySegment)
        state, effects = step(state, segment, settings)
        (scored,) = [effect.scored for effect in effects if isinstance(effect, EmitScored)]
        weighed = {w.event_id: (w.weight, w.filter) for r in scored.rewards for w in r.weighed}
        assert weighed == expected.weights
        assert scored.attributes.get(REPEATED_ATTRIBUTE, "") == expected.repeated
        reviews = [effect.review.event_id for effect in effects if isinstance(effect, EmitReview)]
        assert reviews == expected.reviews
        changed, forgotten = take_changes(state)
        written |= {encode_key(key): encode_entry(entry) for key, entry in changed.items()}
        for key in forgotten:
            written.pop(encode_key(key), None)
        again = restore((decode_key(key), decode_entry(value)) for key, value in written.items())
        assert again.users == state.users
        assert again.crowd.entries == state.crowd.entries
    assert {value[0] for value in written.values()} >= {1, 8}
    assert sum(len(expected.weights) for expected in GOLDEN.after) >= 10
    assert sum(len(expected.reviews) for expected in GOLDEN.after) >= 3


def test_an_entry_of_a_later_format_is_refused_with_what_to_do() -> None:
    _, value = GOLDEN.entries[0]
    with pytest.raises(StateError, match=r"has format 200, this version reads 1 to 8; .*rebuild"):
        decode_entry(b"\xc8" + value[1:])
