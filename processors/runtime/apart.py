"""Processors in processes of their own, so that a worker uses more than one core.

Python runs one thread at a time. What fetches, writes and keeps the membership stays in the
worker's process; decoding, the processors and encoding go to others, which share the partitions
out, and while one computes a portion the worker writes the one before. They have no way to Kafka
but to read single records back: outcomes go to the worker, which alone writes them, so that
nothing changes in what a crash of any of them leaves. Without one the worker ends; without the
worker they end.

Over a socket go a request and its reply, in turn. To the runtime a processor here is a
:class:`RemoteProcessor`, which is called in a thread of its process's and waits there.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from processors.runtime.records import Outcome, PartitionProcessor, RawRecord
from processors.runtime.spec import WorkerSpec
from processors.runtime.status import NOTHING, ProcessorStatus
from processors.runtime.topics import Cluster
from streams.errors import ProcessError
from streams.metrics import ALL, Metric, ProcessorMetrics
from streams.process import configure_logging
from streams.settings import Settings

Build = Callable[[Settings, ProcessorMetrics], WorkerSpec]
"""Makes a worker's specification, in two processes: it is sent to the other one by pickle."""

GC_THRESHOLDS = (50_000, 20, 100)
"""State is many small objects that live long: Python's own thresholds search it for cycles all
the time, which costs a seventh of all work."""

_CHUNK_ENTRIES = 20_000
_END_S = 5.0


