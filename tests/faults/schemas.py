"""Cases in which the schema registry is the fault."""

from __future__ import annotations

import io
import json
import struct
import time
from collections.abc import Mapping
from typing import Any

import fastavro
import msgspec

from streams.contracts import DeadLetterReason, DialogueTurn, Role
from streams.serde import Codec, load_schemas
from streams.serde.confluent import ConfluentRegistry
from tests.faults.load import EXPECTED_REASON, Load
from tests.faults.registry import case
from tests.faults.scene import PARTITIONS, Scene
from tests.faults.schema_registry import SchemaRegistry
from tests.integration.harness import wait_until

DOWN_S = 10.0
HEADER = struct.Struct(">bI")
ABSENT = b"\x00"
"""How Avro writes the first branch, null, of an optional field."""


def _registry(scene: Scene) -> SchemaRegistry:
    """A registry that holds our schemas, used by load, judge and workers."""
    registry = SchemaRegistry()
    registry.start()
    scene.on_close(registry.stop)
    client = ConfluentRegistry(registry.url)
    schemas = load_schemas()
    subjects = {
        scene.topics.turns: "DialogueTurn",
        scene.topics.feedback: "FeedbackEvent",
        scene.topics.segments: "TrajectorySegment",
        scene.topics.dead_letters: "DeadLetter",
    }
    for topic, record in subjects.items():
        schema = schemas.current(record)
        number = client.register(f"{topic}-value", schema)
        # Looked up now, for the judge works on while the registry is down.
        client.id_for(f"{topic}-value", schema)
        client.schema_for(number)
    scene.use_codec(Codec(schemas, client), registry.url)
    return registry


@case("14a", "registry-down-at-start", "no schema registry when the worker starts")
def down_at_start(scene: Scene) -> None:
    registry = _registry(scene)
    with scene.load():
        registry.stop()
        kept = scene.keep("worker", "one")
        wait_until(lambda: "schema registry" in kept.worker.output(), "the worker says why", 60)
        time.sleep(DOWN_S)
        mark = scene.mark()
        registry.start()
        scene.recovered(mark)
        scene.wait_for_outputs(60)
    scene.notes.append(f"the worker was started again {kept.restarts} times")


@case("14b", "registry-down-mid-run", "the registry goes away, then a schema comes nobody knows")
def down_mid_run(scene: Scene) -> None:
    registry = _registry(scene)
    with scene.load() as load:
        kept = scene.keep("worker", "one")
        kept.worker.wait_ready(60)
        scene.wait_for_outputs(60)
        newer = registry.add(f"{scene.topics.turns}-value", _with_field("DialogueTurn", OPTIONAL))
        registry.stop()
        scene.wait_for_outputs(100)
        assert kept.restarts == 0, "a registry that was not needed ended the worker"
        _send_newer_turn(scene, load, newer)
        wait_until(lambda: kept.restarts > 0, "the worker stops rather than guess", 60)
        time.sleep(DOWN_S)
        mark = scene.mark()
        registry.start()
        scene.recovered(mark)
        scene.wait_for_outputs(60)
    scene.notes.append(f"the worker was started again {kept.restarts} times")


@case("14c", "incompatible-schema", "records of registered schemas that ours cannot be read from")
def incompatible(scene: Scene) -> None:
    registry = _registry(scene)
    with scene.load() as load:
        subject = f"{scene.topics.turns}-value"
        values = [
            _written(registry.add(subject, schema), schema)
            for schema in (_without_field("DialogueTurn", "session_id"), ORDER)
        ]
        kept = scene.keep("worker", "one")
        for number in range(40):
            reason = {EXPECTED_REASON: DeadLetterReason.INVALID.encode()}
            value = values[number % len(values)]
            load.produce(scene.topics.turns, "stranger", value, number % PARTITIONS, reason)
        mark = scene.mark()
        kept.worker.wait_ready(60)
        scene.recovered(mark)
        scene.wait_for_outputs(100)
        assert kept.restarts == 0, "records nobody can read ended the worker"


def _written(number: int, schema: Mapping[str, Any]) -> bytes:
    """A turn written under a schema that is not ours."""
    out = io.BytesIO()
    fields = msgspec.to_builtins(_turn("stranger"))
    fastavro.schemaless_writer(out, fastavro.parse_schema(dict(schema)), fields)
    return HEADER.pack(0, number) + out.getvalue()


ORDER = {"type": "record", "name": "Order", "fields": [{"name": "content", "type": "string"}]}
OPTIONAL = {"name": "mood", "type": ["null", "string"], "default": None}


def _turn(session: str) -> DialogueTurn:
    return DialogueTurn(
        event_id="e",
        session_id=session,
        turn_id="t",
        role=Role.USER,
        content="hi",
        event_time=time.time_ns() // 1_000_000,
        source="gateway",
    )


def _send_newer_turn(scene: Scene, load: Load, number: int) -> None:
    """Send a turn as a newer producer writes it."""
    session = "written-by-a-newer-producer"
    body = load.codec.encode(_turn(session), scene.topics.turns)[HEADER.size :] + ABSENT
    load.produce(scene.topics.turns, session, HEADER.pack(0, number) + body)


def _with_field(record: str, field: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(load_schemas().current(record).text)
    schema["fields"].append(field)
    return schema


def _without_field(record: str, name: str) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(load_schemas().current(record).text)
    schema["fields"] = [field for field in schema["fields"] if field["name"] != name]
    return schema
