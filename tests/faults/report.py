"""The results as a table for people and as JSON for machines."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from tests.faults.play import Row
from tests.faults.sizes import Sizes

FORMAT = 1
_HEAD = ("case", "events", "lost", "duplicated ids", "recovery s", "passed")


def as_table(rows: Sequence[Row]) -> str:
    """A table, a line a case."""
    cells = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEAD))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(["", *lines, ""])


def as_markdown(rows: Sequence[Row]) -> str:
    """The same as ``docs/operations.md`` has it."""
    head = ("", "case", "what was done", "events", "lost", "ids twice", "recovery s", "passed")
    lines = [head, ("--:", "---", "---", "--:", "--:", "--:", "--:", "---")]
    for row in rows:
        _, events, lost, duplicated, recovery, passed = _cells(row)
        lines.append((row.number, row.case, row.what, events, lost, duplicated, recovery, passed))
    return "\n".join(["", *(f"| {' | '.join(line)} |" for line in lines), ""])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        f"{row.number} {row.case}",
        f"{row.events:,}",
        str(row.lost),
        str(row.duplicated_ids),
        "" if row.recovery_s is None else f"{row.recovery_s:.1f}",
        "yes" if row.passed else "NO",
    )


def as_line(row: Row) -> str:
    """One case in a line, and below it what else is worth knowing."""
    state = "passed" if row.passed else "FAILED"
    times = (
        ""
        if row.recovery_s is None
        else (
            f", recovery {row.median_recovery_s:.1f} s (at most {row.recovery_s:.1f}, "
            f"{row.faults} faults)"
        )
    )
    lines = [
        f"  {state} in {row.seconds:.0f} s: {row.events} events, {row.segments} segments "
        f"({row.revisions} revisions), {row.dead_letters} dead letters, {row.lost} lost, "
        f"{row.duplicated_ids} ids twice, {row.wrong} wrong{times}"
    ]
    lines += [f"  {note}" for note in row.notes]
    return "\n".join(lines) + "\n"


def write_json(rows: Sequence[Row], path: Path, sizes: Sizes) -> None:
    """Write all that was measured; ``docs/operations.md`` describes the form."""
    content = {
        "format": FORMAT,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
        "sizes": asdict(sizes),
        "passed": all(row.passed for row in rows),
        "cases": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
