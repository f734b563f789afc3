"""An archive without a broker: names, files, checks, reading."""

from __future__ import annotations

import contextlib
import operator
import os
import pathlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from streams.archive import files
from streams.archive.chain import breaks
from streams.archive.checking import verify
from streams.archive.columns import Columns, Digest, Row, arrow_type, rows_of, schema_name
from streams.archive.files import FileReader, Footer, Source, read_footer
from streams.archive.layout import FileName
from streams.archive.reading import Archive
from streams.archive.store import LocalStore, RemoteStore, open_store
from streams.contracts import DialogueTurn
from streams.errors import ArchiveError, DamagedArchiveError, SchemaError
from streams.serde import load_schemas
from streams.topics import TURNS
from tests.archives import CODEC, NOON_MS, rows, turn, write_file

MODULES = SimpleNamespace(os=os, pathlib=pathlib)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "archive")


def test_names_are_those_of_connect() -> None:
    name = FileName("dialogue.turns", 3, 42)
    text = "topics/dialogue.turns/partition=3/dialogue.turns+3+0000000042.parquet"
    assert str(name) == text
    assert FileName.parse(text) == name
    long = FileName("t", 0, 12_345_678_901)
    assert FileName.parse(str(long)) == long


@pytest.mark.parametrize(
    "text",
    [
        "topics/a/partition=3/b+3+0000000042.parquet",
        "topics/a/partition=3/a+4+0000000042.parquet",
        "topics/a/partition=3/a+3+42.parquet",
        "topics/a/partition=3/.a+3+0000000042.parquet.tmp",
        "a+3+0000000042.parquet",
    ],
)
def test_what_is_no_name_of_a_file_is_passed_over(text: str) -> None:
    assert FileName.parse(text) is None


ROWS = st.builds(
    Row,
    topic=st.just("t"),
    partition=st.just(0),
    offset=st.integers(0, 2**62),
    timestamp=st.integers(-1, 2**45),
    timestamp_type=st.sampled_from(["CreateTime", "LogAppendTime"]),
    key=st.none() | st.binary(max_size=20),
    value=st.none() | st.binary(max_size=40),
    headers=st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
            st.none() | st.binary(max_size=5),
        ),
        max_size=3,
    ).map(tuple),
)


@settings(deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=5))
def test_rows_survive_their_columns(found: list[Row]) -> None:
    columns = Columns(DialogueTurn, CODEC, load_schemas())
    assert list(rows_of(columns.batch(found), "t", 0)) == found


@settings(deadline=None)
@given(st.lists(ROWS, min_size=2, max_size=2, unique=True))
def test_no_two_rows_have_one_digest(pair: list[Row]) -> None:
    def digest(row: Row) -> str:
        made = Digest()
        made.add(row)
        return made.hex()

    assert digest(pair[0]) != digest(pair[1])


def test_decoded_columns_stand_beside_the_bytes(store: LocalStore) -> None:
    odd = replace(rows(1, start=2)[0], value=b"no record")
    tick = replace(rows(1, start=3)[0], value=None)
    write_file(store, [*rows(2), odd, tick])
    path = Path(store.address) / str(FileName(TURNS, 0, 0))
    table = pq.read_table(path, partitioning=None)
    records = table.column("record").to_pylist()
    assert records[1]["content"] == "turn 1"
    assert records[1]["role"] == "assistant"
    assert records[1]["event_time"] == NOON_MS + 1_000
    assert records[2:] == [None, None]
    problems = table.column("problem").to_pylist()
    assert problems[0] is None
    assert "the first byte is 6e" in problems[2]
    assert problems[3] is None
    assert table.column("schema").to_pylist()[0].startswith("avro:")


def test_what_no_column_holds_stays_in_the_bytes() -> None:
    columns = Columns(DialogueTurn, CODEC, load_schemas())
    good, bad = rows(2)
    wide = turn(1, policy_version=None, attributes={"a": "b"})
    value = CODEC.encode(wide)
    batch = columns.batch([good, replace(bad, value=value)])
    assert batch.column("record")[1].as_py()["attributes"] == [("a", "b")]
    # A field that the schema of the file has no room for, as a later version might bring.
    records: list[Any] = [None, {"token_ids": [2**40]}]
    problems: list[str | None] = [None, None]
    assert columns._records(records, problems).to_pylist() == [None, None]
    assert problems[1] is not None
    assert problems[1].startswith("no column holds it")


