"""Environments of their own for rivals that do not run beside what the project needs.

A rival's packages are locked, with hashes, in a file beside the bench's code; uv makes the
environment on demand. The project is imported there through links to its packages alone:
where it is installed, what it needs itself lies beside it.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from streams.errors import BenchError

OnStep = Callable[[str], None]

_HASHES = "lock.sha256"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where a rival runs.

    Attributes:
        what: What it holds, in words.
        folder: Where it is.
        lock: The requirements, with hashes.
        packages: The packages of ours that are imported there.
        without: What to do if it cannot be made.
        install_s: How long each step may take.
    """

    what: str
    folder: Path
    lock: Path
    packages: Sequence[ModuleType]
    without: str
    install_s: int = 900

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def source_root(self) -> Path:
        """The folder that holds links to our packages."""
        return self.folder.with_name(f"{self.folder.name}-source")

    @property
    def environ(self) -> Mapping[str, str]:
        """What its processes need to see beside what ours do."""
        return {"PYTHONPATH": str(self.source_root)}

    def prepare(self, on_step: OnStep) -> None:
        """Make it, unless it is there and its lock has not changed since.

        Raises:
            BenchError: It cannot be made; says what to do.
        """
        self._link()
        stamp = self.folder / _HASHES
        wanted = hashlib.sha256(self.lock.read_bytes()).hexdigest()
        if stamp.exists() and stamp.read_text(encoding="ascii") == wanted:
            return
        on_step(f"making an environment with {self.what}")
        uv = self._uv()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._run([uv, "venv", "--quiet", "--python", sys.executable, str(self.folder)])
        install = [uv, "pip", "sync", "--quiet", "--require-hashes"]
        self._run([*install, "--python", str(self.python), str(self.lock)])
        stamp.write_text(wanted, encoding="ascii")

    def _link(self) -> None:
        self.source_root.mkdir(parents=True, exist_ok=True)
        for package in self.packages:
            link = self.source_root / package.__name__
            link.unlink(missing_ok=True)
            link.symlink_to(Path(package.__path__[0]).resolve(), target_is_directory=True)

    def _uv(self) -> str:
        beside = Path(sys.executable).with_name("uv")
        found = str(beside) if beside.exists() else shutil.which("uv")
        if found is None:
            raise BenchError(
                f"{self.what} needs an environment of its own, which uv makes: install uv "
                f"(pip install uv), or {self.without}"
            )
        return found

    def _run(self, command: Sequence[str]) -> None:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=self.install_s)
        except subprocess.TimeoutExpired as error:
            raise BenchError(f"{command[1]} took more than {self.install_s} s") from error
        if done.returncode:
            raise BenchError(
                f"the environment for {self.what} cannot be made: {done.stderr.strip()}\n"
                f"Without a way to the package registry {self.without}"
            )


__all__ = ["Environment", "OnStep"]
