"""Each change that would break somebody is refused, and the field and the rule are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streams.cli import main
from streams.resources import resource_path
from streams.serde import SchemaStore, load_schemas
from streams.serde.compatibility import (
    Change,
    changes,
    check_registered,
    check_versions,
    flatten,
)
from streams.serde.schemas import SchemaVersion, fingerprint_of, parse_writer_schema

FEEDBACK = load_schemas().current("FeedbackEvent")

Edit = Callable[[dict[str, Any]], None]


def edited(edit: Edit) -> SchemaVersion:
    """The next version of FeedbackEvent."""
    schema = json.loads(FEEDBACK.text)
    edit({field["name"]: field for field in schema["fields"]} | {"": schema})
    text = json.dumps(schema)
    return SchemaVersion(
        "FeedbackEvent", FEEDBACK.version + 1, text, parse_writer_schema(text), fingerprint_of(text)
    )


def said(edit: Edit) -> list[str]:
    return [str(problem) for problem in check_versions(SchemaStore([FEEDBACK, edited(edit)]))]


def add(field: dict[str, Any]) -> Edit:
    return lambda fields: fields[""]["fields"].append({"doc": "x", **field})


def remove(name: str) -> Edit:
    return lambda fields: fields[""]["fields"].remove(fields[name])


def retype(name: str, kind: object) -> Edit:
    return lambda fields: fields[name].update(type=kind)


BROKEN: dict[str, tuple[Edit, str, str]] = {
    "a new field without a default": (
        add({"name": "mood", "type": "string"}),
        "mood",
        "a field that one version lacks needs a default",
    ),
    "a required field that goes": (
        remove("source"),
        "source",
        "a field that one version lacks needs a default",
    ),
    "another type": (retype("source", "long"), "source", "types must stay"),
    "a number that narrows": (retype("event_time", "int"), "event_time", "types must stay"),
    "another branch of a union": (
        retype("value", ["null", "string"]),
        "value",
        "a union must keep the types it has",
    ),
    "a union that loses null": (
        lambda fields: fields["turn_id"].update(type="string", default=""),
        "turn_id",
        "types must stay",
    ),
    "an enum without its default": (
        lambda fields: fields["kind"]["type"].pop("default"),
        "FeedbackKind",
        'every enum has the symbol "unknown" as its default',
    ),
    "a field that is called otherwise": (
        lambda fields: fields["source"].update(name="origin"),
        "origin",
        "a field that one version lacks needs a default",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_change_that_breaks_somebody(name: str) -> None:
    edit, field, rule = BROKEN[name]
    found = said(edit)
    assert any(f"field {field}: {rule}" in text for text in found), found


FINE: dict[str, Edit] = {
    "nothing": lambda fields: None,
    "an optional field": add({"name": "mood", "type": ["null", "string"], "default": None}),
    "a field with a default": add({"name": "weight", "type": "double", "default": 1.0}),
    "an optional field that goes": remove("text"),
    "another symbol": lambda fields: fields["kind"]["type"]["symbols"].append("shrug"),
    "another doc": lambda fields: fields["text"].update(doc="Something else."),
}


@pytest.mark.parametrize("name", FINE)
def test_a_change_that_breaks_nobody(name: str) -> None:
    assert said(FINE[name]) == []


def test_transitive_means_each_against_each() -> None:
    """Version 3 gives back a name with another type: 2 does not know it, 1 does."""
    one, two = FEEDBACK, edited(remove("text"))
    schema = json.loads(two.text)
    schema["fields"].append({"name": "text", "type": "long", "default": 0, "doc": "x"})
    text = json.dumps(schema)
    three = SchemaVersion(
        "FeedbackEvent", two.version + 1, text, parse_writer_schema(text), fingerprint_of(text)
    )
    found = check_versions(SchemaStore([one, two, three]))
    pairs = {(problem.reader, problem.writer) for problem in found}
    assert pairs == {(one.version, three.version), (three.version, one.version)}


def test_the_installed_schemas_read_each_other() -> None:
    assert check_versions(load_schemas()) == []


def test_differences_are_told_by_path() -> None:
    after = edited(add({"name": "mood", "type": ["null", "string"], "default": None}))
    assert changes(FEEDBACK, after) == [Change("added", "mood", after="null or string = null")]
    assert changes(after, FEEDBACK) == [Change("removed", "mood", before="null or string = null")]
    (changed,) = changes(FEEDBACK, edited(retype("source", "long")))
    assert changed == Change("changed", "source", "string", "long")


def test_a_record_named_twice_is_told_in_both_places() -> None:
    fields = flatten(json.loads(load_schemas().current("TrajectorySegment").text))
    paths = ("steps.feedback.kind", "steps.alternatives.feedback.kind", "off_branch.feedback.kind")
    assert len({fields[path] for path in paths}) == 1
    assert fields[paths[0]].startswith("enum FeedbackKind unknown|")


# The command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file in resource_path("schemas/avro").rglob("v*.avsc"):
        copy = tmp_path / file.parent.name / file.name
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(file.read_bytes())
    return tmp_path


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str]:
        try:
            code = main(["schemas", *arguments])
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, out + err

    return call


def test_the_command_refuses_an_incompatible_file(folder: Path, run: Run) -> None:
    assert run("check", "--folder", str(folder))[0] == 0
    new = folder / "feedback_event" / f"v{FEEDBACK.version + 1}.avsc"
    new.write_text(edited(retype("source", "long")).text, encoding="utf-8")
    code, output = run("check", "--folder", str(folder))
    assert code == 1
    assert f"FeedbackEvent: v{FEEDBACK.version} cannot read v{FEEDBACK.version + 1}" in output
    assert "field source: types must stay" in output
    code, output = run(
        "diff", "feedback_event", "1", str(FEEDBACK.version + 1), "--folder", str(folder)
    )
    assert (code, "changed source: string -> long" in output) == (0, True)
    code, output = run("history", "FeedbackEvent", "--folder", str(folder), "--json")
    shown = json.loads(output)
    assert [item["version"] for item in shown] == list(range(1, FEEDBACK.version + 2))
    assert "changed source" in shown[-1]["changes"]


def test_what_is_not_there_is_named(tmp_path: Path, run: Run) -> None:
    assert "choose one of ControlCommand" in run("diff", "Nothing", "1", "2")[1]
    assert "no version 99" in run("diff", "FeedbackEvent", "1", "99")[1]
    assert "is no folder" in run("check", "--folder", str(tmp_path / "none"))[1]


def test_what_a_registry_holds_is_checked_both_ways() -> None:
    outside = edited(add({"name": "mood", "type": "string"}))
    (found,) = check_registered(FEEDBACK, "dialogue.feedback-value", [FEEDBACK, outside])
    assert str(found).startswith(
        "FeedbackEvent: v3 of dialogue.feedback-value cannot read v2, field mood: a field that one"
    )
    (other,) = check_registered(outside, "dialogue.feedback-value", [FEEDBACK])
    assert "v3 cannot read v2 of dialogue.feedback-value, field mood" in str(other)
