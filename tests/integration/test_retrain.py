"""Retrains of a real topic, one of them killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from confluent_kafka import Producer, TopicPartition

from learner.loop import Topics
from learner.retrain.command import Done, Wanted, begin, folder_of, go_on, look
from learner.retrain.run import BATCHES
from learner.trainer import make_trainer
from streams.archive.store import LocalStore
from streams.archive.writing import Archiver, Rolling
from streams.contracts import TICK_HEADER, ScoredSegment, VersionStatus
from streams.errors import ArchiveError, LearnerError, RegistryError, ReplayError
from streams.kafka.clients import make_admin
from streams.serde import build_codec, load_schemas
from streams.settings import Settings, load_settings
from tests.conftest import CreateTopics
from tests.integration.harness import ROOT, wait_until
from tests.integration.test_learner import DEADLINE_S
from tests.unit.learner.fakes import encoded
from tests.unit.learner.retrain.test_run import segment

pytestmark = pytest.mark.broker

PARTITIONS = 2
SEGMENTS = 24
ALL = Wanted(begin="earliest", end="latest", base_version=0, updates=None)


class Rig:
    """A topic of scored segments, and retrains of it with the tiny model."""

    def __init__(self, folder: Path, bootstrap: str, name: Callable[[str], str]) -> None:
        self.names = Topics(scored=name("scored"), versions=name("versions"))
        self.config = folder / "settings.yaml"
        values = {
            "data_dir": str(folder / "data"),
            "kafka": {"bootstrap_servers": bootstrap},
            "model": {"base": "tiny-random", "device": "cpu", "lora_rank": 2, "num_threads": 1},
            "learner": {"batch_segments": 2, "min_sample_size": 2, "epochs": 1},
        }
        self.config.write_text(yaml.safe_dump(values), encoding="utf-8")
        self.settings: Settings = load_settings(self.config)
        self._producer = Producer({"bootstrap.servers": bootstrap, "log_level": 2})

    def fill(self) -> None:
        """Segments, an older revision behind a newer one, a tick, and what cannot be read."""
        for number in range(SEGMENTS):
            self._send(encoded(segment(number, revision=number % 2)), number % PARTITIONS)
        self._send(encoded(segment(1)), 1)
        self._send(encoded(segment(50, policy="npc")), 0)
        self._send(encoded(segment(51, trainable=False)), 0)
        self._send(b"no record", 0)
        self._send(None, 1, headers={TICK_HEADER: b"1"})
        assert self._producer.flush(DEADLINE_S) == 0

    def _send(
        self,
        value: bytes | None,
        partition: int,
        headers: dict[str, str | bytes | None] | None = None,
    ) -> None:
        self._producer.produce(
            self.names.scored, value=value, partition=partition, headers=headers or {}
        )

    def retrain(self, name: str, wanted: Wanted = ALL) -> Done:
        return self.go_on(begin(self.settings, wanted, self.names, name))

    def go_on(self, folder: Path) -> Done:
        return go_on(self.settings, folder, self.names, make_trainer, read=_ignore, updated=_ignore)

    def killed(self, name: str) -> Path:
        """A retrain whose process was killed after an update."""
        folder = begin(self.settings, ALL, self.names, name)
        command = [sys.executable, "-m", "tests.integration.retrain_worker", str(self.config)]
        command += [self.names.scored, self.names.versions, name]
        log = folder / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(command, cwd=ROOT, stderr=file)
        try:
            wait_until(
                lambda: process.poll() is not None or any(folder.glob("state-*")),
                log.read_text,
                DEADLINE_S,
            )
        finally:
            process.kill()
        assert process.wait(DEADLINE_S) == -signal.SIGKILL, log.read_text()
        return folder

    def archive(self) -> str:
        """The topic of scored segments as an archiver leaves it; its address."""
        store = LocalStore(Path(self.settings.effective_archive_url))
        Archiver(
            self.settings,
            store,
            build_codec(),
            load_schemas(),
            Rolling(size_bytes=8_000, age_s=60),
            types={self.names.scored: ScoredSegment},
        ).run(once=True)
        return store.address

    def delete_all(self) -> None:
        """As retention does."""
        admin = make_admin(self.settings.kafka, str(self.settings.kafka.bootstrap_servers))
        ends = [TopicPartition(self.names.scored, p, -1) for p in range(PARTITIONS)]
        for future in admin.delete_records(ends).values():
            future.result(timeout=DEADLINE_S)


def _ignore(_done: int, _total: int) -> None:
    """Nobody looks."""


@pytest.fixture
def rig(
    kafka_bootstrap: str,
    create_topics: CreateTopics,
    unique_name: Callable[[str], str],
    tmp_path: Path,
) -> Rig:
    made = Rig(tmp_path, kafka_bootstrap, unique_name)
    create_topics({made.names.scored: (PARTITIONS, {}), made.names.versions: (1, {})})
    return made


def test_a_range_is_trained_on_again(rig: Rig) -> None:
    with pytest.raises(ReplayError, match="no record lies between"):
        look(rig.settings, ALL, rig.names, _ignore)
    rig.fill()

    outlook = look(rig.settings, ALL, rig.names, _ignore)
    assert outlook.counted.segments == {"default": (SEGMENTS + 1, SEGMENTS), "npc": (1, 1)}
    assert (outlook.counted.records, outlook.counted.undecodable) == (SEGMENTS + 4, 1)
    assert len(outlook.batches.updates) == SEGMENTS / 2
    assert not folder_of(rig.settings, "x").parent.exists()

    whole = rig.retrain("whole")
    assert whole.version.status is VersionStatus.CANDIDATE
    assert whole.version.segment_count == SEGMENTS
    assert {(o.partition, o.start) for o in whole.version.source_offsets} == {(0, 0), (1, 0)}
    _refuses_what_is_not_there(rig)

    _reads_an_archive_as_the_topic(rig, whole)

    folder = rig.killed("killed")
    late = begin(rig.settings, ALL, rig.names, "late")
    # What was read stays, whatever becomes of the topic.
    rig.delete_all()
    again = rig.go_on(folder)
    assert again.version.version == 3
    assert again.version.attributes[BATCHES] == whole.version.attributes[BATCHES]
    assert again.version.adapter_files == whole.version.adapter_files
    assert again.version.metrics == whole.version.metrics
    assert rig.go_on(folder).version == again.version
    with pytest.raises(ReplayError, match="has no offset 0 any more"):
        rig.go_on(late)


def _reads_an_archive_as_the_topic(rig: Rig, whole: Done) -> None:
    wanted = Wanted(
        begin="earliest", end="latest", base_version=0, updates=None, archive=rig.archive()
    )
    outlook = look(rig.settings, wanted, rig.names, _ignore)
    assert outlook.counted == whole.counted
    done = rig.retrain("archived", wanted)
    assert done.version.version == 2
    assert done.version.source_offsets == whole.version.source_offsets
    assert done.version.attributes[BATCHES] == whole.version.attributes[BATCHES]
    assert done.version.adapter_files == whole.version.adapter_files

    late = begin(rig.settings, wanted, rig.names, "archive-gone")
    path = sorted(Path(wanted.archive).glob("topics/*/partition=0/*.parquet"))[0]
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ArchiveError, match=r"\.parquet in .* is damaged"):
        look(rig.settings, wanted, rig.names, _ignore)
    with pytest.raises(ArchiveError, match="is damaged"):
        rig.go_on(late)
    path.unlink()
    with pytest.raises(ArchiveError, match="and not all of"):
        rig.go_on(late)
    with pytest.raises(ArchiveError, match="there is no topic nowhere in the archive"):
        look(rig.settings, wanted, Topics(scored="nowhere"), _ignore)


def _refuses_what_is_not_there(rig: Rig) -> None:
    with pytest.raises(ReplayError, match="there is a retrain whole already"):
        rig.retrain("whole")
    unknown = Wanted(begin="earliest", end="latest", base_version=7, updates=None)
    with pytest.raises(RegistryError, match="no version 7 to begin from"):
        look(rig.settings, unknown, rig.names, _ignore)
    with pytest.raises(ReplayError, match="there is no topic nowhere"):
        look(rig.settings, ALL, Topics(scored="nowhere"), _ignore)
    with pytest.raises(ReplayError, match="there is no retrain nobody"):
        rig.go_on(folder_of(rig.settings, "nobody"))
    other = rig.settings.learner.model_copy(update={"policy": "stranger"})
    settings = rig.settings.model_copy(update={"learner": other})
    with pytest.raises(LearnerError, match=r"of default \(25\), npc \(1\): set learner.policy"):
        look(settings, ALL, rig.names, _ignore)
