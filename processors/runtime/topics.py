"""Checks at start: the topics a worker needs are there and are what it relies on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from processors.runtime.connection import bootstrap_servers
from streams.errors import BrokerError, TopicError
from streams.kafka.clients import make_admin
from streams.settings import KafkaSettings

TIMEOUT_S = 10.0


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


def check(needs: Needs, kafka: KafkaSettings) -> int:
    """Check the cluster's topics against what a worker relies on. Blocks.

    Returns:
        The number of partitions of the input topics.

    Raises:
        BrokerError: Kafka cannot be reached.
        TopicError: A topic is missing, inputs and changelog differ in partitions, the
            changelog is not compacted, or an input that must carry arrivals does not.
    """
    admin = make_admin(kafka, bootstrap_servers(kafka))
    try:
        counts = _partition_counts(admin)
    except KafkaException as error:
        raise BrokerError(
            f"cannot reach Kafka at {kafka.bootstrap_servers}: {error.args[0].str()}; "
            "is it running, and is the address right?"
        ) from error
    _check_present(needs, counts)
    partitions = _check_equal((*needs.inputs, needs.changelog), counts)
    configs = _configs(admin, (*needs.inputs, needs.changelog))
    if "compact" not in configs[needs.changelog].get("cleanup.policy", ""):
        raise TopicError(
            f"{needs.changelog} must have cleanup.policy=compact, or old state is deleted"
        )
    if needs.ticks:
        _check_arrivals(needs.inputs, configs)
    return partitions


def _partition_counts(admin: AdminClient) -> dict[str, int]:
    listed = admin.list_topics(timeout=TIMEOUT_S).topics
    return {name: len(topic.partitions) for name, topic in listed.items()}


def _check_present(needs: Needs, counts: Mapping[str, int]) -> None:
    wanted = (*needs.inputs, *needs.outputs, needs.changelog)
    missing = sorted(name for name in set(wanted) if name not in counts)
    if missing:
        raise TopicError(
            f"missing topics: {', '.join(missing)}; create them with `clawstream topics apply`"
        )


def _check_equal(topics: Sequence[str], counts: Mapping[str, int]) -> int:
    if len({counts[name] for name in topics}) > 1:
        found = ", ".join(f"{name} has {counts[name]}" for name in topics)
        raise TopicError(f"these topics must have the same number of partitions: {found}")
    return counts[topics[0]]


def _check_arrivals(inputs: Sequence[str], configs: Mapping[str, Mapping[str, str]]) -> None:
    wrong = [t for t in inputs if configs[t].get("message.timestamp.type") != "LogAppendTime"]
    if wrong:
        raise TopicError(
            f"{', '.join(wrong)} must have message.timestamp.type=LogAppendTime: the Kafka "
            "timestamp is the arrival that every decision rests on. Topics restored from an "
            "archive are read by a replay, not by the live worker"
        )


def _configs(admin: AdminClient, topics: Sequence[str]) -> dict[str, dict[str, str]]:
    resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
    found: dict[str, dict[str, str]] = {}
    for resource, future in admin.describe_configs(resources, request_timeout=TIMEOUT_S).items():
        try:
            entries = future.result(timeout=TIMEOUT_S)
        except KafkaException as error:
            raise BrokerError(f"cannot read the settings of {resource.name}: {error}") from error
        found[resource.name] = {name: entry.value or "" for name, entry in entries.items()}
    return found
