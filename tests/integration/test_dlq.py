"""Dead letters retried, dropped and exported, against a real broker and a real aligner."""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from processors.runtime import deadletters
from processors.runtime.records import Record
from streams.contracts import DeadLetter, DeadLetterReason, DialogueTurn, Role
from streams.dlq.acting import Author, Desk
from streams.dlq.model import (
    MARK_HEADER,
    RETRY_ATTEMPT,
    RETRY_OFFSET,
    RETRY_PARTITION,
    RETRY_TOPIC,
    Case,
    Place,
    Selector,
)
from streams.errors import DeadLetterError, UndecodableError, UnknownSchemaError
from streams.kafka.admin import apply_inventory
from streams.kafka.clients import make_producer
from streams.serde import build_codec
from streams.settings import KafkaSettings, Settings
from streams.topics import DEAD_LETTERS, load_inventory
from tests.conftest import CreateTopics
from tests.integration.align_worker import configs_of, topics_of
from tests.integration.harness import DEADLINE_S, ROOT, Bench, wait_until

pytestmark = pytest.mark.broker

PARTITIONS = 2
KEPT = {"retention.ms": "-1"}
CODEC = build_codec()
AUTHOR = Author(at_ms=1_800_000_000_000, actor="ann", note="v3 is in")
UNKNOWN = UnknownSchemaError("schema fingerprint 00 is not known here")


class Rig(Bench):
    """An origin topic and a topic of dead letters."""

    def __init__(self, bootstrap: str, folder: Path, origin: str, dead: str) -> None:
        super().__init__(bootstrap, folder)
        self.origin = origin
        self.dead = dead
        self.settings = Settings(kafka=KafkaSettings(bootstrap_servers=bootstrap))

    @property
    def desk(self) -> Desk:
        return Desk(self.settings, CODEC, self.dead)

    def bury(self, records: list[Record], max_bytes: int = 4_000_000) -> None:
        """Write the letters that the runtime would write."""
        for record in records:
            letter = deadletters.of_record(record, UNKNOWN, "feedback_align")
            out = deadletters.to_output(letter, CODEC, max_bytes, self.dead)
            self.producer.produce(out.topic, key=out.key, value=out.value)
        self.flush()

    def cases(self) -> dict[Place, Case]:
        self.desk.drop(Selector(stage="none"), AUTHOR)
        return {case.letter.origin: case for case in self.desk.ledger().cases()}

    def published(self) -> list[Record]:
        """What is in the origin topic once every transaction has come to its end.

        A commit returns before its markers stand in all partitions; taking the transactional
        id over waits for them.
        """
        self.desk.drop(Selector(stage="none"), AUTHOR)
        return self.read(self.origin, PARTITIONS)


@pytest.fixture
def rig(
    kafka_bootstrap: str,
    create_topics: CreateTopics,
    unique_name: Callable[[str], str],
    tmp_path: Path,
) -> Iterator[Rig]:
    origin, dead = unique_name("origin"), unique_name("dead")
    create_topics({origin: (PARTITIONS, KEPT), dead: (3, KEPT)})
    made = Rig(kafka_bootstrap, tmp_path, origin, dead)
    yield made
    made.stop_all()


def record(rig: Rig, offset: int, **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "topic": rig.origin,
        "partition": offset % PARTITIONS,
        "offset": offset,
        "timestamp": 1_700_000_000_000 + offset,
        "key": b"s%d" % (offset % 5),
        "value": b"value %d" % offset,
        "headers": (("trace", b"\x00\xff"), ("trace", None)),
    }
    return Record(**(fields | changes))


def test_a_retry_publishes_records_as_they_were_once_and_in_order(rig: Rig) -> None:
    kept = [
        *(record(rig, offset) for offset in range(20)),
        record(rig, 20, key=None),
        record(rig, 21, key=b"", value=b"", headers=()),
    ]
    shuffled = kept.copy()
    random.Random(7).shuffle(shuffled)
    rig.bury(shuffled)

    plan = rig.desk.retry(Selector(), AUTHOR)
    assert len(plan.retry) == len(kept)
    found = rig.published()
    assert [(r.partition, r.key, r.value, origin_of(r)) for r in found] == [
        (r.partition, r.key, r.value, (r.topic, r.partition, r.offset))
        for partition in range(PARTITIONS)
        for r in kept
        if r.partition == partition
    ]
    own = {origin_of(r)[2]: r.headers[: -len(RETRY)] for r in found}
    assert own == {r.offset: tuple(r.headers) for r in kept}
    assert {dict(r.headers)[RETRY_ATTEMPT] for r in found} == {b"1"}

    again = rig.desk.retry(Selector(), AUTHOR)
    assert (again.retry, len(again.done)) == ((), len(kept))
    assert len(rig.published()) == len(kept)
    marks = [case.mark for case in rig.cases().values()]
    assert {(m.actor, m.note, m.attempt) for m in marks if m is not None} == {
        ("ann", "v3 is in", 1)
    }


RETRY = (RETRY_TOPIC, RETRY_PARTITION, RETRY_OFFSET, "letter", RETRY_ATTEMPT)


