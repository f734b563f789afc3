"""``clawstream replay``: a part of the log once more, into a shadow or into a retrained version.

What either does lives above this package, so both are named by strings. ``--into`` says which;
all other options are theirs.
"""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

MODULES = {"shadow": "processors.replay.cli", "retrain": "learner.retrain.cli"}
"""Where each kind of replay lives: a module with a Typer ``app``."""

_DEFAULT = "shadow"
_FLAG = "--into"

app = typer.Typer(add_completion=False)


class _Replay(TyperCommand):
    """Hands its arguments on to the kind of replay that they name; without one, and asked for
    help, it shows the options of both."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        into, rest = _split(args)
        if into is None and "--help" in rest:
            self.params = [*self.params, *_options_of_all()]
            return super().make_context(info_name, rest, parent, **extra)
        chosen = _command(into or _DEFAULT)
        return chosen.make_context(info_name, rest, parent, **extra)


@app.command(cls=_Replay)
def replay(
    into: str = typer.Option(
        _DEFAULT, _FLAG, metavar="KIND", help=f"{' or '.join(MODULES)}; see below."
    ),
) -> None:
    """Put a part of the log through a stage again, or train on it again.

    A shadow is compared with what was put out live, and changes nothing. A retrain makes a new
    candidate version, which nothing serves by itself.
    """


def _split(args: list[str]) -> tuple[str | None, list[str]]:
    """What ``--into`` says, and the arguments without it."""
    into: str | None = None
    rest: list[str] = []
    left = iter(args)
    for argument in left:
        if argument == _FLAG:
            into = next(left, "")
        elif argument.startswith(f"{_FLAG}="):
            into = argument.removeprefix(f"{_FLAG}=")
        else:
            rest.append(argument)
    if into is not None and into not in MODULES:
        raise typer.BadParameter(f"{into!r} is none of {', '.join(MODULES)}", param_hint=_FLAG)
    return into, rest


def _command(into: str) -> Any:
    return get_command(importlib.import_module(MODULES[into]).app)


def _options_of_all() -> list[Any]:
    """The options that all kinds have, then those of each."""
    commands = {into: _command(into) for into in MODULES}
    names = {into: {param.name for param in command.params} for into, command in commands.items()}
    shared = set.intersection(*names.values())
    found: list[Any] = []
    for into, command in commands.items():
        for param in command.params:
            if param.name in shared and into != _DEFAULT:
                continue
            if param.name not in shared:
                param.rich_help_panel = f"With {_FLAG} {into}"
            found.append(param)
    return sorted(found, key=lambda param: param.rich_help_panel or "")
