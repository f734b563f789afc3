from __future__ import annotations

from msgspec.structs import replace

from processors.runtime import deadletters
from processors.runtime.records import Record, is_tick
from streams.contracts import TICK_HEADER, DeadLetter, DeadLetterReason
from streams.errors import UndecodableError
from streams.serde import build_codec

RECORD = Record(
    topic="t", partition=2, offset=9, timestamp=77, key=b"k", value=b"v", headers=(("h", b"1"),)
)


def test_a_record_is_kept_as_it_was() -> None:
    dead = deadletters.of_record(RECORD, UndecodableError("no good"), "stage")
    assert (dead.topic, dead.partition, dead.offset) == ("t", 2, 9)
    assert (dead.key, dead.value, dead.time, dead.timestamp) == (b"k", b"v", 77, 77)
    assert (dead.reason, dead.message) == (DeadLetterReason.UNDECODABLE, "no good")
    assert [(header.key, header.value) for header in dead.headers] == [("h", b"1")]
    assert deadletters.fit(dead, 1_000_000) is dead


def test_a_value_that_does_not_fit_is_cut_and_said_so() -> None:
    large = replace(RECORD, value=bytes(1_000_000))
    codec = build_codec()
    dead = deadletters.of_record(large, UndecodableError("large"), "stage")
    output = deadletters.to_output(dead, codec, 1_000_000)
    assert output.value is not None
    assert 900_000 < len(output.value) < 1_000_000
    read = codec.decode(output.value, DeadLetter)
    assert read.attributes == {"value_bytes": "1000000", "truncated": "true"}
    assert read.value == bytes(len(read.value or b""))


def test_keys_and_headers_that_do_not_fit_are_cut_too() -> None:
    headers = tuple((f"h{n}", bytes(1_000)) for n in range(200))
    large = replace(RECORD, key=bytes(500_000), value=bytes(900_000), headers=headers)
    dead = deadletters.of_record(large, UndecodableError("large"), "stage")
    output = deadletters.to_output(dead, build_codec(), 1_000_000)
    assert len(output.key or b"") + len(output.value or b"") < 1_000_000
    read = build_codec().decode(output.value, DeadLetter)
    assert read.headers == ()
    assert read.attributes["headers_left_out"] == "200"
    assert read.attributes["key_bytes"] == "500000"


def test_headers_that_are_kept_leave_the_value_less_room() -> None:
    headers = (("h", bytes(deadletters.SMALL_BYTES - 1)),)
    large = replace(RECORD, value=bytes(900_000), headers=headers)
    dead = deadletters.of_record(large, UndecodableError("large"), "stage")
    output = deadletters.to_output(dead, build_codec(), 800_000)
    assert len(output.value or b"") < 800_000
    assert len(build_codec().decode(output.value, DeadLetter).headers) == 1


def test_a_message_that_quotes_too_much_is_cut() -> None:
    dead = deadletters.of_record(RECORD, UndecodableError("x" * 900_000), "stage")
    read = build_codec().decode(
        deadletters.to_output(dead, build_codec(), 100_000).value, DeadLetter
    )
    assert read.message == "x" * deadletters.MESSAGE_CHARACTERS
    assert read.attributes == {"message_characters": "900000", "truncated": "true"}
    assert (read.value, read.key, len(read.headers)) == (b"v", b"k", 1)


def test_a_tick_has_no_value_and_its_header() -> None:
    tick = replace(RECORD, value=None, headers=((TICK_HEADER, b""),))
    assert is_tick(tick)
    assert not is_tick(replace(tick, headers=()))
    assert not is_tick(replace(tick, value=b""))
