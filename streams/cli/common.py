"""What commands share."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer

from streams.settings import Settings, load_settings


def settings_of(ctx: typer.Context) -> Settings:
    """The settings that the root command loaded, else those of the environment."""
    root = ctx.find_root().obj
    return root if isinstance(root, Settings) else load_settings()


def print_json(value: Any) -> None:
    """One line of JSON on standard output."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
