"""Sends a conversation as plain JSON, with a field of the sender's own, ``mood``.

    python send_json.py BOOTSTRAP_SERVERS TOPIC SESSION_ID

Needs confluent-kafka; no Avro and no schema registry.
"""

from __future__ import annotations

import json
import sys
import time

from confluent_kafka import Producer


def main(bootstrap_servers: str, topic: str, session_id: str) -> None:
    producer = Producer(
        {
            "bootstrap.servers": bootstrap_servers,
            # Java's: a session's turns and feedback must meet on one partition.
            "partitioner": "murmur2_random",
            "enable.idempotence": True,
        }
    )
    for role, content, is_last in (
        ("user", "What should I read next?", False),
        ("assistant", "Something short.", True),
    ):
        turn = {
            "event_id": f"{session_id}-{role}",
            "session_id": session_id,
            "turn_id": f"{session_id}-{role}",
            "role": role,
            "content": content,
            "event_time": time.time_ns() // 1_000_000,
            "source": "my-front-end",
            "session_done": is_last,
            "mood": "curious",
        }
        producer.produce(topic, key=session_id, value=json.dumps(turn))
    if producer.flush(60):
        raise SystemExit("Kafka did not take all turns")


if __name__ == "__main__":
    main(*sys.argv[1:])
