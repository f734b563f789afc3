"""Builds a Faust app for a processor and drives the partitions it is assigned.

Faust brings group membership, rebalances, fetching, the web port, signals and the life of the
process. What is added: partitions are restored before delivery resumes, held while a
rebalance runs, given up when they went to another worker; a timer sends clock ticks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any, TypeVar, cast

import faust
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError
from faust.tables.manager import TableManager
from faust.types import TP
from faust.web.drivers.aiohttp import Web
from mode import CrashingSupervisor
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from processors.runtime import views
from processors.runtime.batches import BatchConsumer, BatchTransport, RawBatchSchema
from processors.runtime.connection import aiokafka_config, faust_brokers, faust_credentials
from processors.runtime.partition import Apart, PartitionRunner, RunnerLimits
from processors.runtime.spec import WorkerSpec
from processors.runtime.state import (
    RestoreCancelledError,
    RestoredState,
    TransactionalWriter,
    read_changelog,
)
from processors.runtime.status import ProcessorStatus
from processors.runtime.topics import Cluster
from streams import metrics as names
from streams.clock import Clock, SystemClock
from streams.contracts import TICK_HEADER
from streams.errors import ClawstreamError, StateError
from streams.metrics import ProcessorMetrics
from streams.process import announce_ready
from streams.settings import Settings

logger = logging.getLogger(__name__)

T = TypeVar("T")

TOPIC_QUEUE_BATCHES = 4
HOLD_TIMEOUT_S = 20.0
STOP_GRACE_S = 5.0
STATISTICS_INTERVAL_S = 2.0


class OwnPages(Web):
    """Faust's web server with none of its own pages: they know only single events."""

    default_blueprints = ()
    production_blueprints = ()
    debug_blueprints = ()
    optional_blueprints = ()


class BatchApp(faust.App):
    """A Faust app over the batching transport."""

    worker: BatchWorker

    def _new_web(self) -> OwnPages:
        return OwnPages(self)

    def _new_transport(self) -> BatchTransport:
        return BatchTransport(self.conf.broker_consumer, self, self.worker)


class PromptTables(TableManager):
    """Begins at once; the stock manager waits a second for tables, of which there are none."""

    async def on_start(self) -> None:
        await self._update_channels()
        await self.recovery.start()


