"""A real Kafka cluster of several nodes on this machine.

Each node is broker and controller in one JVM, with a folder of its own as in
:mod:`streams.kafka.embedded`; topics have three copies, two of which must confirm a write.
Any node may be killed; ``start_cluster`` brings back what is missing::

    <data_dir>/cluster.json   the cluster's id and the ports of its nodes
    <data_dir>/<number>/      a node's folder

Nodes keep their ports. They change only if all nodes are down and one is taken.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from streams.errors import BrokerError
from streams.kafka.embedded import (
    CLUSTER_FILE,
    DEFAULT_MAX_MESSAGE_BYTES,
    DEFAULT_TIMEOUT_S,
    STOP_TIMEOUT_S,
    Member,
    RunningKafka,
    becomes_free,
    end_member,
    kafka_status,
    locked,
    lost_its_port,
    new_cluster_id,
    start_member,
    stop_kafka,
    wait_for_member,
)
from streams.kafka.jars import kafka_jars
from streams.ports import free_ports

_POLL_S = 0.05
_PORT_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """The nodes of a cluster that are alive.

    Attributes:
        data_dir: The cluster's folder, absolute.
        size: How many nodes it has, the dead ones included.
        nodes: Those alive, by number from 1.
    """

    data_dir: Path
    size: int
    nodes: dict[int, RunningKafka]

    @property
    def bootstrap_servers(self) -> str:
        """The addresses of the nodes that are alive, comma separated."""
        return ",".join(node.bootstrap_servers for node in self.nodes.values())


@dataclass(frozen=True, slots=True)
class _Node:
    broker_port: int
    controller_port: int
    detour_port: int


@dataclass(frozen=True, slots=True)
class _Cluster:
    cluster_id: str
    nodes: tuple[_Node, ...]


def holds_cluster(data_dir: Path) -> bool:
    """Whether a folder holds a cluster of several nodes, running or not."""
    return (data_dir / CLUSTER_FILE).exists()


def start_cluster(
    data_dir: Path,
    brokers: int | None = None,
    *,
    detours: Sequence[int] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    on_step: Callable[[str], None] = lambda _: None,
) -> RunningCluster:
    """Start the nodes of a cluster that do not run, and wait until all answer.

    Args:
        data_dir: The cluster's folder; made if missing.
        brokers: How many nodes it has; as many as it had if None, three at first.
        detours: For each node the port that clients of its second listener are sent to, that
            of a relay in front of it; None for no second listener.
        timeout_s: How long all of them may take to answer.
        max_message_bytes: The largest record batch the nodes take.
        on_step: Told what is going on.

    Raises:
        BrokerError: The folder holds something else or another number of nodes, or one of them
            cannot be started or does not answer in time. What was started by this call is
            ended then.
    """
    root = data_dir.resolve()
    _require_no_single_node(root)
    jars = kafka_jars(on_step=on_step)
    with locked(root, timeout_s):
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            members = _members(_cluster_of(root, brokers), detours)
            running = {m.node_id: kafka_status(_folder(root, m.node_id)) for m in members}
            missing = [m for m in members if running[m.node_id] is None]
            try:
                running |= _start_missing(root, missing, jars, max_message_bytes, on_step)
                _wait_for_all([node for node in running.values() if node], timeout_s)
                break
            except BaseException as error:
                for member in missing:
                    end_member(_folder(root, member.node_id))
                # Between choosing a free port and listening on it another process may take it.
                taken = any(lost_its_port(_folder(root, m.node_id)) for m in missing)
                if not (isinstance(error, BrokerError) and taken) or attempt == _PORT_ATTEMPTS:
                    raise
    nodes = {number: node for number, node in running.items() if node is not None}
    return RunningCluster(root, len(nodes), nodes)


def stop_cluster(data_dir: Path, *, timeout_s: float = STOP_TIMEOUT_S) -> bool:
    """Stop all nodes of a cluster at once. Whether one ran.

    Raises:
        BrokerError: One could not be stopped.
    """
    root = data_dir.resolve()
    cluster = _read(root)
    if cluster is None:
        return False
    with locked(root, DEFAULT_TIMEOUT_S):
        folders = [_folder(root, number) for number in _numbers(cluster)]
        # One after the other, each would wait for the rest to take over its partitions.
        with ThreadPoolExecutor(len(folders)) as pool:
            return any(pool.map(lambda folder: stop_kafka(folder, timeout_s=timeout_s), folders))


def cluster_status(data_dir: Path) -> RunningCluster | None:
    """The nodes of a cluster that are alive, None if there are none."""
    root = data_dir.resolve()
    cluster = _read(root)
    if cluster is None:
        return None
    found = {number: kafka_status(_folder(root, number)) for number in _numbers(cluster)}
    nodes = {number: node for number, node in found.items() if node is not None}
    return RunningCluster(root, len(found), nodes) if nodes else None


def detour_ports(data_dir: Path) -> list[int]:
    """The ports of the nodes' second listeners, which a relay connects to.

    Raises:
        BrokerError: The folder holds no cluster.
    """
    cluster = _read(data_dir.resolve())
    if cluster is None:
        raise BrokerError(f"{data_dir} holds no cluster")
    return [node.detour_port for node in cluster.nodes]


def _start_missing(
    root: Path,
    missing: Sequence[Member],
    jars: Path,
    max_message_bytes: int,
    on_step: Callable[[str], None],
) -> dict[int, RunningKafka]:
    if not missing:
        return {}

    def start(member: Member) -> RunningKafka:
        folder = _folder(root, member.node_id)
        return start_member(folder, member, jars, max_message_bytes, on_step)

    with ThreadPoolExecutor(len(missing)) as pool:
        started = list(pool.map(start, missing))
    return {member.node_id: node for member, node in zip(missing, started, strict=True)}


def _wait_for_all(nodes: Sequence[RunningKafka], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for node in nodes:
        wait_for_member(node, max(0.1, deadline - time.monotonic()))
    while min(map(_brokers_known, nodes)) < len(nodes):
        if time.monotonic() > deadline:
            raise BrokerError(
                f"not all nodes in {nodes[0].data_dir.parent} found each other within "
                f"{timeout_s:g} s; see their logs"
            )
        time.sleep(_POLL_S)


def _brokers_known(node: RunningKafka) -> int:
    """How many brokers a node knows of."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    client = AdminClient({"bootstrap.servers": node.bootstrap_servers, "log_level": 0})
    try:
        return len(client.list_topics(timeout=2.0).brokers)
    except KafkaException:
        return 0


