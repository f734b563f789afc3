from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from streams.contracts import (
    DialogueTurn,
    FeedbackEvent,
    FeedbackKind,
    ModelVersion,
    Role,
    Sampling,
)
from streams.errors import (
    InvalidRecordError,
    NullValueError,
    OversizedError,
    RecordError,
    SchemaError,
    UndecodableError,
    UnknownSchemaError,
)
from streams.serde import Codec, build_codec, encode_json, load_schemas
from streams.serde.schemas import SchemaVersion, fingerprint_of, snake_case
from streams.serde.validation import validate

TURN = DialogueTurn(
    event_id="e1",
    session_id="s1",
    turn_id="t1",
    role=Role.ASSISTANT,
    content="Hello",
    event_time=1_700_000_000_000,
    source="test",
    token_ids=(1, 2),
    behaviour_logprobs=(-0.5, -0.25),
)
CODEC = build_codec()
ENCODED = CODEC.encode(TURN)


class Unreachable:
    def schema_for(self, schema_id: int) -> object:
        raise SchemaError("down")

    def id_for(self, subject: str, schema: SchemaVersion) -> int:
        raise SchemaError("down")


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        (None, NullValueError, "no value"),
        (b"", UndecodableError, "missing"),
        (b"\x07abc", UndecodableError, "07"),
        (b"{", UndecodableError, "JSON"),
        (b"{\xff}", UndecodableError, "JSON"),
        (b"{}", InvalidRecordError, "event_id"),
        (b'{"event_id": 1}', InvalidRecordError, "event_id"),
        (ENCODED[:-2], UndecodableError, "damaged"),
        (ENCODED + b"x", UndecodableError, "1 bytes follow"),
        (b"\xc3\x01abcdefgh", UnknownSchemaError, "6162636465666768"),
        (b"\x00\x00\x00\x00\x01", UnknownSchemaError, "SCHEMA_REGISTRY_URL"),
    ],
    ids=str,
)
def test_what_cannot_be_read_says_why(
    data: bytes | None, error: type[RecordError], says: str
) -> None:
    with pytest.raises(error, match=says):
        CODEC.decode(data, DialogueTurn)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"session_id": ""}, "must not be empty"),
        ({"event_time": -1}, "before 1970"),
        ({"behaviour_logprobs": (-0.5,)}, "one entry per"),
        ({"behaviour_logprobs": (-0.5, float("nan"))}, "finite"),
        ({"token_ids": None}, "one entry per"),
    ],
    ids=str,
)
def test_a_turn_that_breaks_its_contract_is_invalid(change: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidRecordError, match=says):
        CODEC.decode(CODEC.encode(replace(TURN, **change)), DialogueTurn)


def test_feedback_must_have_a_finite_value() -> None:
    feedback = FeedbackEvent(
        event_id="f", session_id="s", event_time=1, kind=FeedbackKind.RATING, source="t"
    )
    endless = replace(feedback, value=float("inf"))
    assert CODEC.decode(CODEC.encode(feedback), FeedbackEvent) == feedback
    with pytest.raises(InvalidRecordError, match="finite"):
        CODEC.decode(CODEC.encode(endless), FeedbackEvent)


def test_another_record_is_invalid() -> None:
    with pytest.raises(InvalidRecordError, match="holds a DialogueTurn"):
        CODEC.decode(ENCODED, ModelVersion)


def test_an_unknown_symbol_reads_as_unknown() -> None:
    data = encode_json(TURN).replace(b'"assistant"', b'"narrator"')
    assert CODEC.decode(data, DialogueTurn).role is Role.UNKNOWN


def test_a_field_of_the_wrong_type_cannot_be_written() -> None:
    with pytest.raises(InvalidRecordError, match="DialogueTurn"):
        CODEC.encode(replace(TURN, event_time="now"))


def test_an_oversized_record_is_refused_both_ways() -> None:
    small = build_codec(max_record_bytes=len(ENCODED) - 1)
    with pytest.raises(OversizedError, match=r"kafka\.max_message_bytes"):
        small.encode(TURN)
    with pytest.raises(OversizedError):
        small.decode(ENCODED, DialogueTurn)


