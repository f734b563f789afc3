"""The worker's page: a running aligner says where each partition stands."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from streams.contracts import DialogueTurn, FeedbackEvent, FeedbackKind, Role
from streams.kafka.clients import partition_for
from streams.ports import free_ports
from streams.serde import build_codec
from tests.conftest import CreateTopics
from tests.integration.align_worker import configs_of, topics_of
from tests.integration.harness import Bench, WorkerProcess, wait_until

pytestmark = pytest.mark.broker

PARTITIONS = 2
RULES = {
    "settle_ms": 100,
    "gap_ms": 3_600_000,
    "max_open_ms": 7_200_000,
    "orphan_wait_ms": 1_000,
    "horizon_ms": 86_400_000,
}
CODEC = build_codec()
HOSTILE = "<script>alert(1)</script>"

Found = dict[str, Any]


class ViewBench(Bench):
    """An aligner with a web port, and what it answers."""

    def __init__(self, bootstrap: str, folder: Path, prefix: str) -> None:
        super().__init__(bootstrap, folder)
        self.prefix = prefix
        self.topics = topics_of(prefix)
        (self.port,) = free_ports(1)

    def start(self) -> WorkerProcess:
        config = self.config(
            align=RULES, worker={"align_web_port": self.port, "group_instance_id": "one"}
        )
        return self.worker("tests.integration.align_worker", self.prefix, str(config))

    def start_reward(self) -> WorkerProcess:
        config = self.config(worker={"reward_web_port": self.port})
        return self.worker("tests.integration.reward_worker", self.prefix, str(config))

    def get(self, path: str = "/", accept: str = "application/json") -> tuple[str, str]:
        """The content type and body of an answer."""
        headers, body = self.answer(path, accept)
        return headers.get_content_type(), body

    def answer(self, path: str, accept: str) -> tuple[Message, str]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", headers={"Accept": accept}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.headers, answer.read().decode()

    def status(self) -> Found:
        kind, body = self.get()
        assert kind == "application/json"
        found: Found = json.loads(body)
        return found

    def partition(self, number: int) -> Found:
        found: Found = next(p for p in self.status()["partitions"] if p["partition"] == number)
        return found

    def shows(self, condition: Callable[[Found], bool], number: int) -> Found:
        """Wait until what the worker says of a partition meets ``condition``."""
        wait_until(lambda: condition(self.partition(number)), "the page", 60, 0.2)
        return self.partition(number)

    def turn(self, session: str, role: Role, done: bool = False) -> None:
        record = DialogueTurn(
            event_id=f"{session}-{role}",
            session_id=session,
            turn_id=f"{session}-{role}",
            role=role,
            content="text",
            event_time=time.time_ns() // 1_000_000,
            source="test",
            session_done=done,
        )
        self.send(self.topics.turns, record)

    def thumb(self, session: str) -> None:
        record = FeedbackEvent(
            event_id=f"{session}-thumb",
            session_id=session,
            turn_id=f"{session}-{Role.ASSISTANT}",
            kind=FeedbackKind.THUMB,
            value=1.0,
            event_time=time.time_ns() // 1_000_000,
            source="test",
        )
        self.send(self.topics.feedback, record)

    def send(self, topic: str, record: DialogueTurn | FeedbackEvent) -> None:
        self.producer.produce(topic, key=record.session_id, value=CODEC.encode(record, topic))
        assert self.producer.flush(30) == 0

    def samples(self) -> dict[tuple[str, str], float]:
        """What ``/metrics`` shows, by name and partition."""
        _, body = self.get("/metrics")
        return {
            (sample.name, sample.labels.get("partition", "")): sample.value
            for family in text_string_to_metric_families(body)
            for sample in family.samples
        }


@pytest.fixture
def bench(
    kafka_bootstrap: str,
    create_topics: CreateTopics,
    unique_name: Callable[[str], str],
    tmp_path: Path,
) -> Iterator[ViewBench]:
    prefix = unique_name("view")
    create_topics(configs_of(prefix, PARTITIONS))
    made = ViewBench(kafka_bootstrap, tmp_path, prefix)
    yield made
    made.stop_all()


def _home(session: str) -> int:
    return partition_for(session.encode(), PARTITIONS)


def test_a_worker_shows_its_partitions_and_their_oldest_open_session(bench: ViewBench) -> None:
    first, second = (
        next(s for s in map((HOSTILE + "{}").format, range(99)) if _home(s) == p) for p in (0, 1)
    )
    before_ms = time.time_ns() // 1_000_000
    bench.turn(first, Role.USER)
    bench.turn(second, Role.USER)
    bench.turn(first + "-younger", Role.USER)
    bench.start().wait_ready(60)

    one = bench.shows(lambda p: p["status"]["open_sessions"] > 0, 0)
    oldest = one["status"]["oldest_open"]
    assert (oldest["policy"], oldest["session_id"]) == ("default", first)
    assert before_ms - 1_000 <= oldest["since_ms"] <= time.time_ns() // 1_000_000
    assert oldest["due_ms"] == oldest["since_ms"] + RULES["max_open_ms"]
    assert one["status"]["next_due_ms"] == oldest["due_ms"]
    assert one["overdue_ms"] == 0
    assert 0 <= one["event_time_lag_ms"] < 3_600_000
    other = bench.shows(lambda p: p["status"]["open_sessions"] > 0, 1)
    assert other["status"]["oldest_open"]["session_id"] == second
    sessions = [one["status"]["sessions"], other["status"]["sessions"]]
    assert sum(sessions) == 3

    found = bench.status()
    assert (found["processor"], found["application"]) == ("feedback_align", bench.prefix)
    assert [p["partition"] for p in found["partitions"]] == [0, 1]
    assert found["restoring"] == []

    headers, page = bench.answer("/", "text/html,*/*;q=0.8")
    assert headers.get_content_type() == "text/html"
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert headers["Cache-Control"] == "no-store"
    assert bench.answer("/", "*/*")[0]["X-Content-Type-Options"] == "nosniff"
    assert "Partition 0" in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<script" not in page


def test_the_page_follows_what_happens_and_the_gauges_say_the_same(bench: ViewBench) -> None:
    worker = bench.start()
    worker.wait_ready(60)
    partition = _home("s")
    bench.turn("s", Role.USER)
    opened = bench.shows(lambda p: p["status"]["open_sessions"] == 1, partition)
    turns, feedback = opened["topics"]
    assert (turns["topic"], feedback["topic"]) == (bench.topics.turns, bench.topics.feedback)
    bench.turn("s", Role.ASSISTANT, done=True)
    bench.thumb("s")

    def is_done(p: Found) -> bool:
        applied = [topic["applied_offset"] or -1 for topic in p["topics"]]
        return p["status"]["open_sessions"] == 0 and applied[0] >= 1

    closed = bench.shows(is_done, partition)
    assert closed["status"]["oldest_open"] is None
    assert closed["status"]["sessions"] == 1
    assert closed["status"]["state_entries"] > 0
    assert closed["status"]["state_bytes"] > 0
    assert closed["last_transaction_s"] > 0
    wait_until(lambda: _caught_up(bench.partition(partition)), "no lag", 60, 0.2)

    label = str(partition)
    wait_until(
        lambda: bench.samples().get(("clawstream_sessions", label)) == 1, "the gauges", 60, 0.2
    )
    samples = bench.samples()
    assert samples["clawstream_state_bytes", label] > 0
    assert samples["clawstream_open_sessions", label] == 0
    assert samples["clawstream_oldest_open_session_seconds", label] == 0
    assert samples["clawstream_overdue_seconds", label] < 30
    assert samples["clawstream_event_time_lag_seconds", label] >= 0
    clock_s = samples["clawstream_partition_clock_seconds", label]
    assert abs(clock_s - closed["status"]["clock_ms"] / 1000) < 60


def _caught_up(partition: Found) -> bool:
    return all(
        topic["lag_records"] == 0
        and topic["buffered_records"] == 0
        and topic["end_offset"] > topic["applied_offset"]
        for topic in partition["topics"]
    )


def test_a_reward_worker_has_the_same_page(bench: ViewBench, create_topics: CreateTopics) -> None:
    create_topics({f"{bench.prefix}.{name}": (PARTITIONS, {}) for name in ("scored", "reviews")})
    bench.start_reward().wait_ready(60)
    found = bench.status()
    assert found["processor"] == "reward"
    assert [p["partition"] for p in found["partitions"]] == [0, 1]
    one = bench.partition(0)
    assert [topic["topic"] for topic in one["topics"]] == [bench.topics.segments]
    assert one["status"]["clock_ms"] is None
    assert "No session is open." in bench.get(accept="text/html")[1]


def test_faust_s_own_pages_are_off(bench: ViewBench) -> None:
    bench.start().wait_ready(60)
    for path in ("/router/", "/table/", "/graph/"):
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            bench.get(path)
        refused.value.close()
