"""The version registry on a real PostgreSQL: what holds on SQLite holds there."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import sqlalchemy

from streams.registry import Registry
from tests.postgres import postgres
from tests.unit.streams.registry import test_store as store
from tests.unit.streams.registry.builders import version

SQLITE_ALONE = {
    "test_sqlite_is_safe_for_several_processes",
    "test_a_registry_of_a_newer_version_is_refused",
    "test_a_file_that_is_no_database_is_refused",
    "test_a_bad_address_is_explained_without_its_password",
    "test_postgresql_gets_the_same_tables",
}

for _name, _test in vars(store).items():
    if _name.startswith("test_") and _name not in SQLITE_ALONE:
        globals()[_name] = _test


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with postgres(tmp_path_factory.mktemp("postgres")) as address:
        yield address


@pytest.fixture
def url(server: str, request: pytest.FixtureRequest) -> str:
    """A database of its own for each test."""
    name = f"test_{abs(hash(request.node.nodeid))}"
    engine = sqlalchemy.create_engine(server + "postgres", isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return server + name


@pytest.fixture
def registry(url: str) -> Iterator[Registry]:
    with Registry.open(url) as opened:
        yield opened


def test_enough_of_the_tests_run_here_too() -> None:
    here = {name for name in globals() if name.startswith("test_")}
    there = {name for name in vars(store) if name.startswith("test_")}
    assert there - here == SQLITE_ALONE
    assert len(here) > 15


def test_a_registry_is_opened_by_many_at_once(url: str) -> None:
    """Of those that find it empty one makes the tables."""
    failures: list[BaseException] = []

    def opened() -> None:
        try:
            with Registry.open(url) as registry:
                assert registry.versions() == ()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=opened) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with Registry.open(url) as registry:
        registry.record(version(1))
        assert registry.next_version("default") == 2
