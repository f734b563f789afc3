"""Where an archive's files are: a folder, or any address that fsspec knows.

A file is made in a workspace and published under its name in one step that fails if the name is
taken. As each file starts at the offset where the one before it ends, and only one file can have
that start, no two archivers can both write an offset.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast
from urllib.parse import unquote, urlsplit

from streams.archive.layout import FOLDER, FileName, Stored
from streams.errors import ArchiveError
from streams.files import sync_folder

_WORKSPACE = ".unfinished"
_WHOLE_PUTS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss", "memory"})
"""Object stores: an object is there when its upload is complete, never a part of it."""
_EXCLUSIVE_PUTS = frozenset({"s3", "s3a"})
"""Where an upload can be refused by the store itself if the name is taken."""


class Store(Protocol):
    """The files of one archive; names are paths within it."""

    @property
    def address(self) -> str:
        """Where it is, for people."""
        ...

    def files(self, topic: str | None = None) -> list[Stored]:
        """Every file of the archive, or of one topic.

        Raises:
            ArchiveError: The place cannot be read.
        """
        ...

    def open(self, name: FileName) -> BinaryIO:
        """A file for reading; it can be sought in.

        Raises:
            ArchiveError: It is gone or cannot be read.
        """
        ...

    def workspace(self, topic: str) -> Any:
        """A context: the folder of this machine in which files of a topic are made.

        Raises:
            ArchiveError: Another archiver has it, or it cannot be made.
        """
        ...

    def publish(self, made: Path, name: FileName) -> None:
        """Give a finished file of the workspace its name; it leaves the workspace.

        Raises:
            ArchiveError: The name is taken, or the file cannot be written.
        """
        ...


def open_store(address: str, options: Mapping[str, Any] | None = None) -> Store:
    """The archive at a path or URL.

    Args:
        address: A folder's path, ``file://`` URL, or what fsspec takes (``s3://bucket/prefix``).
        options: For fsspec's file system, such as ``endpoint_url``.

    Raises:
        ArchiveError: No file system is known for it here.
    """
    parts = urlsplit(address)
    if parts.scheme in ("", "file"):
        return LocalStore(Path(unquote(parts.path) if parts.scheme else address))
    return RemoteStore(address, options or {})


class LocalStore:
    """An archive in a folder of this machine."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def address(self) -> str:
        """See ``Store``."""
        return str(self._root.absolute())

    def files(self, topic: str | None = None) -> list[Stored]:
        """See ``Store``."""
        with _explaining(f"read {self.address}"):
            return list(self._files(topic))

    def _files(self, topic: str | None) -> Iterator[Stored]:
        pattern = "*/partition=*/*.parquet"
        for path in sorted((self._root / FOLDER).glob(pattern)):
            name = FileName.parse(path.relative_to(self._root).as_posix())
            if name is not None and topic in (None, name.topic):
                yield Stored(name=name, size_bytes=path.stat().st_size)

    def open(self, name: FileName) -> BinaryIO:
        """See ``Store``."""
        with _explaining(f"read {name} in {self.address}"):
            return (self._root / str(name)).open("rb")

    @contextmanager
    def workspace(self, topic: str) -> Iterator[Path]:
        """See ``Store``. What a killed archiver left there is removed."""
        folder = self._root / _WORKSPACE / topic
        with _explaining(f"write to {self.address}"):
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / "lock").open("a")
        with lock:
            try:
                # The system lets it go when this process ends, however that happens.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ArchiveError(
                    f"another archiver writes {topic} to {self.address}; only one may"
                ) from None
            for left in folder.glob("*.tmp"):
                left.unlink(missing_ok=True)
            yield folder

    def publish(self, made: Path, name: FileName) -> None:
        """See ``Store``."""
        final = self._root / str(name)
        with _explaining(f"write {name} to {self.address}"):
            _sync_file(made)
            self._make_folder(final.parent)
            try:
                _name_once(made, final)
            except FileExistsError:
                raise _taken(name, self.address) from None
            sync_folder(final.parent)

    def _make_folder(self, folder: Path) -> None:
        if folder.is_dir():
            return
        folder.mkdir(parents=True)
        for parent in (folder, *folder.parents):
            sync_folder(parent)
            if parent == self._root:
                return


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name_once(made: Path, final: Path) -> None:
    """Move a file to a name that nobody has; a plain rename would replace whoever has it."""
    try:
        os.link(made, final)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        # No hard links here. The workspace's lock keeps other archivers of this machine off.
        if final.exists():
            raise FileExistsError(errno.EEXIST, "exists", str(final)) from None
        made.rename(final)
        return
    made.unlink()


