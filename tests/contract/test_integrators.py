"""What docs/integrators.md says of fields from outside."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streams.cli import main
from streams.contracts import DialogueTurn, FeedbackEvent
from streams.errors import InvalidRecordError, UnknownSchemaError
from streams.resources import resource_path
from streams.serde import build_codec

PAGE = (Path(__file__).parents[2] / "docs" / "integrators.md").read_text(encoding="utf-8")
BLOCKS = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]
CODEC = build_codec()


def block(key: str) -> dict[str, Any]:
    (found,) = [one for one in BLOCKS if key in one]
    return dict(found)


def as_json(**fields: Any) -> bytes:
    turn = {
        "event_id": "e", "session_id": "s", "turn_id": "t", "role": "user", "content": "hi",
        "event_time": 5, "source": "test",
    }  # fmt: skip
    return json.dumps(turn | fields).encode()


def test_json_is_read_over_fields_it_does_not_know() -> None:
    plain = CODEC.decode(as_json(), DialogueTurn)
    assert CODEC.decode(as_json(mood="merry"), DialogueTurn) == plain
    assert CODEC.decode(as_json(attributes={"mood": "merry"}), DialogueTurn).attributes == {
        "mood": "merry"
    }
    with pytest.raises(InvalidRecordError):
        CODEC.decode(as_json(attributes={"mood": 5}), DialogueTurn)


def test_the_event_of_the_page_is_one() -> None:
    event = block("kind") | {"event_id": "e", "event_time": 5, "source": "test"}
    found = CODEC.decode(json.dumps(event).encode(), FeedbackEvent)
    assert found.attributes == {"shop": "berlin"}


def _check(
    folder: Path, edit: Callable[[dict[str, Any]], None], capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """What the command of the page says of a version of one's own."""
    shutil.copytree(resource_path("schemas/avro"), folder)
    versions = sorted((folder / "dialogue_turn").glob("v*.avsc"))
    schema = json.loads(versions[-1].read_text(encoding="utf-8"))
    edit(schema)
    (folder / "dialogue_turn" / f"v{len(versions) + 1}.avsc").write_text(json.dumps(schema))
    try:
        status = main(["schemas", "check", "--folder", str(folder)])
    except SystemExit as end:
        status = int(end.code or 0)
    shown = capsys.readouterr()
    return status, shown.out + shown.err


def test_the_field_of_the_page_keeps_the_rules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mood = block("default")
    status, said = _check(tmp_path / "good", lambda schema: schema["fields"].append(mood), capsys)
    assert (status, "read each other" in said) == (0, True)
    required = {"name": "mood", "type": "string", "doc": "The user's mood."}
    status, said = _check(
        tmp_path / "bad", lambda schema: schema["fields"].append(required), capsys
    )
    assert status == 1
    assert "mood" in said
    assert "default" in said


def test_without_a_registry_a_schema_of_ones_own_is_unknown() -> None:
    with pytest.raises(UnknownSchemaError, match="fingerprint"):
        CODEC.decode(b"\xc3\x01" + b"\x07" * 8 + b"x", DialogueTurn)
