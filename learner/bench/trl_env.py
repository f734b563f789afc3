"""The environments of TRL: its PPO is gone from the releases that hold today's GRPO."""

from __future__ import annotations

from pathlib import Path

import learner
import streams
from streams.bench.environment import Environment

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


__all__ = ["WITHOUT", "environment"]
