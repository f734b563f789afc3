from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from streams.errors import ArtifactError
from streams.registry import ArtifactStore, verify

FILES = {"weights.bin": b"\x00\x01", "nested/config.json": b"{}"}


def fill(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore.open((tmp_path / "store").as_uri())


def test_what_is_written_can_be_read(store: ArtifactStore, tmp_path: Path) -> None:
    stored = store.write("default", "policy-v1", fill)
    assert stored.uri == (tmp_path / "store" / "default" / "policy-v1").as_uri()
    assert stored.files == {n: hashlib.sha256(c).hexdigest() for n, c in FILES.items()}
    folder = verify(stored.uri, stored.files)
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES


def test_odd_policy_names_stay_inside(store: ArtifactStore, tmp_path: Path) -> None:
    for policy in ("../a b/ü", "a%2Fb"):
        stored = store.write(policy, "policy-v1", fill)
        folder = verify(stored.uri, stored.files)
        assert folder.parent.parent == tmp_path / "store"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".hidden"])
def test_names_that_are_paths_are_refused(name: str, store: ArtifactStore) -> None:
    with pytest.raises(ArtifactError, match="cannot name a folder"):
        store.write("default", name, fill)


def test_nothing_is_overwritten(store: ArtifactStore) -> None:
    store.write("default", "policy-v1", fill)
    with pytest.raises(ArtifactError, match="exists already"):
        store.write("default", "policy-v1", fill)


@pytest.mark.parametrize("name", sorted(FILES))
def test_damage_is_found_and_named(name: str, store: ArtifactStore) -> None:
    stored = store.write("default", "policy-v1", fill)
    path = verify(stored.uri, stored.files) / name
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ArtifactError, match=rf"{name} is damaged"):
        verify(stored.uri, stored.files)
    path.unlink()
    with pytest.raises(ArtifactError, match=rf"cannot read .*{name}"):
        verify(stored.uri, stored.files)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../b"])
def test_names_that_lead_out_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="leads out"):
        verify(tmp_path.as_uri(), {name: "0" * 64})


def test_a_failed_fill_leaves_nothing(store: ArtifactStore, tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        fill(folder)
        raise KeyError("half way")

    with pytest.raises(KeyError):
        store.write("default", "policy-v1", fail)
    assert list((tmp_path / "store" / "default").iterdir()) == []


def test_an_empty_fill_is_refused(store: ArtifactStore) -> None:
    with pytest.raises(ArtifactError, match="nothing was written for policy-v1"):
        store.write("default", "policy-v1", lambda _: None)


def test_a_full_disk_is_explained(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArtifactError, match=r"No space left.*check the free space"):
        store.write("default", "policy-v1", fill)


def test_the_folder_appears_only_once_everything_is_on_disk(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "store" / "default" / "policy-v1"
    synced: list[tuple[str, bool]] = []
    fsync: Callable[[int], None] = os.fsync

    def note(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), final.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    store.write("default", "policy-v1", fill)
    temporary = final.with_name(".writing-policy-v1")
    before = {path for path, visible in synced if not visible}
    after = {path for path, visible in synced if visible}
    inside = {temporary, temporary / "nested", *(temporary / name for name in FILES)}
    assert before == {str(path) for path in inside}
    assert {str(final.parent), str(final.parent.parent)} <= after


def test_orphans_are_the_finished_folders_that_nobody_knows(
    store: ArtifactStore, tmp_path: Path
) -> None:
    known = store.write("default", "policy-v1", fill)
    orphan = store.write("default", "policy-v2", fill)
    store.write("npc", "policy-v2", fill)
    (tmp_path / "store" / "default" / ".writing-policy-v3").mkdir()
    with store.claim("default"):
        assert store.orphans("default", {known.uri}) == {"policy-v2": orphan.uri}
    assert store.orphans("unknown", ()) == {}


def test_what_was_not_finished_is_removed_and_nothing_else(
    store: ArtifactStore, tmp_path: Path
) -> None:
    stored = store.write("default", "policy-v1", fill)
    half = tmp_path / "store" / "default" / ".writing-policy-v3"
    half.mkdir()
    (half / "part").touch()
    with store.claim("default"):
        assert store.remove_unfinished("default") == ("policy-v3",)
        assert store.remove_unfinished("default") == ()
    assert not half.exists()
    verify(stored.uri, stored.files)
    assert store.remove_unfinished("unknown") == ()


def test_one_process_at_a_time_writes_for_a_policy(store: ArtifactStore) -> None:
    with store.claim("default"):
        with (
            pytest.raises(ArtifactError, match="another learner of policy 'default' is at work"),
            store.claim("default"),
        ):
            raise AssertionError
        with store.claim("npc"):
            pass
    with store.claim("default"):
        pass


def test_a_folder_that_cannot_be_claimed_is_explained(store: ArtifactStore, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(exist_ok=True)
    (tmp_path / "store" / "default").touch()
    with (
        pytest.raises(ArtifactError, match="check the free space and the rights"),
        store.claim("default"),
    ):
        raise AssertionError


def test_removal_stays_inside(store: ArtifactStore, tmp_path: Path) -> None:
    stored = store.write("default", "policy-v1", fill)
    store.remove(stored.uri)
    store.remove(stored.uri)
    with pytest.raises(ArtifactError, match="cannot read"):
        verify(stored.uri, stored.files)
    outside = tmp_path / "outside"
    outside.mkdir()
    with pytest.raises(ArtifactError, match="is not in the artifact folder"):
        store.remove(outside.as_uri())
    assert outside.is_dir()


@pytest.mark.parametrize("url", ["s3://bucket/x", "file://host/x", ""])
def test_other_places_are_refused(url: str) -> None:
    with pytest.raises(ArtifactError, match="ARTIFACTS_URL"):
        ArtifactStore.open(url)


def test_a_folder_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match="cannot create the artifact folder"):
        ArtifactStore.open(str(tmp_path / "file" / "store"))


def test_numbers_are_given_one_at_a_time(store: ArtifactStore) -> None:
    entered = threading.Event()

    def second() -> None:
        with store.numbering("default"):
            entered.set()

    thread = threading.Thread(target=second)
    with store.numbering("default"), store.numbering("npc"):
        thread.start()
        assert not entered.wait(0.2)
    assert entered.wait(30.0)
    thread.join()
    assert store.orphans("default", ()) == {}
