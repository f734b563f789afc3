"""The columns of an archive's files: the record's bytes, and beside them what they say.

========== ================================ ==================================================
column     type                             holds
========== ================================ ==================================================
offset     int64                            its offset
timestamp  timestamp[ms, UTC]               Kafka's timestamp; null if the record has none
timestamp_type string                       ``CreateTime`` or ``LogAppendTime``
key        binary                           the key's bytes
value      binary                           the value's bytes
headers    list<struct<key, value: binary>> in their order
schema     string                           what wrote the value: ``avro:<fingerprint>``,
                                            ``confluent:<id>`` or ``json``
record     struct                           the value read, times as int64 milliseconds
problem    string                           why the value cannot be read
========== ================================ ==================================================

The partition is in the path: engines that read such folders make a column ``partition`` of it, and
one of the same name in the files would be in their way.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, Protocol

import msgspec

from streams.contracts import Record
from streams.errors import ArchiveError, RecordError
from streams.serde import Codec, SchemaStore
from streams.serde.codec import CONFLUENT_MAGIC, JSON_MAGIC, SINGLE_OBJECT_MAGIC

RAW = ("offset", "timestamp", "timestamp_type", "key", "value", "headers")
"""The columns that a restore needs."""

Headers = tuple[tuple[str, bytes | None], ...]

NO_TIMESTAMP = -1


class Row(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One record as it was in Kafka.

    Attributes:
        topic: Where it was.
        partition: Its partition.
        offset: Its offset.
        timestamp: Kafka's timestamp in milliseconds, -1 if it had none.
        timestamp_type: ``CreateTime`` or ``LogAppendTime``.
        key: Its key; None is not the same as empty, as for the value and values of headers.
        value: Its value.
        headers: Its headers, in order.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    timestamp_type: str = "CreateTime"
    key: bytes | None = None
    value: bytes | None = None
    headers: Headers = ()

    @property
    def size_bytes(self) -> int:
        """About what it takes, uncompressed."""
        headers = sum(len(name) + len(value or b"") for name, value in self.headers)
        return 64 + len(self.key or b"") + len(self.value or b"") + headers


class Digest:
    """SHA-256 over rows: everything that a restore gives back, and their offsets."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, row: Row) -> None:
        """Take the next row."""
        parts = [struct.pack(">qq", row.offset, row.timestamp), row.timestamp_type.encode()]
        parts += [_measured(row.key), _measured(row.value), struct.pack(">i", len(row.headers))]
        for name, value in row.headers:
            parts += [_measured(name.encode()), _measured(value)]
        self._hash.update(b"".join(parts))

    def hex(self) -> str:
        """It, as text."""
        return self._hash.hexdigest()


def _measured(data: bytes | None) -> bytes:
    """Bytes after their length, so that no two lists of them look alike."""
    return struct.pack(">i", -1) if data is None else struct.pack(">i", len(data)) + data


class Table(Protocol):
    """What turns rows into record batches."""

    @property
    def schema(self) -> Any:
        """The Arrow schema of the batches."""
        ...

    def batch(self, rows: Sequence[Row]) -> Any:
        """An Arrow record batch of these rows."""
        ...


