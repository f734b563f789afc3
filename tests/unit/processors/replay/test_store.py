from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from processors.replay import store as stores
from processors.replay.store import KEPT_S, PartitionStore
from processors.runtime.records import Outcome
from streams.errors import ReplayError


class Rig:
    """A store, what was given to it, and what another one finds in its file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now_s = 100.0
        self.store = self.opened()
        self.records = 0

    def opened(self) -> PartitionStore:
        return PartitionStore(self.path, lambda: self.now_s)

    def save(
        self, *made: bytes, done: bool = False, changes: dict[bytes, bytes | None] | None = None
    ) -> None:
        self.records += 1
        outcome = Outcome(
            applied={"turns": self.records},
            changes=changes or {},
            meta=self.records.to_bytes(2, "big"),
        )
        self.store.save(outcome, made, {"records": self.records}, done=done)

    def kill(self) -> None:
        """End without a word, and begin again."""
        self.store.close()
        self.store = self.opened()

    def found(self) -> tuple[list[bytes], dict[bytes, bytes], dict[str, int]]:
        other = self.opened()
        try:
            made = [value for _, value in other.made()]
            assert other.applied().get("turns", 0) == other.counts().get("records", 0)
            assert int.from_bytes(other.meta() or b"", "big") == other.counts().get("records", 0)
            return made, dict(other.entries()), other.counts()
        finally:
            other.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "partition-0.sqlite")
    yield made
    made.store.close()


def test_what_came_within_a_moment_is_written_together(rig: Rig) -> None:
    rig.save(b"one", changes={b"a": b"1", b"b": b"1", b"c": b"1"})
    assert rig.found() == ([], {}, {})
    rig.now_s += KEPT_S
    rig.save(b"two", b"three", changes={b"a": b"2", b"b": None})
    assert rig.found() == ([b"one", b"two", b"three"], {b"a": b"2", b"c": b"1"}, {"records": 2})
    rig.save(b"four", changes={b"a": None, b"b": b"3"})
    assert rig.found()[2] == {"records": 2}
    rig.now_s += KEPT_S
    rig.save()
    made, state, counts = rig.found()
    assert (made[3:], state, counts) == ([b"four"], {b"b": b"3", b"c": b"1"}, {"records": 4})


def test_nothing_waits_at_the_end(rig: Rig) -> None:
    rig.save(b"one")
    rig.save(b"two", done=True)
    assert rig.found() == ([b"one", b"two"], {}, {"records": 2})
    assert rig.store.is_done()


def test_no_more_waits_than_fits_into_memory(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "KEPT_BYTES", 10)
    rig.save(b"12345")
    assert rig.found()[0] == []
    rig.save(b"678", changes={b"a": b"90"})
    assert rig.found() == ([b"12345", b"678"], {b"a": b"90"}, {"records": 2})


def test_who_is_killed_goes_on_from_the_last_that_was_written(rig: Rig) -> None:
    rig.now_s += KEPT_S
    rig.save(b"one", changes={b"a": b"1"})
    rig.save(b"lost", changes={b"a": b"2"})
    rig.kill()
    assert rig.found() == ([b"one"], {b"a": b"1"}, {"records": 1})
    rig.records = rig.store.applied()["turns"]
    rig.save(b"again", changes={b"a": b"2"}, done=True)
    assert rig.found() == ([b"one", b"again"], {b"a": b"2"}, {"records": 2})


def test_outputs_are_found_by_their_numbers(rig: Rig) -> None:
    rig.save(b"same", b"same", b"", done=True)
    numbers = dict(rig.store.made())
    assert sorted(numbers.values()) == [b"", b"same", b"same"]
    assert {number: rig.store.output(number) for number in numbers} == numbers


def test_a_file_of_another_version_is_refused_and_left(tmp_path: Path) -> None:
    path = tmp_path / "partition-0.sqlite"
    old = sqlite3.connect(path)
    old.executescript("CREATE TABLE made (segment_id TEXT, value BLOB); BEGIN; COMMIT;")
    old.close()
    with pytest.raises(ReplayError, match=r"partition-0\.sqlite was begun by another version"):
        PartitionStore(path)
    kept = sqlite3.connect(path)
    assert kept.execute("SELECT name FROM sqlite_master").fetchall() == [("made",)]
    kept.close()


def test_state_that_was_replaced_is_taken_out_once_it_is_most(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "KEPT_S", 0.0)
    monkeypatch.setattr(stores, "COMPACT_BYTES", 10)
    rig.kill()
    sizes = []
    for number in range(12):
        changes: dict[bytes, bytes | None] = {b"changes": b"%02d" % number}
        if number == 0:
            changes |= {b"stays": b"1", b"goes": b"1"}
        if number == 1:
            changes[b"goes"] = None
        rig.save(changes=changes)
        sizes.append(_rows(rig.path))
    assert rig.found()[1] == {b"stays": b"1", b"changes": b"11"}
    # Ten bytes are five changes, the two entries that came with the first counted as one.
    assert sizes == [3, 5, 6, 2, 3, 4, 5, 6, 2, 3, 4, 5]


def test_state_is_left_alone_until_as_much_was_written_as_there_is(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "KEPT_S", 0.0)
    monkeypatch.setattr(stores, "COMPACT_BYTES", 10)
    rig.kill()
    rig.save(changes={b"large": bytes(30)})
    sizes = []
    for _ in range(6):
        rig.save(changes={b"small": bytes(6)})
        sizes.append(_rows(rig.path))
    assert sizes == [2, 3, 4, 5, 2, 3]


def _rows(path: Path) -> int:
    db = sqlite3.connect(path)
    (count,) = db.execute("SELECT count(*) FROM state").fetchone()
    db.close()
    assert isinstance(count, int)
    return count
