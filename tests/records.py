"""Hypothesis strategies and full examples for every record."""

from __future__ import annotations

import math
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st
from msgspec.structs import fields, replace

from streams.contracts import DialogueTurn, Record

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
_IDS = {"event_id", "session_id", "turn_id", "policy"}


def records(record_type: type[Record]) -> st.SearchStrategy[Any]:
    """Valid records of ``record_type``, every field drawn from its declared type."""
    built = _struct(record_type)
    if record_type is DialogueTurn:
        return built.map(_match_logprobs)
    return built


def _match_logprobs(turn: Any) -> Any:
    logprobs = turn.behaviour_logprobs
    if logprobs is None:
        return turn
    return replace(turn, token_ids=tuple(range(len(logprobs))))


def _struct(cls: Any) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls)
    return st.builds(cls, **{f.name: _field(f.name, hints[f.name]) for f in fields(cls)})


def _field(name: str, hint: Any) -> st.SearchStrategy[Any]:
    if name in _IDS and hint is str:
        return NAMES
    if name.endswith(("time", "_at")) or name == "timestamp":
        times = st.integers(0, 2**62)
        return times if NoneType not in get_args(hint) else st.none() | times
    return _of_type(hint)


def _of_type(hint: Any) -> st.SearchStrategy[Any]:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return st.one_of(*(_of_type(a) for a in args))
    if origin is tuple:
        return st.lists(_of_type(args[0]), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(TEXT, _of_type(args[1]), max_size=2)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(list(hint))
    simple: dict[Any, st.SearchStrategy[Any]] = {
        NoneType: st.none(),
        str: TEXT,
        bool: st.booleans(),
        int: st.integers(-(2**31), 2**31 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False, width=64).map(
            lambda x: 0.0 if math.copysign(1, x) < 0 and x == 0 else x
        ),
        bytes: st.binary(max_size=20),
    }
    return simple[hint] if hint in simple else _struct(hint)
