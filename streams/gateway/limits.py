"""How large a record may be so that its topic takes it."""

from __future__ import annotations

from collections.abc import Mapping

from streams.settings import Settings
from streams.topics import FEEDBACK, TURNS, load_inventory

_BATCH_OVERHEAD_BYTES = 1_024
"""What Kafka adds to the only record of a batch, generously; its limit is on the batch."""


def largest_records(settings: Settings) -> Mapping[str, int]:
    """Bytes of key and value together that each input topic takes.

    A record that Kafka refuses for its size must be refused at the door: once accepted, it
    could only be lost.
    """
    inventory = load_inventory()
    ours = settings.kafka.max_message_bytes
    limits = {
        topic: min(ours, int(inventory[topic].extra.get("max.message.bytes", ours)))
        for topic in (TURNS, FEEDBACK)
    }
    return {topic: limit - _BATCH_OVERHEAD_BYTES for topic, limit in limits.items()}
