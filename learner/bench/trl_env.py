"""The environments of TRL: its PPO is gone from the releases that hold today's GRPO."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import learner
import streams
from learner.bench.child import Starter
from learner.bench.preset import RIVALS
from streams.bench.environment import Environment, OnStep

_HERE = Path(__file__).parent
WITHOUT = "leave out trl_ppo and trl_grpo with --subjects"


def environment(subject: str, data_dir: Path) -> Environment:
    """The environment of ``trl_ppo`` (TRL 1.12, the last with PPO) or ``trl_grpo`` (1.16)."""
    return Environment(
        what={"trl_ppo": "TRL's PPO", "trl_grpo": "TRL's GRPO"}[subject],
        folder=data_dir / "bench" / subject,
        lock=_HERE / f"{subject}.lock",
        packages=(learner, streams),
        without=WITHOUT,
    )


def starters_of(subjects: Sequence[str], data_dir: Path, on_step: OnStep) -> Mapping[str, Starter]:
    """How each subject's processes are started; makes the environments that are needed.

    Raises:
        BenchError: One cannot be made.
    """
    starters = {subject: Starter(sys.executable) for subject in subjects}
    for subject in subjects:
        if subject in RIVALS:
            made = environment(subject, data_dir)
            made.prepare(on_step)
            starters[subject] = Starter(str(made.python), made.environ)
    return starters


__all__ = ["WITHOUT", "environment", "starters_of"]
