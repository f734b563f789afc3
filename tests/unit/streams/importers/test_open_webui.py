from __future__ import annotations

import json
from typing import Any

import pytest

from streams.contracts import DialogueTurn, FeedbackEvent, FeedbackKind, Role
from streams.errors import ImportFormatError
from streams.importers.open_webui import Imported, read_open_webui
from streams.serde import build_codec

T0 = 1_760_000_000


def message(
    id_: str, parent: str | None, role: str, content: str, at: int | None
) -> dict[str, Any]:
    stamp = {} if at is None else {"timestamp": at}
    return {"id": id_, "parentId": parent, "role": role, "content": content, **stamp}


CHAT = {
    "u1": message("u1", None, "user", "hello", T0),
    "a1": message("a1", "u1", "assistant", "hi", T0 + 2),
    "a2": message("a2", "u1", "assistant", "hey", T0 + 9),
    "u2": message("u2", "a2", "user", "thanks", None),
}


def rating(id_: str = "f1", value: Any = -1, **changes: Any) -> dict[str, Any]:
    return {
        "id": id_,
        "user_id": "u",
        "data": {
            "rating": value,
            "comment": "wrong",
            "tags": ["math"],
            "reason": "r",
            "details": {"rating": 3},
            "model_id": "m",
        },
        "meta": {"message_id": "a2", "chat_id": "c1"},
        "snapshot": {"chat": {"user_id": "u", "chat": {"history": {"messages": CHAT}}}},
        "created_at": T0 + 20,
        "updated_at": T0 + 20,
        **changes,
    }


def read(*items: dict[str, Any]) -> Imported:
    return read_open_webui(json.dumps(items).encode(), policy="p")


def test_a_chat_and_its_rating() -> None:
    imported = read(rating())
    assert [(t.turn_id, t.parent_turn_id, t.role) for t in imported.turns] == [
        ("u1", None, Role.USER),
        ("a1", "u1", Role.ASSISTANT),
        ("a2", "u1", Role.ASSISTANT),
        ("u2", "a2", Role.USER),
    ]
    assert {t.session_id for t in imported.turns} == {"c1"}
    (thumb,) = imported.feedback
    assert (thumb.kind, thumb.value, thumb.turn_id, thumb.text) == (
        FeedbackKind.THUMB,
        -1.0,
        "a2",
        "wrong",
    )
    assert thumb.tags == ("math",)
    assert thumb.attributes == {"reason": "r", "details_rating": "3", "model": "m"}
    assert thumb.event_time == (T0 + 20) * 1000
    assert imported.skipped == ()


def test_a_message_without_a_time_follows_its_parent() -> None:
    by_id = {t.turn_id: t for t in read(rating()).turns}
    assert by_id["u2"].event_time == by_id["a2"].event_time + 1


def test_importing_twice_gives_equal_events() -> None:
    assert read(rating()) == read(rating())


def test_a_chat_that_was_rated_twice_is_imported_once_in_its_latest_form() -> None:
    edited = {**CHAT, "u2": message("u2", "a2", "user", "thank you", T0 + 30)}
    later = rating(
        "f2",
        1,
        snapshot={"chat": {"chat": {"history": {"messages": edited}}}},
        updated_at=T0 + 40,
    )
    imported = read(later, rating())
    assert [t.content for t in imported.turns if t.turn_id == "u2"] == ["thank you"]
    assert len(imported.turns) == len(CHAT)
    assert len(imported.feedback) == 2


def test_an_edited_rating_supersedes_its_first_form() -> None:
    (first,) = read(rating()).feedback
    (second,) = read(rating(value=1, updated_at=T0 + 60)).feedback
    assert second.supersedes == first.event_id != second.event_id
    assert second.event_time == (T0 + 60) * 1000


def test_a_rating_without_a_value_is_skipped_and_said_so() -> None:
    imported = read(rating(value=None))
    assert imported.feedback == ()
    assert "f1" in imported.skipped[0]


