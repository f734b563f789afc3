"""One codec for every record, in the three wire forms of the contract.

The first byte decides: ``0x00`` Confluent (schema id of a registry), ``0xC3 0x01`` Avro
single-object encoding (schema fingerprint), ``{`` JSON of the same record. All three are read
always; written is the Confluent form if a registry is configured, else single-object.
"""

from __future__ import annotations

import io
import struct
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import fastavro
import fastavro.schema
import msgspec

from streams.contracts import Record
from streams.errors import (
    InvalidRecordError,
    NullValueError,
    OversizedError,
    SchemaError,
    UndecodableError,
    UnknownSchemaError,
)
from streams.serde.compiled import (
    READ_ERRORS,
    WRITE_ERRORS,
    Picker,
    Reader,
    Writer,
    WriterAround,
    compile_picker,
    compile_reader,
    compile_writer,
    compile_writer_around,
)
from streams.serde.schemas import FINGERPRINT_BYTES, SchemaStore, SchemaVersion
from streams.serde.validation import validate

T = TypeVar("T", bound=Record)

CONFLUENT_MAGIC = b"\x00"
SINGLE_OBJECT_MAGIC = b"\xc3\x01"
JSON_MAGIC = b"{"
_CONFLUENT_HEADER_BYTES = 5
_SINGLE_OBJECT_HEADER_BYTES = len(SINGLE_OBJECT_MAGIC) + FINGERPRINT_BYTES


class SchemaIds(Protocol):
    """What the codec needs of a schema registry."""

    def schema_for(self, schema_id: int) -> Any:
        """The parsed schema registered under ``schema_id``.

        Raises:
            UnknownSchemaError: The registry does not know the id.
            SchemaError: The registry cannot be reached; worth trying again.
        """
        ...

    def id_for(self, subject: str, schema: SchemaVersion) -> int:
        """The id of ``schema`` under ``subject``.

        Raises:
            SchemaError: It is not registered there, or the registry cannot be reached.
        """
        ...


