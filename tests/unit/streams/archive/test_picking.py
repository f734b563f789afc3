from __future__ import annotations

from pathlib import Path

import pytest

from streams.archive import files
from streams.archive.picking import Picker
from streams.archive.reading import Archive
from streams.archive.store import LocalStore
from streams.errors import ArchiveError, DamagedArchiveError
from streams.topics import TURNS
from tests.archives import rows, write_file


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """Offsets 0 to 29 without 12 and 13, 40 to 59; three rows to a group."""
    monkeypatch.setattr(files, "GROUP_ROWS", 3)
    made = LocalStore(tmp_path)
    first = rows(30)
    write_file(made, first[:12] + first[14:])
    write_file(made, rows(20, start=40))
    return made


@pytest.mark.parametrize("max_bytes", [1, 1_000_000])
def test_records_are_found_by_offset(store: LocalStore, max_bytes: int) -> None:
    picker = Picker(Archive(store), max_bytes)
    wanted = [0, 2, 3, 11, 12, 13, 14, 29, 30, 35, 40, 59, 60, 99]
    whole = {row.offset: row for row in Archive(store).all_rows(TURNS, 0)}
    for _ in range(2):
        found = list(picker.read(TURNS, 0, wanted))
        assert found == [whole[offset] for offset in wanted if offset in whole]
        assert [row.offset for row in found] == [0, 2, 3, 11, 14, 29, 40, 59]
    assert list(picker.read(TURNS, 1, [0, 1])) == []
    assert list(picker.read(TURNS, 0, [])) == []


def test_parts_in_memory_are_not_read_again(store: LocalStore, tmp_path: Path) -> None:
    picker = Picker(Archive(store))
    before = list(picker.read(TURNS, 0, [1, 4]))
    (path,) = tmp_path.glob("topics/*/*/*+0000000000.parquet")
    path.unlink()
    assert list(picker.read(TURNS, 0, [1, 4])) == before
    with pytest.raises(ArchiveError, match="cannot read"):
        list(picker.read(TURNS, 0, [20]))


def test_a_damaged_file_is_named(store: LocalStore, tmp_path: Path) -> None:
    archive = Archive(store)
    assert archive.range(TURNS, 0) == (0, 60)
    (path,) = tmp_path.glob("topics/*/*/*+0000000040.parquet")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DamagedArchiveError, match=r"0000000040\.parquet .* is damaged"):
        list(Picker(archive).read(TURNS, 0, [41]))
