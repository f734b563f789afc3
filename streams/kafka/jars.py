"""The class path of the embedded Kafka: resolved once, kept in the user's cache folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from streams.errors import BrokerError

KAFKA_VERSION = "4.4.0"
LOG4J_VERSION = "2.24.3"

# The "!" keeps a coordinate's own dependency management to itself: without it Log4j's would
# pull the Kafka client down to the version that Log4j was tested with.
_COORDINATES = (
    f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}!",
    f"org.apache.logging.log4j:log4j-slf4j-impl:{LOG4J_VERSION}!",
)
_SCOPES = ("compile", "runtime")


def kafka_jars(cache_dir: Path | None = None, *, on_step: Callable[[str], None]) -> Path:
    """The folder with the jars of Apache Kafka, fetched on first use (about 45 MB).

    Other processes that ask at the same time wait and share the result. A fetch that is
    interrupted leaves nothing behind.

    Args:
        cache_dir: Where to keep it; ``clawstream`` in the user's cache folder if None.
        on_step: Told what is going on when it takes long.

    Raises:
        BrokerError: The jars are not here and no Maven repository could be reached.
    """
    root = cache_dir if cache_dir is not None else _user_cache_dir()
    target = root / f"kafka_2.13-{KAFKA_VERSION}-log4j-{LOG4J_VERSION}"
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _exclusive(root / "lock"):
            if not target.is_dir():
                on_step(f"fetching Apache Kafka {KAFKA_VERSION} (45 MB, once)")
                _fetch_into(target)
    except OSError as error:
        raise _unavailable(error) from error
    return target


def _user_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "clawstream"


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _fetch_into(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        jars = Path(scratch) / "jars"
        jars.mkdir()
        for path in _resolve(Path(scratch) / "repository"):
            if not zipfile.is_zipfile(path):
                raise BrokerError(f"{path} is damaged: delete it and try again")
            shutil.copy(path, jars / path.name)
        jars.rename(target)


def _resolve(repo_cache: Path) -> list[Path]:
    from jgo.config import GlobalSettings
    from jgo.constants import MAVEN_CENTRAL_URL, default_maven_repo
    from jgo.maven import MavenContext

    context = MavenContext(
        repo_cache=repo_cache,
        local_repos=[default_maven_repo()],
        remote_repos={"central": MAVEN_CENTRAL_URL} | GlobalSettings.load().repositories,
    )
    try:
        return _download_all(context)
    # jgo lets errors of its HTTP client, its XML parser and its own asserts through.
    except Exception as error:
        raise _unavailable(error) from error


def _download_all(context: Any) -> list[Path]:
    wanted = [context.create_dependency(coordinate) for coordinate in _COORDINATES]
    direct, transitive = context.resolver.resolve(wanted)
    needed = [*direct, *(item for item in transitive if item.scope in _SCOPES)]
    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(pool.map(lambda item: Path(item.artifact.resolve()), needed))


def _unavailable(error: Exception) -> BrokerError:
    return BrokerError(
        f"cannot fetch Apache Kafka {KAFKA_VERSION} from a Maven repository. Use a Kafka of your "
        "own (set KAFKA_BOOTSTRAP_SERVERS=host:port), connect this machine once (the files are "
        "then kept), or name a mirror in ~/.config/jgo.conf: a section [repositories] with a "
        f"line central = URL. The cause: {str(error) or type(error).__name__}"
    )
