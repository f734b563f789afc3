"""Replays of an archive, without any Kafka."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from processors.bench.dialogue import DialoguePlan
from processors.bench.log import LogRecord, Side, make_log
from processors.bench.plain import PlainAligner
from processors.replay import shadow
from processors.replay import store as stores
from processors.replay.shadow import Job, prepare, replay_partition, store_path
from processors.replay.store import PartitionStore
from streams.archive.columns import Row
from streams.archive.reading import Archive
from streams.archive.store import LocalStore
from streams.cli import main
from streams.contracts import DialogueTurn, FeedbackEvent, ScoredSegment, TrajectorySegment
from streams.errors import ArchiveError
from streams.kafka.places import Range
from streams.settings import AlignSettings, Settings, load_settings
from streams.topics import FEEDBACK, SEGMENTS, TURNS
from tests.archives import CODEC, write_file

PARTITIONS = 2
RECORDS = 400
FILE_ROWS = 40
BEGIN_MS = 1_767_225_600_000
BEGIN = "2026-01-01T00:00:00Z"
SIDES: dict[Side, str] = {"turns": TURNS, "feedback": FEEDBACK}
TYPES = {TURNS: DialogueTurn, FEEDBACK: FeedbackEvent}


def the_log() -> list[LogRecord]:
    plan = DialoguePlan(talking=6, begin_ms=BEGIN_MS)
    return make_log(plan, RECORDS, PARTITIONS, CODEC, AlignSettings())


def expected_of(log: Sequence[LogRecord]) -> Counter[bytes]:
    """The segments that come of the log, without anything that reads or keeps it."""
    found: Counter[bytes] = Counter()
    for partition in range(PARTITIONS):
        aligner = PlainAligner(partition, TURNS, FEEDBACK, CODEC, AlignSettings())
        for one in log:
            if one.partition == partition:
                aligner.offer(SIDES[one.side], one.offset, one.arrival_ms, one.value)
        found.update(value for _, value in aligner.drain(advance=True))
    return found


class Rig:
    """An archive of turns and feedback, and replays of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = LocalStore(folder / "archive")
        self.log = the_log()
        self.expected = expected_of(self.log)
        self.config = folder / "settings.yaml"
        self.configure()
        by_place = sorted(self.log, key=lambda one: (one.side, one.partition, one.offset))
        for (side, _), records in groupby(by_place, lambda one: (one.side, one.partition)):
            self.write([_row(one) for one in records], TYPES[SIDES[side]])

    def configure(self, **sections: Any) -> None:
        values = {"data_dir": str(self.folder / "data"), **sections}
        self.config.write_text(yaml.safe_dump(values), encoding="utf-8")

    @property
    def settings(self) -> Settings:
        return load_settings(self.config, environ={})

    def write(self, rows: Sequence[Row], kind: Any) -> None:
        left = iter(rows)
        while part := list(islice(left, FILE_ROWS)):
            write_file(self.store, part, expected=kind)

    def archive_outputs(self) -> None:
        rows = [
            Row(topic=SEGMENTS, partition=0, offset=n, timestamp=BEGIN_MS + 86_400_000, value=value)
            for n, value in enumerate(self.expected)
        ]
        self.write(rows, TrajectorySegment)

    def files(self, topic: str) -> list[Path]:
        """The files of partition 0."""
        return sorted((self.folder / "archive").glob(f"topics/{topic}/partition=0/*"))

    def job(self, **options: Any) -> Job:
        archive = Archive(self.store)
        ranges = tuple(
            Range(topic, partition, *archive.range(topic, partition))
            for topic in SIDES.values()
            for partition in range(PARTITIONS)
        )
        fields: dict[str, Any] = {"stage": "align", "ranges": ranges, "archive": archive.address}
        return Job(**fields | {"read_from_ms": 0, "compare_from_ms": 0} | options)

    def replayed(self, name: str, job: Job) -> Counter[bytes]:
        """What comes of a replay in this process."""
        folder = self.folder / name
        prepare(folder, job, self.settings)
        found: Counter[bytes] = Counter()
        for partition in range(PARTITIONS):
            replay_partition(folder, partition, lambda _: None)
            made = PartitionStore(store_path(folder, partition))
            found.update(value for _, value in made.made())
            made.close()
        return found

    def replay(
        self, capsys: pytest.CaptureFixture[str], *arguments: str, archive: str | None = None
    ) -> tuple[int, str]:
        """The command's exit status, and what it said."""
        at = archive or str(self.folder / "archive")
        begin = () if "--from" in arguments else ("--from", "earliest")
        called = ["--config", str(self.config), "replay", "--archive", at, *begin, *arguments]
        status = exit_of(called)
        shown = capsys.readouterr()
        return status, shown.out + shown.err

    def nothing_is_done(self) -> bool:
        return not (self.folder / "data" / "replays").exists()


