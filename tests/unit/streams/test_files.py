from __future__ import annotations

from pathlib import Path

import pytest

from streams.errors import ExportError
from streams.files import STANDARD_OUTPUT, whole_file


def test_a_file_takes_its_name_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with whole_file(path) as file:
        file.write("你好\n")
        assert not path.exists()
    assert path.read_text(encoding="utf-8") == "你好\n"
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o600 == 0o600


def test_what_was_there_stays_if_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("before")
    with pytest.raises(ZeroDivisionError), whole_file(path) as file:
        file.write(str(1 / 0))
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "out"
    with pytest.raises(ExportError, match=r"cannot write .*nowhere/out: No such"), whole_file(path):
        raise AssertionError


def test_standard_output_can_be_meant(capsys: pytest.CaptureFixture[str]) -> None:
    with whole_file(STANDARD_OUTPUT) as file:
        file.write("line\n")
    assert capsys.readouterr().out == "line\n"
