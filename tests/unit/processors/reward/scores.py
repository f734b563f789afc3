"""What a fixed set of conversations scores, as a digest: it belongs to the formula's name.

``python -m tests.unit.processors.reward.scores --write`` notes what the formula of now gives.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

from processors.reward.formulas import FORMULA_ID, score_segment
from processors.reward.machine import EmitReview, EmitScored, RewardState, step
from streams.contracts import FeedbackKind, StepFeedback, StepReward, TrajectorySegment
from streams.settings import RewardSettings
from tests.unit.processors.reward import labelled
from tests.unit.processors.reward.builders import HOUR_MS, feedback, reply, said, segment

FILE = Path(__file__).with_name("scores.json")
SETTINGS = (
    RewardSettings(),
    RewardSettings(learned_signals=False, renormalise=True, weight_judge=0.3),
    RewardSettings(process_continued=0.1, process_details=0.2, weight_diversity=0.5),
)
EARNING = tuple(kind for kind in FeedbackKind if kind is not FeedbackKind.UNKNOWN)
RECORDS = 600


def conversations() -> Iterator[TrajectorySegment]:
    """Users' words of the labelled cases, each after a reply."""
    for file in (labelled.FILE, labelled.REPLIED, labelled.TUNING):
        for case in labelled.load(file):
            asked = (said("u0", case.earlier or "What is it?"),)
            answer = case.reply or "An answer."
            yield segment(
                [reply("a0", reply=answer, context=asked, next_user_turn=said("u1", case.text, 10))]
            )


def log() -> Iterator[TrajectorySegment]:
    """Records of some users who rate, again and again, alone and together."""
    chance = random.Random(11)
    for number in range(RECORDS):
        user = chance.randrange(12)
        steps = [
            reply(
                f"a{number}-{n}",
                *(_given(chance, f"{number}-{n}-{i}") for i in range(chance.randrange(4))),
                reply=chance.choice(("Yes.", "one two three four five six seven eight", f"{n} x")),
            )
            for n in range(1 + chance.randrange(3))
        ]
        yield segment(
            steps,
            segment_id=f"s{number if chance.random() < 0.8 else number // 2}",
            revision=number,
            session_id=f"session-{user}",
            user_id=f"u{user}",
            closed_at=HOUR_MS * (100 + number // 20),
        )


def loud() -> Iterator[TrajectorySegment]:
    """A user who copies, corrects and buys all the time, among some who do so now and then."""
    kinds = (FeedbackKind.COPY, FeedbackKind.CORRECTION, FeedbackKind.OUTCOME)
    for number in range(96):
        user = "loud" if number >= 6 else f"u{number}"
        given = [
            feedback(f"{kind.value}-{number}", kind, 1.0, event_time=60_000 * number)
            for kind in kinds
        ]
        yield segment(
            [reply(f"a-loud-{number}", *given)],
            segment_id=f"loud-{number}",
            session_id=f"session-{user}",
            user_id=user,
            closed_at=HOUR_MS * 200 + 60_000 * number,
        )


def _given(chance: random.Random, name: str) -> StepFeedback:
    usual = (FeedbackKind.THUMB, FeedbackKind.RATING)
    kind = chance.choice(EARNING if chance.random() < 0.4 else usual)
    value = chance.choice((-1.0, -1.0, -0.3, 0.0, 0.5, 1.0, None))
    return feedback(
        name,
        kind,
        value,
        event_time=chance.randrange(60_000),
        text=chance.choice((None, "Not at all what I had asked for")),
    )


def digest() -> str:
    """SHA-256 of what all of it scores, reasons included."""
    found = hashlib.sha256()

    def note(rewards: tuple[StepReward, ...]) -> None:
        # Numbers only as far as every machine computes them alike.
        parts = [(r.turn_id, f"{r.reward:.9f}", f"{r.credibility:.9f}", r.reasons) for r in rewards]
        found.update(json.dumps([*parts, [r.directives for r in rewards]]).encode())

    for item in conversations():
        for settings in SETTINGS:
            note(score_segment(item, settings).rewards)
    for settings in SETTINGS:
        state = RewardState()
        for item in (*log(), *loud()):
            state, effects = step(state, item, settings)
            for effect in effects:
                if isinstance(effect, EmitScored):
                    note(effect.scored.rewards)
                elif isinstance(effect, EmitReview):
                    found.update(msgspec.json.encode(effect.review))
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    now = {"formula_id": FORMULA_ID, "digest": digest()}
    if parser.parse_args().write:
        FILE.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(now))


if __name__ == "__main__":
    main()
