"""Cases in which workers are killed, frozen, stopped and moved."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from functools import partial

import psutil

from tests.faults.registry import case
from tests.faults.scene import Scene, stop_cleanly
from tests.integration.harness import WorkerProcess, wait_until


@case("1a", "kill-mid-batch", "SIGKILL in the middle of batches")
def kill_mid_batch(scene: Scene) -> None:
    moments = random.Random(3)
    with scene.load():
        worker = scene.start("worker", "one")
        worker.wait_ready(60)
        scene.wait_for_outputs(20)
        for _ in range(scene.sizes.kills):
            time.sleep(moments.uniform(0.0, 0.4))
            freeze_at_work(worker, scene.open_transactions)
            worker.kill()
            mark = scene.mark()
            worker = scene.start("worker", "one")
            scene.recovered(mark)


@case("1b", "kill-processors", "SIGKILL of a process that applies records, under its worker")
def kill_processors(scene: Scene) -> None:
    moments = random.Random(6)
    slowest = 0.0
    with scene.load():
        for _ in range(scene.sizes.kills):
            worker = scene.start("worker", "one")
            worker.wait_ready(60)
            scene.wait_for_outputs(20)
            time.sleep(moments.uniform(0.0, 0.4))
            moments.choice(psutil.Process(worker.process.pid).children()).kill()
            mark, began = scene.mark(), time.monotonic()
            assert worker.process.wait(60) == 1
            slowest = max(slowest, time.monotonic() - began)
            assert "the process that applies records" in worker.output(), worker.output()[-3000:]
        scene.start("worker", "one")
        scene.recovered(mark)
    scene.notes.append(f"the worker ended within {slowest:.1f} s")


@case("2", "kill-before-commit", "SIGKILL after outputs were taken, before anything was committed")
def kill_before_commit(scene: Scene) -> None:
    with scene.load():
        worker = scene.start("worker")
        worker.wait_ready(60)
        scene.wait_for_outputs(20)
        for number in range(2 * scene.sizes.rounds):
            if number % 2 == 0:
                freeze_at_work(worker, scene.open_outputs)
            else:
                # The transaction has ended, the group's offsets are committed once a second.
                scene.wait_for_outputs(1)
            worker.kill()
            mark = scene.mark()
            # No static member: its successor waits for the session timeout.
            worker = scene.start("worker")
            scene.recovered(mark)


def freeze_at_work(worker: WorkerProcess, is_at_work: Callable[[], int]) -> None:
    """Freeze a worker with a transaction open."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert worker.process.poll() is None, f"it ended by itself:\n{worker.output()[-3000:]}"
        worker.process.send_signal(signal.SIGSTOP)
        if is_at_work():
            return
        worker.process.send_signal(signal.SIGCONT)
        time.sleep(0.02)
    raise AssertionError("the worker was never seen with a transaction open")


@case("3", "kill-in-recovery", "SIGKILL while the state is restored, and a second worker meanwhile")
def kill_in_recovery(scene: Scene) -> None:
    moments = random.Random(4)
    scene.use_relays()
    with scene.load():
        worker = scene.start("worker", "one")
        worker.wait_ready(60)
        scene.wait_for_outputs(100)
        for _ in range(2 * scene.sizes.rounds):
            worker.kill()
            # Slow answers stretch the restore.
            scene.stage.relays.slow(0.05)
            mark = scene.mark()
            worker = scene.start("worker", "one")
            wait_until(lambda it=worker: _is_restoring(it), "a restore", 60)  # type: ignore[misc]
            time.sleep(moments.uniform(0.0, 0.3))
            assert not _is_ready(worker), "the restore was over: slow it down more"
        other = scene.start("other")
        time.sleep(moments.uniform(0.5, 1.5))
        scene.stage.relays.mend()
        other.wait_ready(90)
        scene.recovered(mark)


