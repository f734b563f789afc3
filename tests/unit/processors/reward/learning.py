"""Learns the signals from the labelled cases, and says how well that does on cases left out.

``python -m tests.unit.processors.reward.learning`` prints the table; with ``--write`` it also
writes ``processors/reward/learned.json``.

A linear support vector machine with squared hinge loss, L2 penalty and the cost ``COST`` for each
case, by coordinate descent in the dual (Hsieh et al., "A dual coordinate descent method for
large-scale linear SVM", ICML 2008). Only sums and products of doubles in a fixed order, so that
every machine makes the same file.
"""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from processors.reward import learned, rules
from processors.reward.contrast import corrects
from processors.reward.features import MAX_CHARS, features
from processors.reward.learned import SCALE, SIGNALS, STATED, Language, Model
from processors.reward.signals import Signal, by_rules, normalise
from tests.unit.processors.reward import labelled
from tests.unit.processors.reward.labelled import Case, load

TARGET = Path(rules.__file__).with_name(learned.FILE)
WRITTEN = labelled.FILE.with_name("written.tsv")
FILES = (
    labelled.FILE,
    labelled.LATER,
    labelled.LAST,
    labelled.REPLIED,
    labelled.UNSEEN,
    labelled.FINAL,
    labelled.TUNING,
    labelled.CHECKING,
    WRITTEN,
)
APART = frozenset({labelled.TUNING.stem, labelled.CHECKING.stem})
"""Rules were not changed by these. What rules find in the others says nothing."""

CHOOSING = frozenset(file.stem for file in FILES) - {WRITTEN.stem, labelled.FILE.stem}
"""The thresholds are chosen on these: those of the others are easier, or of one hand."""

LANGUAGES = ("en", "zh")
COST = 0.03
PASSES = 20
BIAS = 2.0
LEAST_CASES = 3
"""A feature of fewer cases says nothing."""

LEAST_WEIGHT = 10
"""A feature that adds less, in thousandths, to every signal is left out of the file."""

FOLDS = 5
PRECISION = 0.9
"""What thresholds are chosen by."""


@dataclass(frozen=True)
class Example:
    """A case as it is learned from.

    Args:
        source: The name of its file.
        case: The case.
        language: Of its turn.
        features: Of its turn and reply, in order.
        added: What rules and the comparison with the reply add to the sums of signals, if it is
            among ``APART``.
    """

    source: str
    case: Case
    language: str
    features: tuple[str, ...]
    added: Mapping[Signal, int]

    @property
    def order(self) -> bytes:
        """By which examples are ordered and dealt out to folds."""
        return hashlib.sha256(f"{self.case.text}\n{self.case.reply}".encode()).digest()

    @property
    def fold(self) -> int:
        """The fold in which it is left out. Cases of one reply are left out together."""
        key = self.case.reply or self.case.text
        return hashlib.sha256(key.encode()).digest()[0] % FOLDS


def examples() -> list[Example]:
    """What is learned from, of all files, in order."""
    made = [_example(file.stem, case) for file in FILES for case in load(file)]
    return sorted((example for example in made if example is not None), key=lambda e: e.order)


def _example(source: str, case: Case) -> Example | None:
    plain = normalise(case.text)
    if case.role != "user" or not plain or len(plain) > MAX_CHARS:
        return None
    reply = case.reply or ""
    language, found = features(plain, case.text, reply)
    added = _added(plain, case.text, reply) if source in APART else {}
    return Example(source, case, language, tuple(sorted(found)), added)


def _added(plain: str, text: str, reply: str) -> dict[Signal, int]:
    found = by_rules(plain, reply)
    added = {match.signal: learned.ruled(match.quote, plain) for match in found}
    if Signal.CORRECTION not in added and reply and corrects(text, plain, reply) is not None:
        added[Signal.CORRECTION] = STATED
    return added


def digest() -> str:
    """The digest (hex) of all labelled cases."""
    together = hashlib.sha256()
    for file in FILES:
        together.update(file.read_bytes())
    return together.hexdigest()


def descend(rows: Sequence[Sequence[int]], signs: Sequence[int], width: int) -> list[float]:
    """The weights of ``width`` features, and the bias last.

    Args:
        rows: Of each case the features it has.
        signs: 1 where it gives the signal, else -1.
        width: How many features there are.
    """
    weights = [0.0] * (width + 1)
    duals = [0.0] * len(rows)
    slack = 1.0 / (2.0 * COST)
    for _ in range(PASSES):
        for place, row in enumerate(rows):
            total = weights[width] * BIAS
            for feature in row:
                total += weights[feature]
            sign, dual = signs[place], duals[place]
            gradient = sign * total - 1.0 + slack * dual
            moved = max(0.0, dual - gradient / (len(row) + BIAS * BIAS + slack))
            if moved != dual:
                step = (moved - dual) * sign
                duals[place] = moved
                for feature in row:
                    weights[feature] += step
                weights[width] += step * BIAS
    return weights