@pytest.mark.parametrize("unit", [10**3, 10**6, 10**9])
def test_times_in_finer_units_are_understood(unit: int) -> None:
    (thumb,) = read(rating(created_at=(T0 + 20) * unit, updated_at=(T0 + 20) * unit)).feedback
    assert thumb.event_time == (T0 + 20) * 1000


def test_messages_whose_parents_form_a_ring_end() -> None:
    ring = {
        "x": message("x", "y", "user", "a", None),
        "y": message("y", "x", "assistant", "b", None),
    }
    imported = read(rating(snapshot={"chat": {"history": {"messages": ring}}}))
    assert {t.event_time for t in imported.turns} == {(T0 + 20) * 1000}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"[{", "cut short"),
        (b"{}", "array"),
        (b"[" * 99_999, "cut short"),
        (b'[{"created_at": -1}]', r"\[0\]\.updated_at"),
        (b'[{"created_at": true}]', r"\[0\]\.updated_at"),
        (b'[{"created_at": 1, "meta": {"chat_id": "a\\nb"}}]', "control characters"),
        (b"[1]", r"\[0\]: must be an object"),
        (b'[{"created_at": 1}]', r"\[0\]\.meta\.chat_id"),
        (b'[{"meta": {"chat_id": "c"}}]', r"\[0\]\.updated_at"),
        (b'[{"created_at": 1, "meta": {"chat_id": "c"}}]', "id and data"),
    ],
    ids=str,
)
def test_what_is_no_export_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(ImportFormatError, match=says):
        read_open_webui(data)


def test_events_of_a_message_and_a_rating_of_one_id_are_two() -> None:
    imported = read(rating("a2"))
    ids = [turn.event_id for turn in imported.turns]
    ids += [event.event_id for event in imported.feedback]
    assert len(set(ids)) == len(ids)


def test_a_rating_that_is_in_the_file_twice_is_imported_once() -> None:
    assert len(read(rating(), rating()).feedback) == 1


def test_what_cannot_be_used_of_a_chat_is_left_out_and_said_so() -> None:
    messages = {
        **CHAT,
        "": message("", None, "user", "no id", T0),
        "a\nb": message("a\nb", None, "user", "odd id", T0),
        "p": message("p", "x" * 600, "user", "odd parent", T0),
        "n": None,
    }
    imported = read(rating(snapshot={"chat": {"history": {"messages": messages}}}))
    assert {turn.turn_id for turn in imported.turns} == set(CHAT)
    assert len(imported.skipped) == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"snapshot": 5},
        {"snapshot": {"chat": [1]}},
        {"snapshot": {"chat": {"history": {"messages": [5, None, {"id": {}}]}}}},
        {"user_id": {}},
        {"meta": {"chat_id": 5, "message_id": []}},
        {"data": {"rating": 1, "tags": 5, "details": 5, "comment": 5, "model_id": {}}},
        {"data": {"rating": True}},
        {"data": {"rating": 10**400}},
        {"data": {"rating": float("nan")}},
    ],
    ids=str,
)
def test_odd_shapes_make_no_odd_records(changes: dict[str, Any]) -> None:
    imported = read(rating(**changes))
    codec = build_codec()
    for turn in imported.turns:
        assert codec.decode(codec.encode(turn), DialogueTurn) == turn
    for event in imported.feedback:
        assert codec.decode(codec.encode(event), FeedbackEvent) == event


def test_odd_messages_make_no_odd_records() -> None:
    odd = {
        "a": {"role": 5, "content": 5, "timestamp": -5, "model": 5, "parentId": 5},
        "b": {"role": "user", "content": "cut \ud83d", "timestamp": float("inf")},
        "c": {"content": [{"type": "text", "text": "x"}, 5, {"type": "image_url"}]},
    }
    imported = read(rating(snapshot={"chat": {"history": {"messages": odd}}}))
    assert {turn.content for turn in imported.turns} == {"", "cut \ufffd", "x"}
    codec = build_codec()
    for turn in imported.turns:
        assert codec.decode(codec.encode(turn), DialogueTurn) == turn
