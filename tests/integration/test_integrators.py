"""The examples of docs/integrators.md: fields from outside, beside a worker that goes on."""

from __future__ import annotations

import io
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fastavro
import pytest

from streams.contracts import DialogueTurn, TrajectorySegment
from streams.kafka.jars import kafka_jars
from streams.serde import build_codec, load_schemas
from streams.serde.confluent import ConfluentRegistry
from tests.apicurio import apicurio, jar_of
from tests.conftest import CreateTopics
from tests.integration.align_worker import configs_of, topics_of
from tests.integration.harness import DEADLINE_S, ROOT, Bench, wait_until

pytestmark = [
    pytest.mark.broker,
    # The registry's client keeps its connection for as long as the process lives.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

EXAMPLES = ROOT / "docs" / "examples" / "integrators"
SAID = ["What should I read next?", "Something short."]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with apicurio(tmp_path_factory.mktemp("apicurio")) as url:
        yield url


@pytest.fixture(scope="module")
def jars() -> str:
    """What a Java project would name: kafka-clients and avro, with what they need."""
    wanted = ("kafka-clients", "jackson", "slf4j-api", "lz4", "snappy", "zstd")
    found = [p for p in kafka_jars(on_step=print).glob("*.jar") if p.name.startswith(wanted)]
    return ":".join(map(str, [*found, jar_of("org.apache.avro.avro")]))


class Rig(Bench):
    """An aligner over topics whose schemas are in a registry."""

    def __init__(self, bootstrap: str, folder: Path, prefix: str, registry: str) -> None:
        super().__init__(bootstrap, folder)
        self.registry = registry
        self.topics = topics_of(prefix)
        self.codec = build_codec(registry)
        self.client = ConfluentRegistry(registry)
        schemas = {
            self.topics.turns: "DialogueTurn",
            self.topics.feedback: "FeedbackEvent",
            self.topics.segments: "TrajectorySegment",
            self.topics.dead_letters: "DeadLetter",
        }
        for topic, record in schemas.items():
            self.client.register(f"{topic}-value", load_schemas().current(record))
        rules = {"settle_ms": 200, "gap_ms": 60_000, "max_open_ms": 600_000}
        config = self.config(align=rules, schema_registry_url=registry)
        self.aligner = self.worker("tests.integration.align_worker", prefix, str(config))
        self.aligner.wait_ready()

    def segments(self) -> dict[str, TrajectorySegment]:
        records = self.read(self.topics.segments, 1)
        found = [self.codec.decode(record.value, TrajectorySegment) for record in records]
        return {segment.session_id: segment for segment in found}

    def send(self, command: Sequence[str]) -> None:
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=DEADLINE_S,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def becomes_a_segment(self, session: str) -> None:
        wait_until(lambda: session in self.segments(), f"a segment of {session}")
        (step,) = self.segments()[session].steps
        assert [message.content for message in step.context] + [step.reply] == SAID

    def moods(self, session: str) -> list[Any]:
        """What outside readers find of the field."""
        values = [r.value for r in self.read(self.topics.turns, 1) if r.key == session.encode()]
        return [self._fields(value).get("mood") for value in values if value is not None]

    def _fields(self, value: bytes) -> dict[str, Any]:
        if value[:1] == b"{":
            fields: dict[str, Any] = json.loads(value)
            return fields
        magic, schema_id = struct.unpack(">bI", value[:5])
        assert magic == 0
        writer = self.client.schema_for(schema_id)
        read: Any = fastavro.schemaless_reader(io.BytesIO(value[5:]), writer, None)
        return dict(read)


@pytest.fixture
def rig(
    kafka_bootstrap: str,
    create_topics: CreateTopics,
    unique_name: Callable[[str], str],
    tmp_path: Path,
    registry: str,
) -> Iterator[Rig]:
    prefix = unique_name("integrators")
    create_topics(configs_of(prefix, 1))
    made = Rig(kafka_bootstrap, tmp_path, prefix, registry)
    yield made
    made.stop_all()


def test_the_examples_run_and_the_worker_goes_on(rig: Rig, jars: str) -> None:
    turns = rig.topics.turns
    java = shutil.which("java")
    assert java is not None, "this test needs a JDK: Debian's default-jdk-headless, for one"
    with_registry = (rig.bootstrap, rig.registry, turns)
    rig.send([sys.executable, str(EXAMPLES / "send_turns.py"), *with_registry, "python"])
    rig.becomes_a_segment("python")
    source = str(EXAMPLES / "SendTurns.java")
    rig.send([java, "-Dslf4j.provider=none", "-cp", jars, source, *with_registry, "java"])
    rig.becomes_a_segment("java")
    rig.send([sys.executable, str(EXAMPLES / "send_json.py"), rig.bootstrap, turns, "json"])
    rig.becomes_a_segment("json")
    # A producer of today, with our own schema, between them all.
    assert rig.moods("python") == rig.moods("java") == ["curious", None]
    assert rig.moods("json") == ["curious", "curious"]
    assert rig.read(rig.topics.dead_letters, 1) == []
    assert rig.aligner.process.poll() is None
    for record in rig.read(turns, 1):
        if record.value is not None:
            assert rig.codec.decode(record.value, DialogueTurn).source == "my-front-end"
