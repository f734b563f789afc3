"""The ends of the logs that a failed test's processes wrote, to be shown with its failure."""

from __future__ import annotations

from pathlib import Path

FILES = 4
CHARACTERS = 6_000
"""Of all of them together: what shows a failure elsewhere may cut long outputs short."""

LINE = 240
_READ_BYTES = 64 * 1024
_BROKERS_LOG = "server.log"


def tails(folder: Path, since_s: float) -> list[tuple[str, str]]:
    """The ends of the newest logs, the newest last.

    Args:
        folder: Searched for ``*.log``, with all folders in it.
        since_s: Logs not written to since then (epoch seconds) are left out.

    Returns:
        What each is, and its last lines; of a broker's log its warnings and errors.
    """
    # What a broker keeps of its topics has a number for a name.
    logs = (path for path in folder.rglob("*.log") if not path.stem.isdigit())
    written = {path: _written_s(path) for path in logs}
    newest = sorted((at_s, path) for path, at_s in written.items() if at_s >= since_s)[-FILES:]
    ends = [(path, _end(path, CHARACTERS // len(newest))) for _, path in newest]
    return [(f"end of {path.relative_to(folder)}", end) for path, end in ends if end]


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _end(path: Path, characters: int) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _READ_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    if path.name == _BROKERS_LOG:
        lines = [line for line in lines if " WARN " in line or " ERROR " in line]
    kept: list[str] = []
    for line in map(_short, reversed(lines)):
        characters -= len(line) + 1
        if characters < 0:
            break
        kept.append(line)
    return "\n".join(reversed(kept))


def _short(line: str) -> str:
    return line if len(line) <= LINE else f"{line[: LINE - 1]}…"
