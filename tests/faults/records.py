"""Cases in which the records themselves are the fault."""

from __future__ import annotations

from tests.faults.load import POISON, LoadPlan
from tests.faults.registry import case
from tests.faults.scene import Scene


def _under(scene: Scene, plan: LoadPlan) -> None:
    """Run a worker under a load, and kill it once in the middle."""
    with scene.load(plan) as load:
        for _ in range(4 * len(POISON) if plan.poison else 0):
            load.poison()
        worker = scene.start("worker", "one")
        worker.wait_ready(60)
        scene.wait_for_outputs(150)
        worker.kill()
        mark = scene.mark()
        scene.start("worker", "one")
        scene.recovered(mark)
        scene.wait_for_outputs(150)


@case("11", "poison", "bad bytes, unknown schemas, nulls, oversized and misplaced records")
def poison(scene: Scene) -> None:
    _under(scene, LoadPlan(scripts=scene.sizes.scripts, poison=15, misplaced=10))


@case("12", "disorder", "every second record sent again later, out of order")
def disorder(scene: Scene) -> None:
    _under(scene, LoadPlan(scripts=scene.sizes.scripts, echo=50))


@case("13", "clock-skew", "events that claim to be of 1970 and of 2099")
def clock_skew(scene: Scene) -> None:
    _under(scene, LoadPlan(scripts=scene.sizes.scripts, skew=15))
