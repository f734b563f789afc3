"""The demo from beginning to end."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
from prometheus_client.parser import text_string_to_metric_families

from streams.clock import SystemClock
from streams.demo.tally import Summary, Tally, summarise
from streams.demo.traffic import Outcome, Traffic, TrafficPlan, send_faults
from streams.demo.users import TASTES, Taste
from streams.demo.watcher import TopicWatcher
from streams.errors import ClawstreamError
from streams.kafka.admin import Admin
from streams.kafka.clients import make_consumer, make_producer
from streams.kafka.embedded import start_kafka, stop_kafka
from streams.ports import free_ports
from streams.serde import build_codec
from streams.settings import Settings, load_settings, write_settings
from streams.supervisor import PROCESSES, Supervisor, sole_user, uninterrupted
from streams.topics import FEEDBACK, load_inventory

READY_S = 180.0
RESTARTS = 2
_REPLIES_BY_NEWEST = 8
_POLL_S = 0.5
_FAULTS_AFTER_S = 5.0
_KEPT = ("models", "processes.json", "supervisor.lock")


class DemoError(ClawstreamError):
    """The demo did not reach its goal."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What the display shows.

    Attributes:
        phase: What the demo waits for, in words.
        tally: What is in the topics; held still only during the call.
        seconds: Since the start.
        restarts: Processes that were started again.
    """

    phase: str
    tally: Tally
    seconds: float
    restarts: int


class Display(Protocol):
    """Shows how far the demo is."""

    def step(self, text: str) -> None:
        """One thing begins or is done."""
        ...

    def show(self, progress: Progress) -> None:
        """The figures of this moment."""
        ...


def demo_folder(settings: Settings) -> Path:
    """Everything the demo writes is in here."""
    return settings.data_dir / "demo"


def demo_config(settings: Settings) -> Path:
    """The settings of the demo's processes, for looking at what it left."""
    return demo_folder(settings) / "clawstream.yaml"


def taste_of(settings: Settings) -> Taste:
    """What the simulated users like."""
    return TASTES[settings.demo.preference]


