"""What a judge is asked, how its answers are read, and the events they become."""

from __future__ import annotations

from pathlib import Path

import pytest

from processors.reward.judge.verdicts import (
    Rubric,
    Verdict,
    failure,
    judgement,
    messages,
    newest_of,
    questions,
    read_rubric,
    read_vote,
)
from streams.contracts import FeedbackKind, Message, Role, Step, ToolCall
from streams.errors import JudgeError, SettingsError
from streams.settings import JudgeSettings
from tests.unit.processors.reward.builders import feedback, reply, said, segment

SETTINGS = JudgeSettings(url="http://judge/v1", model="m")
RUBRIC = Rubric("Judge it.", "digest")


@pytest.mark.parametrize(
    ("answer", "vote"),
    [
        ("VERDICT: 1", 1),
        ("Good reply.\nVERDICT: -1\n", -1),
        ("**Verdict:** 0", 0),
        ("verdict: +1.", 1),
        ("VERDICT: \N{MINUS SIGN}1", -1),
        ("VERDICT: \N{EN DASH}1", -1),
        ("VERDICT: - 1", -1),
        ("**VERDICT:** [\N{FULLWIDTH HYPHEN-MINUS}1]", -1),
        ("VERDICT\N{FULLWIDTH COLON}-1。", -1),
        ("### VERDICT: $-1$", -1),
        (" - `VERDICT: -0`", 0),
        ("VERDICT: 1\r\n", 1),
        ("VERDICT: 1 (good)", 1),
        ("**VERDICT: -1** (it makes things up)", -1),
        ("VERDICT: 0 - cannot be told.", 0),
        ("VERDICT: −1 — wrong tool", -1),
        ("**Final verdict:** 1", 1),
        ("VERDICT: 1\nOn second thoughts\nVERDICT: -1", -1),
    ],
)
def test_the_last_verdict_counts(answer: str, vote: int) -> None:
    assert read_vote(answer) == vote


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "It is good.",
        "VERDICT: 2",
        "My VERDICT: is not 1 but",
        "VERDICT: ~1",
        "VERDICT: .1",
        "VERDICT: \N{NOT EQUAL TO}1",
        "VERDICT: 1 or -1",
        "VERDICT: 1, 0 or -1",
        "VERDICT: 1 (or rather 0)",
        "VERDICT: 1 - 1",
        "VERDICT: 1-1",
        "VERDICT: 1 good",
        "No verdict: 1",
        "VERDICT: --1",
        "VERDICT:\n1",
    ],
)
def test_an_answer_without_verdict_is_an_error(answer: str) -> None:
    with pytest.raises(JudgeError, match="no line VERDICT"):
        read_vote(answer)


@pytest.mark.parametrize(
    ("votes", "value"),
    [
        ((1, 1, -1), 1),
        ((-1, -1, 1), -1),
        ((1, -1, 0), 0),
        ((1, 0, 0), 0),
        ((-1, 0, 0), 0),
        ((1, 1, 0), 1),
        ((1, 1, -1, 0), 1),
        ((1, 1, 0, 0, -1), 0),
        ((0, 0, 0), 0),
        ((1, -1), 0),
    ],
)
def test_the_majority_is_the_verdict_and_a_tie_is_0(votes: tuple[int, ...], value: int) -> None:
    assert Verdict(votes).value == value


def two_steps() -> list[Step]:
    call = ToolCall(id="c", name="search", arguments='{"q": 1}')
    tool = Message(turn_id="t", role=Role.TOOL, content="nothing", event_time=2)
    return [
        reply("a1", context=(said("u1", "Where is Rome?"),), tool_calls=(call,), reply=""),
        reply("a2", context=(tool,), reply="In Italy."),
    ]


def test_each_reply_is_asked_about_with_what_was_said_before_it() -> None:
    first, second = questions(segment(two_steps()), RUBRIC, SETTINGS)
    assert first.transcript == 'USER: Where is Rome?\n\nREPLY: [calls search with {"q": 1}]'
    assert second.transcript == (
        'USER: Where is Rome?\n\nASSISTANT: [calls search with {"q": 1}]\n\n'
        "TOOL: nothing\n\nREPLY: In Italy."
    )
    system, user = messages(RUBRIC, second)
    assert (system["content"], user["content"]) == ("Judge it.", second.transcript)


def test_a_reply_that_was_judged_is_not_asked_about_again() -> None:
    done = feedback("j1", FeedbackKind.JUDGEMENT, 1.0)
    failed = feedback("j2", FeedbackKind.JUDGEMENT)
    steps = [reply("a1", done), reply("a2", failed), reply("a3")]
    assert [q.turn_id for q in questions(segment(steps), RUBRIC, SETTINGS)] == ["a3"]


def test_the_key_follows_all_that_the_answer_depends_on_and_nothing_else() -> None:
    def key(rubric: Rubric = RUBRIC, text: str = "x", revision: int = 0, **more: object) -> str:
        made = segment([reply("a1", reply=text)], revision=revision, closed_at=1_000 + revision)
        settings = SETTINGS.model_copy(update=dict(more))
        return questions(made, rubric, settings)[0].key

    assert key() == key(revision=3, timeout_ms=5, concurrency=1)
    others = {key(Rubric("y", "other")), key(text="y"), key(model="n"), key(votes=5)}
    assert len(others | {key()}) == 5


def test_equal_votes_make_an_equal_event_for_every_revision() -> None:
    one = segment([reply("a1")])
    later = segment([reply("a1")], revision=2, closed_at=one.closed_at + 5)
    (question,) = questions(one, RUBRIC, SETTINGS)
    event = judgement(one, question, Verdict((1, 1, -1)), SETTINGS)
    assert judgement(later, question, Verdict((1, 1, -1)), SETTINGS) == event
    assert (event.kind, event.value, event.turn_id) == (FeedbackKind.JUDGEMENT, 1.0, "a1")
    assert event.text == "2 of 3 votes good, 1 bad"
    assert event.attributes == {"judge": "m", "votes": "1,1,-1"}
    assert event.event_time == one.first_closed_at
    failed = failure(one, question, "timeout", SETTINGS)
    assert (failed.value, failed.text) == (None, "timeout")
    assert failed.event_id != event.event_id


def test_the_shipped_rubric_asks_for_what_is_read(tmp_path: Path) -> None:
    rubric = read_rubric(None)
    assert [read_vote(f"VERDICT: {n}") for n in (1, 0, -1) if f"VERDICT: {n}" in rubric.text] == [
        1,
        0,
        -1,
    ]
    other = tmp_path / "rubric.md"
    other.write_text("Be strict. End with VERDICT: 1, 0 or -1.", encoding="utf-8")
    assert read_rubric(other).digest != rubric.digest


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (" \n", "is empty"),
        ("Be strict.", "must ask for a last line VERDICT"),
        (None, "cannot read"),
    ],
)
def test_a_rubric_that_no_judge_can_go_by_is_refused(
    tmp_path: Path, text: str | None, says: str
) -> None:
    path = tmp_path / "rubric.md"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError, match=rf"judge\.rubric: .*{says}"):
        read_rubric(path)


def test_only_the_newest_revision_is_judged() -> None:
    old, new = segment(revision=0), segment(revision=1)
    other = segment(segment_id="s2")
    assert newest_of([new, other, old]) == (new, other)
