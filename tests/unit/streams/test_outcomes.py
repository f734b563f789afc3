"""Outcomes from other systems: what is read, what is refused, and that sending twice is safe."""

from __future__ import annotations

from typing import Any

import pytest

from streams.contracts import FeedbackEvent, FeedbackKind
from streams.errors import ImportFormatError, InvalidRecordError
from streams.outcomes import Defaults, read_outcome, read_outcomes_csv

NOW_MS = 1_767_225_600_000
DEFAULTS = Defaults(
    source="shop",
    policy="default",
    now_ms=NOW_MS,
    latest_ms=NOW_MS + 60_000,
    values={"bought": 1.0, "returned": -1.0},
)
REPLY = {"session_id": "s", "turn_id": "t"}


def read(**fields: Any) -> FeedbackEvent:
    return read_outcome(REPLY | fields, DEFAULTS)


def test_a_named_outcome_has_the_worth_of_its_name() -> None:
    event = read(outcome="returned")
    assert (event.kind, event.value) == (FeedbackKind.OUTCOME, -1.0)
    assert (event.session_id, event.turn_id) == ("s", "t")
    assert (event.source, event.policy, event.event_time) == ("shop", "default", NOW_MS)
    assert event.attributes == {"outcome": "returned"}


def test_a_value_goes_before_the_name_and_needs_none() -> None:
    assert read(value="0.25").value == 0.25
    event = read(outcome="upgraded", value=0.5)
    assert (event.value, event.attributes) == (0.5, {"outcome": "upgraded"})


@pytest.mark.parametrize(
    ("given", "ms"),
    [
        (NOW_MS - 5, NOW_MS - 5),
        (str(NOW_MS - 5), NOW_MS - 5),
        ("2025-12-31T12:00:00+00:00", NOW_MS - 12 * 3_600_000),
        ("2025-12-31T13:00:00.5+01:00", NOW_MS - 12 * 3_600_000 + 500),
        ("2025-12-31T12:00:00Z", NOW_MS - 12 * 3_600_000),
    ],
)
def test_times_are_numbers_or_iso(given: Any, ms: int) -> None:
    assert read(outcome="bought", event_time=given).event_time == ms


