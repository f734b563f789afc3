"""The environment of its own that Quix Streams needs: it does not run with our Kafka client.

Its packages are locked, with hashes, in ``quix.lock`` beside this file: Quix Streams with what
it needs, and the little that the aligner's pure parts need. The project itself is imported
through links to our packages alone: where it is installed, what it needs itself lies beside it.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import processors
import streams
from processors.bench.cluster import OnStep
from processors.bench.process import BenchError

LOCK = Path(__file__).with_name("quix.lock")
_INSTALL_S = 600


def python_of(folder: Path) -> Path:
    """The interpreter of the environment in a bench's folder."""
    return folder / "quix" / "bin" / "python"


def source_root(folder: Path) -> Path:
    """The folder in a bench's folder that holds links to our packages."""
    return folder / "quix-source"


def prepare(folder: Path, on_step: OnStep) -> None:
    """Make the environment, unless it is there and its lock has not changed since.

    Raises:
        BenchError: It cannot be made; says what to do.
    """
    _link(source_root(folder))
    environment = folder / "quix"
    stamp = environment / "lock.sha256"
    wanted = hashlib.sha256(LOCK.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text(encoding="ascii") == wanted:
        return
    on_step("making an environment with Quix Streams")
    uv = _uv()
    shutil.rmtree(environment, ignore_errors=True)
    _run([uv, "venv", "--quiet", "--python", sys.executable, str(environment)])
    install = [uv, "pip", "sync", "--quiet", "--require-hashes"]
    _run([*install, "--python", str(python_of(folder)), str(LOCK)])
    stamp.write_text(wanted, encoding="ascii")


def _link(root: Path) -> None:
    root.mkdir(exist_ok=True)
    for package in (processors, streams):
        link = root / package.__name__
        link.unlink(missing_ok=True)
        link.symlink_to(Path(package.__path__[0]).resolve(), target_is_directory=True)


def _uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        raise BenchError(
            "Quix Streams needs an environment of its own, which uv makes: install uv "
            "(pip install uv), or leave out the quix subjects with --subjects"
        )
    return found


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S)
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"{command[1]} took more than {_INSTALL_S} s") from error
    if done.returncode:
        raise BenchError(
            f"the environment for Quix Streams cannot be made: {done.stderr.strip()}\n"
            "Without a way to the package registry leave out the quix subjects with --subjects"
        )


__all__ = ["prepare", "python_of", "source_root"]