def test_wire_forms_are_named() -> None:
    assert schema_name(b"\x00\x00\x00\x00\x07x") == "confluent:7"
    assert schema_name(b"{}") == "json"
    assert schema_name(b"\xc3\x01abcdefgh") == "avro:6162636465666768"
    assert schema_name(b"x") is schema_name(None) is schema_name(b"") is None


def test_every_schema_has_columns() -> None:
    import json

    for version in load_schemas().versions:
        kind = arrow_type(json.loads(version.text))
        assert pa.types.is_struct(kind)
    with pytest.raises(ArchiveError, match="union"):
        arrow_type(["int", "string"])


def test_a_file_says_what_it_covers(store: LocalStore) -> None:
    footer = write_file(store, rows(10), end=13)
    assert read_footer(store, footer.name) == footer
    assert (footer.end, footer.rows, footer.holes) == (13, 10, 3)
    assert (footer.min_timestamp, footer.max_timestamp) == (NOON_MS + 500, NOON_MS + 9_500)


def test_a_row_that_comes_late_is_refused(store: LocalStore) -> None:
    one, two = rows(2)
    with pytest.raises(ArchiveError, match=r"offset 0 of .* came after 1"):
        write_file(store, [two, one], start=0)
    assert store.files() == []


def test_small_row_groups_make_no_difference(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "GROUP_ROWS", 3)
    footer = write_file(store, rows(10))
    with FileReader(store, footer.name) as reader:
        assert list(reader.rows()) == rows(10)
        assert list(reader.rows(7)) == rows(3, start=7)
        assert reader.check() == []


def test_a_name_is_given_once(store: LocalStore) -> None:
    write_file(store, rows(3))
    with pytest.raises(ArchiveError, match="is there already"):
        write_file(store, rows(2))
    (footer,) = Archive(store).footers(TURNS)[0]
    assert footer.rows == 3


def test_one_archiver_a_topic(store: LocalStore) -> None:
    with store.workspace("t"):
        with pytest.raises(ArchiveError, match="another archiver writes t"), store.workspace("t"):
            raise AssertionError
        with store.workspace("other") as folder:
            assert folder.is_dir()


def test_what_a_killed_archiver_left_is_removed(store: LocalStore) -> None:
    with store.workspace("t") as folder:
        (folder / "left.tmp").write_bytes(b"half a file")
    with store.workspace("t") as folder:
        assert [path.name for path in folder.iterdir()] == ["lock"]


