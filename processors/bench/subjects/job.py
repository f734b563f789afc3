"""What a subject's process is told, and what it tells.

A subject is started as ``python -m processors.bench.subjects.NAME JOB``; the file holds a
:class:`Job`. It prints a mark, one line of JSON, when the first record is handed to it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

FIRST = "first"
LAST = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One measurement of one subject.

    Attributes:
        name: Unlike that of any other measurement: consumer group and state are named so.
        config: The settings file.
        bootstrap_servers: Where Kafka is.
        turns: The topic of turns, like the next two read or written by all subjects.
        feedback: The topic of feedback.
        segments: Where segments go; of this measurement alone.
        dead_letters: Where the real worker's dead letters go.
        changelog: The real worker's state.
        partitions: Of each topic.
        records: In both input topics together, ticks included; 0 if that is not known.
        folder: For files of this measurement alone.
        replay: Whether the log is a finished one, with arrivals of its own.
        profile: Where to write how the time was spent; None for not looking.
    """

    name: str
    config: str
    bootstrap_servers: str
    turns: str
    feedback: str
    segments: str
    dead_letters: str
    changelog: str
    partitions: int
    records: int
    folder: str
    replay: bool = True
    profile: str | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of a subject.

    Attributes:
        event: Which one.
        at_ns: On the machine's monotonic clock.
        cpu_s: What the process has used until then, user and system.
    """

    event: str
    at_ns: int
    cpu_s: float


def write_job(job: Job, path: Path) -> None:
    """Leave a job for a subject."""
    path.write_bytes(msgspec.json.encode(job))


def job_of_command_line() -> Job:
    """The job that this process was started for."""
    return msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job)


def print_mark(event: str) -> None:
    """Tell of a moment."""
    used = os.times()
    mark = {"event": event, "at_ns": time.monotonic_ns(), "cpu_s": used.user + used.system}
    print(json.dumps(mark), flush=True)


def read_marks(path: Path) -> dict[str, Mark]:
    """The moments that a subject has told of, by event."""
    marks: dict[str, Mark] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            mark = msgspec.json.decode(line, type=Mark)
        except msgspec.MsgspecError:
            continue
        marks[mark.event] = mark
    return marks


class FirstRecord:
    """Marks the first record, once."""

    def __init__(self) -> None:
        self._seen = False

    def __call__(self) -> None:
        if not self._seen:
            self._seen = True
            print_mark(FIRST)


__all__ = [
    "FIRST",
    "LAST",
    "FirstRecord",
    "Job",
    "Mark",
    "job_of_command_line",
    "print_mark",
    "read_marks",
    "write_job",
]
