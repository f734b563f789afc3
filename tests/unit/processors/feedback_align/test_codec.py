"""Bytes of the state, beyond what the random logs check."""

from __future__ import annotations

import pytest

from processors.feedback_align.codec import (
    decode_partition,
    encode_partition,
    pack,
    unpack,
)
from processors.feedback_align.machine import new_state, restore_state, take_changes
from processors.feedback_align.model import HEAD, EntryKey, Position, Source
from streams.errors import StateError
from streams.topics import FEEDBACK, TURNS
from tests.unit.processors.feedback_align.logs import Log, at

KEY = ("default", "s", HEAD)


def entries(log: Log) -> dict[EntryKey, bytes]:
    return {key: data for key, data in take_changes(log.state).items() if data is not None}


def closed_session() -> dict[EntryKey, bytes]:
    log = Log()
    log.turn("u1", "0:00")
    log.turn("a1", "0:10", session_done=True)
    log.until("9:00")
    return entries(log)


def test_partition_round_trip() -> None:
    positions = {TURNS: Position(7, 1_000), FEEDBACK: Position()}
    assert decode_partition(encode_partition(999, positions)) == (999, positions)


@pytest.mark.parametrize("data", [b"", b"junk", encode_partition(0, {})])
def test_what_is_no_session_is_refused(data: bytes) -> None:
    with pytest.raises(StateError, match="not a session of format 2"):
        restore_state(new_state(), [(KEY, data)], 0)


def test_a_later_format_is_refused() -> None:
    log = Log()
    log.turn("u1", "0:00")
    data = bytearray(entries(log)[KEY])
    assert data[3] == 2
    data[3] = 3
    with pytest.raises(StateError, match="written by another version"):
        pack(bytes(data), {})


def test_a_closed_segment_without_its_session_is_refused() -> None:
    kept = closed_session()
    del kept[KEY]
    with pytest.raises(StateError, match="no entry of their own"):
        restore_state(new_state(), kept.items(), 0)


def test_a_session_without_its_closed_segment_is_refused() -> None:
    kept = closed_session()
    with pytest.raises(StateError, match="session s has 0 closed segments and not 1"):
        unpack(pack(kept[KEY], {}), Source())


def test_a_damaged_segment_is_refused() -> None:
    kept = closed_session()
    with pytest.raises(StateError, match="not a closed segment"):
        unpack(pack(kept[KEY], {0: b"junk"}), Source())


def test_what_is_closed_is_not_written_again() -> None:
    """An entry is as large as what is open, however long the session has gone on."""
    log = Log()
    sizes = []
    for hour in range(20):
        log.turn(f"u{hour:02}", f"{hour}:00:00", content="x" * 10_000)
        log.turn(f"a{hour:02}", f"{hour}:00:10", session_done=True)
        log.until(f"{hour}:01:00")
        sizes.append(sum(map(len, entries(log).values())))
    assert max(sizes) < 1_000
    assert sizes[-1] - sizes[2] < 25


def test_a_restored_state_is_due_when_the_old_one_was() -> None:
    log = Log()
    log.turn("u1", "0:00")
    log.turn("a1", "0:10")
    state = restore_state(new_state(), entries(log).items(), log.state.clock_ms)
    assert state.due == [(at("5:10"), ("default", "s"))]
    assert state.clock_ms == at("0:10") - 1
    assert state.open_sessions == 1
