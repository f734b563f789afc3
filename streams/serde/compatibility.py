"""Whether versions of a schema can read each other, and in what they differ.

FULL_TRANSITIVE: each version reads what every other one wrote, older or newer, so producers
and consumers are upgraded in any order. Avro's own resolution rules decide, as the
``avro`` package implements them; here is what goes beyond: enums must be able to grow, and
findings name the field.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, Literal

import avro.schema
from avro.compatibility import ReaderWriterCompatibilityChecker

from streams.errors import SchemaError
from streams.serde.schemas import SchemaStore, SchemaVersion

GROWING = "unknown"
"""What a symbol that a reader does not have is read as."""

RULES: dict[str, tuple[str, str]] = {
    "name_mismatch": ("names must stay", "give it its old name"),
    "fixed_size_mismatch": ("sizes must stay", "give it its old size"),
    "missing_enum_symbols": (
        "an enum that loses or gains symbols needs a default",
        'keep "default": "unknown"',
    ),
    "reader_field_missing_default_value": (
        "a field that one version lacks needs a default",
        'give it a "default", null for an optional one',
    ),
    "type_mismatch": ("types must stay", "add a field under a new name instead"),
    "missing_union_branch": (
        "a union must keep the types it has",
        "add a field under a new name instead",
    ),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Why one version cannot read another, or must not be registered.

    Attributes:
        record: Name of the record.
        reader: The version that reads; 0 if the problem is of the version itself.
        writer: The version that wrote.
        field: Path of the field, such as ``steps.feedback.kind``.
        rule: What is broken, in words.
        detail: What was found there.
        advice: What to do.
        subject: The registry's, if one of the two is there.
        registered: Which one that is.
    """

    record: str
    reader: int
    writer: int
    field: str
    rule: str
    detail: str
    advice: str
    subject: str | None = None
    registered: Literal["reader", "writer"] | None = None

    def __str__(self) -> str:
        reader, writer = f"v{self.reader}", f"v{self.writer}"
        if self.registered == "reader":
            reader = f"{reader} of {self.subject}"
        elif self.registered == "writer":
            writer = f"{writer} of {self.subject}"
        who = f"{reader} cannot read {writer}" if self.reader else writer
        return (
            f"{self.record}: {who}, field {self.field}: {self.rule} ({self.detail}); {self.advice}"
        )


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two versions of a schema.

    Attributes:
        kind: ``added``, ``removed`` or ``changed``.
        field: Path of the field, or of the enum whose symbols differ.
        before: The type, or symbols, in the earlier version.
        after: The same in the later one.
    """

    kind: Literal["added", "removed", "changed"]
    field: str
    before: str = ""
    after: str = ""


def check_versions(store: SchemaStore) -> list[Problem]:
    """All problems between any two versions of any record, both ways.

    Raises:
        SchemaError: A schema is none by Avro's rules.
    """
    found: list[Problem] = []
    by_record: dict[str, list[SchemaVersion]] = {}
    for version in store.versions:
        by_record.setdefault(version.record, []).append(version)
    for versions in by_record.values():
        for version in versions:
            found.extend(_closed_enums(version))
        for reader, writer in permutations(versions, 2):
            found.extend(problems(reader, writer))
    return found


def check_registered(
    current: SchemaVersion, subject: str, held: Iterable[SchemaVersion]
) -> list[Problem]:
    """All problems between a schema and those that a registry's subject holds, both ways.

    Raises:
        SchemaError: A schema is none by Avro's rules.
    """
    found: list[Problem] = []
    for other in held:
        theirs = problems(current, other)
        found += [replace(item, subject=subject, registered="writer") for item in theirs]
        ours = problems(other, current)
        found += [replace(item, subject=subject, registered="reader") for item in ours]
    return found


def problems(reader: SchemaVersion, writer: SchemaVersion) -> list[Problem]:
    """Why ``reader`` cannot read what ``writer`` wrote; nothing if it can."""
    checker: Any = ReaderWriterCompatibilityChecker()  # type: ignore[no-untyped-call]
    result = checker.get_compatibility(_parse(reader), _parse(writer))
    kinds = [kind.value for kind in result.incompatibilities]
    details = ", ".join(sorted(result.messages))
    found = []
    for place in sorted(result.locations - {"/"} or result.locations) if kinds else ():
        # Of a union that lost a branch the package does not say where it is.
        field = _field_at(json.loads(reader.text), place) or _changed(writer, reader)
        for kind in kinds:
            rule, advice = RULES.get(kind, (kind, "see Avro's rules of schema resolution"))
            found.append(
                Problem(reader.record, reader.version, writer.version, field, rule, details, advice)
            )
    return found


def _parse(version: SchemaVersion) -> Any:
    try:
        return avro.schema.parse(version.text)
    except avro.schema.AvroException as error:  # type: ignore[attr-defined]
        raise SchemaError(f"{version.record} v{version.version}: {error}") from error


def _field_at(schema: Any, place: str) -> str:
    """The names of the fields on the way to a JSON pointer."""
    node, names = schema, []
    for part in place.strip("/").split("/"):
        if isinstance(node, dict):
            node = node.get(part)
        elif isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        else:
            break
        if isinstance(node, dict) and "name" in node and node["type"] not in ("record", "enum"):
            names.append(str(node["name"]))
    return ".".join(names)


def _changed(before: SchemaVersion, after: SchemaVersion) -> str:
    changed = [change.field for change in changes(before, after) if change.kind == "changed"]
    return " or ".join(changed) or "(the record)"


def _closed_enums(version: SchemaVersion) -> Iterator[Problem]:
    """Enums that a later version could not grow."""
    for enum in _enums(json.loads(version.text)):
        default = enum.get("default", "missing")
        if default != GROWING:
            yield Problem(
                version.record,
                0,
                version.version,
                enum["name"],
                f'every enum has the symbol "{GROWING}" as its default',
                f"its default is {default}",
                f'put "{GROWING}" first, and "default": "{GROWING}"',
            )


def _enums(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, list):
        for item in node:
            yield from _enums(item)
    elif isinstance(node, dict):
        if node.get("type") == "enum":
            yield node
        for item in node.values():
            yield from _enums(item)


def flatten(schema: Any) -> dict[str, str]:
    """Each field, by path, with its type in words; an enum with its symbols and default."""
    named: dict[str, Any] = {}
    found: dict[str, str] = {}
    _flatten(schema, "", named, found)
    return found


def _flatten(schema: Any, path: str, named: dict[str, Any], found: dict[str, str]) -> str:
    if isinstance(schema, list):
        return " or ".join(_flatten(branch, path, named, found) for branch in schema)
    if isinstance(schema, str):
        name = schema.rpartition(".")[2]
        known = named.get(name)
        # A record that holds itself is shown once.
        return name if known is None else _flatten(known, path, {**named, name: None}, found)
    kind = schema["type"]
    if kind == "record":
        named[schema["name"]] = schema
        for field in schema["fields"]:
            below = f"{path}.{field['name']}" if path else field["name"]
            text = _flatten(field["type"], below, named, found)
            default = f" = {json.dumps(field['default'])}" if "default" in field else ""
            found[below] = found.get(below, text) + default
        return f"record {schema['name']}"
    if kind == "enum":
        named[schema["name"]] = schema
        symbols = "|".join(schema["symbols"])
        text = f"enum {schema['name']} {symbols} default {schema.get('default', '(none)')}"
        found[path] = text
        return text
    if kind == "array":
        return f"array of {_flatten(schema['items'], path, named, found)}"
    if kind == "map":
        return f"map of {_flatten(schema['values'], path, named, found)}"
    if isinstance(kind, (dict, list)):
        return _flatten(kind, path, named, found)
    return f"{kind} ({schema['logicalType']})" if "logicalType" in schema else str(kind)


def changes(before: SchemaVersion, after: SchemaVersion) -> list[Change]:
    """In what two versions differ, docs left out."""
    old, new = flatten(json.loads(before.text)), flatten(json.loads(after.text))
    found: list[Change] = []
    for field in sorted(old.keys() | new.keys()):
        if field not in new:
            found.append(Change("removed", field, before=old[field]))
        elif field not in old:
            found.append(Change("added", field, after=new[field]))
        elif old[field] != new[field]:
            found.append(Change("changed", field, old[field], new[field]))
    return found


__all__ = [
    "RULES",
    "Change",
    "Problem",
    "changes",
    "check_registered",
    "check_versions",
    "flatten",
    "problems",
]
