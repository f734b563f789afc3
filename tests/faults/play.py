"""Plays cases one after the other, and keeps what came of each."""

from __future__ import annotations

import time
import traceback
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.registry import Case
from tests.faults.scene import WORKER, Kafka, Scene
from tests.faults.sizes import Sizes
from tests.faults.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of one case.

    Attributes:
        number: Of the case in the matrix.
        case: Its name.
        what: What was done.
        events: Records that were sent.
        segments: Segments and revisions that had to come of them.
        revisions: Of these, revisions.
        dead_letters: Dead letters that had to come of them.
        lost: Outputs that did not come.
        duplicated_ids: Outputs that are there more than once.
        wrong: Outputs that must not be there.
        faults: How often recovery was timed.
        recovery_s: The longest time from a fault, or the restart after it, to the first new
            output of every affected partition.
        median_recovery_s: The median of these times.
        seconds: The whole case took.
        passed: Whether the topics hold what the oracle says.
        notes: What else is worth knowing, or why it failed.
    """

    number: str
    case: str
    what: str
    events: int
    segments: int
    revisions: int
    dead_letters: int
    lost: int
    duplicated_ids: int
    wrong: int
    faults: int
    recovery_s: float | None
    median_recovery_s: float | None
    seconds: float
    passed: bool
    notes: tuple[str, ...]


def play(
    case: Case, kafka: Kafka, folder: Path, sizes: Sizes, worker: Sequence[str] = WORKER
) -> Row:
    """Play a case over topics of its own.

    Args:
        case: Which.
        kafka: Where.
        folder: Scratch space; logs of workers stay there.
        sizes: How long and how often.
        worker: Module and first arguments of the worker under test.
    """
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    scene = Scene(kafka, folder, f"{case.name}-{uuid.uuid4().hex[:8]}", sizes, worker)
    try:
        case.play(scene)
        verdict = scene.settle()
        return _row(case, scene, verdict, time.monotonic() - began)
    except Exception as error:
        scene.notes.append(_reason(error))
        return _row(case, scene, None, time.monotonic() - began)
    finally:
        if kafka.stage is not None:
            kafka.stage.restore()
        scene.close()


def _reason(error: Exception) -> str:
    if isinstance(error, AssertionError):
        return f"failed: {error}"
    return "failed: " + "".join(traceback.format_exception(error)[-3:])


def _counted(notes: Sequence[str]) -> list[str]:
    counts = Counter(notes)
    return [note if count == 1 else f"{note} ({count} times)" for note, count in counts.items()]


def _row(case: Case, scene: Scene, verdict: Verdict | None, seconds: float) -> Row:
    found = verdict or Verdict(scene.sent_so_far(), 0, 0, 0, 0, 0, 0)
    times = sorted(scene.recoveries)
    right = found.exact_by_id if scene.allow_repeats else found.exact
    return Row(
        number=case.number,
        case=case.name,
        what=case.what,
        events=found.events,
        segments=found.segments,
        revisions=found.revisions,
        dead_letters=found.dead_letters,
        lost=found.lost,
        duplicated_ids=found.duplicated,
        wrong=found.wrong,
        faults=len(times),
        recovery_s=round(times[-1], 1) if times else None,
        median_recovery_s=round(times[len(times) // 2], 1) if times else None,
        seconds=round(seconds, 1),
        passed=verdict is not None and right and found.revisions > 0,
        notes=(*_counted(scene.notes), *([found.example] if found.example else [])),
    )
