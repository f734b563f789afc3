"""ALIGNMENT §2 (retries), §4 and decision 0001: what a segment shows."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import msgspec
import pytest

from processors.feedback_align.assemble import shorten
from streams.contracts import DialogueTurn, Role, SourceRef, ToolCall, TurnType
from streams.settings import AlignSettings
from tests.unit.processors.feedback_align.logs import Log, at, make_turn, shown

DONE: dict[str, Any] = {"session_done": True}


def context(log: Log, segment: int = 0, step: int = 0) -> list[str]:
    return [m.turn_id for m in log.segments[segment].steps[step].context]


def test_steps_context_and_next_user_turn() -> None:
    log = Log()
    for second, name in enumerate(("s0", "u1", "a1", "t1", "a2", "u2", "u3", "a3", "u4")):
        log.turn(name, f"0:{second:02}")
    log.turn("a9", "0:30", turn_type=TurnType.SIDE, session_done=True)
    (segment,) = log.until("2:00")
    assert [s.turn_id for s in segment.steps] == ["a1", "a2", "a3"]
    assert [[m.turn_id for m in s.context] for s in segment.steps] == [
        ["s0", "u1"],
        ["t1"],
        ["u2", "u3"],
    ]
    followers = [s.next_user_turn.turn_id if s.next_user_turn else None for s in segment.steps]
    assert followers == ["u2", "u2", "u4"]
    assert len(segment.lineage) == 10


def test_a_step_copies_its_turn_and_only_the_first_its_prompt() -> None:
    log = Log()
    calls = (ToolCall(id="1", name="look", arguments="{}"),)
    for name, time in (("a1", "0:00"), ("a2", "0:01")):
        log.turn(
            name,
            time,
            tool_calls=calls,
            model="m",
            policy_version=3,
            token_ids=(1, 2),
            behaviour_logprobs=(-0.5, -0.25),
            prompt_token_ids=(9,),
            finish_reason="stop",
            tokenizer_digest="t",
            template_digest="p",
            attributes={"k": name},
        )
    first, second = log.until("1:00:00")[0].steps
    assert (first.prompt_token_ids, second.prompt_token_ids) == ((9,), None)
    assert (first.reply, first.tool_calls, first.model) == ("text of a1", calls, "m")
    assert (first.policy_version, first.token_ids) == (3, (1, 2))
    assert first.behaviour_logprobs == (-0.5, -0.25)
    assert (first.finish_reason, first.tokenizer_digest) == ("stop", "t")
    assert (first.template_digest, second.attributes) == ("p", {"k": "a2"})


def test_regenerated_replies_are_alternatives_with_their_own_feedback() -> None:
    log = Log()
    log.turn("u1", "0:00")
    log.turn("a1", "0:10", parent_turn_id="u1")
    log.turn("a2", "0:20", parent_turn_id="u1")
    log.turn("a3", "0:30", parent_turn_id="u1")
    log.feedback("f1", "0:31", turn_id="a1")
    log.feedback("f3", "0:32", turn_id="a3")
    (segment,) = log.until("10:00")
    (step,) = segment.steps
    assert step.turn_id == "a3"
    assert [a.turn_id for a in step.alternatives] == ["a1", "a2"]
    assert shown(segment) == {"a3": ["f3"], "a1": ["f1"]}
    assert segment.off_branch == ()


def test_off_branch_lists_other_replies_that_have_shown_feedback() -> None:
    log = Log()
    log.turn("u1", "0:00")
    log.turn("a1", "0:01")
    log.turn("u2", "0:02")
    log.turn("a2", "0:03")
    log.turn("u3", "0:04", parent_turn_id="a1")
    log.turn("a3", "0:05")
    log.feedback("f", "0:06", turn_id="a2")
    (segment,) = log.until("10:00")
    assert [s.turn_id for s in segment.steps] == ["a1", "a3"]
    assert [s.alternatives for s in segment.steps] == [(), ()]
    assert [(r.turn_id, r.feedback[0].event_id) for r in segment.off_branch] == [("a2", "f")]
    assert [m.turn_id for m in segment.steps[1].context] == ["u3"]


def test_a_retry_on_the_branch_is_no_step_and_no_alternative() -> None:
    log = Log()
    log.turn("u1", "0:00", request_id="r", content="same")
    log.turn("a1", "0:01", request_id="r")
    log.turn("u2", "0:02", request_id="r", content="same")
    log.turn("a2", "0:03", request_id="r")
    log.feedback("f", "0:04", turn_id="a1")
    (segment,) = log.until("10:00")
    (step,) = segment.steps
    assert step.turn_id == "a2"
    assert [m.turn_id for m in step.context] == ["u1"]
    assert step.alternatives == ()
    assert [r.turn_id for r in segment.off_branch] == ["a1"]
    assert len(segment.lineage) == 5


def test_other_content_or_no_request_is_no_retry() -> None:
    log = Log()
    log.turn("u1", "0:00", request_id="r", content="one")
    log.turn("u2", "0:01", request_id="r", content="two")
    log.turn("u3", "0:02", content="one")
    log.turn("u4", "0:03", content="one")
    log.turn("a1", "0:04")
    log.turn("a2", "0:05")
    log.until("10:00")
    assert context(log) == ["u1", "u2", "u3", "u4"]
    assert [s.turn_id for s in log.segments[0].steps] == ["a1", "a2"]


def test_an_off_branch_reply_to_the_same_request_is_no_alternative() -> None:
    log = Log()
    log.turn("u1", "0:00")
    log.turn("a1", "0:01", parent_turn_id="u1", request_id="r")
    log.turn("a2", "0:02", parent_turn_id="u1", request_id="q")
    log.turn("a3", "0:03", parent_turn_id="u1", request_id="r")
    (segment,) = log.until("10:00")
    assert [a.turn_id for a in segment.steps[0].alternatives] == ["a2"]


@pytest.mark.parametrize("parent", ["a9", "x1", "unknown"], ids=["later", "side", "unknown"])
def test_a_parent_must_be_an_earlier_main_turn(parent: str) -> None:
    log = Log()
    log.turn("u1", "0:00")
    log.turn("a1", "0:01")
    log.turn("ux", "0:02", turn_id="x1", turn_type=TurnType.SIDE)
    log.turn("u2", "0:03", parent_turn_id=parent)
    log.turn("a9", "0:04")
    (segment,) = log.until("10:00")
    assert [s.turn_id for s in segment.steps] == ["a1", "a9"]


def test_carried_context() -> None:
    log = Log()
    log.turn("s0", "0:00")
    log.turn("u1", "0:01")
    log.turn("a1", "0:02")
    log.turn("u2", "0:03", **DONE)
    log.turn("u3", "0:04")
    log.turn("a3", "0:05", **DONE)
    log.turn("a4", "0:06", **DONE)
    log.until("1:00")
    assert [m.carried for m in log.segments[1].steps[0].context] == [True] * 4 + [False]
    assert context(log, 1) == ["s0", "u1", "a1", "u2", "u3"]
    assert context(log, 2) == ["s0", "u1", "a1", "u2", "u3", "a3"]
    assert log.segments[1].steps[0].context[2].role is Role.ASSISTANT
    assert log.segments[1].lineage == (
        SourceRef(topic="dialogue.turns", partition=0, offset=4),
        SourceRef(topic="dialogue.turns", partition=0, offset=5),
    )


def test_a_segment_without_steps_hands_on_what_it_carried() -> None:
    log = Log()
    log.turn("a1", "0:00", **DONE)
    log.turn("u2", "0:01", **DONE)
    log.turn("a3", "0:02", **DONE)
    log.until("1:00")
    assert log.segments[1].steps == ()
    assert context(log, 2) == ["a1", "u2"]


def test_carried_context_comes_from_the_segment_before_in_order_not_in_time_of_closing() -> None:
    log = Log()
    log.turn("a1", "0:00", **DONE)
    log.turn("a2", "20:00", **DONE)
    log.until("21:00")
    log.turn("a3", "10:00", "22:00", **DONE)
    log.until("30:00")
    stray = log.segments[-1]
    assert [m.turn_id for m in stray.steps[0].context] == ["a1"]
    assert stray.ordinal == 2


def test_carried_context_is_frozen_but_taken_from_the_latest_revision() -> None:
    log = Log()
    log.turn("a1", "0:00", **DONE)
    log.until("1:00")
    log.turn("u0", "-0:01", "1:10")
    log.until("2:00")
    log.turn("a2", "2:10", **DONE)
    log.until("3:00")
    log.turn("s0", "-0:02", "3:10")
    log.feedback("f", "3:10", turn_id="a2")
    log.until("9:00")
    assert [m.turn_id for m in log.segments[-1].steps[0].context] == ["u0", "a1"]
    assert log.segments[-1].revision == 1


def test_no_carried_context_from_beyond_the_horizon() -> None:
    log = Log()
    log.turn("a1", "0:00", **DONE)
    log.turn("a2", "24:00:00")
    log.until("25:00:00")
    assert log.segments[-1].closed_at == at("24:05:00")
    assert log.segments[-1].steps[0].context == ()


def turns_of(*turns: tuple[str, str, Role]) -> list[DialogueTurn]:
    return [make_turn(name, 0, content=content, role=role) for name, content, role in turns]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(9, "s u a"), (8, "s a"), (5, "s a"), (4, "s"), (3, "s"), (2, ""), (0, "")],
)
def test_shorten_drops_the_oldest_but_a_leading_system_message(limit: int, expected: str) -> None:
    turns = turns_of(("s", "sss", Role.SYSTEM), ("u", "äö", Role.USER), ("a", "aa", Role.ASSISTANT))
    assert " ".join(turns[place].turn_id for place in shorten(turns, limit)) == expected


def test_shorten_without_a_system_message_in_first_place() -> None:
    turns = turns_of(("u", "uu", Role.USER), ("s", "ss", Role.SYSTEM))
    assert shorten(turns, 2) == [1]
    assert shorten(turns, 1) == []


SHORT = AlignSettings(max_steps=1)


def test_next_user_turn_past_a_size_cut() -> None:
    log = Log(SHORT)
    log.turn("a1", "0:00")
    log.turn("x1", "0:01", role=Role.USER, turn_type=TurnType.SIDE)
    log.turn("u2", "0:02")
    log.turn("u3", "0:03")
    (segment,) = log.until("0:32")
    follower = segment.steps[0].next_user_turn
    assert follower is None  # closed at 0:30, u2 is ripe at 0:32
    log.feedback("f", "0:33", turn_id="a1")
    (revision,) = log.until("2:00")
    follower = revision.steps[0].next_user_turn
    assert follower is not None
    assert (follower.turn_id, follower.carried) == ("u2", False)
    assert len(revision.lineage) == 2


def test_no_next_user_turn_past_an_end() -> None:
    log = Log()
    log.turn("a1", "0:00", **DONE)
    log.turn("u2", "0:01")
    log.feedback("f", "0:05", turn_id="a1")
    (segment,) = log.until("2:00")
    assert segment.steps[0].next_user_turn is None


def test_identity_and_digest() -> None:
    log = Log()
    log.turn("u1", "0:00")
    log.turn("a1", "0:10", **DONE)
    log.until("1:00")
    log.turn("x1", "0:05", "2:00", role=Role.USER, turn_type=TurnType.SIDE)
    log.until("3:00")
    first, second = log.segments
    parts = msgspec.json.encode(["default", "s", 0, "u1", "e-u1", first.first_event_time])
    assert first.segment_id == sha256(parts).hexdigest()[:32]
    assert first.digest == sha256(msgspec.json.encode(first.steps)).hexdigest()
    assert first.digest == second.digest
    assert (second.revision, len(second.lineage)) == (1, 3)
    assert first.settle_ms == 30_000
    assert first.last_event_time == at("0:10")
