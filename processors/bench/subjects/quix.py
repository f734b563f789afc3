"""``quix_rocksdb`` and ``quix_dict``: Quix Streams, in an environment of its own.

``quix_dict`` keeps the sessions in memory. Each topic has a pipeline of its own, so that Quix
need not align the topics in time as well: the merger does that.

``quix_rocksdb`` writes after each record what changed into Quix's RocksDB store, encoded as
our worker writes it, with a changelog topic, as is the default. The topics are concatenated,
which Quix demands for one store, and all keys read alike, since what a record closes may
belong to another key than its own. The sessions stay in memory beside the store: reading them
from it as well would only be slower.

Else: offsets and state are committed every 5 s, the default; the consumer prefetches up to
256 MiB and waits 20 ms for a topic that lags instead of 1 s; producer batches of 256 KiB gather
for 20 ms.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

# It is installed in its own environment alone.
from quixstreams import Application, message_context  # type: ignore[import-not-found]
from quixstreams.models import Deserializer, Serializer  # type: ignore[import-not-found]

from processors.bench.plain import Output, PlainAligner
from processors.bench.subjects.aligners import aligners_of
from processors.bench.subjects.job import FirstRecord, Job, job_of_command_line

ROCKSDB = "quix_rocksdb"
PREFETCH_KBYTES = 256 * 1024
BATCH_BYTES = 256 * 1024
LINGER_MS = 20
POLL_S = 0.02
ONE_KEY = b"all"


class _Value(Serializer):  # type: ignore[misc]
    """The second part of an output."""

    def __call__(self, value: Output, *_: Any, **__: Any) -> bytes:
        return value[1]


class _OneKey(Deserializer):  # type: ignore[misc]
    """One key for all records."""

    def __call__(self, *_: Any, **__: Any) -> bytes:
        return ONE_KEY


class _Pipeline:
    """What the dataframes apply to each record."""

    def __init__(self, job: Job) -> None:
        self._aligners = aligners_of(job)
        self._first = FirstRecord()

    def in_memory(
        self, value: bytes | None, _key: object, timestamp_ms: int, _headers: object
    ) -> Sequence[Output]:
        aligner, outputs = self._take(value, timestamp_ms)
        aligner.forget_changes()
        return outputs

    def in_store(
        self,
        value: bytes | None,
        _key: object,
        timestamp_ms: int,
        _headers: object,
        store: Any,
    ) -> Sequence[Output]:
        aligner, outputs = self._take(value, timestamp_ms)
        for entry, data in aligner.changes():
            if data is None:
                store.delete(entry)
            else:
                store.set_bytes(entry, data)
        return outputs

    def _take(self, value: bytes | None, timestamp_ms: int) -> tuple[PlainAligner, list[Output]]:
        self._first()
        at = message_context()
        aligner = self._aligners(at.partition)
        return aligner, aligner.take(at.topic, at.offset, timestamp_ms, value)


def main(job: Job, subject: str) -> int:
    """Run the application until it is killed."""
    app = Application(
        broker_address=job.bootstrap_servers,
        consumer_group=job.name,
        auto_offset_reset="earliest",
        state_dir=f"{job.folder}/quix",
        consumer_extra_config={"queued.max.messages.kbytes": PREFETCH_KBYTES},
        producer_extra_config={"linger.ms": LINGER_MS, "batch.size": BATCH_BYTES},
        consumer_poll_timeout=POLL_S,
        loglevel="WARNING",
    )
    pipeline = _Pipeline(job)
    segments = app.topic(job.segments, key_serializer="bytes", value_serializer=_Value())
    turns, feedback = (
        app.topic(name, key_deserializer=_OneKey(), value_deserializer="bytes")
        for name in (job.turns, job.feedback)
    )
    if subject == ROCKSDB:
        both = app.dataframe(turns).concat(app.dataframe(feedback))
        closed = [both.apply(pipeline.in_store, stateful=True, metadata=True, expand=True)]
    else:
        closed = [
            app.dataframe(topic).apply(pipeline.in_memory, metadata=True, expand=True)
            for topic in (turns, feedback)
        ]
    for outputs in closed:
        outputs.to_topic(segments, key=lambda output: output[0])
    app.run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(job_of_command_line(), sys.argv[2]))
