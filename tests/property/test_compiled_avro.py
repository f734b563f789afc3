"""What is compiled from the schemas writes and reads the bytes that fastavro does."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import fastavro
import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from streams.contracts import (
    RECORD_TYPES,
    DialogueTurn,
    FeedbackEvent,
    FeedbackKind,
    Record,
    Role,
    Sampling,
    ScoredSegment,
)
from streams.errors import SchemaError
from streams.serde import load_schemas
from streams.serde.compiled import (
    READ_ERRORS,
    WRITE_ERRORS,
    compile_picker,
    compile_reader,
    compile_writer,
)
from tests.records import records

STORE = load_schemas()
SCHEMAS = {cls.__name__: STORE.current(cls.__name__).parsed for cls in RECORD_TYPES}
READERS = {name: compile_reader(schema) for name, schema in SCHEMAS.items()}
WRITERS = {name: compile_writer(schema) for name, schema in SCHEMAS.items()}
TURN = DialogueTurn(
    event_id="e", session_id="s", turn_id="t", role=Role.USER, content="", event_time=1, source="x"
)


def written(record: Record) -> bytes:
    out = bytearray()
    WRITERS[type(record).__name__](record, out)
    return bytes(out)


def written_by_fastavro(record: Record) -> bytes:
    out = io.BytesIO()
    fields = msgspec.to_builtins(record, builtin_types=(bytes,))
    schema = SCHEMAS[type(record).__name__]
    fastavro.schemaless_writer(out, schema, fields, disable_tuple_notation=True)
    return out.getvalue()


def read_by_fastavro(data: bytes, record_type: type[Record]) -> Record:
    stream = io.BytesIO(data)
    fields = fastavro.schemaless_reader(stream, SCHEMAS[record_type.__name__], None)
    assume(stream.tell() == len(data))
    return msgspec.convert(fields, record_type, builtin_types=(bytes,))


@pytest.mark.parametrize("record_type", RECORD_TYPES, ids=lambda r: r.__name__)
class TestEachRecord:
    @given(data=st.data())
    def test_the_bytes_are_the_same(self, record_type: type[Record], data: st.DataObject) -> None:
        record = data.draw(records(record_type))
        assert written(record) == written_by_fastavro(record)

    @given(data=st.data())
    def test_they_are_read_alike(self, record_type: type[Record], data: st.DataObject) -> None:
        start = data.draw(st.binary(max_size=3))
        body = written_by_fastavro(data.draw(records(record_type)))
        found, end = READERS[record_type.__name__](start + body, len(start))
        assert end == len(start) + len(body)
        assert found == read_by_fastavro(body, record_type)

    @given(data=st.data())
    def test_nothing_else_is_read_of_damaged_bytes(
        self, record_type: type[Record], data: st.DataObject
    ) -> None:
        body = bytearray(written_by_fastavro(data.draw(records(record_type))))
        for _ in range(data.draw(st.integers(1, 3))):
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
        try:
            found, end = READERS[record_type.__name__](bytes(body), 0)
        except READ_ERRORS:
            return
        if end == len(body):
            theirs = read_by_fastavro(bytes(body), record_type)
            # As text, because not-a-number equals nothing.
            assert repr(found) == repr(theirs)

    @given(data=st.data())
    def test_bytes_cut_short_never_read_as_whole(
        self, record_type: type[Record], data: st.DataObject
    ) -> None:
        body = written_by_fastavro(data.draw(records(record_type)))
        cut = body[: data.draw(st.integers(0, len(body) - 1))]
        try:
            _, end = READERS[record_type.__name__](cut, 0)
        except READ_ERRORS:
            return
        assert end != len(cut)

    @given(data=st.data())
    def test_fields_are_picked_from_the_beginning(
        self, record_type: type[Record], data: st.DataObject
    ) -> None:
        record = data.draw(records(record_type))
        names = data.draw(st.lists(st.sampled_from(record_type.__struct_fields__), min_size=1))
        body = written(record)
        pick = compile_picker(SCHEMAS[record_type.__name__], names)
        found = pick(b"--" + body, 2)
        assert repr(found) == repr(tuple(getattr(record, name) for name in names))
        cut = body[: data.draw(st.integers(0, len(body) - 1))]
        try:
            found_in_part = pick(cut, 0)
        except READ_ERRORS:
            return
        assert repr(found_in_part) == repr(found)


@given(data=st.data())
def test_fields_are_picked_from_a_record_within(data: st.DataObject) -> None:
    scored = data.draw(records(ScoredSegment))
    paths = ("segment.closed_at", "formula_id", "segment.segment_id")
    found = compile_picker(SCHEMAS["ScoredSegment"], paths)(written(scored), 0)
    assert found == (scored.segment.closed_at, scored.formula_id, scored.segment.segment_id)


def test_fields_that_are_not_there_are_not_picked() -> None:
    with pytest.raises(SchemaError, match=r"ScoredSegment has no field segment\.color, size"):
        compile_picker(SCHEMAS["ScoredSegment"], ("size", "segment.color", "segment.digest"))


def edges(bits: int) -> Iterator[int]:
    """Numbers on either side of each length of a varint."""
    for power in range(bits):
        for number in (1 << power, -(1 << power)):
            yield from (number - 1, number)


@pytest.mark.parametrize("number", sorted(set(edges(63))))
def test_each_length_of_a_number(number: int) -> None:
    turn = msgspec.structs.replace(TURN, event_time=number)
    body = written(turn)
    assert body == written_by_fastavro(turn)
    assert READERS["DialogueTurn"](body, 0) == (turn, len(body))


@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=40))
def test_token_ids_few_and_many(numbers: list[int]) -> None:
    turn = msgspec.structs.replace(TURN, prompt_token_ids=tuple(numbers))
    body = written(turn)
    assert body == written_by_fastavro(turn)
    assert READERS["DialogueTurn"](body, 0) == (turn, len(body))


BLOCKS: dict[str, bytes] = {
    "two blocks": b"\x02\x02a\x04\x02b\x02c\x00",
    "a block with its size": b"\x01\x04\x02a\x04\x02b\x02c\x00",
    "a size that takes two bytes": b"\x05\x80\x02\x02a\x02b\x02c\x00",
}


@pytest.mark.parametrize("name", BLOCKS)
def test_arrays_in_several_blocks(name: str) -> None:
    feedback = FeedbackEvent(
        event_id="e", session_id="s", event_time=1, kind=FeedbackKind.COPY, source="x",
        tags=("a", "b", "c"),
    )  # fmt: skip
    body = written(feedback).replace(b"\x06\x02a\x02b\x02c\x00", BLOCKS[name])
    assert READERS["FeedbackEvent"](body, 0) == (feedback, len(body))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("content", b"bytes"),
        ("content", None),
        ("content", "\ud800"),
        ("event_time", 1.0),
        ("event_time", "1"),
        ("event_time", 1 << 63),
        ("event_time", None),
        ("role", "nobody"),
        ("session_done", "yes"),
        ("sampling", Sampling(top_k=1 << 31)),
        ("policy_version", 2.5),
        ("token_ids", (1, 1 << 31)),
        ("token_ids", (1.0,)),
        ("token_ids", 5),
        ("behaviour_logprobs", ("a",)),
        ("attributes", {"a": 1}),
        ("attributes", {1: "a"}),
        ("sampling", "none"),
        ("tool_calls", ("none",)),
    ],
)
def test_what_the_schema_does_not_allow_is_not_written(field: str, value: Any) -> None:
    with pytest.raises(WRITE_ERRORS):
        written(msgspec.structs.replace(TURN, **{field: value}))


@pytest.mark.parametrize(
    "field",
    [
        {"name": "a", "type": "float"},
        {"name": "a", "type": ["null", "string", "int"]},
        {"name": "a", "type": ["string", "null"]},
        {"name": "a", "type": {"type": "fixed", "name": "F", "size": 4}},
    ],
    ids=lambda field: str(field["type"]),
)
def test_types_that_no_schema_of_ours_has_are_refused(field: dict[str, Any]) -> None:
    schema = fastavro.parse_schema(
        {"type": "record", "name": "DialogueTurn", "fields": [field]}, {}
    )
    for compile_one in (compile_reader, compile_writer):
        with pytest.raises(SchemaError):
            compile_one(schema)
