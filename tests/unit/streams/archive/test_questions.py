"""The questions in docs/archive.md, asked of an archive."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import duckdb
import pytest

from streams.archive.columns import Row
from streams.archive.layout import FileName
from streams.topics import TURNS
from tests.archives import NOON_MS, small_archive, write_file

PAGE = Path(__file__).parents[4] / "docs" / "archive.md"
BLOCKS = re.findall(r"```(sql|python)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
SQL = [text for kind, text in BLOCKS if kind == "sql"]


@pytest.fixture(autouse=True)
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = small_archive(tmp_path)
    odd = Row(topic=TURNS, partition=1, offset=20, timestamp=NOON_MS, key=b"k", value=b"no record")
    write_file(store, [odd])
    assert len(store.files()) == 6
    assert FileName(TURNS, 1, 20) in [file.name for file in store.files()]
    monkeypatch.chdir(tmp_path)


def ask(beginning: str) -> list[tuple[Any, ...]]:
    (question,) = [text for text in SQL if beginning in text]
    with duckdb.connect() as connection:
        return connection.execute(question).fetchall()


def test_turns_by_day_and_role() -> None:
    found = ask("date_trunc('day'")
    assert [(role, turns) for _, role, turns in found] == [("assistant", 20), ("user", 20)]


def test_a_conversation_in_its_order() -> None:
    found = ask("session_id = 's1'")
    assert [content for _, _, content in found] == [
        text for n in range(4, 8) for text in [f"turn {n}"] * 2
    ]


def test_how_late_turns_arrive() -> None:
    assert ask("delay_ms") == [("test", [500.0, 500.0])]


def test_what_could_not_be_read() -> None:
    ((schema, problem, records, _, _),) = ask("problem IS NOT NULL")
    assert (schema, records) == (None, 1)
    assert problem.startswith("the first byte is 6e")


def test_rewards_by_version() -> None:
    found = {version: (replies, round(reward, 6)) for version, replies, reward in ask("QUALIFY")}
    assert found == {0: (4, -0.4), 1: (4, 0.4), 2: (4, 0.4)}


def test_who_rates() -> None:
    found = ask("AS given")
    assert [(user, kind, times) for user, kind, times, _ in found] == [
        (f"u{n}", "thumb", 3) for n in range(4)
    ]


def test_every_question_is_a_test() -> None:
    assert len(SQL) == 6


def test_pandas() -> None:
    (code,) = [text for kind, text in BLOCKS if kind == "python"]
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["by_version"].to_dict() == {0.0: 6, 1.0: 8, 2.0: 6}
