from __future__ import annotations

import msgspec
import pytest
from aiokafka.errors import KafkaTimeoutError, ProducerFenced

from processors.runtime.state import (
    ENTRY_PREFIX,
    META_KEY,
    TransactionalWriter,
    as_state,
    collect,
    decode_meta,
    encode_meta,
)
from streams.errors import FencedError, StateError
from streams.settings import KafkaSettings


def test_the_partition_record_round_trips() -> None:
    applied = {"dialogue.turns": 12, "dialogue.feedback": -1}
    assert decode_meta(encode_meta(applied, b"\x00own")) == (applied, b"\x00own")


def test_a_partition_record_of_another_version_is_refused() -> None:
    value = msgspec.msgpack.encode({"version": 99, "applied": {}, "processor": b""})
    with pytest.raises(StateError, match="version 99"):
        decode_meta(value)
    with pytest.raises(StateError, match="cannot be read"):
        decode_meta(b"\xff")


def test_later_records_win_and_null_forgets() -> None:
    raw: dict[bytes, bytes] = {}
    a, b = ENTRY_PREFIX + b"a", ENTRY_PREFIX + b"b"
    meta = [(META_KEY, encode_meta({"t": n}, b"m%d" % n)) for n in (1, 2)]
    collect([(a, b"1"), (b, b"1"), meta[0], (a, b"2"), (b, None), meta[1], (None, b"x")], raw)
    state = as_state(raw)
    assert (state.entries, state.applied, state.meta) == ({b"a": b"2"}, {"t": 2}, b"m2")


def test_an_empty_changelog_is_a_partition_never_processed() -> None:
    state = as_state({})
    assert (state.entries, state.applied, state.meta) == ({}, {}, None)


def test_entries_without_a_partition_record_are_refused() -> None:
    with pytest.raises(StateError, match="no partition record"):
        as_state({ENTRY_PREFIX + b"a": b"1"})


def test_an_entry_never_collides_with_the_partition_record() -> None:
    raw: dict[bytes, bytes] = {}
    collect([(ENTRY_PREFIX + META_KEY, b"1"), (META_KEY, encode_meta({}, b""))], raw)
    assert as_state(raw).entries == {META_KEY: b"1"}


def test_errors_of_the_client_are_mapped() -> None:
    writer = TransactionalWriter(KafkaSettings(bootstrap_servers="h:1"), "app", 3, "state")
    fenced = writer._mapped(ProducerFenced())
    assert isinstance(fenced, FencedError)
    assert "app-3" in str(fenced)
    assert isinstance(writer._mapped(KafkaTimeoutError()), StateError)


async def test_a_writer_that_was_not_started_says_so() -> None:
    writer = TransactionalWriter(KafkaSettings(bootstrap_servers="h:1"), "app", 3, "state")
    with pytest.raises(StateError, match="app-3 is not started"):
        await writer.commit([], {}, b"")
    await writer.close()