def origin_of(found: Record) -> tuple[str, int, int]:
    headers = dict(found.headers)
    topic, partition, offset = (
        (headers[name] or b"").decode() for name in (RETRY_TOPIC, RETRY_PARTITION, RETRY_OFFSET)
    )
    return topic, int(partition), int(offset)


def test_a_record_that_was_cut_is_refused_with_the_place_of_the_whole(rig: Rig) -> None:
    whole = record(rig, 4, value=b"x" * 200_000)
    rig.bury([whole, record(rig, 5)], max_bytes=100_000)
    plan = rig.desk.retry(Selector(), AUTHOR)
    assert [case.letter.origin.offset for case in plan.retry] == [5]
    (refusal,) = plan.refused
    assert f"bytes of the value (200000); the record stands at {rig.origin}/0/4" in refusal.why

    named = Selector(places=frozenset({Place(rig.origin, 0, 4), Place(rig.origin, 1, 5)}))
    with pytest.raises(DeadLetterError, match="nothing was retried"):
        rig.desk.retry(named, AUTHOR)


def test_a_dropped_letter_stays_and_comes_back_by_force(rig: Rig) -> None:
    rig.bury([record(rig, 4), record(rig, 5)])
    four = Selector(places=frozenset({Place(rig.origin, 0, 4)}))
    assert [mark.letter.origin.offset for mark in rig.desk.drop(four, AUTHOR)] == [4]
    assert rig.desk.drop(four, AUTHOR) == []
    assert {p.offset: case.state for p, case in rig.cases().items()} == {4: "dropped", 5: "open"}
    assert [case.letter.origin.offset for case in rig.desk.retry(Selector(), AUTHOR).retry] == [5]
    assert len(rig.desk.retry(four, AUTHOR, force=True).retry) == 1
    assert Counter(r.value for r in rig.published()) == {b"value 4": 1, b"value 5": 1}


def test_what_is_no_letter_is_counted_and_passed_over(rig: Rig) -> None:
    rig.bury([record(rig, 4)])
    rig.producer.produce(rig.dead, key=b"k", value=b"no letter", partition=0)
    rig.producer.produce(rig.dead, key=b"k", headers={MARK_HEADER: b"no mark"}, partition=0)
    rig.flush()
    ledger = rig.desk.ledger()
    assert (ledger.unreadable, len(ledger.cases())) == (2, 1)


def test_a_topic_that_is_gone_refuses_its_letters_alone(rig: Rig) -> None:
    rig.bury([record(rig, 4, topic="not-there"), record(rig, 5)])
    plan = rig.desk.retry(Selector(), AUTHOR)
    assert [case.letter.origin.offset for case in plan.retry] == [5]
    assert "there is no topic not-there any more" in plan.refused[0].why


def test_a_later_command_fences_an_earlier_one(rig: Rig) -> None:
    rig.bury([record(rig, offset) for offset in range(4)])
    earlier = rig.desk

    class Slow(Desk):
        """Reads its letters, then loses its place to another command."""

        def plan(self, *arguments: Any, **options: Any) -> Any:
            found = super().plan(*arguments, **options)
            earlier.retry(Selector(), AUTHOR)
            return found

    with pytest.raises(DeadLetterError, match="another dlq command took over"):
        Slow(rig.settings, CODEC, rig.dead).retry(Selector(), AUTHOR)
    assert len(rig.published()) == 4


def test_killed_at_any_moment_a_retry_goes_on_where_it_was(rig: Rig) -> None:
    kept = [record(rig, offset) for offset in range(60)]
    rig.bury(kept)
    chance = random.Random(11)
    for kills in range(40):
        with subprocess.Popen(
            [sys.executable, "-m", "tests.integration.dlq_retry", rig.bootstrap, rig.dead],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        ) as process:
            assert process.stdout is not None
            if kills < 4:
                # It has begun; let it get somewhere, then end it wherever it is.
                for _ in range(chance.randrange(1, 4)):
                    process.stdout.readline()
                time.sleep(chance.random() / 50)
                process.kill()
            done = process.wait(DEADLINE_S) == 0
        if done:
            break
    assert done
    found = rig.published()
    assert [(r.partition, r.value) for r in found] == [
        (r.partition, r.value) for p in range(PARTITIONS) for r in kept if r.partition == p
    ]
    assert {case.state for case in rig.cases().values()} == {"retried"}


