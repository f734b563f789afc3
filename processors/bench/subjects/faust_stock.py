"""``faust_stock``: Faust as its guide shows it, one event at a time, each send awaited.

An agent iterates over ``stream.events()``; state is a dict in memory, so no table is written.
What its documentation offers for speed is used: no web server, no leader, no wait for empty
streams, fetches of 8 MiB, a stream buffer of 16,384 events, offsets committed in the
background. Producer linger stays 0: each send is awaited before the event is acknowledged,
as losing nothing demands, and would only wait longer.
"""

from __future__ import annotations

from typing import Any

import faust

from processors.bench.plain import Output, PlainAligner
from processors.bench.subjects.aligners import Aligners, aligners_of
from processors.bench.subjects.job import FirstRecord, Job, job_of_command_line

FETCH_BYTES = 8 * 1024 * 1024
BUFFERED_EVENTS = 16_384
BATCH_BYTES = 256 * 1024


def build_app(job: Job, **settings: Any) -> faust.App:
    """An app over the job's broker without anything that the job does not need."""
    return faust.App(
        job.name,
        broker=f"kafka://{job.bootstrap_servers}",
        store="memory://",
        datadir=f"{job.folder}/faust",
        autodiscover=False,
        web_enabled=False,
        topic_allow_declare=False,
        topic_disable_leader=True,
        stream_wait_empty=False,
        consumer_auto_offset_reset="earliest",
        consumer_max_fetch_size=FETCH_BYTES,
        stream_buffer_maxsize=BUFFERED_EVENTS,
        producer_max_batch_size=BATCH_BYTES,
        producer_acks=-1,
        **settings,
    )


def input_topic(app: faust.App, job: Job) -> Any:
    """Both input topics as bytes; ticks have no value."""
    return app.topic(
        job.turns,
        job.feedback,
        key_type=bytes,
        value_type=bytes,
        key_serializer="raw",
        value_serializer="raw",
        allow_empty=True,
    )


def output_topic(app: faust.App, job: Job) -> Any:
    """The topic of segments."""
    return app.topic(
        job.segments,
        key_type=bytes,
        value_type=bytes,
        key_serializer="raw",
        value_serializer="raw",
    )


def offer(aligners: Aligners, event: Any) -> PlainAligner:
    """Give an event to the aligner of its partition, which is returned."""
    message = event.message
    aligner = aligners(message.partition)
    # Faust turns Kafka's milliseconds into seconds.
    arrival_ms = round(message.timestamp * 1000)
    aligner.offer(message.topic, message.offset, arrival_ms, event.value or None)
    return aligner


def run(app: faust.App) -> int:
    """Run a worker until it is killed."""
    worker = faust.Worker(app, loglevel="WARN", quiet=True, redirect_stdouts=False)
    worker.spinner = None
    worker.execute_from_commandline()
    return 0


def main(job: Job) -> int:
    """Run the app until it is killed."""
    app = build_app(job)
    segments = output_topic(app, job)
    aligners = aligners_of(job)
    first = FirstRecord()

    async def align(stream: Any) -> None:
        async for event in stream.events():
            first()
            aligner = offer(aligners, event)
            outputs: list[Output] = aligner.drain(advance=event.message.value is None)
            aligner.forget_changes()
            for key, value in outputs:
                await (await segments.send(key=key, value=value))

    app.agent(input_topic(app, job), name="align", concurrency=1)(align)
    return run(app)


if __name__ == "__main__":
    raise SystemExit(main(job_of_command_line()))
