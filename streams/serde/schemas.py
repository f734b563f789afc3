"""The schema files: every version of every record, found by record type or fingerprint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import fastavro.schema

from streams.contracts import RECORD_TYPES
from streams.errors import SchemaError
from streams.resources import resource_path

FINGERPRINT_BYTES = 8
_VERSION_FILE = re.compile(r"v(\d+)\.avsc")


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """One version of one record's schema.

    Attributes:
        record: Name of the record.
        version: Its number, from 1.
        text: The file, with docs, as registered with a schema registry.
        parsed: What fastavro reads and writes with. Logical types are left out, so that
            times stay integers of milliseconds.
        fingerprint: CRC-64-AVRO of the parsing canonical form, 8 bytes little-endian, as Avro's
            single-object encoding carries it.
    """

    record: str
    version: int
    text: str
    parsed: Any
    fingerprint: bytes


class SchemaStore:
    """All versions of all schemas in one folder.

    Args:
        versions: Every known version; for each record the highest is the current one.
    """

    def __init__(self, versions: Iterable[SchemaVersion]) -> None:
        known = sorted(versions, key=lambda v: (v.record, v.version))
        self.versions: tuple[SchemaVersion, ...] = tuple(known)
        self.by_fingerprint: Mapping[bytes, SchemaVersion] = MappingProxyType(
            {v.fingerprint: v for v in known}
        )
        self._current = {v.record: v for v in known}

    def current(self, record: str) -> SchemaVersion:
        """The newest schema of a record, by its name.

        Raises:
            SchemaError: There is none.
        """
        try:
            return self._current[record]
        except KeyError:
            raise SchemaError(f"no schema file for {record} in schemas/avro") from None


def load_schemas(folder: Path | None = None) -> SchemaStore:
    """Read ``<record>/v<N>.avsc`` for each of our records.

    Args:
        folder: Where they are; ``schemas/avro`` of this installation if None.

    Raises:
        SchemaError: A file is missing or is no Avro schema; names the file.
    """
    root = resource_path("schemas/avro") if folder is None else folder
    versions = [
        _load(path, record_type.__name__, int(match.group(1)))
        for record_type in RECORD_TYPES
        for path in sorted((root / snake_case(record_type.__name__)).glob("*.avsc"))
        if (match := _VERSION_FILE.fullmatch(path.name))
    ]
    return SchemaStore(versions)


def snake_case(name: str) -> str:
    """``DialogueTurn`` as ``dialogue_turn``, the name of its folder."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def parse_writer_schema(text: str) -> Any:
    """Parse a schema for reading and writing, logical types left out.

    Raises:
        SchemaError: ``text`` is no Avro schema.
    """
    try:
        # A fresh dict of named schemas: fastavro otherwise keeps them for the whole process.
        return fastavro.schema.parse_schema(_without_logical_types(json.loads(text)), {})
    except (ValueError, KeyError, TypeError, fastavro.schema.SchemaParseException) as error:
        raise SchemaError(f"not an Avro schema: {error}") from error


def fingerprint_of(text: str) -> bytes:
    """The CRC-64-AVRO fingerprint of a schema, 8 bytes little-endian."""
    canonical = fastavro.schema.to_parsing_canonical_form(json.loads(text))
    fingerprint: str = fastavro.schema.fingerprint(canonical, "CRC-64-AVRO")
    return bytes.fromhex(fingerprint)


def _load(path: Path, record: str, version: int) -> SchemaVersion:
    try:
        text = path.read_text(encoding="utf-8")
        parsed = parse_writer_schema(text)
    except OSError as error:
        raise SchemaError(f"cannot read {path}: {error.strerror}") from error
    except SchemaError as error:
        raise SchemaError(f"{path}: {error}") from error
    return SchemaVersion(
        record=record,
        version=version,
        text=text,
        parsed=parsed,
        fingerprint=fingerprint_of(text),
    )


def _without_logical_types(node: Any) -> Any:
    if isinstance(node, dict):
        return {k: _without_logical_types(v) for k, v in node.items() if k != "logicalType"}
    if isinstance(node, list):
        return [_without_logical_types(item) for item in node]
    return node