def test_an_outcome_with_an_id_of_its_own_is_one_event_however_often_it_is_sent() -> None:
    once = read(outcome="bought", outcome_id="order-7", event_time=NOW_MS - 5)
    assert read(outcome="bought", outcome_id="order-7", event_time=NOW_MS - 5) == once
    others = [
        read(outcome="bought", outcome_id="order-8", event_time=NOW_MS - 5),
        read(outcome="returned", outcome_id="order-7", event_time=NOW_MS - 5),
        read(outcome="bought", event_time=NOW_MS - 5),
        read(outcome="bought", event_time=NOW_MS - 6),
    ]
    assert len({event.event_id for event in (once, *others)}) == 5


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"turn_id": None, "outcome": "bought"}, "turn_id is missing"),
        ({"session_id": " ", "outcome": "bought"}, "session_id is missing"),
        ({}, "outcome or value is missing"),
        ({"outcome": "stolen"}, r"'stolen' is not one of gateway.outcomes \(bought, returned\)"),
        ({"value": 2}, r"value: must be a number in \[-1, 1\]"),
        ({"value": "nan"}, "value: must be a number"),
        ({"value": True}, "value: must be a number"),
        ({"value": [1]}, "value: must be a number"),
        ({"outcome": "bought", "event_time": "yesterday"}, "event_time: 'yesterday' is neither"),
        ({"outcome": "bought", "event_time": "2025-12-31T12:00:00"}, "with an offset"),
        ({"outcome": "bought", "event_time": NOW_MS + 60_001}, "ahead of the clock"),
        ({"outcome": "bought", "order": 1}, "unknown field order"),
        ({"session_id": ["s1"], "outcome": "bought"}, r"session_id: must be text, not \['s1'\]"),
        ({"turn_id": {"id": 1}, "outcome": "bought"}, "turn_id: must be text"),
        ({"user_id": True, "outcome": "bought"}, "user_id: must be text"),
        ({"outcome": {"name": "bought"}}, "outcome: must be text"),
        ({"value": 10**400}, "value: must be a number"),
        ({"outcome": "bought", "event_time": "1_000"}, "is neither"),
        ({"outcome": "bought", "event_time": True}, "is neither"),
        ({"outcome": "bought", "event_time": "9" * 40}, "is neither"),
        ({"outcome": "bought", "event_time": "0001-01-01T00:00:00+23:59"}, "is neither"),
        ({"outcome": "bought", "event_time": NOW_MS // 1_000}, "seconds. send milliseconds"),
        ({"outcome": "bought", "event_time": str(NOW_MS // 1_000)}, "seconds. send milliseconds"),
        ({"outcome": "x" * 201, "value": 1}, "outcome: a name has at most 200 characters"),
        ({"session_id": "\ud800", "outcome": "bought"}, "session_id: .* UTF-8"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRecordError, match=says):
        read(**fields)


def test_only_objects_are_outcomes() -> None:
    with pytest.raises(InvalidRecordError, match="must be an object"):
        read_outcome(["s"], DEFAULTS)


# --- CSV --------------------------------------------------------------------------------------


def test_a_file_is_read_line_by_line_and_bad_lines_are_named() -> None:
    lines = [
        "session_id, turn_id, outcome, value, event_time\n",
        "s1,t1,bought,,2025-12-31T12:00:00Z\n",
        "s2,t2,,0.5,\n",
        "s3,,bought,,\n",
        "s4,t4,stolen,,\n",
        "s5,t5,bought,,,extra\n",
    ]
    found = read_outcomes_csv(lines, DEFAULTS)
    assert [(e.session_id, e.value) for e in found.events] == [("s1", 1.0), ("s2", 0.5)]
    assert [line.partition(":")[0] for line in found.skipped] == ["line 4", "line 5", "line 6"]
    assert "turn_id is missing" in found.skipped[0]


@pytest.mark.parametrize("between", [",", ";", "\t"])
def test_what_stands_between_the_names_stands_between_the_columns(between: str) -> None:
    lines = ["session_id,turn_id,outcome\n", 's1,"t,1;x",bought\n']
    if between != ",":
        lines = [lines[0].replace(",", between), f's1{between}"t,1;x"{between}bought\n']
    (event,) = read_outcomes_csv(lines, DEFAULTS).events
    assert (event.session_id, event.turn_id, event.value) == ("s1", "t,1;x", 1.0)


@pytest.mark.parametrize(
    ("turn_id", "says"),
    [("a\0b", "turn_id must not hold control characters"), ("x" * 513, "longer than 512 bytes")],
)
def test_ids_that_the_gateway_refuses_are_left_out(turn_id: str, says: str) -> None:
    lines = ["session_id,turn_id,outcome\n", f"s1,{turn_id},bought\n", "s2,t2,bought\n"]
    found = read_outcomes_csv(lines, DEFAULTS)
    assert [event.session_id for event in found.events] == ["s2"]
    assert len(found.skipped) == 1
    assert found.skipped[0].startswith("line 2: ")
    assert says in found.skipped[0]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "must name the columns"),
        (["session_id,outcome\n"], "must name the columns"),
        (["session_id,turn_id,order\n"], "unknown: order"),
        (
            ["session_id,turn_id,value, session_id\n", "a,b,1,c\n"],
            "names session_id more than once",
        ),
        (["session_id,turn_id,outcome\n", 's,"t,bought\n'], "is not CSV: unexpected end"),
    ],
)
def test_a_file_that_is_no_such_table_is_refused(lines: list[str], says: str) -> None:
    with pytest.raises(ImportFormatError, match=says):
        read_outcomes_csv(lines, DEFAULTS)