def learn(cases: Sequence[Example]) -> Language:
    """The models of the language that ``cases`` are in, with thresholds of 0."""
    counts = Counter(name for example in cases for name in example.features)
    names = sorted(name for name, count in counts.items() if count >= LEAST_CASES)
    places = {name: place for place, name in enumerate(names)}
    rows = [[places[name] for name in e.features if name in places] for e in cases]
    made = [
        descend(rows, [1 if signal in e.case.signals else -1 for e in cases], len(names))
        for signal in SIGNALS
    ]
    weights = {
        name: (_whole(made[0][n]), _whole(made[1][n]), _whole(made[2][n]))
        for n, name in enumerate(names)
    }
    return Language(
        bias=(_whole(made[0][-1] * BIAS), _whole(made[1][-1] * BIAS), _whole(made[2][-1] * BIAS)),
        threshold=(0, 0, 0),
        weights={
            name: each for name, each in weights.items() if max(map(abs, each)) >= LEAST_WEIGHT
        },
    )


def _whole(weight: float) -> int:
    return round(weight * SCALE)


def total(language: Language, example: Example, signal: Signal) -> int:
    """What the features of a case add up to, and what rules found."""
    place = SIGNALS.index(signal)
    known = (language.weights.get(name) for name in example.features)
    added = sum(weights[place] for weights in known if weights is not None)
    return language.bias[place] + added + example.added.get(signal, 0)


def left_out(cases: Sequence[Example]) -> dict[Signal, list[int]]:
    """Of each case what it adds up to by models that were learned without it."""
    folds = [learn([e for e in cases if e.fold != fold]) for fold in range(FOLDS)]
    return {signal: [total(folds[e.fold], e, signal) for e in cases] for signal in SIGNALS}


def threshold(totals: Sequence[int], gives: Sequence[bool], precision: float) -> int:
    """The least sum from which this share of those that reach it give the signal."""
    best, right = max(totals) + 1, 0
    ranked = sorted(zip(totals, gives, strict=True), reverse=True)
    for count, (value, given) in enumerate(ranked, start=1):
        right += given
        last = count == len(ranked) or ranked[count][0] < value
        if last and right >= precision * count:
            best = value
    return best


def thresholds(cases: Sequence[Example], totals: Mapping[Signal, Sequence[int]]) -> list[int]:
    """Of each signal, chosen on cases left out."""
    chosen = [place for place, example in enumerate(cases) if example.source in CHOOSING]
    return [
        threshold(
            [totals[signal][place] for place in chosen],
            [signal in cases[place].case.signals for place in chosen],
            PRECISION,
        )
        for signal in SIGNALS
    ]


def make(everything: Sequence[Example]) -> Model:
    """The model of all cases."""
    languages: dict[str, Language] = {}
    for name in LANGUAGES:
        cases = [example for example in everything if example.language == name]
        correction, directive, confirmation = thresholds(cases, left_out(cases))
        languages[name] = msgspec.structs.replace(
            learn(cases), threshold=(correction, directive, confirmation)
        )
    return Model(cases=digest(), languages=languages)


def written(model: Model) -> bytes:
    """The model as it stands in its file: one feature a line."""
    parts = [f'{{"cases":"{model.cases}","languages":{{']
    for number, (name, language) in enumerate(model.languages.items()):
        head = f'"{name}":{{"bias":{list(language.bias)},"threshold":{list(language.threshold)},'
        parts.append(("," if number else "") + head.replace(" ", "") + '"weights":{')
        lines = [
            f"{msgspec.json.encode(key).decode()}:[{each[0]},{each[1]},{each[2]}]"
            for key, each in language.weights.items()
        ]
        parts.append(",\n".join(lines) + "}}")
    return ("\n".join(parts) + "}}\n").encode()


def table(everything: Sequence[Example]) -> str:
    """Precision and recall on cases left out, by file, as a Markdown table."""
    rows = ["| file | signal | cases | precision | recall |", "|---|---|--:|--:|--:|"]
    found: dict[tuple[str, Signal], list[tuple[bool, bool]]] = {}
    for name in LANGUAGES:
        cases = [example for example in everything if example.language == name]
        totals = left_out(cases)
        for signal, least in zip(SIGNALS, thresholds(cases, totals), strict=True):
            for place, e in enumerate(cases):
                pair = signal in e.case.signals, totals[signal][place] >= least
                for key in (e.source, f"{e.source} {name}"):
                    found.setdefault((key, signal), []).append(pair)
    for (source, signal), pairs in sorted(found.items()):
        right = sum(given and got for given, got in pairs)
        wanted, got = sum(given for given, _ in pairs), sum(got for _, got in pairs)
        precision, recall = right / max(1, got), right / max(1, wanted)
        rows.append(f"| {source} | {signal.value} | {wanted} | {precision:.2f} | {recall:.2f} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Print how well it does; write the file if asked to."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--write", action="store_true")
    everything = examples()
    if parser.parse_args().write:
        TARGET.write_bytes(written(make(everything)))
    print(table(everything))


if __name__ == "__main__":
    main()
