"""``clawstream bench cuda-check``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import typer

from streams.cli.common import terminable

app = typer.Typer(add_completion=False)


class Device(StrEnum):
    """Where it runs."""

    CPU = "cpu"
    CUDA = "cuda"


@app.command()
def cuda_check(
    device: Device = typer.Option(Device.CUDA, "--device", help="cpu tries what needs no GPU."),
    tiny: bool = typer.Option(False, "--tiny", help="A tiny model and few tokens."),
    repetitions: int = typer.Option(3, "--repetitions", min=1, help="How often speed is measured."),
    json_file: Path | None = typer.Option(None, "--json", help="Also write the report, as JSON."),
) -> None:
    """See whether the learner computes the same on a GPU as on the CPU, and how fast it is.

    Takes a few minutes and downloads nothing: the model has SmolLM2-135M's shape and random
    weights. Ends with status 1 if a figure is out of bounds.
    """
    from rich.console import Console

    from learner.bench.cuda import CudaPlan, run
    from streams.bench.screen import require_writable, show, write_json

    require_writable(json_file)
    console = Console()
    plan = CudaPlan(device=device.value, tiny=tiny, repetitions=repetitions)
    with terminable():
        report = run(plan, lambda text: console.print(text, highlight=False))
    show(report, console)
    if json_file is not None:
        write_json(report, json_file)
    if report.missed:
        raise typer.Exit(1)
