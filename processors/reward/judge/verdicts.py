"""What a judge is asked about a reply, and what becomes of its votes. Pure.

A verdict is -1, 0 or 1: what most of ``votes`` answers say, 0 if no answer has more. It travels as
feedback of kind ``judgement`` on the reply, through the aligner like any other feedback, so that
it stands in the log before it counts and a replay needs no judge (docs/decisions/0008).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from streams.contracts import FeedbackEvent, FeedbackKind, Message, Step, TrajectorySegment
from streams.errors import JudgeError, SettingsError
from streams.settings import JudgeSettings

SOURCE = "clawstream-judge"
MODEL_ATTRIBUTE = "judge"
"""Attribute of a judgement: the model, or the plugin, that judged."""

VOTES_ATTRIBUTE = "votes"
"""Attribute of a judgement: its votes, with commas between them."""

MAX_TURN_CHARS = 8_000
"""How much of a turn a judge is shown: its beginning."""

_AROUND = " \t\r*_`\"'“”$\\(){}<>[]"
"""What models put around a word or a number. No sign is among it, lest a -1 be read as a 1."""

_MINUS = "\\-\N{MINUS SIGN}\N{HYPHEN}\N{EN DASH}\N{EM DASH}\N{FULLWIDTH HYPHEN-MINUS}"
_NUMBER = re.compile(
    rf"(?P<sign>[+{_MINUS}]?) ?(?P<number>[01])"
    # What it means, or why, in words: with another number in it nobody knows which is meant.
    rf"(?:[*_`]*\s+(?:[(\N{{FULLWIDTH LEFT PARENTHESIS}}]|[{_MINUS}]\s)\D*)?"
)
_VERDICT = re.compile(r"(?:(?:my|the|final|overall)\s+)*verdict", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Rubric:
    """What the judge goes by, and its digest: another rubric is another judge."""

    text: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One reply to judge.

    Args:
        turn_id: The reply.
        transcript: The conversation up to it, and the reply.
        key: Digest of all that the answer depends on: rubric, judge, number of votes, transcript.
    """

    turn_id: str
    transcript: str
    key: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judge's votes, each -1, 0 or 1."""

    votes: tuple[int, ...]

    @property
    def value(self) -> int:
        """The vote given more often than either other one; 0 for a tie.

        One "good" beside two that cannot tell is no verdict in favour of a reply.
        """
        counts = Counter(self.votes).most_common(2)
        if len(counts) > 1 and counts[0][1] == counts[1][1]:
            return 0
        return counts[0][0]


def read_rubric(path: Path | None) -> Rubric:
    """The rubric in a file; the one that is shipped if ``path`` is None.

    Raises:
        SettingsError: It cannot be read, is empty or asks for no verdict.
    """
    source = path or Path(__file__).with_name("rubric.md")
    try:
        text = source.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"judge.rubric: cannot read {source}: {error}") from error
    if not text:
        raise SettingsError(f"judge.rubric: {source} is empty")
    if "verdict:" not in text.lower():
        raise SettingsError(
            f"judge.rubric: {source} must ask for a last line VERDICT: 1, 0 or -1, or no answer "
            "could be read"
        )
    return Rubric(text, hashlib.sha256(text.encode()).hexdigest())


def judge_name(settings: JudgeSettings) -> str:
    """Who judges: the plugin, else the model."""
    return f"plugin {settings.plugin}" if settings.plugin else settings.model


def questions(
    segment: TrajectorySegment, rubric: Rubric, settings: JudgeSettings
) -> tuple[Question, ...]:
    """The replies of ``segment`` that nobody has judged yet.

    A reply that has a judgement, also one without a verdict, is not asked about again: its own
    judgement makes a revision, which would be judged for ever.
    """
    said: list[str] = []
    found: list[Question] = []
    for step in segment.steps:
        said += [_line(message) for message in step.context]
        if not any(item.kind is FeedbackKind.JUDGEMENT for item in step.feedback):
            transcript = "\n\n".join((*said, f"REPLY: {_reply(step)}"))
            key = _digest(rubric.digest, judge_name(settings), settings.votes, transcript)
            found.append(Question(turn_id=step.turn_id, transcript=transcript, key=key))
        said.append(f"ASSISTANT: {_reply(step)}")
    return tuple(found)


