"""The same updates, whoever makes them: alone, or as one of those ``accelerate launch`` starts.

Arguments: a file for what comes of it; the first process writes it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from learner.model import load_base
from learner.processes import joined
from learner.team import Team
from learner.update import PpoUpdater
from streams.errors import UpdateStoppedError
from streams.settings import LearnerSettings, ModelSettings
from tests.unit.learner.test_modes import samples as taught_samples
from tests.unit.learner.test_update import PLAIN, TINY, equal_states, samples, shake

Case = tuple[ModelSettings, Mapping[str, Any], bool]

_EVERYTHING: Mapping[str, Any] = {
    "mode": "hybrid",
    "hybrid_ppo_weight": 1.0,
    "hybrid_grpo_weight": 0.5,
    "hybrid_opd_weight": 0.5,
    "epochs": 2,
    "minibatches": 2,
    "kl_coef": 0.1,
    "ent_coef": 0.01,
    "micro_batch_segments": 1,
}
CASES: Mapping[str, Case] = {
    # Shape of the adapter, changes of the settings, base weights shared out among processes.
    "whole": (TINY, _EVERYTHING, False),
    "frozen layers": (
        TINY.model_copy(update={"lora_first_layer": 2}),
        {"epochs": 2, "micro_batch_segments": 2},
        False,
    ),
    "more processes than work": (TINY, {"micro_batch_segments": 99, "minibatches": 1}, False),
    "shared out": (TINY, {**_EVERYTHING, "gradient_checkpointing": True}, True),
}


def results(team: Team | None = None) -> dict[str, Any]:
    """State and metrics after two updates, for each case."""
    return {name: _result(*case, team) for name, case in CASES.items()}


def _result(
    shape: ModelSettings, changes: Mapping[str, Any], sharded: bool, team: Team | None
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    # Small steps: Adam makes whole ones of the rounding in gradients that are next to nothing.
    rates = {"learning_rate": 1e-4, "learning_rate_floor": 1e-5, "value_learning_rate": 1e-3}
    settings: LearnerSettings = PLAIN.model_copy(update={**rates, **changes})
    updater = PpoUpdater(load_base(shape, Path("unused")), settings, shape, team)
    shake(updater)
    if sharded and team is not None:
        updater.network.spread_frozen_weights()
        whole = sum(weight.numel() for weight in updater.network.model.parameters())
        held = sum(_held(weight) for weight in updater.network.model.parameters())
        assert held < 0.8 * whole, "nothing was shared out"
    some = taught_samples() if settings.mode == "hybrid" else samples()
    metrics = [updater.update(some).metrics for _ in range(2)]
    return updater.state_dict(), metrics


def is_stopped_together(team: Team, *, first: bool) -> bool:
    """Whether an update that the first process alone is told to stop ends in this one too, and
    leaves everything as it was."""
    updater = PpoUpdater(load_base(TINY, Path("unused")), PLAIN, TINY, team)
    before, asked = updater.state_dict(), 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        return first and asked == 3

    try:
        updater.update(samples(), should_stop=should_stop)
    except UpdateStoppedError:
        return equal_states(updater.state_dict(), before) and asked == 3
    return False


def _held(weight: Any) -> int:
    """How many of a weight's numbers are in this process."""
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    return int(local.numel())


def main(out: str) -> None:
    torch.set_num_threads(1)
    with joined(int(os.environ["WORLD_SIZE"]) > 1, on_cpu=True) as (team, _):
        first = os.environ["RANK"] == "0"
        found = {
            "size": team.size,
            "results": results(team),
            "stopped": is_stopped_together(team, first=first),
        }
        torch.save(found, out if first else f"{out}.other")


if __name__ == "__main__":
    main(sys.argv[1])