def _is_restoring(worker: WorkerProcess) -> bool:
    assert worker.process.poll() is None, f"it ended by itself:\n{worker.output()[-3000:]}"
    return "Executing _on_partitions_assigned" in worker.output()


def _is_ready(worker: WorkerProcess) -> bool:
    return '{"event": "ready"' in worker.output()


@case("4a", "zombie", "SIGSTOP past the session timeout, a successor, then SIGCONT")
def zombie(scene: Scene) -> None:
    _freeze_and_replace(scene, None)


@case("4b", "zombie-namesake", "the same, its successor a static member of the same name")
def zombie_namesake(scene: Scene) -> None:
    _freeze_and_replace(scene, "one")


def _freeze_and_replace(scene: Scene, instance: str | None) -> None:
    with scene.load():
        frozen = scene.start("worker-0", instance)
        frozen.wait_ready(60)
        for number in range(1, scene.sizes.rounds + 1):
            scene.wait_for_outputs(20)
            freeze_at_work(frozen, scene.open_outputs)
            mark = scene.mark()
            successor = scene.start(f"worker-{number}", instance)
            successor.wait_ready(60)
            if number % 2 == 0:
                # Long after its successor took over, in place of just then.
                scene.wait_for_outputs(60)
            gave_way = partial(_gave_way, frozen, _times_ready(frozen))
            frozen.process.send_signal(signal.SIGCONT)
            scene.recovered(mark)
            wait_until(gave_way, "the frozen one gives way", 90)
            scene.wait_for_outputs(40)
            if frozen.process.poll() is None:
                stop_cleanly(frozen)
                scene.notes.append("came back into the group")
            else:
                scene.notes.append("ended fenced")
            frozen = successor


def _times_ready(worker: WorkerProcess) -> int:
    return worker.output().count("Worker ready")


def _gave_way(worker: WorkerProcess, times_ready: int) -> bool:
    """Whether it ended because it was fenced, or is a member of the group once more."""
    code = worker.process.poll()
    if code is not None:
        assert code == 1, f"exit code {code}"
        assert "Fenced" in worker.output(), worker.output()[-3000:]
        return True
    return _times_ready(worker) > times_ready


@case("5", "rebalance", "one worker, three, each restarted in turn, one")
def rebalance(scene: Scene) -> None:
    with scene.load():
        workers = [scene.start("worker-1")]
        workers[0].wait_ready(60)
        scene.wait_for_outputs(20)
        mark = scene.mark()
        workers += [scene.start("worker-2"), scene.start("worker-3")]
        wait_until(lambda: all(map(_owns_one, workers)), "one partition each", 90)
        scene.resumed(mark)
        for number in range(len(workers)):
            mark = scene.mark()
            stop_cleanly(workers[number])
            workers[number] = scene.start(f"worker-{number + 4}")
            workers[number].wait_ready(60)
            scene.resumed(mark)
        for worker in workers[1:]:
            mark = scene.mark()
            stop_cleanly(worker)
            scene.resumed(mark)


def _owns_one(worker: WorkerProcess) -> bool:
    lines = [line for line in worker.output().splitlines() if "owns partitions" in line]
    return bool(lines) and lines[-1].partition("[")[2].partition("]")[0].isdigit()


@case("6", "sigterm", "SIGTERM with events in flight")
def sigterm(scene: Scene) -> None:
    moments = random.Random(5)
    slowest = 0.0
    with scene.load():
        worker = scene.start("worker")
        worker.wait_ready(60)
        for _ in range(2 * scene.sizes.rounds):
            scene.wait_for_outputs(10)
            time.sleep(moments.uniform(0.0, 0.4))
            began = time.monotonic()
            stop_cleanly(worker)
            slowest = max(slowest, time.monotonic() - began)
            mark = scene.mark()
            worker = scene.start("worker")
            scene.recovered(mark)
    scene.notes.append(f"SIGTERM took {slowest:.1f} s at most")
