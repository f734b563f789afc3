"""What commands share."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer

from streams.settings import Settings, load_settings

if TYPE_CHECKING:
    from rich.table import Table

_WIDEST = 10_000


def settings_of(ctx: typer.Context) -> Settings:
    """The settings that the root command loaded, else those of the environment."""
    root = ctx.find_root().obj
    return root if isinstance(root, Settings) else load_settings()


def print_json(value: Any) -> None:
    """One line of JSON on standard output."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")


def print_table(table: Table) -> None:
    """A table, as wide as it is: a terminal that is too narrow wraps its rows.

    What is cut off cannot be told apart, and words that are folded cannot be searched for.
    """
    from rich.console import Console

    needed = Console(width=_WIDEST).measure(table).maximum
    console = Console(width=max(Console().width, needed), soft_wrap=True)
    console.print(table)


def print_lines(
    head: Sequence[str], rows: Sequence[Sequence[object]], messages: Sequence[str]
) -> None:
    """Aligned columns, each row with its message below; ids stay whole at any width."""
    table = [head, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for number, cells in enumerate(table):
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        typer.echo(line.rstrip())
        if number:
            typer.echo(f"    {messages[number - 1][:200]}")


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does: everything it started is stopped."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
