"""Writes those parts of the pages beside it, and the figures, that are made of the code.

``python docs/generate.py`` brings them up to date; with ``--check`` it changes nothing and
fails if a page is stale. A part stands between two comments, ``<!-- generated: NAME -->`` and
``<!-- end -->``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from learner.ppo.diagnostics import render_table as render_learner_table
from processors.feedback_align.machine import render_diagram
from processors.reward.figure import render as render_implicit
from streams.metrics import render_table
from streams.settings import RewardSettings

FOLDER = Path(__file__).parent
_PART = re.compile(r"(<!-- generated: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _diagram() -> str:
    return f"```mermaid\n{render_diagram()}```\n"


def _implicit() -> str:
    return render_implicit(RewardSettings())


PARTS: Mapping[str, Callable[[], str]] = {
    "lives": _diagram,
    "metrics": render_table,
    "learner metrics": render_learner_table,
}
FIGURES: Mapping[str, Callable[[], str]] = {"implicit.svg": _implicit}


def renewed(page: str) -> str:
    """A page with each generated part as the code has it now.

    Raises:
        KeyError: It names a part that nothing here makes.
    """
    return _PART.sub(lambda part: part[1] + PARTS[part[2]]() + part[3], page)


def main(arguments: list[str]) -> int:
    """Bring the pages up to date, or tell which are not.

    Returns:
        1 if ``--check`` is given and a page is stale, else 0.
    """
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
    wanted = {path: renewed(text) for path, text in pages.items()}
    wanted |= {FOLDER / name: draw() for name, draw in FIGURES.items()}
    stale = [path for path, text in wanted.items() if _text_of(path) != text]
    if "--check" in arguments:
        for path in stale:
            sys.stderr.write(f"docs/{path.name} is stale: run python docs/generate.py\n")
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


def _text_of(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
