"""The root command and the table of its commands."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command


@dataclass(frozen=True, slots=True)
class Entry:
    """One command.

    Attributes:
        module: Where it lives: a module with a Typer ``app``, or, for a process, one
            with ``main(argv) -> int``.
        summary: Its line in the help.
        process: Whether it is a long-running process with options of its own.
    """

    module: str
    summary: str
    process: bool = False


_SPINS = "1000"
"""How often a thread of torch looks whether the others are done before it sleeps, if nobody said.
By default it looks for milliseconds; where policy server and learner, or anything else, share the
cores, the one that is waited for does not run meanwhile, and a reply takes ten times as long."""

COMMANDS: dict[str, Entry] = {
    "demo": Entry("streams.cli.demo", "Watch conversations become two new policy versions."),
    "up": Entry("streams.cli.up", "Run the whole pipeline on this machine until Ctrl-C."),
    "kafka": Entry("streams.cli.kafka", "Start, stop and show the embedded Kafka node."),
    "topics": Entry("streams.cli.topics", "Compare the cluster's topics with topics.yaml."),
    "schemas": Entry("streams.cli.schemas", "Check, compare and register the record schemas."),
    "gateway": Entry("streams.gateway.__main__", "Run the HTTP front door.", process=True),
    "align": Entry("processors.feedback_align.__main__", "Run the aligner worker.", process=True),
    "reward": Entry("processors.reward.__main__", "Run the reward worker.", process=True),
    "judge": Entry("processors.reward.judge.__main__", "Run the judge.", process=True),
    "learn": Entry("learner.__main__", "Run the learner.", process=True),
    "serve": Entry("learner.serving.__main__", "Run the policy server.", process=True),
    "versions": Entry("streams.cli.versions", "List and show policy versions."),
    "reviews": Entry("streams.cli.reviews", "Decide about ratings that were held back."),
    "archive": Entry(
        "streams.cli.archive", "Write topics to Parquet files; check and restore them."
    ),
    "dlq": Entry("streams.cli.dlq", "List, retry, drop and export dead letters."),
    "calibration": Entry(
        "processors.reward.calibration", "Compare the judge with people's ratings."
    ),
    "doctor": Entry("streams.cli.doctor", "Find out what is wrong, and what to do about it."),
    "lag": Entry("streams.cli.lag", "Show how far each stage is behind."),
    "replay": Entry("streams.cli.replay", "Put a part of the log through again, or train on it."),
    "export": Entry("streams.cli.export", "Write preferences or demonstrations for TRL."),
    "import": Entry("streams.cli.imports", "Import exports of other chat products."),
    "bench": Entry("streams.cli.bench", "Measure how fast it is on this machine."),
}


class Lazy(TyperCommand):
    """A command that is imported when it is run."""

    def __init__(self, name: str, entry: Entry) -> None:
        super().__init__(name, help=entry.summary)
        self._entry = entry

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        module = importlib.import_module(self._entry.module)
        command = get_command(module.app)
        return command.make_context(info_name, args, parent, **extra)


class _Process(TyperCommand):
    """A process: everything behind its name goes to the ``main`` of its module."""

    def __init__(self, name: str, entry: Entry) -> None:
        super().__init__(
            name,
            help=entry.summary,
            add_help_option=False,
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )
        self._entry = entry

    def invoke(self, ctx: Any) -> Any:
        config = ctx.find_root().params.get("config")
        own = ["--config", str(config)] if config is not None else []
        run: Callable[[list[str]], int] = importlib.import_module(self._entry.module).main
        raise typer.Exit(run([*own, *ctx.args]))


class _Root(TyperGroup):
    """Lists all commands without importing one."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        return (_Process if entry.process else Lazy)(cmd_name, entry)


def build_root() -> Callable[[list[str], str], Any]:
    """The root command: call it with arguments and program name; ends in SystemExit."""
    app = typer.Typer(
        cls=_Root,
        no_args_is_help=True,
        invoke_without_command=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="Turn live dialogue into better policies.",
    )
    app.callback()(_root)
    command = get_command(app)
    return lambda argv, name: command.main(argv, name)


def _root(
    ctx: typer.Context,
    config: Path | None = typer.Option(
        None, "--config", "-c", help="Settings file (YAML); CLAWSTREAM_CONFIG names one too."
    ),
    show_version: bool = typer.Option(False, "--version", help="Show the version."),
) -> None:
    if show_version:
        typer.echo(f"clawstream {version('clawstream')}")
        raise typer.Exit
    if "OMP_WAIT_POLICY" not in os.environ:
        # Before torch is loaded: it reads this once.
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    entry = COMMANDS.get(ctx.invoked_subcommand or "")
    if entry is not None and not entry.process:
        from streams.settings import load_settings

        ctx.obj = load_settings(config)
