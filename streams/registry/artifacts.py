"""The artifact store: folders of files that appear whole or not at all.

A folder is filled under a temporary name, every file and folder is fsynced, and one rename
makes it visible; a crash leaves at most a temporary folder, which ``remove_unfinished`` clears,
or one that nobody refers to, which ``orphans`` finds. Every file's SHA-256 is taken when it is
written and checked again when it is read, so that a damaged adapter is never served.

Layout: ``<root>/<policy>/<name>/…``; the policy is percent-encoded.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote, unquote, urlsplit

from streams.errors import ArtifactError

_TEMPORARY = ".writing-"
_LOCK = ".lock"
_NUMBERING = ".numbering"
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFolder:
    """A folder of the store: its URI, and the SHA-256 of each file by its relative path."""

    uri: str
    files: Mapping[str, str]


class ArtifactStore:
    """Folders below one root, each written once and never changed.

    One learner writes for a policy at a time (see ``claim``), and a retrain beside it with the
    learner's leave (see ``numbering``); any number may read.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @classmethod
    def open(cls, url: str) -> ArtifactStore:
        """The store at a ``file://`` URL or plain path; its folder is created if missing.

        Raises:
            ArtifactError: The URL is no folder's, or the folder cannot be made.
        """
        root = local_path(url)
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArtifactError(
                f"cannot create the artifact folder {root}: {error.strerror}; "
                "make it writable or set ARTIFACTS_URL"
            ) from error
        return cls(root)

    def write(self, policy: str, name: str, fill: Callable[[Path], object]) -> StoredFolder:
        """Store what ``fill`` writes into the empty folder it is given, durably and atomically.

        Raises:
            ArtifactError: The folder exists already, ``fill`` wrote nothing, or the disk failed.
                Whatever else ``fill`` raises passes through.
        """
        final = self._folder(policy) / _checked_name(name)
        temporary = final.with_name(_TEMPORARY + final.name)
        if final.exists():
            raise ArtifactError(f"{final} exists already: artifacts are never overwritten")
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            fill(temporary)
            files = _seal(temporary)
            temporary.rename(final)
            _sync_folders(final.parent, self._root)
        except OSError as error:
            raise ArtifactError(
                f"cannot write {error.filename or final}: {error.strerror}; "
                "check the free space and the rights of the artifact folder"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return StoredFolder(uri=final.absolute().as_uri(), files=files)

    @contextlib.contextmanager
    def claim(self, policy: str) -> Iterator[None]:
        """Be the one process that writes for a policy; ends with the process at the latest.

        Raises:
            ArtifactError: Another process is, or the folder cannot be written.
        """
        folder = self._folder(policy)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / _LOCK).open("w")
        except OSError as error:
            raise ArtifactError(
                f"cannot write {error.filename or folder}: {error.strerror}; check the free space "
                "and the rights of the artifact folder"
            ) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ArtifactError(
                    f"another learner of policy {policy!r} is at work on {folder}; stop it, or "
                    "give this one another learner.policy"
                ) from error
            yield

    @contextlib.contextmanager
    def numbering(self, policy: str) -> Iterator[None]:
        """Be the only one to write folders for a policy and give its next version a number.

        Waits until whoever is at it has done; held for seconds, and gone with its process.

        Raises:
            ArtifactError: The folder cannot be written.
        """
        folder = self._folder(policy)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / _NUMBERING).open("w")
        except OSError as error:
            raise ArtifactError(
                f"cannot write {error.filename or folder}: {error.strerror}; check the free space "
                "and the rights of the artifact folder"
            ) from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def remove_unfinished(self, policy: str) -> tuple[str, ...]:
        """Remove the folders whose writing was interrupted; their names.

        Only the learner of the policy may call this, within ``numbering``.
        """
        unfinished = [p for p in self._entries(policy) if p.name.startswith(_TEMPORARY)]
        for path in unfinished:
            _remove(path)
        return tuple(path.name.removeprefix(_TEMPORARY) for path in unfinished)

    def orphans(self, policy: str, known_uris: Collection[str]) -> dict[str, str]:
        """The policy's finished folders that are not among ``known_uris``: name to URI."""
        return {
            path.name: path.absolute().as_uri()
            for path in self._entries(policy)
            if not path.name.startswith(".") and path.absolute().as_uri() not in known_uris
        }

    def _entries(self, policy: str) -> list[Path]:
        folder = self._folder(policy)
        return sorted(folder.iterdir()) if folder.is_dir() else []

    def remove(self, uri: str) -> None:
        """Remove one folder; one that is gone already is no error.

        Raises:
            ArtifactError: It is not in this store, or cannot be removed.
        """
        path = local_path(uri)
        if self._root.absolute() not in path.absolute().parents:
            raise ArtifactError(f"{path} is not in the artifact folder {self._root}")
        if path.exists():
            _remove(path)

    def _folder(self, policy: str) -> Path:
        encoded = quote(policy, safe="")
        # A leading dot, which quoting leaves, would hide the folder or lead out.
        return self._root / _checked_name(f"%2E{encoded[1:]}" if encoded[:1] == "." else encoded)