class Columns:
    """Turns rows into record batches.

    Args:
        expected: What the topic's values hold; None leaves ``record`` out.
        codec: Reads them.
        schemas: The schemas of all records.
    """

    def __init__(self, expected: type[Record] | None, codec: Codec, schemas: SchemaStore) -> None:
        pa = pyarrow_or_raise()
        self._expected = expected
        self._codec = codec
        self._record_type = None
        fields = _raw_fields(pa)
        if expected is not None:
            avro = json.loads(schemas.current(expected.__name__).text)
            self._record_type = arrow_type(avro)
            fields += [
                pa.field("schema", pa.string()),
                pa.field("record", self._record_type),
                pa.field("problem", pa.string()),
            ]
        self.schema = pa.schema(fields)

    def batch(self, rows: Sequence[Row]) -> Any:
        """An Arrow record batch of these rows.

        Raises:
            SchemaError: The schema registry cannot be reached.
        """
        pa = pyarrow_or_raise()
        columns = _raw_columns(rows, self.schema)
        if self._expected is not None:
            records, problems = self._read(rows)
            columns += [
                pa.array([schema_name(row.value) for row in rows], pa.string()),
                self._records(records, problems),
                pa.array(problems, pa.string()),
            ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _read(self, rows: Sequence[Row]) -> tuple[list[Any], list[str | None]]:
        assert self._expected is not None
        records: list[Any] = []
        problems: list[str | None] = []
        for row in rows:
            record, problem = None, None
            if row.value is not None:
                try:
                    decoded = self._codec.decode(row.value, self._expected)
                    record = msgspec.to_builtins(decoded, builtin_types=(bytes,))
                except RecordError as error:
                    problem = str(error)
            records.append(record)
            problems.append(problem)
        return records, problems

    def _records(self, records: list[Any], problems: list[str | None]) -> Any:
        pa = pyarrow_or_raise()
        failures = (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError)
        try:
            return pa.array(records, self._record_type)
        except failures:
            # One of them holds what its schema does not allow. The bytes are kept as they are.
            for place, record in enumerate(records):
                try:
                    pa.array([record], self._record_type)
                except failures as error:
                    records[place], problems[place] = None, f"no column holds it: {error}"
            return pa.array(records, self._record_type)


def check_raw(schema: Any) -> None:
    """Make sure that a file's columns ``RAW`` have the types that a restore needs.

    Raises:
        ValueError: One has not; names it.
    """
    for field in _raw_fields(pyarrow_or_raise()):
        found = schema.field(field.name).type if field.name in schema.names else "not there"
        if found != field.type:
            raise ValueError(f"its column {field.name} is {found}, not {field.type}")


def schema_name(value: bytes | None) -> str | None:
    """What wrote a value, by its first bytes; None if they say nothing."""
    if value is None:
        return None
    if value[:2] == SINGLE_OBJECT_MAGIC and len(value) >= 10:
        return f"avro:{value[2:10].hex()}"
    if value[:1] == CONFLUENT_MAGIC and len(value) >= 5:
        return f"confluent:{int.from_bytes(value[1:5], 'big')}"
    return "json" if value[:1] == JSON_MAGIC else None


def arrow_type(avro: Any, named: dict[str, Any] | None = None) -> Any:
    """The Arrow type of an Avro schema of ours.

    Args:
        avro: The schema, as JSON has it.
        named: Types that were named before within the same schema.

    Raises:
        ArchiveError: It is of a kind that our schemas do not have.
    """
    pa = pyarrow_or_raise()
    named = {} if named is None else named
    if isinstance(avro, list):
        others = [branch for branch in avro if branch != "null"]
        if len(others) != 1:
            raise ArchiveError(f"no column can hold the union {avro}")
        return arrow_type(others[0], named)
    if isinstance(avro, str):
        return named[avro] if avro in named else _primitive(pa, avro)
    kind = avro["type"]
    if kind == "record":
        fields = [(f["name"], arrow_type(f["type"], named)) for f in avro["fields"]]
        return _remember(avro, named, pa.struct(fields))
    if kind == "enum":
        return _remember(avro, named, pa.string())
    if kind == "array":
        return pa.list_(arrow_type(avro["items"], named))
    if kind == "map":
        return pa.map_(pa.string(), arrow_type(avro["values"], named))
    return arrow_type(kind, named)


def _remember(avro: Any, named: dict[str, Any], made: Any) -> Any:
    named[avro["name"]] = made
    if "namespace" in avro:
        named[f"{avro['namespace']}.{avro['name']}"] = made
    return made


def _primitive(pa: Any, name: str) -> Any:
    types = {
        "string": pa.string(),
        "bytes": pa.binary(),
        "int": pa.int32(),
        "long": pa.int64(),
        "float": pa.float32(),
        "double": pa.float64(),
        "boolean": pa.bool_(),
    }
    try:
        return types[name]
    except KeyError:
        raise ArchiveError(f"no column can hold the Avro type {name}") from None


def _raw_fields(pa: Any) -> list[Any]:
    header = pa.struct([pa.field("key", pa.string(), nullable=False), ("value", pa.binary())])
    return [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.timestamp("ms", tz="UTC")),
        pa.field("timestamp_type", pa.string(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", pa.list_(header), nullable=False),
    ]


def _raw_columns(rows: Sequence[Row], schema: Any) -> list[Any]:
    pa = pyarrow_or_raise()
    values: list[list[Any]] = [
        [row.offset for row in rows],
        [row.timestamp if row.timestamp != NO_TIMESTAMP else None for row in rows],
        [row.timestamp_type for row in rows],
        [row.key for row in rows],
        [row.value for row in rows],
        [[{"key": k, "value": v} for k, v in row.headers] for row in rows],
    ]
    return [pa.array(v, schema.field(name).type) for name, v in zip(RAW, values, strict=True)]


def rows_of(batch: Any, topic: str, partition: int) -> Iterable[Row]:
    """The rows in an Arrow record batch that has the columns ``RAW``."""
    pa = pyarrow_or_raise()
    # Times as numbers: as times they would each become a Python object in between.
    stamps = batch.column("timestamp").cast(pa.int64())
    columns = [stamps if n == "timestamp" else batch.column(n) for n in RAW[:-1]]
    for offset, stamp, kind, key, value, headers in zip(
        *(column.to_pylist() for column in columns),
        _headers_of(batch.column("headers")),
        strict=False,
    ):
        yield Row(
            topic=topic,
            partition=partition,
            offset=offset,
            timestamp=NO_TIMESTAMP if stamp is None else stamp,
            timestamp_type=kind,
            key=key,
            value=value,
            headers=headers,
        )


def _headers_of(column: Any) -> Iterable[Headers]:
    """Of each row; endless if no row has any."""
    chunks = getattr(column, "chunks", [column])
    if not any(len(chunk.flatten()) for chunk in chunks):
        return repeat(())
    return [
        tuple((header["key"], header["value"]) for header in headers)
        for headers in column.to_pylist()
    ]


def pyarrow_or_raise() -> Any:
    """The pyarrow module.

    Raises:
        ArchiveError: It is not installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise ArchiveError(
            "an archive needs pyarrow: install clawstream[archive] (`make install` has it)"
        ) from error
    return pyarrow


__all__ = [
    "RAW",
    "Columns",
    "Digest",
    "Row",
    "Table",
    "arrow_type",
    "pyarrow_or_raise",
    "rows_of",
    "schema_name",
]
