"""Sends dialogue at its own pace, as users do: each event when it happens.

Everything is made beforehand, so that sending takes next to nothing from what is measured.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from processors.bench.dialogue import DialoguePlan, Event, conversations
from streams.contracts import DialogueTurn
from streams.kafka.clients import make_producer
from streams.serde import Codec, build_codec
from streams.settings import load_settings

if TYPE_CHECKING:
    from confluent_kafka import Producer

BEGUN = "begun"
DONE = "done"
LINGER_MS = 5
_STEP_S = 0.005
_ENCODE_S = 60e-6
_SPARE_S = 2.0
_FLUSH_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadJob:
    """What to send.

    Attributes:
        config: The settings file.
        bootstrap_servers: Where Kafka is.
        turns: The topic of turns.
        feedback: The topic of feedback.
        talking: Conversations at any time.
        pause_ms: How long some of them pause.
        ramp_ms: Within this time the first ones begin.
        seconds: How long.
        warm_up_s: How long of it until the rate is steady.
        seed: Of the random choices.
    """

    config: str
    bootstrap_servers: str
    turns: str
    feedback: str
    talking: int
    pause_ms: int
    ramp_ms: int
    seconds: float
    warm_up_s: float
    seed: int


@dataclass(frozen=True, slots=True)
class _Due:
    at_ms: int
    topic: str
    key: bytes
    value: bytes


def main(job: LoadJob) -> int:
    """Send everything, saying when it begins and when it is done, and how late it was."""
    producer = make_producer(
        load_settings(Path(job.config)).kafka,
        job.bootstrap_servers,
        overrides={"linger.ms": LINGER_MS},
    )
    plan = DialoguePlan(
        talking=job.talking,
        begin_ms=0,
        seed=job.seed,
        pause_ms=job.pause_ms,
        ramp_ms=job.ramp_ms,
    )
    end_ms = job.seconds * 1000
    events = list(takewhile(lambda event: event.arrival_ms < end_ms, conversations(plan)))
    begin_ms = _now_ms() + round(1000 * (_SPARE_S + _ENCODE_S * len(events)))
    codec = build_codec()
    due = [_due(job, event, begin_ms, codec) for event in events]
    steady_ms = begin_ms + 1000 * job.warm_up_s
    steady = sum(1 for item in due if item.topic == job.turns and item.at_ms >= steady_ms)
    size = sum(len(item.key) + len(item.value) for item in due)
    _say(BEGUN, begin_ms=begin_ms, steady_turns=steady, bytes=size)
    late_ms = _send(producer, due)
    _say(DONE, end_ms=_now_ms(), late_ms=late_ms, unsent=producer.flush(_FLUSH_S))
    return 0


def _due(job: LoadJob, event: Event, begin_ms: int, codec: Codec) -> _Due:
    record = event.record
    record = replace(record, event_time=record.event_time + begin_ms)
    topic = job.turns if isinstance(record, DialogueTurn) else job.feedback
    at_ms = event.arrival_ms + begin_ms
    return _Due(at_ms, topic, record.session_id.encode(), codec.encode(record))


def _send(producer: Producer, due: Sequence[_Due]) -> int:
    """Send each when it is due.

    Returns:
        By how much the latest was late, in milliseconds.
    """
    late_ms = 0
    for item in due:
        while (now_ms := _now_ms()) < item.at_ms:
            producer.poll(0)
            time.sleep(min(_STEP_S, (item.at_ms - now_ms) / 1000))
        late_ms = max(late_ms, now_ms - item.at_ms)
        producer.produce(item.topic, key=item.key, value=item.value)
    return late_ms


def _say(event: str, **facts: object) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


if __name__ == "__main__":
    raise SystemExit(main(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=LoadJob)))
