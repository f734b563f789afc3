"""``clawstream bench align``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from streams.cli.common import settings_of, terminable
from streams.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from processors.bench.align import Profiles
    from processors.bench.profile import Share

app = typer.Typer(add_completion=False)

_FUNCTIONS = 25


@app.command()
def align(
    ctx: typer.Context,
    records: int = typer.Option(120_000, "--records", min=1, help="Turns and feedback in the log."),
    repetitions: int = typer.Option(3, "--repetitions", min=1, help="How often each is measured."),
    subjects: str = typer.Option(
        "all", "--subjects", help="Which, with commas between; ours is compared with the others."
    ),
    sessions: int | None = typer.Option(
        None, "--sessions", min=1, help="Conversations at any time; by the records if left out."
    ),
    partitions: int = typer.Option(4, "--partitions", min=1, help="Of each topic."),
    profile: bool = typer.Option(False, "--profile", help="Also show where ours spends its time."),
    json_file: Path | None = typer.Option(None, "--json", help="Also write the report, as JSON."),
) -> None:
    """Measure the aligner against other frameworks that do the same job.

    Every subject reads the same log of turns and feedback, keeps the sessions, writes the
    segments; their bytes are compared. Subjects take turns. Needs an otherwise idle machine.
    """
    from rich.console import Console

    from processors.bench.align import SUBJECTS, AlignPlan, run
    from streams.bench.screen import require_writable, show, write_json

    settings = settings_of(ctx)
    require_writable(json_file)
    plan = AlignPlan(
        subjects=_chosen(subjects, SUBJECTS),
        records=records,
        repetitions=repetitions,
        talking=sessions,
        partitions=partitions,
        profile=profile,
    )
    console = Console()
    with terminable():
        report, profiles = run(settings, plan, lambda text: console.print(text, highlight=False))
    show(report, console)
    if profiles is not None:
        _show_profiles(profiles, console)
    if json_file is not None:
        write_json(report, json_file)


def _chosen(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    if text == "all":
        return known
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SettingsError(
            f"--subjects: unknown {', '.join(unknown)}; known are {', '.join(known)}"
        )
    return names


def _show_profiles(profiles: Profiles, console: Console) -> None:
    from processors.bench.profile import by_function, by_stage, read_stacks

    plain = read_stacks(profiles.plain)
    print_shares("the worker", by_stage(read_stacks(profiles.worker)), console)
    print_shares("the aligner alone", by_stage(plain), console)
    print_shares("the aligner's functions", by_function(plain, _FUNCTIONS), console)
    for path in (profiles.worker, profiles.plain):
        console.print(f"stacks, for flame graph tools: {path}", soft_wrap=True, highlight=False)


def print_shares(title: str, shares: Sequence[Share], console: Console) -> None:
    from rich.table import Table

    table = Table(title, "cpu s", "share")
    for share in shares:
        table.add_row(share.stage, f"{share.seconds:.2f}", f"{share.share:.1%}")
    console.print(table)
