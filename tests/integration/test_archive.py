"""Topics archived and restored against a real broker, killed at any moment."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from processors.runtime.records import Record
from streams.archive.checking import verify
from streams.archive.columns import Row
from streams.archive.reading import Archive
from streams.archive.store import LocalStore
from streams.cli import main
from streams.errors import DamagedArchiveError
from streams.ports import free_ports
from tests.conftest import CreateTopics
from tests.integration.harness import DEADLINE_S, ROOT, Bench, wait_until

pytestmark = pytest.mark.broker

PARTITIONS = 2
BASE_MS = 1_700_000_000_000
KEPT = {"retention.ms": "-1", "max.message.bytes": "3000000"}


class Rig(Bench):
    """A topic, an archive, and the command line between them."""

    def __init__(self, bootstrap: str, folder: Path, topic: str, restored: str) -> None:
        super().__init__(bootstrap, folder)
        self.topic = topic
        self.restored = restored
        self.at = str(folder / "archive")
        self.environment: dict[str, str] = {}
        self.processes: list[subprocess.Popen[str]] = []

    def command(self, *arguments: str, **archive: int) -> list[str]:
        path = self.folder / "settings.yaml"
        values = {
            "data_dir": str(self.folder / "data"),
            "kafka": {"bootstrap_servers": self.bootstrap},
            "archive": archive,
        }
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return ["--config", str(path), "archive", *arguments, "--at", self.at]

    def start(self, *arguments: str, **archive: int) -> subprocess.Popen[str]:
        """The command as a process."""
        own = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
        process = subprocess.Popen(
            [sys.executable, "-m", "streams.cli", *self.command(*arguments, **archive)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=own | self.environment,
        )
        self.processes.append(process)
        return process

    def run(self, *arguments: str, code: int = 0, **archive: int) -> tuple[str, str]:
        """The command, in this process if its environment will do."""
        if self.environment:
            process = self.start(*arguments, **archive)
            out, err = process.communicate(timeout=DEADLINE_S)
            found = process.returncode
        else:
            found, out, err = _call(self.command(*arguments, **archive))
        assert found == code, err
        assert "Traceback" not in err
        return out, err

    def archive_once(self, *arguments: str, **archive: int) -> list[dict[str, Any]]:
        out, _ = self.run("run", "--once", "--json", "--topic", self.topic, *arguments, **archive)
        return [json.loads(line) for line in out.splitlines()]

    def restore(self) -> dict[str, Any]:
        out, _ = self.run("restore", self.topic, "--into", self.restored, "--json")
        found: dict[str, Any] = json.loads(out)
        return found

    def produce(self, count: int, start: int = 0, **changes: object) -> None:
        for number in range(start, start + count):
            fields: dict[str, Any] = {
                "partition": number % PARTITIONS,
                "key": b"k%d" % (number % 7),
                "value": b"value %d " % number + bytes(range(number % 200)),
                "headers": [("trace", b"\x00\xff"), ("trace", None), ("empty", b"")],
                "timestamp": BASE_MS + number,
            }
            self.producer.produce(self.topic, **(fields | changes))
            self.producer.poll(0)
        self.flush()

    def archived(self) -> list[Record]:
        archive = Archive(LocalStore(Path(self.at)))
        return [_record(r) for p in range(PARTITIONS) for r in archive.rows(self.topic, p)]

    def in_kafka(self) -> list[Record]:
        return self.read(self.topic, PARTITIONS)

    def stop_all(self) -> None:
        super().stop_all()
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.communicate()


def _call(arguments: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


def _record(row: Row) -> Record:
    return Record(
        topic=row.topic,
        partition=row.partition,
        offset=row.offset,
        timestamp=row.timestamp,
        key=row.key,
        value=row.value,
        headers=row.headers,
    )


def content(records: list[Record]) -> list[tuple[Any, ...]]:
    return [(r.partition, r.timestamp, r.key, r.value, tuple(r.headers)) for r in records]


def offsets(records: list[Record]) -> list[tuple[int, int]]:
    return [(r.partition, r.offset) for r in records]


@pytest.fixture
def rig(
    kafka_bootstrap: str,
    create_topics: CreateTopics,
    unique_name: Callable[[str], str],
    tmp_path: Path,
) -> Iterator[Rig]:
    topic = unique_name("source")
    # Times are of long ago: without it Kafka would delete records whenever it looks.
    create_topics({topic: (PARTITIONS, KEPT)})
    made = Rig(kafka_bootstrap, tmp_path, topic, unique_name("restored"))
    yield made
    made.stop_all()


def test_a_topic_comes_back_byte_for_byte(rig: Rig) -> None:
    rig.produce(300)
    rig.produce(1, 300, key=None, headers=None)
    rig.produce(1, 301, key=b"", value=b"", headers=[])
    rig.produce(1, 302, value=None, headers=[("clawstream-tick", b"")])
    rig.produce(1, 304, value=b"x" * 2_000_000)
    told = rig.archive_once(roll_bytes=10_000)
    assert sum(file["records"] for file in told) == 304
    assert len(told) > 4
    assert rig.archived() == rig.in_kafka()
    assert rig.archive_once() == []

    restored = rig.restore()
    assert (restored["written"], restored["found"]) == (304, 0)
    found = rig.read(rig.restored, PARTITIONS)
    assert content(found) == content(rig.in_kafka())
    # From offset 0 on and without a hole, offsets stay too.
    assert offsets(found) == offsets(rig.in_kafka())
    again = rig.restore()
    assert (again["written"], again["found"]) == (0, 304)
    out, _ = rig.run("ls", "--json")
    listed = json.loads(out)
    assert [(item["partition"], item["start"], item["end"]) for item in listed] == [
        (p, 0, max(o for q, o in offsets(found) if q == p) + 1) for p in range(PARTITIONS)
    ]
    assert [item["first"] for item in listed] == [BASE_MS, BASE_MS + 1]


def test_arrivals_are_kept_in_a_topic_that_takes_given_times(
    rig: Rig, create_topics: CreateTopics, unique_name: Callable[[str], str]
) -> None:
    rig.topic = unique_name("stamped")
    create_topics({rig.topic: (PARTITIONS, {"message.timestamp.type": "LogAppendTime"})})
    rig.produce(20)
    rig.archive_once()
    rig.restore()
    found = rig.read(rig.restored, PARTITIONS)
    assert content(found) == content(rig.in_kafka())
    assert min(r.timestamp for r in found) > BASE_MS + 1_000_000

    _, err = rig.run("restore", rig.topic, code=1)
    assert "every record would be of today" in err


def test_offsets_of_transactions_are_no_losses(rig: Rig) -> None:
    """Markers and aborted records take offsets, at the end of a file and of the topic, too."""
    producer = rig.transactional_producer(rig.topic)
    rig.producer = producer
    for number in range(6):
        producer.begin_transaction()
        for n in range(number * 10, number * 10 + 10):
            producer.produce(
                rig.topic, partition=n % PARTITIONS, value=b"%d" % n, timestamp=BASE_MS + n
            )
        if number % 3 == 1:
            assert producer.flush(DEADLINE_S) == 0
            producer.abort_transaction(DEADLINE_S)
        else:
            producer.commit_transaction(DEADLINE_S)
        rig.archive_once(roll_bytes=250)
    # The last commit's markers may have come after the last run read.
    wait_until(lambda: len(rig.in_kafka()) == 40, "every commit to be seen")
    rig.archive_once()
    assert rig.archived() == rig.in_kafka()
    (report,) = verify(LocalStore(Path(rig.at)))
    assert (report.problems, report.rows) == ([], 40)
    assert report.holes >= 20
    assert rig.restore()["written"] == 40
    assert content(rig.read(rig.restored, PARTITIONS)) == content(rig.in_kafka())


def test_killed_at_any_moment_every_offset_is_archived_once(rig: Rig) -> None:
    chance = random.Random(5)
    number = 0
    for _ in range(7):
        process = rig.start("run", "--json", "--topic", rig.topic, roll_bytes=3_000, roll_ms=300)
        assert process.stdout is not None
        rig.produce(400, number)
        number += 400
        # It is at work: end it wherever it is.
        for _ in range(chance.randrange(1, 12)):
            process.stdout.readline()
        time.sleep(chance.random() / 20)
        process.kill()
        process.communicate()
    rig.archive_once(roll_bytes=3_000)
    assert rig.archived() == rig.in_kafka()
    assert len(rig.in_kafka()) == number
    (report,) = verify(LocalStore(Path(rig.at)))
    assert report.problems == []
    left = list(Path(rig.at, ".unfinished").rglob("*.tmp"))
    assert left == []


def test_asked_to_stop_it_finishes_its_files(rig: Rig) -> None:
    rig.produce(10)
    process = rig.start("run", "--json", "--topic", rig.topic, roll_bytes=200)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert rig.archived() == rig.in_kafka()


def test_old_records_do_not_wait_for_a_full_file(rig: Rig) -> None:
    process = rig.start("run", "--json", "--topic", rig.topic, roll_ms=200)
    assert process.stdout is not None
    rig.produce(4)
    seen = 0
    while seen < 4:
        seen += json.loads(process.stdout.readline())["records"]
    assert rig.archived() == rig.in_kafka()


def test_a_second_archiver_is_refused(rig: Rig) -> None:
    rig.produce(4)
    first = rig.start("run", "--json", "--topic", rig.topic, roll_ms=100)
    assert first.stdout is not None
    first.stdout.readline()
    _, err = rig.run("run", "--once", "--topic", rig.topic, code=1)
    assert f"another archiver writes {rig.topic}" in err


def test_killed_while_it_restores_it_goes_on(rig: Rig) -> None:
    rig.produce(4_000)
    rig.archive_once(roll_bytes=50_000)
    for _ in range(3):
        _kill_once_it_writes(rig)
    done = rig.restore()
    assert done["written"] + done["found"] == 4_000
    assert content(rig.read(rig.restored, PARTITIONS)) == content(rig.in_kafka())


def _kill_once_it_writes(rig: Rig) -> None:
    before = _count(rig)
    process = rig.start("restore", rig.topic, "--into", rig.restored)
    wait_until(lambda: _count(rig) > before or process.poll() is not None, "a record")
    process.kill()
    process.communicate()


def _count(rig: Rig) -> int:
    consumer = Consumer({"bootstrap.servers": rig.bootstrap, "group.id": "count"})
    try:
        if rig.restored not in consumer.list_topics(timeout=DEADLINE_S).topics:
            return 0
        ends = (
            consumer.get_watermark_offsets(TopicPartition(rig.restored, p), timeout=DEADLINE_S)
            for p in range(PARTITIONS)
        )
        return sum(high for _, high in ends)
    except KafkaException:
        # A topic that was just made may have no leader yet.
        return 0
    finally:
        consumer.close()


def test_a_topic_with_something_else_in_it_is_not_touched(
    rig: Rig, create_topics: CreateTopics
) -> None:
    rig.produce(10)
    rig.archive_once()
    create_topics({rig.restored: (PARTITIONS, KEPT)})
    rig.producer.produce(rig.restored, partition=1, value=b"mine")
    rig.flush()
    _, err = rig.run("restore", rig.topic, "--into", rig.restored, code=1)
    assert "partition 1 is no beginning of a restore" in err
    assert [r.value for r in rig.read(rig.restored, PARTITIONS)] == [b"mine"]


def test_a_topic_of_another_shape_is_not_touched(
    rig: Rig, create_topics: CreateTopics, unique_name: Callable[[str], str]
) -> None:
    rig.produce(10)
    rig.archive_once()
    shapes: dict[str, tuple[int, dict[str, str], str]] = {
        "wide": (PARTITIONS + 1, {}, "keys would be elsewhere"),
        "compact": (PARTITIONS, {"cleanup.policy": "compact"}, "would not keep every record"),
        "small": (PARTITIONS, {"max.message.bytes": "1000"}, "raise its max.message.bytes"),
    }
    for stem, (partitions, config, why) in shapes.items():
        name = unique_name(stem)
        create_topics({name: (partitions, config)})
        _, err = rig.run("restore", rig.topic, "--into", name, code=1)
        assert why in err
        assert rig.read(name, partitions) == []


def test_records_that_aged_out_are_told_and_noted(rig: Rig) -> None:
    rig.produce(20)
    rig.archive_once()
    rig.produce(20, 20)
    admin = AdminClient({"bootstrap.servers": rig.bootstrap})
    for future in admin.delete_records([TopicPartition(rig.topic, 0, 15)]).values():
        future.result(DEADLINE_S)
    _, err = rig.run("run", "--once", "--topic", rig.topic, code=1)
    assert f"{rig.topic} partition 0: Kafka has deleted offsets 10 to 14" in err
    assert len(rig.archived()) == 20

    rig.archive_once("--skip-aged-out")
    (report,) = verify(LocalStore(Path(rig.at)))
    assert report.problems == []
    assert "offsets 10 to 14 are missing: Kafka had deleted them" in report.aged_out[0]
    assert rig.restore()["written"] == 35


def test_a_topic_that_was_made_again_is_not_mixed_with_the_old_one(
    rig: Rig, create_topics: CreateTopics
) -> None:
    rig.produce(20)
    rig.archive_once()
    admin = AdminClient({"bootstrap.servers": rig.bootstrap})
    for future in admin.delete_topics([rig.topic]).values():
        future.result(DEADLINE_S)
    wait_until(
        lambda: rig.topic not in admin.list_topics(timeout=DEADLINE_S).topics, "the topic to go"
    )
    _, err = rig.run("run", "--once", "--topic", rig.topic, code=1)
    assert f"missing at {rig.bootstrap}: {rig.topic}" in err
    create_topics({rig.topic: (PARTITIONS, KEPT)})
    rig.produce(40)
    _, err = rig.run("run", "--once", "--topic", rig.topic, code=1)
    assert "is not the topic that was archived" in err
    assert len(rig.archived()) == 20


@pytest.mark.parametrize("anew", [False, True])
def test_a_topic_that_goes_while_it_is_archived_is_named(
    anew: bool, rig: Rig, create_topics: CreateTopics
) -> None:
    rig.produce(20)
    process = rig.start("run", "--json", "--topic", rig.topic, roll_ms=100)
    assert process.stdout is not None
    process.stdout.readline()
    admin = AdminClient({"bootstrap.servers": rig.bootstrap})
    admin.delete_topics([rig.topic])[rig.topic].result()
    if anew:
        wait_until(lambda: rig.topic not in admin.list_topics(timeout=DEADLINE_S).topics, "its end")
        create_topics({rig.topic: (PARTITIONS, KEPT)})
        rig.produce(40)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1, err
    assert f"{rig.topic} is gone: it was " in err or f"{rig.topic} partition" in err
    assert len(rig.archived()) <= 20


def test_a_truncated_file_is_a_clear_error_everywhere(rig: Rig) -> None:
    rig.produce(20)
    rig.archive_once()
    file = next(Path(rig.at).rglob("*+0000000000.parquet"))
    file.write_bytes(file.read_bytes()[:-100])
    for command in (
        ["verify"],
        ["restore", rig.topic, "--into", rig.restored],
        ["run", "--once", "--topic", rig.topic],
        ["ls"],
    ):
        out, err = rig.run(*command, code=1)
        assert f"{file.name} in {rig.at} is damaged" in out + err
    assert _count(rig) == 0


def test_nothing_is_restored_from_a_file_that_was_altered(rig: Rig) -> None:
    rig.produce(20)
    rig.archive_once()
    file = next(Path(rig.at).rglob("*+0000000000.parquet"))
    whole = file.read_bytes()

    def alter() -> str:
        """Alter a byte that no footer tells of, but the records do."""
        for place in range(4, len(whole)):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            archive = Archive(LocalStore(Path(rig.at)))
            with contextlib.suppress(DamagedArchiveError):
                archive.footers(rig.topic)
                try:
                    archive.check(rig.topic)
                except DamagedArchiveError as error:
                    return str(error)
        raise AssertionError("no byte makes a difference")

    assert "is damaged" in alter()
    _, err = rig.run("restore", rig.topic, "--into", rig.restored, code=1)
    assert f"{file.name} in {rig.at} is damaged" in err
    assert _count(rig) == 0


def test_a_lost_file_is_found_and_restored_around_only_when_asked(rig: Rig) -> None:
    rig.produce(60)
    rig.archive_once(roll_bytes=500)
    names = sorted(path.name for path in Path(rig.at).rglob("*partition=0/*.parquet"))
    lost = next(Path(rig.at).rglob(names[1]))
    rows = Archive(LocalStore(Path(rig.at))).footers(rig.topic)[0][1].rows
    lost.unlink()
    out, err = rig.run("verify", code=1)
    assert "are missing between two files: one was lost" in out
    assert "1 problems found" in err
    _, err = rig.run("restore", rig.topic, "--into", rig.restored, code=1)
    assert "the archive is not whole" in err
    assert _count(rig) == 0
    rig.run("restore", rig.topic, "--into", rig.restored, "--allow-gaps")
    assert _count(rig) == 60 - rows


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """An empty bucket of a server that speaks S3: its URL, and the environment to reach it."""
    (port,) = free_ports(1)
    log = (tmp_path / "s3.log").open("w")
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=log,
        stderr=log,
    )
    environment = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
    }
    try:
        wait_until(lambda: _make_bucket(environment), "the S3 server")
        yield "s3://archives/one", environment
    finally:
        server.terminate()
        server.wait(DEADLINE_S)
        log.close()


def _make_bucket(environment: dict[str, str]) -> bool:
    code = "import s3fs; s3fs.S3FileSystem().mkdir('archives')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        check=False,
        timeout=DEADLINE_S,
    )
    return done.returncode == 0


def test_an_archive_in_object_storage(rig: Rig, bucket: tuple[str, dict[str, str]]) -> None:
    rig.at, rig.environment = bucket
    rig.produce(200)
    told = rig.archive_once(roll_bytes=10_000)
    assert len(told) > 2
    rig.produce(50, 200)
    assert sum(file["records"] for file in rig.archive_once()) == 50
    out, _ = rig.run("verify", "--json")
    (report,) = json.loads(out)
    assert (report["rows"], report["problems"]) == (250, [])
    assert rig.restore()["written"] == 250
    assert content(rig.read(rig.restored, PARTITIONS)) == content(rig.in_kafka())

    rig.at = "s3://not-there/x"
    _, err = rig.run("verify", code=1)
    assert "s3://not-there/x" in err


def test_an_object_is_never_replaced(bucket: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    """Two archivers at once: what the second one writes is refused by the store itself."""
    address, environment = bucket
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from streams.archive.layout import FileName\n"
        "from streams.archive.store import open_store\n"
        "store = open_store(sys.argv[1])\n"
        "store._fs.exists = lambda path: False\n"
        "for text in ('first', 'second'):\n"
        "    made = Path(sys.argv[2]) / 'made'\n"
        "    made.write_text(text)\n"
        "    store.publish(made, FileName('t', 0, 0))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, address, str(tmp_path)],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 1
    assert "ArchiveError: topics/t/partition=0/t+0+0000000000.parquet is there" in done.stderr
