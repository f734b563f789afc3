from __future__ import annotations

from typing import Any

import pytest

from streams.contracts import Role
from streams.gateway.conversation import (
    BadMessageError,
    ChatMessage,
    Conversations,
    Placed,
    parse_messages,
)

SYSTEM = ChatMessage(Role.SYSTEM, "be brief")
HI = ChatMessage(Role.USER, "hi")
HELLO = ChatMessage(Role.ASSISTANT, "hello")
MORE = ChatMessage(Role.USER, "more")


def place(
    seen: Conversations,
    *messages: ChatMessage,
    session: str | None = "s",
    owner: str = "web",
    fresh: str = "fresh",
) -> Placed:
    return seen.place(messages, session_id=session, owner=owner, fresh_session_id=fresh)


def contents(placed: Placed) -> list[str]:
    return [turn.message.content for turn in placed.new_turns]


def test_only_what_is_new_is_published() -> None:
    seen = Conversations()
    first = place(seen, SYSTEM, HI)
    assert contents(first) == ["be brief", "hi"]
    seen.replied(first, [SYSTEM, HI], HELLO, "reply-1", "web")
    second = place(seen, SYSTEM, HI, HELLO, MORE)
    assert contents(second) == ["more"]
    assert second.new_turns[0].parent_turn_id == "reply-1"
    assert second.parent_turn_id == second.new_turns[0].turn_id


def test_regenerating_publishes_nothing_again_and_keeps_the_parent() -> None:
    seen = Conversations()
    first = place(seen, HI)
    again = place(seen, HI)
    assert contents(again) == []
    assert again.parent_turn_id == first.parent_turn_id


def test_an_edited_prompt_is_a_new_turn_with_the_old_parent() -> None:
    seen = Conversations()
    first = place(seen, HI)
    seen.replied(first, [HI], HELLO, "reply-1", "web")
    edited = ChatMessage(Role.USER, "less")
    for message in (MORE, edited):
        assert place(seen, HI, HELLO, message).new_turns[0].parent_turn_id == "reply-1"


def test_equal_words_at_two_places_are_two_turns() -> None:
    seen = Conversations()
    first = place(seen, HI)
    seen.replied(first, [HI], HELLO, "reply-1", "web")
    second = place(seen, HI, HELLO, HI)
    assert contents(second) == ["hi"]
    assert second.parent_turn_id != first.parent_turn_id


def test_a_reply_that_came_back_trimmed_is_recognised() -> None:
    seen = Conversations()
    first = place(seen, HI)
    seen.replied(first, [HI], ChatMessage(Role.ASSISTANT, " hello\n"), "reply-1", "web")
    assert place(seen, HI, HELLO, MORE).new_turns[0].parent_turn_id == "reply-1"


def test_history_from_before_this_gateway_is_not_published() -> None:
    placed = place(Conversations(), SYSTEM, HI, HELLO, MORE)
    assert contents(placed) == ["more"]
    assert placed.new_turns[0].parent_turn_id is None


def test_what_could_not_be_published_is_new_again() -> None:
    seen = Conversations()
    first = place(seen, HI)
    seen.forget(first.new_turns)
    assert contents(place(seen, HI)) == ["hi"]


class TestWithoutASessionId:
    def test_a_continued_history_finds_its_session(self) -> None:
        seen = Conversations()
        first = place(seen, HI, session=None, fresh="a")
        seen.replied(first, [HI], HELLO, "reply-1", "web")
        second = place(seen, HI, HELLO, MORE, session=None, fresh="b")
        assert second.session_id == "a"
        assert contents(second) == ["more"]

    def test_a_stranger_never_continues_it(self) -> None:
        seen = Conversations()
        first = place(seen, HI, session=None, fresh="a")
        seen.replied(first, [HI], HELLO, "reply-1", "web")
        stranger = place(seen, HI, HELLO, MORE, session=None, owner="other", fresh="b")
        assert stranger.session_id == "b"

    def test_equal_first_words_are_two_sessions(self) -> None:
        seen = Conversations()
        assert place(seen, HI, session=None, fresh="a").session_id == "a"
        assert place(seen, HI, session=None, fresh="b").session_id == "b"

    def test_two_sessions_with_one_history_are_ambiguous(self) -> None:
        seen = Conversations()
        for fresh in ("a", "b"):
            placed = place(seen, HI, session=None, fresh=fresh)
            seen.replied(placed, [HI], HELLO, f"reply-{fresh}", "web")
        assert place(seen, HI, HELLO, MORE, session=None, fresh="c").session_id == "c"


def test_memory_is_bounded() -> None:
    seen = Conversations(capacity=3)
    for n in range(10):
        place(seen, ChatMessage(Role.USER, str(n)))
    assert contents(place(seen, ChatMessage(Role.USER, "9"))) == []
    assert contents(place(seen, ChatMessage(Role.USER, "0"))) == ["0"]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (None, "at least one"),
        ([], "at least one"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"role": "user", "content": "x"}, {"role": "alien"}], r"messages\[1\]\.role"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content"),
        ([{"role": "assistant", "tool_calls": [{"id": 1}]}], r"messages\[0\]\.tool_calls"),
        ([{"role": "tool", "tool_call_id": 5}], r"messages\[0\]\.tool_call_id"),
    ],
    ids=str,
)
def test_a_bad_message_is_named(messages: Any, says: str) -> None:
    with pytest.raises(BadMessageError, match=says):
        parse_messages(messages)


def test_parts_and_tool_calls_are_read() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = parse_messages(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "3", "tool_call_id": "c1"},
        ]
    )
    assert messages[0].content == "a"
    assert messages[1].tool_calls is not None
    assert messages[1].tool_calls[0].name == "add"
    assert messages[2].role is Role.TOOL
    assert messages[2].tool_call_id == "c1"


def test_parts_without_text_and_arguments_as_objects_are_read() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": {"a": [1, None]}}}
    user, reply = parse_messages(
        [
            {"role": "user", "content": [{"type": "text"}, {"type": "text", "text": "a"}, 5]},
            {"role": "assistant", "tool_calls": [call]},
        ]
    )
    assert user.content == "a"
    assert reply.tool_calls is not None
    assert reply.tool_calls[0].arguments == '{"a":[1,null]}'


def test_claimed_reply_ids_are_bounded() -> None:
    seen = Conversations(capacity=2)
    assert [seen.claim_reply_id("s", name) for name in ("a", "a", "b", "c", "a")] == [
        True,
        False,
        True,
        True,
        True,
    ]