class Codec:
    """Turns records into bytes and back.

    Args:
        schemas: The schema files.
        registry: A schema registry, or None to write single-object encoding and refuse
            the Confluent form.
        max_record_bytes: Larger values are refused; None takes any.
    """

    def __init__(
        self,
        schemas: SchemaStore,
        registry: SchemaIds | None = None,
        max_record_bytes: int | None = None,
    ) -> None:
        self._schemas = schemas
        self._registry = registry
        self._max_record_bytes = max_record_bytes
        # Made when they are first needed: few processes need all.
        self._writers: dict[str, Writer] = {}
        self._writers_around: dict[tuple[str, str], WriterAround | None] = {}
        self._readers: dict[str, Reader] = {}
        self._pickers: dict[tuple[str, tuple[str, ...]], Picker] = {}
        self._is_current: dict[tuple[int, str], bool] = {}

    def encode(self, record: Record, topic: str | None = None) -> bytes:
        """The record's bytes.

        Args:
            record: What to write.
            topic: Where it goes; names the registry's subject. Needed with a registry only.

        Raises:
            InvalidRecordError: A field holds what its schema does not allow.
            OversizedError: The bytes are more than ``max_record_bytes``.
            SchemaError: The registry does not have the schema, or no topic was given.
        """
        schema = self._schemas.current(type(record).__name__)
        out = bytearray(self._header(schema, topic))
        self._write(record, out)
        data = bytes(out)
        self._check_size(data)
        return data

    def encode_around(
        self, record: Record, field: str, original: bytes, topic: str | None = None
    ) -> bytes:
        """As :meth:`encode`, with the bytes that a field was read from put in as they stand.

        Only if they are Avro of the current schema; else the field is written anew. What our own
        writer wrote comes out the same either way.

        Args:
            record: What to write.
            field: A field that holds a record.
            original: The Kafka value that this record was decoded from.
            topic: Where it goes.

        Raises:
            InvalidRecordError: Another field holds what its schema does not allow.
            OversizedError: The bytes are more than ``max_record_bytes``.
            SchemaError: The registry does not have the schema, or no topic was given.
        """
        name = type(record).__name__
        inner = type(getattr(record, field)).__name__
        start = self._current_body(original, inner)
        write = None if start is None else self._writer_around(name, field, inner)
        if write is None:
            return self.encode(record, topic)
        out = bytearray(self._header(self._schemas.current(name), topic))
        try:
            write(record, out, memoryview(original)[start:])
        except WRITE_ERRORS as error:
            raise _not_written(name, error) from error
        self._check_size(out)
        return bytes(out)

    def _current_body(self, data: bytes, name: str) -> int | None:
        """Where the body of a record of the current schema begins; None in any other form."""
        if data[:2] == SINGLE_OBJECT_MAGIC:
            current = self._schemas.current(name).fingerprint
            known = data[len(SINGLE_OBJECT_MAGIC) : _SINGLE_OBJECT_HEADER_BYTES] == current
            return _SINGLE_OBJECT_HEADER_BYTES if known else None
        if data[:1] == CONFLUENT_MAGIC and len(data) >= _CONFLUENT_HEADER_BYTES:
            (schema_id,) = struct.unpack(">I", data[1:_CONFLUENT_HEADER_BYTES])
            # Whatever was decoded from this form was compared with the current schema.
            known = self._is_current.get((schema_id, name), False)
            return _CONFLUENT_HEADER_BYTES if known else None
        return None

    def _writer_around(self, name: str, field: str, inner: str) -> WriterAround | None:
        """Writes a record around a field; None if the field's schema is not the current one."""
        place = (name, field)
        if place not in self._writers_around:
            schema = self._schemas.current(name).parsed
            (held,) = (known["type"] for known in schema["fields"] if known["name"] == field)
            alike = _reads_alike(held, self._schemas.current(inner).parsed)
            self._writers_around[place] = compile_writer_around(schema, field) if alike else None
        return self._writers_around[place]

    def _write(self, record: Record, out: bytearray) -> None:
        name = type(record).__name__
        try:
            write = self._writers[name]
        except KeyError:
            write = self._writers[name] = compile_writer(self._schemas.current(name).parsed)
        try:
            write(record, out)
        except WRITE_ERRORS as error:
            raise _not_written(name, error) from error

    def decode(self, data: bytes | None, expected: type[T]) -> T:
        """The record in ``data``.

        Args:
            data: A Kafka value.
            expected: The record the topic holds.

        Raises:
            NullValueError: There is no value.
            OversizedError: It is larger than ``max_record_bytes``.
            UndecodableError: It is in none of the three forms, or damaged.
            UnknownSchemaError: It names a schema that is not known here.
            InvalidRecordError: It is another record, or breaks the contract.
            SchemaError: The schema registry cannot be reached; the record may be fine.
        """
        if data is None:
            raise NullValueError("the record has no value")
        self._check_size(data)
        if data[:1] == JSON_MAGIC:
            record = _from_json(data, expected)
        elif data[:2] == SINGLE_OBJECT_MAGIC:
            record = self._from_single_object(data, expected)
        elif data[:1] == CONFLUENT_MAGIC:
            record = self._from_confluent(data, expected)
        else:
            raise UndecodableError(
                f"the first byte is {data[:1].hex() or 'missing'}; expected 00 (Confluent), "
                "c301 (Avro single-object) or a JSON object"
            )
        validate(record)
        if data[:1] == JSON_MAGIC:
            # JSON holds numbers that no Avro type does. What could never be written again must
            # not enter a pipeline that has to write it again.
            self._write(record, bytearray())
        return record

    def pick(self, data: bytes, expected: type[Record], paths: tuple[str, ...]) -> tuple[Any, ...]:
        """Some fields of the record in ``data``.

        Of Avro of the current schema only the beginning is read, up to the last of these fields:
        what follows may be damaged. Any other form is decoded whole.

        Args:
            data: A Kafka value.
            expected: The record the topic holds.
            paths: The fields, those of a record within it behind its name and a dot.

        Raises:
            RecordError: As :meth:`decode`.
            SchemaError: The schema registry cannot be reached.
        """
        name = expected.__name__
        start = self._current_body(data, name)
        if start is None:
            whole = self.decode(data, expected)
            return tuple(attrgetter(path)(whole) for path in paths)
        pick = self._pickers.get((name, paths))
        if pick is None:
            pick = compile_picker(self._schemas.current(name).parsed, paths)
            self._pickers[name, paths] = pick
        try:
            return pick(data, start)
        except READ_ERRORS as error:
            raise _damaged(error) from error

    def _header(self, schema: SchemaVersion, topic: str | None) -> bytes:
        if self._registry is None:
            return SINGLE_OBJECT_MAGIC + schema.fingerprint
        if topic is None:
            raise SchemaError("a topic is needed to write in the Confluent form")
        return struct.pack(">bI", 0, self._registry.id_for(f"{topic}-value", schema))

    def _check_size(self, data: bytes | bytearray) -> None:
        if self._max_record_bytes is not None and len(data) > self._max_record_bytes:
            raise OversizedError(
                f"the value has {len(data)} bytes, more than kafka.max_message_bytes = "
                f"{self._max_record_bytes}"
            )

    def _from_single_object(self, data: bytes, expected: type[T]) -> T:
        fingerprint = data[len(SINGLE_OBJECT_MAGIC) : _SINGLE_OBJECT_HEADER_BYTES]
        writer = self._schemas.by_fingerprint.get(fingerprint)
        if writer is None:
            raise UnknownSchemaError(
                f"schema fingerprint {fingerprint.hex()} is not known here; a newer producer? "
                "upgrade, then retry the dead letter"
            )
        if writer.record != expected.__name__:
            raise InvalidRecordError(f"holds a {writer.record}, expected {expected.__name__}")
        return self._from_avro(data, _SINGLE_OBJECT_HEADER_BYTES, writer.parsed, expected)

    def _from_confluent(self, data: bytes, expected: type[T]) -> T:
        if self._registry is None:
            raise UnknownSchemaError(
                "the record is in the Confluent wire form, but no schema registry is set; "
                "set SCHEMA_REGISTRY_URL"
            )
        if len(data) < _CONFLUENT_HEADER_BYTES:
            raise UndecodableError("the Confluent header is cut short")
        (schema_id,) = struct.unpack(">I", data[1:_CONFLUENT_HEADER_BYTES])
        writer = self._registry.schema_for(schema_id)
        current = self._schemas.current(expected.__name__).parsed
        known = (schema_id, expected.__name__)
        if known not in self._is_current:
            self._is_current[known] = _reads_alike(writer, current)
        if self._is_current[known]:
            writer = current
        return self._from_avro(data, _CONFLUENT_HEADER_BYTES, writer, expected)

    def _from_avro(self, data: bytes, start: int, writer: Any, expected: type[T]) -> T:
        current = self._schemas.current(expected.__name__).parsed
        if writer is current:
            return self._from_current(data, start, current, expected)
        body = io.BytesIO(data)
        body.seek(start)
        try:
            fields = fastavro.schemaless_reader(body, writer, current)
        except fastavro.read.SchemaResolutionError as error:
            raise InvalidRecordError(f"holds no {expected.__name__}: {error}") from error
        except Exception as error:  # fastavro raises whatever the damaged bytes lead to
            raise _damaged(error) from error
        _check_end(body.tell(), data)
        try:
            return msgspec.convert(fields, expected, builtin_types=(bytes,))
        except msgspec.ValidationError as error:
            raise InvalidRecordError(f"holds no {expected.__name__}: {error}") from error

    def _from_current(self, data: bytes, start: int, current: Any, expected: type[T]) -> T:
        name = expected.__name__
        try:
            read = self._readers[name]
        except KeyError:
            read = self._readers[name] = compile_reader(current)
        try:
            record, end = read(data, start)
        except READ_ERRORS as error:
            raise _damaged(error) from error
        _check_end(end, data)
        found: T = record
        return found


def _not_written(name: str, error: Exception) -> InvalidRecordError:
    return InvalidRecordError(f"cannot encode {name}: {type(error).__name__} {error}")


def _damaged(error: Exception) -> UndecodableError:
    return UndecodableError(f"damaged Avro body: {type(error).__name__} {error}")


def _reads_alike(one: Any, other: Any) -> bool:
    """Whether two schemas differ in nothing that their bytes show."""
    canonical = fastavro.schema.to_parsing_canonical_form
    return bool(canonical(one) == canonical(other))


def _check_end(end: int, data: bytes) -> None:
    """Reading takes what there is of a string at the end: only the place tells."""
    if end > len(data):
        raise UndecodableError("damaged Avro body: it is cut short")
    if end < len(data):
        raise UndecodableError(f"{len(data) - end} bytes follow the Avro body")


def encode_json(record: Record) -> bytes:
    """The record in the JSON wire form; bytes fields are base64."""
    return msgspec.json.encode(record)


def _from_json(data: bytes, expected: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=expected)
    except msgspec.ValidationError as error:
        raise InvalidRecordError(f"holds no {expected.__name__}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UndecodableError(f"not valid JSON: {error}") from error


__all__ = ["Codec", "SchemaIds", "encode_json"]
