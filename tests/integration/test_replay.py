"""A shadow replay against a real aligner's topics."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from processors.replay import shadow
from processors.replay.compare import Comparison, Head
from processors.replay.report import Outcomes, compare_with_live, outcomes
from processors.replay.shadow import Job, Progress, prepare, replay_partition, store_path
from processors.replay.stages import segment_reader
from processors.replay.store import PartitionStore
from streams.archive.reading import Archive
from streams.archive.store import LocalStore
from streams.archive.writing import Archiver, Rolling
from streams.contracts import DialogueTurn, FeedbackEvent, Record, TrajectorySegment
from streams.errors import ReplayError
from streams.kafka.places import KafkaLog, Place, Range, ranges_between, resolve
from streams.serde import build_codec, load_schemas
from streams.settings import Settings, load_settings
from tests.conftest import CreateTopics
from tests.integration.align_worker import configs_of, topics_of
from tests.integration.harness import DEADLINE_S, ROOT, wait_until
from tests.integration.test_live_equals_replay import RULES, ReplayBench, conversations

pytestmark = pytest.mark.broker

PARTITIONS = 4


class Shadow(ReplayBench):
    """A live aligner that has come to rest, and replays of its inputs."""

    def __init__(self, bootstrap: str, folder: Path, prefix: str) -> None:
        super().__init__(bootstrap, folder, prefix)
        self.output = topics_of(f"{prefix}-live").segments

    def run_live(self) -> None:
        live = self.start("live")
        live.wait_ready()
        self.converse(conversations("talk", 60, over_s=2.0, rng=random.Random(4)))
        self.assert_equal("live", self.expected())
        live.stop_in_peace()

    def settings(self, **align: int) -> Settings:
        rules = RULES.model_dump() | align
        return load_settings(self.config("shadow", align=rules))

    def ranges(self, begin: Place | None = None) -> tuple[Range, ...]:
        topics = {self.inputs.turns: PARTITIONS, self.inputs.feedback: PARTITIONS}
        reader = Consumer({"bootstrap.servers": self.bootstrap, "group.id": "places"})
        try:
            starts = resolve(KafkaLog(reader), topics, begin or Place("earliest"), is_end=False)
            ends = resolve(KafkaLog(reader), topics, Place("latest"), is_end=True)
        finally:
            reader.close()
        return tuple(ranges_between(starts, ends))

    def job(self, **options: Any) -> Job:
        inputs = (self.inputs.turns, self.inputs.feedback)
        fields: dict[str, Any] = {
            "stage": "align",
            "ranges": self.ranges(),
            "compare_from_ms": 0,
            "read_from_ms": 0,
        }
        return Job(**fields | {"inputs": inputs, "output": self.output} | options)

    def replay(self, name: str, job: Job, **align: int) -> tuple[Outcomes, Comparison]:
        """One after the other in this process: what processes add is tested by itself."""
        folder = self.folder / name
        settings = self.settings(**align)
        prepare(folder, job, settings)
        for partition in range(PARTITIONS):
            replay_partition(folder, partition, lambda _: None)
        return outcomes(folder), compare_with_live(folder, settings)

    def archive(self) -> Archive:
        """The inputs and the live outputs as an archiver leaves them, in several files each."""
        store = LocalStore(self.folder / "archive")
        types: dict[str, type[Record] | None] = {
            self.inputs.turns: DialogueTurn,
            self.inputs.feedback: FeedbackEvent,
            self.output: TrajectorySegment,
        }
        Archiver(
            self.settings(),
            store,
            build_codec(),
            load_schemas(),
            Rolling(size_bytes=4_000, age_s=60),
            types=types,
        ).run(once=True)
        return Archive(store)

    def delete_all(self, *topics: str) -> None:
        """Delete all records, as retention does."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        ends = [TopicPartition(topic, p, -1) for topic in topics for p in range(PARTITIONS)]
        for future in admin.delete_records(ends).values():
            future.result(DEADLINE_S)

    def made(self, name: str) -> list[tuple[Head, bytes]]:
        head_of = segment_reader(build_codec())
        found: list[tuple[Head, bytes]] = []
        for partition in range(PARTITIONS):
            store = PartitionStore(store_path(self.folder / name, partition))
            found.extend((head_of(value), value) for _, value in store.made())
            store.close()
        return sorted(found, key=lambda item: (item[0].segment_id, item[0].revision))


@pytest.fixture
def bench(
    kafka_bootstrap: str,
    create_topics: CreateTopics,
    unique_name: Callable[[str], str],
    tmp_path: Path,
) -> Iterator[Shadow]:
    prefix = unique_name("shadow")
    topics = configs_of(prefix, PARTITIONS)
    live = configs_of(f"{prefix}-live", PARTITIONS)
    create_topics({**topics, **live})
    made = Shadow(kafka_bootstrap, tmp_path, prefix)
    yield made
    made.stop_all()


def test_a_shadow_of_the_same_code_differs_in_nothing(bench: Shadow) -> None:
    bench.run_live()
    ends = bench.ranges()
    came, found = bench.replay("same", bench.job())
    assert found.is_equal, found.examples
    written, died = bench.expected()
    assert found.equal == came.outputs == written.total() > 50
    assert (found.not_yet_live, found.began_before) == (0, 0)
    assert sum(came.others.values()) == died.total()
    # Nothing was produced, ticks included.
    assert bench.ranges() == ends

    _shows_what_other_rules_change(bench)
    _reads_single_sessions(bench)
    _begins_in_the_middle(bench)
    _refuses_a_folder_of_something_else(bench)