def test_without_hard_links_a_name_is_still_given_once(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("streams.archive.store.os.link", refuse)
    write_file(store, rows(3))
    with pytest.raises(ArchiveError, match="is there already"):
        write_file(store, rows(2))


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("call", range(12))
def test_whenever_it_ends_a_file_is_whole_or_not_there(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """End before each of the calls by which a file is written and named, one after the other."""
    made = 0

    def deadly(before: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal made
            made += 1
            if made == call + 1:
                raise Killed
            return before(*arguments, **options)

        return counted

    with monkeypatch.context() as patch:
        for name in ("os.fsync", "os.link", "pathlib.Path.unlink", "pathlib.Path.mkdir"):
            patch.setattr(name, deadly(operator.attrgetter(name)(MODULES)))
        with contextlib.suppress(Killed):
            write_file(store, rows(5))
    with store.workspace(TURNS) as folder:
        assert [path.name for path in folder.iterdir()] == ["lock"]
    if not store.files():
        write_file(store, rows(5))
    assert list(Archive(store).rows(TURNS, 0)) == rows(5)
    assert [report.problems for report in verify(store)] == [[]]


def test_without_the_schema_registry_nothing_is_written(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise SchemaError("the schema registry cannot be reached")

    monkeypatch.setattr(CODEC, "decode", away)
    with pytest.raises(SchemaError, match="cannot be reached"):
        write_file(store, rows(3))
    assert store.files() == []


def test_an_archive_is_read_as_a_topic(store: LocalStore) -> None:
    write_file(store, rows(10), end=12)
    write_file(store, rows(10, start=15), start=12)
    archive = Archive(store)
    assert archive.topics() == [TURNS]
    assert archive.partitions(TURNS) == 2
    assert archive.range(TURNS, 0) == (0, 25)
    assert archive.range(TURNS, 1) == (0, 0)
    assert list(archive.rows(TURNS, 0)) == [*rows(10), *rows(10, start=15)]
    assert [row.offset for row in archive.rows(TURNS, 0, 8, 17)] == [8, 9, 15, 16]
    assert list(archive.rows(TURNS, 1)) == []
    assert archive.offset_at(TURNS, 0, NOON_MS + 4_000) == 4
    assert archive.offset_at(TURNS, 0, NOON_MS + 12_000) == 15
    assert archive.offset_at(TURNS, 0, NOON_MS + 99_000) == 25
    with pytest.raises(ArchiveError, match="there is no topic nothing in the archive"):
        archive.footers("nothing")


def test_a_lost_file_ends_a_range_that_needs_it_only(store: LocalStore) -> None:
    write_file(store, rows(5))
    write_file(store, rows(5, start=8))
    archive = Archive(store)
    assert [row.offset for row in archive.rows(TURNS, 0, 8)] == [8, 9, 10, 11, 12]
    with pytest.raises(ArchiveError, match="offsets 5 to 7 are missing between two files"):
        list(archive.rows(TURNS, 0))


def footer(start: int, end: int, aged_out_from: int | None = None) -> Footer:
    return Footer(
        name=FileName("t", 0, start),
        end=end,
        rows=1,
        sha256="",
        min_timestamp=0,
        max_timestamp=0,
        source=Source(partitions=1, max_message_bytes=1, topic_id=""),
        aged_out_from=aged_out_from,
    )


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        ([], []),
        ([footer(5, 9), footer(9, 12)], []),
        ([footer(0, 9), footer(10, 12)], [("gap", 9, 10)]),
        ([footer(0, 9), footer(10, 12, aged_out_from=9)], [("aged_out", 9, 10)]),
        ([footer(0, 9), footer(10, 12, aged_out_from=8)], [("gap", 9, 10)]),
        ([footer(0, 9), footer(4, 6), footer(9, 12)], [("overlap", 4, 6)]),
        ([footer(0, 9), footer(4, 12), footer(12, 13)], [("overlap", 4, 9)]),
    ],
)
def test_files_that_do_not_meet_are_found(
    chain: list[Footer], expected: list[tuple[str, int, int]]
) -> None:
    assert [(b.kind, b.start, b.end) for b in breaks(chain)] == expected


def test_a_sound_archive_has_no_problems(store: LocalStore) -> None:
    write_file(store, rows(10), end=12)
    write_file(store, rows(3, start=20), start=20, aged_out_from=12)
    (report,) = verify(store)
    assert (report.files, report.rows, report.holes, report.problems) == (2, 13, 2, [])
    assert "offsets 12 to 19 are missing: Kafka had deleted them" in report.aged_out[0]


def test_checks_need_something_to_check(store: LocalStore) -> None:
    with pytest.raises(ArchiveError, match="there is no file in the archive"):
        verify(store)
    write_file(store, rows(1))
    with pytest.raises(ArchiveError, match="there is no topic x in the archive"):
        verify(store, ("x",))


def test_a_lost_file_is_found(store: LocalStore) -> None:
    write_file(store, rows(5))
    lost = write_file(store, rows(5, start=5))
    write_file(store, rows(5, start=10))
    (Path(store.address) / str(lost.name)).unlink()
    (report,) = verify(store, footers_only=True)
    assert report.problems == [
        f"{TURNS} partition 0: offsets 5 to 9 are missing between two files: one was lost"
    ]


@pytest.mark.parametrize("cut", [0, 4, 100, -1, -300])
def test_a_truncated_file_is_named(store: LocalStore, cut: int) -> None:
    name = write_file(store, rows(50)).name
    path = Path(store.address) / str(name)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DamagedArchiveError, match=f"{TURNS}.0.0000000000.parquet in .* is damaged"):
        read_footer(store, name)
    (report,) = verify(store)
    assert len(report.problems) == 1
    assert "is damaged" in report.problems[0]


def flips(data: bytes) -> Iterator[bytes]:
    """The file with one byte altered, at places all over it."""
    for place in range(5, len(data) - 5, max(1, len(data) // 60)):
        yield data[:place] + bytes([data[place] ^ 0x5A]) + data[place + 1 :]


def test_an_altered_byte_changes_no_row_unnoticed(store: LocalStore) -> None:
    name = write_file(store, rows(40)).name
    path = Path(store.address) / str(name)
    whole = path.read_bytes()
    noticed = 0
    for altered in flips(whole):
        path.write_bytes(altered)
        (report,) = verify(store)
        noticed += bool(report.problems)
        if not report.problems:
            with FileReader(store, name) as reader:
                assert list(reader.rows()) == rows(40)
    assert noticed > 40


def test_an_altered_byte_is_found_before_anything_is_made_of_a_topic(store: LocalStore) -> None:
    """A page whose head is altered may pass for one with fewer rows, or without a checksum."""
    name = write_file(store, rows(40)).name
    path = Path(store.address) / str(name)
    whole = path.read_bytes()
    found: list[str] = []
    for place in range(4, 700, 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        archive = Archive(store)
        try:
            archive.check(TURNS)
        except DamagedArchiveError as error:
            found.append(str(error))
            continue
        assert list(archive.all_rows(TURNS, 0)) == rows(40)
    assert len(found) > 100
    assert any("rows do not come" in text for text in found)


@pytest.mark.parametrize(
    ("type_", "says"), [(pa.binary(), "its column timestamp_type is binary"), (None, "not there")]
)
def test_a_file_with_other_columns_is_no_file_of_ours(
    type_: Any, says: str, store: LocalStore
) -> None:
    name = write_file(store, rows(5)).name
    path = Path(store.address) / str(name)
    table, footer = pq.read_table(path, partitioning=None), pq.read_metadata(path).metadata
    place = table.schema.get_field_index("timestamp_type")
    other = table.remove_column(place)
    if type_ is not None:
        other = other.append_column("timestamp_type", table.column(place).cast(type_))
    with pq.ParquetWriter(path, other.schema) as writer:
        writer.write_table(other)
        writer.add_key_value_metadata(
            {key: value for key, value in footer.items() if key.startswith(b"clawstream.")}
        )
    with pytest.raises(DamagedArchiveError, match=says):
        read_footer(store, name)


def test_a_file_under_another_name_is_found(store: LocalStore) -> None:
    name = write_file(store, rows(5)).name
    path = Path(store.address) / str(name)
    path.rename(path.with_name(f"{TURNS}+0+0000000001.parquet"))
    (report,) = verify(store)
    assert f"its footer says it is {name}" in report.problems[0]


def test_a_parquet_file_of_others_is_no_file_of_ours(store: LocalStore) -> None:
    path = Path(store.address) / str(FileName(TURNS, 0, 0))
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"offset": [1]}), path)
    (report,) = verify(store)
    assert "is damaged: it is no file of an archive" in report.problems[0]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    made = LocalStore(tmp_path / "file")
    with pytest.raises(ArchiveError, match=r"cannot write to .*file: Not a directory"):
        write_file(made, rows(1))


def test_addresses_lead_to_their_store(tmp_path: Path) -> None:
    assert open_store(str(tmp_path)).address == str(tmp_path)
    assert open_store((tmp_path / "a b").as_uri()).address == str(tmp_path / "a b")
    assert isinstance(open_store("memory://archive"), RemoteStore)
    with pytest.raises(ArchiveError, match=r"cannot use nothing://x: .*Give a folder, or a URL"):
        open_store("nothing://x")


def test_any_file_system_will_do() -> None:
    remote = open_store("memory://archives/one")
    write_file(remote, rows(5))
    write_file(remote, rows(5, start=5))
    assert [file.name.start for file in remote.files()] == [0, 5]
    assert remote.files("other") == []
    assert list(Archive(remote).rows(TURNS, 0)) == rows(10)
    with pytest.raises(ArchiveError, match="is there already"):
        write_file(remote, rows(2))
