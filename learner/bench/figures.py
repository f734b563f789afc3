"""From the rounds of the learning bench to what it reports. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from learner.bench.preset import CONTROLS, RIVALS, Round, Subject
from streams.bench.report import Goal, Metrics

Runs = Mapping[Subject, Mapping[int, Sequence[Round]]]
"""The rounds played, by subject and seed; all seeds of a subject have equally many."""

RISE = 0.3
"""What counts as a lasting rise of the mean reward, which is in [-1, 1]."""

_STANDARD_ERRORS = 2.5


def rise(rewards: Sequence[float]) -> float:
    """The mean of the last third of the rewards less that of the first third.

    Raises:
        ValueError: There are fewer than two.
    """
    third = max(1, len(rewards) // 3)
    if len(rewards) < 2:
        raise ValueError("a rise needs two updates")
    return fmean(rewards[-third:]) - fmean(rewards[:third])


def noise_of(metrics: Metrics, replies: int) -> float:
    """`noise_of_rise` of a subject's figures, with so many replies before each update."""
    return noise_of_rise(len(metrics["reward"]), replies, len(metrics["rise"]))


def noise_of_rise(updates: int, replies: int, seeds: int) -> float:
    """How far the mean rise of a policy that does not change may be from 0 by chance.

    2.5 standard errors of the difference of two means of as many replies as the first and the
    last third have, each reply's reward being -1 or 1.
    """
    each = max(1, updates // 3) * replies * seeds
    return _STANDARD_ERRORS * math.sqrt(2.0 / each)


def metrics_of(runs: Mapping[int, Sequence[Round]]) -> Metrics:
    """A subject's figures.

    ``reward`` and ``kl`` are by update, means over the seeds (``kl`` of the policy before the
    update to the base model, nats per reply, not a number where no seed was trained);
    ``reward_seed_N`` that of one seed, ``rise`` by seed, ``seconds`` by update and seed.
    """
    by_seed = {seed: [played.reward for played in rounds] for seed, rounds in sorted(runs.items())}
    return {
        "reward": [fmean(values) for values in zip(*by_seed.values(), strict=True)],
        "rise": [rise(rewards) for rewards in by_seed.values()],
        "kl": [
            _mean([played.kl for played in together])
            for together in zip(*runs.values(), strict=True)
        ],
        "seconds": [played.seconds for rounds in runs.values() for played in rounds],
        **{f"reward_seed_{seed}": rewards for seed, rewards in by_seed.items()},
    }


def goals_of(subjects: Mapping[str, Metrics], replies: int) -> list[Goal]:
    """What has to be seen: ours rises, the controls do not.

    Clean and late feedback must rise by `RISE`; flipped and sparse feedback by more than
    chance; a control by no more than chance.

    Args:
        subjects: Their figures, as `metrics_of` gives them.
        replies: Before each update.
    """
    goals: list[Goal] = []
    for name, metrics in subjects.items():
        measured, noise = fmean(metrics["rise"]), noise_of(metrics, replies)
        if name in CONTROLS:
            goals.append(Goal(f"rise of {name}", noise, measured, at_most=True))
        elif name not in RIVALS:
            least = RISE if name in ("clean", "late") else noise
            goals.append(Goal(f"rise of {name}", least, measured))
    return goals


def in_words(subjects: Mapping[str, Metrics], replies: int) -> list[str]:
    """By how much each rises, with the spread over the seeds, and where a rival is better."""
    lines = [
        f"{name}: {_rise_in_words(metrics['rise'])}; "
        f"by chance alone up to {noise_of(metrics, replies):.2f}"
        for name, metrics in subjects.items()
    ]
    ours = subjects.get("clean")
    if ours is not None:
        rivals = [name for name in RIVALS if name in subjects]
        noise = noise_of(ours, replies)
        lines.extend(_compared(name, subjects[name], ours, noise) for name in rivals)
    return lines


def _rise_in_words(rises: Sequence[float]) -> str:
    if len(rises) == 1:
        return f"rises by {rises[0]:+.2f} (one seed)"
    spread = f"{min(rises):+.2f} to {max(rises):+.2f}"
    return f"rises by {fmean(rises):+.2f} (seeds {spread}, deviation {stdev(rises):.2f})"


def _compared(name: str, theirs: Metrics, ours: Metrics, noise: float) -> str:
    ahead = fmean(theirs["rise"]) - fmean(ours["rise"])
    third = max(1, len(ours["reward"]) // 3)
    ends = fmean(theirs["reward"][-third:]) - fmean(ours["reward"][-third:])
    verdict = "no telling difference"
    if abs(ahead) > noise:
        verdict = f"{name} is better" if ahead > 0 else "ours is better"
    return f"{name} against clean: rise {ahead:+.2f}, reward in the end {ends:+.2f}: {verdict}"


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return fmean(known) if known else math.nan


__all__ = [
    "RISE",
    "Runs",
    "goals_of",
    "in_words",
    "metrics_of",
    "noise_of",
    "noise_of_rise",
    "rise",
]
