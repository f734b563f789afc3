"""Outcomes from other systems (bought, solved, returned), as feedback on the reply they are about.

They come hours or days later and from systems that know nothing of conversations, so they are
named instead of rated: ``gateway.outcomes`` says what each name is worth. Pure.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from streams.contracts import FeedbackEvent, FeedbackKind
from streams.errors import (
    ImportFormatError,
    InvalidRecordError,
    RecordError,
    RequestRefusedError,
)
from streams.foreign import lone_half
from streams.gateway.ids import usable_id
from streams.serde.validation import validate
from streams.times import check_event_time

NAME_ATTRIBUTE = "outcome"
"""Attribute of an outcome: its name."""

MAX_NAME_CHARS = 200
"""How long an outcome's name may be: it is on every record that shows it."""

DELIMITERS = ",;\t"
"""What may stand between the columns of a table; spreadsheets take what their country does."""

_IDS = ("session_id", "turn_id", "supersedes", "user_id")

_WHOLE = re.compile(r"-?[0-9]{1,18}")

FIELDS = frozenset(
    {
        "session_id",
        "turn_id",
        "outcome",
        "value",
        "event_time",
        "outcome_id",
        "user_id",
        "source",
        "policy",
        "supersedes",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What an outcome that does not say so itself is taken for.

    Args:
        source: Who sends it.
        policy: Whose reply it is about.
        now_ms: When it happened.
        latest_ms: The latest time that is believed.
        values: What each named outcome is worth, in [-1, 1].
    """

    source: str
    policy: str
    now_ms: int
    latest_ms: int
    values: Mapping[str, float]


def read_outcome(item: Any, defaults: Defaults) -> FeedbackEvent:
    """One outcome as feedback.

    Sent again with the same ``outcome_id`` and ``event_time`` it is the same event, which the
    aligner takes once.

    Args:
        item: The fields, as JSON or CSV has them.
        defaults: What is left out.

    Raises:
        InvalidRecordError: A field is unknown, missing or cannot be used; names it.
    """
    if not isinstance(item, Mapping):
        raise InvalidRecordError("must be an object")
    given = {str(key): value for key, value in item.items() if value not in (None, "")}
    unknown = sorted(given.keys() - FIELDS)
    if unknown:
        raise InvalidRecordError(
            f"unknown field {', '.join(unknown)}; known are {', '.join(sorted(FIELDS))}"
        )
    session_id, turn_id = _text(given, "session_id"), _text(given, "turn_id")
    name = _optional(given, "outcome")
    if name is not None and len(name) > MAX_NAME_CHARS:
        raise InvalidRecordError(f"outcome: a name has at most {MAX_NAME_CHARS} characters")
    at_ms = _time(given, defaults)
    own_id = _optional(given, "outcome_id")
    event = FeedbackEvent(
        event_id=_event_id(session_id, turn_id, name, own_id, at_ms),
        session_id=session_id,
        turn_id=turn_id,
        policy=_optional(given, "policy") or defaults.policy,
        event_time=at_ms,
        kind=FeedbackKind.OUTCOME,
        source=_optional(given, "source") or defaults.source,
        value=_value(given.get("value"), name, defaults.values),
        user_id=_optional(given, "user_id"),
        supersedes=_optional(given, "supersedes"),
        attributes={NAME_ATTRIBUTE: name} if name else {},
    )
    try:
        validate(event)
    except RecordError as error:
        raise InvalidRecordError(str(error)) from error
    return event


def _text(given: Mapping[str, Any], key: str) -> str:
    value = _optional(given, key)
    if not value:
        raise InvalidRecordError(
            f"{key} is missing: an outcome names the reply it is about (the gateway returns both "
            "ids with each reply)"
        )
    return value


def _optional(given: Mapping[str, Any], key: str) -> str | None:
    """A field that is text; other systems' ids may be whole numbers."""
    value = given.get(key)
    if value is None:
        return None
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise InvalidRecordError(f"{key}: must be text, not {value!r:.80}")
    text = str(value).strip()
    if lone_half(text) is not None:
        raise InvalidRecordError(f"{key}: {value!r:.80} cannot be written as UTF-8")
    return text


def _value(given: Any, name: str | None, values: Mapping[str, float]) -> float:
    if given is None:
        if name is None:
            raise InvalidRecordError("outcome or value is missing")
        if name not in values:
            raise InvalidRecordError(
                f"outcome: {name!r} is not one of gateway.outcomes "
                f"({', '.join(sorted(values)) or 'none'}); name it there, or send a value"
            )
        return values[name]
    try:
        value = float(given)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if isinstance(given, bool) or not -1.0 <= value <= 1.0:
        raise InvalidRecordError(f"value: must be a number in [-1, 1], not {given!r}")
    return value


def _time(given: Mapping[str, Any], defaults: Defaults) -> int:
    if "event_time" not in given:
        return defaults.now_ms
    at_ms = _milliseconds(given["event_time"])
    check_event_time(at_ms, defaults.latest_ms)
    return at_ms


def _milliseconds(given: Any) -> int:
    """Milliseconds since 1970, UTC; from a number, or a time as ISO 8601 with its offset."""
    text = str(given).strip()
    if _WHOLE.fullmatch(text) and not isinstance(given, bool):
        return int(text)
    try:
        at = datetime.fromisoformat(text)
        at_ms = None if at.tzinfo is None else round(at.astimezone(UTC).timestamp() * 1_000)
    except (ValueError, OverflowError):
        at_ms = None
    if at_ms is None:
        raise InvalidRecordError(
            f"event_time: {given!r} is neither milliseconds since 1970 nor ISO 8601 with an offset "
            "(2026-01-31T12:00:00+00:00)"
        )
    return at_ms


def _event_id(session_id: str, turn_id: str, name: str | None, own_id: Any, at_ms: int) -> str:
    identity = [session_id, turn_id, name, str(own_id) if own_id is not None else at_ms]
    digest = hashlib.sha256(json.dumps(identity, separators=(",", ":")).encode()).hexdigest()
    return f"outcome-{digest[:24]}"


@dataclass(frozen=True, slots=True)
class ImportedOutcomes:
    """What a CSV file holds, and what of it cannot be used."""

    events: tuple[FeedbackEvent, ...]
    skipped: tuple[str, ...]


def read_outcomes_csv(lines: Iterable[str], defaults: Defaults) -> ImportedOutcomes:
    """Outcomes from CSV: a header with the names of ``FIELDS``, then one on each line.

    Between the columns stands what stands between those of the header: one of ``DELIMITERS``.

    Raises:
        ImportFormatError: It has no header, or one with a column that is not known or named twice.
    """
    found = iter(lines)
    header_line = next(found, "")
    reader = csv.DictReader(
        chain((header_line,), found), strict=True, delimiter=_delimiter(header_line)
    )
    try:
        header = [name.strip() for name in reader.fieldnames or ()]
        unknown = sorted(set(header) - FIELDS)
        if not {"session_id", "turn_id"} <= set(header) or unknown:
            raise ImportFormatError(
                "the first line must name the columns, session_id and turn_id among them"
                + (f"; unknown: {', '.join(unknown)}" if unknown else "")
                + f"; known are {', '.join(sorted(FIELDS))}"
            )
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise ImportFormatError(f"the first line names {', '.join(twice)} more than once")
        reader.fieldnames = header
        events: list[FeedbackEvent] = []
        skipped: list[str] = []
        for row in reader:
            try:
                events.append(_row(row, defaults))
            except InvalidRecordError as error:
                skipped.append(f"line {reader.line_num}: {error}")
    except csv.Error as error:
        raise ImportFormatError(f"line {reader.line_num + 1} is not CSV: {error}") from error
    return ImportedOutcomes(tuple(events), tuple(skipped))


def _row(row: Mapping[Any, Any], defaults: Defaults) -> FeedbackEvent:
    if None in row:
        raise InvalidRecordError("has more columns than the header")
    event = read_outcome(row, defaults)
    for name in _IDS:
        try:
            usable_id(name, getattr(event, name))
        except RequestRefusedError as error:
            raise InvalidRecordError(str(error)) from error
    return event


def _delimiter(header: str) -> str:
    """What stands between the names of the header: no name has one of them in it."""
    return max(DELIMITERS, key=header.count)


__all__ = [
    "FIELDS",
    "NAME_ATTRIBUTE",
    "Defaults",
    "ImportedOutcomes",
    "read_outcome",
    "read_outcomes_csv",
]
