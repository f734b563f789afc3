"""Preferences and demonstrations, from segments to lines, and into TRL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streams.archive.columns import Row
from streams.archive.store import LocalStore
from streams.cli import main
from streams.contracts import (
    AttributedBy,
    BranchReply,
    EncryptionEnvelope,
    FeedbackKind,
    FeedbackWeight,
    Message,
    Role,
    ScoredSegment,
    Step,
    StepFeedback,
    StepReward,
    ToolCall,
)
from streams.export.examples import (
    Example,
    Found,
    Rules,
    Skipped,
    demonstrations,
    preferences,
)
from streams.export.sources import Latest, Wanted
from streams.topics import SCORED
from tests.archives import CODEC, NOON_MS, scored, write_file

ROOT = Path(__file__).parents[4]


def thumb(
    value: float | None,
    event_id: str = "f",
    kind: FeedbackKind = FeedbackKind.THUMB,
    user_id: str | None = None,
    **attributes: str,
) -> StepFeedback:
    return StepFeedback(
        event_id=event_id,
        kind=kind,
        event_time=NOON_MS,
        delay_ms=0,
        attributed_by=AttributedBy.TURN_ID,
        source="test",
        value=value,
        user_id=user_id,
        attributes=attributes,
    )


def other(reply: str = "other", *feedback: StepFeedback) -> BranchReply:
    return BranchReply(turn_id="b", reply=reply, event_time=NOON_MS, feedback=feedback)


def one(
    *alternatives: BranchReply,
    feedback: tuple[StepFeedback, ...] = (),
    reward: float = 0.0,
    weighed: tuple[FeedbackWeight, ...] = (),
    credibility: float = 1.0,
    **changes: Any,
) -> ScoredSegment:
    """A segment of one step with these alternatives."""
    base = scored(1)
    step = replace(base.segment.steps[0], feedback=feedback, alternatives=alternatives, **changes)
    return replace(
        base,
        segment=replace(base.segment, steps=(step,)),
        rewards=(
            StepReward(
                turn_id=step.turn_id, reward=reward, weighed=weighed, credibility=credibility
            ),
        ),
    )


def only(found: Iterator[Found]) -> Found:
    (item,) = found
    return item


def decided(case: ScoredSegment, rules: Rules | None = None) -> str | None:
    """Which reply was chosen, or nothing."""
    found = only(preferences(case, rules or Rules()))
    if isinstance(found, Skipped):
        assert found.why == "undecided"
        return None
    chosen, rejected = found.content["chosen"][0], found.content["rejected"][0]
    assert chosen["role"] == rejected["role"] == "assistant"
    assert {chosen["content"], rejected["content"]} == {"answer 1", "other"}
    return str(chosen["content"])


OURS, THEIRS = "answer 1", "other"
UP, DOWN = thumb(1.0, "up"), thumb(-1.0, "down")


@pytest.mark.parametrize(
    ("ours", "theirs", "reward", "chosen"),
    [
        # Nobody rated: what the user went on with, unless it went badly.
        ((), (), 0.0, OURS),
        ((), (), 0.4, OURS),
        ((), (), -0.1, None),
        # One was rated.
        ((UP,), (), 0.0, OURS),
        ((DOWN,), (), -0.4, None),
        ((), (DOWN,), 0.0, OURS),
        ((), (DOWN,), -0.4, None),
        ((), (UP,), 0.0, None),
        ((), (UP,), -0.4, THEIRS),
        # Both were.
        ((UP,), (DOWN,), 0.4, OURS),
        ((DOWN,), (UP,), -0.4, THEIRS),
        ((UP,), (UP,), 0.4, None),
    ],
)
def test_ratings_and_regenerations_decide(
    ours: tuple[StepFeedback, ...],
    theirs: tuple[StepFeedback, ...],
    reward: float,
    chosen: str | None,
) -> None:
    assert decided(one(other("other", *theirs), feedback=ours, reward=reward)) == chosen


def test_a_rating_that_was_not_believed_does_not_count() -> None:
    doubted = (FeedbackWeight(event_id="down", weight=0.4, filter="row", reason="three in a row"),)
    case = one(other("other", UP), feedback=(DOWN,), weighed=doubted, reward=0.0)
    assert decided(case) is None
    assert decided(case, Rules(min_credibility=0.4)) == THEIRS


def test_a_rating_of_an_alternative_may_be_doubted_too() -> None:
    doubted = (FeedbackWeight(event_id="up", weight=0.0, filter="flood", reason="held"),)
    assert decided(one(other("other", UP), weighed=doubted, reward=0.0)) == OURS


def test_small_differences_can_be_left_out() -> None:
    stars = FeedbackKind.RATING
    ours = thumb(4.0, "r", stars, scale_min="1", scale_max="5")
    theirs = thumb(3.0, "s", stars, scale_min="1", scale_max="5")
    case = one(other("other", theirs), feedback=(ours,))
    assert decided(case) == OURS
    assert decided(case, Rules(min_margin=0.5)) is None


@pytest.mark.parametrize(
    "unreadable",
    [
        thumb(None),
        thumb(0.0),
        thumb(float("nan")),
        thumb(3.0, kind=FeedbackKind.RATING),
        thumb(3.0, kind=FeedbackKind.RATING, scale_min="one"),
        thumb(3.0, kind=FeedbackKind.RATING, scale_min="5", scale_max="1"),
        thumb(1.0, kind=FeedbackKind.DWELL),
    ],
)
def test_what_is_no_rating_decides_nothing(unreadable: StepFeedback) -> None:
    assert decided(one(other("other", unreadable), reward=-0.4)) is None


def test_the_latest_rating_of_each_rater_counts() -> None:
    changed = (thumb(1.0, "1", user_id="u"), thumb(-1.0, "2", user_id="u"))
    others = (*changed, thumb(1.0, "3", user_id="v"), thumb(1.0, "4", user_id="w"))
    assert decided(one(other("other", *changed), reward=-0.4)) is None
    assert decided(one(other("other", *others), reward=-0.4)) == THEIRS


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (one(other("answer 1")), "same reply"),
        (one(other(" ")), "empty reply"),
        (one(other(), reply=""), "empty reply"),
        (one(other(), finish_reason="client_disconnected"), "unfinished reply"),
        (one(other(), finish_reason="length"), "unfinished reply"),
        (one(other(), context=()), "no question"),
        (one(other(), tool_calls=(ToolCall(id="c", name="n", arguments="{}"),)), "tool call"),
    ],
)
def test_what_teaches_nothing_is_left_out(case: ScoredSegment, why: str) -> None:
    assert only(preferences(case, Rules())) == Skipped(why=why)


def test_encrypted_content_is_no_content() -> None:
    case = one(other(), reward=1.0)
    envelope = EncryptionEnvelope(key_id="k", algorithm="a", nonce=b"", ciphertext=b"")
    hidden = replace(case, segment=replace(case.segment, encryption=envelope))
    assert list(preferences(hidden, Rules())) == []
    assert list(demonstrations(hidden, Rules())) == []


def test_a_prompt_is_all_that_was_said_before() -> None:
    base = scored(1)
    call = ToolCall(id="c1", name="weather", arguments='{"city": "Bern"}')
    system = message("sys", Role.SYSTEM, "Be brief.")
    asked = message("q1", Role.USER, "Weather in Bern?")
    result = message("r1", Role.TOOL, "Sunny", tool_call_id="c1")
    steps = (
        Step(turn_id="a1", reply="", event_time=0, context=(system, asked), tool_calls=(call,)),
        Step(turn_id="a2", reply="It is sunny.", event_time=0, context=(result,)),
    )
    rewards = tuple(StepReward(turn_id=step.turn_id, reward=0.5) for step in steps)
    case = replace(base, segment=replace(base.segment, steps=steps), rewards=rewards)
    first, second = demonstrations(case, Rules())
    assert isinstance(first, Example)
    assert isinstance(second, Example)
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
            }
        ],
    }
    before = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Bern?"},
    ]
    assert first.content["prompt"] == before
    assert first.content["completion"] == [called]
    answer = {"role": "tool", "content": "Sunny", "tool_call_id": "c1"}
    assert second.content["prompt"] == [*before, called, answer]
    assert second.content["completion"] == [{"role": "assistant", "content": "It is sunny."}]
    assert second.content["source"]["turn"] == "a2"


def message(turn_id: str, role: Role, content: str, **changes: Any) -> Message:
    return Message(turn_id=turn_id, role=role, content=content, event_time=NOON_MS, **changes)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (one(reward=0.29), "reward"),
        (one(reward=0.9, credibility=0.4), "credibility"),
        (one(reward=0.9, finish_reason="length"), "unfinished reply"),
        (one(reward=0.9, reply="\n"), "empty reply"),
        (one(reward=0.9, context=()), "no question"),
        (
            one(reward=0.9, context=(message("x", Role.UNKNOWN, "?"),)),
            "no question",
        ),
    ],
)
def test_what_is_no_example_to_follow_is_left_out(case: ScoredSegment, why: str) -> None:
    assert only(demonstrations(case, Rules())) == Skipped(why=why)


@dataclass(frozen=True)
class Log:
    """Segments at places, read as often as asked."""

    segments: tuple[ScoredSegment, ...]

    def __call__(self) -> Iterator[tuple[tuple[int, int], ScoredSegment]]:
        return iter([((0, offset), s) for offset, s in enumerate(self.segments)])


def revised(number: int, revision: int, **changes: Any) -> ScoredSegment:
    base = scored(number)
    return replace(base, segment=replace(base.segment, revision=revision, **changes))


def test_the_newest_of_each_segment_counts() -> None:
    again = replace(revised(2, 1), formula_id="later")
    log = Log((revised(1, 0), revised(2, 1), revised(1, 2), revised(1, 1), again))
    latest = Latest.of(log, Wanted(policy="default"))
    found = [(s.segment.segment_id, s.segment.revision, s.formula_id) for s in latest.segments(log)]
    assert found == [("g1", 2, "composite-1"), ("g2", 1, "later")]


def test_a_policy_and_a_time_are_chosen() -> None:
    log = Log(
        (
            revised(1, 0, first_closed_at=10),
            revised(2, 0, first_closed_at=20),
            revised(3, 0, first_closed_at=20, policy="tutor"),
            revised(4, 0, first_closed_at=30),
        )
    )

    def found(**conditions: Any) -> list[str]:
        latest = Latest.of(log, Wanted(**({"policy": "default"} | conditions)))
        return [s.segment.segment_id for s in latest.segments(log)]

    assert found() == ["g1", "g2", "g4"]
    assert found(since_ms=20, until_ms=30) == ["g2"]
    assert found(policy="tutor") == ["g3"]


# From an archive, by the command line


def archive_of(folder: Path, *segments: ScoredSegment) -> str:
    found = [
        Row(topic=SCORED, partition=0, offset=n, timestamp=NOON_MS, value=CODEC.encode(segment))
        for n, segment in enumerate(segments)
    ]
    write_file(LocalStore(folder / "archive"), found, expected=ScoredSegment)
    return str(folder / "archive")


def call(*arguments: str) -> int:
    try:
        return main(["export", *arguments])
    except SystemExit as end:
        return int(end.code or 0)


def many() -> list[ScoredSegment]:
    """Segments with two alternatives each, the replies well received."""
    made = []
    for number in range(4):
        base = scored(number)
        step = replace(
            base.segment.steps[0],
            alternatives=(other(f"worse {number}", DOWN), other(f"worst {number}")),
        )
        reward = StepReward(turn_id=step.turn_id, reward=0.5)
        segment = replace(base.segment, steps=(step,))
        made.append(replace(base, segment=segment, rewards=(reward,)))
    return made


@pytest.mark.timeout(600)
def test_files_that_trl_trains_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = many()[1]
    copy = replace(second, segment=replace(second.segment, segment_id="copy"))
    archive = archive_of(tmp_path, *many(), copy)
    pairs, replies = tmp_path / "pairs.jsonl", tmp_path / "replies.jsonl"
    assert call("preferences", "--archive", archive, "--out", str(pairs), "--json") == 0
    counts = json.loads(capsys.readouterr().out)
    # The replies of two segments have their thumbs down.
    assert (counts["written"], counts["segments"]) == (4, 5)
    assert counts["skipped"] == {"same example": 2, "undecided": 4}
    assert call("sft", "--archive", archive, "--out", str(replies), "--json") == 0
    assert json.loads(capsys.readouterr().out)["written"] == 4

    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.unit.streams.export.trl_trains",
            str(pairs),
            str(replies),
            str(tmp_path / "trl"),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=550,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["preferences"]["rows"], found["demonstrations"]["rows"]) == (4, 4)
    for made in found.values():
        assert made["conversational"]
        assert made["loss"] > 0
        for text in made["texts"]:
            assert "<|im_start|>user\nquestion" in text
            assert "<|im_start|>assistant\n" in text


def test_standard_output_holds_the_lines_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = archive_of(tmp_path, *many())
    assert call("sft", "--archive", archive, "--out", "-", "--json") == 0
    said = capsys.readouterr()
    assert [json.loads(line)["completion"][0]["content"] for line in said.out.splitlines()] == [
        f"answer {n}" for n in range(4)
    ]
    assert "4 examples of 4 segments (left out: none)" in said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sft", "--min-reward", "0.9"], "left out were 4 for reward; nothing was written"),
        (["sft", "--policy", "tutor"], "there is no scored segment of policy tutor"),
        (["sft", "--until", "2001-01-01"], "there is no scored segment of policy default"),
    ],
)
def test_nothing_to_export_is_an_error_and_no_file(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    archive = archive_of(tmp_path, *many())
    out = tmp_path / "out.jsonl"
    assert call(*arguments, "--archive", archive, "--out", str(out)) == 1
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--since", "soon"], 2, "'soon' is no time"),
        (["--archive", "nowhere"], 1, "there is no topic trajectory.scored in the archive"),
        (["--archive", "gopher://x"], 1, "cannot use gopher://x"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    out = str(tmp_path / "out.jsonl")
    assert call("preferences", "--archive", str(tmp_path), "--out", out, *arguments) == code
    assert message in capsys.readouterr().err
