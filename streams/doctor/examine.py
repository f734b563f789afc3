"""Looks: asks Kafka, the registries and the machine, and hands what it sees to ``findings``."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from streams.contracts import DialogueTurn, FeedbackEvent, Record, ScoredSegment
from streams.doctor import findings
from streams.doctor.findings import Finding, Level, Seen
from streams.errors import ClawstreamError, RecordError, RegistryError, SchemaError
from streams.kafka.clients import partition_for, resolve_bootstrap
from streams.kafka.reading import connect
from streams.lag.groups import PEEKING
from streams.serde import Codec, build_codec
from streams.settings import Settings
from streams.topics import FEEDBACK, SCORED, SEGMENTS, TURNS, VERSIONS, load_inventory

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message

T = TypeVar("T", bound=Record)

GROUP = "clawstream-doctor"
RECORDS = 50
"""Of each partition, so many of the last records are looked at."""

_TIMEOUT_S = 10.0
_READ_S = 5.0
_LOOKS = 4
_LOOK_S = 1.0
FLOW = (TURNS, FEEDBACK, SEGMENTS, SCORED, VERSIONS)


def examine(settings: Settings) -> Iterator[Finding]:
    """All findings, one after the other; what depends on something broken is left out."""
    yield from _guarded("disk", lambda: [_disk(settings)])
    yield from _guarded("gpu", lambda: [_gpu()])
    yield from _guarded("registry", lambda: _versions(settings))
    yield from _guarded("schemas", lambda: _schemas(settings))
    broker = list(_guarded("broker", lambda: [_broker(settings)]))
    yield from broker
    if any(item.level is Level.FAIL for item in broker):
        return
    topics = list(_guarded("topics", lambda: _topics(settings)))
    yield from topics
    if any(item.level is Level.FAIL for item in topics):
        return
    yield from _guarded("flow", lambda: _log(settings))
    yield from _guarded("lag", lambda: _lag(settings))


def _guarded(about: str, look: Callable[[], Sequence[Finding]]) -> Iterator[Finding]:
    try:
        yield from look()
    except ClawstreamError as error:
        yield Finding(about, Level.FAIL, str(error))


def _disk(settings: Settings) -> Finding:
    where = settings.data_dir.absolute()
    while not where.exists():
        where = where.parent
    usage = shutil.disk_usage(where)
    return findings.of_disk(usage.free, usage.total, str(where))


def _gpu() -> Finding:
    """By the driver's own tool: nothing here loads torch."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding("gpu", Level.NOTE, "no NVIDIA driver: the learner trains on the CPU")
    query = [tool, "--query-gpu=name,memory.used,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("gpu", Level.WARN, f"nvidia-smi fails: {error}", "see the driver")
    return Finding("gpu", Level.OK, "; ".join(answer.stdout.strip().splitlines()))


def _versions(settings: Settings) -> list[Finding]:
    from streams.registry import Registry

    policy = settings.learner.policy
    with Registry.open(settings.effective_registry_url) as registry:
        versions = registry.versions(policy)
        live = registry.live(policy)
    if not versions:
        return [Finding("registry", Level.NOTE, f"policy {policy} has no version yet")]
    newest = max(versions, key=lambda version: version.version)
    what = f"policy {policy}: newest version {newest.version} ({newest.status}), live {live}"
    if live is not None and newest.version > live:
        advice = f"`clawstream versions show {newest.version}` says why it is not live"
        return [Finding("registry", Level.NOTE, what, advice)]
    return [Finding("registry", Level.OK, what)]


def _schemas(settings: Settings) -> list[Finding]:
    url = settings.schema_registry_url
    if url is None:
        what = "no schema registry is set: records carry fingerprints of the schemas installed"
        return [Finding("schemas", Level.OK, what)]
    from streams.serde import load_schemas
    from streams.serde.confluent import ConfluentRegistry

    registry, store = ConfluentRegistry(url), load_schemas()
    topics = [topic for topic in load_inventory().topics if topic.schema is not None]
    for topic in topics:
        registry.id_for(f"{topic.name}-value", store.current(topic.schema or ""))
    return [Finding("schemas", Level.OK, f"all {len(topics)} subjects are registered at {url}")]


def _broker(settings: Settings) -> Finding:
    from confluent_kafka import KafkaException

    from streams.kafka.clients import describe_error, make_admin

    address = resolve_bootstrap(settings)
    began_s = time.monotonic()
    try:
        found = make_admin(settings.kafka, address).list_topics(timeout=_TIMEOUT_S)
    except KafkaException as error:
        raise describe_error(error.args[0], address) from error
    seconds = time.monotonic() - began_s
    what = f"{len(found.brokers)} brokers answer at {address} in {seconds * 1000:.0f} ms"
    if seconds > findings.SLOW_BROKER_S:
        return Finding("broker", Level.WARN, what, "see whether the brokers are overloaded")
    return Finding("broker", Level.OK, what)


def _topics(settings: Settings) -> list[Finding]:
    from streams.kafka.admin import Admin
    from streams.topics import with_replication

    admin = Admin(settings.kafka, resolve_bootstrap(settings))
    inventory = load_inventory()
    found = admin.describe(tuple(topic.name for topic in inventory.topics))
    copies = {item.replication for item in found.values()}
    # How many copies there are is the cluster's affair, as long as it is the same for all.
    wanted = with_replication(inventory, copies.pop() if len(copies) == 1 else None)
    return findings.of_topics(admin.plan(wanted))


def _lag(settings: Settings) -> list[Finding]:
    from streams.lag.watch import watching

    with watching(settings) as watch:
        return findings.of_lag(watch.settle(_LOOKS, _LOOK_S))


def _log(settings: Settings) -> list[Finding]:
    codec = build_codec(settings.schema_registry_url)
    now_ms = time.time_ns() // 1_000_000
    seen: list[Seen] = []
    newest: dict[str, int | None] = {}
    scored: list[ScoredSegment] = []
    with connect(settings, GROUP, overrides=PEEKING) as consumer:
        for topic in FLOW:
            messages, partitions = _last(consumer, topic)
            newest[topic] = max((message.timestamp()[1] for message in messages), default=None)
            if topic in (TURNS, FEEDBACK):
                seen.extend(_seen(m, partitions, codec) for m in messages if m.value() is not None)
            if topic == SCORED:
                scored = [
                    s for m in messages if (s := _decoded(codec, m, ScoredSegment)) is not None
                ]
    learner = settings.learner
    return [
        *findings.of_partitioning(seen),
        *findings.of_clocks(seen, now_ms),
        *findings.of_flow(newest, now_ms),
        *(
            findings.of_training(
                scored,
                policy=learner.policy,
                newest_version=_newest_version(settings),
                max_version_gap=learner.max_version_gap,
                min_segments=learner.min_sample_size,
            )
            if scored
            else ()
        ),
    ]


def _newest_version(settings: Settings) -> int | None:
    from streams.registry import Registry

    try:
        with Registry.open(settings.effective_registry_url) as registry:
            return registry.newest_good(settings.learner.policy)
    except RegistryError:
        return None  # A finding of its own, and no reason to say nothing of the log.


def _last(consumer: Consumer, topic: str) -> tuple[list[Message], int]:
    """The last records of each partition of a topic, and how many partitions it has."""
    from confluent_kafka import KafkaError, TopicPartition

    partitions = consumer.list_topics(topic, timeout=_TIMEOUT_S).topics[topic].partitions
    found: list[Message] = []
    for partition in sorted(partitions):
        place = TopicPartition(topic, partition)
        low, high = consumer.get_watermark_offsets(place, timeout=_TIMEOUT_S)
        if low >= high:
            continue
        consumer.assign([TopicPartition(topic, partition, max(low, high - 2 * RECORDS))])
        own: list[Message] = []
        deadline_s = time.monotonic() + _READ_S
        while time.monotonic() < deadline_s:
            message = consumer.poll(0.5)
            if message is None:
                continue
            error = message.error()
            if error is not None:
                if error.code() == KafkaError._PARTITION_EOF:
                    break
                continue
            own.append(message)
            if (message.offset() or 0) >= high - 1:
                break
        found.extend(own[-RECORDS:])
    return found, len(partitions)


def _seen(message: Message, partitions: int, codec: Codec) -> Seen:
    key = message.key()
    record: DialogueTurn | FeedbackEvent | None
    if message.topic() == TURNS:
        record = _decoded(codec, message, DialogueTurn)
    else:
        record = _decoded(codec, message, FeedbackEvent)
    return Seen(
        topic=message.topic() or "",
        partition=message.partition() or 0,
        right_partition=None if key is None else partition_for(bytes(key), partitions),
        arrival_ms=message.timestamp()[1],
        event_ms=None if record is None else record.event_time,
        source=None if record is None else record.source,
    )


def _decoded(codec: Codec, message: Message, expected: type[T]) -> T | None:
    try:
        return codec.decode(message.value(), expected)
    except (RecordError, SchemaError):
        return None  # A registry that does not answer is a finding of its own.


__all__ = ["examine"]
