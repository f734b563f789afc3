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
from collections.abc import Iterator, Mapping, Sequence
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
    *labelled.OTHER_HANDS,
    WRITTEN,
)
IN_A_ROW = frozenset({labelled.TUNING.stem, labelled.CHECKING.stem})
"""Here a topic goes on from case to case, each with a reply of its own; all of one writer."""

OTHER_HANDS = frozenset(file.stem for file in labelled.OTHER_HANDS)
APART = IN_A_ROW | OTHER_HANDS
"""Rules were not changed by these. What rules find in the others says nothing."""

CHOOSING = frozenset(file.stem for file in FILES) - {WRITTEN.stem, labelled.FILE.stem}
"""The thresholds are chosen on these: those of the others are easier, or of one hand."""

LANGUAGES = ("en", "zh")
COST = 0.03
PASSES = 20
BIAS = 2.0
LEAST_CASES = 2
"""A feature of fewer cases says nothing."""

LEAST_WEIGHT = 32
"""A feature that adds less, in thousandths, to every signal is left out of the file."""

FOLDS = 5
SPLITS = 3
"""How often cases are dealt out to folds anew: with one, thresholds depend on the luck of it."""

NEIGHBOURS = 10
"""So many cases in a row are left out together in the files ``IN_A_ROW``."""

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
        together: Cases that have this in common are left out together.
        added: What rules and the comparison with the reply add to the sums of signals, if it is
            among ``APART``.
    """

    source: str
    case: Case
    language: str
    features: tuple[str, ...]
    together: str
    added: Mapping[Signal, int]

    @property
    def order(self) -> bytes:
        """By which examples are ordered and dealt out to folds."""
        return hashlib.sha256(f"{self.case.text}\n{self.case.reply}".encode()).digest()

    def fold(self, split: int) -> int:
        """The fold in which it is left out, in one of the ``SPLITS``."""
        return hashlib.sha256(self.together.encode()).digest()[split] % FOLDS


def examples() -> list[Example]:
    """What is learned from, of all files, in order."""
    made = [
        _example(file.stem, case, f"{file.stem} {number // NEIGHBOURS}")
        for file in FILES
        for number, case in enumerate(load(file))
    ]
    return sorted((example for example in made if example is not None), key=lambda e: e.order)


def _example(source: str, case: Case, place: str) -> Example | None:
    plain = normalise(case.text)
    if case.role != "user" or not plain or len(plain) > MAX_CHARS:
        return None
    reply = case.reply or ""
    language, found = features(plain, case.text, reply)
    added = _added(plain, case.text, reply) if source in APART else {}
    together = place if source in IN_A_ROW else reply or case.text
    return Example(source, case, language, tuple(sorted(found)), together, added)


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


Totals = Sequence[Mapping[Signal, Sequence[int]]]
"""Of each split and signal, what each case adds up to."""


def in_language(everything: Sequence[Example], name: str) -> list[Example]:
    """The cases in a language, in order."""
    return [example for example in everything if example.language == name]


def left_out(everything: Sequence[Example]) -> dict[str, Totals]:
    """Of each language, what its cases add up to by models that were learned without them."""
    return {
        name: [_left_out(in_language(everything, name), split) for split in range(SPLITS)]
        for name in LANGUAGES
    }


def _left_out(cases: Sequence[Example], split: int) -> dict[Signal, list[int]]:
    folds = [learn([e for e in cases if e.fold(split) != fold]) for fold in range(FOLDS)]
    return {signal: [total(folds[e.fold(split)], e, signal) for e in cases] for signal in SIGNALS}


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


def thresholds(cases: Sequence[Example], splits: Totals) -> list[int]:
    """Of each signal, chosen on cases left out, of all splits together."""
    chosen = [place for place, example in enumerate(cases) if example.source in CHOOSING]
    return [
        threshold(
            [totals[signal][place] for totals in splits for place in chosen],
            [signal in cases[place].case.signals for place in chosen] * len(splits),
            PRECISION,
        )
        for signal in SIGNALS
    ]


def make(everything: Sequence[Example], without: Mapping[str, Totals]) -> Model:
    """The model of all cases.

    Args:
        everything: The cases.
        without: What ``left_out`` gives of them.
    """
    languages: dict[str, Language] = {}
    for name in LANGUAGES:
        cases = in_language(everything, name)
        correction, directive, confirmation = thresholds(cases, without[name])
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


def outcomes(
    everything: Sequence[Example], without: Mapping[str, Totals]
) -> Iterator[tuple[Example, Signal, bool]]:
    """Of each case, split and signal whether it is found by a model that was learned without it."""
    for name in LANGUAGES:
        cases = in_language(everything, name)
        for signal, least in zip(SIGNALS, thresholds(cases, without[name]), strict=True):
            for totals in without[name]:
                for example, total in zip(cases, totals[signal], strict=True):
                    yield example, signal, total >= least


def table(everything: Sequence[Example], without: Mapping[str, Totals]) -> str:
    """Precision and recall on cases left out, by file, as a Markdown table."""
    rows = ["| file | signal | cases | precision | recall |", "|---|---|--:|--:|--:|"]
    found: dict[tuple[str, Signal], list[tuple[bool, bool]]] = {}
    for example, signal, got in outcomes(everything, without):
        groups = {"of another hand": IN_A_ROW, "of other hands": OTHER_HANDS}
        within = [group for group, sources in groups.items() if example.source in sources]
        names = [example.source, *within]
        for name in [*names, *[f"{each} {example.language}" for each in names]]:
            found.setdefault((name, signal), []).append((signal in example.case.signals, got))
    for (source, signal), pairs in sorted(found.items()):
        wanted, hits = sum(each for each, _ in pairs), sum(each for _, each in pairs)
        right = sum(each and got for each, got in pairs)
        precision, recall = f"{right / max(1, hits):.2f}", f"{right / max(1, wanted):.2f}"
        rows.append(f"| {source} | {signal.value} | {wanted // SPLITS} | {precision} | {recall} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Print how well it does; write the file if asked to."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--write", action="store_true")
    everything = examples()
    without = left_out(everything)
    if parser.parse_args().write:
        TARGET.write_bytes(written(make(everything, without)))
    print(table(everything, without))


if __name__ == "__main__":
    main()