def test_a_record_that_keeps_dying_is_known_and_refused(
    kafka_bootstrap: str,
    create_topics: CreateTopics,
    unique_name: Callable[[str], str],
    tmp_path: Path,
) -> None:
    prefix = unique_name("dying")
    create_topics(configs_of(prefix, PARTITIONS))
    names = topics_of(prefix)
    rig = Rig(kafka_bootstrap, tmp_path, names.turns, names.dead_letters)
    try:
        rig.worker(
            "tests.integration.align_worker",
            prefix,
            str(rig.config(worker={"group_instance_id": "one"})),
        ).wait_ready()
        good = DialogueTurn(
            event_id="e1",
            session_id="s",
            turn_id="t1",
            role=Role.USER,
            content="Hello",
            event_time=time.time_ns() // 1_000_000,
            source="test",
        )
        rig.producer.produce(names.turns, key=b"s", value=CODEC.encode(good))
        rig.producer.produce(names.turns, key=b"s", value=b"no record")
        rig.flush()
        for attempt in range(3):
            wait_until(lambda n=attempt: len(rig.cases()) == n + 1, "the letter")  # type: ignore[misc]
            (case,) = [case for case in rig.cases().values() if case.state == "open"]
            assert case.attempt == attempt
            assert len(rig.desk.retry(Selector(), AUTHOR).retry) == 1
        wait_until(lambda: len(rig.cases()) == 4, "the last letter")
        plan = rig.desk.retry(Selector(), AUTHOR)
        assert plan.retry == ()
        (refusal,) = plan.refused
        first = min(rig.cases(), key=lambda place: place.offset)
        assert f"its record died 4 times (first at {first})" in refusal.why
        assert refusal.case.root == first
        assert len(rig.desk.retry(Selector(), AUTHOR, force=True).retry) == 1
    finally:
        rig.stop_all()


class Cli:
    """The command line against one broker, on the letters about one topic."""

    def __init__(self, folder: Path, bootstrap: str) -> None:
        self._config = folder / "settings.yaml"
        values = {"data_dir": str(folder / "data"), "kafka": {"bootstrap_servers": bootstrap}}
        self._config.write_text(yaml.safe_dump(values), encoding="utf-8")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "streams.cli", "--config", str(self._config), "dlq"]
        return subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            cwd=ROOT,
            env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST")},
            check=False,
        )

    def json(self, *arguments: str) -> Any:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def test_the_command_line(
    kafka_bootstrap: str,
    create_topics: CreateTopics,
    unique_name: Callable[[str], str],
    tmp_path: Path,
) -> None:
    apply_inventory(KafkaSettings(), kafka_bootstrap, load_inventory())
    topic = unique_name("origin")
    create_topics({topic: (1, {})})
    producer = make_producer(KafkaSettings(), kafka_bootstrap)
    for offset, error in ((3, UNKNOWN), (4, UndecodableError("the first byte is [b]62[/b]"))):
        raw = Record(
            topic=topic, partition=0, offset=offset, timestamp=5, key=b"k", value=b"\xc3\x01x"
        )
        letter = deadletters.of_record(raw, error, "feedback_align")
        producer.produce(DEAD_LETTERS, key=b"k", value=CODEC.encode(letter))
    assert producer.flush(DEADLINE_S) == 0
    cli = Cli(tmp_path, kafka_bootstrap)

    groups = cli.json("list", "--topic", topic)
    assert [(g["stage"], g["reason"], g["open"]) for g in groups] == [
        ("feedback_align", "undecodable", 1),
        ("feedback_align", "unknown_schema", 1),
    ]
    table = cli.run("list", "--topic", topic)
    assert "unknown_schema" in table.stdout
    (shown,) = cli.json("show", f"{topic}/0/3")
    assert base64.b64decode(shown["value_base64"]) == b"\xc3\x01x"
    assert (shown["key"], shown["state"]) == ("k", "open")

    planned = cli.json("retry", f"{topic}/0/3", "--dry-run")
    assert planned["retried"] == [f"{topic}/0/3"]
    assert len(cli.json("list", "--topic", topic, "--letters")) == 2
    assert cli.json("retry", f"{topic}/0/3", "--actor", "ann")["retried"] == [f"{topic}/0/3"]
    assert cli.json("retry", f"{topic}/0/3")["retried_before"] == [f"{topic}/0/3"]
    dropped = cli.json("drop", "--topic", topic, "--reason", "undecodable", "--note", "junk")
    assert [mark["id"] for mark in dropped["dropped"]] == [f"{topic}/0/4"]
    wait_until(lambda: cli.json("list", "--topic", topic) == [], "no letter is open")

    out = tmp_path / "letters.jsonl"
    done = cli.run("export", "--topic", topic, "--state", "all", "--out", str(out))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert sorted((line["id"], line["state"]) for line in lines) == [
        (f"{topic}/0/3", "retried"),
        (f"{topic}/0/4", "dropped"),
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["retry"], 1, "say which letters"),
        (["retry", "nowhere/0/1"], 1, "there is no letter about nowhere/0/1"),
        (["show", "nonsense"], 1, "names no letter"),
        (["list", "--since", "yesterday"], 2, "'yesterday' is no time"),
        (["list", "--reason", "bad"], 2, "'bad' is no reason"),
        (["export", "--out", "/nowhere/x.jsonl"], 1, "cannot write /nowhere/x.jsonl"),
    ],
)
def test_what_is_wrong_is_named(
    kafka_bootstrap: str, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    apply_inventory(KafkaSettings(), kafka_bootstrap, load_inventory())
    done = Cli(tmp_path, kafka_bootstrap).run(*arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_letters_are_those_of_the_contract(rig: Rig) -> None:
    rig.bury([record(rig, 4)])
    (read,) = rig.read(rig.dead, 3)
    letter = CODEC.decode(read.value, DeadLetter)
    assert letter.reason is DeadLetterReason.UNKNOWN_SCHEMA
