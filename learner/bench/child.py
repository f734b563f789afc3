"""The processes in which subjects run, each by itself, so that all can be ended."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import IO, Any

from streams.errors import BenchError
from streams.settings import ENV_PREFIX

_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class Starter:
    """How Python is started for a subject.

    Attributes:
        python: The interpreter.
        environ: What its processes see beside what ours do.
    """

    python: str
    environ: Mapping[str, str] = field(default_factory=dict)


class Children:
    """Runs modules in processes of their own, from any number of threads.

    Args:
        folder: Where jobs and logs are kept.
        threads: Of each process.
    """

    def __init__(self, folder: Path, threads: int) -> None:
        self._folder = folder
        self._threads = threads
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = Lock()
        self._ended = False

    def run(
        self,
        starter: Starter,
        module: str,
        name: str,
        job: Any,
        on_result: Callable[[dict[str, Any]], None],
    ) -> None:
        """Run a module on a job, to its end.

        Args:
            starter: In which Python.
            module: It gets the name of a file with the job as JSON.
            name: Of the job, for its files.
            job: A dataclass.
            on_result: Gets each line of JSON that it writes.

        Raises:
            BenchError: It failed or was ended; shows the end of its log.
        """
        file, log = self._folder / f"{name}.json", self._folder / f"{name}.log"
        file.write_text(json.dumps(asdict(job)), encoding="utf-8")
        command = [starter.python, "-m", module, str(file)]
        with (
            log.open("w", encoding="utf-8") as errors,
            self._start(starter, command, errors) as process,
        ):
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith("{"):
                        on_result(json.loads(line))
                status = process.wait()
            finally:
                self._finish(process)
        if status:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            tail = "\n".join(lines[-_TAIL_LINES:])
            raise BenchError(f"{name} ended with status {status}; its log ends with:\n{tail}")

    def end(self) -> None:
        """End what runs; nothing new is started."""
        with self._lock:
            self._ended = True
            for process in self._running:
                process.terminate()

    def _start(
        self, starter: Starter, command: Sequence[str], errors: IO[str]
    ) -> subprocess.Popen[str]:
        kept = {name: v for name, v in os.environ.items() if not name.startswith(ENV_PREFIX)}
        own = {"OMP_NUM_THREADS": str(self._threads), "HF_HUB_OFFLINE": "1"}
        with self._lock:
            if self._ended:
                raise BenchError("the bench was ended")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**kept, **own, **starter.environ},
            )
            self._running.add(process)
        return process

    def _finish(self, process: subprocess.Popen[str]) -> None:
        with self._lock:
            self._running.discard(process)
        if process.poll() is None:
            process.terminate()


__all__ = ["Children", "Starter"]
