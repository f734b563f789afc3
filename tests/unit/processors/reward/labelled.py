"""The labelled cases of the text signals, their two halves, and how well the rules do on each.

``python -m tests.unit.processors.reward.labelled`` prints the table; ``--misses tuning`` lists
what the rules get wrong in that half. Rules are changed by what the tuning half shows alone.
``--file FILE`` prints how well other cases are read, with what was learned and by rules alone.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from processors.reward.repetition import repeats
from processors.reward.signals import Signal, find, tool_error
from streams.settings import RewardSettings

FILE = Path(__file__).with_name("labelled.tsv")
LATER = FILE.with_name("later.tsv")
LAST = FILE.with_name("last.tsv")
REPLIED = FILE.with_name("replied.tsv")
UNSEEN = FILE.with_name("unseen.tsv")
FINAL = FILE.with_name("final.tsv")
TUNING = FILE.with_name("tuning.tsv")
CHECKING = FILE.with_name("checking.tsv")
OTHER_HANDS = tuple(
    FILE.with_name(f"{name}.tsv") for name in ("implied", "logs", "daily", "home", "work")
)
"""Of seven more writers, by whom no rule was changed."""

APART = FILE.with_name("apart.tsv")
"""What nothing is tuned on: how well turns are read that nobody has seen."""

UNREAD = FILE.with_name("unread.tsv")
"""What nothing is tuned on either, of two writers; harder, for most say it by implication."""

LINE_BREAK = "⏎"
REPORTED = (
    Signal.REPETITION,
    Signal.CORRECTION,
    Signal.CONFIRMATION,
    Signal.DIRECTIVE,
    Signal.TOOL_ERROR,
)


@dataclass(frozen=True)
class Case:
    """One text with the signals it gives."""

    language: str
    role: str
    signals: frozenset[Signal]
    text: str
    earlier: str | None
    reply: str | None

    @property
    def held_out(self) -> bool:
        """Whether it is in the half that the rules were not tuned on: by its text's digest."""
        return hashlib.sha256(self.text.encode()).digest()[0] % 2 == 1


@dataclass(frozen=True)
class Score:
    """How often one signal was found rightly, wrongly, and not at all."""

    signal: Signal
    right: int
    wrong: int
    missed: int

    @property
    def precision(self) -> float:
        return self.right / max(1, self.right + self.wrong)

    @property
    def recall(self) -> float:
        return self.right / max(1, self.right + self.missed)


def load(file: Path = FILE) -> list[Case]:
    """All cases of a file, in its order."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [_case(line) for line in lines if line and not line.startswith("#")]


def _case(line: str) -> Case:
    language, role, names, text, *before = line.split("\t")
    signals = frozenset(Signal(name) for name in names.split(",") if name != "-")
    earlier, reply, *_ = (*(words or None for words in before), None, None)
    return Case(language, role, signals, text.replace(LINE_BREAK, "\n"), earlier, reply)


def found(case: Case, *, learn: bool = True) -> frozenset[Signal]:
    """The signals that are found in ``case``, of those that are reported.

    Args:
        case: The case.
        learn: Whether the learned models are asked, which may know the case; rules alone if not.
    """
    if case.role == "tool":
        return frozenset() if tool_error(case.text) is None else frozenset({Signal.TOOL_ERROR})
    signals = {match.signal for match in find(case.text, case.reply or "", learn=learn)}
    threshold = RewardSettings().repetition_similarity
    if case.earlier is not None and repeats(case.text, [case.earlier], threshold) is not None:
        signals.add(Signal.REPETITION)
    return frozenset(signals) & frozenset(REPORTED)


def scores(cases: Iterable[Case], *, learn: bool = True) -> list[Score]:
    """How well ``cases`` are read, signal by signal."""
    pairs = [(case.signals, found(case, learn=learn)) for case in cases]
    return [
        Score(
            signal,
            right=sum(signal in wanted and signal in got for wanted, got in pairs),
            wrong=sum(signal not in wanted and signal in got for wanted, got in pairs),
            missed=sum(signal in wanted and signal not in got for wanted, got in pairs),
        )
        for signal in REPORTED
    ]


def table(cases: Iterable[Case], *, learn: bool = True) -> str:
    """``scores`` as a Markdown table."""
    rows = [
        f"| {s.signal.value} | {s.right + s.missed} | {s.precision:.2f} | {s.recall:.2f} |"
        for s in scores(cases, learn=learn)
    ]
    head = ["| signal | cases | precision | recall |", "|---|--:|--:|--:|"]
    return "\n".join([*head, *rows]) + "\n"


def main() -> None:
    """Print how well the rules do on each half."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--misses", choices=["tuning", "held-out"])
    parser.add_argument("--file", type=Path)
    given = parser.parse_args()
    if given.file is not None:
        cases = load(given.file)
        print(f"{len(cases)} cases\n\n{table(cases)}\nrules alone\n\n{table(cases, learn=False)}")
        return
    wanted = given.misses
    for name, held_out in (("tuning", False), ("held-out", True)):
        half = [case for case in load() if case.held_out is held_out]
        print(f"{name}: {len(half)} cases\n\n{table(half, learn=False)}")
        for language in ("en", "zh"):
            of_language = [case for case in half if case.language == language]
            print(f"{name}, {language}\n\n{table(of_language, learn=False)}")
        for case in half if wanted == name else ():
            got = found(case, learn=False)
            if got != case.signals:
                print(f"{sorted(case.signals)} found {sorted(got)}: {case.text!r}")
    for file in (LATER, LAST, REPLIED, UNSEEN, FINAL):
        cases = load(file)
        print(f"{file.stem}: {len(cases)} cases\n\n{table(cases, learn=False)}")


if __name__ == "__main__":
    main()