def _line(message: Message) -> str:
    return f"{message.role.value.upper()}: {message.content[:MAX_TURN_CHARS]}"


def _reply(step: Step) -> str:
    calls = [f"[calls {call.name} with {call.arguments}]" for call in step.tool_calls or ()]
    return "\n".join([step.reply[:MAX_TURN_CHARS], *calls]).strip()


def read_vote(answer: str) -> int:
    """The vote in a judge's answer: its last line that is a verdict.

    Raises:
        JudgeError: There is none.
    """
    for line in reversed(answer.splitlines()):
        vote = _vote(line)
        if vote is not None:
            return vote
    end = " ".join(answer.split())[-80:]
    raise JudgeError(f"the answer has no line VERDICT: 1, 0 or -1; it ends: {end!r}")


def _vote(line: str) -> int | None:
    word, _, number = line.replace("\N{FULLWIDTH COLON}", ":").partition(":")
    if _VERDICT.fullmatch(word.strip(_AROUND + "#|-")) is None:
        return None
    found = _NUMBER.fullmatch(number.lstrip(_AROUND).rstrip(_AROUND + ".!。"))
    if found is None:
        return None
    return int(found["number"]) * (1 if found["sign"] in ("", "+") else -1)


def judgement(
    segment: TrajectorySegment, question: Question, verdict: Verdict, settings: JudgeSettings
) -> FeedbackEvent:
    """The feedback that says what the judge found; equal votes make an equal event."""
    votes = ",".join(map(str, verdict.votes))
    up, down = verdict.votes.count(1), verdict.votes.count(-1)
    return _event(
        segment,
        question,
        settings,
        value=float(verdict.value),
        text=f"{up} of {len(verdict.votes)} votes good, {down} bad",
        identity="verdict",
        more={VOTES_ATTRIBUTE: votes},
    )


def failure(
    segment: TrajectorySegment, question: Question, reason: str, settings: JudgeSettings
) -> FeedbackEvent:
    """The feedback that says why there is no verdict."""
    return _event(
        segment, question, settings, value=None, text=reason, identity=f"failed {reason}", more={}
    )


def _event(
    segment: TrajectorySegment,
    question: Question,
    settings: JudgeSettings,
    *,
    value: float | None,
    text: str,
    identity: str,
    more: dict[str, str],
) -> FeedbackEvent:
    name = _digest(segment.policy, segment.session_id, question.turn_id, question.key, identity)
    return FeedbackEvent(
        event_id=f"judgement-{name[:24]}",
        session_id=segment.session_id,
        turn_id=question.turn_id,
        policy=segment.policy,
        # Of all revisions the same, so that asking again about a later one changes nothing.
        event_time=segment.first_closed_at,
        kind=FeedbackKind.JUDGEMENT,
        source=SOURCE,
        value=value,
        text=text,
        attributes={MODEL_ATTRIBUTE: judge_name(settings), **more},
    )


def messages(rubric: Rubric, question: Question) -> tuple[dict[str, str], ...]:
    """The question as chat messages."""
    return (
        {"role": "system", "content": rubric.text},
        {"role": "user", "content": question.transcript},
    )


def prompt(rubric: Rubric, question: Question) -> str:
    """The question as one text."""
    return f"{rubric.text}\n\n{question.transcript}"


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()


def newest_of(segments: Iterable[TrajectorySegment]) -> Sequence[TrajectorySegment]:
    """The highest revision of each segment, in the order in which they first came."""
    found: dict[str, TrajectorySegment] = {}
    for segment in segments:
        known = found.get(segment.segment_id)
        if known is None or known.revision <= segment.revision:
            found[segment.segment_id] = segment
    return tuple(found.values())


__all__ = [
    "Question",
    "Rubric",
    "Verdict",
    "failure",
    "judge_name",
    "judgement",
    "messages",
    "newest_of",
    "prompt",
    "questions",
    "read_rubric",
    "read_vote",
]
