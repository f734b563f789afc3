"""``clawstream bench learning``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from learner.bench.chosen import chosen
from streams.cli.common import settings_of, terminable
from streams.errors import SettingsError
from streams.settings import Mode

if TYPE_CHECKING:
    from rich.console import Console

    from streams.bench.report import Metrics, Report

app = typer.Typer(add_completion=False)


@app.command()
def learning(
    ctx: typer.Context,
    quick: bool = typer.Option(False, "--quick", help="One seed, six updates: at most 8 minutes."),
    subjects: str = typer.Option(
        "all", "--subjects", help="Which, with commas between; --quick leaves the rivals out."
    ),
    seeds: int | None = typer.Option(None, "--seeds", min=1, help="How often each is run."),
    updates: int | None = typer.Option(
        None, "--updates", min=2, help="Of each subject; of sparse three times as many."
    ),
    mode: Mode = typer.Option(
        "ppo", "--mode", help="Of our learner; in opd and hybrid users also say what they want."
    ),
    base: str | None = typer.Option(None, "--base", help="Another base model, as model.base."),
    json_file: Path | None = typer.Option(None, "--json", help="Also write the report, as JSON."),
    plot_file: Path | None = typer.Option(None, "--plot", help="Also draw the rewards, as PNG."),
) -> None:
    """See whether the policy becomes what simulated users like.

    They talk to the base model and judge its replies by a stated preference; their feedback
    passes through aligner, reward and learner, without a broker. Reported is what they honestly
    think of the replies before each update. Subjects: clean, flipped20 (one opinion in five is
    turned round), sparse (one reply in five is judged), late (judged when the segment is
    closed), controls that must not rise (frozen: no update; shuffled: opinions dealt at random),
    and TRL's GRPO and PPO on the same questions.
    """
    from rich.console import Console

    from learner.bench.learning import (
        QUICK_SEEDS,
        QUICK_UPDATES,
        SEEDS,
        UPDATES,
        LearningPlan,
        run,
    )
    from learner.bench.preset import FIRST_LAYER, HINTED_MODES, RIVALS, SUBJECTS
    from learner.model import SMOLLM2, TINY
    from streams.bench.screen import require_writable, write_json

    known = [name for name in SUBJECTS if not (quick and name in RIVALS)]
    if mode in HINTED_MODES:
        known.remove("shuffled")
    picked = chosen(subjects, SUBJECTS, known)
    if mode in HINTED_MODES and "shuffled" in picked:
        raise SettingsError(
            f"shuffled is no control in mode {mode}: the words teach, whoever says them; "
            "name other --subjects"
        )
    plan = LearningPlan(
        subjects=picked,
        seeds=seeds or (QUICK_SEEDS if quick else SEEDS),
        updates=updates or (QUICK_UPDATES if quick else UPDATES),
        base=base or SMOLLM2,
        mode=mode,
        first_layer=0 if base == TINY else FIRST_LAYER,
    )
    require_writable(json_file)
    _require_drawable(plot_file)
    console = Console()
    with terminable():
        report = run(settings_of(ctx), plan, lambda text: console.print(text, highlight=False))
    _show(report, plan.replies, console)
    if json_file is not None:
        write_json(report, json_file)
    if plot_file is not None:
        _plot(report, plan.seeds, plot_file)


def _require_drawable(path: Path | None) -> None:
    if path is None:
        return
    try:
        path.touch()
    except OSError as error:
        raise SettingsError(
            f"cannot write {path}: {error.strerror}; name another --plot"
        ) from error


def _show(report: Report, replies: int, console: Console) -> None:
    from dataclasses import replace

    from rich.table import Table

    from learner.bench.figures import in_words
    from streams.bench.screen import figure, show

    def shown(metrics: Metrics) -> Metrics:
        return {name: metrics[name] for name in ("rise", "seconds")}

    show(replace(report, subjects={n: shown(m) for n, m in report.subjects.items()}), console)
    table = Table("subject", "mean reward before each update", "kl at the last")
    for name, metrics in report.subjects.items():
        rewards = "  ".join(f"{value:+.2f}" for value in metrics["reward"])
        table.add_row(name, rewards, figure(metrics["kl"][-1]))
    console.print(table)
    for line in in_words(report.subjects, replies):
        console.print(line, highlight=False)


def _plot(report: Report, seeds: int, path: Path) -> None:
    from learner.bench.plot import draw
    from learner.bench.preset import TASTE

    draw(report.subjects, f"{TASTE.sentence}\nmean and range of {seeds} seeds", path)
