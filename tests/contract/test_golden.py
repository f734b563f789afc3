"""Bytes written with every earlier version of a schema are read by the current code.

``golden/<record>/v<N>.bin`` was written when version N was made and never changes.
"""

from __future__ import annotations

import io
from pathlib import Path

import fastavro
import msgspec
import pytest

from streams.contracts import RECORD_TYPES, Record
from streams.serde import build_codec, load_schemas
from streams.serde.schemas import SchemaVersion, snake_case

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = load_schemas().versions
BY_NAME: dict[str, type[Record]] = {cls.__name__: cls for cls in RECORD_TYPES}


@pytest.mark.parametrize("version", VERSIONS, ids=lambda v: f"{v.record}-v{v.version}")
def test_old_bytes_read_as_what_was_written(version: SchemaVersion) -> None:
    stem = GOLDEN / snake_case(version.record) / f"v{version.version}"
    record_type = BY_NAME[version.record]
    expected = msgspec.json.decode(stem.with_suffix(".json").read_bytes(), type=record_type)
    codec = build_codec()
    assert codec.decode(stem.with_suffix(".bin").read_bytes(), record_type) == expected


@pytest.mark.parametrize("record_type", RECORD_TYPES, ids=lambda r: r.__name__)
def test_the_current_version_still_writes_the_same_bytes(record_type: type[Record]) -> None:
    newest = load_schemas().current(record_type.__name__)
    stem = GOLDEN / snake_case(newest.record) / f"v{newest.version}"
    record = msgspec.json.decode(stem.with_suffix(".json").read_bytes(), type=record_type)
    assert build_codec().encode(record) == stem.with_suffix(".bin").read_bytes()


PAIRS = [
    (writer, reader)
    for writer in VERSIONS
    for reader in VERSIONS
    if writer.record == reader.record and writer is not reader
]


@pytest.mark.parametrize(("writer", "reader"), PAIRS, ids=lambda v: f"{v.record}-v{v.version}")
def test_each_version_reads_the_bytes_of_each_other(
    writer: SchemaVersion, reader: SchemaVersion
) -> None:
    """What a consumer that was not upgraded does with a newer producer's bytes, and before."""
    stem = GOLDEN / snake_case(writer.record) / f"v{writer.version}"
    body = io.BytesIO(stem.with_suffix(".bin").read_bytes()[len(b"\xc3\x01") + 8 :])
    found = fastavro.schemaless_reader(body, writer.parsed, reader.parsed)
    assert isinstance(found, dict)
    assert found.keys() == {field["name"] for field in reader.parsed["fields"]}
    assert body.read() == b""
