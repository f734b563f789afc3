"""Where a process spends its time, by sampling it from within.

Every few milliseconds a thread looks at the stacks of all threads and charges each with the
processor time it used since the last look, so that waiting costs nothing and no call is made
slower by being counted. Samples fall between bytecodes: a call into C is charged to the
Python function that made it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

INTERVAL_S = 0.004
SWITCH_S = 0.0002
_THREADS = Path("/proc/self/task")

STAGES: Sequence[tuple[str, Sequence[str]]] = (
    ("decode", ("streams.serde.codec:decode", "processors.runtime.decoding")),
    ("encode segments", ("streams.serde.codec:encode",)),
    ("merge", ("processors.feedback_align.watermark",)),
    ("encode state", ("processors.feedback_align.codec",)),
    ("build segments", ("processors.feedback_align.assemble",)),
    ("machine", ("processors.feedback_align.",)),
    ("produce and commit", ("aiokafka.producer", "processors.runtime.state")),
    ("fetch", ("aiokafka.consumer", "aiokafka.record", "processors.runtime.wire")),
    ("fetch", ("processors.runtime.batches", "faust.transport")),
    ("connection", ("aiokafka.",)),
    ("runtime", ("processors.runtime.", "prometheus_client.")),
    ("faust", ("faust.", "mode.")),
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
    """Samples this process until it ends and keeps a file up to date.

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

    def start(self) -> None:
        """Begin, in a daemon thread."""
        threading.Thread(target=self._run, name="profile", daemon=True).start()

    def _run(self) -> None:
        me = threading.get_ident()
        # Else a look would come when a thread lets go by itself, to wait: that would be blamed.
        sys.setswitchinterval(SWITCH_S)
        written_s = time.monotonic()
        while True:
            time.sleep(self._interval_s)
            self._look(me)
            if time.monotonic() - written_s > 1:
                self._write()
                written_s = time.monotonic()

    def _look(self, me: int) -> None:
        natives = {t.ident: t.native_id for t in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            native = natives.get(ident)
            if ident == me or native is None:
                continue
            used_ns = _used_ns(native)
            before = self._used.get(native)
            self._used[native] = used_ns
            if before is not None and used_ns > before:
                self._stacks[_stack(frame)] += (used_ns - before) // 1000

    def _write(self) -> None:
        lines = [f"{';'.join(stack)} {spent}\n" for stack, spent in self._stacks.items()]
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
    for frame in reversed(stack):
        for stage, prefixes in STAGES:
            if frame.startswith(tuple(prefixes)):
                return stage
    return OTHER


__all__ = ["Profile", "Share", "by_function", "by_stage", "read_stacks"]
