"""The reward state's changelog records: MessagePack behind a byte that says what it is.

A user's note has the key (policy, "segment", key, segment id), an entry of the crowd (policy, kind,
name). Earlier versions wrote a user's whole history under (policy, key).
"""

from __future__ import annotations

from typing import Any

import msgspec

from processors.reward.crowd import (
    CrowdKey,
    Echo,
    PolicyCount,
    RaterCount,
    SourceCount,
    Templates,
    Words,
)
from processors.reward.machine import StateEntry, StateKey
from processors.reward.users import Note, NoteKey, UserHistory, UserKey
from streams.errors import StateError

FORMATS: dict[int, type[StateEntry]] = {
    1: UserHistory,
    2: RaterCount,
    3: SourceCount,
    4: PolicyCount,
    5: Echo,
    6: Words,
    7: Templates,
    8: Note,
}
"""What an entry is, by its first byte; a reader refuses a byte it does not know."""

_NUMBERS = {kind: number for number, kind in FORMATS.items()}
_ENTRIES: dict[int, msgspec.msgpack.Decoder[Any]] = {
    number: msgspec.msgpack.Decoder(kind) for number, kind in FORMATS.items()
}
_KEY = msgspec.msgpack.Decoder(tuple[str, ...])
_NOTE = "segment"


def encode_key(key: StateKey) -> bytes:
    """The record key of ``key``."""
    if isinstance(key, NoteKey):
        return msgspec.msgpack.encode((key.policy, _NOTE, key.key, key.segment_id))
    if isinstance(key, UserKey):
        return msgspec.msgpack.encode((key.policy, key.key))
    return msgspec.msgpack.encode((key.policy, key.kind, key.name))


def decode_key(data: bytes) -> StateKey:
    """What ``encode_key`` wrote.

    Raises:
        StateError: It is something else.
    """
    try:
        parts = _KEY.decode(data)
    except msgspec.MsgspecError as error:
        raise StateError(f"reward state: a key cannot be read: {error}") from error
    if len(parts) == 2:
        return UserKey(*parts)
    if len(parts) == 3:
        return CrowdKey(*parts)
    if len(parts) == 4 and parts[1] == _NOTE:
        return NoteKey(parts[0], parts[2], parts[3])
    raise StateError(f"reward state: a key cannot be read: it is of none of the kinds: {parts}")


def encode_entry(entry: StateEntry) -> bytes:
    """The record value of one entry."""
    return bytes((_NUMBERS[type(entry)],)) + msgspec.msgpack.encode(entry)


def decode_entry(data: bytes) -> StateEntry:
    """What ``encode_entry`` wrote.

    Raises:
        StateError: It is damaged, or of a format that this version does not read.
    """
    decoder = _ENTRIES.get(data[0]) if data else None
    if decoder is None:
        found = data[0] if data else "nothing"
        raise StateError(
            f"reward state: an entry has format {found}, this version reads "
            f"{min(FORMATS)} to {max(FORMATS)}; "
            "run the version that wrote it, or rebuild the state from trajectory.segments"
        )
    try:
        entry: StateEntry = decoder.decode(memoryview(data)[1:])
    except msgspec.MsgspecError as error:
        raise StateError(
            f"reward state: an entry cannot be read: {error}; "
            "rebuild the state from trajectory.segments"
        ) from error
    return entry


__all__ = ["FORMATS", "decode_entry", "decode_key", "encode_entry", "encode_key"]