def exit_of(arguments: Sequence[str]) -> int:
    """The exit status of the command."""
    try:
        return main(list(arguments))
    except SystemExit as end:
        return int(end.code or 0)


def _row(record: LogRecord) -> Row:
    return Row(
        topic=SIDES[record.side],
        partition=record.partition,
        offset=record.offset,
        timestamp=record.arrival_ms,
        timestamp_type="LogAppendTime",
        key=record.key,
        value=record.value,
        headers=tuple((name, b"") for name, _ in record.headers),
    )


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    # Nothing here may need a broker, or find one by chance.
    monkeypatch.delenv("KAFKA_BOOTSTRAP_SERVERS", raising=False)
    return Rig(tmp_path)


def test_an_archive_gives_what_the_log_gives(rig: Rig) -> None:
    assert rig.expected.total() > 20
    assert rig.replayed("whole", rig.job()) == rig.expected


@pytest.mark.parametrize(
    ("limit", "value"), [("APPLIED_RECORDS", 1), ("APPLIED_RECORDS", 30), ("APPLIED_BYTES", 9_000)]
)
def test_how_much_is_applied_at_a_time_changes_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(shadow, "BATCH_RECORDS", 10)
    monkeypatch.setattr(shadow, limit, value)
    assert rig.replayed("portions", rig.job()) == rig.expected


