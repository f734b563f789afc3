"""``clawstream bench``: the measurements, each imported when it is run."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from streams.cli.root import Entry, Lazy

BENCHES: dict[str, Entry] = {
    "align": Entry("processors.bench.cli_align", "The aligner against other frameworks."),
    "closing-delay": Entry(
        "processors.bench.cli_delay", "From the moment a segment is due until readers have it."
    ),
    "align-state": Entry(
        "processors.bench.cli_state", "What the aligner's state takes, and a restart with it."
    ),
    "replay": Entry(
        "processors.bench.cli_replay", "How long a part of the log takes to be replayed."
    ),
    "reward": Entry(
        "processors.bench.cli_reward", "Whether the reward keeps up, and how long it takes."
    ),
    "reward-noise": Entry(
        "processors.bench.cli_reward_noise", "What wrong feedback does to rewards."
    ),
    "learning": Entry(
        "learner.bench.cli_learning", "Whether the policy becomes what simulated users like."
    ),
    "learner": Entry("learner.bench.cli_learner", "An update of the learner against TRL's."),
    "cuda-check": Entry("learner.bench.cli_cuda", "The learner on this machine's GPU."),
    "window": Entry(
        "learner.bench.cli_window", "The learner's window: memory, and arrivals during an update."
    ),
}


class _Benches(TyperGroup):
    """Lists all benches without importing one."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(BENCHES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = BENCHES.get(cmd_name)
        return None if entry is None else Lazy(cmd_name, entry)


app = typer.Typer(
    cls=_Benches,
    no_args_is_help=True,
    add_completion=False,
    help="Measure how fast it is on this machine.",
)


@app.callback()
def _bench() -> None:
    """Measure how fast it is on this machine."""