def verify(uri: str, files: Mapping[str, str]) -> Path:
    """The local folder behind a URI, once every file in it was found to be what it should be.

    Args:
        uri: Of the folder, as in ``ModelVersion.adapter_uri``.
        files: SHA-256 (hex) of each file by its path in the folder.

    Raises:
        ArtifactError: A file is missing, damaged or outside the folder; the message names it.
    """
    folder = local_path(uri)
    for name, expected in sorted(files.items()):
        _verify_file(folder, name, expected)
    return folder


def _verify_file(folder: Path, name: str, expected: str) -> None:
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise ArtifactError(f"file name {name!r} leads out of {folder}: the record is not ours")
    path = folder / relative
    try:
        found = _sha256(path)
    except OSError as error:
        raise ArtifactError(
            f"cannot read {path}: {error.strerror}; restore it from a backup or go back to an "
            "earlier version"
        ) from error
    if found != expected:
        raise ArtifactError(
            f"{path} is damaged: its SHA-256 is {found}, recorded was {expected}; restore it from "
            "a backup or go back to an earlier version"
        )


def local_path(url: str) -> Path:
    """The folder at a ``file://`` URL or plain path.

    Raises:
        ArtifactError: It is somewhere else.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return Path(unquote(parts.path))
    if parts.scheme == "" and url:
        return Path(url).absolute()
    raise ArtifactError(
        f"{parts.scheme}:// is no place for artifacts here: it must be a folder, such as "
        "ARTIFACTS_URL=file:///var/lib/clawstream/artifacts (mount remote storage there)"
    )


def _checked_name(name: str) -> str:
    if not name or "/" in name or name.startswith("."):
        raise ArtifactError(f"{name!r} cannot name a folder: leave out '/' and a leading '.'")
    return name


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _seal(folder: Path) -> dict[str, str]:
    """Hash and fsync everything in a folder; the SHA-256 of each file by relative path."""
    digests = {}
    for path in _files(folder):
        digests[path.relative_to(folder).as_posix()] = _sha256(path)
        _sync(path)
    if not digests:
        raise ArtifactError(f"nothing was written for {folder.name.removeprefix(_TEMPORARY)}")
    for path in (*folder.rglob("*"), folder):
        if path.is_dir():
            _sync(path)
    return digests


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folders(folder: Path, root: Path) -> None:
    """Make a rename in ``folder`` durable, and the folders made for it up to the root."""
    _sync(folder)
    _sync(root)
    if folder != root:
        _sync(root.parent)


def _remove(path: Path) -> None:
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        raise ArtifactError(
            f"cannot remove {error.filename or path}: {error.strerror}; check the rights of the "
            "artifact folder"
        ) from error
