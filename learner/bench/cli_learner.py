"""``clawstream bench learner``."""

from __future__ import annotations

from pathlib import Path

import typer

from learner.bench.chosen import chosen
from streams.cli.common import settings_of, terminable

app = typer.Typer(add_completion=False)


@app.command()
def learner(
    ctx: typer.Context,
    subjects: str = typer.Option(
        "all", "--subjects", help="Which, with commas between; ours is compared with the others."
    ),
    repetitions: int = typer.Option(3, "--repetitions", min=1, help="How often each is measured."),
    rollouts: int = typer.Option(8, "--rollouts", min=4, help="In one update."),
    prompt_tokens: int = typer.Option(128, "--prompt-tokens", min=2, help="Mean of a prompt."),
    reply_tokens: int = typer.Option(128, "--reply-tokens", min=2, help="Mean of a reply."),
    epochs: int = typer.Option(2, "--epochs", min=1, help="Passes over them in one update."),
    threads: int = typer.Option(2, "--threads", min=1, help="Of torch."),
    base: str | None = typer.Option(None, "--base", help="Another base model, as model.base."),
    json_file: Path | None = typer.Option(None, "--json", help="Also write the report, as JSON."),
) -> None:
    """Measure one update of the learner against TRL's PPO and GRPO.

    All get the same rollouts and an adapter of the same shape on the same base model. The
    ceiling is the bare forward and backward passes. Needs an otherwise idle machine.
    """
    from rich.console import Console

    from learner.bench.rollouts import SPEED_SUBJECTS
    from learner.bench.speed import SpeedPlan, run
    from learner.model import SMOLLM2
    from streams.bench.screen import require_writable, show, write_json

    plan = SpeedPlan(
        subjects=chosen(subjects, SPEED_SUBJECTS, SPEED_SUBJECTS),
        repetitions=repetitions,
        rollouts=rollouts,
        prompt_tokens=prompt_tokens,
        reply_tokens=reply_tokens,
        epochs=epochs,
        threads=threads,
        base=base or SMOLLM2,
    )
    require_writable(json_file)
    console = Console()
    with terminable():
        report = run(settings_of(ctx), plan, lambda text: console.print(text, highlight=False))
    show(report, console)
    if json_file is not None:
        write_json(report, json_file)
