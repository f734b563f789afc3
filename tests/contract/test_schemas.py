"""The schema files, the records and the codec say the same."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from msgspec import NODEFAULT
from msgspec.structs import fields

from streams.contracts import RECORD_TYPES, Record
from streams.resources import resource_path
from streams.serde.schemas import load_schemas, snake_case

SCHEMAS = resource_path("schemas/avro")


def current_text(record_type: type[Record]) -> str:
    return (SCHEMAS / f"{snake_case(record_type.__name__)}.avsc").read_text(encoding="utf-8")


def version_files(record_type: type[Record]) -> list[Path]:
    folder = SCHEMAS / snake_case(record_type.__name__)
    return sorted(folder.glob("v*.avsc"), key=lambda path: int(path.stem[1:]))


def named_types(node: Any, found: dict[str, Any]) -> dict[str, Any]:
    if isinstance(node, dict):
        if node.get("type") in ("record", "enum"):
            found[node["name"]] = node
        for value in node.values():
            named_types(value, found)
    elif isinstance(node, list):
        for item in node:
            named_types(item, found)
    return found


def avro_of(hint: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        (inner,) = (a for a in args if a is not NoneType)
        return ["null", avro_of(inner)]
    if origin is tuple:
        return {"array": avro_of(args[0])}
    if origin is dict:
        return {"map": avro_of(args[1])}
    names = {str: "string", bool: "boolean", int: "integer", float: "double", bytes: "bytes"}
    return names.get(hint) or hint.__name__


def shape_of(schema: Any) -> Any:
    if isinstance(schema, list):
        return [shape_of(item) for item in schema]
    if isinstance(schema, dict):
        kind = schema["type"]
        if kind in ("record", "enum"):
            return schema["name"]
        if kind == "array":
            return {"array": shape_of(schema["items"])}
        if kind == "map":
            return {"map": shape_of(schema["values"])}
        return shape_of(kind)
    return {"int": "integer", "long": "integer"}.get(schema, str(schema).rpartition(".")[2])


def structs_below(cls: Any, found: dict[str, Any]) -> dict[str, Any]:
    if cls.__name__ not in found:
        found[cls.__name__] = cls
        for hint in get_type_hints(cls).values():
            for inner in {hint, *get_args(hint), *(b for a in get_args(hint) for b in get_args(a))}:
                if hasattr(inner, "__struct_fields__"):
                    structs_below(inner, found)
                elif isinstance(inner, type) and issubclass(inner, Enum):
                    found[inner.__name__] = inner
    return found


@pytest.mark.parametrize("record_type", RECORD_TYPES, ids=lambda r: r.__name__)
class TestEachRecord:
    def test_structs_mirror_the_schema_field_for_field(self, record_type: type[Record]) -> None:
        schemas = named_types(json.loads(current_text(record_type)), {})
        classes = structs_below(record_type, {})
        assert schemas.keys() == classes.keys()
        for name, schema in schemas.items():
            if schema["type"] == "enum":
                assert schema["symbols"] == [str(symbol) for symbol in classes[name]]
                continue
            hints = get_type_hints(classes[name])
            assert {f["name"]: shape_of(f["type"]) for f in schema["fields"]} == {
                field: avro_of(hint) for field, hint in hints.items()
            }

    def test_defaults_agree(self, record_type: type[Record]) -> None:
        schemas = named_types(json.loads(current_text(record_type)), {})
        for name, cls in structs_below(record_type, {}).items():
            if schemas[name]["type"] == "enum":
                continue
            written = {f["name"]: f["default"] for f in schemas[name]["fields"] if "default" in f}
            declared = {
                f.name: f.default_factory() if f.default_factory is not NODEFAULT else f.default
                for f in fields(cls)
                if f.default is not NODEFAULT or f.default_factory is not NODEFAULT
            }
            assert written == {k: [] if v == () else v for k, v in declared.items()}

    def test_every_field_has_a_doc(self, record_type: type[Record]) -> None:
        for schema in named_types(json.loads(current_text(record_type)), {}).values():
            assert schema["doc"]
            for field in schema.get("fields", ()):
                assert len(field.get("doc", "")) > 3, f"{schema['name']}.{field['name']}"

    def test_every_enum_can_grow(self, record_type: type[Record]) -> None:
        for schema in named_types(json.loads(current_text(record_type)), {}).values():
            if schema["type"] == "enum":
                assert schema["symbols"][0] == schema["default"] == "unknown"

    def test_the_newest_kept_version_is_the_current_schema(self, record_type: type[Record]) -> None:
        files = version_files(record_type)
        assert [path.name for path in files] == [f"v{n}.avsc" for n in range(1, len(files) + 1)]
        assert files[-1].read_text(encoding="utf-8") == current_text(record_type)


def test_times_are_milliseconds() -> None:
    times = [
        (name, field["name"], field["type"])
        for record_type in RECORD_TYPES
        for name, schema in named_types(json.loads(current_text(record_type)), {}).items()
        for field in schema.get("fields", ())
        if field["name"].endswith(("_time", "_at")) or field["name"] in ("time", "timestamp")
    ]
    assert len(times) > 10
    for name, field, kind in times:
        flat = kind[1] if isinstance(kind, list) else kind
        assert flat == {"type": "long", "logicalType": "timestamp-millis"}, f"{name}.{field}"


def test_a_nested_record_is_the_same_wherever_it_stands() -> None:
    seen: dict[str, Any] = {}
    for record_type in RECORD_TYPES:
        for name, schema in named_types(json.loads(current_text(record_type)), {}).items():
            fields_of = [
                (f["name"], shape_of(f["type"]), f["doc"]) for f in schema.get("fields", ())
            ]
            assert seen.setdefault(name, fields_of) == fields_of, f"{name} in {record_type}"


def test_fingerprints_are_distinct() -> None:
    store = load_schemas()
    assert len(store.by_fingerprint) == len(store.versions) >= len(RECORD_TYPES)
