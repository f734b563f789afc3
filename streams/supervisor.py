"""Starts clawstream's processes on one machine, keeps them running and stops them in order."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from streams.errors import ClawstreamError
from streams.process import READY, WRONG_SETTINGS
from streams.settings import Settings

logger = logging.getLogger(__name__)

PROCESSES: Sequence[str] = ("serve", "learn", "reward", "align", "gateway")
"""The processes of a pipeline in the order of their start: readers before writers, so that
stopping in reverse lets what was written still be read."""

JUDGE = "judge"
OPTIONAL: frozenset[str] = frozenset({JUDGE})
"""Processes that stand beside the stream: without them the rest goes on."""

_POLL_S = 0.1
_STOP_S = 20.0
_TAIL_LINES = 15
_FORGIVEN_AFTER_S = 600.0


def processes_of(settings: Settings) -> tuple[str, ...]:
    """``PROCESSES``, and the judge beside the reward worker if the settings name one."""
    if not settings.judge.is_named:
        return tuple(PROCESSES)
    place = PROCESSES.index("reward") + 1
    return (*PROCESSES[:place], JUDGE, *PROCESSES[place:])


class ProcessError(ClawstreamError):
    """One of our processes did not start, or stopped by itself too often."""


@contextlib.contextmanager
def sole_user(run_dir: Path) -> Iterator[None]:
    """Hold a folder for one supervisor: it ends what it finds there, and would end another's.

    Raises:
        ProcessError: Another process holds the folder.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "supervisor.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ProcessError(
                f"another clawstream runs in {run_dir.absolute()}: stop it first, or give this "
                "one a folder of its own (CLAWSTREAM_DATA_DIR)"
            ) from None
        yield


@dataclass(slots=True)
class Child:
    """One running process.

    Attributes:
        name: Its command: ``clawstream <name>``.
        arguments: What follows the command.
        process: The process.
        log_file: Where both of its outputs go.
        log_start: Size of that file when it was started, in bytes.
        restarts: How often it was started again after stopping by itself soon.
        started_s: When it was started, on the monotonic clock.
    """

    name: str
    arguments: tuple[str, ...]
    process: subprocess.Popen[bytes]
    log_file: Path
    log_start: int = 0
    restarts: int = 0
    started_s: float = 0.0

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None


