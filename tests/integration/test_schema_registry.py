"""Records and a real schema registry: registered, refused, and newer in mid-stream."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastavro
import msgspec
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.schema_registry_client import (
    ConfigCompatibilityLevel,
    ServerConfig,
)

from streams.contracts import DialogueTurn, Role, TrajectorySegment
from streams.errors import SchemaError, UnknownSchemaError
from streams.serde import build_codec, load_schemas
from streams.serde.confluent import ConfluentRegistry
from streams.serde.schemas import SchemaVersion, fingerprint_of, parse_writer_schema
from streams.topics import load_inventory
from tests.apicurio import apicurio
from tests.conftest import CreateTopics
from tests.integration.align_worker import configs_of, topics_of
from tests.integration.harness import DEADLINE_S, ROOT, Bench, wait_until

pytestmark = [
    pytest.mark.broker,
    # The registry's client keeps its connection for as long as the process lives.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

STORE = load_schemas()
TURN = DialogueTurn(
    event_id="e", session_id="s", turn_id="t", role=Role.USER, content="hi", event_time=5,
    source="test",
)  # fmt: skip


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with apicurio(tmp_path_factory.mktemp("apicurio")) as url:
        yield url


def newer(record: str, edit: Callable[[dict[str, Any]], None]) -> SchemaVersion:
    """A version that this installation does not have."""
    known = STORE.current(record)
    schema = json.loads(known.text)
    edit(schema)
    text = json.dumps(schema)
    return SchemaVersion(
        record, known.version + 1, text, parse_writer_schema(text), fingerprint_of(text)
    )


def with_mood(schema: dict[str, Any]) -> None:
    field = {"name": "mood", "type": ["null", "string"], "default": None, "doc": "From outside."}
    schema["fields"].insert(2, field)


def moody(turn: DialogueTurn, schema: SchemaVersion, schema_id: int) -> bytes:
    """The turn as a producer with that schema writes it."""
    out = io.BytesIO()
    fields = msgspec.to_builtins(turn, builtin_types=(bytes,)) | {"mood": "merry"}
    fastavro.schemaless_writer(out, schema.parsed, fields)
    return struct.pack(">bI", 0, schema_id) + out.getvalue()


def test_all_schemas_are_registered_by_the_command(registry: str, tmp_path: Path) -> None:
    environ = os.environ | {"SCHEMA_REGISTRY_URL": registry, "CLAWSTREAM_DATA_DIR": str(tmp_path)}

    def register() -> dict[str, int]:
        command = [sys.executable, "-m", "streams.cli", "schemas", "register", "--json"]
        done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        found: dict[str, int] = json.loads(done.stdout)
        return found

    ids = register()
    topics = {topic.name for topic in load_inventory().topics if topic.schema is not None}
    assert ids.keys() == {f"{topic}-value" for topic in topics}
    assert register() == ids
    codec = build_codec(registry)
    data = codec.encode(TURN, "dialogue.turns")
    assert data[:5] == struct.pack(">bI", 0, ids["dialogue.turns-value"])
    assert codec.decode(data, DialogueTurn) == TURN


def test_the_commands_see_what_others_registered(registry: str, tmp_path: Path) -> None:
    """A field from outside is shown; one that breaks a rule is named, and nothing registered."""
    environ = os.environ | {"SCHEMA_REGISTRY_URL": registry, "CLAWSTREAM_DATA_DIR": str(tmp_path)}

    def schemas(*arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "streams.cli", "schemas", *arguments]
        done = subprocess.run(
            command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    schemas("register")
    subject, client = "reward.reviews-value", ConfluentRegistry(registry)
    moody_reviews = newer("ReviewRequest", with_mood)
    schema_id = client.register(subject, moody_reviews)
    shown = schemas("history", "ReviewRequest", "--registry")
    assert f"{subject} v1 id" in shown
    assert "(ReviewRequest v1)" in shown
    assert f"{subject} v2 id {schema_id} {moody_reviews.fingerprint.hex()} (not one of" in shown
    assert "added mood" in shown
    assert "added mood: null or string" in schemas("diff", "ReviewRequest", "1", "2", "--registry")
    assert "in the registry, both ways" in schemas("check", "--registry")
    schemas("register")
    assert len(client.versions(subject, "ReviewRequest")) == 2

    def required(schema: dict[str, Any]) -> None:
        schema["fields"].append({"name": "tone", "type": "string", "doc": "x"})

    theirs = SchemaRegistryClient({"url": registry})
    level = ServerConfig(compatibility=ConfigCompatibilityLevel.NONE)
    theirs.set_config(subject, level)
    theirs.register_schema(subject, Schema(newer("ReviewRequest", required).text, "AVRO"))
    try:
        for command in (("check", "--registry"), ("register",)):
            text = schemas(*command, code=1)
            assert f"v3 of {subject} cannot read v1, field tone: a field that one" in text
        assert "nothing was registered" in text
    finally:
        theirs.delete_subject(subject)
        theirs.delete_subject(subject, permanent=True)


def test_an_incompatible_schema_is_refused(registry: str) -> None:
    client = ConfluentRegistry(registry)
    client.register("refused-value", STORE.current("DialogueTurn"))

    def required(schema: dict[str, Any]) -> None:
        schema["fields"].append({"name": "mood", "type": "string", "doc": "x"})

    with pytest.raises(SchemaError, match="not compatible \\(FULL_TRANSITIVE\\) with what refused"):
        client.register("refused-value", newer("DialogueTurn", required))


def test_a_field_from_outside_is_read_over_and_comes_back_after_an_upgrade(registry: str) -> None:
    client = ConfluentRegistry(registry)
    old, new = STORE.current("DialogueTurn"), newer("DialogueTurn", with_mood)
    client.register("moods-value", old)
    data = moody(TURN, new, client.register("moods-value", new))
    assert build_codec(registry).decode(data, DialogueTurn) == TURN


def test_what_the_registry_does_not_know_is_told_from_one_that_is_away(registry: str) -> None:
    data = struct.pack(">bI", 0, 987_654) + b"x"
    with pytest.raises(UnknownSchemaError, match="987654 is not in the registry"):
        build_codec(registry).decode(data, DialogueTurn)
    with pytest.raises(SchemaError, match="does not answer"):
        build_codec("http://127.0.0.1:9/apis").decode(data, DialogueTurn)


class RegistryBench(Bench):
    """An aligner with a schema registry."""

    def __init__(self, bootstrap: str, folder: Path, prefix: str, registry: str) -> None:
        super().__init__(bootstrap, folder)
        self.prefix, self.registry = prefix, registry
        self.topics = topics_of(prefix)
        self.client = ConfluentRegistry(registry)
        self.codec = build_codec(registry)

    def segments(self) -> dict[str, TrajectorySegment]:
        records = self.read(self.topics.segments, 1)
        found = [self.codec.decode(record.value, TrajectorySegment) for record in records]
        return {segment.session_id: segment for segment in found}

    def talk(self, session: str, write: Callable[[DialogueTurn], bytes]) -> None:
        now_ms = time.time_ns() // 1_000_000
        for role in (Role.USER, Role.ASSISTANT):
            turn = msgspec.structs.replace(
                TURN, event_id=f"{session}-{role}", turn_id=f"{session}-{role}", session_id=session,
                role=role, event_time=now_ms, session_done=role is Role.ASSISTANT,
            )  # fmt: skip
            self.producer.produce(self.topics.turns, key=session, value=write(turn))
        self.flush()


def test_a_running_aligner_meets_a_newer_schema_and_goes_on(
    kafka_bootstrap: str,
    create_topics: CreateTopics,
    unique_name: Callable[[str], str],
    tmp_path: Path,
    registry: str,
) -> None:
    prefix = unique_name("registry")
    create_topics(configs_of(prefix, 1))
    bench = RegistryBench(kafka_bootstrap, tmp_path, prefix, registry)
    topics = bench.topics
    schemas = {
        topics.turns: "DialogueTurn",
        topics.feedback: "FeedbackEvent",
        topics.segments: "TrajectorySegment",
        topics.dead_letters: "DeadLetter",
    }
    for topic, record in schemas.items():
        bench.client.register(f"{topic}-value", STORE.current(record))
    rules = {"settle_ms": 200, "gap_ms": 60_000, "max_open_ms": 600_000}
    config = bench.config(align=rules, schema_registry_url=registry)
    worker = bench.worker("tests.integration.align_worker", prefix, str(config))
    try:
        worker.wait_ready()
        bench.talk("before", lambda turn: bench.codec.encode(turn, topics.turns))
        wait_until(lambda: "before" in bench.segments(), "a segment", DEADLINE_S)

        new = newer("DialogueTurn", with_mood)
        schema_id = bench.client.register(f"{topics.turns}-value", new)
        bench.talk("newer", lambda turn: moody(turn, new, schema_id))
        bench.talk("after", lambda turn: bench.codec.encode(turn, topics.turns))
        wait_until(lambda: bench.segments().keys() >= {"newer", "after"}, "both", DEADLINE_S)
        assert [step.reply for step in bench.segments()["newer"].steps] == ["hi"]
        assert bench.read(topics.dead_letters, 1) == []
        assert worker.process.poll() is None
    finally:
        bench.stop_all()
