"""``faust_take``: Faust with its own batching, ``take``.

``take_events`` is ``take`` that hands out the events; their timestamps are needed. At most
2,000 events within 100 ms, as many as our worker applies in one transaction; the outputs of a
batch are sent together, then all awaited. Else as :mod:`processors.bench.subjects.faust_stock`.
"""

from __future__ import annotations

from typing import Any

from processors.bench.subjects.aligners import aligners_of
from processors.bench.subjects.faust_stock import (
    build_app,
    input_topic,
    offer,
    output_topic,
    run,
)
from processors.bench.subjects.job import FirstRecord, Job, job_of_command_line

EVENTS = 2_000
WITHIN_S = 0.1


def main(job: Job) -> int:
    """Run the app until it is killed."""
    app = build_app(job)
    segments = output_topic(app, job)
    aligners = aligners_of(job)
    first = FirstRecord()

    async def align(stream: Any) -> None:
        async for events in stream.take_events(EVENTS, within=WITHIN_S):
            first()
            fed = {event.message.partition: offer(aligners, event) for event in events}
            sent = []
            for aligner in fed.values():
                for key, value in aligner.drain(advance=True):
                    sent.append(await segments.send(key=key, value=value))
                aligner.forget_changes()
            for future in sent:
                await future

    app.agent(input_topic(app, job), name="align", concurrency=1)(align)
    return run(app)


if __name__ == "__main__":
    raise SystemExit(main(job_of_command_line()))
