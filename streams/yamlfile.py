"""YAML that people write: what looks like a slip is an error, and a word means what it says.

A key that stands twice in a mapping is refused, where YAML's libraries silently take the last.
As in YAML 1.2, ``yes``, ``no``, ``on`` and ``off``, ``1:30`` (90 to YAML 1.1), ``010`` (8 to it)
and ``2026-01-31`` are text; whoever needs a truth value or a number from them says so, and a
setting that is a number refuses ``1:30`` instead of taking it for 90.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from streams.errors import SettingsError

_BOOL = "tag:yaml.org,2002:bool"
_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_CHANGED = {_BOOL, _INT, _FLOAT, _TIMESTAMP}


class _Loader(yaml.SafeLoader):
    """YAML's safe loader without the readings of YAML 1.1 that nobody means.

    Each pattern takes less than YAML 1.1's own, so that what the library writes unquoted as text
    is read as text again.
    """


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _CHANGED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    _BOOL, re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), list("tTfF")
)
_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?(?:0|[1-9][0-9_]*)\Z"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?"
        r"|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)"
        r"|\.(?:nan|NaN|NAN))\Z"
    ),
    list("-+0123456789."),
)


def read_yaml(path: Path) -> Any:
    """What a YAML file holds; None if it holds nothing.

    Raises:
        SettingsError: It cannot be read, is not YAML, or names a key twice; names the key's path
            and both lines.
    """
    try:
        text = path.read_text(encoding="utf-8")
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _refuse_doubles(node, (), path, set())
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error
    # A key that is a list or a mapping fails in the library with the error of the language.
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise SettingsError(f"{path} is not valid YAML: {error}") from error


def _refuse_doubles(node: yaml.Node, place: tuple[str, ...], path: Path, seen: set[int]) -> None:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _refuse_doubles(item, (*place, str(index)), path, seen)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        where = (*place, name)
        if name in lines:
            raise SettingsError(
                f"{path}: {'.'.join(where)}: stands twice, in lines {lines[name]} and {line}; "
                "keep one of them"
            )
        lines[name] = line
        _refuse_doubles(value, where, path, seen)


__all__ = ["read_yaml"]
