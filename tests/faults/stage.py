"""The brokers a case plays on, each with a relay in front of it."""

from __future__ import annotations

from pathlib import Path

import psutil
from confluent_kafka.admin import AdminClient

from streams.kafka.cluster import (
    RunningCluster,
    cluster_status,
    detour_ports,
    start_cluster,
    stop_cluster,
)
from streams.ports import LOOPBACK
from tests.faults.relay import Relays
from tests.integration.harness import wait_until


class Stage:
    """A cluster of its own, for a ``with`` block.

    Args:
        folder: The cluster's folder.
        brokers: How many nodes.
    """

    def __init__(self, folder: Path, brokers: int) -> None:
        self.folder = folder
        self.brokers = brokers
        self.relays = Relays(brokers)
        self._running: RunningCluster | None = None

    def __enter__(self) -> Stage:
        self._start()
        self.relays.connect(detour_ports(self.folder))
        return self

    def __exit__(self, *_: object) -> None:
        self.relays.close()
        stop_cluster(self.folder)

    @property
    def bootstrap(self) -> str:
        """The addresses of all brokers, also of those that are down."""
        assert self._running is not None
        return self._running.bootstrap_servers

    @property
    def relayed_bootstrap(self) -> str:
        """The addresses of all relays."""
        return ",".join(f"{LOOPBACK}:{port}" for port in self.relays.ports)

    def kill(self, node: int) -> None:
        """SIGKILL a broker."""
        running = cluster_status(self.folder)
        assert running is not None
        process = psutil.Process(running.nodes[node].pid)
        process.kill()
        wait_until(lambda: _has_ended(process), f"the end of broker {node}")

    def bring_back(self) -> None:
        """Start the brokers that are down."""
        self._start()

    def cut(self, node: int) -> None:
        """Cut those that use the relays off from one broker."""
        self.relays.cut(node - 1)

    def restore(self) -> None:
        """All brokers up, all relays open."""
        self.relays.mend()
        self.bring_back()
        self.wait_in_sync()

    def wait_in_sync(self, timeout_s: float = 90.0) -> None:
        """Wait until every partition has all its copies."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        wait_until(lambda: _in_sync(admin), "all copies in sync", timeout_s, 0.2)

    def leader(self, topic: str, partition: int) -> int:
        """The broker that leads a partition."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        return int(admin.list_topics(topic, timeout=20).topics[topic].partitions[partition].leader)

    def group_coordinator(self, group: str) -> int:
        """The broker that coordinates a consumer group."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        described = admin.describe_consumer_groups([group])[group].result(20)
        return int(described.coordinator.id)

    def transaction_coordinator(self, transactional_id: str) -> int:
        """The broker that coordinates a producer's transactions."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        topic = "__transaction_state"
        partitions = admin.list_topics(topic, timeout=20).topics[topic].partitions
        return int(partitions[_java_hash(transactional_id) % len(partitions)].leader)

    def _start(self) -> None:
        self._running = start_cluster(self.folder, self.brokers, detours=self.relays.ports)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _in_sync(admin: AdminClient) -> bool:
    topics = admin.list_topics(timeout=20).topics.values()
    return all(
        partition.leader >= 0 and len(partition.isrs) == len(partition.replicas)
        for topic in topics
        for partition in topic.partitions.values()
    )


def _java_hash(text: str) -> int:
    """``Utils.abs(String.hashCode())`` as brokers pick a coordinator's partition."""
    value = 0
    for character in text:
        value = (31 * value + ord(character)) & 0xFFFFFFFF
    return value & 0x7FFFFFFF
