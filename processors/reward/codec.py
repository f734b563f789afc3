"""The reward state's changelog records: one per user key, MessagePack behind a format byte."""

from __future__ import annotations

import msgspec

from processors.reward.machine import UserHistory, UserKey
from streams.errors import StateError

FORMAT = 1
"""First byte of every entry; a reader refuses a format it does not know."""

_ENTRY = msgspec.msgpack.Decoder(UserHistory)
_KEY = msgspec.msgpack.Decoder(tuple[str, str])


def encode_key(who: UserKey) -> bytes:
    """The record key of ``who``."""
    return msgspec.msgpack.encode((who.policy, who.key))


def decode_key(data: bytes) -> UserKey:
    """What ``encode_key`` wrote.

    Raises:
        StateError: It is something else.
    """
    try:
        return UserKey(*_KEY.decode(data))
    except msgspec.MsgspecError as error:
        raise StateError(f"reward state: a key cannot be read: {error}") from error


def encode_entry(user: UserHistory) -> bytes:
    """The record value of one key's history."""
    return bytes((FORMAT,)) + msgspec.msgpack.encode(user)


def decode_entry(data: bytes) -> UserHistory:
    """What ``encode_entry`` wrote.

    Raises:
        StateError: It is damaged, or of a format that this version does not read.
    """
    if not data or data[0] != FORMAT:
        found = data[0] if data else "nothing"
        raise StateError(
            f"reward state: an entry has format {found}, this version reads {FORMAT}; "
            "run the version that wrote it, or rebuild the state from trajectory.segments"
        )
    try:
        return _ENTRY.decode(memoryview(data)[1:])
    except msgspec.MsgspecError as error:
        raise StateError(
            f"reward state: an entry cannot be read: {error}; "
            "rebuild the state from trajectory.segments"
        ) from error


__all__ = ["FORMAT", "decode_entry", "decode_key", "encode_entry", "encode_key"]
