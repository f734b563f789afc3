"""Sends a conversation whose turns carry a field of the sender's own, ``mood``.

    python send_turns.py BOOTSTRAP_SERVERS REGISTRY_URL TOPIC SESSION_ID

Needs confluent-kafka[avro,schemaregistry].
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

MOOD = {"name": "mood", "type": ["null", "string"], "default": None, "doc": "The user's mood."}


def main(bootstrap_servers: str, registry_url: str, topic: str, session_id: str) -> None:
    registry = SchemaRegistryClient({"url": registry_url})
    schema = json.loads(_latest(registry, f"{topic}-value"))
    if all(field["name"] != MOOD["name"] for field in schema["fields"]):
        schema["fields"].append(MOOD)
    # Registers the schema when it first writes with it; the registry refuses one that could not
    # read what is in the topic, or be read by those who are reading it.
    serialize = AvroSerializer(registry, json.dumps(schema))
    where = SerializationContext(topic, MessageField.VALUE)
    producer = Producer(
        {
            "bootstrap.servers": bootstrap_servers,
            # Java's: a session's turns and feedback must meet on one partition.
            "partitioner": "murmur2_random",
            "enable.idempotence": True,
        }
    )
    for turn in (
        _turn(session_id, "user", "What should I read next?", mood="curious"),
        _turn(session_id, "assistant", "Something short.", session_done=True),
    ):
        producer.produce(topic, key=session_id, value=serialize(turn, where))
    if producer.flush(60):
        raise SystemExit("Kafka did not take all turns")


def _latest(registry: SchemaRegistryClient, subject: str) -> str:
    text = registry.get_latest_version(subject).schema.schema_str
    if text is None:
        raise SystemExit(f"no schema under {subject}: run `clawstream schemas register`")
    return text


def _turn(session_id: str, role: str, content: str, **more: Any) -> dict[str, Any]:
    """Fields that are left out take the defaults of the schema."""
    return {
        "event_id": f"{session_id}-{role}",
        "session_id": session_id,
        "turn_id": f"{session_id}-{role}",
        "role": role,
        "content": content,
        "event_time": time.time_ns() // 1_000_000,
        "source": "my-front-end",
        **more,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
