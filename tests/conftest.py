"""What tests share: a real Kafka broker, started only for tests that ask for one."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from streams.settings import ENV_PREFIX
from tests.logs import tails

# How long an example takes is the machine's affair, and a test's verdict is not.
hypothesis.settings.register_profile(
    "suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")

_ADDRESSES = (
    "KAFKA_BOOTSTRAP_SERVERS",
    "SCHEMA_REGISTRY_URL",
    "REGISTRY_URL",
    "ARTIFACTS_URL",
)
_OUTER_BOOTSTRAP = os.environ.get("KAFKA_BOOTSTRAP_SERVERS")
_REAPER = """
import sys
from pathlib import Path
from streams.kafka.embedded import stop_kafka
sys.stdin.read()
stop_kafka(Path(sys.argv[1]))
"""

_DEADLINE_S = 120.0
_BROKER_TEST_S = 600
_FOLDER = pytest.StashKey[Path]()
_BEGAN_S = pytest.StashKey[float]()

CreateTopics = Callable[[Mapping[str, tuple[int, Mapping[str, str]]]], None]


@pytest.fixture(autouse=True, scope="session")
def _folder(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytestconfig.stash[_FOLDER] = tmp_path_factory.getbasetemp()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests with a broker more time: they wait long for what a busy machine does late."""
    for item in items:
        if item.get_closest_marker("broker") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_BROKER_TEST_S))


def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_BEGAN_S] = time.time()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show with a failure what the processes of the test logged last."""
    report = yield
    folder = item.config.stash.get(_FOLDER, None)
    if report.failed and folder is not None:
        report.sections.extend(tails(folder, item.stash[_BEGAN_S]))
    return report


@pytest.fixture(autouse=True, scope="session")
def _own_environment() -> Iterator[None]:
    """Keep the developer's settings out of tests that read settings."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name in _ADDRESSES or name.startswith(ENV_PREFIX):
                patch.delenv(name)
        yield


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """Take back what a process's ``main`` did to logging: its stream ends with the test."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
    for handler in list(root.handlers):
        if type(handler) is logging.StreamHandler:
            root.removeHandler(handler)


@pytest.fixture(scope="session")
def kafka_bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real broker: the environment's, a container, else the embedded one.

    It has no topics of ours; a test makes its own, under names of its own.
    """
    if _OUTER_BOOTSTRAP:
        yield _OUTER_BOOTSTRAP
        return
    with _container() as address:
        if address is not None:
            yield address
            return
    with _embedded(tmp_path_factory.mktemp("kafka")) as address:
        yield address


@contextmanager
def _container() -> Iterator[str | None]:
    container = _kafka_container()
    if container is None:
        yield None
        return
    with container:
        yield str(container.get_bootstrap_server())


def _kafka_container() -> Any:
    """A container that can be started, or None where no Docker engine answers."""
    from docker.errors import DockerException
    from testcontainers.community.kafka import KafkaContainer

    with warnings.catch_warnings():
        # Without an engine the client leaves its socket to the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            return KafkaContainer().with_kraft()
        except DockerException:
            container = None
        gc.collect()
    return container


@contextmanager
def _embedded(data_dir: Path) -> Iterator[str]:
    from streams.kafka.embedded import start_kafka, stop_kafka

    # Its input ends when this process does, however that happens: a killed test run leaves
    # no broker behind.
    reaper = subprocess.Popen([sys.executable, "-c", _REAPER, str(data_dir)], stdin=subprocess.PIPE)
    try:
        yield start_kafka(data_dir).bootstrap_servers
    finally:
        stop_kafka(data_dir)
        reaper.communicate(timeout=_DEADLINE_S)


@pytest.fixture(scope="session")
def model_data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder for tests of the real model: it is converted once for all of them."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def unique_name() -> Callable[[str], str]:
    """Makes names that no other test uses: ``unique_name("turns")``."""
    suffix = uuid.uuid4().hex[:12]
    return lambda stem: f"{stem}-{suffix}"


def create_topics(bootstrap: str, topics: Mapping[str, tuple[int, Mapping[str, str]]]) -> None:
    """Create topics, ``{name: (partitions, config)}``, and wait until each has its leaders."""
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    admin = AdminClient({"bootstrap.servers": bootstrap})
    wanted = [
        NewTopic(name, num_partitions=partitions, replication_factor=1, config=dict(config))
        for name, (partitions, config) in topics.items()
    ]
    for future in admin.create_topics(wanted).values():
        future.result(timeout=_DEADLINE_S)
    _wait_for_leaders(bootstrap, {name: partitions for name, (partitions, _) in topics.items()})


def _wait_for_leaders(bootstrap: str, topics: Mapping[str, int]) -> None:
    """Wait until each partition says where it ends: its leader may be named before it answers."""
    from confluent_kafka import Consumer

    from streams.kafka.reading import offset_range

    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "leaders"})
    try:
        for name, partitions in topics.items():
            for partition in range(partitions):
                offset_range(consumer, name, partition)
    finally:
        consumer.close()


@pytest.fixture(name="create_topics")
def create_topics_fixture(kafka_bootstrap: str) -> CreateTopics:
    """``create_topics({name: (partitions, config)})`` on the suite's broker."""
    return lambda topics: create_topics(kafka_bootstrap, topics)
