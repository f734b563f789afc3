"""Dead letters as JSON for machines, and their bytes as far as they can be read."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import msgspec

from streams.contracts import DeadLetter, Record
from streams.dlq.model import Case, Group, Mark, Plan
from streams.errors import RecordError, SchemaError
from streams.serde import Codec


def group_json(group: Group) -> dict[str, Any]:
    """A group of letters."""
    return {
        "stage": group.stage,
        "reason": group.reason,
        "letters": group.letters,
        "open": group.open,
        "retried": group.retried,
        "dropped": group.dropped,
        "first": group.first_ms,
        "last": group.last_ms,
        "topics": list(group.topics),
        "example": group.example,
    }


def case_json(case: Case) -> dict[str, Any]:
    """A letter and what became of it, without the bytes it keeps."""
    letter = case.letter
    return {
        "id": str(letter.origin),
        "stage": letter.stage,
        "reason": letter.reason,
        "message": letter.message,
        "state": case.state,
        "attempts": case.attempt,
        "root": str(case.root),
        "time": letter.time_ms,
        "timestamp": letter.timestamp,
        "bytes": letter.size_bytes,
        "letter": str(letter.at),
        "copies": case.copies,
        "obstacle": letter.obstacle,
        "attributes": dict(letter.attributes),
        "mark": None if case.mark is None else mark_json(case.mark),
    }


def mark_json(mark: Mark) -> dict[str, Any]:
    """What was done about a letter."""
    return {
        "id": str(mark.letter.origin),
        "stage": mark.letter.stage,
        "reason": mark.letter.reason,
        "action": mark.action,
        "time": mark.at_ms,
        "actor": mark.actor,
        "note": mark.note,
        "attempt": mark.attempt,
        "landed": None if mark.landed is None else str(mark.landed),
    }


def plan_json(plan: Plan, *, dry_run: bool) -> dict[str, Any]:
    """What a retry did, or would do."""
    return {
        "dry_run": dry_run,
        "retried": [case_json(case)["id"] for case in plan.retry],
        "retried_before": [case_json(case)["id"] for case in plan.done],
        "refused": [{"id": str(item.case.letter.origin), "why": item.why} for item in plan.refused],
    }


def whole_json(
    case: Case, dead: DeadLetter, codec: Codec, types: Mapping[str, type[Record]]
) -> dict[str, Any]:
    """A letter with everything it keeps; the record too, if its value can be read now.

    Args:
        case: The letter and what became of it.
        dead: The letter itself.
        codec: Reads the record.
        types: What the topics hold.
    """
    record, unreadable = _record(dead, codec, types)
    return {
        **case_json(case),
        "key": _text(dead.key),
        "key_base64": _base64(dead.key),
        "headers": [
            {"key": h.key, "value": _text(h.value), "value_base64": _base64(h.value)}
            for h in dead.headers
        ],
        "value_base64": _base64(dead.value),
        "record": record,
        "unreadable": unreadable,
    }


def _record(
    dead: DeadLetter, codec: Codec, types: Mapping[str, type[Record]]
) -> tuple[Any, str | None]:
    expected = types.get(dead.topic)
    if expected is None or dead.value is None:
        return None, None
    try:
        return msgspec.to_builtins(codec.decode(dead.value, expected)), None
    except (RecordError, SchemaError) as error:
        return None, str(error)


def _text(data: bytes | None) -> str | None:
    """Bytes as text if they are text."""
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        return None


def _base64(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


__all__ = ["case_json", "group_json", "mark_json", "plan_json", "whole_json"]