class _Wire(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A consumed record on its way (``records.RawRecord``)."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


class _Entries(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """Some of what a processor is restored from."""

    token: int
    entries: Sequence[tuple[bytes, bytes]]


class _Restore(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """Make a processor and restore it from the entries that came before."""

    token: int
    partition: int
    cluster: bytes
    meta: bytes | None


class _Drain(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """Feed what was fetched, drain a portion; forget processors that were given up."""

    token: int
    limit: int
    fed: Sequence[tuple[str, Sequence[_Wire]]]
    gone: Sequence[int]


class _Reply(msgspec.Struct, array_like=True, frozen=True):
    """What came of a request."""

    status: ProcessorStatus = NOTHING
    outcome: Outcome | None = None
    buffered: dict[str, int] = {}
    counted: list[tuple[str, dict[str, str], float]] = []
    error: bytes | None = None


_encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(_Entries | _Restore | _Drain).decode
_reply = msgspec.msgpack.Decoder(_Reply).decode


# In the worker


@contextlib.contextmanager
def apart(build: Build, settings: Settings, metrics: ProcessorMetrics) -> Iterator[WorkerSpec]:
    """A specification whose processors are in processes that live as long as the block.

    Args:
        build: Makes the specification.
        settings: All settings; ``worker.processor_processes`` says how many there are. With 0
            the processors are here.
        metrics: Where what is counted is shown.
    """
    spec = build(settings, metrics)
    if not settings.worker.processor_processes:
        yield spec
        return
    with contextlib.ExitStack() as stack:
        hosts = [
            stack.enter_context(contextlib.closing(_Host(build, settings, metrics)))
            for _ in range(settings.worker.processor_processes)
        ]

        def make(partition: int, cluster: Cluster) -> PartitionProcessor:
            return hosts[partition % len(hosts)].new_processor(partition, cluster)

        yield replace(spec, make_processor=make)


class _Host:
    """Another process, seen from the worker.

    Args:
        build: See :func:`apart`.
        settings: See :func:`apart`.
        metrics: See :func:`apart`.
    """

    def __init__(self, build: Build, settings: Settings, metrics: ProcessorMetrics) -> None:
        self._metrics = metrics
        self._tokens = itertools.count()
        self._gone: deque[int] = deque()
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                # The worker's own standard output is for lines that a supervisor reads.
                stdout=sys.__stderr__,
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        self._connection.send_bytes(pickle.dumps((build, settings, metrics.processor)))

    def new_processor(self, partition: int, cluster: Cluster) -> RemoteProcessor:
        """A processor that is made there when it is restored."""
        token = next(self._tokens)
        processor = RemoteProcessor(self, token, partition, cluster)
        weakref.finalize(processor, self._gone.append, token)
        return processor

    def gone(self) -> list[int]:
        """Processors that nobody has any more."""
        return [self._gone.popleft() for _ in range(len(self._gone))]

    def call(self, request: _Entries | _Restore | _Drain) -> _Reply:
        """Send a request and wait for what comes of it.

        Raises:
            ProcessError: The other process ended.
            Exception: What the processor raised there.
        """
        try:
            with self._lock:
                self._connection.send_bytes(_encode(request))
                reply = _reply(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise ProcessError(self._end()) from error
        for name, labels, amount in reply.counted:
            self._metrics.add(_COUNTERS[name], amount, **labels)
        if reply.error is not None:
            raise pickle.loads(reply.error)
        return reply

    def _end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        return (
            f"the process that applies records (pid {self._process.pid}) ended with status "
            f"{self._process.returncode}: was it killed, or out of memory? This worker stops; its "
            "successor goes on from the last transaction"
        )

    def close(self) -> None:
        """Let it end: it does when nobody can ask it any more."""
        self._connection.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            # It only reads, so there is nothing that it could leave half done.
            self._process.kill()
            self._process.wait()


class RemoteProcessor:
    """A processor in the other process (``records.PartitionProcessor``).

    Args:
        host: The other process.
        token: Names it there.
        partition: Its partition.
        cluster: What the topics are like.
    """

    def __init__(self, host: _Host, token: int, partition: int, cluster: Cluster) -> None:
        self._host = host
        self._token = token
        self._partition = partition
        self._cluster = cluster
        self._fed: list[tuple[str, list[_Wire]]] = []
        self._last = _Reply()

    def restore(self, entries: Iterable[tuple[bytes, bytes]], meta: bytes | None) -> None:
        """See ``PartitionProcessor``.

        Raises:
            ProcessError: The other process ended.
        """
        remaining = iter(entries)
        while chunk := list(itertools.islice(remaining, _CHUNK_ENTRIES)):
            self._host.call(_Entries(self._token, chunk))
        cluster = pickle.dumps(self._cluster)
        self._last = self._host.call(_Restore(self._token, self._partition, cluster, meta))

    def feed(self, topic: str, records: Sequence[RawRecord]) -> None:
        """See ``PartitionProcessor``. They are sent with the next drain."""
        self._fed.append((topic, [_wire(record) for record in records]))

    def drain(self, limit: int) -> Outcome:
        """See ``PartitionProcessor``.

        Raises:
            ProcessError: The other process ended.
        """
        fed, self._fed = self._fed, []
        self._last = self._host.call(_Drain(self._token, limit, fed, self._host.gone()))
        assert self._last.outcome is not None
        return self._last.outcome

    def buffered(self, topic: str) -> int:
        """See ``PartitionProcessor``."""
        waiting = self._last.buffered.get(topic, 0)
        return waiting + sum(len(records) for name, records in self._fed if name == topic)

    def status(self) -> ProcessorStatus:
        """See ``PartitionProcessor``."""
        return self._last.status


def _wire(record: RawRecord) -> _Wire:
    return _Wire(
        record.topic,
        record.partition,
        record.offset,
        record.timestamp,
        record.key,
        record.value,
        tuple(record.headers),
    )


_COUNTERS = {metric.name: metric for metric in ALL if metric.kind == "counter"}


# In the other process


class _Counting(ProcessorMetrics):
    """Keeps what is counted until it is taken along."""

    def __init__(self, processor: str) -> None:
        super().__init__(processor)
        self._amounts: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()

    def add(self, metric: Metric, amount: float = 1, **labels: str) -> None:
        """See ``ProcessorMetrics``."""
        self._amounts[metric.name, tuple(labels.items())] += amount  # type: ignore[assignment]

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Refuse: gauges are the worker's.

        Raises:
            TypeError: Always.
        """
        raise TypeError(f"a processor may only count, and it sets {metric.name}: use its status")

    def observe(self, metric: Metric, value: float) -> None:
        """As :meth:`set`."""
        self.set(metric, value)

    def take(self) -> list[tuple[str, dict[str, str], float]]:
        """What was counted since the last call."""
        counted, self._amounts = self._amounts, Counter()
        return [(name, dict(labels), amount) for (name, labels), amount in counted.items()]


class _Server:
    """The processors of the other process.

    Args:
        spec: Makes them.
        metrics: What they count with.
    """

    def __init__(self, spec: WorkerSpec, metrics: _Counting) -> None:
        self._spec = spec
        self._metrics = metrics
        self._processors: dict[int, PartitionProcessor] = {}
        self._entries: dict[int, list[tuple[bytes, bytes]]] = {}

    def answer(self, data: bytes) -> bytes:
        """The reply to a request, which may be an error."""
        try:
            reply = self._do(_request(data))
        except Exception as error:
            reply = _Reply(counted=self._metrics.take(), error=_pickled(error))
        return _encode(reply)

    def _do(self, request: _Entries | _Restore | _Drain) -> _Reply:
        token = request.token
        if isinstance(request, _Entries):
            self._entries.setdefault(token, []).extend(request.entries)
            return _Reply()
        if isinstance(request, _Restore):
            processor = self._spec.make_processor(request.partition, pickle.loads(request.cluster))
            processor.restore(self._entries.pop(token, []), request.meta)
            self._processors[token] = processor
            return self._reply(processor, None)
        for gone in request.gone:
            self._processors.pop(gone, None)
            self._entries.pop(gone, None)
        processor = self._processors[token]
        for topic, records in request.fed:
            processor.feed(topic, records)
        return self._reply(processor, processor.drain(request.limit))

    def _reply(self, processor: PartitionProcessor, outcome: Outcome | None) -> _Reply:
        buffered = {topic: processor.buffered(topic) for topic in self._spec.inputs}
        return _Reply(processor.status(), outcome, buffered, self._metrics.take())


def _pickled(error: Exception) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        # Not every library's errors can be sent.
        return pickle.dumps(ProcessError(f"{type(error).__name__}: {error}"))
    return data


def main(descriptor: int) -> int:
    """Answer requests until nobody can send any more.

    Args:
        descriptor: This end of the socket.

    Returns:
        The exit code.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        # The worker gets them, too, and says when to end.
        signal.signal(number, signal.SIG_IGN)
    configure_logging()
    with Connection(descriptor) as connection, contextlib.suppress(EOFError, ConnectionError):
        build, settings, processor = pickle.loads(connection.recv_bytes())
        metrics = _Counting(processor)
        server = _Server(build(settings, metrics), metrics)
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        while True:
            connection.send_bytes(server.answer(connection.recv_bytes()))
    return 0


def _main() -> Any:
    # As the worker imports it: what comes by pickle must not meet a second copy of it.
    from processors.runtime import apart as module

    status = module.main(int(sys.argv[1]))
    sys.stderr.flush()
    # Taking a large state apart would only delay the end.
    os._exit(status)


if __name__ == "__main__":
    _main()


__all__ = ["GC_THRESHOLDS", "Build", "RemoteProcessor", "apart", "main"]
