"""The learning bench as a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

from learner.bench.preset import CONTROLS, RIVALS
from streams.bench.report import Metrics
from streams.errors import SettingsError

_TITLE_CHARACTERS = 75


def draw(subjects: Mapping[str, Metrics], title: str, path: Path) -> None:
    """Write the reward of each subject by update as a PNG: mean over seeds, and their range.

    Raises:
        SettingsError: The file cannot be written.
    """
    # Not pyplot: it would look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (name, metrics) in enumerate(subjects.items()):
        rewards = metrics["reward"]
        updates = range(len(rewards))
        color = f"C{number}"
        style = ":" if name in CONTROLS else "--" if name in RIVALS else "-"
        axes.plot(updates, rewards, style, color=color, label=name)
        seeds = [values for key, values in metrics.items() if key.startswith("reward_seed_")]
        if len(seeds) > 1:
            together = list(zip(*seeds, strict=True))
            low, high = [min(v) for v in together], [max(v) for v in together]
            axes.fill_between(updates, low, high, color=color, alpha=0.1, linewidth=0)
    axes.set_xlabel("updates made")
    axes.set_ylabel("mean honest reward of the replies (-1 to 1)")
    axes.set_title(textwrap.fill(title, _TITLE_CHARACTERS))
    axes.set_ylim(-1.05, 1.05)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise SettingsError(
            f"cannot write {path}: {error.strerror}; name another --plot"
        ) from error


__all__ = ["draw"]
