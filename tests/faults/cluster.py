"""Cases in which brokers are killed, cut off, or too few."""

from __future__ import annotations

import time

from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourceType

from tests.faults.registry import case
from tests.faults.scene import PARTITIONS, KeptWorker, Scene

CUTS_S = (20.0, 60.0)
"""Longer than the group's patience with a member; then longer than a client's with a broker."""

DOWN_S = 10.0


def set_config(admin: AdminClient, topic: str, name: str, value: str) -> None:
    """Change one setting of a topic."""
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(20)


def _note_restarts(scene: Scene, kept: KeptWorker) -> None:
    scene.notes.append(f"the worker was started again {kept.restarts} times")


def _bounce(scene: Scene, node: int) -> None:
    """Kill a broker, bring it back a while later, and wait until all copies are there."""
    mark = scene.mark()
    scene.stage.kill(node)
    time.sleep(DOWN_S)
    scene.stage.bring_back()
    scene.resumed(mark)
    scene.stage.wait_in_sync()


@case("7", "leader-bounce", "SIGKILL of the broker that leads an input, back 10 s later", brokers=3)
def leader_bounce(scene: Scene) -> None:
    with scene.load():
        kept = scene.keep("worker", "one")
        kept.worker.wait_ready(60)
        scene.wait_for_outputs(40)
        for number in range(scene.sizes.rounds):
            topic = (scene.topics.turns, scene.topics.segments)[number % 2]
            _bounce(scene, scene.stage.leader(topic, number % PARTITIONS))
    _note_restarts(scene, kept)


@case("8", "coordinator-down", "SIGKILL of the coordinators of group and transactions", brokers=3)
def coordinator_down(scene: Scene) -> None:
    with scene.load():
        kept = scene.keep("worker", "one")
        kept.worker.wait_ready(60)
        scene.wait_for_outputs(40)
        for number in range(scene.sizes.rounds):
            if number % 2 == 0:
                _bounce(scene, scene.stage.group_coordinator(scene.prefix))
            else:
                transactional_id = f"{scene.prefix}-{number % PARTITIONS}"
                _bounce(scene, scene.stage.transaction_coordinator(transactional_id))
    _note_restarts(scene, kept)


@case("9", "cut-from-one", "the worker cut off from one of three brokers", brokers=3)
def cut_from_one(scene: Scene) -> None:
    scene.use_relays()
    with scene.load():
        kept = scene.keep("worker", "one")
        kept.worker.wait_ready(60)
        scene.wait_for_outputs(40)
        nodes = [
            scene.stage.leader(scene.topics.turns, 0),
            scene.stage.group_coordinator(scene.prefix),
        ]
        for node, cut_s in list(zip(nodes, CUTS_S, strict=True))[: scene.sizes.rounds]:
            scene.stage.cut(node)
            time.sleep(cut_s)
            mark = scene.mark()
            scene.stage.relays.mend()
            scene.recovered(mark)
            scene.wait_for_outputs(40)
    _note_restarts(scene, kept)


@case("10", "below-min-isr", "the topic of segments cannot be written for a while", brokers=3)
def below_min_isr(scene: Scene) -> None:
    set_config(scene.admin, scene.topics.segments, "min.insync.replicas", "3")
    with scene.load():
        kept = scene.keep("worker", "one")
        kept.worker.wait_ready(60)
        scene.wait_for_outputs(40)
        scene.stage.kill(scene.stage.leader(scene.topics.segments, 0))
        time.sleep(scene.sizes.outage_s)
        scene.stage.bring_back()
        mark = scene.mark(silent=True)
        scene.recovered(mark)
    scene.notes.append(f"unwritable for {scene.sizes.outage_s:.0f} s")
    _note_restarts(scene, kept)
