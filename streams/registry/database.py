"""The registry's database: reaching it, keeping its tables up to date, mapping its errors."""

from __future__ import annotations

import contextlib
import fcntl
import json
import sqlite3
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, OperationalError, SQLAlchemyError

from streams.errors import RegistryError

_BUSY_TIMEOUT_MS = 30_000
_MIGRATION_LOCK = 0x636C6177
"""PostgreSQL's advisory lock for migrations: "claw" in ASCII."""


def open_engine(url: str) -> Engine:
    """Connect to the database at a SQLAlchemy URL and bring its tables up to date.

    Idempotent, and safe when several processes open a new database at once. A SQLite file and
    its folder are created if missing.

    Raises:
        RegistryError: The URL cannot be used, the database cannot be reached, or it was
            written by a newer clawstream.
    """
    parsed = _parse_url(url)
    engine = _build_engine(parsed)
    try:
        with mapped_errors("open it", parsed), _migration_lock(parsed):
            if parsed.get_backend_name() == "sqlite":
                _enable_wal(engine)
            _migrate(engine)
    except RegistryError:
        engine.dispose()
        raise
    return engine


def for_writing(engine: Engine) -> Engine:
    """The same database, for transactions that will write.

    SQLite: such a transaction takes the write lock at its start, where the busy timeout
    applies, and not half way, where it does not.
    """
    return engine.execution_options(clawstream_write=True)


@contextlib.contextmanager
def mapped_errors(what: str, url: URL) -> Iterator[None]:
    """Raise ``RegistryError`` for every error of the libraries underneath.

    Args:
        what: What could not be done, as in "cannot {what}".
        url: Of the database; its password is not shown.
    """
    try:
        yield
    # ValueError: what JSON cannot hold; on SQLite it comes wrapped, from psycopg as it is.
    except (SQLAlchemyError, sqlite3.Error, CommandError, OSError, ValueError) as error:
        _raise_mapped(error, what, url)


def _migrate(engine: Engine) -> None:
    with for_writing(engine).begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})"))
        command.upgrade(_alembic_config(connection), "head")


def _parse_url(url: str) -> URL:
    try:
        return make_url(url)
    except ArgumentError:
        # From None: the library's message repeats the URL, and with it its password.
        raise RegistryError(
            "the registry's URL cannot be read: REGISTRY_URL must look like "
            "sqlite:////path/to/registry.db or postgresql+psycopg://user:password@host/database"
        ) from None


def _build_engine(url: URL) -> Engine:
    arguments: dict[str, Any] = {"json_serializer": partial(json.dumps, allow_nan=False)}
    try:
        if url.get_backend_name() != "sqlite":
            return create_engine(url, pool_pre_ping=True, **arguments)
        _create_parent(url)
        engine = create_engine(url, connect_args={"timeout": _BUSY_TIMEOUT_MS / 1000}, **arguments)
    except (SQLAlchemyError, ImportError, OSError) as error:
        _raise_mapped(error, "open it", url)
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _sqlite_file(url: URL) -> Path | None:
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        return None
    return Path(str(url.database))


def _create_parent(url: URL) -> None:
    path = _sqlite_file(url)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _migration_lock(url: URL) -> Iterator[None]:
    """One process at a time for a SQLite file: switching to WAL knows no busy timeout."""
    path = _sqlite_file(url)
    if path is None:
        yield
        return
    with path.with_name(path.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _enable_wal(engine: Engine) -> None:
    raw = engine.raw_connection()
    try:
        raw.cursor().execute("PRAGMA journal_mode=WAL")
    finally:
        raw.close()


def _configure_sqlite(connection: Any, _record: object) -> None:
    # The driver's own transaction handling would end a transaction at the first DDL statement.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("clawstream_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _alembic_config(connection: Connection) -> Config:
    config = _base_config()
    config.attributes["connection"] = connection
    return config


def offline_config(dialect: str) -> Config:
    """For ``alembic.command.upgrade(…, sql=True)``: prints the tables' SQL for a database that
    only its administrator may change."""
    config = _base_config()
    config.attributes["dialect"] = dialect
    return config


def _base_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
    config.set_main_option("path_separator", "os")
    return config


def _raise_mapped(error: Exception, what: str, url: URL) -> NoReturn:
    """Raise our error for one of the libraries', with what to do about it."""
    where = url.set(query={}).render_as_string(hide_password=True)
    raise RegistryError(
        f"cannot {what} (registry {where}): {_cause(error, url)}. {_advice(error)}"
    ) from None


def _cause(error: Exception, url: URL) -> str:
    origin = getattr(error, "orig", None) or error
    lines = str(origin).strip().splitlines() or [type(origin).__name__]
    secrets = [url.password, *url.normalized_query.get("password", ())]
    message = lines[0]
    for secret in secrets:
        message = message.replace(str(secret), "***") if secret else message
    return message.rstrip(".")


def _advice(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "Install the database's Python driver, for PostgreSQL: pip install psycopg[binary]"
    if isinstance(error, CommandError):
        return "The registry was written by a newer clawstream: upgrade this one"
    if isinstance(error, IntegrityError):
        return "Another learner of this policy is at work, or it was recorded before: stop one"
    if isinstance(error, OperationalError | OSError):
        return "Check that the database is reachable and writable, and REGISTRY_URL is right"
    return "Check REGISTRY_URL and the database's own log"
