"""``bare_decode``: a loop that reads and decodes, and does nothing with it: the ceiling.

confluent-kafka's ``consume`` of up to 10,000 messages, its prefetch queue at 256 MiB, and our
codec. Whatever keeps state and writes must be slower.
"""

from __future__ import annotations

from pathlib import Path

from confluent_kafka import OFFSET_BEGINNING, TopicPartition

from processors.bench.subjects.job import (
    LAST,
    FirstRecord,
    Job,
    job_of_command_line,
    print_mark,
)
from streams.contracts import DialogueTurn, FeedbackEvent
from streams.errors import BrokerError
from streams.kafka.clients import make_consumer
from streams.serde import build_codec
from streams.settings import load_settings

MESSAGES = 10_000
PREFETCH_KBYTES = 256 * 1024


def main(job: Job) -> int:
    """Read and decode every record once.

    Raises:
        BrokerError: Kafka cannot be read.
    """
    settings = load_settings(Path(job.config))
    codec = build_codec()
    consumer = make_consumer(
        settings.kafka,
        job.bootstrap_servers,
        group=job.name,
        overrides={"queued.max.messages.kbytes": PREFETCH_KBYTES},
    )
    consumer.assign(
        [
            TopicPartition(topic, partition, OFFSET_BEGINNING)
            for topic in (job.turns, job.feedback)
            for partition in range(job.partitions)
        ]
    )
    first = FirstRecord()
    left = job.records
    while left:
        messages = consumer.consume(MESSAGES, 0.05)
        for message in messages:
            if message.error() is not None:
                raise BrokerError(str(message.error()))
            first()
            value = message.value()
            if value is not None:
                is_turn = message.topic() == job.turns
                codec.decode(value, DialogueTurn if is_turn else FeedbackEvent)
        left -= len(messages)
    print_mark(LAST)
    consumer.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(job_of_command_line()))
