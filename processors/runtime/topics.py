"""Checks at start: the topics a worker needs are there and are what it relies on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from processors.runtime.connection import bootstrap_servers
from processors.runtime.state import PART_BYTES
from streams.errors import TopicError
from streams.kafka.admin import Admin
from streams.settings import KafkaSettings
from streams.topics import TopicDescription

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0

CHANGELOG_BYTES = 2 * PART_BYTES
"""What a changelog must take in one record: a part of an entry with its key."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a worker must know of its topics.

    Attributes:
        partitions: How many each input has.
        max_bytes: The largest record batch each topic takes.
        kafka: How to reach it.
    """

    partitions: int
    max_bytes: Mapping[str, int]
    kafka: KafkaSettings = field(default_factory=KafkaSettings)

    def room(self, most: int, *topics: str) -> int:
        """The largest record batch that each of ``topics`` takes, ``most`` at the most."""
        return min([most, *(self.max_bytes[name] for name in topics)])


class Needs(Protocol):
    """The topics a worker names (``worker.WorkerSpec``)."""

    @property
    def inputs(self) -> tuple[str, ...]: ...

    @property
    def outputs(self) -> tuple[str, ...]: ...

    @property
    def changelog(self) -> str: ...

    @property
    def ticks(self) -> bool: ...

    @property
    def read_back_ms(self) -> int: ...


def check_cluster(needs: Needs, kafka: KafkaSettings) -> Cluster:
    """Check the cluster's topics against what a worker relies on. Blocks.

    Raises:
        BrokerError: Kafka cannot be reached within 10 s.
        TopicError: See ``check``.
    """
    admin = Admin(kafka, bootstrap_servers(kafka), timeout_s=TIMEOUT_S)
    found = admin.describe((*needs.inputs, *needs.outputs, needs.changelog))
    return replace(check(needs, found), kafka=kafka)


def check(needs: Needs, found: Mapping[str, TopicDescription]) -> Cluster:
    """Check described topics against what a worker relies on.

    Raises:
        TopicError: A topic is missing, inputs and changelog differ in partitions, the
            changelog is not compacted or takes too small records only, an input that must
            carry arrivals does not, or one that must be kept for a while is not.
    """
    _check_present(needs, found)
    partitions = _check_equal((*needs.inputs, needs.changelog), found)
    max_bytes = {name: int(topic.config["max.message.bytes"]) for name, topic in found.items()}
    if max_bytes[needs.changelog] < CHANGELOG_BYTES:
        raise TopicError(
            f"{needs.changelog} must have max.message.bytes of at least {CHANGELOG_BYTES}, "
            f"not {max_bytes[needs.changelog]}"
        )
    if "compact" not in found[needs.changelog].config.get("cleanup.policy", ""):
        raise TopicError(
            f"{needs.changelog} must have cleanup.policy=compact, or old state is deleted"
        )
    if needs.ticks:
        _check_arrivals(needs.inputs, found)
    if needs.read_back_ms:
        _check_kept(needs.inputs, needs.read_back_ms, found)
    return Cluster(partitions, max_bytes)


def _check_present(needs: Needs, found: Mapping[str, TopicDescription]) -> None:
    wanted = (*needs.inputs, *needs.outputs, needs.changelog)
    missing = sorted(name for name in set(wanted) if name not in found)
    if missing:
        raise TopicError(
            f"missing topics: {', '.join(missing)}; create them with `clawstream topics apply`"
        )


def _check_equal(topics: Sequence[str], found: Mapping[str, TopicDescription]) -> int:
    counts = {name: found[name].partitions for name in topics}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise TopicError(f"these topics must have the same number of partitions: {listed}")
    return counts[topics[0]]


def _check_arrivals(inputs: Sequence[str], found: Mapping[str, TopicDescription]) -> None:
    setting = "message.timestamp.type"
    wrong = [name for name in inputs if found[name].config.get(setting) != "LogAppendTime"]
    if wrong:
        raise TopicError(
            f"{', '.join(wrong)} must have {setting}=LogAppendTime: the Kafka timestamp is the "
            "arrival that every decision rests on. Topics restored from an archive are read by "
            "a replay, not by the live worker"
        )


def _check_kept(
    inputs: Sequence[str], read_back_ms: int, found: Mapping[str, TopicDescription]
) -> None:
    for name in inputs:
        config = found[name].config
        if "compact" in config.get("cleanup.policy", ""):
            raise TopicError(
                f"{name} must not have cleanup.policy=compact: each of its records is read back "
                "when a segment is revised"
            )
        kept_ms = int(config.get("retention.ms", "-1"))
        if 0 <= kept_ms < read_back_ms:
            raise TopicError(
                f"{name} has retention.ms={kept_ms}, and its records are read back for up to "
                f"{read_back_ms} ms (align.horizon_ms, max_open_ms and orphan_wait_ms together): "
                "keep them at least as long, or shorten the horizon"
            )
        kept_bytes = int(config.get("retention.bytes", "-1"))
        if kept_bytes >= 0:
            logger.warning(
                "%s has retention.bytes=%d: when that holds less than %d ms of dialogue, this "
                "worker ends at the first record it must read back and that is gone; "
                "retention.ms alone is safe",
                name,
                kept_bytes,
                read_back_ms,
            )