def test_coordinates_are_added_to_an_error() -> None:
    with pytest.raises(NullValueError) as caught:
        CODEC.decode(None, DialogueTurn)
    located = caught.value.at("dialogue.turns", 3, 17)
    assert isinstance(located, NullValueError)
    assert "topic=dialogue.turns partition=3 offset=17" in str(located)


def test_a_registry_that_is_down_is_no_fault_of_the_record() -> None:
    codec = Codec(load_schemas(), Unreachable())
    with pytest.raises(SchemaError):
        codec.decode(b"\x00\x00\x00\x00\x01rest", DialogueTurn)
    with pytest.raises(SchemaError):
        codec.encode(TURN, "dialogue.turns")
    with pytest.raises(SchemaError, match="topic"):
        codec.encode(TURN)
    assert codec.decode(ENCODED, DialogueTurn) == TURN


def test_the_fingerprint_does_not_depend_on_docs() -> None:
    bare = '{"type":"record","name":"A","fields":[{"name":"x","type":"int"}]}'
    told = '{"type":"record","name":"A","doc":"d","fields":[{"name":"x","type":"int","doc":"e"}]}'
    assert fingerprint_of(bare) == fingerprint_of(told)
    # The Avro specification's own example: the CRC-64-AVRO of "int".
    assert int.from_bytes(fingerprint_of('"int"'), "little") == 0x7275D51A3F395C8F


def test_a_broken_schema_file_is_named(tmp_path: Path) -> None:
    folder = tmp_path / snake_case("DialogueTurn")
    folder.mkdir()
    (folder / "v1.avsc").write_text("{", encoding="utf-8")
    with pytest.raises(SchemaError, match=r"v1\.avsc"):
        load_schemas(tmp_path)


def test_a_missing_schema_is_named(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="DialogueTurn"):
        load_schemas(tmp_path).current("DialogueTurn")


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": (1, 1 << 31)},
        {"prompt_token_ids": (-(1 << 31) - 1,)},
        {"sampling": Sampling(top_k=1 << 31)},
        {"sampling": Sampling(max_tokens=1 << 40)},
    ],
    ids=str,
)
def test_numbers_of_more_than_32_bits_are_invalid(change: dict[str, object]) -> None:
    turn: DialogueTurn = replace(TURN, **change)
    with pytest.raises(InvalidRecordError, match="32 bits"):
        validate(turn)
    with pytest.raises(InvalidRecordError, match="32 bits"):
        CODEC.decode(encode_json(turn), DialogueTurn)


@pytest.mark.parametrize("field", ["event_time", "policy_version"])
def test_a_json_number_that_avro_cannot_hold_is_invalid(field: str) -> None:
    broken = encode_json(replace(TURN, **{field: 1 << 63}))
    with pytest.raises(InvalidRecordError, match="DialogueTurn"):
        CODEC.decode(broken, DialogueTurn)


HEAD = ("turn_id", "role")


def test_fields_are_picked_from_each_form() -> None:
    for data in (ENCODED, encode_json(TURN)):
        assert CODEC.pick(data, DialogueTurn, HEAD) == ("t1", Role.ASSISTANT)


def test_only_the_beginning_is_read_to_pick() -> None:
    assert CODEC.pick(ENCODED[:-2], DialogueTurn, HEAD) == ("t1", Role.ASSISTANT)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", UndecodableError),
        (b"\x00\x01", UnknownSchemaError),
        (b"\xc3\x01abcdefgh", UnknownSchemaError),
        (ENCODED[:14], UndecodableError),
        (b"{}", InvalidRecordError),
    ],
)
def test_what_cannot_be_picked_from_says_why(data: bytes, error: type[RecordError]) -> None:
    with pytest.raises(error):
        CODEC.pick(data, DialogueTurn, HEAD)


def test_another_record_is_not_picked_from() -> None:
    with pytest.raises(InvalidRecordError, match="expected FeedbackEvent"):
        CODEC.pick(ENCODED, FeedbackEvent, ("event_id",))