def _members(cluster: _Cluster, detours: Sequence[int] | None) -> list[Member]:
    voters = {
        number: node.controller_port
        for number, node in zip(_numbers(cluster), cluster.nodes, strict=True)
    }
    ways = [None] * len(voters) if detours is None else list(detours)
    return [
        Member(
            node_id=number,
            ports=(node.broker_port, node.controller_port),
            voters=voters,
            cluster_id=cluster.cluster_id,
            detour=None if way is None else (node.detour_port, way),
        )
        for number, node, way in zip(_numbers(cluster), cluster.nodes, ways, strict=True)
    ]


def _cluster_of(root: Path, brokers: int | None) -> _Cluster:
    """The folder's cluster, written down at first, its ports free or its own."""
    cluster = _read(root)
    if cluster is None:
        cluster = _Cluster(new_cluster_id(), _new_nodes(brokers or 3))
        _write(root, cluster)
        return cluster
    if brokers is not None and brokers != len(cluster.nodes):
        raise BrokerError(
            f"{root} holds a cluster of {len(cluster.nodes)} nodes, not {brokers}; choose another "
            "--data-dir"
        )
    if cluster_status(root) is None and not all(map(_ports_are_free, cluster.nodes)):
        cluster = replace(cluster, nodes=_new_nodes(len(cluster.nodes)))
        _write(root, cluster)
    return cluster


def _new_nodes(count: int) -> tuple[_Node, ...]:
    ports = free_ports(3 * count)
    return tuple(_Node(*ports[3 * i : 3 * i + 3]) for i in range(count))


def _ports_are_free(node: _Node) -> bool:
    return becomes_free(node.broker_port) and becomes_free(node.controller_port)


def _numbers(cluster: _Cluster) -> range:
    return range(1, len(cluster.nodes) + 1)


def _folder(root: Path, number: int) -> Path:
    return root / str(number)


def _require_no_single_node(root: Path) -> None:
    if (root / "data").exists():
        raise BrokerError(
            f"{root} holds a single node, which cannot become several; choose another --data-dir"
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BrokerError(f"cannot make the data folder {root}: {error.strerror}") from error


def _read(root: Path) -> _Cluster | None:
    path = root / CLUSTER_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        nodes = tuple(_Node(**node) for node in content["nodes"])
        return _Cluster(content["cluster_id"], nodes)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BrokerError(f"cannot read {path}: {error}; choose another --data-dir") from error


def _write(root: Path, cluster: _Cluster) -> None:
    scratch = root / f"{CLUSTER_FILE}.new"
    scratch.write_text(json.dumps(asdict(cluster)) + "\n", encoding="utf-8")
    scratch.replace(root / CLUSTER_FILE)


__all__ = [
    "RunningCluster",
    "cluster_status",
    "detour_ports",
    "holds_cluster",
    "start_cluster",
    "stop_cluster",
]