class Supervisor:
    """The processes of one pipeline on this machine.

    Each is a session of its own, so that a Ctrl-C in the terminal reaches only the supervisor,
    which stops them in order. Their ids are kept in a file: what a killed supervisor left behind
    is ended by the next one in the same folder; :func:`sole_user` keeps that from a live one.

    Args:
        run_dir: Holds the logs and the file of process ids.
        config: The settings file given to each process; None leaves them the environment.
        environ: Extra environment for each process.
    """

    def __init__(
        self, run_dir: Path, config: Path | None, environ: Mapping[str, str] | None = None
    ) -> None:
        self._run_dir = run_dir
        self._config = config
        self._environ = {**os.environ, **(environ or {})}
        self._pid_file = run_dir / "processes.json"
        self._children: dict[str, Child] = {}
        run_dir.mkdir(parents=True, exist_ok=True)
        self._end_leftovers()

    @property
    def children(self) -> Mapping[str, Child]:
        """By name, in the order of their start."""
        return self._children

    def start(self, name: str, *arguments: str) -> Child:
        """Start ``clawstream <name>``, again if it ran before."""
        log_file = self._run_dir / "logs" / f"{name}.log"
        log_file.parent.mkdir(parents=True, exist_ok=True)
        config = [] if self._config is None else ["-c", str(self._config)]
        command = [sys.executable, "-m", "streams.cli", *config, name, *arguments]
        with log_file.open("ab") as log:
            log_start = log.tell()
            process = self._spawn(command, log)
        before = self._children.get(name)
        now_s = time.monotonic()
        recent = before is not None and now_s - before.started_s < _FORGIVEN_AFTER_S
        restarts = before.restarts + 1 if before is not None and recent else 0
        child = Child(name, arguments, process, log_file, log_start, restarts, now_s)
        self._children[name] = child
        self._remember()
        return child

    def wait_ready(self, name: str, timeout_s: float) -> dict[str, Any]:
        """Wait until ``name`` has announced that it is ready.

        Returns:
            The facts of its newest announcement.

        Raises:
            ProcessError: The process stopped, or the time ran out; ends with its log's tail.
        """
        child = self._children[name]
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for line in _lines(child):
                if line.startswith("{") and (facts := _ready_facts(line)) is not None:
                    return facts
            if not child.alive:
                raise ProcessError(
                    f"{name} stopped with status {child.process.returncode}:\n{tail(child)}"
                )
            time.sleep(_POLL_S)
        raise ProcessError(f"{name} was not ready within {timeout_s:g} s:\n{tail(child)}")

    def restart_stopped(self, limit: int) -> list[str]:
        """Start again what stopped by itself.

        An optional process that stopped too often is given up, with an error in the log.

        Args:
            limit: Most restarts of one process, not counting those after it ran for long.

        Returns:
            The names of what was started again.

        Raises:
            ProcessError: A required one stopped more often than that, or cannot use its settings,
                which no restart would change; ends with its log's tail.
        """
        stopped = [child for child in self._children.values() if not child.alive]
        for child in stopped:
            if child.name not in OPTIONAL and _refuses_its_settings(child):
                raise ProcessError(f"{child.name} cannot start:\n{tail(child)}")
        lasting = [child for child in stopped if child.restarts >= limit]
        for child in lasting:
            said = (
                f"{child.name} stopped {limit + 1} times, last with status "
                f"{child.process.returncode}:\n{tail(child)}"
            )
            if child.name not in OPTIONAL:
                raise ProcessError(said)
            logger.error("%s\nThe rest goes on without it.", said)
            self.stop([child.name])
        again = [child for child in stopped if child not in lasting]
        for child in again:
            self.start(child.name, *child.arguments)
        return [child.name for child in again]

    def kill(self, name: str) -> None:
        """End a process at once, as a crash would (SIGKILL)."""
        child = self._children[name]
        child.process.kill()
        child.process.wait()

    def stop(self, names: Sequence[str] | None = None) -> None:
        """Stop ``names``, or all in the reverse order of their start; SIGKILL as a last resort."""
        wanted = list(reversed(self._children)) if names is None else list(names)
        with uninterrupted():
            for name in wanted:
                _end(self._children.pop(name).process)
            self._remember()

    def _spawn(self, command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=self._environ,
            start_new_session=True,
        )

    def _remember(self) -> None:
        known = {}
        for child in self._children.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                known[child.process.pid] = psutil.Process(child.process.pid).create_time()
        self._pid_file.write_text(json.dumps(known), encoding="utf-8")

    def _end_leftovers(self) -> None:
        if not self._pid_file.exists():
            return
        try:
            known = json.loads(self._pid_file.read_text(encoding="utf-8"))
        except ValueError:
            known = {}
        for pid, created in known.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(pid))
                # A recycled id belongs to somebody else.
                if process.create_time() == created:
                    process.kill()
                    process.wait(_STOP_S)
        self._pid_file.unlink()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let no impatient second Ctrl-C cut off what stops other processes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tail(child: Child) -> str:
    """The last lines of a process's log."""
    return "\n".join([*_lines(child)[-_TAIL_LINES:], f"(whole log: {child.log_file})"])


def _lines(child: Child) -> list[str]:
    """What the process has logged since its latest start."""
    with child.log_file.open("rb") as log:
        log.seek(child.log_start)
        return log.read().decode(errors="replace").splitlines()


def _refuses_its_settings(child: Child) -> bool:
    """Whether a process that stopped said so before it was ready (``streams.process.report``)."""
    if child.process.returncode != WRONG_SETTINGS:
        return False
    return all(_ready_facts(line) is None for line in _lines(child) if line.startswith("{"))


def _ready_facts(line: str) -> dict[str, Any] | None:
    try:
        facts = json.loads(line)
    except ValueError:
        return None
    return facts if facts.get("event") == READY else None


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
