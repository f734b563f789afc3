"""Bytes of the state, beyond what the random logs check."""

from __future__ import annotations

import pytest

from processors.feedback_align.codec import (
    decode_partition,
    decode_session,
    encode_partition,
    encode_session,
)
from processors.feedback_align.machine import restore_state
from processors.feedback_align.watermark import Position
from streams.contracts import Sampling, ToolCall
from streams.errors import StateError
from streams.topics import FEEDBACK, TURNS
from tests.unit.processors.feedback_align.logs import SETTINGS, Log, at


def test_partition_round_trip() -> None:
    positions = {TURNS: Position(7, 1_000), FEEDBACK: Position()}
    assert decode_partition(encode_partition(999, positions)) == (999, positions)


@pytest.mark.parametrize("data", [b"", b"junk", encode_partition(0, {})])
def test_what_is_no_session_is_refused(data: bytes) -> None:
    with pytest.raises(StateError, match="not a session of format 1"):
        decode_session(data)


def test_a_later_format_is_refused() -> None:
    log = Log()
    log.turn("u1", "0:00")
    data = bytearray(encode_session(log.session))
    place = data.index(b"\x01\xa7default")
    data[place] = 2
    with pytest.raises(StateError, match="written by another version"):
        decode_session(bytes(data))


def test_bodies_keep_every_field() -> None:
    log = Log()
    log.turn(
        "a1",
        "0:00",
        tool_calls=(ToolCall(id="1", name="n", arguments="{}"),),
        sampling=Sampling(temperature=0.5, top_k=3),
        token_ids=(1, 2),
        behaviour_logprobs=(-0.5, -0.125),
        attributes={"z": "1", "a": "2"},
    )
    log.feedback("f", "0:10", turn_id="a1", tags=("x", "y"), text="ä")
    copy = decode_session(encode_session(log.session))
    assert copy.bodies.turns == log.session.bodies.turns
    assert copy.bodies.notes == log.session.bodies.notes
    assert list(copy.bodies.turns[0].attributes) == ["z", "a"]


def test_a_restored_state_is_due_when_the_old_one_was() -> None:
    log = Log()
    log.turn("u1", "0:00")
    log.turn("a1", "0:10")
    state = restore_state(
        [decode_session(encode_session(log.session))], log.state.clock_ms, SETTINGS
    )
    assert state.due == [(at("5:10"), ("default", "s"))]
    assert state.clock_ms == at("0:10") - 1