def _shows_what_other_rules_change(bench: Shadow) -> None:
    _, found = bench.replay("other", bench.job(), settle_ms=100)
    assert not found.is_equal
    assert found.fields["settle_ms"] == found.different > 0
    assert len(found.examples) > 0


def _reads_single_sessions(bench: Shadow) -> None:
    names = ("talk-3", "talk-8")
    came, found = bench.replay("two", bench.job(sessions=names))
    assert found.is_equal, found.examples
    assert {head.session for head, _ in bench.made("two")} == {f"default/{name}" for name in names}
    assert found.equal == came.outputs >= 2
    with pytest.raises(ReplayError, match="no segment of the session nobody"):
        bench.replay("mistyped", bench.job(sessions=("talk-3", "nobody")))


def _begins_in_the_middle(bench: Shadow) -> None:
    """Sessions that began before are not compared; all others are, and are equal."""
    moments = sorted(head.closed_at for head, _ in bench.made("same"))
    middle = moments[len(moments) // 2]
    begin_ms = middle - RULES.max_open_ms
    ranges = bench.ranges(Place("x", time_ms=begin_ms))
    job = bench.job(ranges=ranges, read_from_ms=begin_ms, compare_from_ms=middle)
    _, found = bench.replay("middle", job)
    assert found.is_equal, found.examples
    assert 0 < found.equal < len(moments)


def _refuses_a_folder_of_something_else(bench: Shadow) -> None:
    with pytest.raises(ReplayError, match=r"job\.json differs"):
        prepare(bench.folder / "same", bench.job(sessions=("x",)), bench.settings())
    with pytest.raises(ReplayError, match=r"rules\.json differs"):
        prepare(bench.folder / "same", bench.job(), bench.settings(gap_ms=500))


SLOWLY = """
import sys
from pathlib import Path
from processors.replay import shadow

if __name__ == "__main__":
    shadow.BATCH_RECORDS = 5
    shadow.run(Path(sys.argv[1]), lambda progress: print(progress, flush=True), rate_per_s=60)
"""


def test_a_replay_that_is_killed_goes_on_where_it_stood(bench: Shadow) -> None:
    bench.run_live()
    bench.replay("whole", bench.job())
    folder = bench.folder / "killed"
    prepare(folder, bench.job(), bench.settings())
    script = bench.folder / "slowly.py"
    script.write_text(SLOWLY, encoding="utf-8")
    for _ in range(2):
        killed = subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            start_new_session=True,
            stdout=subprocess.PIPE,
        )
        try:
            before = _kept(folder)
            wait_until(lambda: _kept(folder) > before + 20, "some more is replayed", DEADLINE_S)  # noqa: B023
        finally:
            os.killpg(killed.pid, signal.SIGKILL)
            killed.communicate()
    with pytest.raises(ReplayError, match="is not done"):
        outcomes(folder)
    reached: list[Progress] = []
    shadow.run(folder, reached.append)
    assert bench.made("killed") == bench.made("whole")
    assert outcomes(folder) == outcomes(bench.folder / "whole")
    assert {item.partition for item in reached} == set(range(PARTITIONS))
    assert compare_with_live(folder, bench.settings()).is_equal


def _kept(folder: Path) -> int:
    """Records applied and kept so far."""
    total = 0
    for partition in range(PARTITIONS):
        if store_path(folder, partition).exists():
            store = PartitionStore(store_path(folder, partition))
            total += store.counts().get("records", 0)
            store.close()
    return total


def test_records_deleted_meanwhile_are_an_error_that_names_them(bench: Shadow) -> None:
    bench.converse(conversations("talk", 20, over_s=0.2, rng=random.Random(4)))
    job = bench.job()
    folder = bench.folder / "gone"
    prepare(folder, job, bench.settings())
    item = max(job.ranges, key=lambda one: one.records)
    admin = AdminClient({"bootstrap.servers": bench.bootstrap})
    place = TopicPartition(item.topic, item.partition, item.end - 1)
    for future in admin.delete_records([place]).values():
        future.result(DEADLINE_S)
    with pytest.raises(ReplayError, match=f"{item.topic} partition {item.partition} no longer has"):
        shadow.run(folder, lambda _: None)


def test_an_archive_is_replayed_as_its_topics_are(bench: Shadow) -> None:
    bench.run_live()
    archive = bench.archive()
    assert max(len(files) for files in archive.footers(bench.inputs.turns).values()) > 1
    came, found = bench.replay("topics", bench.job())
    assert found.is_equal, found.examples
    archived = tuple(
        Range(topic, partition, *archive.range(topic, partition))
        for topic in (bench.inputs.feedback, bench.inputs.turns)
        for partition in range(PARTITIONS)
    )
    # A marker of a transaction may be the last of a topic; the archive has what is before it.
    assert [one.start for one in archived] == [one.start for one in bench.ranges()]
    job = bench.job(ranges=archived, archive=archive.address, against="archive")
    # In the live topic, nothing will be left to compare with.
    live = bench.job(ranges=archived, archive=archive.address, against="live")
    bench.delete_all(bench.inputs.turns, bench.inputs.feedback, bench.output)

    again, compared = bench.replay("archive", job)
    assert bench.made("archive") == bench.made("topics")
    assert again == came
    assert compared == found
    _, nothing = bench.replay("live", live)
    assert (nothing.equal, nothing.not_yet_live) == (0, found.equal)
