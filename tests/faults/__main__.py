"""``python -m tests.faults``: play the fault matrix and print its table."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import FrameType

from streams.settings import ENV_PREFIX
from tests.faults.play import Row, play
from tests.faults.registry import Case, all_cases, find_cases
from tests.faults.report import as_line, as_markdown, as_table, write_json
from tests.faults.scene import Kafka
from tests.faults.sizes import FULL, SHORT, Sizes
from tests.faults.stage import Stage

ADDRESSES = ("KAFKA_BOOTSTRAP_SERVERS", "SCHEMA_REGISTRY_URL", "REGISTRY_URL", "ARTIFACTS_URL")


def main(arguments: list[str] | None = None) -> int:
    """Play the cases asked for. 0 if all passed, 1 if one failed, 2 for a wrong argument."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    _forget_settings()
    if options.list:
        for case in all_cases():
            sys.stdout.write(f"{case.number:>4}  {case.name:20} {case.what}\n")
        return 0
    try:
        cases = [item for name in options.only for item in find_cases(name)] or all_cases()
    except KeyError as error:
        sys.stderr.write(f"no case {error}; see --list\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="clawstream-faults-") as scratch:
        folder = options.keep or Path(scratch)
        rows = _play_all(cases, folder, _sizes(options))
    sys.stdout.write(as_markdown(rows) if options.markdown else as_table(rows))
    if options.json is not None:
        write_json(rows, options.json, _sizes(options))
    return 0 if all(row.passed for row in rows) else 1


def _forget_settings() -> None:
    """Keep the developer's settings from the workers."""
    for name in list(os.environ):
        if name.startswith(ENV_PREFIX) or name in ADDRESSES:
            del os.environ[name]


def _interrupt(number: int, _frame: FrameType | None) -> None:
    """Let SIGTERM end the run as Ctrl-C does, brokers and workers included."""
    raise SystemExit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="a case's name or number")
    parser.add_argument("--json", type=Path, help="write the results here, too")
    parser.add_argument("--list", action="store_true", help="list the cases")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--short", action="store_true", help="fewer kills, shorter outages")
    parser.add_argument("--kills", type=int, help="SIGKILLs in the middle of a batch")
    parser.add_argument("--outage-s", type=float, help="how long a topic cannot be written")
    parser.add_argument("--keep", type=Path, help="leave all logs in this folder")
    return parser


def _sizes(options: argparse.Namespace) -> Sizes:
    sizes = SHORT if options.short else FULL
    if options.kills is not None:
        sizes = replace(sizes, kills=options.kills)
    if options.outage_s is not None:
        sizes = replace(sizes, outage_s=options.outage_s)
    return sizes


def _play_all(cases: list[Case], folder: Path, sizes: Sizes) -> list[Row]:
    """All cases of one broker first, then all of three."""
    rows: list[Row] = []
    for brokers in sorted({case.brokers for case in cases}):
        with Stage(folder / f"kafka-{brokers}", brokers) as stage:
            here = [case for case in cases if case.brokers == brokers]
            rows.extend(_play_one(case, stage, folder, sizes) for case in here)
    return sorted(rows, key=lambda row: [item.name for item in all_cases()].index(row.case))


def _play_one(case: Case, stage: Stage, folder: Path, sizes: Sizes) -> Row:
    sys.stdout.write(f"{case.number} {case.name}: {case.what}\n")
    sys.stdout.flush()
    row = play(case, Kafka(stage.bootstrap, stage.brokers, stage), folder / case.name, sizes)
    sys.stdout.write(as_line(row))
    sys.stdout.flush()
    return row


if __name__ == "__main__":
    raise SystemExit(main())
