"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from streams.errors import ExportError

STANDARD_OUTPUT = Path("-")
"""Names standard output where a file is asked for."""


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A text file (UTF-8) that takes its name when the block ends without an error.

    Until then it has a hidden name beside it, and what had the name before stays. With
    ``STANDARD_OUTPUT`` text goes there as it is written.

    Raises:
        ExportError: It cannot be written; names it.
    """
    if path == STANDARD_OUTPUT:
        yield sys.stdout
        sys.stdout.flush()
        return
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror}") from error
    hidden = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        hidden.chmod(0o644 & ~_umask())
        hidden.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        hidden.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Let the names in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    # It can only be read by setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


__all__ = ["STANDARD_OUTPUT", "sync_folder", "whole_file"]
