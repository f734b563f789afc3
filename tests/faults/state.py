"""Cases in which what is kept is the fault: offsets, changelog, data folder, open sessions."""

from __future__ import annotations

import shutil
import time

from confluent_kafka import TopicPartition
from confluent_kafka.cimpl import NewTopic

from streams.contracts import DialogueTurn, Role
from streams.kafka.clients import partition_for
from tests.faults.cluster import set_config
from tests.faults.load import LoadPlan
from tests.faults.registry import case
from tests.faults.scene import PARTITIONS, STATE_CONFIG, Scene, stop_cleanly
from tests.integration.harness import WorkerProcess, wait_until

REFUSING_S = 15.0
IDLE_SESSIONS = 8


def _stopped(worker: WorkerProcess) -> str:
    """Wait until it has ended by itself with a failure; what it said."""
    assert worker.process.wait(90) == 1
    return worker.output()


@case("15a", "offsets-aged-out", "the group's offsets are lost, then records before they were read")
def offsets_aged_out(scene: Scene) -> None:
    with scene.load():
        worker = scene.start("worker")
        worker.wait_ready(60)
        scene.wait_for_outputs(60)
        stop_cleanly(worker)
        for future in scene.admin.delete_consumer_groups([scene.prefix]).values():
            future.result(20)
        mark = scene.mark()
        worker = scene.start("worker")
        scene.recovered(mark)
    # Nothing is open when the records go: what is left then is right by itself.
    scene.settle()
    applied = _committed(scene)
    with scene.load():
        scene.wait_until_sent(300)
    scene.watcher.catch_up()
    _cut(scene, applied)
    with scene.load(LoadPlan(scripts=scene.sizes.scripts, seed=8)):
        mark = scene.mark()
        worker = scene.start("worker")
        scene.recovered(mark)
        said = "aged out before they were applied"
        wait_until(lambda: said in worker.output(), "the loss is told", 60)
        scene.wait_for_outputs(60)
    scene.notes.append(f"{len(scene.unread)} records were gone before they were read")


def _committed(scene: Scene) -> dict[tuple[str, int], int]:
    """The group's offsets."""
    places = [TopicPartition(topic, p) for topic, p in scene.inputs]
    return {(p.topic, p.partition): p.offset for p in scene.committed(places)}


def _cut(scene: Scene, applied: dict[tuple[str, int], int]) -> None:
    """Drop all records there are, as retention does, and note those that nobody read."""
    for topic in (scene.topics.turns, scene.topics.feedback):
        for seen in scene.watcher.seen(topic):
            record = seen.record
            if record.offset >= applied[topic, record.partition]:
                scene.unread.add((topic, record.partition, record.offset))
    places = [TopicPartition(topic, p, -1) for topic, p in scene.inputs]
    for future in scene.admin.delete_records(places).values():
        future.result(20)


@case("15b", "corrupt-state", "garbage in the changelog, then what the error says to do")
def corrupt_state(scene: Scene) -> None:
    with scene.load():
        worker = scene.start("worker", "one")
        worker.wait_ready(60)
        scene.wait_for_outputs(60)
        worker.kill()
        scene.producer.produce(scene.state_topic, key=b"garbage", value=b"garbage", partition=1)
        assert scene.producer.flush(30) == 0
        said = _stopped(scene.start("worker", "one"))
        assert f"{scene.state_topic} partition 1" in said, said[-2000:]
        assert "the inputs are read from their beginning" in said, said[-2000:]
        _begin_anew(scene)
        mark = scene.mark()
        scene.start("worker", "one")
        scene.recovered(mark)
        scene.wait_for_outputs(60)
    # All is published once more, the same bytes under the same ids.
    scene.allow_repeats = True


def _begin_anew(scene: Scene) -> None:
    """Make the changelog anew: the inputs are read from their beginning."""
    for future in scene.admin.delete_topics([scene.state_topic]).values():
        future.result(20)
    known = scene.admin.list_topics
    wait_until(lambda: scene.state_topic not in known(timeout=20).topics, "the topic is gone", 60)
    topic = NewTopic(
        scene.state_topic,
        num_partitions=PARTITIONS,
        replication_factor=scene.kafka.replicas,
        config=STATE_CONFIG,
    )
    for future in scene.admin.create_topics([topic]).values():
        future.result(20)
    scene.wait_for_leaders()


@case("15c", "unwritable-state", "a changelog that takes no records for a while")
def unwritable_state(scene: Scene) -> None:
    with scene.load():
        kept = scene.keep("worker", "one")
        kept.worker.wait_ready(60)
        scene.wait_for_outputs(60)
        set_config(scene.admin, scene.state_topic, "max.message.bytes", "60")
        wait_until(lambda: kept.restarts > 0, "the worker ends", 60)
        before = scene.watcher.count(scene.topics.segments)
        time.sleep(REFUSING_S)
        assert scene.watcher.count(scene.topics.segments) == before, "outputs without their state"
        most = STATE_CONFIG["max.message.bytes"]
        set_config(scene.admin, scene.state_topic, "max.message.bytes", most)
        mark = scene.mark()
        scene.recovered(mark)
        scene.wait_for_outputs(60)
    scene.notes.append(f"the worker was started again {kept.restarts} times")


@case(
    "15d",
    "lost-data-folder",
    "the worker's data folder is deleted, as it runs and while it is dead",
)
def lost_data_folder(scene: Scene) -> None:
    with scene.load():
        worker = scene.start("worker", "one")
        worker.wait_ready(60)
        scene.wait_for_outputs(60)
        shutil.rmtree(scene.data_dir("worker"))
        scene.wait_for_outputs(60)
        worker.kill()
        shutil.rmtree(scene.data_dir("worker"), ignore_errors=True)
        mark = scene.mark()
        scene.start("worker", "one")
        scene.recovered(mark)
        scene.wait_for_outputs(60)


@case("15e", "idle-partition", "open sessions in a partition to which nothing comes, and a kill")
def idle_partition(scene: Scene) -> None:
    gap_s = scene.settings.gap_ms / 1000
    plan = LoadPlan(scripts=scene.sizes.scripts, silent=frozenset({0}), misplaced=0)
    with scene.load(plan) as load:
        worker = scene.start("worker", "one")
        worker.wait_ready(60)
        scene.wait_for_outputs(30)
        for number in range(2 * scene.sizes.rounds):
            for session in _sessions(number):
                for role in (Role.USER, Role.ASSISTANT):
                    value = load.codec.encode(_turn(session, role), scene.topics.turns)
                    load.produce(scene.topics.turns, session, value)
            mark = scene.mark(0)
            if number % 2 == 1:
                # They must be read, and not closed yet.
                time.sleep(gap_s / 2)
                worker.kill()
                mark = scene.mark(0)
                worker = scene.start("worker", "one")
            scene.recovered(mark)
    scene.notes.append(f"closed {gap_s:.1f} s after their last turn at the earliest")


def _sessions(number: int) -> list[str]:
    """Names of sessions that belong to partition 0."""
    names = (f"idle-{number}-{i}" for i in range(100))
    return [n for n in names if partition_for(n.encode(), PARTITIONS) == 0][:IDLE_SESSIONS]


def _turn(session: str, role: Role) -> DialogueTurn:
    return DialogueTurn(
        event_id=f"{session}-{role}-e",
        session_id=session,
        turn_id=f"{session}-{role}",
        role=role,
        content="hi",
        event_time=time.time_ns() // 1_000_000,
        source="gateway",
    )
