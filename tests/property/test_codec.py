"""Any record survives every wire form; any bytes at all end in a record or a typed error."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from streams.contracts import (
    RECORD_TYPES,
    DialogueTurn,
    Record,
    ScoredSegment,
    TrajectorySegment,
)
from streams.errors import RecordError
from streams.serde import Codec, build_codec, encode_json, load_schemas
from streams.serde.schemas import SchemaVersion
from tests.records import records

STORE = load_schemas()


class MemoryRegistry:
    """Hands out ids as a registry does."""

    def __init__(self) -> None:
        self.schemas: list[SchemaVersion] = []

    def schema_for(self, schema_id: int) -> Any:
        return self.schemas[schema_id].parsed

    def id_for(self, subject: str, schema: SchemaVersion) -> int:
        self.schemas.append(schema)
        return len(self.schemas) - 1


@pytest.mark.parametrize("record_type", RECORD_TYPES, ids=lambda r: r.__name__)
class TestRoundTrips:
    @given(data=st.data())
    def test_single_object(self, record_type: type[Record], data: st.DataObject) -> None:
        codec = build_codec_once()
        record = data.draw(records(record_type))
        assert codec.decode(codec.encode(record), record_type) == record

    @given(data=st.data())
    def test_confluent(self, record_type: type[Record], data: st.DataObject) -> None:
        codec = Codec(STORE, MemoryRegistry())
        record = data.draw(records(record_type))
        encoded = codec.encode(record, "some.topic")
        assert encoded[:5] == struct.pack(">bI", 0, 0)
        assert codec.decode(encoded, record_type) == record

    @given(data=st.data())
    def test_json(self, record_type: type[Record], data: st.DataObject) -> None:
        record = data.draw(records(record_type))
        assert build_codec_once().decode(encode_json(record), record_type) == record

    @given(data=st.data())
    def test_damage_is_a_typed_error_or_a_record(
        self, record_type: type[Record], data: st.DataObject
    ) -> None:
        codec = build_codec_once()
        encoded = bytearray(codec.encode(data.draw(records(record_type))))
        for _ in range(data.draw(st.integers(1, 4))):
            encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
        decode_or_typed_error(codec, bytes(encoded), record_type)


@given(st.binary(max_size=200), st.sampled_from([b"", b"{", b"\x00", b"\xc3\x01"]))
def test_any_bytes_end_in_a_record_or_a_typed_error(body: bytes, start: bytes) -> None:
    decode_or_typed_error(build_codec_once(), start + body, DialogueTurn)


def decode_or_typed_error(codec: Codec, data: bytes, record_type: type[Record]) -> None:
    try:
        decoded = codec.decode(data, record_type)
    except RecordError:
        return
    assert isinstance(decoded, record_type)


_CODEC = build_codec()


def build_codec_once() -> Codec:
    return _CODEC


class TestAroundAField:
    """Writing a record around the bytes that one of its fields was read from."""

    @given(scored=records(ScoredSegment))
    def test_what_we_wrote_comes_out_as_if_it_was_written_anew(self, scored: ScoredSegment) -> None:
        codec = build_codec_once()
        original = codec.encode(scored.segment)
        assert codec.encode_around(scored, "segment", original) == codec.encode(scored)

    @given(scored=records(ScoredSegment))
    def test_it_does_so_in_the_form_of_a_registry(self, scored: ScoredSegment) -> None:
        registry = MemoryRegistry()
        codec = Codec(STORE, registry)
        original = codec.encode(scored.segment, "some.topic")
        segment = codec.decode(original, TrajectorySegment)
        around = codec.encode_around(
            replace(scored, segment=segment), "segment", original, "other.topic"
        )
        assert around[5:] == codec.encode(scored, "other.topic")[5:]
        assert codec.decode(around, ScoredSegment) == scored

    @given(scored=records(ScoredSegment))
    def test_json_and_earlier_schemas_are_written_anew(self, scored: ScoredSegment) -> None:
        codec = build_codec_once()
        expected = codec.encode(scored)
        for original in (
            encode_json(scored.segment),
            b"\xc3\x01" + b"\x00" * 8,
            b"\x00\x00\x00\x00\x07",
        ):
            assert codec.encode_around(scored, "segment", original) == expected

    @given(scored=records(ScoredSegment))
    def test_the_bytes_given_are_taken_as_they_are(self, scored: ScoredSegment) -> None:
        """Equal values in blocks that another writer would make: valid, and not ours."""
        codec = build_codec_once()
        segment = replace(scored.segment, attributes={}, encryption=None)
        ours = codec.encode(segment)
        assert ours.endswith(b"\x00\x00")  # no attributes, no encryption
        theirs = ours[:-2] + b"\x02\x02k\x02v" + b"\x01\x08\x02l\x02w" + b"\x00\x00"
        read = codec.decode(theirs, TrajectorySegment)
        around = codec.encode_around(replace(scored, segment=read), "segment", theirs)
        assert theirs[10:] in around
        assert codec.decode(around, ScoredSegment) == replace(scored, segment=read)