class RemoteStore:
    """An archive at an address that fsspec knows.

    Args:
        address: A URL.
        options: For its file system.
    """

    def __init__(self, address: str, options: Mapping[str, Any]) -> None:
        self._address = address.rstrip("/")
        self._protocol = urlsplit(address).scheme
        self._fs, self._root = _file_system(self._address, options)

    @property
    def address(self) -> str:
        """See ``Store``."""
        return self._address

    def files(self, topic: str | None = None) -> list[Stored]:
        """See ``Store``."""
        folder = f"{self._root}/{FOLDER}" + (f"/{topic}" if topic is not None else "")
        with _explaining(f"read {self._address}"):
            # Others write, too: what was listed before says nothing.
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(folder, detail=True)
            except FileNotFoundError:
                return []
            named = ((FileName.parse(self._relative(path)), info) for path, info in found.items())
            return [
                Stored(name=name, size_bytes=int(info["size"] or 0))
                for name, info in named
                if name is not None
            ]

    def _relative(self, path: str) -> str:
        return path.removeprefix("/").removeprefix(self._root.removeprefix("/")).removeprefix("/")

    def open(self, name: FileName) -> BinaryIO:
        """See ``Store``."""
        with _explaining(f"read {name} in {self._address}"):
            return cast(BinaryIO, self._fs.open(f"{self._root}/{name}", "rb"))

    @contextmanager
    def workspace(self, topic: str) -> Iterator[Path]:
        """See ``Store``. It is a temporary folder of this machine."""
        folder = Path(tempfile.mkdtemp(prefix="clawstream-archive-"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, made: Path, name: FileName) -> None:
        """See ``Store``."""
        path = f"{self._root}/{name}"
        with _explaining(f"write {name} to {self._address}"):
            try:
                self._put(made, path)
            except FileExistsError:
                raise _taken(name, self._address) from None
        made.unlink()

    def _put(self, made: Path, path: str) -> None:
        self._fs.invalidate_cache()
        if self._fs.exists(path):
            raise FileExistsError(path)
        if self._protocol in _EXCLUSIVE_PUTS:
            self._put_exclusively(made, path)
        elif self._protocol in _WHOLE_PUTS:
            self._fs.put_file(str(made), path)
        else:
            folder, _, last = path.rpartition("/")
            self._fs.makedirs(folder, exist_ok=True)
            self._fs.put_file(str(made), f"{folder}/.{last}.tmp")
            self._fs.mv(f"{folder}/.{last}.tmp", path)

    def _put_exclusively(self, made: Path, path: str) -> None:
        try:
            self._fs.put_file(str(made), path, mode="create")
        except OSError as error:
            if "PreconditionFailed" in str(error) or "At least one of the pre-cond" in str(error):
                raise FileExistsError(path) from error
            raise


def _file_system(address: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError as error:
        raise ArchiveError(
            f"{address} needs fsspec: install clawstream[archive], and clawstream[s3] for s3://"
        ) from error
    try:
        fs, root = fsspec.core.url_to_fs(address, use_listings_cache=False, **options)
    except (ValueError, ImportError, TypeError) as error:
        raise ArchiveError(
            f"cannot use {address}: {error}. Give a folder, or a URL of a file system that fsspec "
            "has here (s3:// is in clawstream[s3]); archive.options are passed to it"
        ) from error
    return fs, str(root).rstrip("/")


def _taken(name: FileName, address: str) -> ArchiveError:
    return ArchiveError(
        f"{name} is there already in {address}: another archiver writes this topic; let one run"
    )


@contextmanager
def _explaining(doing: str) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise ArchiveError(f"cannot {doing}: {error.strerror or error}") from error
    except _client_errors() as error:
        raise ArchiveError(f"cannot {doing}: {error}") from error


def _client_errors() -> tuple[type[Exception], ...]:
    """What the client of S3 raises beside ``OSError``, where it is installed."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        return ()
    return (BotoCoreError, ClientError)


__all__ = ["LocalStore", "RemoteStore", "Store", "open_store"]