class BatchWorker:
    """The partitions one worker owns.

    Args:
        spec: The processor.
        settings: All settings.
        cluster: What the topics are like.
        metrics: Counters.
        clock: Wall time, to tell when a tick is worth its cost.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        settings: Settings,
        cluster: Cluster,
        metrics: ProcessorMetrics,
        clock: Clock | None = None,
    ) -> None:
        self.spec = spec
        self.settings = settings
        self.metrics = metrics
        self._cluster = cluster
        self._clock = SystemClock() if clock is None else clock
        self._runners: dict[int, PartitionRunner] = {}
        # A thread for each process that computes; processors in this one share a thread.
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"processors-{number}")
            for number in range(max(1, settings.worker.processor_processes))
        ]
        self._restoring: set[int] = set()
        self._cancel_restore = threading.Event()
        self._revocations = 0
        self._revocations_assigned = 0
        self._tick_producer: AIOKafkaProducer | None = None
        self._announced = False
        self._limits = RunnerLimits(
            batch_records=settings.worker.max_batch_records,
            buffered_records=settings.worker.max_buffered_records,
            tick_interval_ms=settings.worker.tick_interval_ms,
        )
        self.app = self._build_app()

    @property
    def had_partitions(self) -> bool:
        """Whether it ever took partitions over, so that there may be something to finish."""
        return self._announced or bool(self._runners)

    # What the consumer asks (batches.Owner)

    def applied_offset(self, topic: str, partition: int) -> int | None:
        runner = self._runners.get(partition)
        return runner.applied_offset(topic) if runner is not None and runner.ready else None

    def restored(self, topic: str, partition: int) -> bool:
        runner = self._runners.get(partition)
        return topic in self.spec.inputs and runner is not None and runner.ready

    # What the runners ask (partition.Flow)

    def pause(self, topic: str, partition: int) -> None:
        self.app.consumer.pause_partitions({TP(topic, partition)})

    def resume(self, topic: str, partition: int) -> None:
        if TP(topic, partition) in self.app.consumer.assignment():
            self.app.consumer.resume_partitions({TP(topic, partition)})

    def apart(self, partition: int) -> Apart:
        """What runs work in the thread of a partition's processor."""
        thread = self._threads[partition % len(self._threads)]

        async def run(work: Callable[[], T]) -> T:
            return await asyncio.get_running_loop().run_in_executor(thread, work)

        return run

    # Life

    async def before_revoke(self) -> None:
        """End running transactions and keep new ones from beginning; stop restores."""
        self._revocations += 1
        self._cancel_restore.set()
        await self._hold_all()

    def assigned(self) -> None:
        """Note which revocation the assignment that is now in force answers."""
        self._revocations_assigned = self._revocations
        self._cancel_restore = threading.Event()

    async def on_rebalance_complete(self, *_: Any, **__: Any) -> None:
        """Give up what went to others, take over what came, before delivery resumes."""
        try:
            await self._settle_assignment()
        except RestoreCancelledError:
            logger.info("another rebalance began; restoring goes on after it")
        except Exception as error:
            await self.crash(error)

    async def stop(self, *_: Any, **__: Any) -> None:
        """Finish the transactions that run, commit offsets, give all partitions up."""
        self._cancel_restore.set()
        await self._hold_all(STOP_GRACE_S)
        if not self.app.crashed:
            # A crash ends the consumer's thread, and nobody would answer.
            await _within_grace(self.app.consumer.commit(), "the last commit of offsets")
        await self._end_ticker()
        closing = asyncio.gather(*(runner.close() for runner in self._runners.values()))
        await _within_grace(closing, "closing the partitions")

    def end(self) -> None:
        """Let the processors' threads end what they are at; begin nothing more. Blocks."""
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)

    async def crash(self, error: BaseException) -> None:
        """End this worker; its successor goes on from the last transaction."""
        if isinstance(error, ClawstreamError):
            logger.error("%s: %s", type(error).__name__, error)
        await self.app.crash(error)

    async def consume(self, stream: Any) -> None:
        """The agent: hand each batch to its partition."""
        async for event in stream.noack().events():
            try:
                await self._accept(event)
            except Exception as error:
                await self.crash(error)

    async def _accept(self, event: Any) -> None:
        message = event.message
        runner = self._runners.get(message.partition)
        if runner is not None:
            await runner.accept(message.topic, event.value)
        event.ack()

    async def _hold_all(self, timeout_s: float = HOLD_TIMEOUT_S) -> None:
        holds = [asyncio.create_task(runner.hold()) for runner in self._runners.values()]
        if not holds:
            return
        _, late = await asyncio.wait(holds, timeout=timeout_s)
        for task in late:
            logger.warning("a transaction did not end within %.0f s", timeout_s)
            task.cancel()

    async def _settle_assignment(self) -> None:
        owned = {tp.partition for tp in self.app.consumer.assignment()}
        self._check_in_force()
        lost = [self._runners.pop(p) for p in sorted(set(self._runners) - owned)]
        await asyncio.gather(*(runner.close() for runner in lost))
        new = sorted(owned - set(self._runners))
        results = await asyncio.gather(*map(self._open, new), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        await cast(BatchConsumer, self.app.consumer).check_ends()
        self._check_in_force()
        for runner in self._runners.values():
            runner.release()
        if not self._announced:
            self._announced = True
            announce_ready(processor=self.spec.processor, partitions=sorted(self._runners))
        if new or lost:
            logger.info(
                "owns partitions %s of %s", sorted(self._runners), ", ".join(self.spec.inputs)
            )

    def _check_in_force(self) -> None:
        """Refuse to go on under an assignment that was revoked meanwhile."""
        if self._revocations != self._revocations_assigned:
            raise RestoreCancelledError

    async def _open(self, partition: int) -> None:
        runner = self._new_runner(partition)
        self._restoring.add(partition)
        try:
            await runner.open()
        except StateError as error:
            await runner.close()
            raise StateError(
                f"{self.spec.changelog} partition {partition}: {error}. To begin again: stop all "
                f"workers, delete {self.spec.changelog}, run `clawstream topics apply` and start "
                "them; the inputs are read from their beginning, and what comes out has the "
                "same ids as before"
            ) from error
        except BaseException:
            await runner.close()
            raise
        finally:
            self._restoring.discard(partition)
        self._runners[partition] = runner

    def _new_runner(self, partition: int) -> PartitionRunner:
        spec = self.spec
        return PartitionRunner(
            partition,
            spec.inputs,
            spec.make_processor(partition, self._cluster),
            TransactionalWriter(
                self.settings.kafka,
                spec.app_id,
                partition,
                spec.changelog,
                min(self._cluster.max_bytes.values()),
            ),
            self._restorer(partition),
            self,
            self.apart(partition),
            self._limits,
            self.metrics,
            self._clock,
            self.crash,
        )

    def _restorer(self, partition: int) -> Callable[[], Awaitable[RestoredState]]:
        cancelled = self._cancel_restore
        return lambda: asyncio.to_thread(
            read_changelog, self.settings.kafka, self.spec.changelog, partition, cancelled
        )

    # Ticks and statistics

    async def tick(self) -> None:
        """Send a tick to each owned partition that needs one."""
        now_ms = self._clock.now_ms()
        due = [r for r in self._runners.values() if r.tick_due(now_ms)]
        if not due:
            return
        try:
            producer = await self._ticker()
            await asyncio.gather(*(self._send_tick(producer, runner) for runner in due))
        except KafkaError as error:
            logger.warning("no tick could be sent, trying again: %r", error)
            await self._end_ticker()

    async def _ticker(self) -> AIOKafkaProducer:
        if self._tick_producer is None:
            # A tick sent twice does no harm; an idempotent producer that failed once may fail
            # for ever.
            producer = AIOKafkaProducer(**aiokafka_config(self.settings.kafka), acks="all")
            try:
                await producer.start()
            except KafkaError:
                await producer.stop()
                raise
            self._tick_producer = producer
        return self._tick_producer

    async def _end_ticker(self) -> None:
        producer, self._tick_producer = self._tick_producer, None
        if producer is not None:
            await _within_grace(producer.stop(), "closing the tick producer")

    async def _send_tick(self, producer: AIOKafkaProducer, runner: PartitionRunner) -> None:
        offsets: dict[str, int] = {}
        for topic in self.spec.inputs:
            # ``send`` refuses a record without key and value, a batch takes it.
            batch = producer.create_batch()
            batch.append(key=None, value=None, timestamp=None, headers=[(TICK_HEADER, b"")])
            batch.close()
            sent = await (await producer.send_batch(batch, topic, partition=runner.partition))
            offsets[topic] = sent.offset
        runner.tick_sent(offsets)
        self.metrics.add(names.TICKS)

    async def report(self) -> None:
        """Bring the gauges up to date."""
        consumer = cast(BatchConsumer, self.app.consumer)
        for tp in consumer.assignment():
            lag = consumer.lag(tp)
            if lag is not None:
                self.metrics.set(
                    names.PARTITION_LAG, lag, topic=tp.topic, partition=str(tp.partition)
                )
        now_ms = self._clock.now_ms()
        for partition, status in self._statuses():
            self._show(str(partition), status, now_ms)

    def _statuses(self) -> list[tuple[int, ProcessorStatus]]:
        return [
            (partition, runner.processor.status())
            for partition, runner in sorted(self._runners.items())
        ]

    def _show(self, partition: str, status: ProcessorStatus, now_ms: int) -> None:
        gauges = {
            names.SESSIONS: status.sessions,
            names.OPEN_SESSIONS: status.open_sessions,
            names.OLDEST_OPEN_SECONDS: views.oldest_open_ms(status, now_ms) / 1000,
            names.OVERDUE: views.overdue_ms(status, now_ms) / 1000,
        }
        if status.clock_ms is not None:
            gauges[names.PARTITION_CLOCK] = status.clock_ms / 1000
            gauges[names.EVENT_TIME_LAG] = max(0, now_ms - status.clock_ms) / 1000
        for metric, value in gauges.items():
            self.metrics.set(metric, value, partition=partition)

    def view(self) -> views.WorkerView:
        """The worker as it stands now."""
        now_ms = self._clock.now_ms()
        return views.WorkerView(
            processor=self.spec.processor,
            application=self.spec.app_id,
            version=version("clawstream"),
            now_ms=now_ms,
            restoring=tuple(sorted(self._restoring)),
            partitions=tuple(
                self._partition_view(partition, status, now_ms)
                for partition, status in self._statuses()
            ),
        )

    def _partition_view(
        self, partition: int, status: ProcessorStatus, now_ms: int
    ) -> views.PartitionView:
        took_s = self.metrics.shown(names.LAST_TRANSACTION_SECONDS, partition=str(partition))
        topics = [self._topic_view(topic, partition) for topic in self.spec.inputs]
        return views.partition_view(partition, status, topics, now_ms, took_s)

    def _topic_view(self, topic: str, partition: int) -> views.TopicView:
        consumer, tp = cast(BatchConsumer, self.app.consumer), TP(topic, partition)
        # During a rebalance the partition is still here and no longer assigned.
        assigned = tp in consumer.assignment()
        return views.TopicView(
            topic=topic,
            applied_offset=self.applied_offset(topic, partition),
            end_offset=consumer.highwater(tp) if assigned else None,
            lag_records=consumer.lag(tp) if assigned else None,
            buffered_records=self._runners[partition].processor.buffered(topic),
        )

    # The app

    def _build_app(self) -> BatchApp:
        spec, settings = self.spec, self.settings
        data = settings.data_dir.absolute() / "faust"
        data.mkdir(parents=True, exist_ok=True)
        session_s = settings.kafka.session_timeout_ms / 1000
        app = BatchApp(
            spec.app_id,
            broker=faust_brokers(settings.kafka),
            broker_credentials=faust_credentials(settings.kafka),
            broker_session_timeout=session_s,
            broker_heartbeat_interval=session_s / 5,
            broker_max_poll_records=settings.worker.max_batch_records,
            broker_commit_interval=1.0,
            consumer_auto_offset_reset="earliest",
            consumer_group_instance_id=_instance_id(spec, settings),
            consumer_max_fetch_size=max(1024 * 1024, settings.kafka.max_message_bytes),
            topic_allow_declare=False,
            topic_disable_leader=True,
            stream_wait_empty=False,
            autodiscover=False,
            datadir=data / spec.app_id,
            store="memory://",
            TableManager=PromptTables,
            web_enabled=spec.web_port > 0,
            web_host=settings.worker.web_host,
            web_bind=settings.worker.web_host,
            web_port=spec.web_port or 6066,
        )
        app.worker = self
        self._declare(app)
        return app

    def _declare(self, app: BatchApp) -> None:
        source = app.topic(*self.spec.inputs, schema=RawBatchSchema(), maxsize=TOPIC_QUEUE_BATCHES)
        app.agent(
            source, name=self.spec.processor, concurrency=1, supervisor_strategy=CrashingSupervisor
        )(self.consume)
        app.on_rebalance_complete.connect(self.on_rebalance_complete)
        app.on_before_shutdown.connect(self.stop)
        if self.spec.ticks:
            app.timer(self.settings.worker.tick_interval_ms / 1000)(self.tick)
        app.timer(STATISTICS_INTERVAL_S)(self.report)
        if self.spec.web_port:
            _serve_metrics(app, self.metrics)
            _serve_view(app, self.view)


async def _within_grace(work: Awaitable[Any], what: str) -> None:
    """Await ``work``, but let nothing that Kafka does not answer hold up the end.

    What does not end in time is cancelled and left: Faust's commit swallows a cancellation.
    """
    task = asyncio.ensure_future(work)
    done, _ = await asyncio.wait({task}, timeout=STOP_GRACE_S)
    if not done:
        task.cancel()
        logger.warning("%s took more than %.0f s and was given up", what, STOP_GRACE_S)
        return
    try:
        task.result()
    except KafkaError as error:
        logger.warning("%s failed: %r", what, error)


def _serve_metrics(app: BatchApp, metrics: ProcessorMetrics) -> None:
    """Add ``/metrics`` to the app's web views."""

    async def page(view: Any, _request: Any) -> Any:
        return view.bytes(
            generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    app.page("/metrics", name="metrics")(page)


def _serve_view(app: BatchApp, collect: Callable[[], views.WorkerView]) -> None:
    """Add the worker's page, ``/``, to the app's web views."""

    async def page(view: Any, request: Any) -> Any:
        now = collect()
        if views.wants_html(request.headers.get("Accept", ""), request.query):
            return view.html(views.as_html(now), headers=dict(views.HEADERS))
        headers = {**views.HEADERS, "Content-Type": "application/json"}
        return view.bytes(views.as_json(now), headers=headers)

    app.page("/", name="worker")(page)


def _instance_id(spec: WorkerSpec, settings: Settings) -> str | None:
    """Static membership: a worker restarted under its name takes over at once.

    Without it the group waits for the session of a killed worker to expire.
    """
    name = settings.worker.group_instance_id
    return None if name is None else f"{spec.app_id}-{name}"


__all__ = ["BatchApp", "BatchWorker"]
