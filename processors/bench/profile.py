"""Where a process spends its time, by sampling it from within.

Every few milliseconds the kernel interrupts the main thread. Its stack is then charged with
the processor time that it used since the last look, so that waiting costs nothing and no call
is made slower by being counted; a call into C is charged to the Python function that made it.
Other threads are charged as a whole: when Python looks at one it is where it let the
interpreter go, not where it spends its time. Garbage collections are told apart, for they
would be charged to whoever happened to allocate.
"""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

INTERVAL_S = 0.004
_WRITE_S = 1.0
_THREADS = Path("/proc/self/task")

COLLECTING = ("gc:collect",)
THREAD = "thread "

STAGES: Sequence[tuple[str, Sequence[str]]] = (
    ("decode", ("streams.serde.codec:decode", "processors.runtime.decoding")),
    ("encode segments", ("streams.serde.codec:encode",)),
    ("merge", ("processors.feedback_align.watermark",)),
    ("encode state", ("processors.feedback_align.codec",)),
    ("build segments", ("processors.feedback_align.assemble",)),
    ("machine", ("processors.feedback_align.",)),
    ("score", ("processors.reward.",)),
    ("keep state and outputs", ("processors.replay.store",)),
    ("start", ("importlib.",)),
    ("fetch", ("processors.replay.", "processors.runtime.readback", "streams.archive.")),
    ("produce and commit", ("aiokafka.producer", "processors.runtime.state")),
    ("fetch", ("aiokafka.consumer", "aiokafka.record", "processors.runtime.wire")),
    ("fetch", ("processors.runtime.batches", "faust.transport")),
    ("connection", ("aiokafka.",)),
    ("runtime", ("processors.runtime.", "prometheus_client.")),
    ("faust", ("faust.", "mode.")),
    ("garbage collection", ("gc:",)),
    ("event loop", ("asyncio.", "selectors")),
)  # fmt: skip
"""Stages by the innermost frame that belongs to one: ``module`` or ``module:function``
prefixes, the first that fits."""

OTHER = "other"


@dataclass(frozen=True, slots=True)
class Share:
    """What a stage took of the time."""

    stage: str
    seconds: float
    share: float


class Profile:
    """Samples this process and keeps a file up to date.

    Args:
        path: The file: one line per different stack, its frames from outside in with
            semicolons between, a blank and its microseconds, as flame graph tools read it.
        interval_s: Between two looks.
    """

    def __init__(self, path: Path, interval_s: float = INTERVAL_S) -> None:
        self._path = path
        self._interval_s = interval_s
        self._stacks: Counter[tuple[str, ...]] = Counter()
        self._used: dict[int, int] = {}
        self._collecting_since = 0
        self._collected: Counter[int] = Counter()
        self._written_s = 0.0
        self._looking = False
        self._handler: Any = None

    def start(self) -> None:
        """Begin. Only the main thread may.

        It takes SIGALRM, which nothing else of ours does.
        """
        gc.callbacks.append(self._on_collection)
        self._handler = signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, self._interval_s, self._interval_s)

    def stop(self) -> None:
        """End, and write what was seen."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._handler)
        gc.callbacks.remove(self._on_collection)
        self._write()

    def _on_collection(self, phase: str, _info: object) -> None:
        if phase == "start":
            self._collecting_since = time.thread_time_ns()
        else:
            spent = time.thread_time_ns() - self._collecting_since
            self._collected[threading.get_native_id()] += spent

    def _look(self, _signal: int, frame: FrameType | None) -> None:
        if self._looking:
            return
        self._looking = True
        main = threading.main_thread().native_id
        for thread in threading.enumerate():
            native = thread.native_id
            if native is None:
                continue
            stack = _stack(frame) if native == main else (THREAD + thread.name,)
            self._charge(native, stack)
        if time.monotonic() - self._written_s > _WRITE_S:
            self._written_s = time.monotonic()
            self._write()
        self._looking = False

    def _charge(self, native: int, stack: tuple[str, ...]) -> None:
        used_ns = _used_ns(native)
        before = self._used.get(native)
        self._used[native] = used_ns
        if before is not None and used_ns > before:
            collected_ns = self._collected.pop(native, 0)
            self._stacks[COLLECTING] += collected_ns // 1000
            self._stacks[stack] += max(0, used_ns - before - collected_ns) // 1000

    def _write(self) -> None:
        lines = [f"{';'.join(stack)} {spent}\n" for stack, spent in self._stacks.items() if stack]
        temporary = self._path.with_suffix(".part")
        temporary.write_text("".join(lines), encoding="utf-8")
        temporary.replace(self._path)


def _used_ns(native_id: int) -> int:
    """Processor time of a thread, from the kernel's scheduler; 0 once it has ended."""
    try:
        text = (_THREADS / str(native_id) / "schedstat").read_text(encoding="ascii")
    except OSError:
        return 0
    return int(text.split()[0])


def _stack(frame: FrameType | None) -> tuple[str, ...]:
    names: list[str] = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "?")
        # What looks is not what is looked for.
        if module != __name__:
            names.append(f"{module}:{frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(reversed(names))


def read_stacks(path: Path) -> dict[tuple[str, ...], float]:
    """The seconds of each stack in a profile's file."""
    found: dict[tuple[str, ...], float] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        stack, _, spent = line.rpartition(" ")
        found[tuple(stack.split(";"))] = int(spent) / 1e6
    return found


def by_stage(stacks: Mapping[tuple[str, ...], float]) -> list[Share]:
    """What each stage took, the largest first."""
    return _shares(stacks, _stage)


def by_function(stacks: Mapping[tuple[str, ...], float], most: int) -> list[Share]:
    """What the functions took themselves, calls into C included, the largest first."""
    return _shares(stacks, lambda stack: stack[-1])[:most]


def _shares(
    stacks: Mapping[tuple[str, ...], float], name_of: Callable[[tuple[str, ...]], str]
) -> list[Share]:
    spent: dict[str, float] = {}
    for stack, seconds in stacks.items():
        spent[name_of(stack)] = spent.get(name_of(stack), 0.0) + seconds
    total = sum(spent.values()) or 1.0
    ordered = sorted(spent.items(), key=lambda item: -item[1])
    return [Share(name, seconds, seconds / total) for name, seconds in ordered]


def _stage(stack: tuple[str, ...]) -> str:
    if stack[0].startswith(THREAD):
        return stack[0]
    for frame in reversed(stack):
        for stage, prefixes in STAGES:
            if frame.startswith(tuple(prefixes)):
                return stage
    return OTHER


__all__ = ["Profile", "Share", "by_function", "by_stage", "read_stacks"]