class Demo:
    """One run.

    Args:
        settings: The demo's settings (the preset, if nobody said otherwise).
        display: Shows its progress.
    """

    def __init__(self, settings: Settings, display: Display) -> None:
        self._settings = settings
        self._display = display
        self._clock = SystemClock()
        self._started_s = time.monotonic()
        self._folder = demo_folder(settings)
        self._restarts = 0

    def run(self) -> Summary:
        """Start everything, converse until the versions are live, stop everything.

        Raises:
            DemoError: The time ran out before they were live.
            ClawstreamError: Something could not be started; what was started is stopped.
        """
        with sole_user(self._folder):
            _empty(self._folder)
            return self._run()

    def _run(self) -> Summary:
        with self._kafka() as bootstrap:
            self._display.step("creating the topics of topics.yaml")
            config = self._write_config(bootstrap)
            settings = load_settings(config)
            admin = Admin(settings.kafka, bootstrap)
            admin.apply(admin.plan(load_inventory()))
            with self._watcher(settings, bootstrap) as watcher:
                supervisor = Supervisor(self._folder, config)
                try:
                    self._start(supervisor, settings)
                    return asyncio.run(self._converse(supervisor, watcher, settings))
                finally:
                    self._display.step("stopping the processes")
                    supervisor.stop()

    @contextlib.contextmanager
    def _kafka(self) -> Iterator[str]:
        configured = self._settings.kafka.bootstrap_servers
        if configured is not None:
            yield configured
            return
        self._display.step("starting Apache Kafka")
        data_dir = self._folder / "kafka"
        try:
            limit = self._settings.kafka.max_message_bytes
            yield start_kafka(data_dir, max_message_bytes=limit).bootstrap_servers
        finally:
            self._display.step("stopping Apache Kafka")
            with uninterrupted():
                stop_kafka(data_dir)

    @contextlib.contextmanager
    def _watcher(self, settings: Settings, bootstrap: str) -> Iterator[TopicWatcher]:
        consumer = make_consumer(settings.kafka, bootstrap, group="clawstream-demo")
        codec = build_codec(settings.schema_registry_url)
        watcher = TopicWatcher(consumer, codec)
        try:
            yield watcher
        finally:
            watcher.close()

    def _write_config(self, bootstrap: str) -> Path:
        """The settings of all processes, with ports that are free now."""
        gateway, serve, align = free_ports(3)
        wanted = self._settings.model_dump(exclude_defaults=True)
        ports: dict[str, dict[str, Any]] = {
            "kafka": {"bootstrap_servers": bootstrap},
            "gateway": {"port": gateway, "upstream_url": f"http://127.0.0.1:{serve}/v1"},
            "serve": {"port": serve},
            "worker": {"align_web_port": align},
        }
        for section, values in ports.items():
            wanted[section] = {**wanted.get(section, {}), **values}
        wanted["data_dir"] = str(self._folder.absolute())
        path = demo_config(self._settings)
        write_settings(wanted, path)
        return path

    def _start(self, supervisor: Supervisor, settings: Settings) -> None:
        self._display.step(f"starting {', '.join(PROCESSES)}")
        for name in PROCESSES:
            supervisor.start(name)
        self._display.step("loading the base model (the first time it is converted, half a minute)")
        for name in ("serve", "gateway"):
            supervisor.wait_ready(name, READY_S)
        wait_healthy(f"http://127.0.0.1:{settings.serve.port}/health", READY_S)

    async def _converse(
        self, supervisor: Supervisor, watcher: TopicWatcher, settings: Settings
    ) -> Summary:
        traffic = Traffic(
            f"http://127.0.0.1:{settings.gateway.port}",
            taste_of(settings),
            _plan(settings),
            self._clock,
        )
        users = asyncio.create_task(traffic.run())
        faults = asyncio.create_task(self._send_faults(traffic, settings))
        try:
            await self._until_live(supervisor, watcher)
            traffic.stop()
            await self._while(
                "the users finish, late feedback comes in",
                supervisor,
                watcher,
                lambda _: not users.done(),
            )
            await asyncio.gather(users, faults)
            await self._while(
                "the last segments settle, close and are scored",
                supervisor,
                watcher,
                lambda tally: is_moving(tally, traffic.outcome),
                limit_s=self._settling_s(),
            )
        except BaseException:
            users.cancel()
            faults.cancel()
            await asyncio.gather(users, faults, return_exceptions=True)
            raise
        held_back = await asyncio.to_thread(_held_back, settings.worker.align_web_port)
        with watcher.tally() as tally:
            return summarise(
                tally,
                held_back=held_back,
                refused=traffic.outcome.refused,
                seconds=time.monotonic() - self._started_s,
            )

    async def _until_live(self, supervisor: Supervisor, watcher: TopicWatcher) -> None:
        target = self._settings.demo.target_versions

        def not_yet(tally: Tally) -> bool:
            return len(tally.live_versions) < target

        def not_seen(tally: Tally) -> bool:
            newest = tally.live_versions[-1]
            return tally.replies_by_version[newest] < _REPLIES_BY_NEWEST

        limit_s = self._settings.demo.time_limit_s - (time.monotonic() - self._started_s)
        await self._while(
            f"users converse until {target} new versions are live",
            supervisor, watcher, not_yet, limit_s=limit_s,
        )  # fmt: skip
        with watcher.tally() as tally:
            if not_yet(tally):
                raise DemoError(
                    f"{len(tally.live_versions)} of {target} versions were live after "
                    f"{self._settings.demo.time_limit_s} s; give a slow machine more time with "
                    f"CLAWSTREAM_DEMO__TIME_LIMIT_S, or see the logs in {self._folder / 'logs'}"
                )
        supervisor.stop(["learn"])
        await self._while(
            "users meet the newest version", supervisor, watcher, not_seen, limit_s=60
        )

    async def _while(
        self,
        phase: str,
        supervisor: Supervisor,
        watcher: TopicWatcher,
        condition: Callable[[Tally], bool],
        *,
        limit_s: float | None = None,
    ) -> None:
        """Show progress and keep the processes running while ``condition`` holds."""
        end_s = None if limit_s is None else time.monotonic() + limit_s
        while end_s is None or time.monotonic() < end_s:
            self._restarts += len(supervisor.restart_stopped(RESTARTS))
            with watcher.tally() as tally:
                seconds = time.monotonic() - self._started_s
                self._display.show(Progress(phase, tally, seconds, self._restarts))
                if not condition(tally):
                    return
            await asyncio.sleep(_POLL_S)

    async def _send_faults(self, traffic: Traffic, settings: Settings) -> None:
        await asyncio.sleep(_FAULTS_AFTER_S)
        await send_faults(traffic, self._clock)
        await asyncio.to_thread(_send_nonsense, settings)

    def _settling_s(self) -> float:
        align = self._settings.align
        return (align.max_open_ms + align.settle_ms + align.orphan_wait_ms) / 1000 + 15


def is_moving(tally: Tally, outcome: Outcome) -> bool:
    """Whether something accepted is still on its way to a segment and its reward."""
    return bool(tally.lacks(outcome.accepted) or tally.unaccounted() or tally.unscored())


def wait_healthy(url: str, timeout_s: float) -> None:
    """Wait until ``url`` answers 200.

    Raises:
        DemoError: It did not in time.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == httpx.codes.OK:
                return
        time.sleep(_POLL_S)
    raise DemoError(f"{url} did not answer within {timeout_s:g} s")


def _plan(settings: Settings) -> TrafficPlan:
    demo = settings.demo
    return TrafficPlan(
        concurrent_sessions=demo.sessions,
        turns_per_session=demo.turns_per_session,
        longest_delay_ms=demo.feedback_delay_ms_max,
        max_tokens=settings.serve.max_new_tokens,
        temperature=demo.temperature,
        seed=demo.seed,
    )


def _send_nonsense(settings: Settings) -> None:
    """A producer that writes what nobody can read, as one always does some day."""
    bootstrap = settings.kafka.bootstrap_servers
    producer = make_producer(settings.kafka, str(bootstrap))
    producer.produce(FEEDBACK, key=b"demo-nonsense", value=b"\x07 not a record")
    producer.flush(10)


def _held_back(port: int) -> int:
    """The aligner's own count; 0 if it has not held anything back."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
    return int(
        sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "clawstream_held_back_total"
        )
    )


def _empty(folder: Path) -> None:
    """Remove what an earlier run left, but for the converted model."""
    stop_kafka(folder / "kafka")
    for path in folder.iterdir():
        if path.name in _KEPT:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


__all__ = ["Demo", "DemoError", "Display", "Progress", "demo_config", "demo_folder"]
