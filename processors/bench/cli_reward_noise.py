"""``clawstream bench reward-noise``."""

from __future__ import annotations

from pathlib import Path

import typer

from streams.cli.common import settings_of

app = typer.Typer(add_completion=False)


@app.command("reward-noise")
def reward_noise(
    ctx: typer.Context,
    users: int = typer.Option(60, "--users", min=10, help="Honest users."),
    hours: int = typer.Option(48, "--hours", min=1, help="About one conversation of each an hour."),
    repetitions: int = typer.Option(3, "--repetitions", min=1, help="Each of other conversations."),
    json_file: Path | None = typer.Option(None, "--json", help="Also write the report, as JSON."),
) -> None:
    """Measure what wrong feedback does to rewards, with their filters on and off.

    Of the ratings 10, 20 and 40% are turned round; one user rates 20 times as much as the
    others, always wrongly; one policy spams a template. The same on every machine.
    """
    from rich.console import Console

    from processors.bench.reward_noise import NoisePlan, run
    from streams.bench.screen import require_writable, show, write_json

    require_writable(json_file)
    plan = NoisePlan(users=users, hours=hours, seeds=tuple(range(1, repetitions + 1)))
    report = run(plan, settings_of(ctx).reward)
    show(report, Console())
    if json_file is not None:
        write_json(report, json_file)
