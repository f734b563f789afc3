"""Avro bytes straight from and to our records: a function is made for each schema.

fastavro goes by the schema for each field of each record and needs dicts between. Where an
array may also be null it even validates each item to find the branch. The functions made
here know both sides: a segment is written about three times as fast, a turn read about twice
as fast, and the bytes are the same; a property test holds them to fastavro's. Records
written with any other schema than the current one are fastavro's to read.

A function is put together as the text of Python statements, one per field, from the schema
files alone. Reading checks what it reads: damaged bytes raise, and a caller must compare the
place where reading ended with the length of the data, as nothing else notices that a string
at the end was cut short.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import fastavro

from streams import contracts
from streams.errors import SchemaError

Writer = Callable[[Any, bytearray], None]
"""Appends the bytes of a record; raises one of ``WRITE_ERRORS`` if a field does not fit."""

WriterAround = Callable[[Any, bytearray, memoryview], None]
"""The same; the bytes of one field are given."""

Reader = Callable[[bytes, int], tuple[Any, int]]
"""Gives the record that begins at a place, and where it ends; raises one of ``READ_ERRORS``."""

Picker = Callable[[bytes, int], tuple[Any, ...]]
"""Gives some fields of the record that begins at a place; raises one of ``READ_ERRORS``."""

WRITE_ERRORS = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    OverflowError,
    UnicodeError,
    struct.error,
)

READ_ERRORS = (ValueError, KeyError, IndexError, UnicodeError, OverflowError, struct.error)

_INT_END = 1 << 31
_LONG_END = 1 << 63
_LONG_BYTES = 10
_MANY_NUMBERS = 8
"""From so many integers on fastavro reads an array faster, call included."""


def _zigzag(number: int) -> bytes:
    left = (number << 1) ^ (number >> 63)
    out = bytearray()
    while left > 0x7F:
        out.append(left & 0x7F | 0x80)
        left >>= 7
    out.append(left)
    return bytes(out)


_SMALL = tuple(map(_zigzag, range(1 << 16)))
_SMALL_END = len(_SMALL)
# Two continued bytes of seven bits each, and the bytes that end a number: three lookups write
# any time in milliseconds until 2039.
_CONTINUED = tuple(bytes((n & 0x7F | 0x80, n >> 7 | 0x80)) for n in range(1 << 14))
_ENDING = tuple(
    bytes((n,)) if n < 0x80 else bytes((n & 0x7F | 0x80, n >> 7)) for n in range(1 << 14)
)


def _long(number: int) -> bytes:
    if 1 << 27 <= number < 1 << 41:
        number <<= 1
        return (
            _CONTINUED[number & 0x3FFF] + _CONTINUED[number >> 14 & 0x3FFF] + _ENDING[number >> 28]
        )
    if not -_LONG_END <= number < _LONG_END:
        raise OverflowError(f"{number} does not fit 64 bits")
    return _zigzag(number)


def _int(number: int) -> bytes:
    if not -_INT_END <= number < _INT_END:
        raise OverflowError(f"{number} does not fit 32 bits")
    return _zigzag(number)


def _unsigned(data: bytes, place: int) -> tuple[int, int]:
    """A varint as it stands, before its sign is unfolded."""
    number = shift = 0
    for at in range(place, place + _LONG_BYTES):
        byte = data[at]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            if number >> 64:
                break
            return number, at + 1
        shift += 7
    raise ValueError(f"the number at byte {place} does not fit 64 bits")


def _bad(what: str, place: int) -> Exception:
    return ValueError(f"{what} before byte {place} is none")


def _integers(data: bytes, place: int, schema: Any) -> tuple[list[int], int]:
    """An array of integers, in blocks, through fastavro."""
    stream = io.BytesIO(data)
    stream.seek(place)
    try:
        found = fastavro.schemaless_reader(stream, schema, None)
    except (EOFError, StopIteration) as error:
        raise ValueError(f"the array at byte {place} is cut short") from error
    assert isinstance(found, list)
    return found, stream.tell()


class _Text:
    """The statements of the functions of one schema, and the names that they use."""

    def __init__(self, schema: Any) -> None:
        self.names: dict[str, Any] = {
            "SMALL": _SMALL,
            "END": _SMALL_END,
            "NULL": b"\0",
            "VALUE": b"\2",
            "BITS": {False: b"\0", True: b"\1"},
            "BOOLS": {0: False, 1: True},
            "write_long": _long,
            "write_int": _int,
            "pack": struct.pack,
            "unsigned": _unsigned,
            "integers": _integers,
            "unpack": struct.unpack_from,
            "bad": _bad,
        }
        self._types: dict[str, Any] = {}
        self._lines: list[str] = []
        self._count = 0
        self.schema = self.resolve(schema)

    def new(self) -> str:
        """A name for a value."""
        self._count += 1
        return f"v{self._count}"

    def resolve(self, schema: Any) -> Any:
        """A schema without indirection; a record or enum by its first appearance."""
        if isinstance(schema, str):
            return self._types.get(schema, schema)
        if isinstance(schema, dict):
            kind = schema["type"]
            if kind in ("record", "enum"):
                self._types[schema["name"]] = schema
            elif kind not in ("array", "map"):
                return self.resolve(kind)
        return schema

    def function(
        self, prefix: str, schema: Any, head: str, body: Callable[[Any], list[str]]
    ) -> str:
        """The name of the function of a record, made if it is new."""
        name = f"{prefix}_{_short(schema)}"
        if name not in self.names:
            self.names[name] = None  # It is named before its body is known.
            self._lines += [f"def {name}({head}):", *("    " + line for line in body(schema))]
        return name

    def compiled(self, name: str) -> Any:
        """The function of this name."""
        exec(compile("\n".join(self._lines), "<Avro>", "exec"), self.names)
        return self.names[name]


def _short(schema: Any) -> str:
    name: str = schema["name"]
    return name.rpartition(".")[2]


def _kind(schema: Any) -> str:
    if isinstance(schema, list):
        return "union"
    kind: str = schema if isinstance(schema, str) else schema["type"]
    return kind


def _value_of(schema: Any, text: _Text) -> Any:
    """The other branch of a union with null."""
    if len(schema) != 2 or schema[0] != "null":
        raise SchemaError(
            f"of unions only those of null and one type are read and written: {schema}"
        )
    return text.resolve(schema[1])


def _inset(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


def compile_writer(schema: Any) -> Writer:
    """A function that writes the records of a schema.

    Args:
        schema: As ``schemas.parse_writer_schema`` gives it.

    Raises:
        SchemaError: It uses what the schemas of this project do not.
    """
    text = _Text(schema)
    write: Writer = text.compiled(_writer_name(text.schema, text))
    return write


def compile_writer_around(schema: Any, field: str) -> WriterAround:
    """As :func:`compile_writer`, but the bytes of one of the record's fields are given.

    Args:
        schema: As ``schemas.parse_writer_schema`` gives it.
        field: The field.

    Raises:
        SchemaError: It uses what the schemas of this project do not.
    """
    text = _Text(schema)
    name = text.function(
        "write", text.schema, "record, out, given", lambda it: _write_record(it, text, field)
    )
    write: WriterAround = text.compiled(name)
    return write


def _writer_name(schema: Any, text: _Text) -> str:
    return text.function("write", schema, "record, out", lambda it: _write_record(it, text))


def _write_record(schema: Any, text: _Text, given: str | None = None) -> list[str]:
    lines: list[str] = []
    for field in schema["fields"]:
        if field["name"] == given:
            lines.append("out += given")
            continue
        value = text.new()
        lines += [f"{value} = record.{field['name']}", *_write(field["type"], value, text)]
    return lines or ["pass"]


def _write(schema: Any, value: str, text: _Text) -> list[str]:
    schema = text.resolve(schema)
    kind = _kind(schema)
    match kind:
        case "string":
            return [f"data = {value}.encode()", *_write_bytes("data")]
        case "bytes":
            return _write_bytes(value)
        case "boolean":
            return [f"out += BITS[{value}]"]
        case "int" | "long":
            return [f"out += {_number(kind, value)}"]
        case "double":
            return [f"out += pack('<d', {value})"]
        case "enum":
            name = f"SYMBOLS_{_short(schema)}"
            text.names[name] = {s: _zigzag(n) for n, s in enumerate(schema["symbols"])}
            return [f"out += {name}[{value}]"]
        case "record":
            return [f"{_writer_name(schema, text)}({value}, out)"]
        case "array":
            return _write_array(schema, value, text)
        case "map":
            key, item = text.new(), text.new()
            return [
                f"if {value}:",
                f"    out += write_long(len({value}))",
                f"    for {key}, {item} in {value}.items():",
                *_inset(_inset(_write("string", key, text))),
                *_inset(_inset(_write(schema["values"], item, text))),
                "out += NULL",
            ]
        case "union":
            inner = _value_of(schema, text)
            return [
                f"if {value} is None:",
                "    out += NULL",
                "else:",
                "    out += VALUE",
                *_inset(_write(inner, value, text)),
            ]
    raise SchemaError(f"{kind} is not read and written")


def _number(kind: str, value: str) -> str:
    return f"SMALL[{value}] if 0 <= {value} < END else write_{kind}({value})"


def _write_bytes(value: str) -> list[str]:
    return [f"size = len({value})", f"out += {_number('long', 'size')}", f"out += {value}"]


def _write_array(schema: Any, value: str, text: _Text) -> list[str]:
    inner = text.resolve(schema["items"])
    item = text.new()
    match _kind(inner):
        case "double":
            items = [f"out += pack(f'<{{size}}d', *{value})"]
        case "int" | "long" as kind:
            items = [f"out += b''.join([{_number(kind, 'n')} for n in {value}])"]
        case _:
            items = [f"for {item} in {value}:", *_inset(_write(inner, item, text))]
    return [
        f"size = len({value})",
        "if size:",
        f"    out += {_number('long', 'size')}",
        *_inset(items),
        "out += NULL",
    ]


def compile_reader(schema: Any) -> Reader:
    """A function that reads the records that were written with a schema.

    Args:
        schema: As ``schemas.parse_writer_schema`` gives it; that of the current version.

    Raises:
        SchemaError: It uses what the schemas of this project do not.
    """
    text = _Text(schema)
    read: Reader = text.compiled(_reader_name(text.schema, text))
    return read


def _reader_name(schema: Any, text: _Text) -> str:
    return text.function("read", schema, "b, p", lambda it: _read_record(it, text))


def _read_record(schema: Any, text: _Text) -> list[str]:
    name = _short(schema)
    text.names[name] = getattr(contracts, name)
    lines: list[str] = []
    given: list[str] = []
    for field in schema["fields"]:
        value = text.new()
        lines += _read(field["type"], value, text)
        given.append(f"{field['name']}={value}")
    return [*lines, f"return {name}({', '.join(given)}), p"]


def compile_picker(schema: Any, paths: Sequence[str]) -> Picker:
    """A function that reads some fields of a record, and nothing behind the last of them.

    Args:
        schema: As ``schemas.parse_writer_schema`` gives it; that of the current version.
        paths: The fields, those of a record within it behind its name and a dot.

    Raises:
        SchemaError: It has no such field, or uses what the schemas of this project do not.
    """
    text = _Text(schema)
    found: dict[str, str] = {}
    lines = _pick_fields(text.schema, "", set(paths), found, text)
    if lost := sorted(set(paths) - set(found)):
        raise SchemaError(f"{_short(text.schema)} has no field {', '.join(lost)}")
    lines += [
        "if p > len(b):",
        "    raise bad('the field', p)",
        f"return ({', '.join(found[path] for path in paths)},)",
    ]
    name = text.function("pick", text.schema, "b, p", lambda _: lines)
    pick: Picker = text.compiled(name)
    return pick


def _pick_fields(
    schema: Any, inside: str, paths: set[str], found: dict[str, str], text: _Text
) -> list[str]:
    lines: list[str] = []
    for field in schema["fields"]:
        if paths <= found.keys():
            break
        path = f"{inside}{field['name']}"
        if any(one.startswith(f"{path}.") for one in paths):
            lines += _pick_fields(text.resolve(field["type"]), f"{path}.", paths, found, text)
            continue
        found[path] = text.new()
        lines += _read(field["type"], found[path], text)
    return lines


_READ_SIZE = [
    "n = b[p]",
    "if n < 128:",
    "    p += 1",
    "else:",
    "    n, p = unsigned(b, p)",
    "if n & 1:",
    "    raise bad('the length', p)",
    "q = p + (n >> 1)",
]


def _read(schema: Any, value: str, text: _Text) -> list[str]:
    schema = text.resolve(schema)
    kind = _kind(schema)
    match kind:
        case "string":
            return [*_READ_SIZE, f"{value} = b[p:q].decode()", "p = q"]
        case "bytes":
            return [*_READ_SIZE, f"{value} = b[p:q]", "p = q"]
        case "boolean":
            return [f"{value} = BOOLS[b[p]]", "p += 1"]
        case "int" | "long":
            return _read_number(value)
        case "double":
            return [f"({value},) = unpack('<d', b, p)", "p += 8"]
        case "enum":
            name = f"MEMBERS_{_short(schema)}"
            members: Mapping[int, Any] = {
                n << 1: getattr(contracts, _short(schema))(symbol)
                for n, symbol in enumerate(schema["symbols"])
            }
            text.names[name] = members
            return [f"{value} = {name}[b[p]]", "p += 1"]
        case "record":
            return [f"{value}, p = {_reader_name(schema, text)}(b, p)"]
        case "array":
            return _read_array(schema, value, text)
        case "map":
            key, item = text.new(), text.new()
            return [
                f"{value} = {{}}",
                *_read_blocks(
                    text,
                    lambda count: [
                        f"for _ in range({count}):",
                        *_inset(_read("string", key, text)),
                        *_inset(_read(schema["values"], item, text)),
                        f"    {value}[{key}] = {item}",
                    ],
                ),
            ]
        case "union":
            inner = _value_of(schema, text)
            return [
                "n = b[p]",
                "p += 1",
                "if n == 0:",
                f"    {value} = None",
                "elif n == 2:",
                *_inset(_read(inner, value, text)),
                "else:",
                "    raise bad('the branch', p)",
            ]
    raise SchemaError(f"{kind} is not read and written")


def _read_number(value: str) -> list[str]:
    return [
        "n = b[p]",
        "if n < 128:",
        "    p += 1",
        "else:",
        "    n, p = unsigned(b, p)",
        f"{value} = n >> 1 ^ -(n & 1)",
    ]


def _read_array(schema: Any, value: str, text: _Text) -> list[str]:
    inner = text.resolve(schema["items"])
    item, items = text.new(), text.new()
    each = [f"{items}.append({item})"]

    def block(count: str) -> list[str]:
        if _kind(inner) == "double":
            return [f"{items} += unpack(f'<{{{count}}}d', b, p)", f"p += 8 * {count}"]
        return [f"for _ in range({count}):", *_inset([*_read(inner, item, text), *each])]

    lines = [f"{items} = []", *_read_blocks(text, block), f"{value} = tuple({items})"]
    if _kind(inner) not in ("int", "long"):
        return lines
    name = f"ARRAY_{_kind(inner)}"
    text.names[name] = fastavro.parse_schema({"type": "array", "items": inner})
    return [
        f"if b[p] > {2 * _MANY_NUMBERS}:",
        f"    {items}, p = integers(b, p, {name})",
        f"    {value} = tuple({items})",
        "else:",
        *_inset(lines),
    ]


def _read_blocks(text: _Text, block: Callable[[str], list[str]]) -> list[str]:
    """Avro writes arrays and maps in blocks; a negative count comes with the block's size."""
    count = text.new()
    return [
        "while True:",
        *_inset(_read_number(count)),
        f"    if {count} == 0:",
        "        break",
        f"    if {count} < 0:",
        f"        {count} = -{count}",
        "        n, p = unsigned(b, p)",
        *_inset(block(count)),
    ]


__all__ = [
    "READ_ERRORS",
    "WRITE_ERRORS",
    "Picker",
    "Reader",
    "Writer",
    "WriterAround",
    "compile_picker",
    "compile_reader",
    "compile_writer",
    "compile_writer_around",
]