def test_content_is_read_back_from_the_archive(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.configure(worker={"body_cache_bytes": 1, "hot_sessions": 0})
    monkeypatch.setattr(shadow, "BATCH_RECORDS", 7)
    assert rig.replayed("forgetful", rig.job()) == rig.expected


def test_a_topic_far_ahead_waits_for_the_other(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow, "BATCH_RECORDS", 5)
    monkeypatch.setattr(shadow, "_BUFFERED_RECORDS", 2)
    assert rig.replayed("balanced", rig.job()) == rig.expected


@pytest.mark.parametrize(("limit", "value"), [("KEPT_S", 0.0), ("KEPT_BYTES", 20_000)])
def test_a_replay_goes_on_where_it_stood(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, limit: str, value: float
) -> None:
    """Whether all of what it did is on disk, or the latest of it is not."""
    monkeypatch.setattr(stores, limit, value)
    monkeypatch.setattr(shadow, "BATCH_RECORDS", 10)
    monkeypatch.setattr(shadow, "APPLIED_RECORDS", 10)
    job = rig.job()
    prepare(rig.folder / "halves", job, rig.settings)

    class StoppedError(Exception):
        """As if it were killed."""

    def stop(progress: shadow.Progress) -> None:
        if progress.records > 60:
            raise StoppedError

    with pytest.raises(StoppedError):
        replay_partition(rig.folder / "halves", 0, stop)
    kept = PartitionStore(store_path(rig.folder / "halves", 0))
    records = kept.counts()["records"]
    assert (records > 60) if limit == "KEPT_S" else (0 < records <= 60)
    kept.close()
    assert rig.replayed("halves", job) == rig.expected


def test_the_command_compares_with_the_archived_outputs(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    rig.archive_outputs()
    status, said = rig.replay(capsys, "--json")
    plan = json.loads(said)
    assert (status, plan["dry_run"], plan["records"]) == (0, True, len(rig.log))
    assert rig.nothing_is_done()

    status, said = rig.replay(capsys, "--json", "--execute", "--name", "same")
    found = json.loads(said)
    assert (status, found["is_equal"]) == (0, True), found
    assert found["comparison"]["equal"] == rig.expected.total()
    again = ["--config", str(rig.config), "replay", "--resume", "same", "--json"]
    assert exit_of(again) == 0
    assert json.loads(capsys.readouterr().out)["comparison"] == found["comparison"]

    rig.configure(align={"settle_ms": 1_000})
    status, said = rig.replay(capsys, "--json", "--execute", "--name", "other")
    assert (status, json.loads(said)["is_equal"]) == (3, False)


def test_a_part_of_an_archive_is_found_by_time(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    rig.archive_outputs()
    late_ms = sorted(one.arrival_ms for one in rig.log)[RECORDS // 2]
    begin = datetime.fromtimestamp(late_ms / 1000, UTC).isoformat()
    status, said = rig.replay(capsys, "--json", "--from", begin, "--warm-up", "0s")
    # Arrivals rise within each partition of this log.
    wanted = sum(one.arrival_ms >= late_ms for one in rig.log)
    assert (status, json.loads(said)["records"]) == (0, wanted)


def test_without_archived_outputs_it_says_so(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = rig.replay(capsys, "--execute")
    assert (status, said.startswith("error: ")) == (1, True)
    assert f"{SEGMENTS} is not in the archive" in said
    assert "--against live" in said
    assert rig.nothing_is_done()


def _gone(rig: Rig) -> None:
    for path in (rig.folder / "archive").glob(f"topics/{FEEDBACK}/*/*"):
        path.unlink()


def _cut(rig: Rig) -> None:
    path = rig.files(TURNS)[1]
    path.write_bytes(path.read_bytes()[:-100])


def _gap(rig: Rig) -> None:
    rig.files(TURNS)[1].unlink()


def _aged_out(rig: Rig) -> None:
    """As if Kafka had deleted some before they were archived, and that was noted."""
    rows = list(Archive(rig.store).rows(TURNS, 0))
    for path in rig.files(TURNS):
        path.unlink()
    write_file(rig.store, rows[:30])
    write_file(rig.store, rows[35:], aged_out_from=rows[30].offset)


@pytest.mark.parametrize(
    ("spoil", "arguments", "said"),
    [
        (_gone, (), f"no topic {FEEDBACK} in the archive"),
        (_cut, (), "is damaged"),
        (_gap, (), "are missing between two files: one was lost"),
        (_aged_out, (), "offsets 30 to 34 are missing: Kafka had deleted them"),
        (None, ("--to", BEGIN), "no record lies between these two places"),
        (None, ("--from", BEGIN, "--to", BEGIN), "does not lie before"),
        (None, ("--from", "yesterday"), "is no place in the log"),
        (None, ("--against", "nothing"), "choose live or archive"),
    ],
)
def test_what_cannot_be_replayed_is_one_message_and_nothing_is_done(
    rig: Rig,
    capsys: pytest.CaptureFixture[str],
    spoil: Any,
    arguments: tuple[str, ...],
    said: str,
) -> None:
    rig.archive_outputs()
    if spoil is not None:
        spoil(rig)
    status, text = rig.replay(capsys, "--execute", *arguments)
    assert (status, text.startswith("error: ")) == (1, True), text
    assert said in text
    assert rig.nothing_is_done()


def test_an_archive_that_is_not_there_is_named(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = rig.replay(capsys, archive=str(rig.folder / "nowhere"))
    assert status == 1
    assert f"no topic {TURNS} in the archive {rig.folder / 'nowhere'}" in text


def test_damage_within_a_file_ends_a_replay_that_can_go_on(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    rig.archive_outputs()
    path = rig.files(TURNS)[2]
    good = path.read_bytes()
    middle = len(good) // 4
    path.write_bytes(good[:middle] + bytes(64) + good[middle + 64 :])
    status, text = rig.replay(capsys, "--execute", "--name", "hurt")
    assert (status, text.startswith("error: ")) == (1, True), text
    assert f"{path.name} in {rig.folder / 'archive'} is damaged" in text

    path.write_bytes(good)
    arguments = ["--config", str(rig.config), "replay", "--resume", "hurt", "--json"]
    assert exit_of(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["comparison"]["equal"] == rig.expected.total()


def test_rewards_are_replayed_from_archived_segments(rig: Rig) -> None:
    rig.archive_outputs()
    ranges = (Range(SEGMENTS, 0, 0, rig.expected.total()), Range(SEGMENTS, 1, 0, 0))
    scored = rig.replayed("scored", rig.job(stage="reward", ranges=ranges))
    assert scored.total() == rig.expected.total()
    segments = [CODEC.decode(value, ScoredSegment).segment for value in scored]
    assert Counter(map(CODEC.encode, segments)) == rig.expected


def test_an_address_of_fsspec_is_read_like_a_folder(rig: Rig) -> None:
    address = f"local://{rig.folder / 'archive'}"
    assert rig.replayed("remote", rig.job(archive=address)) == rig.expected


def test_files_that_go_meanwhile_are_an_error(rig: Rig) -> None:
    job = rig.job()
    rig.files(TURNS)[-1].unlink()
    with pytest.raises(ArchiveError, match=f"of {TURNS} partition 0, and not all of"):
        rig.replayed("short", job)


def test_outputs_are_compared_with_an_archive_only_if_there_is_one(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", str(rig.config), "replay", "--from", "1h", "--against", "archive"]
    assert exit_of(arguments) == 1
    assert "say which one with --archive" in capsys.readouterr().err
